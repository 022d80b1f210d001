"""Custom Triton kernels. Triton comes with torch for GPUs only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

Kernel = TypeVar("Kernel")


@cache
def in_triton(make: Callable[[Any, Any], Kernel]) -> Kernel | None:
    """The result of ``make(triton, triton.language)``, cached; None without Triton."""
    try:
        return make(import_module("triton"), import_module("triton.language"))
    except ImportError:
        return None
