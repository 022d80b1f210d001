"""Code shared by exports: the result type, nodes and ranks, sizes in elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from shoal.facts.cluster.stack import Stack
from shoal.facts.layout import Offload, divisors
from shoal.facts.layout.legality import nearest_multiple
from shoal.facts.layout.stack_limits import nearest, nearest_recipe
from shoal.facts.model import Family
from shoal.facts.model.parameters import block_parameters, expert_parameters
from shoal.plan.judge import asked_of
from shoal.predict.workload import USUAL, Workload

# The transformer block's class in ``transformers``, which its FSDP wraps.
BLOCKS: dict[Family, str] = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_neox": "GPTNeoXLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "deepseek_v3": "DeepseekV3DecoderLayer",
}


@dataclass(frozen=True)
class Exported:
    """What another stack needs for the same run."""

    files: dict[str, str]  # name and text
    command: str  # starts the run; with several nodes, on each of them
    cannot: list[
        str
    ]  # what the stack cannot express of the layout or recipe, each with the nearest it can do
    runs_as: Workload  # what the stack then runs, with its own constants: this is judged
    checked: str  # the version that the files were checked against


def settled(stack: Stack, workload: Workload) -> tuple[Workload, list[str]]:
    """The workload that a stack runs instead, and notes on the layout's changes."""
    layout, notes = nearest(stack.name, asked_of(workload))
    tune = workload.tune
    if tune.bucket_mb == USUAL.bucket_mb:  # its own default suits it better than ours
        tune = tune.model_copy(update={"bucket_mb": stack.bucket_mb})
    recipe = nearest_recipe(stack.name, workload.recipe)
    return replace(workload, layout=layout, recipe=recipe, stack=stack, tune=tune), notes


class Code(str):
    """A Python expression, written verbatim."""


def call(name: str, given: dict[str, Any], depth: int = 0) -> str:
    """A call with one keyword per line, indented to ``depth``."""
    indent = "    " * depth
    lines = [
        f"{indent}    {key}={value if isinstance(value, Code) else repr(value)},"
        for key, value in given.items()
    ]
    return "\n".join([f"{name}(", *lines, f"{indent})"])


def machines(workload: Workload) -> tuple[int, int]:
    """Nodes, and ranks per node."""
    world, cluster = workload.layout.world, workload.cluster
    if cluster.nodes == 1 or world <= cluster.devices_per_node:
        return 1, world
    per_node = gcd(world, cluster.devices_per_node)
    return world // per_node, per_node


def torchrun(workload: Workload) -> str:
    """The launcher that most stacks share, up to the program's name."""
    nodes, per_node = machines(workload)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {per_node}"
    meeting = '--rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500"'
    return f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {meeting}"


def sharding(workload: Workload) -> int:
    """What data ranks shard: 0 nothing, otherwise ``zero``."""
    return workload.layout.zero if workload.layout.shards > 1 else 0


def bucket_elements(workload: Workload) -> int:
    """Gradient bucket size, in elements of the reduction precision."""
    size = 2 if workload.recipe.reduce == "bf16" else 4
    return max(1, int(workload.tune.bucket_mb * 2**20) // size)


def unit_elements(workload: Workload) -> int:
    """Parameters that one sharded group of blocks gathers on a rank; with experts, of blocks that have them."""
    model, layout = workload.model, workload.layout
    dense = sum(one.size // layout.tp for one in block_parameters(model, model.experts is not None))
    # Routed experts are spread over expert ranks, everything else over tensor ranks.
    count = model.experts.count if model.experts else 0
    return layout.unit * (dense + count * sum(one.size // layout.ep for one in expert_parameters(model)))


def offloads(workload: Workload) -> dict[str, Offload]:
    """What is offloaded, by kind of state."""
    return {part.what: part for part in workload.layout.offload}


def without_pipeline(workload: Workload) -> tuple[Workload, list[str]]:
    """For stacks without pipelines: pipeline ranks become data ranks that shard the same replica."""
    layout, recipe = workload.layout, workload.recipe
    if layout.pp == 1:
        return workload, []
    fsdp = layout.fsdp * layout.pp
    share = layout.dp * fsdp
    batch = nearest_multiple(recipe.batch, share)
    micro = max(size for size in divisors(batch // share) if size <= workload.micro)
    notes = [f"pp={layout.pp}: there is no pipeline here; nearest: those ranks shard too, fsdp={fsdp}"]
    if batch != recipe.batch:
        notes.append(f"batch={recipe.batch} does not divide over those {share} data ranks; nearest: {batch}")
    nearest = layout.replace(pp=1, fsdp=fsdp, micro=micro)
    # The run's tokens were counted with the other batch; keep only its steps.
    changed = recipe.model_copy(update={"batch": batch, "tokens": None})
    return replace(workload, layout=nearest, recipe=changed), notes
