"""Import DeepSpeed's settings: its JSON file, or the dictionary of a script."""

from __future__ import annotations

from typing import Any

from shoal.facts.precision import REDUCE_BYTES
from shoal.plan.importers.ranks import find_share, written_layout
from shoal.plan.importers.reading import Reading
from shoal.plan.importers.trainer import TrainerArguments

# What Shoal always does, so dropping these loses nothing.
_ALWAYS = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions")
# DeepSpeed's Adam family: its Adam is AdamW, unless adam_w_mode is false.
_ADAMS = {"adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read(reading: Reading, world: int | None, script: TrainerArguments | None = None) -> dict[str, Any]:
    """The tables of a config. ``world``: the number of ranks, if known from elsewhere.

    ``script``: its command line, which fills in each "auto" and what the file does not hold.
    """
    if script is not None:
        reading.fill(_autos(script))
    said = script.recipe if script is not None else {}
    recipe = {**said, **_precision(reading), **_optimizer(reading, said)}
    recipe |= _schedule(reading, recipe, said)
    _put(recipe, "clip", reading.number("gradient_clipping", absent=said.get("clip", 0.0)))
    if recipe.get("clip") == 0.0 and not said:
        reading.note("no gradient_clipping: clip = 0.0")

    tp = reading.count("tensor_parallel.autotp_size") or 1
    cp = reading.count("sequence_parallel_size") or 1
    share = find_share(
        reading,
        world,
        tp * cp,
        reading.count("train_batch_size"),
        _or(reading.count("train_micro_batch_size_per_gpu"), script.micro if script else None),
        _or(reading.count("gradient_accumulation_steps"), script.accumulation if script else None),
    )
    recipe["batch"] = share.batch
    degrees: dict[str, Any] = {"tp": tp, "cp": cp, "micro": share.micro}
    if tp > 1:
        degrees["sp"] = False  # AutoTP does not split activations
    if cp > 1:
        degrees["cp_kind"] = "ulysses"
    if reading.switch("expert_parallel.enabled"):
        degrees["ep"] = reading.count("expert_parallel.autoep_size") or 1
    kept = _kept(reading)
    if script is not None and script.recompute:
        kept["recompute"] = script.recompute
    layout = written_layout(reading, **degrees, **_zero(reading, share.ranks), **kept)
    return {"layout": layout, "recipe": recipe, **_tune(reading, recipe)}


def _or(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


def _autos(script: TrainerArguments) -> dict[str, Any]:
    """The values that Hugging Face's Trainer substitutes for "auto"."""
    recipe = script.recipe
    optimizer = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}
    filled = {f"optimizer.params.{theirs}": recipe.get(ours) for theirs, ours in optimizer.items()}
    if "beta1" in recipe:
        filled["optimizer.params.betas"] = [recipe["beta1"], recipe["beta2"]]
    steps, warmup = recipe.get("steps"), recipe.get("warmup")
    if isinstance(warmup, float) and steps:
        warmup = round(warmup * steps)
    return {
        **filled,
        "train_micro_batch_size_per_gpu": script.micro,
        "gradient_accumulation_steps": script.accumulation,
        "gradient_clipping": recipe.get("clip"),
        "bf16.enabled": recipe.get("precision") == "bf16",
        "fp16.enabled": recipe.get("precision") == "fp16",
        "scheduler.params.warmup_max_lr": recipe.get("lr"),
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.total_num_steps": steps,
    }


def _precision(reading: Reading) -> dict[str, Any]:
    bf16, fp16 = reading.switch("bf16.enabled"), reading.switch("fp16.enabled")
    precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    recipe = {"precision": precision}
    if reading.switch("bf16.bf16_master_weights_and_grads"):
        recipe["states"] = "bf16"
        reading.switch("bf16.bf16_optimizer_states")
    # Shoal has its own fp16 loss scaling, so these need no counterpart.
    for key in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
        reading.number(f"fp16.{key}")
    reduce = reading.word("communication_data_type") or precision
    if reduce == "fp16":
        reading.note("gradients are summed in fp16 there; nearest: reduce = fp32")
    recipe["reduce"] = "bf16" if reduce == "bf16" else "fp32"
    return recipe


def _optimizer(reading: Reading, said: dict[str, Any]) -> dict[str, Any]:
    name = reading.word("optimizer.type")
    reading.switch("zero_allow_untested_optimizer")  # Shoal's are all tested
    if name is None:
        if not said:
            reading.note("no optimizer: there the script makes it; here Shoal's defaults hold")
        return {}
    inside, recipe = "optimizer.params", dict[str, Any]()
    _put(recipe, "lr", reading.number(f"{inside}.lr", absent=1e-3))
    _put(recipe, "weight_decay", reading.number(f"{inside}.weight_decay", absent=0.0))
    if name.lower() == "sgd":
        recipe["optimizer"] = "sgd"
        _put(recipe, "momentum", reading.number(f"{inside}.momentum", absent=0.0))
        return recipe
    if name.lower() not in _ADAMS or reading.switch(f"{inside}.adam_w_mode") is False:
        reading.note(f"optimizer {name}: no counterpart; nearest: adamw")
    recipe["optimizer"] = "adamw"
    betas = reading.pair(f"{inside}.betas", absent=(0.9, 0.999))
    if betas is not None:
        recipe["beta1"], recipe["beta2"] = betas
    _put(recipe, "eps", reading.number(f"{inside}.eps", absent=1e-8))
    return recipe


def _put(recipe: dict[str, Any], key: str, value: float | None) -> None:
    """Set a known value; for one that the script decides, Shoal's default stays."""
    if value is not None:
        recipe[key] = float(value)


def _schedule(reading: Reading, recipe: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    name, inside = reading.word("scheduler.type"), "scheduler.params"
    if name is None and said:
        return {}  # set by the script
    if name not in _SCHEDULES:
        what = "no scheduler" if name is None else f"scheduler {name}: no counterpart"
        reading.note(f"{what}; nearest: the learning rate stays what it is")
        return {"schedule": "constant", "warmup": 0}
    given: dict[str, Any] = {"schedule": _SCHEDULES[name]}
    warmup = reading.count(f"{inside}.warmup_num_steps", absent=1000)
    if warmup is not None:
        given["warmup"] = warmup
    if reading.word(f"{inside}.warmup_type") != "linear":
        reading.note(f"{name} warms up along a logarithm; nearest: linearly")
    _put(given, "lr", reading.number(f"{inside}.warmup_max_lr"))
    least = reading.number(f"{inside}.warmup_min_lr") or 0.0
    ratio = reading.number(f"{inside}.warmup_min_ratio") or 0.0
    if ratio == 1.0 or (least and least == given.get("lr", recipe.get("lr"))):
        given["warmup"] = 0
    elif ratio or least:
        reading.note(f"the warm-up starts at {least or ratio}; nearest: at 0")
    if name == "WarmupCosineLR":
        _put(given, "lr_min", reading.number(f"{inside}.cos_min_ratio", absent=1e-4))
    total = reading.count(f"{inside}.total_num_steps")
    if total:
        given["steps"] = total
    elif not said:
        reading.note("the length of the run is not in the file: recipe.steps is Shoal's default")
    return given


def _zero(reading: Reading, ranks: int) -> dict[str, Any]:
    """Degrees and policies of the data ranks."""
    stage = reading.count("zero_optimization.stage") or 0
    for key in _ALWAYS:
        if reading.switch(f"zero_optimization.{key}") is False:
            reading.note(f"{key} = false: Shoal always does it")
    groups = reading.count("zero_optimization.mics_shard_size") or 0
    inside = reading.count("zero_optimization.zero_hpz_partition_size") or 1
    if 1 < inside < ranks and ranks % inside == 0:
        reading.note(
            f"zero_hpz_partition_size = {inside} keeps a second copy of the weights near; nearest with the same "
            f"states a rank: fsdp={ranks}; nearest in traffic: dp={ranks // inside},fsdp={inside}"
        )
    if not stage:
        return {"dp": ranks}
    degrees: dict[str, Any] = {"fsdp": ranks, "zero": stage}
    if stage == 3 and 0 < groups < ranks and ranks % groups == 0:
        degrees |= {"dp": ranks // groups, "fsdp": groups}
    return degrees


def _kept(reading: Reading) -> dict[str, Any]:
    """Recomputation and offload."""
    offload: list[dict[str, Any]] = []
    for section, what in (("offload_optimizer", "optimizer"), ("offload_param", "params")):
        inside = f"zero_optimization.{section}"
        device = reading.word(f"{inside}.device")
        if device in ("cpu", "nvme"):
            share = reading.number(f"{inside}.ratio")
            offload.append(
                {"what": what, "nvme": device == "nvme", "fraction": 1.0 if share is None else share}
            )
        reading.switch(f"{inside}.pin_memory")
        reading.word(f"{inside}.nvme_path")
    if reading.switch("zero_optimization.cpu_offload"):
        offload.append({"what": "optimizer"})
    kept: dict[str, Any] = {}
    if reading.has("activation_checkpointing"):
        kept["recompute"] = "full"
        reading.note("activation_checkpointing is there: recompute=full")
        if reading.switch("activation_checkpointing.cpu_checkpointing"):
            offload.append({"what": "activations"})
        reading.switch("activation_checkpointing.partition_activations")
    return kept | {"offload": tuple(part for part in offload if part.get("fraction", 1.0) > 0)}


def _tune(reading: Reading, recipe: dict[str, Any]) -> dict[str, Any]:
    tune: dict[str, Any] = {}
    bucket = reading.count("zero_optimization.reduce_bucket_size")
    if bucket:
        tune["bucket_mb"] = bucket * REDUCE_BYTES[recipe["reduce"]] / 2**20
    reading.count("zero_optimization.allgather_bucket_size")  # Shoal's are the same both ways
    ahead = reading.count("zero_optimization.stage3_prefetch_bucket_size")
    if ahead is not None:
        # Shoal counts groups, and the file does not say how large one is.
        tune["prefetch"] = min(ahead, 1)
    reading.count("zero_optimization.stage3_max_live_parameters")
    small = reading.count("zero_optimization.stage3_param_persistence_threshold")
    if small is not None:
        tune["persist_below"] = small
    return {"tune": tune} if tune else {}
