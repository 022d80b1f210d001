"""Time all kernels of a device under sustained load: matmuls, attention, memory-bound operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.facts.calibration.measurements import Attended, Curve, Product
from shoal.facts.cluster.devices import Precision
from shoal.models.attention import attend
from shoal.prove.calibrate import parts
from shoal.prove.calibrate.circumstances import Driver, driver
from shoal.prove.calibrate.parts import Made
from shoal.prove.calibrate.sampling import Filler, Pool, Rounds, TimedWork
from shoal.prove.calibrate.sizes import CalibrationSizes, Load, Widths

NAMES: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Effort:
    """Seconds of warm-up and of measured rounds, per load; and of one large matmul alone."""

    warm_up: tuple[float, ...]
    rounds: tuple[float, ...]
    alone: float


# A device reaches its power limit within a few seconds.
EFFORT = {"cuda": Effort((5.0, 2.0), (30.0, 14.0), 4.0), "cpu": Effort((2.0,), (25.0,), 1.0)}

# Seconds of load while the driver is queried for the clock.
LOADED = 1.0

# Kinds of samples; the large matmul is one of them.
PRODUCT, ATTENTION, LARGE = "product", "attention", "large"
KEY_HEADS_A_QUERY_HEAD = 4


@dataclass
class KernelMeasurements:
    """The measurements."""

    precision: Precision  # the device's main precision
    products: dict[Precision, tuple[Product, ...]] = field(default_factory=dict)
    attention: dict[Precision, tuple[Attended, ...]] = field(default_factory=dict)
    parts: dict[Precision, dict[str, Curve]] = field(default_factory=dict)
    # FLOP/s of one large matmul alone, and among all other work; and the fraction of the latter's time in matmuls and
    # attention.
    sustained: float = 0.0
    mixed: float = 0.0
    busy: float = 1.0
    driver: Driver = field(default_factory=Driver)  # under load
    missing: list[str] = field(default_factory=list)


def measure(
    device: torch.device, sizes: CalibrationSizes, effort: Effort, tell: Callable[[str], None]
) -> KernelMeasurements:
    """Measure load by load; what does not work is listed and left out."""
    seen = KernelMeasurements(NAMES[sizes.loads[0].precision])
    for load, warm_up, seconds in zip(sizes.loads, effort.warm_up, effort.rounds, strict=True):
        name = NAMES[load.precision]
        tell(f"{name}: products, attention and moved bytes, in turns under load")
        try:
            _measure_load(device, load, sizes, (warm_up, seconds, effort.alone), seen, tell)
        except Exception as error:  # the other loads are still useful
            seen.missing.append(f"{name}: {(str(error).splitlines() or [repr(error)])[0][:200]}")
            tell(f"{name} could not be measured: {seen.missing[-1]}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return seen


def _measure_load(
    device: torch.device,
    load: Load,
    sizes: CalibrationSizes,
    effort: tuple[float, float, float],
    seen: KernelMeasurements,
    tell: Callable[[str], None],
) -> None:
    name = NAMES[load.precision]
    warm_up, seconds, alone = effort
    pool = Pool(device, load.precision, _largest(load, sizes))
    # In a wide precision a matmul of that size takes many times as long.
    side = sizes.side if load is sizes.loads[0] else sizes.side // 2
    rounds = Rounds(device, _samples(pool, load, sizes, side), _fillers(pool, side, sizes.filler))
    samples = rounds.run(warm_up, seconds)
    for failed in rounds.failed:
        tell(f"left out: {failed}")
    seen.missing += rounds.failed
    if not samples:
        return
    tell(f"{name}: {len(samples)} kernels, {len(samples[0].seen)} rounds")
    if made := _products(samples, name):
        seen.products[name] = made
    if attended := _attended(samples, name):
        seen.attention[name] = attended
    if moved := parts.found(samples, name):
        seen.parts[name] = moved
    if load is sizes.loads[0]:
        flops = 2.0 * side**3
        seen.busy = rounds.busy(_computes)
        large = [sample.seconds for sample in samples if sample.key[0] == LARGE]
        seen.mixed = flops / large[0] if large else 0.0
        seen.sustained = flops / rounds.alone(alone)
        rounds.load(LOADED)
        seen.driver = driver(device)


def _largest(load: Load, sizes: CalibrationSizes) -> int:
    """Elements that hold any one sample's operands."""
    return max(
        _largest_product(load.widths),
        2 * max(sizes.filler, sizes.side**2),
        2 * sizes.inner * max(load.tokens),
        *(tokens * vocabulary for tokens, vocabulary in load.losses),
        *(3 * sizes.heads * head_dim * seq * sequences for head_dim, seq, sequences in load.attention),
    )


def _computes(sample: TimedWork) -> bool:
    return sample.key[0] != parts.KIND


def _samples(pool: Pool, load: Load, sizes: CalibrationSizes, side: int) -> list[TimedWork]:
    """All samples that take turns."""
    name = NAMES[load.precision]
    return [
        *_product_samples(pool, name, load.widths),
        *_attention_samples(pool, name, sizes.heads, load.attention),
        *parts.samples(pool, load, sizes, name),
        TimedWork((LARGE, name), partial(_large, pool, side)),
    ]


def _large(pool: Pool, side: int) -> Callable[[], object]:
    return partial(torch.mm, pool.take(side, side), pool.take(side, side))


def _fillers(pool: Pool, side: int, elements: int) -> list[Filler]:
    """What fills gaps: a mix of matmuls and memory-bound work, like a step."""
    total = torch.empty(elements, dtype=pool.dtype, device=pool.device)
    bytes_moved = partial(torch.add, pool.take(elements), pool.take(elements), out=total)
    return [Filler(_large(pool, side), product=True), Filler(bytes_moved, product=False)]


# Matmuls as linear layers run them: output, input gradient, weight gradient.


def _product_samples(pool: Pool, precision: str, widths: Widths) -> Iterator[TimedWork]:
    """With autograd's memory layouts."""
    for inner, columns, tokens in widths:
        for rows in tokens:
            size = rows, inner, columns
            yield TimedWork(
                (PRODUCT, precision, "forward", rows, inner, columns), partial(_product, pool, *size)
            )
            yield TimedWork(
                (PRODUCT, precision, "input", rows, columns, inner), partial(_input_gradient, pool, *size)
            )
            yield TimedWork(
                (PRODUCT, precision, "weight", inner, rows, columns), partial(_weight_gradient, pool, *size)
            )


def _product(pool: Pool, rows: int, inner: int, columns: int) -> partial[Tensor]:
    return partial(F.linear, pool.take(rows, inner), pool.take(columns, inner))


def _input_gradient(pool: Pool, rows: int, inner: int, columns: int) -> partial[Tensor]:
    return partial(torch.mm, pool.take(rows, columns), pool.take(columns, inner))


def _weight_gradient(pool: Pool, rows: int, inner: int, columns: int) -> partial[Tensor]:
    return partial(torch.mm, pool.take(rows, columns).t(), pool.take(rows, inner))


def _largest_product(widths: Widths) -> int:
    """Elements of the operands of the largest matmul."""
    return max(
        rows * inner + inner * columns + rows * columns
        for inner, columns, tokens in widths
        for rows in tokens
    )


def _products(measured: Sequence[TimedWork], precision: str) -> tuple[Product, ...]:
    rows = [sample for sample in measured if sample.key[:2] == (PRODUCT, precision)]
    return tuple(
        Product.model_validate(
            dict(zip(("way", "rows", "inner", "columns"), sample.key[2:], strict=True))
            | {"seconds": sample.seconds}
        )
        for sample in sorted(rows, key=lambda sample: str(sample.key))
    )


# Causal attention with shared keys and values, forward and backward, in the network's memory layout.


def _attention_samples(
    pool: Pool, precision: str, heads: int, shapes: Sequence[tuple[int, int, int]]
) -> Iterator[TimedWork]:
    for head_dim, seq, sequences in shapes:
        key_heads = max(1, heads // KEY_HEADS_A_QUERY_HEAD)
        shape = (head_dim, heads, key_heads, seq, sequences)
        yield TimedWork((ATTENTION, precision, "forward", *shape), partial(_attention, pool, *shape))
        yield TimedWork(
            (ATTENTION, precision, "backward", *shape), partial(_attention_gradient, pool, *shape)
        )


def _attention_of(pool: Pool, head_dim: int, heads: int, key_heads: int, seq: int, sequences: int) -> Made:
    """Rotary embedding leaves queries and keys head by head; values are still token by token, as projected."""
    query = pool.take(sequences, heads, seq, head_dim).detach().requires_grad_()
    key = pool.take(sequences, key_heads, seq, head_dim).detach().requires_grad_()
    value = pool.take(sequences, seq, key_heads, head_dim).transpose(1, 2).detach().requires_grad_()
    positions = torch.arange(seq, device=pool.device).expand(sequences, seq)
    scale = head_dim**-0.5
    call = partial(attend, query, key, value, positions, None, scale=scale, window=None)
    return call, (query, key, value)


def _attention(pool: Pool, *shape: int) -> Callable[[], object]:
    return _attention_of(pool, *shape)[0]


def _attention_gradient(
    pool: Pool, head_dim: int, heads: int, key_heads: int, seq: int, sequences: int
) -> Callable[[], object]:
    call, operands = _attention_of(pool, head_dim, heads, key_heads, seq, sequences)
    # The projection's gradient arrives token by token.
    grad = pool.take(sequences, seq, heads, head_dim).transpose(1, 2)
    return partial(torch.autograd.grad, call(), operands, grad, retain_graph=True)


def _attended(measured: Sequence[TimedWork], precision: str) -> tuple[Attended, ...]:
    ways: dict[tuple[object, ...], dict[str, float]] = {}
    for sample in measured:
        if sample.key[:2] == (ATTENTION, precision):
            ways.setdefault(sample.key[3:], {})[str(sample.key[2])] = sample.seconds
    names = ("head_dim", "heads", "kv_heads", "seq", "sequences")
    return tuple(
        Attended.model_validate(dict(zip(names, shape, strict=True)) | both)
        for shape, both in sorted(ways.items(), key=lambda pair: str(pair[0]))
        if len(both) == 2
    )
