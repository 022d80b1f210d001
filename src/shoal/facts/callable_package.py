"""Make packages callable: ``shoal.plan`` and ``shoal.predict`` are packages and library functions at once.

Plain functions under these names would be replaced as soon as the package is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, function: str) -> None:
    """Make ``package`` callable as ``function`` ("module:name"), imported on the first call."""

    class CallablePackage(ModuleType):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            module, _, name = function.partition(":")
            return getattr(import_module(module), name)(*arguments, **options)

    sys.modules[package].__class__ = CallablePackage
