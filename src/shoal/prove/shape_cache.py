"""Cache what operators do to tensor shapes in a dry run, which repeats the same shapes over and over.

torch caches too, but inspects so much of every argument that the lookup takes most of a dry run. This cache covers only
simple cases: operators whose results are new tensors, views of their first argument, or the one tensor they write to,
keyed by the shapes of their arguments. On a miss torch's meta kernels are called directly, without the Python around
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Private, like everything in torch that runs without data (2.11 to 2.13).
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from shoal.observe.subclasses import plain_tensors

CPU = torch.device("cpu")


class OutputShape(NamedTuple):
    """A tensor that fills its storage, or a view of the first argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int | torch.SymInt
    view: bool

    def __call__(self, wrapped: Callable[[torch.Tensor], FakeTensor], first: Any) -> FakeTensor:
        if self.view:
            inner = torch.empty(0, dtype=self.dtype, device="meta")
            inner.set_(first.untyped_storage(), self.offset, self.shape, self.stride)
        else:
            inner = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return wrapped(inner)


# An operator's cached result: one tensor or several. None: ask torch. Shared by all dry runs of this process, because
# equal shapes give equal results.
Made = OutputShape | list[OutputShape] | tuple[OutputShape, ...]
_RULES: dict[Any, str | None] = {}
_RESULTS: dict[Any, Made | None] = {}


class ShapeCache:
    """Runs operators for a fake-tensor mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[
            str, Any
        ] = {}  # of every tensor of this mode, as torch's constructor sets them

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _RULES:
            _RULES[func] = _rule(func)
        rule = _RULES[func]
        if rule == "passes":
            with in_kernel_invocation_manager(self._mode):
                return func(*args, **kwargs)
        key = _key(func, args, kwargs) if rule else None
        if key is None:
            return func(*args, **kwargs)
        if key not in _RESULTS:
            if not isinstance(args[0] if args else None, torch.Tensor) or kwargs.get("device") is not None:
                # Tensors created from nothing, or for a device, are made by torch's mode, which knows the device.
                result = func(*args, **kwargs)
                ours = rule == "makes" and _is_ours(result)
                _RESULTS[key] = _remembered(result, args) if ours else None
                return result
            _RESULTS[key] = self._found(func, args, kwargs)
        made = _RESULTS[key]
        if made is None:
            return func(*args, **kwargs)
        if rule != "makes":
            written = args[0] if rule == "writes" else kwargs["out"]
            written.constant = None  # invalidate the number it was created from, if any
            return written
        with no_dispatch():
            first = args[0] if args else None
            if isinstance(made, OutputShape):
                return made(self._wrapped, first)
            results = [one(self._wrapped, first) for one in made]
            return results if isinstance(made, list) else tuple(results)

    def _wrapped(self, inner: torch.Tensor) -> FakeTensor:
        """``FakeTensor(mode, inner, CPU)``, whose constructor takes longer than all else here: it runs once, and what
        it has set is copied from then on."""
        if not self._attributes:
            first = FakeTensor(self._mode, inner, CPU)
            self._attributes = dict(vars(first))
            return first
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, inner, inner.requires_grad, dispatch_device=True, device_for_backend_keys=CPU
        )
        if self._mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made

    def _found(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | None:
        with in_kernel_invocation_manager(self._mode):
            written = kwargs.get("out")
            shape = None if written is None else written.shape
            try:
                result = func(*args, **kwargs)
            except NotImplementedError:
                return None  # no meta kernel; torch falls back to something else
            if written is None:
                return _remembered(result, args)
            # A result that had to be resized is not a simple case.
            return _remembered(result, (written,)) if written.shape == shape else None


def _rule(func: Any) -> str | None:
    """Whether an operator creates a tensor, writes to its first argument, or fills ``out`` and returns it.

    Collectives that fill their arguments, and profiler marks without tensors, have no shape to compute.
    """
    schema = func._schema
    if func.namespace in ("c10d", "profiler"):
        return "passes"
    if func.namespace != "aten":
        return None
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    if not any(written):
        return "makes"
    if sum(written) > 1 or len(schema.returns) != 1:
        return None
    if written[0]:
        # Operators that change their argument's shape are not a simple case.
        return "writes" if torch.Tag.inplace_view not in func.tags else None
    return "fills" if written[-1] and schema.arguments[-1].name == "out" else None


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None if the result depends on more than plain values and shapes of tensors without data."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if not _is_ours(value):
                return None
            parts.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif isinstance(value, (list, tuple)):
            inside = _key(list, tuple(value), {})
            if inside is None:
                return None
            parts.append(inside)
        else:
            # 1, True and 1.0 are equal as keys, but do not give equal results.
            parts.append((type(value), value))
    parts.extend(kwargs)
    return tuple(parts)


def _is_ours(value: Any) -> bool:
    return type(value) is FakeTensor and value.fake_device == CPU and value.layout == torch.strided


def _remembered(result: Any, args: tuple[Any, ...]) -> Made | None:
    """What to cache of a result: None if a tensor is neither a view nor new with a storage of its own size."""
    given = [_storage(one) for one in plain_tensors(args)]
    first = _storage(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    made: list[OutputShape] = []
    for one in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(one, torch.Tensor) or one.layout != torch.strided:
            return None
        storage, offset = one.untyped_storage(), one.storage_offset()
        view = storage._cdata == first
        fills = not offset and storage.nbytes() == one.numel() * one.element_size()
        if not view and (storage._cdata in given or not fills):
            return None
        if not view:
            given.append(storage._cdata)
        made.append(OutputShape(one.shape, one.stride(), one.dtype, offset, view))
    if isinstance(result, torch.Tensor):
        return made[0]
    return made if isinstance(result, list) else tuple(made)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
