"""Assemble matrices that are sharded over ranks, transform them, and return each rank its parts of the results.

For optimizers that work on whole matrices. ``facts/layout/whole_matrices.py`` decides who holds what of which matrix
and which rank assembles it; each round is one all-to-all there and one back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.facts.layout.parameter_groups import replica_ranks, stage_ranks
from shoal.facts.layout.updates import Sharing, UpdatedRange
from shoal.facts.layout.whole_matrices import (
    Chosen,
    Matrix,
    MatrixPart,
    matrices_of,
    members,
    part_of,
    ranges_by_label,
    rounds,
)
from shoal.facts.model.tensor_split import box_slices, range_boxes
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import Shard

# Returns some elements of a piece, given as a slice; the last argument is the matrix they belong to.
Given = Callable[[Shard, slice, Matrix], Tensor]
Taken = Callable[[Shard, slice, Matrix, Tensor], None]


# This rank's part of a matrix with its piece; another rank's part, and whether that rank speaks for all that hold the
# same.
_Own = tuple[Shard, MatrixPart] | None
_Theirs = tuple[MatrixPart | None, bool]


class WholeMatrices:
    """The matrices of this rank's stages, and this rank's parts of them."""

    def __init__(
        self,
        pieces: list[Shard],
        sharing: Sharing,
        mesh: Mesh,
        ends: dist.ProcessGroup | None = None,
    ) -> None:
        """``ends``: the ranks at both ends of a pipeline that hold the same part of a tied embedding."""
        self.sharing, self.mesh, self.ends = sharing, mesh, ends
        self.pieces = {piece.held.label: piece for piece in pieces}
        self.ranks = members(sharing, mesh.rank)
        self.group = mesh.group_of(replica_ranks(mesh.layout))
        # Ranks that each hold everything have nothing to sum.
        self.everyone = None if self.group is None else mesh.group_of(stage_ranks(mesh.layout))
        self.device = mesh.device

    def matrices(self, chosen: Chosen, all_experts: bool = False) -> list[Matrix]:
        return matrices_of(self.sharing, self.mesh.rank, chosen, all_experts)

    def part(self, matrix: Matrix) -> tuple[Shard, MatrixPart] | None:
        """This rank's part of a matrix, and the piece that contains it."""
        piece = self.pieces.get(matrix.label)
        if piece is None:
            return None
        one = UpdatedRange(piece.name, matrix.label, piece.held.part, piece.start, piece.stop)
        found = part_of(one, matrix)
        return None if found is None else (piece, found)

    def speaks(self, piece: Shard) -> bool:
        """Whether this rank speaks for a piece: one rank does for all of a stage that hold the same, replicas included.

        Where every rank holds all of it, each speaks for itself.
        """
        first = self.mesh.index_in(piece.held.group.replicated) == 0
        return self.group is None or (self.counts(piece) and first)

    @torch.no_grad()
    def add_up(self, sums: Tensor, embeddings: Sequence[slice]) -> Tensor:
        """Sum over the ranks of a stage that speak, bit-identical on all of them.

        ``embeddings``: where the sums of a tied embedding are. At the two ends of a pipeline, different ranks add these
        up in different order; both ends continue with the mean of the two.
        """
        if self.group is None:
            return sums
        dist.all_reduce(sums, group=self.everyone)
        if len(embeddings) == 2:  # both ends are here
            sums[embeddings[1]] = sums[embeddings[0]]
        elif embeddings and self.ends is not None:
            both = sums[embeddings[0]].clone()
            dist.all_reduce(both, group=self.ends)
            sums[embeddings[0]] = both / 2
        return sums

    def counts(self, piece: Shard) -> bool:
        """Whether this rank's copy counts: of the tensor ranks that hold the same part, one does."""
        return piece.held.part.copy == 0

    def change(
        self,
        matrices: list[Matrix],
        give: Given,
        change: Callable[[Tensor], Tensor],
        take: Taken,
        dtype: torch.dtype,
    ) -> None:
        """Transform matrices: ``give`` returns values of this rank's parts, ``take`` receives the results."""
        if self.group is None:
            for matrix in matrices:
                self._alone(matrix, give, change, take, dtype)
            return
        for together in rounds(matrices, len(self.ranks)):
            self._round(together, give, change, take, dtype)

    def _alone(
        self, matrix: Matrix, give: Given, change: Callable[[Tensor], Tensor], take: Taken, dtype: torch.dtype
    ) -> None:
        if (found := self.part(matrix)) is not None:
            piece, where = found[0], _where(found[1])
            values = give(piece, where, matrix).to(dtype).view(matrix.shape)
            values = change(values).reshape(-1)
            take(piece, where, matrix, values)

    def _round(
        self,
        together: list[Matrix],
        give: Given,
        change: Callable[[Tensor], Tensor],
        take: Taken,
        dtype: torch.dtype,
    ) -> None:
        own: list[_Own] = [self.part(matrix) for matrix in together]
        own += [None] * (len(self.ranks) - len(own))
        theirs: list[_Theirs] = [(None, False)] * len(self.ranks)
        mine = self.ranks.index(self.mesh.rank)
        if mine < len(together):
            theirs = [self._of(rank, together[mine]) for rank in self.ranks]
        expected = [0 if found is None else found[1].size for found in own]
        arrived = self._exchange(
            [
                # Called on every rank: giving a value may change optimizer state.
                values if self.counts(found[0]) else values[:0]
                for found, matrix in zip(own, together, strict=False)
                if found is not None
                for values in [give(found[0], _where(found[1]), matrix).reshape(-1).to(dtype)]
            ],
            [
                size if found is not None and self.counts(found[0]) else 0
                for found, size in zip(own, expected, strict=True)
            ],
            [part.size if part is not None and counts else 0 for part, counts in theirs],
            dtype,
        )
        returned: list[Tensor] = []
        if mine < len(together):
            arrived = _assembled(arrived, together[mine], theirs)
            arrived = change(arrived)
            returned = [_taken(arrived, part) for part, _ in theirs if part is not None]
        del arrived
        back = [0 if part is None else part.size for part, _ in theirs]
        received = self._exchange(returned, back, expected, dtype).split(expected)
        for found, matrix, values in zip(own, together, received, strict=False):
            if found is not None:
                take(found[0], _where(found[1]), matrix, values)

    def _exchange(
        self, sent: list[Tensor], sizes: list[int], expected: list[int], dtype: torch.dtype
    ) -> Tensor:
        """``sizes`` and ``expected``: elements to and from every rank."""
        together = torch.cat(sent) if sent else torch.empty(0, dtype=dtype, device=self.device)
        sent.clear()
        arrived = torch.empty(sum(expected), dtype=dtype, device=self.device)
        dist.all_to_all_single(arrived, together, expected, sizes, group=self.group)
        return arrived

    def _of(self, rank: int, matrix: Matrix) -> _Theirs:
        one = ranges_by_label(self.sharing, rank).get(matrix.label)
        return (None, False) if one is None else (part_of(one, matrix), one.part.copy == 0)


def _where(part: MatrixPart) -> slice:
    return slice(part.first, part.first + part.size)


def _assembled(arrived: Tensor, matrix: Matrix, theirs: list[_Theirs]) -> Tensor:
    """Assemble a matrix from the received parts, rank by rank."""
    whole, begin = arrived.new_empty(matrix.shape), 0
    for part, counts in theirs:
        if part is not None and counts:
            _place(whole, part, arrived[begin : begin + part.size])
            begin += part.size
    return whole


def _place(whole: Tensor, part: MatrixPart, values: Tensor) -> None:
    """Copy a part's values into the matrix."""
    box, begin = whole[box_slices(part.offset, part.shape)], 0
    for offset, shape in range_boxes(part.shape, part.start, part.stop):
        target = box[box_slices(offset, shape)]
        target.copy_(values[begin : begin + target.numel()].view(shape))
        begin += target.numel()


def _taken(whole: Tensor, part: MatrixPart) -> Tensor:
    """A part's values from the matrix, flattened."""
    box = whole[box_slices(part.offset, part.shape)]
    found = [
        box[box_slices(offset, shape)].reshape(-1)
        for offset, shape in range_boxes(part.shape, part.start, part.stop)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)
