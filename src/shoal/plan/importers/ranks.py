"""Derive data ranks and batch from whichever of these numbers an imported file gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.facts.config.check import shorten
from shoal.facts.layout import Layout
from shoal.facts.layout.legality import nearest_multiple
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe
from shoal.plan.importers.reading import Reading


@dataclass(frozen=True)
class BatchShare:
    """The data ranks of a layout, and how they divide the batch."""

    ranks: int
    batch: int
    micro: int | None


def find_share(
    reading: Reading,
    world: int | None,
    inner: int,  # ranks that see the same data: tensor, sequence, pipeline
    batch: int | None,
    micro: int | None,
    accumulation: int | None,
) -> BatchShare:
    """The data ranks, from the world size or else from the batch; and the batch, as given or computed."""
    if world is None:
        if not (batch and micro and accumulation):
            raise BadInput(
                f"{reading.source} does not say how many ranks there are",
                "--gpus 8, or --on 8xH100; or there the batch, the micro-batch and the accumulation, all three",
            )
        ranks = _exact(reading, batch, micro * accumulation, "micro-batch · accumulation")
    else:
        ranks = _exact(reading, world, inner, "tensor · sequence · pipeline ranks")
    if batch is None and micro is not None:
        batch = micro * (accumulation or 1) * ranks
    elif batch is None:
        # Each rank needs a sequence for each of its micro-batches.
        batch = nearest_multiple(Recipe.model_fields["batch"].default, ranks * (accumulation or 1))
        reading.note(f"no batch: {batch} sequences over {ranks} data ranks were put in")
    each = _exact(reading, batch, ranks, "data ranks")
    if micro is not None:
        steps = _exact(reading, each, micro, "sequences of a micro-batch")
        if accumulation is not None and steps != accumulation:
            raise BadInput(
                f"{reading.source}: a batch of {batch} is not micro-batch {micro} · accumulation {accumulation} · "
                f"{ranks} data ranks",
                f"an accumulation of {steps}, or {micro * accumulation * ranks} as the batch",
            )
    elif accumulation is not None:
        micro = _exact(reading, each, accumulation, "accumulation steps")
    return BatchShare(ranks, batch, micro)


def _exact(reading: Reading, total: int, part: int, what: str) -> int:
    if part < 1 or total < 1 or total % part:
        raise BadInput(
            f"{reading.source}: {total} does not divide by {part} {what}",
            "numbers that divide, or another --gpus",
        )
    return total // part


def written_layout(reading: Reading, **fields: Any) -> str:
    """These fields written as a layout, with every illegal value reported."""
    try:
        return str(Layout(**fields))
    except ValidationError as error:
        raise BadInput(
            [
                Problem(
                    f"{reading.source}: as layout, {'.'.join(map(str, detail['loc']))} = "
                    f"{shorten(repr(detail['input']))}: {detail['msg']}",
                    "another value there",
                )
                for detail in error.errors()
            ]
        ) from None
