"""Context parallelism (``cp``, ``cp_kind``): the ranks of a replica share each row's tokens.

Everything except attention works token by token, so a rank given its tokens with their positions in the row (which
rotary angles and dropout follow) computes what a single rank would for them. Attention is replaced from outside:
``ring`` passes keys and values around, ``ulysses`` trades tokens for heads. The loss is a sum over targets, and every
target belongs to one rank. Parameters are sharded, and gradients summed, over context ranks as over those of ``fsdp``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.facts.layout import Layout
from shoal.facts.layout.sequence import held_ranges, holder
from shoal.models.decoder import Block, Network
from shoal.parallel.experts import mixtures
from shoal.parallel.mesh import Mesh
from shoal.parallel.ring import Ring, RingAttend
from shoal.parallel.stage_module import MicroBatch
from shoal.parallel.tensor_region import all_reduce
from shoal.parallel.ulysses import UlyssesAttend


def split_sequence(blocks: list[nn.Module], mesh: Mesh) -> None:
    """Make these blocks attend to all tokens of a row, given this rank's tokens."""
    layout, group = mesh.layout, mesh.group("cp")
    if group is None:
        return
    for block in blocks:
        assert isinstance(block, Block)
        attention = block.self_attn
        if layout.cp_kind == "ring":
            attention.attend = RingAttend(Ring(group, layout.cp, mesh.coords["cp"]))
        else:
            attention.attend = UlyssesAttend(group, layout.cp, attention.attend)
        for mixture in mixtures(block):
            # A sequence's tokens are counted over the whole sequence.
            mixture.gate.complete = _summed(mixture.gate.complete, group)


def _summed(counts_of: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    return lambda counts: all_reduce(counts_of(counts), group)


class SequenceRows:
    """A loss over whole rows, of which each context rank has some tokens."""

    def __init__(self, group: dist.ProcessGroup, index: int) -> None:
        self.group, self.index = group, index

    def total(self, parts: Tensor) -> Tensor:
        own = parts.detach()
        return parts + (all_reduce(own, self.group) - own)

    def once(self, sums: Tensor) -> Tensor:
        return sums if self.index == 0 else sums - sums.detach()


def share_rows(network: Network, mesh: Mesh) -> None:
    """Make the network's loss cover rows that are shared by context ranks."""
    if (group := mesh.group("cp")) is not None:
        network.loss.rows = SequenceRows(group, mesh.coords["cp"])


class SequenceShare:
    """The part of every row that a context rank works on; without context parallelism, all of it."""

    def __init__(self, layout: Layout, index: int) -> None:
        self.layout, self.index = layout, index

    def of(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of whole rows. Document boundaries stay those of the whole rows."""
        if self.layout.cp == 1:
            return batch
        return replace(
            batch,
            tokens=self._columns(batch.tokens),
            positions=self._columns(batch.positions),
            targets=None if batch.targets is None else self._columns(batch.targets),
        )

    def holder(self, place: int, length: int) -> tuple[int, int]:
        """The rank that has a position of a row of that length, and the token's index there."""
        return holder(self.layout, place, length)

    def _columns(self, rows: Tensor) -> Tensor:
        held = held_ranges(self.layout, self.index, rows.shape[1])
        return torch.cat([rows[:, one.start : one.stop] for one in held], dim=1)
