"""Compute-optimal training: how many tokens for a model, how large a model for tokens, and both for a compute budget.

A dense model with N parameters has loss E + A / N^α + B / D^β after D tokens, and its training takes 6·N·D FLOPs;
where the two terms fall equally fast, no other split of the same compute reaches a lower loss. The fit is Hoffmann et
al.'s third approach (Training Compute-Optimal Large Language Models, 2022) as corrected by Besiroglu et al.
(Chinchilla Scaling: A Replication Attempt, 2024): it agrees with their other two, at about 20 tokens per parameter. It
minimises training cost; a model that will serve many users is trained on more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.plan.amounts import short

A, ALPHA = 482.01, 0.3478
B, BETA = 2085.43, 0.3658
FIT = "Hoffmann et al. 2022, as refitted by Besiroglu et al. 2024"


def tokens_for(parameters: float) -> float:
    """Compute-optimal tokens for a model of this size."""
    return float((BETA * B / (ALPHA * A) * parameters**ALPHA) ** (1 / BETA))


def parameters_for(tokens: float) -> float:
    """Compute-optimal parameters for this many tokens."""
    return float((ALPHA * A / (BETA * B) * tokens**BETA) ** (1 / ALPHA))


def split(flops: float) -> tuple[float, float]:
    """The parameters and tokens that use this compute best."""
    products = flops / 6
    ratio = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    parameters = ratio * products ** (BETA / (ALPHA + BETA))
    return parameters, products / parameters


@dataclass(frozen=True)
class ComputeOptimal:
    """A model compared with compute-optimal training."""

    parameters: int  # active per token, since the fit is for dense models
    tokens: float  # optimal for this model
    asked: int | None  # the run's own

    @property
    def text(self) -> str:
        own = f"{short(self.tokens)} tokens for {short(self.parameters)} parameters"
        said = f"compute-optimal: {own} ({self.tokens / self.parameters:.0f} each; {FIT})"
        if self.asked is None or abs(self.asked / self.tokens - 1) < 0.01:
            return said
        larger, fewer = split(6.0 * self.parameters * self.asked)
        return (
            f"{said}; {short(self.asked)} are {self.asked / self.tokens:.2g} times that, optimal for "
            f"{short(parameters_for(self.asked))}; the same compute: {short(larger)} on {short(fewer)} tokens"
        )

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "parameters": self.parameters,
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens / self.parameters,
            "fit": FIT,
        }
        if self.asked is not None:
            larger, fewer = split(6.0 * self.parameters * self.asked)
            document |= {
                "asked_over_optimal": self.asked / self.tokens,
                "parameters_for_tokens": parameters_for(self.asked),
                "same_compute": {"parameters": larger, "tokens": fewer},
            }
        return document
