"""Tensor subclasses under observation: which dispatch unwraps them, and which plain tensors they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Private, and the only name under which torch provides it (2.11 to 2.13); the class has not moved since 2.0.
from torch._subclasses import FakeTensor


def takes_itself_apart(types: Sequence[type]) -> bool:
    """Whether an operator on these types first splits into operators on plain tensors, as DTensor's does.

    An observer then returns NotImplemented: the subclass runs, and the operators it issues reach the observer. If the
    observer called the operator itself, it would be disabled for everything inside.
    """
    return any(_is_wrapper(kind) and not issubclass(kind, FakeTensor) for kind in types)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts; wrappers such as DTensor yield what they wrap."""
    if _is_wrapper(type(value)):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain_tensors(item)
    elif isinstance(value, dict):
        yield from plain_tensors(list(value.values()))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape and a device but no data."""
    return isinstance(tensor, FakeTensor)


# Asked of every argument of every operator; there are a dozen kinds.
_WRAPPERS: dict[type, bool] = {}


def _is_wrapper(kind: type) -> bool:
    if kind not in _WRAPPERS:
        _WRAPPERS[kind] = hasattr(kind, "__tensor_flatten__")
    return _WRAPPERS[kind]
