"""Kernels of our own, which need Triton: it comes with torch for GPUs, and with no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

Kernel = TypeVar("Kernel")


@cache
def in_triton(make: Callable[[Any, Any], Kernel]) -> Kernel | None:
    """What ``make`` makes of ``triton`` and ``triton.language``, once; None where there is no Triton."""
    try:
        return make(import_module("triton"), import_module("triton.language"))
    except ImportError:
        return None
