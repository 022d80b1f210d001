"""torchtitan: a TOML job config, as versions 0.2 read it (from 0.3 on a config is Python code)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import tomli_w

from shoal.facts.layout.stages import cut
from shoal.facts.model import Model
from shoal.plan.export.shared import Exported, offloads, sharding, torchrun
from shoal.predict.workload import Workload

FILE = "torchtitan.toml"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
# The shapes it knows by name, as (family, layers, hidden, heads): name and flavor.
_FLAVORS = {
    ("llama", 32, 4096, 32): ("llama3", "8B"),
    ("llama", 80, 8192, 64): ("llama3", "70B"),
    ("llama", 126, 16384, 128): ("llama3", "405B"),
    ("qwen3", 28, 1024, 16): ("qwen3", "0.6B"),
    ("qwen3", 28, 2048, 16): ("qwen3", "1.7B"),
    ("qwen3", 36, 2560, 32): ("qwen3", "4B"),
    ("qwen3", 36, 4096, 32): ("qwen3", "8B"),
    ("qwen3", 40, 5120, 40): ("qwen3", "14B"),
    ("qwen3", 64, 5120, 64): ("qwen3", "32B"),
    ("qwen3_moe", 48, 2048, 32): ("qwen3", "30B-A3B"),
    ("qwen3_moe", 94, 4096, 64): ("qwen3", "235B-A22B"),
    ("deepseek_v3", 61, 7168, 128): ("deepseek_v3", "671B"),
}
_LLAMA3_VOCABULARY = 128256  # older Llamas share its shapes and not its vocabulary


def write(workload: Workload) -> Exported:
    workload, cannot = _nearest(workload)
    text = tomli_w.dumps(_settings(workload))
    header = f"# torchtitan 0.2: {workload.model.name} in {workload.layout}\n"
    command = f"{torchrun(workload)} -m torchtitan.train --job.config_file {FILE}"
    return Exported({FILE: header + text}, command, [*cannot, *_cannot(workload)])


def _nearest(workload: Workload) -> tuple[Workload, list[str]]:
    """The closest layout that torchtitan takes, and what was changed."""
    layout, notes = workload.layout, []
    if layout.dp > 1 and layout.shards == 1 and layout.tp * layout.pp > 1:
        notes.append(f"dp={layout.dp} beside tp or pp: its DDP goes alone; nearest: fsdp={layout.dp}")
        layout = layout.replace(dp=1, fsdp=layout.dp)
    if layout.pp > 1 and layout.schedule == "zb" and layout.chunks == 1:
        notes.append(
            "schedule=zb with one chunk a rank: its zero-bubble schedule interleaves; nearest: chunks=2"
        )
        layout = layout.replace(chunks=2)
    return replace(workload, layout=layout), notes


def _settings(workload: Workload) -> dict[str, Any]:
    layout, recipe = workload.layout, workload.recipe
    name, flavor = flavor_of(workload.model) or ("llama3", "debugmodel")
    # A pipeline gets all micro-batches of a step at once, and cuts them itself.
    local = workload.micro * workload.accumulation if layout.pp > 1 else workload.micro
    return {
        "job": {"description": f"{workload.model.name} in {layout}"},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": f"./assets/hf/{workload.model.name}"}
        | ({"converters": ["float8"]} if recipe.precision == "fp8" else {}),
        "optimizer": {
            "name": "AdamW",
            "lr": recipe.peak_lr,
            "beta1": recipe.beta1,
            "beta2": recipe.beta2,
            "eps": recipe.eps,
            "weight_decay": recipe.weight_decay,
        },
        "lr_scheduler": _schedule(workload),
        "training": {
            "local_batch_size": local,
            "global_batch_size": recipe.batch,
            "seq_len": recipe.seq,
            "steps": recipe.steps,
            # 0 would scale every gradient to nothing.
            "max_norm": recipe.clip or 1e9,
            "dtype": "bfloat16" if recipe.states == "bf16" else "float32",
            "mixed_precision_param": "bfloat16" if recipe.precision in ("bf16", "fp8", "fp16") else "float32",
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": bool({"optimizer", "params"} & offloads(workload).keys()),
        },
        "parallelism": _parallelism(workload),
        "activation_checkpoint": {"mode": layout.recompute, "selective_ac_option": "op"},
        "compile": {"enable": workload.compiled},
        "debug": {"seed": recipe.seed},
    }


def _schedule(workload: Workload) -> dict[str, Any]:
    recipe = workload.recipe
    schedule: dict[str, Any] = {"warmup_steps": recipe.warmup_steps, "min_lr_factor": recipe.lr_min}
    if recipe.schedule == "constant":
        return schedule | {"decay_ratio": 0.0, "decay_type": "linear"}
    if recipe.schedule == "wsd":
        return schedule | {"decay_ratio": recipe.decay_steps / recipe.steps, "decay_type": "linear"}
    return schedule | {"decay_type": recipe.schedule}


def _parallelism(workload: Workload) -> dict[str, Any]:
    layout = workload.layout
    given: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp,
        "data_parallel_shard_degree": layout.fsdp,
        # Under a pipeline the default keeps parameters gathered for all micro-batches, as Shoal does.
        "fsdp_reshard_after_forward": "default" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.cp > 1:
        given["context_parallel_rotate_method"] = "alltoall"
    if layout.pp > 1:
        given["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        given["pipeline_parallel_microbatch_size"] = workload.micro
        given["module_fqns_per_model_part"] = _stages(workload)
    return given


def _stages(workload: Workload) -> list[list[str]]:
    """The same cut as Shoal's, in torchtitan's names of modules."""
    layout = workload.layout
    return [
        [
            *(["tok_embeddings"] if stage.first else []),
            *(f"layers.{layer}" for layer in stage.layers),
            *(["norm", "output"] if stage.last else []),
        ]
        for stage in cut(workload.model, layout.pp * layout.chunks, workload.recipe.seq)
    ]


def flavor_of(model: Model) -> tuple[str, str] | None:
    """What it calls a model of this shape; None where it has none."""
    if model.family == "llama" and model.vocab != _LLAMA3_VOCABULARY:
        return None
    return _FLAVORS.get((model.family, model.layers, model.hidden, model.heads))


def _cannot(workload: Workload) -> Iterator[str]:
    layout, recipe, model = workload.layout, workload.recipe, workload.model
    if flavor_of(workload.model) is None:
        yield (
            f"{model.name}: no flavor has its shape (llama3, qwen3 and deepseek_v3 are there); nearest: register one "
            f"with {model.layers} layers, dim {model.hidden}, {model.heads} heads, and name it in [model]"
        )
    elif model.family == "llama" and model.rope_scaling is not None:
        yield "the scaled rotary positions of Llama 3.1: nearest: its flavor, without them"
    if sharding(workload) in (1, 2):
        yield (
            f"zero={layout.zero}: parameters are sharded too; nearest: fsdp_reshard_after_forward never, which "
            "gathers them once a micro-batch"
        )
    if layout.unit > 1 and sharding(workload) == 3:
        yield f"unit={layout.unit}: one block is one group; nearest: unit=1"
    if layout.tp > 1 and not layout.sp:
        yield "sp=0: tensor parallelism always comes with sequence parallelism; nearest: sp=1"
    if layout.cp > 1 and layout.cp_kind == "ulysses":
        yield "cp_kind=ulysses: nearest: ring attention, with rotate method alltoall"
    if layout.pp > 1 and workload.accumulation < layout.pp:
        yield (
            f"{workload.accumulation} micro-batches in a pipeline of {layout.pp}: torch's schedules refuse fewer than "
            "stages; nearest: a smaller micro"
        )
    yield from _cannot_compute(workload)
    for part in layout.offload:
        if part.what == "activations":
            yield f"offload={part}: nearest: recompute=full without it"
        else:
            yield f"offload={part}: nearest: enable_cpu_offload, parameters, gradients and optimizer in host memory"
    if sharding(workload) == 3 and (workload.tune.prefetch != 1 or workload.tune.persist_below):
        yield "prefetch and persist_below: FSDP2's own defaults hold; nearest: those"
    if recipe.dropout:
        yield f"dropout={recipe.dropout}: its models have none; nearest: 0"
    if recipe.z_loss:
        yield f"z_loss={recipe.z_loss}: its loss is the cross-entropy alone; nearest: 0"
    if workload.lora is not None:
        yield f"lora of rank {workload.lora.rank}: nearest: train all weights"


def _cannot_compute(workload: Workload) -> Iterator[str]:
    recipe = workload.recipe
    if recipe.optimizer == "sgd":
        yield "optimizer=sgd: nearest: AdamW"
    if recipe.precision in ("fp16", "fp64"):
        yield f"precision={recipe.precision}: nearest: {'bf16' if recipe.precision == 'fp16' else 'fp32'}"
    if recipe.states == "int8":
        yield "states=int8: nearest: fp32"
    if recipe.reduce == "bf16":
        yield "reduce=bf16: gradients are summed in fp32; nearest: that"
    if not recipe.clip:
        yield "clip=0: nearest: a limit that no gradient reaches"
    if recipe.weight_decay:
        yield "weight decay on matrices only: its optimizer decays norms too; nearest: that"
