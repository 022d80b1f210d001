"""The layouts that other training stacks can run: for each rule a layout breaks, the reason and the nearest layout
that satisfies it.

The same rules decide what ``--stack`` searches, what an export writes and how the export is judged. Rules run in
order, each on the layout as changed by the ones before. Checked against the sources of Megatron Core 0.16,
torchtitan 0.3.0 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shoal.facts.layout import Layout, Offload, divisors
from shoal.facts.layout.offload import waiting
from shoal.facts.model import Model
from shoal.facts.recipe import Recipe


class Asked(NamedTuple):
    """The input of every rule."""

    layout: Layout
    model: Model
    recipe: Recipe
    lora: int | None = None  # LoRA rank

    @property
    def micro_batches(self) -> int:
        return self.layout.accumulation(self.recipe.batch)


class Gap(NamedTuple):
    """A setting that a stack does not support."""

    what: str  # what it is and why, for the user
    nearest: str
    changes: dict[str, Any] | None  # layout fields to change; None: no layout helps

    def __str__(self) -> str:
        return f"{self.what}; nearest: {self.nearest}"


Rule = Callable[[Asked], Gap | None]


def gaps(stack: str, asked: Asked) -> Iterator[Gap]:
    """Yield every rule of a stack that the layout breaks, each tested after the changes of the previous ones."""
    for rule in RULES.get(stack, ()):
        gap = rule(asked)
        if gap is not None:
            yield gap
            if gap.changes is not None:
                asked = asked._replace(layout=asked.layout.replace(**gap.changes))


def nearest(stack: str, asked: Asked) -> tuple[Layout, list[str]]:
    """The nearest layout that a stack runs, and notes on what was changed."""
    layout, notes = asked.layout, []
    for gap in gaps(stack, asked):
        notes.append(str(gap))
        layout = layout.replace(**(gap.changes or {}))
    return layout, notes


# Recipe settings that other stacks do not train with, and the nearest setting they do.
RECIPES: dict[str, dict[tuple[str, str], str]] = {
    "megatron": {("precision", "fp64"): "fp32", ("states", "bf16"): "fp32", ("states", "int8"): "fp32"},
    "torchtitan": {
        ("precision", "fp64"): "fp32",
        ("precision", "fp16"): "bf16",
        ("states", "int8"): "fp32",
        ("optimizer", "sgd"): "adamw",
        ("reduce", "bf16"): "fp32",
    },
    "deepspeed": {
        ("precision", "fp64"): "fp32",
        ("precision", "fp8"): "bf16",
        ("states", "int8"): "fp32",
    },
    "transformers": {("precision", "fp64"): "fp32"},
}


def nearest_recipe(stack: str, recipe: Recipe) -> Recipe:
    """The recipe that a stack trains with instead; each export words its own note about the change."""
    changes = {
        field: value
        for (field, refused), value in RECIPES.get(stack, {}).items()
        if getattr(recipe, field) == refused
    }
    return recipe.model_copy(update=changes) if changes else recipe


def runs(stack: str, asked: Asked) -> bool:
    return next(gaps(stack, asked), None) is None


# Rules shared by several stacks.


def _whole_units(asked: Asked) -> Gap | None:
    if asked.layout.unit == 1 or asked.layout.shards == 1:
        return None
    return Gap(f"unit={asked.layout.unit}: one block is one group", "unit=1", {"unit": 1})


def _no_adapters(asked: Asked) -> Gap | None:
    if asked.lora is None:
        return None
    return Gap(f"lora of rank {asked.lora}: it has no adapters of its own", "train all weights", None)


def without(layout: Layout, *names: str) -> tuple[Offload, ...]:
    return tuple(part for part in layout.offload if part.what not in names)


def _with(layout: Layout, part: Offload, **changes: Any) -> tuple[Offload, ...]:
    changed = part.model_copy(update=changes)
    return tuple(changed if one.what == part.what else one for one in layout.offload)


# Megatron.

PIPELINES = ("1f1b", "interleaved")


def _megatron_params(asked: Asked) -> Gap | None:
    part = waiting(asked.layout.offload, "params")
    if part is None:
        return None
    left = {"offload": without(asked.layout, "params")}
    return Gap(f"offload={part}: weights stay on the device", "without it", left)


def _megatron_disk(asked: Asked) -> Gap | None:
    part = waiting(asked.layout.offload, "optimizer")
    if part is None or not part.nvme:
        return None
    return Gap(
        f"offload={part}: there is no NVMe", "host memory", {"offload": _with(asked.layout, part, nvme=False)}
    )


def _megatron_activations(asked: Asked) -> Gap | None:
    layout = asked.layout
    part = waiting(layout.offload, "activations")
    if part is None:
        return None
    if layout.pp > 1 or layout.recompute != "none":
        what = f"offload={part} beside a pipeline or recomputing"
        return Gap(what, "without it", {"offload": without(layout, "activations")})
    if not part.nvme:
        return None
    return Gap(
        f"offload={part}: there is no NVMe", "host memory", {"offload": _with(layout, part, nvme=False)}
    )


def _megatron_zero(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.pp == 1 or layout.shards == 1 or layout.zero == 1:
        return None
    what = f"zero={layout.zero} under a pipeline: it shards the optimizer alone, weights and gradients stay whole"
    return Gap(what, "the distributed optimizer, which is zero=1", {"zero": 1})


def _megatron_schedule(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.pp == 1 or layout.schedule in PIPELINES:
        return None
    several = layout.chunks > 1
    other = "interleaved" if several else "1f1b"
    return Gap(f"schedule={layout.schedule}: it has none such", other, {"schedule": other})


def _megatron_rounds(asked: Asked) -> Gap | None:
    layout, count = asked.layout, asked.micro_batches
    if layout.pp == 1 or layout.chunks == 1 or count % layout.pp == 0:
        return None
    what = f"{count} micro-batches over pp={layout.pp}: its interleaved schedule takes multiples of pp"
    return Gap(what, "1f1b, or a smaller micro that gives one", {"schedule": "1f1b", "chunks": 1})


def _megatron_sequence(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.tp == 1 or layout.sp or asked.model.experts is None:
        return None
    return Gap("sp=0 beside experts: it refuses that", "sp=1", {"sp": True})


# torchtitan.


def _titan_zero(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.shards == 1 or layout.zero == 3:
        return None
    what = f"zero={layout.zero}: parameters are sharded too"
    never = "fsdp_reshard_after_forward never, which gathers them once per micro-batch"
    # Parameters that stay gathered are priced as zero=2, as in the other stacks.
    return Gap(what, never, {"zero": 2}) if layout.zero == 1 else None


def _titan_context(asked: Asked) -> Gap | None:
    if asked.layout.cp == 1 or asked.layout.cp_kind == "ring":
        return None
    return Gap("cp_kind=ulysses: it has none", "ring attention", {"cp_kind": "ring"})


def _titan_bubbles(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.pp == 1 or layout.schedule != "zb" or layout.chunks > 1:
        return None
    return Gap(
        "schedule=zb with one chunk per rank: its zero-bubble schedule interleaves", "chunks=2", {"chunks": 2}
    )


def _titan_filled(asked: Asked) -> Gap | None:
    """torch's pipeline schedules require at least as many micro-batches as stages."""
    layout, count = asked.layout, asked.micro_batches
    if layout.pp == 1 or count >= layout.pp:
        return None
    what = f"{count} micro-batches in a pipeline of {layout.pp}: torch's schedules refuse fewer than stages"
    share = asked.recipe.batch // layout.data_ranks
    small = [size for size in divisors(share) if share // size >= layout.pp]
    return Gap(what, "a smaller micro", {"micro": small[-1]} if small else None)


def _titan_activations(asked: Asked) -> Gap | None:
    part = waiting(asked.layout.offload, "activations")
    if part is None:
        return None
    return Gap(
        f"offload={part}: it has none",
        "recompute=full without it",
        {"recompute": "full", "offload": without(asked.layout, "activations")},
    )


ALL_AWAY = Layout.parse("offload=optimizer+params").offload


def _titan_offload(asked: Asked) -> Gap | None:
    layout = asked.layout
    if not layout.offload or layout.offload == ALL_AWAY:
        return None
    said = "+".join(str(part) for part in layout.offload)
    what = "enable_cpu_offload, parameters, gradients and optimizer in host memory"
    return Gap(f"offload={said}: all or nothing", what, {"offload": ALL_AWAY})


# DeepSpeed.


def _deepspeed_copies(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.dp == 1 or layout.shards == 1:
        return None
    ranks = layout.data_ranks
    what = f"dp={layout.dp} replicas of a sharded copy: a stage shards over all {ranks} data ranks"
    near = (
        "zero_hpz_partition_size, which keeps a second copy of the weights in each replica"
        if layout.zero == 3
        else f"fsdp={ranks}"
    )
    return Gap(what, near, {"dp": 1, "fsdp": ranks})


def _deepspeed_offload_from(asked: Asked) -> Gap | None:
    """DeepSpeed's offload is part of ZeRO; dp=1 is a ZeRO group of one."""
    layout = asked.layout
    if layout.dp == 1 or layout.shards > 1 or waiting(layout.offload, "optimizer") is None:
        return None
    what = "offload=optimizer without sharding: DeepSpeed offloads from stage 1 on"
    return Gap(what, "zero=1", {"dp": 1, "fsdp": layout.dp, "zero": 1})


def _deepspeed_pipeline(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.pp == 1 or layout.shards == 1 or layout.zero == 1:
        return None
    return Gap(f"zero={layout.zero} under a pipeline: its engine takes 0 and 1", "stage 1", {"zero": 1})


def _deepspeed_schedule(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.pp == 1 or layout.schedule == "1f1b":
        return None
    what = f"schedule={layout.schedule}: its pipeline has one schedule"
    return Gap(what, "1f1b", {"schedule": "1f1b", "chunks": 1})


def _deepspeed_both(asked: Asked) -> Gap | None:
    """DeepSpeed's pipeline module is a model of its own that AutoTP does not split and Ulysses does not support."""
    layout = asked.layout
    if layout.pp == 1 or layout.tp * layout.cp == 1:
        return None
    what = f"pp={layout.pp} beside tp or cp: PipelineModule goes with neither"
    return Gap(what, "without one of them", None)


def _deepspeed_tensor(asked: Asked) -> Gap | None:
    """DeepSpeed 0.19.8 is the first release that combines ZeRO-3 with AutoTP; earlier ones refuse to start."""
    layout = asked.layout
    if layout.tp == 1 or layout.shards == 1 or layout.zero < 3:
        return None
    return Gap(
        f"zero=3 beside tp={layout.tp}: AutoTP refuses stage 3 in most versions",
        "zero=2, stage 2, with whole weights on every rank of a tensor group",
        {"zero": 2},
    )


def _deepspeed_sequence(asked: Asked) -> Gap | None:
    layout = asked.layout
    if layout.tp == 1 or not layout.sp:
        return None
    what = "sp=1: AutoTP keeps whole activations between blocks on every tensor rank"
    return Gap(what, "sp=0", {"sp": False})


def _deepspeed_context(asked: Asked) -> Gap | None:
    if asked.layout.cp == 1 or asked.layout.cp_kind == "ulysses":
        return None
    return Gap("cp_kind=ring: DeepSpeed exchanges heads", "ulysses", {"cp_kind": "ulysses"})


def _deepspeed_selective(asked: Asked) -> Gap | None:
    if asked.layout.recompute != "selective":
        return None
    what = "recompute=selective: models of transformers repeat whole blocks"
    return Gap(what, "full, through gradient_checkpointing_enable()", {"recompute": "full"})


def _deepspeed_optimizer(asked: Asked) -> Gap | None:
    layout = asked.layout
    part = waiting(layout.offload, "optimizer")
    if part is None or (layout.shards > 1 and layout.zero == 3) or (part.fraction == 1 and not part.nvme):
        return None
    return Gap(
        f"offload={part} below stage 3",
        "all of it, in host memory",
        {"offload": _with(layout, part, fraction=1.0, nvme=False)},
    )


def _deepspeed_params(asked: Asked) -> Gap | None:
    layout = asked.layout
    part = waiting(layout.offload, "params")
    if part is None:
        return None
    if layout.shards == 1 or layout.zero < 3:
        left = {"offload": without(layout, "params")}
        return Gap(f"offload={part} below stage 3", "zero=3, or without it", left)
    if part.fraction == 1:
        return None
    return Gap(
        f"offload={part}: all parameters or none", "all", {"offload": _with(layout, part, fraction=1.0)}
    )


def _deepspeed_activations(asked: Asked) -> Gap | None:
    layout = asked.layout
    part = waiting(layout.offload, "activations")
    if part is None:
        return None
    if layout.recompute != "full":
        return Gap(
            f"offload={part} without recompute=full",
            "cpu_checkpointing, which comes with it",
            {"offload": without(layout, "activations")},
        )
    if part.fraction == 1 and not part.nvme:
        return None
    return Gap(
        f"offload={part}",
        "all checkpointed activations, in host memory",
        {"offload": _with(layout, part, fraction=1.0, nvme=False)},
    )


RULES: dict[str, tuple[Rule, ...]] = {
    "megatron": (
        _megatron_params,
        _megatron_disk,
        _megatron_activations,
        _megatron_zero,
        _megatron_schedule,
        _megatron_rounds,
        _megatron_sequence,
        _whole_units,
        _no_adapters,
    ),
    "torchtitan": (
        _titan_zero,
        _titan_context,
        _titan_bubbles,
        _titan_filled,
        _titan_activations,
        _titan_offload,
        _whole_units,
        _no_adapters,
    ),
    "deepspeed": (
        _deepspeed_copies,
        _deepspeed_offload_from,
        _deepspeed_pipeline,
        _deepspeed_schedule,
        _deepspeed_both,
        _deepspeed_tensor,
        _deepspeed_sequence,
        _deepspeed_context,
        _deepspeed_selective,
        _deepspeed_optimizer,
        _deepspeed_params,
        _deepspeed_activations,
        _whole_units,
    ),
}
