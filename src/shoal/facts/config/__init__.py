"""Config: everything a run needs. Every value has a default, so an empty file trains the embedded default."""

from __future__ import annotations

import re
import types
import typing
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from shoal.facts.layout import Layout
from shoal.facts.losses import Format
from shoal.facts.model import AdapterKind, Adapters, FrozenBase, Model
from shoal.facts.model.parameters import projections
from shoal.facts.recipe import Recipe

# The maximum LoRA rank: beyond the width of any layer.
MOST_RANKS = 1 << 16
# Adapter targets: PEFT's word for every projection.
EVERY_PROJECTION = "all-linear"
# File systems allow 255 bytes, and a run that is moved aside gets a suffix.
LONGEST_SLUG = 120
# The validation set held out of the training data, and the one that evaluate.source defines without a name.
HELDOUT, VALIDATION = "heldout", "validation"


class Section(BaseModel):
    """Base of the config's tables: rejects unknown keys and values of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field("default", min_length=1, description="free text; its slug names the run directory")
    dir: str = Field("runs", min_length=1, description="parent directory of run directories")
    strict: bool = Field(
        False, description="bit-identical losses and weights across dp, fsdp, pp and world sizes"
    )
    observe: bool = Field(
        False,
        description="record one step's collectives and live bytes in observed/rank-*.json of the run directory",
    )

    ledger: bool = Field(
        False,
        description="record the samples of every step in ledger/rank-*.jsonl of the run directory",
    )
    environment: list[str] = Field(
        [],
        description="environment variables passed on to ranks, beyond those they need; MY_* matches all that start "
        "with MY_",
    )

    @field_validator("environment")
    @classmethod
    def _names_alone(cls, names: list[str]) -> list[str]:
        if not all(re.fullmatch(r"[A-Za-z_*?][A-Za-z0-9_*?]*", name) for name in names):
            raise ValueError("must be names of environment variables, without values")
        return names

    @property
    def slug(self) -> str:
        """The name as a plain directory name: letters, digits, ``_ - .``, never a path or hidden."""
        letters = unicodedata.normalize("NFKC", self.name).lower()
        words = re.sub(r"[^\w.]+", "-", letters).encode()[:LONGEST_SLUG].decode(errors="ignore")
        return words.strip("-.") or "run"


_NAMES = TypeAdapter(Annotated[list[str], Field(min_length=1)])


def _targets(value: Any) -> Any:
    """Not left to the union, whose errors would be those of both branches."""
    return value if value == EVERY_PROJECTION else _NAMES.validate_python(value)


class Lora(Section):
    kind: AdapterKind = Field(
        "lora", description="lora; dora: lengths of rows are trained apart from directions"
    )
    rank: int = Field(16, ge=1, le=MOST_RANKS, description="rank of the adapters")
    alpha: float = Field(32.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of what adapters read")
    targets: Annotated[Literal["all-linear"] | list[str], PlainValidator(_targets)] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        description="projections that get an adapter, or all-linear: every one of the blocks but routed experts",
    )
    base: FrozenBase = Field(
        "bf16",
        description="what frozen projections rest in: bf16 (recipe.precision), or nf4: 4 bits, as in QLoRA",
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description="first adapters: a directory that PEFT has saved; without it B is zero",
    )

    def targets_in(self, model: Model) -> tuple[str, ...]:
        return projections(model) if self.targets == EVERY_PROJECTION else tuple(self.targets)

    def adapters_of(self, model: Model) -> Adapters:
        return Adapters(
            rank=self.rank,
            alpha=self.alpha,
            targets=self.targets_in(model),
            kind=self.kind,
            base=self.base,
            dropout=self.dropout,
        )


class ModelSection(Section):
    preset: str = Field("tiny", min_length=1, description="model shape by name, such as tiny or llama3-8b")
    path: str | None = Field(
        None,
        min_length=1,
        description="model shape, instead of preset: a Hugging Face directory or config.json, a run or a checkpoint",
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description="first weights (and the shape, unless preset or path is set): a Hugging Face model directory or "
        "Hub name, a run or a checkpoint",
    )
    lora: Lora | None = Field(
        None,
        description="train LoRA adapters instead of the weights: a table of kind, rank, alpha, dropout, targets, base",
    )

    @model_validator(mode="before")
    @classmethod
    def _weights_imply_their_shape(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("init_from") is None or given.keys() & {"path", "preset"}:
            return given
        return {**given, "path": given["init_from"]}


class MixChange(Section):
    step: int = Field(ge=2, description="the first step with another weight")
    weight: float = Field(ge=0, description="the weight from there on")


class MixPart(Section):
    """One source of a mix. Row settings that it omits come from the data section."""

    source: str = Field(min_length=1, description="as data.source")
    weight: float = Field(1.0, ge=0, description="its share of the samples, relative to the other weights")
    later: list[MixChange] = Field([], description="other weights from later steps on")
    field: str | None = Field(None, description="as data.field")
    format: Format | None = Field(None, description="as data.format")
    template: str | None = Field(None, min_length=1, description="as data.template")
    loss_on: Literal["answers", "all"] | None = Field(None, description="as data.loss_on")

    def weight_at(self, step: int) -> float:
        past = [change for change in self.later if change.step <= step]
        return max(past, key=lambda change: change.step).weight if past else self.weight


class DataSection(Section):
    source: str = Field(
        "stdlib",
        description='"stdlib", a glob or URL of text, JSONL, Parquet or Arrow files, or a dataset directory',
    )
    mix: list[MixPart] = Field(
        [], description="several sources instead of one, each a table of source, weight and later"
    )
    tokenizer: str = Field(
        "bytes",
        description='"bytes", a tokenizer.json or a model directory; unset: that of model.init_from or model.path, if '
        "it has one",
    )
    end_token: str | None = Field(
        None, description="the token that ends a document, if the tokenizer has no obvious one"
    )
    field: str = Field("text", description="the field of a JSONL row that holds the text")
    format: Format = Field(
        "text",
        description='what a row is: "text"; "chat", messages or conversations; "prompt", a prompt with its answer; '
        '"preference", a prompt with a chosen and a rejected answer',
    )
    template: str = Field(
        "auto",
        min_length=1,
        description='chat template: "auto", that of the tokenizer; the path of a Jinja file; or "none", prompt and '
        "answer as they are",
    )
    loss_on: Literal["answers", "all"] | None = Field(
        None, description='"answers" or "all"; unset: answers, where rows have them'
    )
    packing: bool = Field(True, description="pack documents end to end; false: one document per row, padded")
    within_documents: bool = Field(
        False,
        description="attention and targets do not cross document boundaries; unset: true where rows are conversations "
        "(data.format)",
    )
    shuffle: Literal["global", "window"] = Field(
        "global",
        description='order of samples: "global", a permutation of all; "window", of shards, then of the samples of '
        "every data.window of them",
    )
    window: int = Field(
        8,
        ge=1,
        le=10**6,
        description='shards that are shuffled together with shuffle = "window", and kept here',
    )
    heldout: float = Field(0.02, ge=0, lt=1, description="fraction of documents held out for validation")
    max_bad_rows: float = Field(
        0.01,
        ge=0,
        le=1,
        description="fraction of broken rows to tolerate (a few are always tolerated); 0: none",
    )
    cache: str = Field("~/.cache/shoal", min_length=1, description="directory for tokenised data")
    workers: int = Field(0, ge=0, le=4096, description="tokenizer processes; 0: one per core")
    ray: str | None = Field(
        None, min_length=1, description="tokenise on a Ray cluster: its address, HOST:PORT, or auto"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_origin(cls, given: object) -> object:
        """Accept a run's own config, which has the default source next to a mix."""
        if isinstance(given, dict) and given.get("mix") and given.get("source", "stdlib") != "stdlib":
            raise ValueError("source = … and mix = … are both set")
        return given

    @model_validator(mode="before")
    @classmethod
    def _conversations_apart(cls, given: object) -> object:
        """Conversations that share a row must not attend to each other."""
        if not isinstance(given, dict) or "within_documents" in given:
            return given
        return {**given, "within_documents": True} if {"chat", "prompt"} & _formats(given) else given

    @model_validator(mode="before")
    @classmethod
    def _answers_have_rows_of_their_own(cls, given: object) -> object:
        if not isinstance(given, dict) or "preference" not in _formats(given):
            return given
        if given.get("packing") is True:
            raise ValueError(
                'packing = true with format = "preference": an answer has a row of its own: packing = false'
            )
        return {**given, "packing": False}

    @property
    def templated(self) -> bool:
        """Whether its rows become text by the tokenizer's own chat template."""
        return self.format != "text" and self.template == "auto"

    @property
    def parts(self) -> list[DataSection]:
        """Each source with its row settings; a single one without a mix."""
        names = ("source", "field", "format", "template", "loss_on")
        said = [{name: getattr(part, name) for name in names} for part in self.mix]
        mine = [{name: value for name, value in one.items() if value is not None} for one in said]
        return [self.model_copy(update={"mix": [], **one}) for one in mine] or [self]


def _formats(given: dict[str, Any]) -> set[str]:
    """The row formats in a data section and its parts, as written."""
    mix = given.get("mix")
    tables = [given, *(mix if isinstance(mix, list) else ())]
    return {str(one.get("format")) for one in tables if isinstance(one, dict)}


class EvaluateSection(Section):
    every: int = Field(100, ge=0, description="steps between evaluations; 0: only after the last step")
    batches: int = Field(16, ge=0, le=10**9, description="validation batches per evaluation; 0: none")
    ema: bool = Field(
        False, description="evaluate and generate with the average of the weights that recipe.ema keeps"
    )
    samples: int = Field(1, ge=0, le=1000, description="texts to generate per evaluation")
    sample_tokens: int = Field(80, ge=1, le=10**6, description="tokens per generated text")
    temperature: float = Field(0.8, ge=0, le=1e6, description="sampling temperature; 0: greedy")
    source: str | dict[str, str] | None = Field(
        None, description="data to validate on: as data.source, or a table of names, each with one"
    )
    watch: str | None = Field(
        None,
        description="the validation set that checkpoint.keep_best and patience go by; unset: the first of "
        "evaluate.source, else heldout",
    )
    patience: int = Field(
        0, ge=0, description="end the run after this many evaluations without a lower loss; 0: never"
    )

    @property
    def sources(self) -> dict[str, str]:
        """Validation sources besides data.heldout, by name."""
        if self.source is None:
            return {}
        return {VALIDATION: self.source} if isinstance(self.source, str) else self.source

    @property
    def watched(self) -> str:
        return self.watch or next(iter(self.sources), HELDOUT)

    @model_validator(mode="after")
    def _watches_what_is_there(self) -> EvaluateSection:
        if HELDOUT in self.sources:
            raise ValueError(f"source = {{{HELDOUT} = …}}: that name is taken by what data.heldout holds out")
        if self.watched not in (HELDOUT, *self.sources):
            known = " or ".join(f'"{name}"' for name in (HELDOUT, *self.sources))
            raise ValueError(f'watch = "{self.watch}" is no validation set: {known}')
        return self


class CheckpointSection(Section):
    every: int = Field(
        100,
        ge=0,
        description="steps between checkpoints; 0: never; otherwise the last step is checkpointed too",
    )
    to: str | None = Field(
        None,
        min_length=1,
        description="fsspec URL for checkpoints, such as s3://bucket/runs; they go to a folder named after the run "
        "directory, instead of the directory itself",
    )
    keep: int = Field(2, ge=1, description="how many of the latest checkpoints to keep")
    keep_every: int = Field(
        0, ge=0, description="keep every checkpoint whose step is a multiple of this, for good; 0: none"
    )
    keep_best: int = Field(0, ge=0, description="also keep this many with the lowest validation loss")
    background: bool = Field(True, description="write checkpoints in the background while training continues")
    memory: int = Field(
        0,
        ge=0,
        description="steps between in-memory copies of the state, which survive a lost rank; "
        "0: none, 1: a lost rank costs one step",
    )


class CompileSection(Section):
    enabled: bool | None = Field(
        None,
        description="compile the blocks with torch.compile; unset: where the device is a GPU, except with "
        "zb, zbv and dualpipev",
    )


class ServerSection(Section):
    servers: int = Field(
        0,
        ge=0,
        le=1024,
        description="parameter servers beside the workers of a dp layout: they hold parameters and optimizer states; "
        "0: none",
    )
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: a step's gradients are summed, as in dp; async: each is an update, whenever it comes",
    )
    staleness: int = Field(
        4,
        ge=0,
        le=10**6,
        description="async: most updates between the pull of parameters and the update with their gradient",
    )


class TuneSection(Section):
    bucket_mb: float = Field(25.0, gt=0, le=1e6, description="gradient bucket size, in MiB")
    prefetch: int = Field(1, ge=0, le=10**4, description="FSDP units to all-gather ahead")
    persist_below: int = Field(
        0, ge=0, description="FSDP units with fewer elements stay gathered until their backward pass"
    )
    optimizer_in_backward: bool = Field(
        False,
        description="update a parameter as soon as its gradient is complete, so that gradients never all exist; "
        "needs recipe.clip = 0 and one micro-batch per step",
    )
    search: bool = Field(
        False,
        description='with layout = "auto": train the first steps in the layouts within the error bar of the plan\'s '
        "best, and the rest in the fastest of them",
    )


class OffloadSection(Section):
    scratch: str | None = Field(
        None,
        min_length=1,
        description="directory on a local disk for what a layout offloads with @nvme; unset: scratch in the run "
        "directory",
    )


class FaultSection(Section):
    timeout: float = Field(60.0, gt=0, le=1e7, description="seconds before a collective times out")
    stall: float = Field(
        30.0,
        ge=0,
        le=1e7,
        description="seconds that a rank may keep its peers waiting before the run reports which rank and where; "
        "at least 1, at most half of timeout; 0: never",
    )
    max_restarts: int = Field(3, ge=0, le=10**6, description="maximum number of restarts after a fault")
    check_every: int = Field(
        100,
        ge=0,
        description="steps between checks for silent corruption: weights or optimizer states that changed outside an "
        "update, or differ between replicas; 0: never",
    )
    nonfinite: Literal["skip", "retry", "stop"] = Field(
        "skip", description="when a gradient is not finite: skip the update, retry the step once, or stop"
    )
    spike: float = Field(
        10.0,
        ge=0,
        description="a loss or gradient norm this many robust deviations above the usual is a spike; 0: never",
    )
    on_spike: Literal["warn", "skip"] = Field(
        "warn", description="warn: only report spikes; skip: also skip updates with a gradient spike"
    )
    straggler: float = Field(
        2.0, ge=0, description="name a rank that takes this many times as long as its peers; 0: never"
    )


class TrackSection(Section):
    tensorboard: bool = Field(False, description="send metrics to TensorBoard")
    wandb: bool = Field(False, description="send metrics to Weights & Biases")
    mlflow: bool = Field(False, description="send metrics to MLflow")
    trackio: bool = Field(False, description="send metrics to Trackio")
    project: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="project (W&B, Trackio) or experiment (MLflow) of the run; by default what the tracker's own "
        'environment variable says, else "shoal"',
    )
    prometheus: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="serve the last step's metrics for Prometheus at this port, on loopback unless cluster.interface "
        "names another interface",
    )


class ClusterSection(Section):
    on: str = Field("local", description='"local", "64xH100", "4xcpu" or a file')
    share: bool = Field(
        False, description="allow several ranks to share a GPU: for parity and memory, not for speed"
    )
    interface: str | None = Field(
        None,
        min_length=1,
        description="network interface that ranks listen on, such as eth0; by default loopback only",
    )
    backend: Literal["nccl", "gloo", "smddp"] | None = Field(
        None,
        description="what carries tensors between ranks; unset: NCCL on GPUs, gloo on CPUs; smddp: SageMaker's own",
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
    server: ServerSection = ServerSection()
    tune: TuneSection = TuneSection()
    offload: OffloadSection = OffloadSection()
    fault: FaultSection = FaultSection()
    track: TrackSection = TrackSection()
    cluster: ClusterSection = ClusterSection()

    @field_validator("layout")
    @classmethod
    def _layout_reads(cls, text: str) -> str:
        return "auto" if text.strip() == "auto" else str(Layout.parse(text))


def find_field(key: str, schema: type[BaseModel] = Config) -> FieldInfo | None:
    """The field of a dotted key such as ``recipe.lr`` or, in a list of tables, ``data.mix.0.source``, or None."""
    name, dot, rest = key.partition(".")
    field = schema.model_fields.get(name)
    if field is None or not dot:
        return field
    table = table_of(field)
    if table is None and (item := item_of(field)) is not None:
        number, _, rest = rest.partition(".")
        table = item if number.isdecimal() and rest else None
    return find_field(rest, table) if table else None


def describe(key: str) -> str:
    """A value's meaning, from the schema."""
    field = find_field(key)
    return (field.description or "") if field else ""


def type_of(field: FieldInfo) -> Any:
    """A field's type without ``| None``."""
    annotation: Any = field.annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The schema of a field that is a table, or None."""
    kind = type_of(field)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def item_of(field: FieldInfo) -> type[BaseModel] | None:
    """The item schema of a field that is a list of tables, or None."""
    kind = type_of(field)
    item = next(iter(typing.get_args(kind)), None) if typing.get_origin(kind) in (list, tuple) else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None
