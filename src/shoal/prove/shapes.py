"""What an operator makes of tensors without data, remembered: a step does the same to the same shapes over and over.

torch remembers too, but looks at so much of every argument that finding what it remembers takes most of a dry run.
Remembered here is only what is simple: operators that return one tensor, a new one or a view of their first argument,
by the shapes of those they are given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# Private, as all of torch that runs without data is (2.11 to 2.13).
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

CPU = torch.device("cpu")


class Made(NamedTuple):
    """A tensor that fills its storage, or a view of the first argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int | torch.SymInt
    view: bool


class Shapes:
    """Carries out operators for a mode without data."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._simple: dict[Any, bool] = {}
        # None: not to be made by us.
        self._made: dict[Any, Made | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        simple = self._simple.get(func)
        if simple is None:
            simple = self._simple[func] = _returns_one_tensor(func)
        key = _key(func, args, kwargs) if simple else None
        if key is None:
            return func(*args, **kwargs)
        if key not in self._made:
            result = func(*args, **kwargs)
            self._made[key] = _made(result, args)
            return result
        made = self._made[key]
        if made is None:
            return func(*args, **kwargs)
        with no_dispatch():
            if made.view:
                inner = torch.empty(0, dtype=made.dtype, device="meta")
                inner.set_(args[0].untyped_storage(), made.offset, made.shape, made.stride)
            else:
                inner = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        return FakeTensor(self._mode, inner, CPU)


def _returns_one_tensor(func: Any) -> bool:
    schema = func._schema
    if func.namespace != "aten" or len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return False
    aliased = [one.alias_info for one in (*schema.arguments, *schema.returns) if one.alias_info is not None]
    of_first = schema.arguments and schema.arguments[0].alias_info is not None and len(aliased) == 2
    return not aliased or bool(of_first and not any(one.is_write for one in aliased))


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None where it depends on more than plain values and the shapes of tensors without data."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.values()):
        if type(value) is FakeTensor and value.fake_device == CPU:
            parts.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif isinstance(value, (list, tuple)):
            if any(isinstance(one, torch.Tensor) for one in value):
                return None
            parts.append(tuple(value))
        elif isinstance(value, torch.Tensor):
            return None
        else:
            # 1 and True and 1.0 are the same key, but do not make the same.
            parts.append((type(value), value))
    parts.extend(kwargs)
    return tuple(parts) if any(type(value) is FakeTensor for value in args) else None


def _made(result: Any, args: tuple[Any, ...]) -> Made | None:
    """What to remember of a result: nothing where it is neither new and as large as its storage nor a view."""
    if type(result) is not FakeTensor or result.fake_device != CPU or result.layout != torch.strided:
        return None
    storage, offset = result.untyped_storage(), result.storage_offset()
    sharing = [type(one) is FakeTensor and one.untyped_storage()._cdata == storage._cdata for one in args]
    if not any(sharing) and (offset or storage.nbytes() != result.numel() * result.element_size()):
        return None
    if any(sharing[1:]):
        return None
    return Made(result.shape, result.stride(), result.dtype, offset, sharing[0])
