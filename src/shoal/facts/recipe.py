"""The recipe: everything that defines the mathematics of a run. Changing it makes a different run."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shoal.facts.losses import LOSSES, LossFacts, LossName
from shoal.facts.model import Model
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.optimizers import Rule, rule_of
from shoal.facts.sample_clock import SampleClock

Precision = Literal["fp32", "bf16", "fp16", "fp64", "fp8"]
Scaling = Literal["tensorwise", "rowwise"]  # granularity of fp8 scales

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,20})?)\s*%\s*")


def read_count(text: str) -> int:
    """Parse a whole number as people write it: ``15T``, ``1.5B``, ``300M``, ``10_000``."""
    match = re.fullmatch(r"\s*([0-9][0-9_]{0,30}(?:\.[0-9]{1,30})?)\s*([kmbgt]?)\s*", text.lower())
    # Fractions, unlike floats, are exact at any size.
    count = Fraction(match[1].replace("_", "")) * _SUFFIXES[match[2]] if match else None
    if count is None or count.denominator != 1:
        raise ValueError(f"{text!r} is not a whole count such as 15T, 300M or 10000")
    return int(count)


def write_count(count: int) -> str:
    """Format a count with T, B or M where two decimals are exact: ``15T``, ``1.5B``, ``10000``."""
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size and 100 * count % size == 0:
            return f"{count / size:.12g}{suffix}"
    return str(count)


def read_span(value: int | float | str, steps: int) -> int:
    """Convert a part of the run to steps: ``100`` is 100 steps, ``"5%"`` and ``0.05`` are a share of the run."""
    return value if isinstance(value, int) else round(_share(value) * steps)


def _share(value: float | str) -> float:
    if isinstance(value, float):
        return value
    match = _PERCENT.fullmatch(value)
    if not match:
        raise ValueError('must be steps (100), a share (0.05) or a percentage ("5%")')
    return float(match[1]) / 100


# The most steps or tokens that a run may have.
MOST = 10**18


class RampStage(BaseModel):
    """A smaller batch size, used until the run has consumed this many samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    batch: int = Field(ge=1, le=10**9, description="sequences per step")
    samples: int = Field(ge=1, le=MOST, description="samples of the run at which the stage ends")


class ParameterOptions(BaseModel):
    """Overrides for parameters whose canonical names match a pattern."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    match: str = Field(min_length=1, description='a glob over canonical names, such as "*.self_attn.*"')
    lr: float | None = Field(None, gt=0, description="their peak learning rate; absent: the recipe's")
    weight_decay: float | None = Field(None, ge=0, description="absent: the recipe's")
    frozen: bool = Field(False, description="not trained: no gradient, no states")

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.match)


class Recipe(BaseModel):
    """Global batch, sequence length, optimizer, schedule, precision, seed. Wrong types are rejected, not coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    seq: int = Field(128, ge=1, le=10**9, description="tokens per sequence")
    batch: int = Field(16, ge=1, le=10**9, description="sequences per step, over all ranks (global batch)")
    steps: int = Field(300, ge=1, le=MOST, description="optimizer steps")
    tokens: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description='length of the run in tokens, instead of steps ("15T", "300M"); rounded up to whole steps',
    )

    batch_ramp: tuple[RampStage, ...] = Field(
        (),
        strict=False,  # TOML and JSON give lists
        description="smaller batches first: a list of {batch, samples}, each until so many samples have been used",
    )
    epochs: float | None = Field(
        None,
        gt=0,
        le=10**6,
        description="length of the run in passes over the data, instead of steps; rounded up to whole steps",
    )

    loss: LossName = Field(
        "next_token",
        description='what is minimised: "next_token", or "dpo", which prefers one of two answers (data.format)',
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="DPO: how far answers may become more or less likely than they were; less is further",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="DPO: the share of pairs that may be the wrong way round"
    )

    optimizer: Rule = Field("adamw", description='"adamw", "sgd", "lion", "adafactor" or "muon"')
    lr: float = Field(
        1e-2,
        gt=0,
        description="peak learning rate; the default suits the tiny model, larger models need less",
    )
    lr_reference_batch: int | None = Field(
        None,
        ge=1,
        description="linear scaling: the batch size that lr was tuned at; lr is multiplied by batch / this",
    )
    adamw_lr: float | None = Field(
        None,
        gt=0,
        description="Muon: peak learning rate of what AdamW updates, embeddings, head, norms and biases; absent: lr",
    )
    beta1: float = Field(
        0.9, ge=0, lt=1, description="AdamW: decay of the first moment; Lion: its share in the update"
    )
    beta2: float = Field(
        0.95, ge=0, lt=1, description="AdamW: decay of the second moment; Lion: decay of its moment"
    )
    eps: float = Field(1e-8, gt=0, description="AdamW: added to the denominator")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD and Muon: momentum; Muon's is Nesterov's")
    weight_decay: float = Field(0.1, ge=0, description="not applied to norms and biases")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of an exponential average of the weights, kept beside them; 0: none (see evaluate.ema)",
    )
    groups: tuple[ParameterOptions, ...] = Field(
        (), description="options of some parameters: [[recipe.groups]] with match, lr, weight_decay, frozen"
    )

    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description='learning-rate schedule: "constant", "linear", "cosine" or "wsd"'
    )
    warmup: int | float | str = Field("5%", description='steps (100), share (0.05) or percent ("5%")')
    decay: int | float | str = Field(
        "20%", description='last phase of the wsd schedule: steps (100), share (0.05) or percent ("5%")'
    )
    lr_min: float = Field(
        0.0, ge=0, le=1, description="final learning rate of linear, cosine and wsd, as a fraction of lr"
    )

    clip: float = Field(1.0, ge=0, description="maximum gradient norm; 0: no clipping")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of initial weights, sample order and dropout")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability")
    z_loss: float = Field(
        0.0,
        ge=0,
        description="weight of the squared log-normaliser of each token in the training loss; 0: none",
    )
    router_aux: float = Field(
        0.0,
        ge=0,
        description="experts: weight of the router's balance loss, a mean over sequences and a sum over layers;"
        " 0: none",
    )
    router_z: float = Field(
        0.0,
        ge=0,
        description="experts: weight of the squared log-normaliser of each token's router logits, summed over layers;"
        " 0: none",
    )
    router_bias: float = Field(
        1e-3,
        ge=0,
        description="experts whose router has a correction (deepseek_v3): how far a step moves it toward even loads",
    )
    precision: Precision = Field(
        "fp32", description='compute precision: "fp32", "bf16", "fp16", "fp64" or "fp8"'
    )
    fp8: Scaling = Field(
        "tensorwise",
        description='with precision "fp8", what shares a scale: "tensorwise", all of a tensor, or "rowwise"',
    )
    states: Literal["fp32", "bf16", "int8"] = Field(
        "fp32",
        description='precision of weights and optimizer states at rest: "fp32", "bf16" or "int8", which is AdamW\'s'
        " moments in 8 bits, block by block, and weights in bf16",
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic",
        description='how states narrower than fp32 are rounded: "stochastic", or "nearest", which loses small updates',
    )
    reduce: Literal["fp32", "bf16"] = Field(
        "fp32", description='precision of the gradient reduction: "fp32" or "bf16"'
    )

    @field_validator("tokens", mode="before")
    @classmethod
    def _tokens_as_people_write_them(cls, value: object) -> object:
        if isinstance(value, float) and value.is_integer():
            return int(value)  # 15e12
        return read_count(value) if isinstance(value, str) else value

    @field_validator("groups", mode="before")
    @classmethod
    def _tables(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("warmup", "decay")
    @classmethod
    def _span_is_sensible(cls, value: int | float | str) -> int | float | str:
        if isinstance(value, int):
            if value < 0:
                raise ValueError("must not be negative")
        elif not 0 <= _share(value) <= 1:
            raise ValueError("a share of the run must lie between 0 and 1 (0% and 100%)")
        return value

    @model_validator(mode="before")
    @classmethod
    def _tokens_decide_steps(cls, given: object) -> object:
        """Derive ``steps`` from ``tokens``."""
        if not isinstance(given, dict):
            return given
        try:
            tokens = cls._tokens_as_people_write_them(given.get("tokens"))
        except ValueError:
            return given  # the field's own validator reports this
        seq, batch = (given.get(name, cls.model_fields[name].default) for name in ("seq", "batch"))
        if not (_counts(tokens) and _counts(seq) and _counts(batch)) or tokens > MOST:
            return given
        try:
            ramp = [RampStage.model_validate(stage) for stage in given.get("batch_ramp", ())]
        except (TypeError, ValueError):
            return given
        clock = SampleClock(batch, tuple((stage.batch, stage.samples) for stage in ramp))
        steps = clock.steps_of(-(-tokens // seq))
        if given.get("steps", steps) != steps:
            raise ValueError(
                f"steps = {given['steps']} and tokens = {given['tokens']} disagree: "
                f"so many tokens are {steps} steps of {seq}·{batch}"
            )
        return {**given, "steps": steps}

    @model_validator(mode="after")
    def _ramp_goes_up(self) -> Recipe:
        batches = [*(stage.batch for stage in self.batch_ramp), self.batch]
        ends = [stage.samples for stage in self.batch_ramp]
        if batches != sorted(set(batches)) or ends != sorted(set(ends)):
            raise ValueError(
                "batch_ramp = …: batches and samples must grow from stage to stage, and end below "
                f"batch = {self.batch}"
            )
        return self

    @property
    def loss_facts(self) -> LossFacts:
        return LOSSES[self.loss]

    @property
    def peak_lr(self) -> float:
        return self.lr * (self.batch / self.lr_reference_batch if self.lr_reference_batch else 1.0)

    def options(self, name: str) -> ParameterOptions | None:
        """The overrides of a parameter, given its canonical name; the first matching group applies."""
        return next((group for group in self.groups if group.matches(name)), None)

    def frozen(self, name: str) -> bool:
        """Whether a parameter is not trained."""
        options = self.options(name)
        return options is not None and options.frozen

    @property
    def freezes(self) -> bool:
        """Whether any group is frozen."""
        return any(group.frozen for group in self.groups)

    def lr_share(self, name: str, dimensions: int) -> float:
        """A parameter's learning rate as a multiple of ``lr``; all parameters share the schedule."""
        options = self.options(name)
        if options is not None and options.lr is not None:
            return options.lr / self.lr
        by_adamw = self.optimizer == "muon" and rule_of(self.optimizer, name, dimensions) == "adamw"
        return self.adamw_lr / self.lr if by_adamw and self.adamw_lr is not None else 1.0

    def decay_of(self, name: str, dimensions: int) -> float:
        """A parameter's weight decay; by default 0 for vectors (norms and biases), unless a group overrides it."""
        options = self.options(name)
        if options is not None and options.weight_decay is not None:
            return options.weight_decay
        return self.weight_decay if dimensions >= 2 else 0.0

    @property
    def rounds_by_chance(self) -> bool:
        """Whether updates are rounded stochastically: when weights are stored narrower than the update computes."""
        return self.states != "fp32" and self.precision != "fp64" and self.rounding == "stochastic"

    @property
    def blockwise(self) -> bool:
        """Whether AdamW keeps its moments in 8 bits (``facts/blockwise.py``); under fp64 everything stays fp64."""
        return self.states == "int8" and self.precision != "fp64"

    @property
    def warmup_steps(self) -> int:
        return min(self.steps, read_span(self.warmup, self.steps))

    @property
    def decay_steps(self) -> int:
        return min(self.steps - self.warmup_steps, read_span(self.decay, self.steps))

    @property
    def clock(self) -> SampleClock:
        """How many samples each step consumes."""
        return SampleClock(self.batch, tuple((stage.batch, stage.samples) for stage in self.batch_ramp))

    @property
    def batch_unit(self) -> int:
        """The largest number that divides the batch size of every step."""
        return math.gcd(self.batch, *(stage.batch for stage in self.batch_ramp))

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.batch


def frozen_names(model: Model, recipe: Recipe) -> frozenset[str]:
    """Canonical names of the parameters that are not trained."""
    return _frozen_names(model, recipe) if recipe.freezes else frozenset()


@lru_cache(maxsize=256)
def _frozen_names(model: Model, recipe: Recipe) -> frozenset[str]:
    return frozenset(one.name for one in llama_parameters(model) if recipe.frozen(one.name))


def _counts(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
