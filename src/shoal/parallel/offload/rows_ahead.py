"""Prefetch rows from files before FSDP asks for them (``zero=3`` with ``offload=params@nvme``).

FSDP asks for a unit's rows as it gathers, and waits for them. So once it has asked for all rows of a unit of blocks,
the next unit's rows start moving to host memory: in the forward pass those of the unit after it, in the backward pass
those of the unit before it. They are asked for one unit's computation later, and copied from there. Memory for one unit
is enough; it is free again once its rows are copied.

The network's two ends are fetched when they are asked for, once per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.observe.attribution import current_node
from shoal.parallel.offload.direct_files import FileTransfer
from shoal.parallel.offload.host_memory import HostBuffer
from shoal.parallel.offload.staged_files import StagedFiles
from shoal.parallel.shards import WeightFile


class UnitOfRows(NamedTuple):
    """The rows in files that FSDP asks for together, in the order that it asks."""

    files: Sequence[WeightFile]
    again: Sequence[WeightFile]  # those it asks for in the backward pass too


class ComingRows(NamedTuple):
    buffer: HostBuffer
    values: Tensor  # a view of the buffer
    moving: FileTransfer


class RowsAhead:
    """One rank's prefetched rows."""

    def __init__(self, units: Sequence[UnitOfRows], staged: StagedFiles) -> None:
        """``units``: of blocks, in forward order."""
        self._files, self._memory = staged.files, staged.memory
        self.coming: dict[WeightFile, ComingRows] = {}
        there = [unit.files for unit in units if unit.files]
        back = [unit.again for unit in reversed(units)]
        if len(units) > 1 and 0 < len(units[-1].again) < len(units[-1].files):
            # The last unit stays gathered except for its experts: FSDP asks for the unit before it, then for these.
            back[:2] = [[*back[1], *back[0]]]
        back = [files for files in back if files]
        # Maps the last file of a unit to the files to read next.
        self._forward, self._backward = _following(there), _following(back)
        self._turn = {there[-1][-1]: back[0]} if there and back else {}
        self._turns = False  # whether a backward pass follows

    def watch(self, root: nn.Module) -> None:
        """Note at the root's forward whether gradients are on: FSDP itself always asks without gradients."""

        def note(*_: Any) -> None:
            self._turns = torch.is_grad_enabled()

        root.register_forward_pre_hook(note, prepend=True)

    def give(self, file: WeightFile, rows: Tensor) -> None:
        """Fill ``rows``, which FSDP is asking for, and prefetch the next unit."""
        coming = self.coming.pop(file, None)
        if coming is None:
            file.fetch(rows).result()
        else:
            coming.moving.result()
            rows.copy_(coming.values, non_blocking=True)
            if rows.is_cuda:
                coming.buffer.read = torch.cuda.current_stream(rows.device).record_event()
            self._memory.give_back(coming.buffer)
        if current_node() is not None:
            following = self._backward.get(file)
        else:
            following = self._forward.get(file) or (self._turn.get(file) if self._turns else None)
        if following is not None:
            self._start(following)

    def drop(self) -> None:
        """Discard everything prefetched: it is stale."""
        while self.coming:
            _, coming = self.coming.popitem()
            coming.moving.result()
            self._memory.give_back(coming.buffer)

    def _start(self, files: Sequence[WeightFile]) -> None:
        for file in files:
            size = file.stands.numel() * file.stands.element_size()
            if file in self.coming or not size:
                continue
            buffer = self._files.room(self._memory, size)
            values = buffer.bytes.view(file.stands.dtype).view(file.stands.shape)
            free = None if buffer.read is None else buffer.read.synchronize
            self.coming[file] = ComingRows(buffer, values, file.start_read(values, free))


def _following(units: Sequence[Sequence[WeightFile]]) -> dict[WeightFile, Sequence[WeightFile]]:
    return {files[-1]: following for files, following in pairwise(units)}
