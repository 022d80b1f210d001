"""Sharded optimizer states (``zero=1``) and gradients (``zero=2``): each ``fsdp`` rank updates its shard.

Every rank holds all parameters as views of flat buckets. Each bucket is cut into one equal chunk per rank. Gradients
are reduce-scattered, so each rank has the sum for its own chunk; its optimizer updates that chunk, and an all-gather
distributes the new values. Together they send what one all-reduce of the gradients would.

``zero=1`` keeps gradients whole and reduces them once per step. ``zero=2`` keeps only its own chunks: every micro-batch
is reduced and accumulated into them. A pipeline has many micro-batches in flight, so there ``zero=2`` also reduces once
per step and frees the whole gradients then. Torch has no such strategy: ZeroRedundancyOptimizer neither reduce-scatters
nor shards gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.renamed import all_gather_single, reduce_scatter_single
from shoal.facts.blockwise import block_length
from shoal.facts.layout.buckets import buckets_by_kind, chunk_ranges, even_share, flat_kind
from shoal.models.initial import Slice
from shoal.parallel.bucket_reducer import BucketReducer
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import HeldParameter, Shard, counts, gradient_bytes, hand, weight, whole_weights


class ShardedBucket:
    """Parameters that are views of one flat tensor, of which this rank owns a chunk."""

    def __init__(self, held: list[HeldParameter], ranks: int, index: int, block: int = 1) -> None:
        """``block``: how many consecutive elements must stay in one chunk."""
        self.held, self.ranks, self.index, self.block = held, ranks, index, block
        self.ranges = list(pairwise(accumulate((one.parameter.numel() for one in held), initial=0)))
        size = self.ranges[-1][1]
        self.chunk = even_share(size, ranks, block)
        self.owned = slice(index * self.chunk, (index + 1) * self.chunk)
        first = held[0].parameter
        # Offloaded parameters each have their own host tensor; the bucket exists only while it is gathered.
        self.values: Tensor | None = None
        if all(one.home is None for one in held):
            self.values = first.new_zeros(self.chunk * ranks)
            for one, view in zip(held, self.views(self.values), strict=True):
                view.copy_(one.parameter.detach())
                one.parameter.data = view
        # The optimizer's dtype.
        self.dtype: torch.dtype = held[0].states or first.dtype
        self.placed: list[tuple[Shard, slice]] = []  # pieces of the chunk, each with its place in the chunk
        self.whole: Tensor | None = None  # gradients of the whole bucket
        self.shard: Tensor  # gradients of the chunk, as far as they are kept
        self.kept: dict[Shard, slice] = {}  # where each is
        self.missing = 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor shaped like ``values`` into one view per parameter."""
        return [
            flat[start:stop].view_as(one.parameter)
            for one, (start, stop) in zip(self.held, self.ranges, strict=True)
        ]

    def pieces(self, mesh: Mesh) -> list[tuple[Shard, slice]]:
        """What the optimizer updates, each with its place in the chunk. Parameters outside the chunk have no piece."""
        first = self.held[0]
        if first.has_master or self.values is None:
            master = first.parameter.new_zeros(
                self.chunk, dtype=self.dtype, device="meta" if first.placed_later else None
            )
        else:
            master = self.values[self.owned]
        of = {one.label: one for one in self.held}
        sizes = [(one.label, one.parameter.numel()) for one in self.held]
        begin = 0
        for label, start, stop in chunk_ranges(sizes, self.ranks, self.index, self.block):
            one, place = of[label], slice(begin, begin + stop - start)
            if self.values is None:
                working: Tensor | None = _rest(one).view(-1)[start:stop]
            else:
                working = self.values[self.owned][place] if one.has_master else None
            piece = Shard(one, nn.Parameter(master[place]), start, stop, counts(one, mesh), working)
            self.placed.append((piece, place))
            begin = place.stop
        self.kept = dict(self.placed)
        return self.placed

    def keep_but(self, gone: Callable[[Shard], bool]) -> None:
        """Stop keeping gradients of the pieces that ``gone`` selects: they are handed over as they arrive."""
        kept = [(piece, place.stop - place.start) for piece, place in self.placed if not gone(piece)]
        if len(kept) == len(self.placed):
            return
        self.kept, begin = {}, 0
        for piece, size in kept:
            self.kept[piece] = slice(begin, begin + size)
            begin += size
        self.shard = self.shard.new_zeros(begin)

    def add_up(self) -> None:
        """From now on accumulate gradients in ``whole``, in place."""
        if self.whole is None:
            self.whole = self.no_gradients()
        else:
            self.whole.zero_()
        for one, view in zip(self.held, self.views(self.whole), strict=True):
            one.parameter.grad = view

    def take(self, number: int, dtype: torch.dtype) -> None:
        """Move the gradient of one parameter into ``whole``."""
        if self.whole is None:
            # Zeros, because padding and parameters without a gradient are sent too.
            self.whole = self.zeros(self.chunk * self.ranks, dtype)
        parameter, (start, stop) = self.held[number].parameter, self.ranges[number]
        assert parameter.grad is not None
        self.whole[start:stop].copy_(parameter.grad.reshape(-1))
        parameter.grad = None

    def no_gradients(self) -> Tensor:
        """A zero gradient for the whole bucket."""
        return self.zeros(self.chunk * self.ranks, self.dtype)

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.held[0].parameter.new_zeros(size, dtype=dtype)

    def gather(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """All-gather the parameters' chunks; None if there is nothing to wait for."""
        if self.values is not None:
            return all_gather_single(self.values, self.values[self.owned], group=group, async_op=True)
        values = self.held[0].parameter.new_empty(self.chunk * self.ranks)
        own = values[self.owned]
        for piece, place in self.placed:
            assert piece.working is not None
            own[place].copy_(piece.working if piece.held.home_file is None else weight(piece).detach())
        all_gather_single(values, own, group=group, async_op=True).wait()
        going = []
        for one, view in zip(self.held, self.views(values), strict=True):
            if one.home_file is None:
                _rest(one).copy_(view)
            else:
                going.append(one.home_file.send(view))
        for transfer in going:
            transfer.result()
        return None

    def free(self) -> None:
        self.whole = None
        for one in self.held:
            one.parameter.grad = None


class Flying(NamedTuple):
    """A bucket in flight: after ``work``, ``summed`` holds the sum of its chunk."""

    bucket: ShardedBucket
    summed: Tensor
    work: dist.Work


class ShardedStates:
    """Reduce-scatters gradients over the ranks of a replica, then all-reduces the chunks over the replicas."""

    def __init__(
        self,
        held: list[HeldParameter],
        mesh: Mesh,
        bucket_bytes: int,
        reduce_dtype: torch.dtype | None,
        blockwise: bool = False,
    ) -> None:
        """``blockwise``: the optimizer's moments are quantised in blocks (``facts/blockwise.py``)."""
        group = held[0].group
        self.held, self.zero, self.reduce_dtype = held, group.zero, reduce_dtype
        # Sends a piece's gradient to the host as soon as it is summed, where the host updates it.
        self.leave: Callable[..., None] | None = None
        # Called as a bucket's gradients arrive, before any leaves: those of earlier buckets may be let go.
        self.make_room: Callable[[object], None] | None = None
        # Updates these pieces in the backward pass.
        self.take: Callable[[Shard, Tensor], None] | None = None
        self.taken: set[Shard] = set()
        self.group, self.replicas = mesh.group_of(group.sharded), mesh.group_of(group.replicated)
        self.every_pass = group.zero == 2 and mesh.layout.pp == 1
        self.stages: dict[int, BucketReducer[ShardedBucket]] = {}
        self._flying: list[Flying] = []
        places: dict[str, tuple[Shard, ShardedBucket, slice]] = {}
        for stage in dict.fromkeys(one.stage for one in held):
            cut = _cut([one for one in held if one.stage == stage], mesh, bucket_bytes, blockwise)
            for bucket in cut:
                self._keep_gradients(bucket)
                for piece, place in bucket.pieces(mesh):
                    places[piece.held.label] = (piece, bucket, place)
            self.stages[stage] = BucketReducer(cut, self._take if self.every_pass else None, self._send)
        self.places = [places[one.label] for one in held if one.label in places]
        self.pieces = [piece for piece, _, _ in self.places]

    def start_step(self) -> None:
        for queue in self.stages.values():
            queue.reset(listening=False)
            for bucket in queue.buckets:
                if self.every_pass:
                    bucket.free()
                else:
                    bucket.add_up()
                if self.zero == 2:
                    bucket.shard.zero_()

    def before_backward(self, stage: int, last: bool) -> None:
        if (queue := self.stages.get(stage)) is not None:
            queue.reset(listening=last or self.every_pass)

    def after_backward(self, stage: int, last: bool) -> None:
        if (last or self.every_pass) and (queue := self.stages.get(stage)) is not None:
            queue.send_rest()

    def finish_step(self) -> None:
        """Wait for the sums over this replica's ranks; add those of the other replicas."""
        while self._flying:
            self._land()
        if self.replicas is not None:
            self._sum_replicas()
        for piece, bucket, _ in self.places:
            if piece in bucket.kept:
                hand(piece, bucket.shard[bucket.kept[piece]])

    def after_update(self) -> None:
        """All-gather every rank's chunks of the parameters."""
        works = [bucket.gather(self.group) for bucket in self._buckets()]
        for work in works:
            if work is not None:
                work.wait()

    def leave_early(self, leave: Callable[..., None], make_room: Callable[[object], None]) -> None:
        """Hand over gradients of offloaded pieces as they arrive; ``make_room`` hears of every bucket first."""
        self.leave, self.make_room = leave, make_room
        for bucket in self._buckets():
            bucket.keep_but(lambda piece: piece.away is not None and piece.away.early)

    def take_early(self, take: Callable[[Shard, Tensor], None], pieces: list[Shard]) -> None:
        """Hand over the gradients of these pieces as they arrive."""
        self.take, self.taken = take, set(pieces)
        for bucket in self._buckets():
            bucket.keep_but(self.taken.__contains__)

    def weights(self) -> list[tuple[str, Slice]]:
        return whole_weights(self.held)

    def computed_with(self) -> list[nn.Parameter]:
        return [one.parameter for one in self.held]

    def _buckets(self) -> list[ShardedBucket]:
        return [bucket for queue in self.stages.values() for bucket in queue.buckets]

    def _keep_gradients(self, bucket: ShardedBucket) -> None:
        """Set up what is kept between steps: the whole gradients, with the chunk as a view, or the chunk alone."""
        if self.zero == 1:
            bucket.whole = bucket.no_gradients()
            bucket.shard = bucket.whole[bucket.owned]
        else:
            bucket.shard = bucket.zeros(bucket.chunk, bucket.dtype)

    def _take(self, bucket: ShardedBucket, number: int) -> None:
        bucket.take(number, self.reduce_dtype or bucket.dtype)

    def _send(self, bucket: ShardedBucket) -> None:
        if self.every_pass and self._flying:
            # One bucket fills while another is sent, so whole gradients never pile up.
            self._land()
        whole = bucket.whole
        if whole is None:  # no gradient came; the other ranks still wait for this one
            whole = bucket.no_gradients()
        sent = whole if self.reduce_dtype is None else whole.to(self.reduce_dtype)
        if self.zero == 2:
            bucket.free()  # the send buffer lives only until its reduction lands
        # In place: the sum overwrites this rank's own share.
        summed = sent[bucket.owned]
        work = reduce_scatter_single(summed, sent, group=self.group, async_op=True)
        self._flying.append(Flying(bucket, summed, work))

    def _land(self) -> None:
        bucket, summed, work = self._flying.pop(0)
        work.wait()
        if self.leave is not None and self.make_room is not None:
            self.make_room(bucket)
            self._keep(bucket, summed, self.leave)
        elif self.take is not None:
            for piece, place in bucket.placed:
                if piece in self.taken:
                    self.take(piece, summed[place])
                else:
                    bucket.shard[bucket.kept[piece]].add_(summed[place])
        elif self.zero == 2:
            bucket.shard.add_(summed)
        elif self.reduce_dtype is not None:
            bucket.shard.copy_(summed)

    def _keep(self, bucket: ShardedBucket, summed: Tensor, leave: Callable[..., None]) -> None:
        """Accumulate the gradients that stay here and hand over the rest."""
        for piece, place in bucket.placed:
            if piece.away is not None and piece.away.early:
                # A copy: the send buffer is freed at once, and it is larger by a factor of the number of ranks.
                leave(piece, summed[place].clone(), together=bucket)
            else:
                bucket.shard[bucket.kept[piece]].add_(summed[place])

    def _sum_replicas(self) -> None:
        works = []
        for bucket in self._buckets():
            sent = bucket.shard if self.reduce_dtype is None else bucket.shard.to(self.reduce_dtype)
            works.append((bucket, sent, dist.all_reduce(sent, group=self.replicas, async_op=True)))
        for bucket, sent, work in works:
            work.wait()
            if sent is not bucket.shard:
                bucket.shard.copy_(sent)


def _rest(held: HeldParameter) -> Tensor:
    """A parameter's values where they are stored."""
    return held.parameter.data if held.home is None else held.home


def _cut(held: list[HeldParameter], mesh: Mesh, bucket_bytes: int, blockwise: bool) -> list[ShardedBucket]:
    by_label, shards = {one.label: one for one in held}, held[0].group.sharded
    blocks = {one.label: block_length(one.part.box.whole) if blockwise else None for one in held}
    sizes = [
        (label, gradient_bytes(one.parameter), flat_kind(label, one.name, one.part.copies, blocks[label]))
        for label, one in by_label.items()
    ]
    index = mesh.index_in(shards)
    return [
        ShardedBucket([by_label[label] for label in labels], shards.size, index, blocks[labels[0]] or 1)
        for labels in buckets_by_kind(sizes, bucket_bytes)
    ]
