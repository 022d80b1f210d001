"""What a request may leave open (device count, batch, sequence length), and what it may not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.facts.cluster import devices as catalogue
from shoal.facts.model import Model
from shoal.facts.model.parameters import active_parameter_count
from shoal.facts.problem import Problem

# Pretraining sequences are usually no longer.
LONGEST = 8192


def device_alone(on: str) -> bool:
    """Whether a cluster is given as a device only, so that the count is the question. A CPU means this machine."""
    return catalogue.find(on) not in (None, catalogue.CPU)


def pretraining_seq(model: Model) -> int:
    """Tokens per sequence: as many as the model supports, up to the usual length."""
    return min(model.max_positions, LONGEST)


def pretraining_batch(model: Model, seq: int, tokens: int, devices: int) -> int:
    """Sequences per step for a run over ``tokens``, rounded to a number that this many devices divide.

    DeepSeek LLM (2024), equation 1: 0.2920 · C^0.3271 tokens, for C FLOPs in total.
    """
    wanted = 0.2920 * (6.0 * active_parameter_count(model) * tokens) ** 0.3271 / max(1, seq)
    if wanted >= devices:
        return int(devices * round(wanted / devices))
    # Fewer sequences than devices: take a number that many of them divide.
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    return int(odd * 2 ** max(0, round(math.log2(max(1.0, wanted / odd)))))


def lacking(
    counted: bool,
    layout: object,
    batch: int | None,
    tokens: object,
    price: float | None,
    deadline: object,
    budget: object,
) -> Iterator[Problem]:
    """What must be specified to answer the rest; None marks what was omitted."""
    if batch is None and tokens is None and deadline is budget is None:
        yield Problem("--batch is missing", "--batch 512; or --tokens 1T, for the batch that is usual then")
    if not counted and layout is not None:
        yield Problem("--layout needs the number of devices", "--on 8xH100")
    if not counted and tokens is None and not (deadline is budget is None):
        yield Problem("--on without a number needs the length of the run", "--tokens 1T, or --on 64xH100")
    if budget is not None and price is None:
        yield Problem("--budget needs a price", "--price 2.5, per GPU-hour")
    if price is not None and tokens is None and budget is None:
        yield Problem("--price needs the length of the run in tokens", "--tokens 15T --price 2.5")
