"""Export to Accelerate: a YAML file for ``accelerate launch``, as read by the parser of 1.15 (its fields exist since
1.10).

DDP if nothing is sharded, FSDP2 for ``zero=3``; ``zero=1|2`` and Ulysses use its DeepSpeed plugin, whose own file is
written too. The script is assumed to use Hugging Face's Trainer, whose arguments carry the recipe.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.facts.cluster.stack import TRANSFORMERS
from shoal.facts.layout.stack_limits import ALL_AWAY, nearest_recipe
from shoal.plan.export import deepspeed, trainer
from shoal.plan.export.shared import BLOCKS, Exported, machines, offloads, sharding, without_pipeline
from shoal.predict.workload import Workload

FILE = "accelerate.yaml"
CHECKED = "Accelerate 1.15.0"


def write(workload: Workload) -> Exported:
    workload, cannot = without_pipeline(workload)
    workload, more = _nearest(workload)
    cannot = [*cannot, *more, *_cannot(workload), *trainer.cannot(workload)]
    settings = _settings(workload)
    files = {FILE: _yaml(settings)}
    runs_as = _runs_as(workload)
    if settings["distributed_type"] == "DEEPSPEED":
        through = deepspeed.write(workload)
        files |= through.files
        cannot, runs_as = [*cannot, *through.cannot], through.runs_as
    given = trainer.arguments(workload)
    if workload.layout.recompute == "full" and settings["distributed_type"] != "FSDP":
        given["gradient_checkpointing"] = True
    options = " ".join(f"--{name} {shlex.quote(_word(value))}" for name, value in given.items())
    nodes, _ = machines(workload)
    # Every node passes its own rank and the first node's address.
    place = (
        '--machine_rank "$NODE_RANK" --main_process_ip "$HEAD_NODE" --main_process_port 29500 '
        if nodes > 1
        else ""
    )
    return Exported(
        files,
        f"accelerate launch --config_file {FILE} {place}train.py {options}",
        list(dict.fromkeys(cannot)),
        runs_as,
        CHECKED,
    )


def _runs_as(workload: Workload) -> Workload:
    """FSDP2's layout: everything sharded, all offloaded to host memory or nothing, whole blocks recomputed."""
    layout, waiting = workload.layout, offloads(workload)
    away = ALL_AWAY if {"params", "optimizer"} & waiting.keys() and layout.shards > 1 else ()
    zero = layout.zero if layout.zero == 3 or layout.shards == 1 else 2
    layout = layout.replace(unit=1, zero=zero, offload=away)
    recipe = nearest_recipe(TRANSFORMERS.name, workload.recipe)
    return replace(workload, layout=layout, recipe=recipe, stack=TRANSFORMERS)


def _nearest(workload: Workload) -> tuple[Workload, list[str]]:
    """The closest layout that Accelerate supports, and notes on the changes."""
    layout, notes = workload.layout, []
    if layout.ep > 1:
        notes.append(
            f"ep={layout.ep}: there is no expert parallelism here; nearest: experts are sharded like the rest"
        )
        layout = layout.replace(ep=1)
    if layout.dp > 1 and layout.fsdp == 1 and layout.tp * layout.cp > 1:
        notes.append(f"dp={layout.dp} beside tp or cp: replicas must be sharded; nearest: fsdp={layout.dp}")
        layout = layout.replace(dp=1, fsdp=layout.dp)
    if layout.recompute == "selective":
        notes.append("recompute=selective: blocks are repeated as a whole; nearest: full")
        layout = layout.replace(recompute="full")
    if layout.cp > 1 and layout.cp_kind == "ulysses" and layout.tp > 1:
        notes.append("cp_kind=ulysses beside tp: it is DeepSpeed's, and goes without tp; nearest: ring")
        layout = layout.replace(cp_kind="ring")
    return replace(workload, layout=layout), notes


def _through_deepspeed(workload: Workload) -> bool:
    layout = workload.layout
    if layout.cp > 1:
        return layout.cp_kind == "ulysses"
    return layout.tp == 1 and sharding(workload) in (1, 2)


def _settings(workload: Workload) -> dict[str, Any]:
    layout, precision = workload.layout, workload.recipe.precision
    nodes, _ = machines(workload)
    on_cpu = workload.cluster.device.name == "cpu"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(workload, on_cpu),
        "mixed_precision": precision if precision in ("bf16", "fp16", "fp8") else "no",
        "num_machines": nodes,
        "num_processes": layout.world,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": on_cpu,
    }
    if settings["distributed_type"] == "DEEPSPEED":
        settings["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed.FILE,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": sharding(workload) == 3,
        }
        del settings["mixed_precision"]  # Accelerate rejects it when given twice
    elif settings["distributed_type"] == "FSDP":
        settings["fsdp_config"] = _fsdp(workload)
    if layout.tp * layout.cp > 1 or (layout.dp > 1 and layout.fsdp > 1):
        settings["parallelism_config"] = _degrees(workload)
    return settings


def _kind(workload: Workload, on_cpu: bool) -> str:
    layout = workload.layout
    if _through_deepspeed(workload):
        return "DEEPSPEED"
    if sharding(workload):
        return "FSDP"
    if layout.world == 1:
        return "NO"
    return "MULTI_CPU" if on_cpu else "MULTI_GPU"


def _fsdp(workload: Workload) -> dict[str, Any]:
    layout, waiting = workload.layout, offloads(workload)
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": BLOCKS[workload.model.family],
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": "params" in waiting or "optimizer" in waiting,
        "fsdp_activation_checkpointing": layout.recompute == "full",
    }


def _degrees(workload: Workload) -> dict[str, Any]:
    layout = workload.layout
    ulysses = _through_deepspeed(workload) and layout.cp > 1
    degrees: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": 1 if ulysses else layout.dp,
        "parallelism_config_dp_shard_size": layout.data_ranks if ulysses else layout.fsdp,
        "parallelism_config_tp_size": layout.tp,
        "parallelism_config_cp_size": 1 if ulysses else layout.cp,
    }
    if ulysses:
        degrees |= {
            "parallelism_config_sp_size": layout.cp,
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length": workload.recipe.seq,
            "parallelism_config_sp_attn_implementation": "sdpa",
        }
    elif layout.cp > 1:
        # Keys and values passed around a ring; the alternative gathers them all at once.
        degrees["parallelism_config_cp_comm_strategy"] = "alltoall"
    return degrees


def _cannot(workload: Workload) -> Iterator[str]:
    layout, waiting = workload.layout, offloads(workload)
    if not _through_deepspeed(workload):
        if sharding(workload) in (1, 2):
            yield (
                f"zero={layout.zero} beside tp or cp: FSDP2 shards parameters too; nearest: "
                "reshard_after_forward false, which gathers them once per micro-batch"
            )
        for part in waiting.values():
            if part.what == "activations":
                yield f"offload={part}: nearest: recompute=full without it"
            elif part.fraction < 1 or part.nvme or len({"params", "optimizer"} & waiting.keys()) < 2:
                yield f"offload={part}: nearest: fsdp_offload_params, parameters and optimizer, all in host memory"
        if workload.recipe.reduce == "fp32" and sharding(workload) and workload.recipe.precision == "bf16":
            yield "reduce=fp32: mixed_precision also sets the sums; nearest: a MixedPrecisionPolicy in the script"
        if workload.recipe.precision == "fp64":
            yield "precision=fp64: nearest: fp32"
        if workload.lora is not None:
            yield f"lora of rank {workload.lora.rank}: nearest: peft.get_peft_model in the script"
    if layout.tp > 1:
        yield f"tp={layout.tp}: the script loads the model with it; nearest: from_pretrained(…, tp_plan='auto')"
    if layout.tp > 1 and layout.sp:
        yield "sp=1: the model's own tp_plan decides; nearest: that"
    if layout.unit > 1 and sharding(workload) == 3:
        yield f"unit={layout.unit}: one block is one group; nearest: unit=1"
    if sharding(workload) == 3 and (workload.tune.prefetch != 1 or workload.tune.persist_below):
        yield "prefetch and persist_below: FSDP2's own defaults hold; nearest: set_modules_to_forward_prefetch"


def _word(value: object) -> str:
    return "true" if value is True else str(value)


def _yaml(settings: dict[str, Any]) -> str:
    """Two levels of plain keys; a JSON value is a YAML value."""
    lines = []
    for name, value in sorted(settings.items()):
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {inner}: {json.dumps(setting)}" for inner, setting in value.items()]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"
