"""Import a torchtitan job config: the reverse of ``plan/export/torchtitan.py``.

From 0.3 on it is Python; the TOML of earlier versions is read as well, and that of versions before 0.2, with some keys
in other tables.
"""

from __future__ import annotations

from typing import Any

from shoal.facts.model.presets import PRESETS
from shoal.facts.problem import BadInput
from shoal.plan.export.torchtitan import SCHEDULES, flavor_of
from shoal.plan.importers.python_file import Script
from shoal.plan.importers.ranks import find_share, written_layout
from shoal.plan.importers.reading import Reading

_SCHEDULES = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
_OWN_WAY = (
    *(
        "training.disable_cuda_graphs",
        "parallelism.spmd_backend",
        "parallelism.context_parallel_load_balancer",
    ),
    *(
        "job.dump_folder",
        "job.description",
        "job.print_args",
        "job.use_for_integration_test",
        "job.config_file",
    ),
    *("profiling.enable_profiling", "profiling.save_traces_folder", "profiling.profile_freq"),
    *(
        "profiling.enable_memory_snapshot",
        "profiling.save_memory_snapshot_folder",
        "comm.init_timeout_seconds",
    ),
    *("metrics.log_freq", "metrics.enable_tensorboard", "metrics.save_tb_folder", "metrics.enable_wandb"),
    *(
        "metrics.disable_color_printing",
        "metrics.enable_color_printing",
        "checkpoint.folder",
        "checkpoint.async_mode",
    ),
    *(
        "checkpoint.last_save_model_only",
        "checkpoint.export_dtype",
        "checkpoint.last_save_model_weights_only",
    ),
    *("optimizer.implementation", "optimizer.fused", "activation_checkpoint.selective_ac_option"),
    *(
        "model.hf_assets_path",
        "model.tokenizer_path",
        "model.print_after_conversion",
        "comm.train_timeout_seconds",
    ),
    *(
        "parallelism.module_fqns_per_model_part",
        "parallelism.context_parallel_rotate_method",
        "model.norm_type",
    ),
    *(
        "training.gc_freq",
        "training.deterministic",
        "parallelism.pipeline_parallel_split_points",
        "compile.components",
    ),
    *("training.enable_fsdp_float8_all_gather", "float8.enable_fsdp_float8_all_gather", "float8.filter_fqns"),
    *(
        "float8.precompute_float8_dynamic_scale_for_fsdp",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
    ),
    *(
        "quantize.linear.float8.filter_fqns",
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    ),
)


# The table of each settings class.
_TABLES = {
    "TrainingConfig": "training",
    "ParallelismConfig": "parallelism",
    "CompileConfig": "compile",
    "DebugConfig": "debug",
    "LRSchedulersContainer.Config": "lr_scheduler",
    "CheckpointManager.Config": "checkpoint",
    "MetricsProcessor.Config": "metrics",
}
_RECOMPUTES = {"SelectiveAC.Config": "selective", "FullAC.Config": "full"}


def settings(script: Script) -> dict[str, Any] | None:
    """The tables that a Python config stands for; None if it is not one."""
    if not any(module.startswith("torchtitan") for module in script.imports.values()):
        return None
    tables: dict[str, Any] = {"activation_checkpoint": {"mode": "selective"}}  # its default
    for call in script.calls:
        if (table := _TABLES.get(call.path)) is not None:
            tables.setdefault(table, {}).update(call.keywords)
        elif call.path in _RECOMPUTES:
            tables["activation_checkpoint"] = {"mode": _RECOMPUTES[call.path]}
        elif call.name == "model_registry":
            flavor = call.keywords.get("flavor", call.arguments[0] if call.arguments else None)
            tables.setdefault("model", {}).update(name=_family(script, call.path), flavor=flavor)
        elif call.name == "default_adamw":
            tables["optimizer"] = {"name": "AdamW", **_optimizer(call.keywords)}
        elif call.path.startswith("Float8LinearConverter"):
            tables.setdefault("model", {})["converters"] = ["float8"]
        elif call.path == "HuggingFaceTextDataLoader.Config" and "dataset" in call.keywords:
            tables.setdefault("training", {})["dataset"] = call.keywords["dataset"]
        elif call.path == "Trainer.Config" and call.keywords.get("activation_checkpoint", "") is None:
            tables["activation_checkpoint"] = {"mode": "none"}
    for path, value in script.attributes.items():  # config.training.steps = …
        *_, table, key = path.split(".")
        if table in ("training", "parallelism", "compile", "debug", "lr_scheduler"):
            tables.setdefault(table, {})[key] = value
    return tables if tables.keys() & {"training", "parallelism"} else None


def configs(script: Script) -> int:
    """How many configs a file creates: a file that lists a model's has many, which must not be read as one."""
    return sum(call.path == "Trainer.Config" for call in script.calls)


def _family(script: Script, path: str) -> str:
    """The package whose models it uses: from ``llama3.model_registry``, or from the module a name was imported from."""
    return path.rpartition(".")[0] or script.imports.get("model_registry", "").rpartition(".")[2]


def _optimizer(keywords: dict[str, Any]) -> dict[str, Any]:
    found = dict(keywords)
    betas = found.pop("betas", None)
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        found |= {"beta1": betas[0], "beta2": betas[1]}
    return found


def read(reading: Reading, world: int | None) -> dict[str, Any]:
    """The tables of a config."""
    degrees = _degrees(reading)
    inner = degrees["tp"] * degrees["cp"] * degrees["pp"]
    replicas, shard = _axis(reading, "data_parallel_replicate_degree"), _shard(reading)
    if shard is not None:
        said = inner * replicas * shard
        if world is not None and world != said:
            raise BadInput(
                f"{reading.source}: its degrees make {said} ranks, and {world} were asked for",
                f"--gpus {said}, or data_parallel_shard_degree = -1 there, which takes what is left",
            )
        world = said
    micro = reading.count("training.local_batch_size") or reading.count("training.batch_size")
    batch = _positive(reading.number("training.global_batch_size"))
    piece = reading.count("parallelism.pipeline_parallel_microbatch_size")
    if degrees["pp"] > 1:
        # A pipeline takes all micro-batches of a rank's step at once and splits them itself.
        local, micro = micro, piece or 1
        if batch is None and local and world:
            batch = local * (world // inner)
    share = find_share(reading, world, inner, batch, micro, None)
    if share.ranks % replicas:
        raise BadInput(
            f"{reading.source}: {share.ranks} data ranks do not divide by {replicas} replicas",
            "degrees whose product is the number of ranks",
        )
    recipe = {**_recipe(reading), "batch": share.batch}
    layout = written_layout(
        reading,
        dp=replicas,
        fsdp=share.ranks // replicas,
        **degrees,
        **_policies(reading),
        micro=share.micro,
    )
    tables: dict[str, Any] = {"layout": layout, "recipe": recipe, **_others(reading)}
    tables |= _model(reading)
    if (data := reading.word("training.dataset")) is not None:
        reading.skip("training.dataset_path")
        reading.note(f"training.dataset {data}: it streams that from the Hub; name the data with --data")
    reading.skip(*_OWN_WAY)
    return tables


def _axis(reading: Reading, name: str, older: str = "training") -> int:
    """Read from its own table or, before 0.2, from another."""
    now = reading.degree(f"parallelism.{name}")
    before = reading.degree(f"{older}.{name}")
    return now if now > 1 else before


def _shard(reading: Reading) -> int | None:
    """None: determined by the other degrees, as -1 or a missing key mean."""
    written = [reading.number(f"{table}.data_parallel_shard_degree") for table in ("parallelism", "training")]
    return _positive(next((one for one in written if one is not None), None))


def _positive(value: float | None) -> int | None:
    return int(value) if value is not None and value > 0 else None


def _degrees(reading: Reading) -> dict[str, Any]:
    pp = _axis(reading, "pipeline_parallel_degree", "experimental")
    cp = _axis(reading, "context_parallel_degree", "experimental")
    degrees: dict[str, Any] = {"tp": _axis(reading, "tensor_parallel_degree"), "cp": cp, "pp": pp}
    degrees["ep"] = _axis(reading, "expert_parallel_degree")
    if reading.switch("parallelism.enable_sequence_parallel") is False and degrees["tp"] > 1:
        degrees["sp"] = False
    etp = reading.count("parallelism.expert_tensor_parallel_degree") or 1
    if etp > 1:
        reading.note(
            f"parallelism.expert_tensor_parallel_degree {etp}: here each expert is whole on its rank"
        )
    names = [reading.word(f"{table}.pipeline_parallel_schedule") for table in ("parallelism", "experimental")]
    name = next((one for one in names if one is not None), "1F1B")
    parts = reading.items("parallelism.module_fqns_per_model_part")
    each = reading.count("parallelism.pipeline_parallel_layers_per_stage")
    if each and pp > 1:
        reading.note(f"parallelism.pipeline_parallel_layers_per_stage {each}: Shoal cuts the stages itself")
    if pp == 1:
        return degrees
    if name.lower() not in _SCHEDULES:
        reading.note(f"pipeline_parallel_schedule {name}: no counterpart; nearest: 1f1b")
    degrees["schedule"] = _SCHEDULES.get(name.lower(), "1f1b")
    if degrees["schedule"] in ("interleaved", "zb") and parts:
        degrees["chunks"] = max(1, len(parts) // pp)
    elif degrees["schedule"] == "zb":
        degrees["chunks"] = 2
    return degrees


def _policies(reading: Reading) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if reading.word("parallelism.fsdp_reshard_after_forward") == "never":
        kept["zero"] = 2
        reading.note("fsdp_reshard_after_forward never shards parameters between steps; nearest: zero=2")
    mode = reading.word("activation_checkpoint.mode") or "selective"
    if mode in ("full", "selective"):
        kept["recompute"] = mode
    elif mode != "none":
        reading.note(f"activation_checkpoint.mode {mode}: no counterpart; nearest: none")
    if reading.flag("training.enable_cpu_offload"):
        kept["offload"] = ({"what": "optimizer"}, {"what": "params"})
    return kept


def _recipe(reading: Reading) -> dict[str, Any]:
    name = (reading.word("optimizer.name") or "AdamW").lower()
    kinds = {"adamw": "adamw", "adam": "adamw", "muon": "muon", "sgd": "sgd"}
    if name not in kinds:
        reading.note(f"optimizer {name}: no counterpart; nearest: adamw")
    recipe: dict[str, Any] = {"optimizer": kinds.get(name, "adamw"), **_precision(reading)}
    for key, theirs, default in (
        ("lr", "optimizer.lr", 8e-4),
        ("beta1", "optimizer.beta1", 0.9),
        ("beta2", "optimizer.beta2", 0.95),
        ("eps", "optimizer.eps", 1e-8),
        ("weight_decay", "optimizer.weight_decay", 0.1),
    ):
        if (value := reading.number(theirs, absent=default)) is not None:
            recipe[key] = float(value)
    clip = reading.number("training.max_norm", absent=1.0)
    if clip is not None:
        recipe["clip"] = 0.0 if clip >= 1e9 else float(clip)  # a limit that no gradient reaches
    for key, theirs, count in (("seq", "training.seq_len", 2048), ("steps", "training.steps", 10_000)):
        if (value := reading.count(theirs, absent=count)) is not None:
            recipe[key] = value
    seeds = [reading.count(f"{table}.seed") for table in ("debug", "training")]
    recipe["seed"] = next((seed for seed in seeds if seed is not None), 0)
    return recipe | _schedule(reading, recipe.get("steps", 10_000))


def _schedule(reading: Reading, steps: int) -> dict[str, Any]:
    inside = "lr_scheduler"
    kind = reading.word(f"{inside}.decay_type") or "linear"
    share = reading.number(f"{inside}.decay_ratio")
    warmup = reading.count(f"{inside}.warmup_steps")
    older = reading.count("training.warmup_steps")
    found: dict[str, Any] = {"warmup": next((one for one in (warmup, older) if one is not None), 200)}
    least = reading.number(f"{inside}.min_lr_factor") or reading.number(f"{inside}.lr_min") or 0.0
    found["lr_min"] = float(least)
    if share == 0:
        return found | {"schedule": "constant"}
    if share is not None and share < 1:
        if kind != "linear":
            reading.note(f"lr_scheduler.decay_type {kind}: here the last phase of wsd is linear")
        return found | {"schedule": "wsd", "decay": round(share * steps)}
    if kind not in ("linear", "cosine"):
        reading.note(f"lr_scheduler.decay_type {kind}: no counterpart; nearest: linear")
        kind = "linear"
    return found | {"schedule": kind}


def _precision(reading: Reading) -> dict[str, Any]:
    computed = reading.word("training.mixed_precision_param") or "bfloat16"
    states = reading.word("training.dtype") or "float32"
    reduce = reading.word("training.mixed_precision_reduce") or "float32"
    converters = [str(one) for one in reading.items("model.converters") or []]
    older = reading.flag("float8.enable_float8_linear") or reading.flag("training.enable_float8_linear")
    precision = "bf16" if computed == "bfloat16" else "fp32"
    if older or any("float8" in one for one in converters):
        precision = "fp8"
    for other in (one for one in converters if "float8" not in one):
        reading.note(f"model.converters {other}: no counterpart, left out")
    recipe = {"precision": precision, "states": "bf16" if states == "bfloat16" else "fp32"}
    rows = reading.word("quantize.linear.float8.recipe_name") or reading.word("float8.recipe_name") or ""
    if rows.startswith("rowwise"):
        recipe["fp8"] = "rowwise"
    return recipe | {"reduce": "bf16" if reduce == "bfloat16" else "fp32"}


def _model(reading: Reading) -> dict[str, Any]:
    name, flavor = reading.word("model.name"), reading.word("model.flavor")
    if name is None or flavor is None:
        return {}
    wanted = (name, flavor)
    preset = next((one for one, shape in PRESETS.items() if flavor_of(shape) == wanted), None)
    if preset is None:
        reading.note(f"model {name} {flavor}: no preset has this shape; name the model with --model")
        return {}
    return {"model": {"preset": preset}}


def _others(reading: Reading) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    compiled = [reading.switch(f"{table}") for table in ("compile.enable", "training.compile")]
    if any(one is not None for one in compiled):
        tables["compile"] = {"enabled": any(compiled)}
    on = [reading.switch(f"checkpoint.{key}") for key in ("enable", "enable_checkpoint")]
    every, keep = reading.count("checkpoint.interval"), reading.count("checkpoint.keep_latest_k")
    if any(on) and every:
        tables["checkpoint"] = {"every": every} | ({"keep": keep} if keep else {})
    if reading.flag("validation.enable"):
        freq, steps = reading.count("validation.freq"), reading.number("validation.steps")
        tables["evaluate"] = ({"every": freq} if freq is not None else {}) | (
            {"batches": int(steps)} if steps is not None and steps > 0 else {}
        )
    return tables
