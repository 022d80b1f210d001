"""AdamW with block-wise 8-bit moments and bf16 weights (``recipe.states = "int8"``).

An update is computed in fp32 from decoded moments; then weights are rounded and moments encoded, stochastically unless
``recipe.rounding`` says nearest. On a CPU this uses torch operators, some blocks at a time; on a GPU one kernel per
weight keeps it all in registers. Vectors have no blocks: their moments are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.facts.blockwise import SCALE_OF
from shoal.facts.optimizers import ROUNDED_ELEMENTS
from shoal.models.in_triton import in_triton
from shoal.models.random import FIRST, GOLDEN, SECOND
from shoal.train.adamw import AdamW, corrections_of
from shoal.train.blockwise import LEAST, MEAN, MOST, SQUARE, MomentCode, decode, encode, scales
from shoal.train.device_controlled import with_gradients
from shoal.train.rounding import WEIGHT, Noise, StochasticRounding, parts, settle_rounded

# Elements per program of the kernel, and its warps.
PROGRAM, WARPS = 1024, 4
KINDS: tuple[tuple[str, MomentCode], ...] = (("exp_avg", MEAN), ("exp_avg_sq", SQUARE))


class BlockwiseAdamW(AdamW):
    """``blocks``: elements per block, by weight; weights not listed are vectors."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        blocks: dict[Tensor, int],
        working: dict[Tensor, Tensor] | None = None,
        rounding: StochasticRounding | None = None,
        **options: Any,
    ) -> None:
        self.blocks = blocks
        super().__init__(groups, working, (), rounding, **options)
        self.found_inf, self.grad_scale = torch.zeros(()), None
        self.writes_copies = all(weight.is_cuda for weight in self._here) and _kernel() is not None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        update = self._in_kernel if self.writes_copies else self._in_operators
        for weight, group in with_gradients(self):
            if weight.numel():
                state = self.started(weight)
                state["step"] += 1 - self.found_inf
                corrections = corrections_of(group, state["step"])
                update(weight, state, corrections, group)

    def _in_operators(
        self, weight: Tensor, state: dict[str, Any], corrections: Tensor, group: dict[str, Any]
    ) -> None:
        block, flat, gradient = self.blocks.get(weight, 1), weight.detach().view(-1), weight.grad
        assert gradient is not None
        noise = None if self.rounding is None else self.rounding.noise(weight)
        for part in parts(weight.numel(), ROUNDED_ELEMENTS // block * block):
            here = {
                name: state[name].view(-1)[slice(part.start // size, part.stop // size)]
                for name, size in self._sizes(weight)
            }
            there = None if noise is None else noise.after(part.start)
            found = gradient.reshape(-1)[part].float() / self._scale()
            _update(flat[part], found, here, block, corrections, self.found_inf != 0, group, there)

    def _sizes(self, weight: Tensor) -> Iterator[tuple[str, int]]:
        """A weight's states, and how many of its elements share one value there."""
        for kind, _ in KINDS:
            yield kind, 1
            if weight in self.blocks:
                yield SCALE_OF[kind], self.blocks[weight]

    def _in_kernel(
        self, weight: Tensor, state: dict[str, Any], corrections: Tensor, group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        gradient, nothing = weight.grad, state["exp_avg"]
        assert gradient is not None
        blockwise_adamw_(
            weight,
            gradient.contiguous(),
            *(state[kind] for kind, _ in KINDS),
            *(state.get(SCALE_OF[kind], nothing) for kind, _ in KINDS),
            self.working.get(weight, weight),
            corrections,
            self._scale(),
            self.found_inf,
            self._numbers(weight),
            self.blocks.get(weight, 0),
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
        )

    def started(self, weight: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            block = self.blocks.get(weight)
            for kind, _ in KINDS:
                dtype = torch.float32 if block is None else torch.uint8
                state[kind] = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
                if block is not None:
                    scale = torch.full(
                        (weight.numel() // block,), LEAST, dtype=torch.uint8, device=weight.device
                    )
                    state[SCALE_OF[kind]] = scale
        return state


def _update(
    weight: Tensor,
    found: Tensor,
    state: dict[str, Tensor],
    block: int,
    corrections: Tensor,
    refused: Tensor,
    group: dict[str, Any],
    noise: Noise | None,
) -> None:
    """Update a few blocks. Adds and multiplies are separate, as in ``adamw``, so that the split of elements does not
    matter.
    """
    (beta1, beta2), lr = group["betas"], group["lr"]
    first, second = (_read(state, kind, code, block) for kind, code in KINDS)
    first += (found - first).mul_(1 - beta1)
    second.mul_(beta2).add_(found.square_().mul_(1 - beta2))
    del found
    root = second.sqrt().div_(corrections[1]).add_(group["eps"])
    move = torch.div(first, root, out=root).mul_(lr / corrections[0])
    value = weight.float()
    value -= value * (lr * group["weight_decay"])
    value -= move
    del root, move
    drawn = None if noise is None else noise.drawn(weight.numel(), weight.device)
    if drawn is None:
        weight.copy_(torch.where(refused, weight, value.to(weight.dtype)))
    else:
        settle_rounded(weight, value, drawn, WEIGHT, refused)
    del value
    for (kind, code), moment in zip(KINDS, (first, second), strict=True):
        _write(state, kind, code, block, moment, drawn, refused)


def _read(state: dict[str, Tensor], kind: str, code: MomentCode, block: int) -> Tensor:
    if SCALE_OF[kind] not in state:
        return state[kind].clone()
    return decode(state[kind].view(-1, block), state[SCALE_OF[kind]], code).view(-1)


def _write(
    state: dict[str, Tensor],
    kind: str,
    code: MomentCode,
    block: int,
    new: Tensor,
    drawn: Tensor | None,
    refused: Tensor,
) -> None:
    if SCALE_OF[kind] not in state:
        state[kind].copy_(torch.where(refused, state[kind], new))
        return
    rows, scale = new.view(-1, block), state[SCALE_OF[kind]]
    found = scales(rows)
    codes = encode(rows, found, code, None if drawn is None else drawn.view(-1, block)).view(-1)
    state[kind].copy_(torch.where(refused, state[kind], codes))
    scale.copy_(torch.where(refused, scale, found))


@torch.library.custom_op(
    "shoal::blockwise_adamw_",
    mutates_args=("weight", "mean", "square", "mean_scale", "square_scale", "working"),
)
def blockwise_adamw_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    mean_scale: Tensor,
    square_scale: Tensor,
    working: Tensor,
    corrections: Tensor,
    scale: Tensor,
    refused: Tensor,
    noise: list[int],
    block: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Like ``adamw_``, for one weight. ``block``: 0 for a vector, whose moments are fp32 and whose scales are not read.

    A custom operator, so that a dry run and a memory tracker see it.
    """
    update = _kernel()
    assert update is not None
    states = weight, gradient, mean, square, mean_scale, square_scale, working
    settings = lr, 1 - beta1, beta2, 1 - beta2, eps, lr * decay
    update(states, (corrections, scale, refused), settings, noise, block)


@blockwise_adamw_.register_fake
def _nothing(*arguments: Any) -> None: ...


def _kernel() -> Callable[..., None] | None:
    return in_triton(_compiled)


def _compiled(triton: Any, tl: Any) -> Callable[..., None]:
    @triton.jit
    def decoded(codes, scale, first: tl.constexpr, most: tl.constexpr, signed: tl.constexpr):
        wide = codes.to(tl.int32)
        magnitude = wide & most
        value = ((magnitude + (first - 1)) << 20).to(tl.float32, bitcast=True)
        value = tl.where(magnitude > 0, value, 0.0)
        value = value * ((scale.to(tl.int32) + 1) << 23).to(tl.float32, bitcast=True)[:, None]
        if signed:
            value = tl.where(wide > most, -value, value)
        return value

    @triton.jit
    def scaled_by(value, least: tl.constexpr, greatest: tl.constexpr):
        largest = tl.max(tl.abs(value), axis=1)
        exponent = (largest.to(tl.int32, bitcast=True) + (2 << 20)) >> 23
        return tl.minimum(tl.maximum(exponent, least), greatest)

    @triton.jit
    def encoded(
        value,
        scale,
        chance,
        first: tl.constexpr,
        most: tl.constexpr,
        signed: tl.constexpr,
        greatest: tl.constexpr,
    ):
        inverse = ((greatest + 1 - scale) << 23).to(tl.float32, bitcast=True)
        scaled = tl.abs(value) * inverse[:, None]
        found = ((scaled.to(tl.int32, bitcast=True) + chance) >> 20) - (first - 1)
        found = tl.minimum(found, most)
        lowest = tl.full((), (first << 20), tl.int32).to(tl.float32, bitcast=True)
        if signed:
            low = (chance.to(tl.float32) < scaled * (1048576.0 / lowest)).to(tl.int32)
        else:
            low = (scaled > 0).to(tl.int32)
        found = tl.where(scaled < lowest, low, found)
        if signed:
            found = found + ((value < 0).to(tl.int32) << 7)
        return found.to(tl.uint8)

    @triton.jit(do_not_specialize=["key"])  # it changes with every update
    def update_blocks(
        weights,
        gradients,
        means,
        squares,
        mean_scales,
        square_scales,
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
        block,
        has_blocks: tl.constexpr,
        rounds: tl.constexpr,
        contiguous: tl.constexpr,
        copied: tl.constexpr,
        rows: tl.constexpr,
        width: tl.constexpr,
        golden: tl.constexpr,
        mix1: tl.constexpr,
        mix2: tl.constexpr,
        mean_first: tl.constexpr,
        square_first: tl.constexpr,
        least: tl.constexpr,
        greatest: tl.constexpr,
    ):
        if tl.load(refused) == 0:
            # A program's rows are blocks.
            number = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
            column = tl.arange(0, width)
            at = number[:, None] * block + column[None, :]
            there = number * block < size
            here = (column[None, :] < block) & (at < size)
            gradient = tl.load(gradients + at, here, 0.0).to(tl.float32) / tl.load(scale)
            weight = tl.load(weights + at, here, 0.0).to(tl.float32)
            if has_blocks:
                mean = decoded(
                    tl.load(means + at, here, 0),
                    tl.load(mean_scales + number, there, 1),
                    mean_first,
                    127,
                    True,
                )
                square = decoded(
                    tl.load(squares + at, here, 0),
                    tl.load(square_scales + number, there, 1),
                    square_first,
                    255,
                    False,
                )
            else:
                mean = tl.load(means + at, here, 0.0)
                square = tl.load(squares + at, here, 0.0)
            weight -= decay * weight
            mean += (gradient - mean) * rise1
            square = square * beta2 + gradient * gradient * rise2
            root = tl.sqrt_rn(square) / tl.load(corrections + 1) + eps
            weight -= lr / tl.load(corrections) * (mean / root)
            for_mean = tl.full((rows, width), 1 << 19, tl.int32)
            for_square = for_mean
            if rounds:
                index = at + start
                if not contiguous:
                    within = index % run
                    index = index // run * run_stride + within // row * row_stride + within % row
                drawn = (index + first + 1).to(tl.uint64) * golden + key.to(tl.uint64)
                drawn = (drawn ^ (drawn >> 30)) * mix1
                drawn = (drawn ^ (drawn >> 27)) * mix2
                drawn = drawn ^ (drawn >> 31)
                for_weight = (drawn & 0xFFFF).to(tl.int32)
                for_mean = ((drawn >> 16) & 0xFFFFF).to(tl.int32)
                for_square = ((drawn >> 36) & 0xFFFFF).to(tl.int32)
                upper = -65536
                weight = ((weight.to(tl.int32, bitcast=True) + for_weight) & upper).to(
                    tl.float32, bitcast=True
                )
            tl.store(weights + at, weight.to(weights.dtype.element_ty), here)
            if copied:
                tl.store(working + at, weight.to(working.dtype.element_ty), here)
            if has_blocks:
                mean = tl.where(here, mean, 0.0)
                square = tl.where(here, square, 0.0)
                mean_scale = scaled_by(mean, least, greatest)
                square_scale = scaled_by(square, least, greatest)
                tl.store(
                    means + at, encoded(mean, mean_scale, for_mean, mean_first, 127, True, greatest), here
                )
                tl.store(
                    squares + at,
                    encoded(square, square_scale, for_square, square_first, 255, False, greatest),
                    here,
                )
                tl.store(mean_scales + number, mean_scale.to(tl.uint8), there)
                tl.store(square_scales + number, square_scale.to(tl.uint8), there)
            else:
                tl.store(means + at, mean, here)
                tl.store(squares + at, square, here)

    def update(
        states: tuple[Tensor, ...],
        measured: tuple[Tensor, Tensor, Tensor],
        settings: tuple[float, ...],
        noise: list[int],
        block: int,
    ) -> None:
        weight, *_, working = states
        size, copied = weight.numel(), working.data_ptr() != weight.data_ptr()
        *place, contiguous = noise or (0,) * 8
        length = block or PROGRAM
        width = triton.next_power_of_2(length)
        rows = max(1, PROGRAM // width)
        update_blocks[(triton.cdiv(size, rows * length),)](
            *states,
            *measured,
            *settings,
            size,
            *place,
            length,
            block > 0,
            bool(noise),
            bool(contiguous),
            copied,
            rows,
            width,
            *(constant % 2**64 for constant in (GOLDEN, FIRST, SECOND)),
            MEAN.first,
            SQUARE.first,
            LEAST,
            MOST,
            num_warps=WARPS,
        )

    return update
