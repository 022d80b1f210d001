"""Recipe: what defines the mathematics of a run. Change it and it is another run; change the layout and it is not."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Precision = Literal["fp32", "bf16", "fp16", "fp64", "fp8"]

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def read_count(text: str) -> int:
    """``15T``, ``1.5B``, ``300M``, ``10_000``: a whole number as people write it."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmbgt]?)\s*", text.lower())
    if not match:
        raise ValueError(f"{text!r} is not a count such as 15T, 300M or 10000")
    return round(float(match[1].replace("_", "")) * _SUFFIXES[match[2]])


def read_span(value: int | float | str, steps: int) -> int:
    """A span of a run, in steps: ``100`` is 100 steps, ``"5%"`` and ``0.05`` are that share of the run."""
    if isinstance(value, str):
        return round(float(value.strip().rstrip("%")) / 100 * steps)
    if isinstance(value, float):
        return round(value * steps)
    return value


class Recipe(BaseModel):
    """Global batch, length, optimizer, schedule, precision, seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq: int = Field(256, ge=1, description="tokens a sequence")
    batch: int = Field(16, ge=1, description="sequences a step, over all ranks")
    steps: int = Field(400, ge=1, description="steps of the run")
    tokens: int | None = Field(
        None, ge=1, description="length of the run in tokens, in place of steps (15T, 300M)"
    )

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(5e-3, gt=0, description="peak learning rate")
    lr_reference_batch: int | None = Field(
        None,
        ge=1,
        description="linear scaling rule: lr was tuned at this batch and is multiplied by batch / it",
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(0.1, ge=0, description="not applied to norms and biases")

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: int | float | str = Field("5%", description='steps (100), share (0.05) or percent ("5%")')
    decay: int | float | str = Field(
        "20%", description="last phase of the wsd schedule: steps, share or percent"
    )
    lr_min: float = Field(0.0, ge=0, le=1, description="where linear, cosine and wsd end, as a share of lr")

    clip: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clipping")
    seed: int = Field(0, ge=0, lt=2**63)
    dropout: float = Field(0.0, ge=0, lt=1)
    precision: Precision = Field("fp32", description="of the computation")
    states: Literal["fp32", "bf16", "int8"] = Field(
        "fp32", description="of weights and optimizer states at rest"
    )
    reduce: Literal["fp32", "bf16"] = Field("fp32", description="of gradients as they are summed over ranks")

    @field_validator("tokens", mode="before")
    @classmethod
    def _tokens_as_people_write_them(cls, value: object) -> object:
        return read_count(value) if isinstance(value, str) else value

    @field_validator("warmup", "decay")
    @classmethod
    def _span_is_sensible(cls, value: int | float | str) -> int | float | str:
        if isinstance(value, str) and not re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*%\s*", value):
            raise ValueError('must be steps (100), a share (0.05) or a percentage ("5%")')
        share = float(value.strip().rstrip("%")) / 100 if isinstance(value, str) else value
        if isinstance(value, int) and value < 0:
            raise ValueError("must not be negative")
        if not isinstance(value, int) and not 0 <= share <= 1:
            raise ValueError("a share of the run must lie between 0 and 1 (0% and 100%)")
        return value

    @model_validator(mode="before")
    @classmethod
    def _tokens_decide_steps(cls, given: object) -> object:
        """``tokens`` is a way to say ``steps``: rounded up to whole steps."""
        if not isinstance(given, dict) or given.get("tokens") is None:
            return given
        tokens = given["tokens"]
        tokens = read_count(tokens) if isinstance(tokens, str) else tokens
        per_step = given.get("seq", 256) * given.get("batch", 16)
        if isinstance(tokens, int) and isinstance(per_step, int) and per_step > 0:
            return {**given, "steps": max(1, -(-tokens // per_step))}
        return given

    @property
    def peak_lr(self) -> float:
        return self.lr * (self.batch / self.lr_reference_batch if self.lr_reference_batch else 1.0)

    @property
    def warmup_steps(self) -> int:
        return min(self.steps, read_span(self.warmup, self.steps))

    @property
    def decay_steps(self) -> int:
        return min(self.steps - self.warmup_steps, read_span(self.decay, self.steps))

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.batch
