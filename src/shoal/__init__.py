"""The library: ``run`` and ``launch`` train, ``parity`` and ``dryrun`` prove, ``plan`` and ``predict`` plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.facts.cluster import Cluster
    from shoal.facts.layout import Layout
    from shoal.facts.model import Model
    from shoal.facts.problem import BadInput
    from shoal.launch.library import launch, run
    from shoal.plan.report import plan
    from shoal.predict.library import predict
    from shoal.prove.module_dryrun import dryrun
    from shoal.prove.module_parity import parity
    from shoal.train.library.run import Run

__all__ = [
    "BadInput",
    "Cluster",
    "Layout",
    "Model",
    "Run",
    "__version__",
    "dryrun",
    "launch",
    "parity",
    "plan",
    "predict",
    "run",
]

# Imported when they are first asked for, so that ``import shoal`` costs nothing. ``launch``, ``plan`` and ``predict``
# are packages that can be called (facts/callable_package.py).
_PLACES = {
    "BadInput": "shoal.facts.problem",
    "Cluster": "shoal.facts.cluster",
    "Layout": "shoal.facts.layout",
    "Model": "shoal.facts.model",
    "Run": "shoal.train.library.run",
    "dryrun": "shoal.prove.module_dryrun",
    "launch": "shoal.launch",
    "parity": "shoal.prove.module_parity",
    "plan": "shoal.plan",
    "predict": "shoal.predict",
    "run": "shoal.launch.library",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    module = import_module(_PLACES[name])
    return module if name in ("launch", "plan", "predict") else getattr(module, name)
