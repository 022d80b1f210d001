"""Losses: what each asks of data and layout, and what a step reports of it. Its code has the same name in
``models/losses.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

LossName = Literal["next_token", "dpo"]
Format = Literal["text", "chat", "prompt", "preference"]


class LossFacts(NamedTuple):
    """What everyone but the loss itself needs to know of it."""

    # Sequences that are compared with each other, and so share a micro-batch.
    rows: int = 1
    # What is reported beside the loss: means over what it is a mean over.
    measures: tuple[str, ...] = ()
    # Whether it is made of tokens' log-probabilities, whose backward pass computes the logits again; otherwise its
    # gradients are made in the forward pass.
    of_log_probabilities: bool = False
    # Whether it compares with the weights that the run began with.
    reference: bool = False
    # What ``data.format`` may be.
    formats: tuple[Format, ...] = ("text", "chat", "prompt")
    counted: str = "token"  # what the loss is a mean over


LOSSES: dict[LossName, LossFacts] = {
    "next_token": LossFacts(),
    "dpo": LossFacts(
        rows=2,
        measures=("reward_margin", "reward_accuracy"),
        of_log_probabilities=True,
        reference=True,
        formats=("preference",),
        counted="pair",
    ),
}


def mean_over(row: Mapping[str, Any]) -> str:
    """What the loss of a row of metrics.jsonl is a mean over; rows say it by what they report."""
    reporting = (one for one in LOSSES.values() if one.measures)
    return next((one.counted for one in reporting if row.keys() >= set(one.measures)), "token")
