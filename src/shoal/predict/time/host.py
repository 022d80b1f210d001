"""Kernel-launch time on the host, and how much of it the device waits for.

Where it was not measured it is a property of the software stack, in layers' forward passes.
"""

from __future__ import annotations

from math import log, sqrt
from typing import NamedTuple

from shoal.facts.calibration.measurements import HostWork
from shoal.facts.precision import compute_width, state_width
from shoal.predict.time import operators, ring
from shoal.predict.time.compiled_operators import compiled_operators
from shoal.predict.time.cost_model import CostModel
from shoal.predict.time.measured_kernels import MeasuredKernels
from shoal.predict.time.operators import Widths
from shoal.predict.workload import Workload

# A layer's backward pass starts about twice as many kernels as its forward pass.
HOST_BACKWARD = 2.13
# Kernels of a layer are of all sizes: where host and device take about as long, some wait for one and some for the
# other. The power mean with this exponent lies as far above the larger of the two as was seen.
BLEND = 4.69
# Hosts do not all take equally long. A collective waits for the slowest of its ranks; this is the spread of one.
HOST_SPREAD = 0.0675

# The head with its loss, and the embedding, in layers' forward passes.
HOST_HEAD = 2.11
HOST_EMBEDDING = 0.5
# Once a step it starts the optimizer's kernels and waits for the norm: as long as so many layers' forward passes.
HOST_ONCE = 0.5


# A step waits for the slowest of its devices. Their rates were fitted on nodes of so many, whose slowest they are.
FITTED_ON = 8


class Hosts(NamedTuple):
    """Seconds that it takes to start one layer's kernels."""

    forward: float
    backward: float
    again: float


def of_layer(on: CostModel, recompute: str, compiled: bool, turns: int = 1) -> Hosts:
    """What a compiled block repeats it starts with its backward pass. ``turns``: of ring attention."""
    eager = operators.operators(on.model, _widths(on))
    forward, backward = compiled_operators(on.model, _widths(on)) if compiled else eager
    if turns > 1:
        forward, backward = (
            count + turns * each for count, each in zip((forward, backward), ring.OPERATORS, strict=True)
        )
    repeats = recompute != "none" and not (compiled and recompute == "selective")
    if (seen := _seen(on)) is not None:
        again = {"none": 0.0, "selective": seen.selective, "full": seen.full}[recompute] if repeats else 0.0
        return Hosts(forward * seen.forward, backward * seen.backward, forward * again)
    ahead, back = forward / eager[0] * on.stack.host, backward / eager[1] * on.stack.host
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[recompute] if repeats else 0.0
    return Hosts(ahead, HOST_BACKWARD * back, again * ahead)


def spread(tp: int) -> float:
    """How much longer the slowest of several hosts takes that wait for one another."""
    return 1 + HOST_SPREAD * sqrt(2 * log(tp)) if tp > 1 else 1.0


def slowest(devices: int, spread: float) -> float:
    """How much longer the slowest of so many devices computes than the slowest of those that rates were fitted on."""
    if devices <= FITTED_ON:
        return 0.0
    return spread * (sqrt(2 * log(devices)) - sqrt(2 * log(FITTED_ON)))


def of_ends(workload: Workload, on: CostModel, first: bool, last: bool) -> float:
    """The embedding, where a network begins; head and loss, where it ends."""
    if (seen := _seen(on)) is None:
        return (HOST_HEAD * last + HOST_EMBEDDING * first) * on.stack.host
    model, tokens, widths = workload.model, workload.tokens, _widths(on)
    rows = -(-model.vocab // workload.layout.tp)
    ends = [operators.head(model, tokens, rows, widths)] if last else []
    ends += [operators.embedding(model, tokens, rows, widths, False)] if first else []
    return sum(
        seen.forward * sum(work.operators for work in end.forward)
        + seen.backward * sum(work.operators for work in end.backward)
        for end in ends
    )


def ahead(workload: Workload, on: CostModel) -> bool:
    """Whether a step is issued while the device computes the one before, and so begins with that one's lead.

    Not where a loss scale has to be known first (``train/loop.py``), nor where ranks of a pipeline wait for each other.
    """
    return on.stack.issues_ahead and on.recipe.precision != "fp16" and workload.layout.pp == 1


def once(workload: Workload, on: CostModel, optimizer: float, lead: float) -> float:
    """The device waits where a step begins, where its norm is read, and for an optimizer that starts slowly.

    ``lead``: seconds that the host has left of a step's passes, where it takes them along into the next.
    """
    if (seen := _seen(on)) is None:
        return HOST_ONCE * on.stack.host
    tensors = operators.tensors(workload.model) / workload.layout.pp
    if ahead(workload, on):
        return max(0.0, seen.once + tensors * seen.tensor - optimizer - lead)
    return seen.once + max(0.0, tensors * seen.tensor - optimizer)


def at_least_once(on: CostModel) -> float:
    """What ``once`` is in every layout."""
    if (seen := _seen(on)) is None:
        return HOST_ONCE * on.stack.host
    return 0.0 if on.stack.issues_ahead else seen.once


Pass = tuple[float, float]  # seconds of the device, and of the host that starts it


class Wait(NamedTuple):
    """Of a micro-batch."""

    seconds: float  # how much longer it takes than the device alone would
    lead: float  # of the host, at its end; of a step that is issued behind another without a pause


def waiting(
    on: CostModel, forward: Pass, ends: Pass, backward: Pass, again: Pass | None, micro_batches: int | None
) -> Wait:
    """Where so many micro-batches follow one another; None: one step's follow the last one's."""
    if _seen(on) is None:
        return Wait(sum(waits(*one) for one in (forward, backward, *([again] if again else []), ends)), 0.0)
    # What is repeated is repeated layer by layer, in between the layers' backward passes.
    more, started = again or (0.0, 0.0)
    passes = [forward, ends, (backward[0] + more, backward[1] + started)]
    if micro_batches is None:
        lag = sum(host - device for device, host in passes)
        return Wait(max(0.0, lag), max(0.0, -lag))
    return Wait(queued(passes, micro_batches), 0.0)


def queued(passes: list[Pass], times: int) -> float:
    """The host runs ahead of the device wherever it is faster, and lives on its lead wherever it is slower.

    The device is done when the slowest way is: the host up to some point, and from there the device. Within a pass both
    go evenly, so that point is the end of one. Of many equal micro-batches it is in the first or in the last.
    """
    lag = longest = 0.0
    for device, host in passes:
        lag += host - device
        longest = max(longest, lag)
    return max(longest, lag * (times - 1) + longest) / times


def waits(device: float, host: float) -> float:
    """As ``waiting``, of one pass, where neither was measured: kernels differ, and none is known by itself."""
    both: float = (device**BLEND + host**BLEND) ** (1 / BLEND)
    return both - device


def _seen(on: CostModel) -> HostWork | None:
    return on.kernels.host if isinstance(on.kernels, MeasuredKernels) else None


def _widths(on: CostModel) -> Widths:
    return Widths(compute_width(on.recipe), state_width(on.recipe))
