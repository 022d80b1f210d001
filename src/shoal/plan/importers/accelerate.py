"""Import the config file that ``accelerate config`` writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.facts.problem import BadInput
from shoal.plan.importers import deepspeed
from shoal.plan.importers.ranks import BatchShare, find_share, written_layout
from shoal.plan.importers.reading import Reading
from shoal.plan.importers.trainer import TrainerArguments

# Names and, from older versions, numbers of FSDP1's strategies: what is sharded, and whether only within a node.
_STRATEGIES = {
    "FULL_SHARD": (3, False),
    "1": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "2": (2, False),
    "NO_SHARD": (0, False),
    "3": (0, False),
    "HYBRID_SHARD": (3, True),
    "4": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
    "5": (2, True),
}
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU", "TP")
# Rendezvous and process settings, for which Shoal's launcher and loop have their own.
_LAUNCHING = (
    "compute_environment",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "gpu_ids",
    "fsdp_config.fsdp_version",
)


def read(
    reading: Reading,
    world: int | None,
    beside: Callable[[str], Reading],
    script: TrainerArguments | None = None,
) -> dict[str, Any]:
    """The tables of a config. ``beside`` reads a file that this one names, such as a DeepSpeed JSON.

    ``script``: the program's arguments, since this file does not contain the recipe.
    """
    kind = reading.word("distributed_type") or "NO"
    nodes = reading.count("num_machines") or 1
    processes = reading.number("num_processes")
    if world is None and processes is not None and processes > 0:
        world = int(processes)
    for key in _LAUNCHING:
        reading.word(key)
    on_cpu = bool(reading.switch("use_cpu")) or kind == "MULTI_CPU"
    if kind == "DEEPSPEED":
        tables = _through_deepspeed(reading, world, beside, script)
    elif kind == "FSDP" or kind in _REPLICATED:
        tables = _own(reading, world if kind != "NO" else 1, nodes, kind == "FSDP", script)
    elif kind == "MEGATRON_LM":
        tables = _megatron(reading, world, script)
    else:
        raise BadInput(
            f"{reading.source}: distributed_type = {kind!r} has no counterpart",
            f"one of FSDP, DEEPSPEED, MEGATRON_LM, {', '.join(_REPLICATED)}",
        )
    backend = reading.word("dynamo_config.dynamo_backend") or "NO"
    if backend.upper() != "NO":
        tables["compile"] = {"enabled": True}
    if on_cpu and world is not None:
        tables["cluster"] = {"on": f"{world}xcpu"}
    return tables


def _precision(reading: Reading, script: TrainerArguments | None) -> dict[str, Any]:
    word = reading.word("mixed_precision") or (script.recipe.get("precision") if script else None) or "no"
    return {"precision": word if word in ("bf16", "fp16", "fp8") else "fp32"}


def _own(
    reading: Reading, world: int | None, nodes: int, sharded: bool, script: TrainerArguments | None
) -> dict[str, Any]:
    """DDP, or FSDP of either version, plus what ``parallelism_config`` asks for."""
    tp, cp, sp = (_size(reading, axis) for axis in ("tp", "cp", "sp"))
    reading.word("parallelism_config.parallelism_config_cp_comm_strategy")
    share = _share(reading, world, tp * cp * sp, script)
    zero, hybrid = _strategy(reading) if sharded else (0, False)
    replicas = _size(reading, "dp_replicate")
    _size(reading, "dp_shard")  # determined by the others
    if not zero:
        replicas = share.ranks
    elif hybrid and share.ranks % nodes == 0:
        replicas = nodes
    if share.ranks % replicas:
        raise BadInput(
            f"{reading.source}: {share.ranks} data ranks do not divide by {replicas} replicas",
            "sizes of parallelism_config whose product is num_processes",
        )
    degrees: dict[str, Any] = {"dp": replicas, "fsdp": share.ranks // replicas, "tp": tp, "cp": cp * sp}
    degrees["micro"] = share.micro
    if sp > 1:
        degrees["cp_kind"] = "ulysses"
    if zero:
        degrees |= {"zero": zero, **_kept(reading)}
    if script is not None and script.recompute:
        degrees["recompute"] = script.recompute
    recipe = {**(script.recipe if script else {}), **_precision(reading, script), "batch": share.batch}
    return {"layout": written_layout(reading, **degrees), "recipe": recipe}


def _share(reading: Reading, world: int | None, inner: int, script: TrainerArguments | None) -> BatchShare:
    """These files hold no batch, which is an argument of the script. They may hold accumulation."""
    if world is None:
        raise BadInput(f"{reading.source}: num_processes is missing", "--gpus 8, or --on 8xH100")
    accumulation = reading.count("gradient_accumulation_steps")
    if script is not None and script.recipe:
        return find_share(reading, world, inner, None, script.micro, script.accumulation)
    reading.note("optimizer, learning rate and schedule are the script's there; here Shoal's defaults hold")
    return find_share(reading, world, inner, None, None, accumulation)


def _size(reading: Reading, axis: str) -> int:
    return reading.count(f"parallelism_config.parallelism_config_{axis}_size") or 1


def _strategy(reading: Reading) -> tuple[int, bool]:
    """What FSDP shards, as ``zero``, and whether each node has its own replica."""
    reshard = reading.word("fsdp_config.fsdp_reshard_after_forward")
    strategy = reading.word("fsdp_config.fsdp_sharding_strategy")
    for word in (strategy, reshard):
        if word is not None and word.upper() in _STRATEGIES:
            return _STRATEGIES[word.upper()]
    if reshard is not None and reshard.lower() == "false":
        reading.note("fsdp_reshard_after_forward = false shards parameters between steps; nearest: zero=2")
        return 2, False
    return 3, False


def _kept(reading: Reading) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if reading.switch("fsdp_config.fsdp_offload_params"):
        kept["offload"] = ({"what": "optimizer"}, {"what": "params"})
    if reading.switch("fsdp_config.fsdp_activation_checkpointing"):
        kept["recompute"] = "full"
    # One block per group, which is what wrapping by the block's class means.
    if reading.word("fsdp_config.fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP":
        reading.word("fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    for key in ("state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params"):
        reading.word(f"fsdp_config.fsdp_{key}")  # Shoal has its own checkpoints and initialisation
    return kept


def _through_deepspeed(
    reading: Reading,
    world: int | None,
    beside: Callable[[str], Reading],
    script: TrainerArguments | None,
) -> dict[str, Any]:
    """Its DeepSpeed plugin: a JSON file of its own, or the few fields repeated here."""
    inside = "deepspeed_config"
    reading.word(f"{inside}.deepspeed_multinode_launcher")
    reading.switch(f"{inside}.zero3_init_flag")
    name = reading.word(f"{inside}.deepspeed_config_file")
    if name is not None:
        file = beside(name)
        tables = deepspeed.read(file, world, script)
        reading.notes += [f"{name}: {note}" for note in (*file.notes, *file.left())]
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
            _size(reading, axis)  # given there too
        for key in ("cp_backend", "sp_backend", "sp_attn_implementation"):
            reading.word(f"parallelism_config.parallelism_config_{key}")
        length = reading.count("parallelism_config.parallelism_config_sp_seq_length")
        if length:
            tables["recipe"]["seq"] = length
        return tables
    precision = reading.word("mixed_precision") or "no"
    fields: dict[str, Any] = {
        "zero_optimization": {"stage": reading.count(f"{inside}.zero_stage")},
        "gradient_accumulation_steps": reading.count(f"{inside}.gradient_accumulation_steps"),
        "gradient_clipping": reading.number(f"{inside}.gradient_clipping"),
        precision: {"enabled": True},
    }
    for state, section in (("optimizer", "offload_optimizer"), ("param", "offload_param")):
        device = reading.word(f"{inside}.offload_{state}_device")
        reading.word(f"{inside}.offload_{state}_nvme_path")
        fields["zero_optimization"][section] = {"device": device}
    written = Reading(fields, reading.source, reading.problems)
    tables = deepspeed.read(written, world, script)
    reading.notes += written.notes
    return tables


def _megatron(reading: Reading, world: int | None, script: TrainerArguments | None) -> dict[str, Any]:
    """Its Megatron plugin."""
    inside = "megatron_lm_config.megatron_lm"
    tp, pp = reading.count(f"{inside}_tp_degree") or 1, reading.count(f"{inside}_pp_degree") or 1
    share = _share(reading, world, tp * pp, script)
    count = reading.count(f"{inside}_num_micro_batches")
    if count and pp > 1:
        reading.note(
            f"{count} micro-batches: here layout.micro, sequences in one, says it; set it with recipe.batch"
        )
    degrees: dict[str, Any] = {"tp": tp, "pp": pp}
    if reading.switch(f"{inside}_use_distributed_optimizer"):
        degrees |= {"fsdp": share.ranks, "zero": 1}
    else:
        degrees["dp"] = share.ranks
    if reading.switch(f"{inside}_sequence_parallelism") is False:
        degrees["sp"] = False
    if reading.switch(f"{inside}_recompute_activations"):
        degrees["recompute"] = "selective"
    degrees["micro"] = share.micro
    recipe = {**(script.recipe if script else {}), **_precision(reading, script), "batch": share.batch}
    clip = reading.number(f"{inside}_gradient_clipping")
    if clip is not None:
        recipe["clip"] = float(clip)
    return {"layout": written_layout(reading, **degrees), "recipe": recipe}
