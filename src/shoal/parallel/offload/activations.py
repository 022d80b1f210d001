"""Offload of activations: what recomputed blocks save is kept in host memory between forward and backward.

Copies start on a stream of their own when a block's forward pass begins (its input) or while it runs (what a selective
block saves). They have the length of the next block's forward pass to finish; then the device tensors are freed. In the
backward pass, a block's tensors are prefetched ``HORIZON`` blocks before they are needed.
``facts/layout/offload_activations.py`` decides which blocks offload.

Autograd passes what it saves to hooks (``torch.autograd.graph.saved_tensors_hooks``): around an eager block that is
what checkpointing saves, its input; around a compiled one it is all that its graph saves, including weights, which
stay. What eager selective recomputation saves goes through a torch dispatch mode, here one of our own. On a CPU there
are no streams and copies are synchronous; everything else is the same.

``@nvme``: a tensor is written from its buffer to a file, and the buffer is free when the next block's forward pass
ends; prefetching reads it back into a buffer. The host holds what two blocks save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.facts.layout.offload_activations import HORIZON, blocks_away
from shoal.parallel.offload.direct_files import Files, FileTransfer
from shoal.parallel.offload.host_memory import HostBuffer, HostMemory
from shoal.parallel.recompute import keeps, selective_contexts
from shoal.parallel.stage_module import StageModule

Forward = Callable[..., Tensor]


class CopyStreams:
    """Copies between a device and host memory, with one stream per direction."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory, device = memory, memory.device
        self.out, self.back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def leave(self, tensor: Tensor, buffer: HostBuffer) -> torch.cuda.Event | None:
        """Copy a tensor out once it is computed; wait for the returned event before freeing it."""
        if self.out is None:
            buffer.like(tensor).copy_(tensor)
            return None
        self.out.wait_stream(torch.cuda.current_stream())
        if buffer.read is not None:
            self.out.wait_event(buffer.read)
        with torch.cuda.stream(self.out):
            buffer.like(tensor).copy_(tensor, non_blocking=True)
        return self.out.record_event()

    def come_back(
        self, tensor: Tensor, buffer: HostBuffer, left: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy a buffer into a device tensor; wait for the returned event before reading it."""
        if self.back is None:
            tensor.copy_(buffer.like(tensor))
            return None
        # Kernels issued so far may still read whatever used the tensor's memory before.
        self.back.wait_stream(torch.cuda.current_stream())
        if left is not None:
            self.back.wait_event(left)
        with torch.cuda.stream(self.back):
            tensor.copy_(buffer.like(tensor), non_blocking=True)
        buffer.read = self.back.record_event()
        return buffer.read


class ActivationFiles:
    """A pool of files, by size, that tensors use one after the other."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._free: dict[int, list[str]] = {}
        self._made = 0

    def take(self, size: int) -> str:
        if free := self._free.get(size):
            return free.pop()
        name, self._made = f"activation-{self._made:05d}", self._made + 1
        self.files.make(name, size)
        return name

    def give_back(self, name: str, size: int) -> None:
        self._free.setdefault(size, []).append(name)


class OffloadedTensor:
    """A device tensor whose values are in host memory, or in a file."""

    def __init__(self, tensor: Tensor, streams: CopyStreams, disk: ActivationFiles | None = None) -> None:
        self._streams, self._disk = streams, disk
        self._size = tensor.numel() * tensor.element_size()
        self._file: str | None = None
        self._moving: FileTransfer | None = None  # between buffer and file
        self._buffer: HostBuffer | None = None
        if disk is not None:
            self._file = disk.take(self._size)
        self._buffer = self._take_buffer()
        self._leaving: Tensor | None = tensor
        self._left = streams.leave(tensor, self._buffer)
        self._place = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._here: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if disk is not None and self._file is not None:
            copied = None if self._left is None else self._left.synchronize
            self._moving = disk.files.write(self._file, self._buffer.bytes, after=copied)

    def let_go(self) -> None:
        """Free the device tensor once it is copied, and the buffer once its bytes are in a file."""
        if self._left is not None and self._leaving is not None:
            torch.cuda.current_stream().wait_event(self._left)
        self._leaving = None
        if self._file is not None and self._here is None:
            self._free_buffer()

    def ask_back(self) -> None:
        """Start bringing it back, unless that has begun."""
        if self._here is not None or (self._buffer is None and self._file is None):
            return
        size, stride, dtype, device = self._place
        self._here = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if self._disk is None or self._file is None:
            self._copy_back()
            return
        if self._buffer is None:
            self._buffer = self._take_buffer()
            if self._buffer.read is not None:
                self._buffer.read.synchronize()
            self._moving = self._disk.files.read(self._file, self._buffer.bytes)

    def take(self) -> Tensor:
        """The tensor, now owned by the caller."""
        self.ask_back()
        if self._here is None:
            raise RuntimeError("an offloaded activation was asked for twice: backward passes run once here")
        if self._file is not None:
            self._copy_back()
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        here, self._here = self._here, None
        return here

    def _take_buffer(self) -> HostBuffer:
        memory = self._streams.memory
        return memory.take(self._size) if self._disk is None else self._disk.files.room(memory, self._size)

    def _copy_back(self) -> None:
        assert self._here is not None and self._buffer is not None
        if self._moving is not None:
            self._moving.result()
        self._arrived = self._streams.come_back(self._here, self._buffer, self._left)
        self._free()

    def _free(self) -> None:
        self._free_buffer()
        if self._disk is not None and self._file is not None:
            self._disk.give_back(self._file, self._size)
            self._file = None

    def _free_buffer(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.result()
        if self._buffer is not None:
            self._streams.memory.give_back(self._buffer)
            self._buffer = None

    def __del__(self) -> None:
        # Never used, as after a forward pass without a backward pass.
        with suppress(OSError, RuntimeError):
            self._free()


class KeptBlock:
    """What one block saves for one micro-batch, and the block before it."""

    def __init__(self, before: KeptBlock | None) -> None:
        self.before = before
        self.away: list[OffloadedTensor] = []

    def come(self) -> None:
        """Its backward pass begins: bring back all of it, and prefetch what earlier blocks saved."""
        kept: KeptBlock | None = self
        for _ in range(1 + HORIZON):
            if kept is None:
                break
            for one in kept.away:
                one.ask_back()
            kept = kept.before
        # The next one prefetches those before it.
        self.before = None


class ActivationOffload:
    """The blocks of a rank whose activations are offloaded to host memory or files."""

    def __init__(self, memory: HostMemory, fraction: float, files: Files | None = None) -> None:
        self._streams, self._fraction = CopyStreams(memory), fraction
        self._disk = ActivationFiles(files) if files is not None else None
        # Set while the forward pass of a block that offloads is running.
        self._running: KeptBlock | None = None
        self._last: KeptBlock | None = None

    def watch(self, segments: Sequence[StageModule]) -> None:
        """Make the blocks, recomputed and maybe compiled, offload what they save."""
        for segment in segments:
            blocks: list[nn.Module] = list(segment.network.model.layers.values())
            away = blocks_away(len(blocks), self._fraction, segment.stage.first, segment.stage.last)
            for number, block in enumerate(blocks):
                at_end = number == len(blocks) - 1
                block.forward = partial(self._run, block, block.forward, number == 0, number in away, at_end)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts for the forward pass of an eager selective block and for its recomputation."""
        if self._running is None:
            return selective_contexts()
        products: list[OffloadedTensor] = []
        return _SendingAway(self._running, products, self._away), _HandingBack(products)

    def _away(self, tensor: Tensor) -> OffloadedTensor:
        return OffloadedTensor(tensor, self._streams, self._disk)

    def _run(
        self, block: nn.Module, forward: Forward, first: bool, away: bool, at_end: bool, *arguments: Any
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        before = None if first else self._last
        kept = self._last = KeptBlock(before)
        self._running = kept if away else None
        stay = _storages(block.parameters()) | _storages(_tensors(arguments[1:])) if away else set()

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            if not away or not _leaves(tensor, stay):
                return tensor
            kept.away.append(self._away(tensor))
            return kept.away[-1]

        def unpack(saved: Tensor | OffloadedTensor) -> Tensor:
            kept.come()
            return saved.take() if isinstance(saved, OffloadedTensor) else saved

        with saved_tensors_hooks(pack, unpack):
            output = forward(*arguments)
        self._running = None
        if at_end:
            self._last = None
        # A block's copies may run until the end of the next block's forward pass; the last block's finish here.
        for one in [*(before.away if before else []), *(kept.away if at_end else [])]:
            one.let_go()
        return output


class _SendingAway(TorchDispatchMode):
    """Offloads the matmul results that selective recomputation saves."""

    def __init__(
        self, kept: KeptBlock, products: list[OffloadedTensor], away: Callable[[Tensor], OffloadedTensor]
    ) -> None:
        super().__init__()
        self._kept, self._products, self._away = kept, products, away

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if keeps(func, args):
            self._products.append(self._away(result.detach()))
            self._kept.away.append(self._products[-1])
        return result


class _HandingBack(TorchDispatchMode):
    """Returns the saved results in place of recomputing them."""

    def __init__(self, products: list[OffloadedTensor]) -> None:
        super().__init__()
        self._products = iter(products)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if keeps(func, args):
            return next(self._products).take()
        return func(*args, **(kwargs or {}))


def _leaves(tensor: Tensor, stay: set[int]) -> bool:
    """Whether to offload a saved tensor: only activations that a copy restores exactly, without gaps or repeated
    elements.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0 or id(tensor.untyped_storage()) in stay:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def _storages(tensors: Any) -> set[int]:
    # A storage keeps one Python object for life.
    return {id(tensor.untyped_storage()) for tensor in tensors}


def _tensors(arguments: Any) -> list[Tensor]:
    """Tensors among the arguments that all blocks share, such as position tables."""
    found = []
    for one in arguments:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, tuple):
            found.extend(_tensors(one))
    return found
