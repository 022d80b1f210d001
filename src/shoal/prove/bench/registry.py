"""The peers by name: the packages they need, and which layouts they can match. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from shoal.facts.layout import Layout
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem, did_you_mean
from shoal.plan.resolve import Job

# What a layout does, if plain stacks have one word for it.
ONE, DP, FSDP, ZERO1, ZERO2, TP, PP = "one", "dp", "fsdp", "zero1", "zero2", "tp", "pp"
OFFLOAD = "offload"  # all states of a single device
# Layout keys that a peer's loop supports besides degrees; the others are specific to Shoal.
SHARED_KEYS = ("dp", "fsdp", "zero", "tp", "pp", "schedule", "micro")


@dataclass(frozen=True)
class PeerKind:
    """One stack to compare with."""

    name: str
    what: str
    modules: Mapping[str, str]  # strategy → the file in ``peers`` that implements it; "*": any layout
    needs: tuple[str, ...] = ()  # packages, by import name
    install: str = ""  # their pip names
    compiled: bool = False
    llama_shaped: bool = True  # runs the plain decoder, which has one shape
    needs_gpu: bool = False
    # Its peak memory over Shoal's, a rough upper estimate: holding all logits in fp32 needs the most.
    hunger: float = 2.0

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if find_spec(package) is None]

    @property
    def versions(self) -> dict[str, str]:
        return {name: found for name in self.install.split() if (found := _version(name)) is not None}


_PLAIN = {ONE: "plain_pytorch", DP: "plain_ddp", FSDP: "plain_fsdp", TP: "plain_tp", PP: "plain_pp"}
_EAGER = {**_PLAIN, ONE: "plain_eager"}
_TRANSFORMERS = {ONE: "transformers_accelerate", DP: "transformers_accelerate"}
_DEEPSPEED = {**dict.fromkeys((ONE, FSDP, ZERO1, ZERO2), "deepspeed_zero"), OFFLOAD: "deepspeed_offload"}

_ALL = (
    PeerKind("shoal", "shoal train with its defaults", {"*": "shoal_train"}, llama_shaped=False, hunger=1.0),
    PeerKind("pytorch", "plain PyTorch, blocks compiled on GPUs", _PLAIN, compiled=True, hunger=1.2),
    PeerKind("pytorch-eager", "plain PyTorch, eager, autocast", _EAGER),
    PeerKind(
        "transformers",
        "transformers with Accelerate, eager",
        _TRANSFORMERS,
        needs=("transformers", "accelerate"),
        install="transformers accelerate",
        llama_shaped=False,
    ),
    PeerKind(
        "transformers-compiled",
        "transformers with Accelerate, layers compiled",
        _TRANSFORMERS,
        needs=("transformers", "accelerate"),
        install="transformers accelerate",
        compiled=True,
        llama_shaped=False,
        needs_gpu=True,
    ),
    PeerKind(
        "fabric",
        "Lightning Fabric, blocks compiled on GPUs",
        {ONE: "lightning_fabric"},
        needs=("lightning",),
        install="lightning",
        compiled=True,
    ),
    PeerKind(
        "torchtitan",
        "torchtitan's Llama and loss, blocks compiled, in a plain loop",
        {ONE: "torchtitan_llama"},
        needs=("torchtitan",),
        install="torchtitan",
        compiled=True,
        needs_gpu=True,
    ),
    PeerKind(
        "deepspeed",
        "DeepSpeed with the ZeRO stage of the layout, and its offload",
        _DEEPSPEED,
        needs=("deepspeed",),
        install="deepspeed",
    ),
)
PEERS = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class LeftOut:
    """A peer that is not measured, and why."""

    name: str
    why: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.why}" + (f": {self.fix}" if self.fix else "")


def choose(names: Sequence[str] | None, job: Job) -> tuple[list[PeerKind], list[LeftOut]]:
    """The peers to measure, in our order, and those left out; by default every peer that is installed.

    A named peer must be installed; one that cannot run this model or layout is left out in either case.
    """
    problems = []
    for name in names or ():
        kind = PEERS.get(name)
        if kind is None:
            problems.append(Problem(f"--peers {name}: no such peer", did_you_mean(name, PEERS)))
        elif kind.missing:
            problems.append(Problem(f"--peers {name}: {not_installed(kind)}", f"pip install {kind.install}"))
    if problems:
        raise BadInput(problems)
    chosen: list[PeerKind] = []
    left_out: list[LeftOut] = []
    for kind in PEERS.values():
        if names and kind.name not in names:
            continue
        if kind.missing:
            left_out.append(LeftOut(kind.name, not_installed(kind), f"pip install {kind.install}"))
        elif why := cannot(kind, job):
            left_out.append(LeftOut(kind.name, why))
        else:
            chosen.append(kind)
    return chosen, left_out


def not_installed(kind: PeerKind) -> str:
    missing = kind.missing
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"


def cannot(kind: PeerKind, job: Job) -> str:
    """Why this peer has no counterpart of the job's step; empty if it has one."""
    if "*" in kind.modules:
        return ""
    recipe = job.config.recipe
    if strategy(job.layout) not in kind.modules:
        return f"no counterpart of layout {job.layout}"
    on_cpu = job.cluster.device.name == "cpu"
    if kind.needs_gpu and on_cpu:
        return "measured on a GPU only"
    if on_cpu and job.layout.world > 1 and kind.modules is _EAGER:
        return "with several ranks on a CPU it is what pytorch is: nothing is compiled there"
    if recipe.precision not in ("fp32", "bf16") or recipe.states not in ("fp32", "bf16"):
        return f"measured in fp32 and bf16 only, not in {recipe.precision} with {recipe.states} states"
    if recipe.states == "bf16" and recipe.precision != "bf16":
        return "bf16 states are measured with bf16 compute only"
    if recipe.optimizer != "adamw":
        return f"measured with adamw only, not with {recipe.optimizer}"
    if recipe.dropout:
        return "measured without dropout: every stack draws its own"
    if recipe.z_loss:
        return "its loss has no z_loss"
    if kind.llama_shaped and job.layout.pp > 1 and job.model.tied:
        return "its embedding and its head are on different stages: they cannot be one matrix"
    if kind.llama_shaped and (odd := not_llama_shaped(job.model, recipe.seq)):
        return f"its decoder has no {odd}"
    return ""


def strategy(layout: Layout) -> str | None:
    """The layout's strategy, if it uses a single one that other stacks have too."""
    plain = Layout(**{key: getattr(layout, key) for key in SHARED_KEYS})
    away = {part.what for part in layout.offload if part.fraction == 1.0}
    if layout.world == 1 and away and away <= {"optimizer", "params"}:
        whole = len(away) == len(layout.offload) and layout.model_copy(update={"offload": ()}) == plain
        return OFFLOAD if whole else None
    degrees = {key: getattr(layout, key) for key in ("dp", "fsdp", "tp", "pp") if getattr(layout, key) > 1}
    if plain != layout or len(degrees) > 1:
        return None
    if not degrees:
        return ONE
    (axis,) = degrees
    if axis == "fsdp":
        return {1: ZERO1, 2: ZERO2, 3: FSDP}[layout.zero]
    if axis == "pp" and layout.schedule != "1f1b":
        return None
    return axis


def not_llama_shaped(model: Model, seq: int) -> str:
    """Features of this model that the plain decoder (``plain_decoder.py``) lacks."""
    odd = {
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        f"{model.norm} norm": model.norm != "rms",
        "ungated MLP": not model.gated or model.activation != "silu",
        f"{model.positions} positions": model.positions != "rotary" or model.rope_fraction != 1,
        "parallel residual": model.parallel_residual,
        "norms behind attention and MLP": model.output_norms or model.norm_offset,
        "caps of scores or logits": model.attention_cap is not None or model.logit_cap is not None,
        "scale of embeddings or scores": model.scaled_embedding or model.query_width is not None,
        "biases of that kind": model.out_bias or model.mlp_bias,
        f"window of {model.window}": model.window is not None and model.window < seq,
    }
    return ", ".join(name for name, has in odd.items() if has)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
