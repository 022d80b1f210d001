"""AdamW: torch's fused one on a CPU; on a GPU one kernel that clips, updates and writes the network's copy.

States that are rounded stochastically (``train/rounding.py``) are updated in fp32, a few elements at a time: in torch's
operators on a CPU, in the same kernel on a GPU.

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
from shoal.models.random import FIRST, GOLDEN, SECOND
from shoal.train.rounding import MEAN, SQUARE, WEIGHT, Noise, StochasticRounding, parts, settle_rounded
from shoal.train.steered import with_gradients

# Whether the kernel rounds stochastically where it is asked to. If not, torch's operators do, on a GPU too: slowly.
ROUNDS_IN_KERNEL = True
# Elements of a program of the kernel, and its warps: the best of five that were measured.
BLOCK, WARPS = 1024, 4


# Updates some elements of a weight, in place: its states by name, ``weight`` among them, the number of the first one,
# gradients in the weight's precision, and the scale that these are divided by.
HostPart = Callable[[dict[str, Tensor], int, Tensor, Tensor], None]


class AdamW(torch.optim.AdamW):
    """``working``: by weight, the narrower copy that a network reads, which follows it in the same pass.

    ``away``: weights of the host's, which have no gradient here and are updated by ``on_host``. ``rounding``: of
    weights and moments in bf16, if not to nearest.
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
        # Whether ``step`` does. Torch's does not, and has all there is on a CPU and for fp64.
        self._here = [
            weight for group in self.param_groups for weight in group["params"] if weight not in away
        ]
        if rounding is not None:
            # Torch's own does without, where they have not been set.
            self.found_inf, self.grad_scale = torch.zeros(()), None
        in_kernel = rounding is None or ROUNDS_IN_KERNEL
        self.writes_copies = in_kernel and all(map(_in_kernel, self._here))

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
        """Count an update of a weight of the host's, and give what does it."""
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
        """Make the states now. In the first update torch would make them, unless it finds that anything is kept."""
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
            beta1, beta2 = group["betas"]
            states = [self.started(weight) for weight in mine]
            adamw_(
                mine,
                [weight.grad.contiguous() for weight in mine],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [self.working.get(weight, weight) for weight in mine],
                corrections_of(group, updates),
                self._scale(),
                self.found_inf,
                [number for weight in mine for number in self._numbers(weight)],
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
            )

    def _count(self) -> Tensor:
        """How many updates there were: one tensor for all weights, where torch has one for each."""
        every = [self.started(weight) for weight in self._here]
        shared: Tensor = every[0]["step"] if every else torch.zeros(())
        for state in every:
            state["step"] = shared
        return shared

    def _numbers(self, weight: Tensor) -> list[int]:
        """What the kernel has to know of a weight's noise; nothing where it rounds to nearest."""
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
        """Torch's own takes no gradient that is narrower than its weight: widened, for one weight at a time."""
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

    def started(self, weight: Tensor) -> dict[str, Any]:
        """A weight's states; zeros, as torch's own begins with, where it has none."""
        state: dict[str, Any] = self.state[weight]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)
        return state


def corrections_of(group: dict[str, Any], updates: Tensor) -> Tensor:
    """Of the means, and the root of that of the squares."""
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
    """As the kernel, in torch's operators."""
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
    """Of few elements, what is computed on the way is small: ``facts.optimizers.ROUNDED_BYTES`` of each.

    Sums and products by themselves: an operator that does both rounds once where it is vectorised and twice in the rest
    of a vector, and where that is depends on how a layout cuts a weight.
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
    noise: list[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Gradients are divided by ``scale``; nothing changes where ``refused`` is 1. ``working``: a weight itself where it
    has no copy. ``corrections``: of the means, and the root of that of the squares. ``noise``: by weight, as many
    numbers as ``AdamW._numbers`` has, where states are rounded stochastically.

    An operator, so that a dry run and a memory tracker see it.
    """
    update = _kernel()
    assert update is not None
    measured = corrections, scale, refused
    # Differences in double precision, before the kernel has them in single.
    settings = lr, 1 - beta1, beta2, 1 - beta2, eps, lr * decay
    numbers = len(noise) // len(weights)
    states = zip(weights, gradients, means, squares, working, strict=True)
    for place, (weight, gradient, mean, square, copy) in enumerate(states):
        if weight.numel():
            drawn = tuple(noise[place * numbers : (place + 1) * numbers])
            update(weight, gradient, mean, square, copy, measured, settings, drawn)


@adamw_.register_fake
def _nothing(*arguments: Any) -> None: ...


def _kernel() -> Callable[..., None] | None:
    """None where there is no Triton: torch's own update then does."""
    return in_triton(_compiled)


def _compiled(triton: Any, tl: Any) -> Callable[..., None]:
    @triton.jit(do_not_specialize=["key"])  # another one for every update
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
        key,
        start,
        run,
        row,
        run_stride,
        row_stride,
        first,
        rounds: tl.constexpr,
        contiguous: tl.constexpr,
        copied: tl.constexpr,
        block: tl.constexpr,
        golden: tl.constexpr,
        mix1: tl.constexpr,
        mix2: tl.constexpr,
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
            if rounds:
                # ``models.random.bits`` of an element's index in the whole parameter, and ``train.rounding.round_``.
                index = at + start
                if not contiguous:
                    within = index % run
                    index = index // run * run_stride + within // row * row_stride + within % row
                drawn = (index + first + 1).to(tl.uint64) * golden + key.to(tl.uint64)
                drawn = (drawn ^ (drawn >> 30)) * mix1
                drawn = (drawn ^ (drawn >> 27)) * mix2
                drawn = drawn ^ (drawn >> 31)
                for_weight = (drawn & 0xFFFF).to(tl.int32)
                for_mean = ((drawn >> 16) & 0xFFFF).to(tl.int32)
                for_square = ((drawn >> 32) & 0xFFFF).to(tl.int32)
                upper = -65536
                weight = ((weight.to(tl.int32, bitcast=True) + for_weight) & upper).to(
                    tl.float32, bitcast=True
                )
                mean = ((mean.to(tl.int32, bitcast=True) + for_mean) & upper).to(tl.float32, bitcast=True)
                square = ((square.to(tl.int32, bitcast=True) + for_square) & upper).to(
                    tl.float32, bitcast=True
                )
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
        noise: tuple[int, ...] = (),
    ) -> None:
        size, copied = weight.numel(), copy.data_ptr() != weight.data_ptr()
        *place, contiguous = noise or (0,) * 8
        update_block[(triton.cdiv(size, BLOCK),)](
            weight,
            gradient,
            mean,
            square,
            copy,
            *measured,
            *settings,
            size,
            *place,
            bool(noise),
            bool(contiguous),
            copied,
            BLOCK,
            *(constant % 2**64 for constant in (GOLDEN, FIRST, SECOND)),
            num_warps=WARPS,
        )

    return update
