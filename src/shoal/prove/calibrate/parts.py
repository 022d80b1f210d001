"""Time memory-bound operators as the network runs them, with the bytes they move.

Parts are named and counted as in ``predict/time/operators.py``; the network's own code is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.facts.calibration.measurements import Curve
from shoal.models.logits import logits_to_gradients_, token_statistics
from shoal.models.norm import LayerNorm, RMSNorm
from shoal.models.rotary import rotate
from shoal.predict.time import operators
from shoal.predict.time.operators import Operator, OperatorWork, Widths, moved
from shoal.prove.calibrate.sampling import Pool, TimedWork
from shoal.prove.calibrate.sizes import CalibrationSizes, Load
from shoal.train.adamw import AdamW

# A call, and the tensors to compute gradients for.
Made = tuple[Callable[[], Tensor], tuple[Tensor, ...]]
Operators = tuple[Operator, ...]

KIND = "part"


class Ways(NamedTuple):
    """One part at one size, not prepared yet: bytes in forward and backward, and a function that prepares the call."""

    forward: OperatorWork
    backward: OperatorWork | None
    make: Callable[[], Made]


def samples(pool: Pool, load: Load, sizes: CalibrationSizes, precision: str) -> Iterator[TimedWork]:
    widths = Widths(load.precision.itemsize, load.states.itemsize)
    for made in (*_blocks(pool, load, sizes, widths), *_ends(pool, load, sizes, widths)):
        ahead, back = made.forward, made.backward
        yield TimedWork((KIND, precision, ahead.part, ahead.bytes), partial(_forward, made))
        if back is not None:
            yield TimedWork((KIND, precision, back.part, back.bytes), partial(_backward, made, pool))
    for elements in load.weights:
        size = elements * (widths.states + widths.compute if widths.casts else 3 * widths.states)
        yield TimedWork(
            (KIND, precision, "weights", float(size)), partial(_weights, pool.device, load, elements)
        )
    yield from _updates(load, precision, pool.device)


def _forward(made: Ways) -> Callable[[], object]:
    return made.make()[0]


def _backward(made: Ways, pool: Pool) -> Callable[[], object]:
    call, inputs = made.make()
    output = call()
    grad = torch.ones_like(output) if output.dim() == 0 else pool.take(*output.shape)
    return partial(torch.autograd.grad, output, inputs, grad.to(output.dtype), retain_graph=True)


def _blocks(pool: Pool, load: Load, sizes: CalibrationSizes, widths: Widths) -> Iterator[Ways]:
    hidden, inner = sizes.hidden, sizes.inner
    norms: list[tuple[str, type[RMSNorm | LayerNorm], Operators, Operators]] = [
        ("norm", RMSNorm, operators.RMS_FORWARD, operators.RMS_BACKWARD),
        ("layer norm", LayerNorm, operators.LAYER_FORWARD, operators.LAYER_BACKWARD),
    ]
    for tokens in load.tokens:
        stream = tokens * hidden
        for name, norm, ahead, back in norms:
            yield Ways(
                moved(name, ahead, stream, widths),
                moved(f"{name} backward", back, stream, widths),
                partial(_norm, pool, load, norm, tokens, hidden),
            )
        for head_dim in sizes.head_dims:
            yield Ways(
                *operators.rotary(stream, stream, widths, head_dim),
                partial(_rotary, pool, tokens, hidden, head_dim),
            )
        yield Ways(
            moved("gate", operators.GATE_FORWARD, tokens * inner, widths),
            moved("gate backward", operators.GATE_BACKWARD, tokens * inner, widths),
            partial(_gate, pool, tokens, inner),
        )
        for name, operator, make in (
            ("add", operators.ADD, partial(_add, pool, tokens, hidden)),
            ("copy", operators.COPY, partial(_copy, pool, tokens, hidden, sizes.head_dims[0])),
            ("sum", operators.SUM, partial(_sum, pool, tokens, hidden)),
        ):
            yield Ways(moved(name, [operator], stream, widths), None, make)


def _leaf(pool: Pool, *size: int) -> Tensor:
    return pool.take(*size).detach().requires_grad_()


def _norm(pool: Pool, load: Load, norm: type[RMSNorm | LayerNorm], tokens: int, hidden: int) -> Made:
    weighed = norm(hidden, 1e-5).to(pool.device, load.states)
    for weight in weighed.parameters():
        nn.init.ones_(weight)
    x = _leaf(pool, 1, tokens, hidden)
    return partial(weighed, x), (x, *weighed.parameters())


def _rotary(pool: Pool, tokens: int, hidden: int, head_dim: int) -> Made:
    x = _leaf(pool, 1, tokens, hidden)
    cosine, sine = torch.rand(2, 1, 1, tokens, head_dim // 2, device=pool.device)
    return lambda: rotate(x.view(1, tokens, -1, head_dim).transpose(1, 2), (cosine, sine)), (x,)


def _gate(pool: Pool, tokens: int, inner: int) -> Made:
    gate, up = _leaf(pool, 1, tokens, inner), _leaf(pool, 1, tokens, inner)
    return lambda: F.silu(gate) * up, (gate, up)


def _add(pool: Pool, tokens: int, hidden: int) -> Made:
    return partial(torch.add, pool.take(tokens, hidden), pool.take(tokens, hidden)), ()


def _copy(pool: Pool, tokens: int, hidden: int, head_dim: int) -> Made:
    by_head = pool.take(1, hidden // head_dim, tokens, head_dim).transpose(1, 2)
    return partial(by_head.clone, memory_format=torch.contiguous_format), ()


def _sum(pool: Pool, tokens: int, hidden: int) -> Made:
    return partial(torch.sum, pool.take(tokens, hidden), 0), ()


def _ends(pool: Pool, load: Load, sizes: CalibrationSizes, widths: Widths) -> Iterator[Ways]:
    for tokens, vocabulary in load.losses:
        yield Ways(
            moved("loss", operators.LOSS, tokens * vocabulary, widths),
            None,
            partial(_scores, pool, tokens, vocabulary),
        )
    for tokens, vocabulary in load.lookups:
        elements = tokens * sizes.hidden
        yield Ways(
            OperatorWork("lookup", 2 * elements * widths.states, 1),
            OperatorWork("lookup backward", (elements + vocabulary * sizes.hidden) * widths.states, 1),
            partial(_lookup, pool, load, tokens, vocabulary, sizes.hidden),
        )


def _scores(pool: Pool, tokens: int, vocabulary: int) -> Made:
    scores = pool.take(tokens, vocabulary).clone()  # others read the pool's memory
    wanted = torch.randint(vocabulary, (tokens,), device=pool.device)
    one = torch.ones(tokens, device=pool.device, dtype=torch.promote_types(scores.dtype, torch.float32))

    def loss() -> Tensor:
        found = token_statistics(scores, wanted, 0)
        # A factor of 1 everywhere, so that it can be repeated.
        logits_to_gradients_(scores, wanted, 0, found[0], one, 0.0)
        return found

    return loss, ()


def _lookup(pool: Pool, load: Load, tokens: int, vocabulary: int, hidden: int) -> Made:
    matrix = torch.randn(vocabulary, hidden, device=pool.device, dtype=load.states).requires_grad_()
    index = torch.randint(vocabulary, (1, tokens), device=pool.device)
    return partial(F.embedding, index, matrix), (matrix,)


def _weights(device: torch.device, load: Load, elements: int) -> Callable[[], object]:
    """Cast a matrix to its compute precision; if it already is in that, add a gradient to it."""
    matrix = torch.randn(elements, device=device, dtype=load.states)
    if load.states != load.precision:
        return partial(matrix.to, load.precision)
    return partial(matrix.add_, torch.zeros_like(matrix))


def _updates(load: Load, precision: str, device: torch.device) -> Iterator[TimedWork]:
    """AdamW, which also writes a narrower copy of wide weights, and the gradient norm, over parameters of a few
    sizes and in either state precision.
    """
    for states in dict.fromkeys((load.states, load.precision)):
        for elements in load.updates:
            size, bits = elements * states.itemsize, 8 * states.itemsize
            trained = partial(_parameters, elements, states, device)
            copied = load.precision if load.precision.itemsize < states.itemsize else None
            moved = 7.0 * size + (0 if copied is None else elements * copied.itemsize)
            yield TimedWork((KIND, precision, f"adamw {bits} bit", moved), partial(_adamw, trained, copied))
            yield TimedWork((KIND, precision, f"norm {bits} bit", float(size)), partial(_norms, trained))


def _parameters(elements: int, states: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.randn(elements // 4, device=device, dtype=states)) for _ in range(4)]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def _adamw(trained: Callable[[], list[nn.Parameter]], copied: torch.dtype | None) -> Callable[[], object]:
    weights = trained()
    working: dict[Tensor, Tensor] = {}
    if copied is not None:
        working = {weight: weight.detach().to(copied) for weight in weights}
    optimizer = AdamW([{"params": weights}], working, lr=1e-6)
    zero = torch.zeros((), device=weights[0].device)
    optimizer.found_inf, optimizer.grad_scale = zero, zero + 1
    if optimizer.writes_copies or not working:
        return optimizer.step

    def step_and_copy() -> None:
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(working.values()), [weight.detach() for weight in working])

    return step_and_copy


def _norms(trained: Callable[[], list[nn.Parameter]]) -> Callable[[], object]:
    """The result is not read, so nothing waits for it."""
    gradients = [weight.grad for weight in trained() if weight.grad is not None]
    return partial(torch._foreach_norm, gradients, 2, torch.float32)


def found(measured: Sequence[TimedWork], precision: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    for sample in measured:
        if sample.key[:2] == (KIND, precision):
            _, _, part, size = sample.key
            assert isinstance(size, (int, float))
            points.setdefault(str(part), {})[float(size)] = sample.seconds
    return {
        part: Curve(sizes=tuple(sorted(by_size)), seconds=tuple(by_size[size] for size in sorted(by_size)))
        for part, by_size in sorted(points.items())
    }
