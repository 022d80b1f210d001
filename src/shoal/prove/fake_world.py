"""A fake world: one rank of any number runs alone, on tensors without data.

The rank's own code runs as always. Its process group completes every collective at once and transfers nothing; its
tensors have shapes, dtypes and storages of the right size, but no values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Private, like everything in torch that runs without data (2.11 to 2.13).
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.facts.layout import Layout
from shoal.observe.attribution import current_node
from shoal.observe.subclasses import takes_itself_apart
from shoal.parallel.mesh import Mesh
from shoal.parallel.offload.direct_files import FilePart
from shoal.parallel.offload.host_memory import HostBuffer, HostMemory
from shoal.prove.shape_cache import ShapeCache
from shoal.train import adamw, blockwise_adamw, rounded_sgd, rounding


@contextmanager
def fake_rank(layout: Layout, rank: int, transport: str, domain: int | None = None) -> Iterator[Mesh]:
    """Make this process one rank of a layout's world, which pretends to communicate over ``transport``."""
    if layout.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.world)
    mesh = Mesh(layout, rank, torch.device("cpu"), transport=transport, domain=domain)
    try:
        # A message that is never sent never completes; pretend that it has.
        with patch.object(dist.Work, "is_completed", lambda work: True):
            yield mesh
    finally:
        mesh.close()


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors created inside the context have no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as patches:
        patches.enter_context(patch.object(FakeTensor, "tolist", _ones))
        for module in (adamw, blockwise_adamw, rounded_sgd, rounding):
            patches.enter_context(patch.object(module, "parts", _first_and_last(rounding.parts)))
        with mode, _Readings(ShapeCache(mode)):
            yield


def _first_and_last(parts: Callable[..., Iterator[slice]]) -> Callable[..., Iterator[slice]]:
    """Only the first and last part of an update that goes through a weight in parts: all but the last are alike, and
    no part keeps anything for the next. A matrix has hundreds of parts, which would take most of a dry run.
    """

    def ends(*arguments: int) -> Iterator[slice]:
        every = list(parts(*arguments))
        yield from every[:1]
        yield from every[1:][-1:]

    return ends


def _ones(tensor: FakeTensor) -> Any:
    """Like ``_Readings``, all at once: torch reads a tensor without data number by number."""
    read: Any = 1.0 if tensor.dtype.is_floating_point else 1
    for size in reversed(tensor.shape):
        read = [read] * size
    return read


class SizeOnlyFiles:
    """Files of a dry run: counts what would be on disk, and moves nothing."""

    parts = ()

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}

    @property
    def content(self) -> int:
        return sum(self._sizes.values())

    def make(self, name: str, size: int) -> None:
        self._sizes[name] = size

    def room(self, memory: HostMemory, size: int) -> HostBuffer:
        return memory.take(size)

    def write(
        self, name: str, tensor: torch.Tensor, start: int = 0, after: Callable[[], None] | None = None
    ) -> SizeOnlyFiles:
        return self.read(name, tensor, start)

    def read(
        self, name: str, tensor: torch.Tensor, start: int = 0, after: Callable[[], None] | None = None
    ) -> SizeOnlyFiles:
        assert start + tensor.nbytes <= self._sizes[name]
        return self

    def each(self, name: str, move: Callable[[FilePart], None], writes: bool) -> SizeOnlyFiles:
        assert name in self._sizes
        return self

    def remove(self, name: str) -> None:
        del self._sizes[name]

    def mapped(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def done(self) -> bool:
        return True

    def result(self) -> None: ...

    def close(self) -> None: ...


class Mode(TorchDispatchMode):
    """A dispatch mode without the wrappers that keep torch's compiler away: a dry run compiles nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class SumsInPlace(Mode):
    """Adds gradients in place. Autograd does so if it holds the only reference, except while a dispatch mode is active.

    Enter it last, because modes above it would hold references too. Only for tensors without data: an autograd formula
    may also add, and need its original operand afterwards.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            # Like in _Readings, but here on top of all modes, which would only pass it on.
            return args[0].fake_device
        if takes_itself_apart(types):
            return NotImplemented
        if func is torch.ops.aten.add.Tensor and not kwargs:
            # Autograd adds to a tensor without other references. The call adds some references; they are counted here
            # and not further down, because how many a call adds depends on whether torch.compile was used in this
            # process.
            alone = args[0]._use_count() == 4 and sys.getrefcount(args[0]) == 3
            if alone and _is_autograds_sum(args[0]):
                return torch.ops.aten.add_.Tensor(*args)
        return func(*args, **(kwargs or {}))


def _is_autograds_sum(tensor: Any) -> bool:
    """Whether autograd itself accumulates into this tensor, which is not a view."""
    if current_node() is None or tensor._is_view():
        return False
    # Exclude additions by Python code in a backward pass: autograd's own come directly from where the pass was started.
    caller = sys._getframe(2)
    while caller.f_back is not None and caller.f_code.co_name in (
        "_fn",
        "inner",
    ):  # wrappers around every mode
        caller = caller.f_back
    return caller.f_code.co_name == "_engine_run_backward"


class _Readings(Mode):
    """Reading a number from a tensor without data gives 1: a finite loss and a finite norm, so the step continues."""

    def __init__(self, shapes: ShapeCache) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            # Requested more often than everything else together; answer it here.
            return args[0].fake_device
        if takes_itself_apart(types):
            return NotImplemented
        if func is not torch.ops.aten._local_scalar_dense.default:
            return self._shapes(func, args, kwargs or {})
        try:
            return func(*args)
        except DataDependentOutputException:
            return 1.0 if args[0].dtype.is_floating_point else 1
