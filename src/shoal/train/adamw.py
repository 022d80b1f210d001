"""AdamW: torch's fused implementation on a CPU, a Triton kernel (``train/adamw_kernel.py``) on a GPU.

States that are rounded stochastically (``train/rounding.py``) are updated in fp32, a few elements at a time: with torch
operators on a CPU, in the same kernel on a GPU.

On an H200 with 1.2B parameters, torch's update plus the copy takes 13.9 ms with fp32 states; this one takes 9.3, and
8.8 from bf16 gradients, which torch would have to widen first; with bf16 states it takes 7.6 and 4.7
(``benchmarks/results/optimizer.jsonl``). Memory bandwidth would allow 7.2 and 3.6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shoal.train import adamw_kernel
from shoal.train.device_controlled import with_gradients
from shoal.train.rounding import MEAN, SQUARE, WEIGHT, Noise, StochasticRounding, parts, settle_rounded

# Updates some elements of a weight in place. Arguments: its states by name, including ``weight``; the index of the
# first element; gradients in the weight's dtype; and the scale that divides them.
HostPart = Callable[[dict[str, Tensor], int, Tensor, Tensor], None]


class AdamW(torch.optim.AdamW):
    """``working``: for each weight, the narrower copy that the network reads, written in the same pass.

    ``away``: weights on the host, which have no gradient here and are updated by ``on_host``. ``rounding``: how bf16
    weights and moments are rounded, if not to nearest.
    """

    found_inf: Tensor
    grad_scale: Tensor | None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        working: dict[Tensor, Tensor] | None = None,
        away: Collection[Tensor] = (),
        rounding: StochasticRounding | None = None,
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.working, self.rounding = working or {}, rounding
        # Weights updated by ``step``. With the kernel it writes their copies too; torch's does not, and is used on a
        # CPU and for fp64.
        self._here = [
            weight for group in self.param_groups for weight in group["params"] if weight not in away
        ]
        if rounding is not None:
            # Torch's own update handles these where they are unset.
            self.found_inf, self.grad_scale = torch.zeros(()), None
        self.writes_copies = all(map(_in_kernel, self._here))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.writes_copies:
            self._step_in_kernel()
        elif self.rounding is not None:
            self._step_rounded(self.rounding)
        elif any(_narrow(weight) for group in self.param_groups for weight in group["params"]):
            self._step_one_by_one()
        else:
            super().step(closure)

    def on_host(self, weight: Tensor, group: dict[str, Any]) -> HostPart:
        """Count an update of a weight on the host, and return the function that does it."""
        state = self.started(weight)
        noise = None if self.rounding is None else self.rounding.noise(weight)
        before = state["step"].clone()
        state["step"] += 1
        corrections, accepted = corrections_of(group, state["step"]), torch.zeros(())

        def update(states: dict[str, Tensor], start: int, gradient: Tensor, scale: Tensor) -> None:
            weight, mean, square = (states[kind] for kind in ("weight", "exp_avg", "exp_avg_sq"))
            if noise is not None:
                there = noise.after(start)
                _rounded(weight, gradient, mean, square, corrections, scale, accepted, group, there)
                return
            if weight.dtype == torch.float64:
                gradient /= scale  # torch takes one in fp32
                steered = {}
            else:
                steered = {"grad_scale": scale.float(), "found_inf": accepted}
            self._fused(weight, gradient, mean, square, before.clone(), group, **steered)

        return update

    def start(self) -> None:
        """Create the states now. Otherwise torch would create them in the first update, unless it finds any state."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.started(weight)

    def _step_in_kernel(self) -> None:
        if not self._here:
            return
        updates = self._count()
        updates += 1 - self.found_inf
        for group in self.param_groups:
            mine = [weight for weight in group["params"] if weight.grad is not None]
            if not mine:
                continue
            kept = [self.started(weight) for weight in mine]
            adamw_kernel.adamw_(
                (
                    mine,
                    [weight.grad.contiguous() for weight in mine],
                    [state["exp_avg"] for state in kept],
                    [state["exp_avg_sq"] for state in kept],
                    [self.working.get(weight, weight) for weight in mine],
                ),
                (corrections_of(group, updates), self._scale(), self.found_inf),
                [number for weight in mine for number in self._numbers(weight)],
                group,
            )

    def _count(self) -> Tensor:
        """The number of updates: one tensor for all weights, where torch has one for each."""
        every = [self.started(weight) for weight in self._here]
        shared: Tensor = every[0]["step"] if every else torch.zeros(())
        for state in every:
            state["step"] = shared
        return shared

    def _numbers(self, weight: Tensor) -> list[int]:
        """What the kernel needs to draw a weight's noise; empty when rounding to nearest."""
        if self.rounding is None:
            return []
        noise = self.rounding.noise(weight)
        run, row, run_stride, row_stride, first, _ = noise.place
        return [noise.key, noise.start, run, row, run_stride, row_stride, first, int(noise.place.contiguous)]

    def _scale(self) -> Tensor:
        return torch.ones_like(self.found_inf) if self.grad_scale is None else self.grad_scale

    def _step_rounded(self, rounding: StochasticRounding) -> None:
        for weight, group in with_gradients(self):
            state = self.started(weight)
            state["step"] += 1 - self.found_inf
            _rounded(
                weight.detach().view(-1),
                weight.grad.reshape(-1),
                state["exp_avg"].view(-1),
                state["exp_avg_sq"].view(-1),
                corrections_of(group, state["step"]),
                self._scale(),
                self.found_inf,
                group,
                rounding.noise(weight),
            )

    def _step_one_by_one(self) -> None:
        """Update one weight at a time with a widened gradient: torch's takes none narrower than its weight."""
        for weight, group in with_gradients(self):
            state, gradient = self.started(weight), weight.grad.to(weight.dtype)
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
        """Torch's fused update of one weight."""
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

    def started(self, weight: Tensor) -> dict[str, Any]:
        """A weight's states; initially zeros, as in torch."""
        state: dict[str, Any] = self.state[weight]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)
        return state


def corrections_of(group: dict[str, Any], updates: Tensor) -> Tensor:
    """Bias corrections: of the means, and the root of that of the squares."""
    counted = updates.double()
    beta1, beta2 = group["betas"]
    return torch.stack([1 - beta1**counted, (1 - beta2**counted).sqrt()]).float()


def _rounded(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    corrections: Tensor,
    scale: Tensor,
    refused: Tensor,
    group: dict[str, Any],
    noise: Noise,
) -> None:
    """The kernel's computation in torch operators."""
    for part in parts(weight.numel()):
        here = weight[part], gradient[part], mean[part], square[part]
        _rounded_part(*here, corrections, scale, refused, group, noise.after(part.start))


def _rounded_part(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    corrections: Tensor,
    scale: Tensor,
    refused: Tensor,
    group: dict[str, Any],
    noise: Noise,
) -> None:
    """Update a few elements, so that temporaries stay small: ``facts.optimizers.ROUNDED_BYTES`` per element.

    Adds and multiplies are separate operators: a fused one rounds once in vectorised code and twice in the remainder of
    a vector, and where the remainder begins depends on how a layout cuts the weight.
    """
    (beta1, beta2), lr = group["betas"], group["lr"]
    drawn = noise.drawn(weight.numel(), weight.device)
    found = gradient.float() / scale
    first, second, value = (one.float() for one in (mean, square, weight))
    value -= value * (lr * group["weight_decay"])
    first += (found - first).mul_(1 - beta1)
    second.mul_(beta2).add_(found.square_().mul_(1 - beta2))
    del found
    root = second.sqrt().div_(corrections[1]).add_(group["eps"])
    value -= torch.div(first, root, out=root).mul_(lr / corrections[0])
    del root
    for old, new, whose in ((weight, value, WEIGHT), (mean, first, MEAN), (square, second, SQUARE)):
        settle_rounded(old, new, drawn, whose, refused != 0)


def _narrow(weight: Tensor) -> bool:
    return weight.grad is not None and weight.grad.dtype != weight.dtype


def _in_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype != torch.float64 and adamw_kernel.kernel() is not None
