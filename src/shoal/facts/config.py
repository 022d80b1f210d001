"""Config: everything a run needs, with a default for each value, so that an empty file trains the embedded default."""

from __future__ import annotations

import re
import types
import typing
import unicodedata
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from shoal.facts.layout import Layout
from shoal.facts.recipe import Recipe

# Of a low-rank addition: beyond the width of any layer.
MOST_RANKS = 1 << 16
# File systems allow 255 bytes; a run that is moved aside gets a suffix.
LONGEST_SLUG = 120


class Section(BaseModel):
    """Base of the config's tables: unknown keys and values of another type are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field("default", min_length=1, description="free text; its slug is the run's directory")
    dir: str = Field("runs", min_length=1, description="where run directories live")
    strict: bool = Field(
        False, description="bit-identical losses and weights across dp, fsdp, pp and world sizes"
    )
    observe: bool = Field(
        False,
        description="count one step's collectives and live bytes: observed/rank-*.json in the run's directory",
    )

    ledger: bool = Field(
        False,
        description="write down which samples every step used: ledger/rank-*.jsonl in the run's directory",
    )
    environment: list[str] = Field(
        [],
        description="names of variables that ranks get of your environment, beside those that they need; MY_* is "
        "all that begin so",
    )

    @field_validator("environment")
    @classmethod
    def _names_alone(cls, names: list[str]) -> list[str]:
        if not all(re.fullmatch(r"[A-Za-z_*?][A-Za-z0-9_*?]*", name) for name in names):
            raise ValueError("must be names of variables, without their values")
        return names

    @property
    def slug(self) -> str:
        """The name as one plain directory: letters, digits, ``_ - .``, and never a path or a hidden one."""
        letters = unicodedata.normalize("NFKC", self.name).lower()
        words = re.sub(r"[^\w.]+", "-", letters).encode()[:LONGEST_SLUG].decode(errors="ignore")
        return words.strip("-.") or "run"


class Lora(Section):
    rank: int = Field(16, ge=1, le=MOST_RANKS, description="width of the trained addition")
    alpha: float = Field(32.0, gt=0, description="the addition is scaled by alpha / rank")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1, description="projections that get one"
    )


class ModelSection(Section):
    preset: str = Field("tiny", min_length=1, description="shape by name, such as tiny or llama3-8b")
    path: str | None = Field(
        None,
        min_length=1,
        description="shape from a Hugging Face model directory or config.json, in place of preset",
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description="weights, and unless named the shape, from a Hugging Face model directory",
    )
    lora: Lora | None = Field(
        None, description="a table of rank, alpha, targets: train a low-rank addition, not the weights"
    )

    @model_validator(mode="before")
    @classmethod
    def _weights_imply_their_shape(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("init_from") is None or given.keys() & {"path", "preset"}:
            return given
        return {**given, "path": given["init_from"]}


class DataSection(Section):
    source: str = Field(
        "stdlib", description='"stdlib", a glob of text or JSONL files, or a dataset directory'
    )
    mix: list[dict[str, str | float]] = Field([], description="several sources with weights")
    tokenizer: str = Field("bytes", description='"bytes" or the path of a tokenizer.json')
    end_token: str | None = Field(
        None, description="the token that closes a document, where the tokenizer has no obvious one"
    )
    field: str = Field("text", description="of a JSONL row")
    packing: bool = Field(
        True, description="documents fill rows end to end; false: one document a row, padded"
    )
    within_documents: bool = Field(False, description="attention and targets stay inside a document")
    heldout: float = Field(0.02, ge=0, lt=1, description="share of the documents kept for evaluation")
    max_bad_rows: float = Field(
        0.01, ge=0, le=1, description="share of broken rows that is tolerated, and always a few; 0: none"
    )
    cache: str = Field("~/.cache/shoal", min_length=1, description="where tokenised data is kept")
    workers: int = Field(0, ge=0, le=4096, description="processes that tokenise; 0: one a core")


class EvaluateSection(Section):
    every: int = Field(100, ge=0, description="steps; 0: only after the last one")
    batches: int = Field(16, ge=0, le=10**9, description="held-out batches an evaluation; 0: none")
    samples: int = Field(1, ge=0, le=1000, description="texts generated at each evaluation")
    sample_tokens: int = Field(80, ge=1, le=10**6, description="tokens of a generated text")
    temperature: float = Field(0.8, ge=0, le=1e6, description="of generated texts; 0: the likeliest token")


class CheckpointSection(Section):
    every: int = Field(100, ge=0, description="steps; 0: never; otherwise the last step is committed too")
    to: str | None = Field(
        None,
        min_length=1,
        description="a URL such as s3://bucket/runs: checkpoints lie below it under the name of the run's directory, "
        "in place of the directory itself",
    )
    keep: int = Field(2, ge=1, description="the last ones are kept")
    keep_every: int = Field(0, ge=0, description="steps; those of every n-th step are kept for good; 0: none")
    keep_best: int = Field(0, ge=0, description="those with the lowest held-out loss are kept as well")
    background: bool = Field(True, description="write while training goes on")
    memory: int = Field(
        0,
        ge=0,
        description="steps between copies of the state in this machine's memory, where they outlive a lost rank; "
        "0: none, 1: a lost rank costs one step",
    )


class CompileSection(Section):
    enabled: bool = Field(False, description="compile the blocks with torch.compile")


class TuneSection(Section):
    bucket_mb: float = Field(25.0, gt=0, le=1e6, description="gradients summed at once, in MiB")
    prefetch: int = Field(1, ge=0, le=10**4, description="sharded groups gathered ahead")
    persist_below: int = Field(
        0, ge=0, description="sharded groups with fewer elements stay gathered until their backward pass"
    )


class FaultSection(Section):
    timeout: float = Field(
        60.0, gt=0, le=1e7, description="seconds a collective may take before its rank is given up"
    )
    stall: float = Field(
        30.0,
        ge=0,
        le=1e7,
        description="seconds a rank may keep its peers waiting within a step before the run says who and where; "
        "at least 1, at most half of timeout; 0: never",
    )
    max_restarts: int = Field(3, ge=0, le=10**6, description="times that workers are restarted after a fault")
    check_every: int = Field(
        100,
        ge=0,
        description="steps between looks for weights or optimizer states that changed by themselves, or that differ "
        "between ranks which hold the same; 0: never",
    )
    nonfinite: Literal["skip", "retry", "stop"] = Field(
        "skip", description="when a gradient is not finite: skip the update, retry the step once, or stop"
    )
    spike: float = Field(
        10.0,
        ge=0,
        description="robust deviations above the usual that make a loss, or a gradient, a spike; 0: none",
    )
    on_spike: Literal["warn", "skip"] = Field(
        "warn", description="note spikes of the loss; or also skip updates whose gradient is one"
    )
    straggler: float = Field(
        2.0, ge=0, description="a rank that takes so many times as long as its peers is named; 0: none"
    )


class TrackSection(Section):
    tensorboard: bool = Field(False, description="send metrics to TensorBoard")
    wandb: bool = Field(False, description="send metrics to Weights & Biases")
    mlflow: bool = Field(False, description="send metrics to MLflow")
    trackio: bool = Field(False, description="send metrics to Trackio")


class ClusterSection(Section):
    on: str = Field("local", description='"local", "64xH100", "4xcpu" or a file')
    share: bool = Field(
        False, description="several ranks may share a GPU: for proofs and memory, not for speed"
    )
    interface: str | None = Field(
        None,
        min_length=1,
        description="the network interface at which ranks meet, such as eth0; by default loopback alone",
    )


class Config(Section):
    layout: str = Field("auto", description='"auto" or, say, "fsdp=4,tp=2"')
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    recipe: Recipe = Recipe()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    compile: CompileSection = CompileSection()
    tune: TuneSection = TuneSection()
    fault: FaultSection = FaultSection()
    track: TrackSection = TrackSection()
    cluster: ClusterSection = ClusterSection()

    @field_validator("layout")
    @classmethod
    def _layout_reads(cls, text: str) -> str:
        return "auto" if text.strip() == "auto" else str(Layout.parse(text))


def find_field(key: str, schema: type[BaseModel] = Config) -> FieldInfo | None:
    """The field of a dotted key such as ``recipe.lr``; None where there is none."""
    name, dot, rest = key.partition(".")
    field = schema.model_fields.get(name)
    if field is None or not dot:
        return field
    table = table_of(field)
    return find_field(rest, table) if table else None


def describe(key: str) -> str:
    """What a value means, in the schema's words."""
    field = find_field(key)
    return (field.description or "") if field else ""


def type_of(field: FieldInfo) -> Any:
    """A field's type, with ``| None`` taken off."""
    annotation: Any = field.annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The schema of a field that is a table."""
    kind = type_of(field)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
