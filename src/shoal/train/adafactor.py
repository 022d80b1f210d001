"""Adafactor: keeps the row and column means of a matrix's squared gradient, and no momentum.

Both means, and the sizes of a matrix and its update that scale its steps, are of the whole matrix in every layout: the
ranks that hold parts of it sum their contributions, all matrices in one small message. Like torch's ``Adafactor``,
which knows no shards; each expert's matrix counts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.facts.layout.whole_matrices import Matrix, MatrixPart
from shoal.facts.model.parameters import EMBEDDING
from shoal.facts.model.tensor_split import range_boxes
from shoal.facts.optimizers import COLUMNS, ROWS, UNFACTORED
from shoal.parallel.shards import Shard
from shoal.parallel.whole_matrices import WholeMatrices
from shoal.train.device_controlled import DeviceControlledOptimizer, wide
from shoal.train.factors import empty_state

# In update number t, the newest gradient has weight t^DECAY in the means.
DECAY = -0.8
# The least size assumed of a matrix; and the largest update, to which larger ones are scaled down.
SMALLEST, LARGEST_UPDATE = 1e-3, 1.0


class MatrixShare(NamedTuple):
    """This rank's part of a matrix, and where its sums are among all matrices' sums."""

    matrix: Matrix
    piece: Shard
    part: MatrixPart
    number: int  # index of the matrix
    sums: int  # where its sums begin: rows, columns, then weights; vectors only have the last

    @property
    def where(self) -> slice:
        return slice(self.part.first, self.part.first + self.part.size)

    @property
    def place(self) -> int:
        """The matrix's index among those whose states the piece has."""
        if self.matrix.number is None:
            return 0
        return self.matrix.number - self.piece.box.offset[0] - self.piece.matrices.start

    def boxes(self) -> Iterator[tuple[slice, slice, slice, tuple[int, ...]]]:
        """Rows and columns of the matrix, the elements of the part that they cover, and their shape."""
        begin = 0
        for offset, shape in range_boxes(self.part.shape, self.part.start, self.part.stop):
            row, column = (a + b for a, b in zip(self.part.offset, offset, strict=True))
            size = shape[0] * shape[1]
            yield (
                slice(row, row + shape[0]),
                slice(column, column + shape[1]),
                slice(begin, begin + size),
                shape,
            )
            begin += size


class Adafactor(DeviceControlledOptimizer):
    def __init__(self, groups: list[dict[str, Any]], whole: WholeMatrices, *, lr: float) -> None:
        super().__init__(groups, lr=lr, weight_decay=0.0)
        self.whole = whole
        self.options = {weight: group for group in self.param_groups for weight in group["params"]}
        matrices = whole.matrices(lambda name, dimensions: True, all_experts=True)
        self.count, self.parts, self.length = len(matrices), list[MatrixShare](), 0
        # Where a tied embedding's sums and size are.
        self.embedding_sums, self.embedding_sizes = list[slice](), list[slice]()
        for number, matrix in enumerate(matrices):
            if matrix.name == EMBEDDING:
                self.embedding_sums.append(slice(self.length, self.length + sum(matrix.shape) + 1))
                self.embedding_sizes.append(slice(number, number + 1))
            found = whole.part(matrix)
            if found is not None:
                self.parts.append(MatrixShare(matrix, *found, number, self.length))
            self.length += (sum(matrix.shape) if len(matrix.shape) > 1 else 0) + 1
        for piece in dict.fromkeys(part.piece for part in self.parts):
            states = (ROWS, COLUMNS) if len(piece.box.whole) > 1 else (UNFACTORED,)
            for kind in states:
                self.state[piece.tensor][kind] = empty_state(piece, kind).zero_()
            self.state[piece.tensor]["step"] = torch.zeros((), device=piece.tensor.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        done = self._updates().double()
        sums = self.whole.add_up(self._seen(), self.embedding_sums)
        for part in self.parts:
            self._follow(part, sums, done)
        sizes = self.whole.add_up(self._sizes(), self.embedding_sizes)
        for part in self.parts:
            self._move(part, sums, sizes, done)

    def _updates(self) -> Tensor:
        """The number of updates including this one: one tensor for all weights."""
        states = [self.state[part.piece.tensor] for part in self.parts]
        if not states:
            return torch.ones((), device=self.whole.device)
        shared: Tensor = states[0]["step"]
        for state in states:
            state["step"] = shared
        shared += 1 - self.found_inf.to(shared.device)
        return shared

    def _room(self, length: int) -> Tensor:
        wide_enough = any(part.piece.tensor.dtype == torch.float64 for part in self.parts)
        dtype = torch.float64 if wide_enough else torch.float32
        return torch.zeros(length, dtype=dtype, device=self.whole.device)

    def _seen(self) -> Tensor:
        """This rank's sums for every matrix: squared gradients over rows and columns, and squared weights."""
        sums = self._room(self.length)
        for part in self.parts:
            if not self.whole.speaks(part.piece):
                continue
            weight = part.piece.tensor
            last = part.sums
            if len(part.matrix.shape) > 1:
                rows, columns = _views(sums, part)
                last += rows.numel() + columns.numel()
                squares = self.gradient(weight, part.where).square()
                for row, column, where, shape in part.boxes():
                    box = squares[where].view(shape)
                    rows[row] += box.sum(1)
                    columns[column] += box.sum(0)
            sums[last] += wide(weight.view(-1)[part.where]).square().sum()
        return sums

    def _follow(self, part: MatrixShare, sums: Tensor, done: Tensor) -> None:
        """Move the means towards the new gradient's."""
        state, share = self.state[part.piece.tensor], done.pow(DECAY)
        if len(part.matrix.shape) == 1:
            kept = state[UNFACTORED].view(-1)[part.where]
            seen = self.gradient(part.piece.tensor, part.where).square()
            self.settle(kept, torch.lerp(wide(kept), seen, share.to(seen.dtype)))
            return
        rows, columns = _views(sums, part)
        for kind, seen, over in ((ROWS, rows, columns), (COLUMNS, columns, rows)):
            kept = state[kind][part.place]
            mean = (seen / over.numel()).to(wide(kept).dtype)
            self.settle(kept, torch.lerp(wide(kept), mean, share.to(mean.dtype)))

    def _update(self, part: MatrixShare) -> Tensor:
        """The update of a part's weights, before scaling."""
        weight, state = part.piece.tensor, self.state[part.piece.tensor]
        smallest = torch.finfo(weight.dtype).eps
        gradient = self.gradient(weight, part.where)
        if len(part.matrix.shape) == 1:
            kept = wide(state[UNFACTORED].view(-1)[part.where])
            return kept.clamp(min=smallest**2).rsqrt_().mul_(gradient)
        rows, columns = (wide(state[kind][part.place]) for kind in (ROWS, COLUMNS))
        rows = rows / rows.mean().clamp(min=smallest)
        update = torch.empty_like(gradient)
        for row, column, where, shape in part.boxes():
            estimate = torch.outer(rows[row], columns[column]).clamp_(min=smallest**2).rsqrt_()
            update[where] = estimate.mul_(gradient[where].view(shape)).view(-1)
        return update

    def _sizes(self) -> Tensor:
        """For every matrix, the sum of squares of this rank's part of the update."""
        sums = self._room(self.count)
        for part in self.parts:
            if self.whole.speaks(part.piece):
                sums[part.number] += self._update(part).square().sum()
        return sums

    def _move(self, part: MatrixShare, sums: Tensor, sizes: Tensor, done: Tensor) -> None:
        options, matrix = self.options[part.piece.tensor], part.matrix
        lr = options["lr"]
        last = part.sums + (sum(matrix.shape) if len(matrix.shape) > 1 else 0)
        own = (sums[last] / matrix.size).sqrt().clamp(min=SMALLEST)
        too_large = ((sizes[part.number] / matrix.size).sqrt() / LARGEST_UPDATE).clamp(min=1.0)
        rate = own * done.rsqrt().clamp(max=lr).to(own.dtype) / too_large
        value = part.piece.tensor.view(-1)[part.where]
        shrunk = wide(value) * (1 - lr * options["weight_decay"])
        moved = shrunk.sub_(self._update(part).mul_(rate.to(shrunk.dtype)))
        self.settle_weight(part.piece.tensor, part.where, moved)


def _views(sums: Tensor, part: MatrixShare) -> tuple[Tensor, Tensor]:
    """A matrix's sums over rows and over columns."""
    rows, columns = part.matrix.shape
    begin = part.sums
    return sums[begin : begin + rows], sums[begin + rows : begin + rows + columns]
