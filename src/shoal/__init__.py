"""Shoal's library interface: ``shoal.plan``, ``shoal.predict``, ``Layout``, ``Cluster``, ``Model``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.facts.cluster import Cluster
    from shoal.facts.layout import Layout
    from shoal.facts.model import Model

__all__ = ["Cluster", "Layout", "Model", "__version__", "plan", "predict"]

# Imported when they are first asked for, so that ``import shoal`` costs nothing. ``plan`` and ``predict`` are packages
# that can be called (facts/callable_package.py).
_PLACES = {
    "Cluster": "shoal.facts.cluster",
    "Layout": "shoal.facts.layout",
    "Model": "shoal.facts.model",
    "plan": "shoal.plan",
    "predict": "shoal.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    module = import_module(_PLACES[name])
    return module if name in ("plan", "predict") else getattr(module, name)
