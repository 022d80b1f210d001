"""AdamW: torch's fused one on a CPU; on a GPU one kernel that clips, updates and writes the network's copy.

On an H200, 1.2B parameters: torch's update and the copy take 13.9 ms with fp32 states, this 9.3, and 8.8 from bf16
gradients, which torch's would have to be widened for first; with bf16 states 7.6 and 4.7
(``benchmarks/results/optimizer.jsonl``). Memory could do it in 7.2 and 3.6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shoal.models.in_triton import in_triton

# Elements of a program of the kernel, and its warps: the best of five that were measured.
BLOCK, WARPS = 1024, 4


# Updates some elements of a weight, in place, with their gradients in the weight's precision; what steers torch's fused
# optimizers (``found_inf``, ``grad_scale``) steers it.
HostPart = Callable[[slice, Tensor, dict[str, Any]], None]
# Counts an update, unless it is refused (1), and gives what does it.
HostUpdateOf = Callable[[Tensor], HostPart]


class AdamW(torch.optim.AdamW):
    """``working``: by weight, the narrower copy that a network reads, which follows it in the same pass.

    ``away``: weights of the host's, which have no gradient here and are updated by ``on_host``.
    """

    found_inf: Tensor
    grad_scale: Tensor | None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        working: dict[Tensor, Tensor] | None = None,
        away: Collection[Tensor] = (),
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.working = working or {}
        # Whether ``step`` does. Torch's does not, and has all there is on a CPU and for fp64.
        self._here = [
            weight for group in self.param_groups for weight in group["params"] if weight not in away
        ]
        self.writes_copies = all(map(_in_kernel, self._here))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.writes_copies:
            self._step_in_kernel()
        elif any(_narrow(weight) for group in self.param_groups for weight in group["params"]):
            self._step_one_by_one()
        else:
            super().step(closure)

    def on_host(self, weight: Tensor, group: dict[str, Any]) -> HostUpdateOf:
        """The next update of a weight of the host's, made ready: its states are there."""
        state, flat = self._started(weight), weight.detach().view(-1)

        def begin(refused: Tensor) -> HostPart:
            before = state["step"].clone()
            state["step"] += 1 - refused

            def update(part: slice, gradient: Tensor, steered: dict[str, Any]) -> None:
                mean, square = (state[kind].view(-1)[part] for kind in ("exp_avg", "exp_avg_sq"))
                self._fused(flat[part], gradient, mean, square, before.clone(), group, **steered)

            return update

        return begin

    def start(self) -> None:
        """Make the states now. In the first update torch would make them, unless it finds that anything is kept."""
        for group in self.param_groups:
            for weight in group["params"]:
                self._started(weight)

    def _step_in_kernel(self) -> None:
        if not self._here:
            return
        updates = self._count()
        updates += 1 - self.found_inf
        for group in self.param_groups:
            mine = [weight for weight in group["params"] if weight.grad is not None]
            if not mine:
                continue
            beta1, beta2 = group["betas"]
            counted, states = updates.double(), [self._started(weight) for weight in mine]
            adamw_(
                mine,
                [weight.grad.contiguous() for weight in mine],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [self.working.get(weight, weight) for weight in mine],
                torch.stack([1 - beta1**counted, (1 - beta2**counted).sqrt()]).float(),
                torch.ones_like(self.found_inf) if self.grad_scale is None else self.grad_scale,
                self.found_inf,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
            )

    def _count(self) -> Tensor:
        """How many updates there were: one tensor for all weights, where torch has one for each."""
        every = [self._started(weight) for weight in self._here]
        shared: Tensor = every[0]["step"] if every else torch.zeros(())
        for state in every:
            state["step"] = shared
        return shared

    def _step_one_by_one(self) -> None:
        """Torch's own takes no gradient that is narrower than its weight: widened, for one weight at a time."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, gradient = self._started(weight), weight.grad.to(weight.dtype)
                self._fused(
                    weight,
                    gradient,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    group,
                    grad_scale=self.grad_scale,
                    found_inf=self.found_inf,
                )

    @staticmethod
    def _fused(
        weight: Tensor,
        gradient: Tensor,
        mean: Tensor,
        square: Tensor,
        step: Tensor,
        group: dict[str, Any],
        **steered: Any,
    ) -> None:
        """Torch's own, of one weight."""
        adamw(
            [weight],
            [gradient],
            [mean],
            [square],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            **steered,
        )

    def _started(self, weight: Tensor) -> dict[str, Any]:
        """A weight's states; zeros, as torch's own begins with, where it has none."""
        state: dict[str, Any] = self.state[weight]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)
        return state


def _narrow(weight: Tensor) -> bool:
    return weight.grad is not None and weight.grad.dtype != weight.dtype


def _in_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype != torch.float64 and _kernel() is not None


@torch.library.custom_op("shoal::adamw_", mutates_args=("weights", "means", "squares", "working"))
def adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    working: list[Tensor],
    corrections: Tensor,
    scale: Tensor,
    refused: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Gradients are divided by ``scale``; nothing changes where ``refused`` is 1. ``working``: a weight itself where it
    has no copy. ``corrections``: of the means, and the root of that of the squares.

    An operator, so that a dry run and a memory tracker see it.
    """
    update = _kernel()
    assert update is not None
    measured = corrections, scale, refused
    # Differences in double precision, before the kernel has them in single.
    settings = lr, 1 - beta1, beta2, 1 - beta2, eps, lr * decay
    for weight, gradient, mean, square, copy in zip(weights, gradients, means, squares, working, strict=True):
        if weight.numel():
            update(weight, gradient, mean, square, copy, measured, settings)


@adamw_.register_fake
def _nothing(*arguments: Any) -> None: ...


def _kernel() -> Callable[..., None] | None:
    """None where there is no Triton: torch's own update then does."""
    return in_triton(_compiled)


def _compiled(triton: Any, tl: Any) -> Callable[..., None]:
    @triton.jit
    def update_block(
        weights,
        gradients,
        means,
        squares,
        working,
        corrections,
        scale,
        refused,
        lr,
        rise1,
        beta2,
        rise2,
        eps,
        decay,
        size,
        copied: tl.constexpr,
        block: tl.constexpr,
    ):
        if tl.load(refused) == 0:
            at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
            here = at < size
            gradient = tl.load(gradients + at, here).to(tl.float32) / tl.load(scale)
            weight = tl.load(weights + at, here).to(tl.float32)
            mean = tl.load(means + at, here).to(tl.float32)
            square = tl.load(squares + at, here).to(tl.float32)
            weight -= decay * weight
            mean += (gradient - mean) * rise1
            square = square * beta2 + gradient * gradient * rise2
            root = tl.sqrt_rn(square) / tl.load(corrections + 1) + eps
            weight -= lr / tl.load(corrections) * (mean / root)
            tl.store(weights + at, weight.to(weights.dtype.element_ty), here)
            tl.store(means + at, mean.to(means.dtype.element_ty), here)
            tl.store(squares + at, square.to(squares.dtype.element_ty), here)
            if copied:
                tl.store(working + at, weight.to(working.dtype.element_ty), here)

    def update(
        weight: Tensor,
        gradient: Tensor,
        mean: Tensor,
        square: Tensor,
        copy: Tensor,
        measured: tuple[Tensor, Tensor, Tensor],
        settings: tuple[float, ...],
    ) -> None:
        size, copied = weight.numel(), copy.data_ptr() != weight.data_ptr()
        update_block[(triton.cdiv(size, BLOCK),)](
            weight, gradient, mean, square, copy, *measured, *settings, size, copied, BLOCK, num_warps=WARPS
        )

    return update
