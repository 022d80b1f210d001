"""Losses: what each requires of data and layout, and what a step reports. Code: ``models/losses.py``, same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

LossName = Literal["next_token", "dpo"]
Format = Literal["text", "chat", "prompt", "preference"]


class LossFacts(NamedTuple):
    """What everything but the loss itself needs to know about it."""

    # Sequences that are compared with each other, and so must share a micro-batch.
    rows: int = 1
    # Values reported with the loss: means over the same items.
    measures: tuple[str, ...] = ()
    # Whether it is built from tokens' log-probabilities, so that its backward pass recomputes the logits; otherwise
    # its gradients are computed in the forward pass.
    of_log_probabilities: bool = False
    # Whether it compares with the run's initial weights.
    reference: bool = False
    # The allowed values of ``data.format``.
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
    """What the loss in a row of metrics.jsonl is a mean over, judging by the row's other fields."""
    reporting = (one for one in LOSSES.values() if one.measures)
    return next((one.counted for one in reporting if row.keys() >= set(one.measures)), "token")
