"""Kernel-launch time on the host, and how much of it the device waits for.

Without measurements it is a property of the software stack, in units of a layer's forward pass.
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

# A layer's backward pass launches about twice as many kernels as its forward pass.
HOST_BACKWARD = 2.13
# Kernels of a layer vary in size: where host and device take about as long, some kernels wait for one and some for the
# other. The power mean with this exponent exceeds the larger of the two by as much as was measured.
BLEND = 4.69
# Hosts vary in speed, and a collective waits for its slowest rank; this is the relative spread of one host.
HOST_SPREAD = 0.0675

# The head with its loss, and the embedding, in units of a layer's forward pass.
HOST_HEAD = 2.11
HOST_EMBEDDING = 0.5
# Once per step the host launches the optimizer and waits for the norm: this many layers' forward passes.
HOST_ONCE = 0.5


# A step waits for its slowest device. Rates were fitted on nodes of this many devices, so they already are the slowest
# of that many.
FITTED_ON = 8


class Hosts(NamedTuple):
    """Seconds to launch one layer's kernels."""

    forward: float
    backward: float
    again: float


def of_layer(on: CostModel, recompute: str, compiled: bool, turns: int = 1) -> Hosts:
    """Launch times of a layer. A compiled block launches recomputation with its backward pass. ``turns``: of ring
    attention.
    """
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
    """How much longer the slowest of several hosts takes, when they wait for one another."""
    return 1 + HOST_SPREAD * sqrt(2 * log(tp)) if tp > 1 else 1.0


def slowest(devices: int, spread: float) -> float:
    """How much longer the slowest of ``devices`` computes than the slowest of those that rates were fitted on."""
    if devices <= FITTED_ON:
        return 0.0
    return spread * (sqrt(2 * log(devices)) - sqrt(2 * log(FITTED_ON)))


def of_ends(workload: Workload, on: CostModel, first: bool, last: bool) -> float:
    """Launch time of the embedding and of the head with its loss, on the stages that have them."""
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
    """Whether a step is launched while the device still computes the previous one, and so starts with the host ahead.

    Not if a loss scale must be known first (``train/loop.py``), nor if pipeline ranks wait for each other.
    """
    return on.stack.issues_ahead and on.recipe.precision != "fp16" and workload.layout.pp == 1


def once(workload: Workload, on: CostModel, optimizer: float, lead: float) -> float:
    """The device idles when a step begins, when its norm is read, and while a slow optimizer is launched.

    ``lead``: seconds by which the host is ahead after a step's passes, if it can carry them into the next step.
    """
    if (seen := _seen(on)) is None:
        return HOST_ONCE * on.stack.host
    tensors = operators.tensors(workload.model) / workload.layout.pp
    if ahead(workload, on):
        return max(0.0, seen.once + tensors * seen.tensor - optimizer - lead)
    return seen.once + max(0.0, tensors * seen.tensor - optimizer)


def at_least_once(on: CostModel) -> float:
    """The value of ``once`` common to all layouts: a lower bound."""
    if (seen := _seen(on)) is None:
        return HOST_ONCE * on.stack.host
    return 0.0 if on.stack.issues_ahead else seen.once


Pass = tuple[float, float]  # seconds on the device, and on the host that launches it


class Wait(NamedTuple):
    """Waiting time of one micro-batch."""

    seconds: float  # extra time over the device alone
    lead: float  # seconds by which the host is ahead at the end, if the next step follows without a pause


def waiting(
    on: CostModel, forward: Pass, ends: Pass, backward: Pass, again: Pass | None, micro_batches: int | None
) -> Wait:
    """With ``micro_batches`` in a row; None: one step's follow the previous step's."""
    if _seen(on) is None:
        return Wait(sum(waits(*one) for one in (forward, backward, *([again] if again else []), ends)), 0.0)
    # Recomputation happens layer by layer, between the layers' backward passes.
    more, started = again or (0.0, 0.0)
    passes = [forward, ends, (backward[0] + more, backward[1] + started)]
    if micro_batches is None:
        lag = sum(host - device for device, host in passes)
        return Wait(max(0.0, lag), max(0.0, -lag))
    return Wait(queued(passes, micro_batches), 0.0)


def queued(passes: list[Pass], times: int) -> float:
    """Seconds that the device waits per micro-batch: the host gains a lead where it is faster and spends it where it
    is slower.

    The device finishes with the slowest path: the host up to some point, and the device from there. Within a pass both
    progress evenly, so that point is the end of a pass. Among equal micro-batches it lies in the first or the last.
    """
    lag = longest = 0.0
    for device, host in passes:
        lag += host - device
        longest = max(longest, lag)
    return max(longest, lag * (times - 1) + longest) / times


def waits(device: float, host: float) -> float:
    """Waiting time of one pass without measurements: individual kernels are unknown."""
    both: float = (device**BLEND + host**BLEND) ** (1 / BLEND)
    return both - device


def _seen(on: CostModel) -> HostWork | None:
    return on.kernels.host if isinstance(on.kernels, MeasuredKernels) else None


def _widths(on: CostModel) -> Widths:
    return Widths(compute_width(on.recipe), state_width(on.recipe))
