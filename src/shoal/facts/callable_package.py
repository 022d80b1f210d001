"""Let a package be called: ``shoal.plan`` and ``shoal.predict`` are packages and the library's functions at once.

Plain functions of these names would not last: importing a package puts it in their place.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, function: str) -> None:
    """A call of ``package`` calls ``function`` ("module:name"), which is imported then."""

    class CallablePackage(ModuleType):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            module, _, name = function.partition(":")
            return getattr(import_module(module), name)(*arguments, **options)

    sys.modules[package].__class__ = CallablePackage
