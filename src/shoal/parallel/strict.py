"""Strict mode: order-independent sums, so losses and weights are bit-equal in any layout.

Floating-point sums depend on their order, and that order is what layouts change. Integer sums do not: each
micro-batch's gradient is rounded to multiples of 2⁻⁵², summed as 64-bit integers over micro-batches and ranks, and
converted back to floating point once. A micro-batch is one sequence, whose gradient is the same wherever it is
computed. The two gradients of a tied embedding are rounded separately; a sum of two floating-point numbers has only one
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.models.initial import Slice
from shoal.parallel.mesh import Mesh
from shoal.parallel.shards import HeldParameter, Reducer, Shard

# The unit of gradients, the gradient sum that overflows a 64-bit integer, and the unit of losses.
UNIT = 2.0**-52
LIMIT = 2.0**11
LOSS_UNIT = 2.0**-32

# Squares relative to the largest: a coarse and a fine digit, so that neither overflows in a sum over 2⁴⁰ elements.
COARSE = 2.0**22
FINE = 2.0**44


class StrictReducer:
    """Sums gradients as integers. ``placed`` still decides where parameters and states live; its sums are not used.

    The integers of all of a rank's gradients are held through the step at every ``zero``: strict mode is for proofs.
    """

    def __init__(self, placed: Reducer, held: list[HeldParameter], mesh: Mesh) -> None:
        self.placed, self.mesh = placed, mesh
        self.pieces = placed.pieces
        sizes = [one.part.box.size for one in held]
        # One buffer, so that one message sums it.
        self.sums = torch.zeros(sum(sizes), dtype=torch.int64, device=mesh.device)
        self.of = dict(zip([one.label for one in held], self.sums.split(sizes), strict=True))
        self.largest = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for one, parameter in zip(held, placed.computed_with(), strict=True):
            parameter.register_post_accumulate_grad_hook(self._take(self.of[one.label]))

    def start_step(self) -> None:
        self.placed.start_step()
        self.sums.zero_()
        self.largest.zero_()

    def before_backward(self, stage: int, last: bool) -> None: ...

    def after_backward(self, stage: int, last: bool) -> None: ...

    def finish_step(self) -> None:
        for axis in ("dp", "fsdp"):
            group = self.mesh.group(axis)
            if group is not None:
                dist.all_reduce(self.sums, group=group)

    def deliver(self, contributions: int) -> None:
        """Convert the sums of ``contributions`` micro-batches into the pieces' gradients."""
        most = self.mesh.hosts.largest(float(self.largest))
        if math.isfinite(most) and most * contributions >= LIMIT:
            raise RuntimeError(
                f"strict mode: a gradient of {most:.3g} is too large for exact sums over {contributions} sequences; "
                "lower recipe.lr, or run.strict = false"
            )
        for piece in self.pieces:
            total = self.of[piece.held.label][piece.start : piece.stop]
            value = total.double() * (UNIT if math.isfinite(most) else math.nan)
            piece.tensor.grad = value.to(piece.tensor.dtype).view_as(piece.tensor)

    def after_update(self) -> None:
        self.placed.after_update()

    def weights(self) -> list[tuple[str, Slice]]:
        return self.placed.weights()

    def computed_with(self) -> list[nn.Parameter]:
        return self.placed.computed_with()

    def _take(self, sums: Tensor) -> Callable[[nn.Parameter], None]:
        @torch.no_grad()
        def hook(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.detach().reshape(-1).double()
            parameter.grad = None
            # A maximum propagates infinity and NaN, so they are noticed.
            torch.maximum(self.largest, gradient.abs().max(), out=self.largest)
            sums.add_((gradient / UNIT).round().to(torch.int64))

        return hook


def strict_loss(losses: list[Tensor], mesh: Mesh) -> float:
    """The sum of all ranks' micro-batch losses, however they are spread."""
    values = [float(loss) for loss in losses]
    finite = all(math.isfinite(value) for value in values)
    total = sum(round(value / LOSS_UNIT) for value in values) if finite else 0
    total, broken = mesh.hosts.sum_integers([total, int(not finite)])
    return math.nan if broken else total * LOSS_UNIT


@torch.no_grad()
def strict_norm(pieces: list[Shard], mesh: Mesh) -> float:
    """The norm of all gradients, however they are cut. Equal copies count once, but each has to be finite."""
    held = [(piece, grad.double()) for piece in pieces if (grad := piece.tensor.grad) is not None]
    peaks = [float(gradient.abs().max()) for _, gradient in held if gradient.numel()]
    gradients = [gradient for piece, gradient in held if piece.counted]
    largest = mesh.hosts.largest(max(peaks, default=0.0) if all(map(math.isfinite, peaks)) else math.nan)
    if largest == 0 or not math.isfinite(largest):
        return largest
    coarse = fine = 0
    for gradient in gradients:
        squares = (gradient / largest).square()
        digits = (squares * COARSE).floor()
        coarse += int(digits.to(torch.int64).sum())
        fine += int(((squares - digits / COARSE) * FINE).round().to(torch.int64).sum())
    coarse, fine = mesh.hosts.sum_integers([coarse, fine])
    return largest * math.sqrt(coarse / COARSE + fine / FINE)
