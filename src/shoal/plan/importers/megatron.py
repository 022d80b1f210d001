"""Import Megatron-LM's options from a script or a plain list: the reverse of ``plan/export/megatron.py``."""

from __future__ import annotations

import re
from typing import Any

from shoal.facts.model import Model
from shoal.facts.precision import REDUCE_BYTES
from shoal.plan.importers import megatron_model, shapes
from shoal.plan.importers.ranks import find_share, written_layout
from shoal.plan.importers.reading import Reading

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
# Any of these identifies Megatron's options.
SIGNS = {
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "micro-batch-size",
    "num-attention-heads",
}
# Options without a value: a following word does not belong to them.
SWITCHES = megatron_model.SWITCHES | {
    *(
        "sequence-parallel",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "use-torch-fsdp2",
        "bf16",
        "fp16",
    ),
    *("recompute-activations", "overlap-grad-reduce", "overlap-param-gather", "optimizer-cpu-offload"),
    *("use-precision-aware-optimizer", "calculate-per-token-loss", "accumulate-allreduce-grads-in-fp32"),
    *(
        "grad-reduce-in-bf16",
        "no-gradient-accumulation-fusion",
        "init-model-with-meta-device",
        "use-flash-attn",
    ),
    *("tp-comm-overlap", "cross-entropy-loss-fusion"),
    *("use-mcore-models", "no-save-optim", "no-load-optim", "no-load-rng", "log-throughput", "fp8-hybrid"),
}
# What Shoal always does, or does its own way: kernels, logs, locations of checkpoints and data.
_OWN_WAY = (
    *("tp-comm-overlap", "cross-entropy-loss-fusion", "cross-entropy-fusion-impl"),
    *(
        "overlap-param-gather",
        "overlap-grad-reduce",
        "calculate-per-token-loss",
        "no-gradient-accumulation-fusion",
    ),
    *("ckpt-format", "init-model-with-meta-device", "use-precision-aware-optimizer", "use-flash-attn"),
    *(
        "use-mcore-models",
        "transformer-impl",
        "attention-backend",
        "log-interval",
        "log-throughput",
        "save",
        "load",
    ),
    *(
        "tensorboard-dir",
        "wandb-project",
        "wandb-exp-name",
        "wandb-save-dir",
        "distributed-backend",
        "num-workers",
    ),
    *("initial-loss-scale", "loss-scale-window", "hysteresis", "min-loss-scale", "loss-scale", "split"),
    *(
        "no-save-optim",
        "no-load-optim",
        "no-load-rng",
        "data-cache-path",
        "tokenizer-model",
        "log-params-norm",
    ),
    *(
        "timing-log-level",
        "tensorboard-queue-size",
        "distributed-timeout-minutes",
        "expert-tensor-parallel-size",
    ),
    *(
        "use-dist-ckpt",
        "dist-ckpt-format",
        "log-num-zeros-in-grad",
        "log-timers-to-tensorboard",
        "tensorboard-log-interval",
    ),
)
_CONTEXT = {"p2p": "ring", "a2a": "ulysses"}
_DECAYS = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
_MOST_STAGES = 64  # stages of a batch ramp
_LONGEST = 1 << 16  # characters of an expanded pipeline layout: nested brackets could expand without end


def read(reading: Reading, world: int | None) -> tuple[dict[str, Any], Model | None]:
    """The tables of a config, and the model if no preset has its shape."""
    said = megatron_model.shape(reading)
    degrees = _degrees(reading, said)
    micro, batch = reading.count("micro-batch-size"), reading.count("global-batch-size")
    inner = degrees["tp"] * degrees["cp"] * degrees["pp"]
    share = find_share(reading, world, inner, batch, micro, None)
    recipe = {**_recipe(reading, share.batch), "batch": share.batch}
    recipe |= _ramp(reading, share.batch)
    layout = written_layout(
        reading,
        **degrees,
        **_sharding(reading, share.ranks, degrees["cp"]),
        **_kept(reading, said.get("layers", 0)),
        micro=share.micro,
    )
    tables: dict[str, Any] = {"layout": layout, "recipe": recipe, **_others(reading, recipe)}
    model, shape = shapes.placed(said, reading, recipe.get("seq", 0)) if said else ({}, None)
    if model:
        tables["model"] = model
    if reading.drop("data-path"):
        reading.note("data-path: its tokenised .bin files are not read here; name the text with --data")
    reading.skip(*_OWN_WAY)
    return tables, shape


def _degrees(reading: Reading, said: dict[str, Any]) -> dict[str, Any]:
    tp, cp, pp = (
        reading.degree(f"{axis}-parallel-size") for axis in ("tensor-model", "context", "pipeline-model")
    )
    degrees: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp}
    if not reading.flag("sequence-parallel") and tp > 1:
        degrees["sp"] = False
    kind = reading.word("cp-comm-type")
    if cp > 1 and kind is not None and kind not in _CONTEXT:
        reading.note(f"cp-comm-type {kind}: no counterpart; nearest: cp_kind=ring")
    if cp > 1:
        degrees["cp_kind"] = _CONTEXT.get(kind or "p2p", "ring")
    chunks = _chunks(reading, pp, said.get("layers", 0))
    if chunks > 1:
        degrees |= {"chunks": chunks, "schedule": "interleaved"}
    ep = reading.degree("expert-model-parallel-size")
    split = reading.count("expert-tensor-parallel-size", absent=tp)
    if said.get("experts") and split and split > 1:
        reading.note(f"expert-tensor-parallel-size {split}: here each expert is whole on its rank")
    return degrees | {"ep": ep}


def _chunks(reading: Reading, pp: int, layers: int) -> int:
    """Chunks per pipeline rank, in any of the three notations."""
    stages = reading.word("pipeline-model-parallel-layout")
    each = reading.count("num-layers-per-virtual-pipeline-stage")
    count = reading.count("num-virtual-stages-per-pipeline-rank") or 1
    if stages is not None and pp > 1:
        text = stages.replace(" ", "").replace(",", "")
        while len(text) < _LONGEST and (group := re.search(r"\(([^()]*)\)\*(\d{1,4})", text)):
            text = text[: group.start()] + group[1] * int(group[2]) + text[group.end() :]
        reading.note("pipeline-model-parallel-layout: Shoal cuts the stages itself, evenly by cost")
        return max(1, len(text.strip("|").split("|")) // pp)
    if each and layers and pp > 1:
        return max(1, layers // (pp * each))
    return count if pp > 1 else 1


def _sharding(reading: Reading, ranks: int, cp: int) -> dict[str, Any]:
    """What data ranks shard; several optimizer instances are replicas."""
    zero = 1 if reading.flag("use-distributed-optimizer") else 0
    strategy = reading.word("data-parallel-sharding-strategy")
    if reading.flag("use-megatron-fsdp"):
        zero = STRATEGIES.get(strategy or "no_shard", 3)
    if reading.flag("use-torch-fsdp2"):
        zero = 3
    copies = reading.count("num-distributed-optimizer-instances") or 1
    if not zero and cp > 1:
        reading.note("context ranks hold whole states there; here they share the optimizer's: zero=1")
        return {"dp": ranks, "zero": 1}
    if not zero:
        return {"dp": ranks}
    if ranks % copies:
        reading.note(
            f"num-distributed-optimizer-instances {copies} does not divide {ranks} data ranks: 1 is taken"
        )
        copies = 1
    return {"dp": copies, "fsdp": ranks // copies, "zero": zero}


def _kept(reading: Reading, layers: int) -> dict[str, Any]:
    """Recomputation and offload."""
    kept: dict[str, Any] = {}
    granularity = reading.word("recompute-granularity")
    if reading.flag("recompute-activations"):
        granularity = granularity or "selective"
    if granularity in ("full", "selective"):
        kept["recompute"] = granularity
    reading.skip("recompute-method", "recompute-num-layers", "recompute-modules")
    offload: list[dict[str, Any]] = []
    share = reading.number("optimizer-offload-fraction", absent=1.0)
    if reading.flag("optimizer-cpu-offload"):
        offload.append({"what": "optimizer", "fraction": 1.0 if share is None else float(share)})
    count = reading.count("cpu-offloading-num-layers")
    if count and layers:
        offload.append({"what": "activations", "fraction": min(1.0, round(count / layers, 4))})
    return kept | {"offload": tuple(offload)}


def _recipe(reading: Reading, batch: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {**_precision(reading), **_optimizer(reading)}
    for key, theirs, default in (("seq", "seq-length", None), ("seed", "seed", 1234)):
        if (count := reading.count(theirs, absent=default)) is not None:
            recipe[key] = count
    hidden = reading.number("hidden-dropout", absent=0.1)
    attention = reading.number("attention-dropout", absent=0.1)
    if hidden is not None:
        recipe["dropout"] = float(hidden)
    if hidden != attention:
        reading.note(
            f"attention-dropout {attention} beside hidden-dropout {hidden}: here one probability is for both"
        )
    aux = reading.number("moe-aux-loss-coeff") or 0.0
    if reading.word("moe-router-load-balancing-type") not in ("none", "sinkhorn") and aux:
        recipe["router_aux"] = float(aux)
    if z := reading.number("moe-z-loss-coeff"):
        recipe["router_z"] = float(z)
    return recipe | _schedule(reading, recipe.get("lr"), batch)


def _precision(reading: Reading) -> dict[str, Any]:
    recipe: dict[str, Any] = {"precision": "fp32"}
    for precision in ("bf16", "fp16"):
        if reading.flag(precision):
            recipe["precision"] = precision
    if reading.word("fp8-format") or reading.flag("fp8-hybrid"):
        recipe["precision"] = "fp8"
    reading.skip(
        "accumulate-allreduce-grads-in-fp32", "fp8-recipe", "fp8-amax-history-len", "fp8-amax-compute-algo"
    )
    recipe["reduce"] = "bf16" if reading.flag("grad-reduce-in-bf16") else "fp32"
    return recipe


def _optimizer(reading: Reading) -> dict[str, Any]:
    name = (reading.word("optimizer") or "adam").lower()
    kinds = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "lion": "lion", "dist_muon": "muon"}
    if name not in kinds:
        reading.note(f"optimizer {name}: no counterpart; nearest: adamw")
    recipe: dict[str, Any] = {"optimizer": kinds.get(name, "adamw")}
    fields = [("lr", "lr", None), ("weight_decay", "weight-decay", 0.01), ("clip", "clip-grad", 1.0)]
    if recipe["optimizer"] == "sgd":
        fields.append(("momentum", "sgd-momentum", 0.9))
    else:
        fields += [("beta1", "adam-beta1", 0.9), ("beta2", "adam-beta2", 0.999), ("eps", "adam-eps", 1e-8)]
    for key, theirs, default in fields:
        if (value := reading.number(theirs, absent=default)) is not None:
            recipe[key] = float(value)
    return recipe


def _schedule(reading: Reading, lr: float | None, batch: int) -> dict[str, Any]:
    style = reading.word("lr-decay-style") or "linear"
    if style not in _DECAYS:
        reading.note(f"lr-decay-style {style}: no counterpart; nearest: cosine")
    recipe: dict[str, Any] = {"schedule": _DECAYS.get(style, "cosine")}
    steps, samples = reading.count("train-iters"), reading.count("train-samples")
    if steps is None and samples:
        steps = -(-samples // batch)
    if steps:
        recipe["steps"] = steps
    warmup, share = reading.count("lr-warmup-iters"), reading.number("lr-warmup-fraction")
    early, late = reading.count("lr-warmup-samples"), reading.count("lr-decay-samples")
    warmup = -(-early // batch) if early else warmup
    recipe["warmup"] = warmup if warmup else float(share) if share else 0
    decay = -(-late // batch) if late else reading.count("lr-decay-iters")
    if decay and steps and decay != steps and style != "constant":
        reading.note(f"lr-decay-iters {decay}: here the schedule ends with the run, after {steps} steps")
    least = reading.number("min-lr") or 0.0
    if least and lr:
        recipe["lr_min"] = min(1.0, float(f"{least / lr:.6g}"))
    if (tail := reading.count("lr-wsd-decay-iters")) is not None and recipe["schedule"] == "wsd":
        recipe["decay"] = tail
    kind = reading.word("lr-wsd-decay-style")
    if kind not in (None, "linear"):
        reading.note(f"lr-wsd-decay-style {kind}: here the last phase is linear")
    return recipe


def _ramp(reading: Reading, batch: int) -> dict[str, Any]:
    """``--rampup-batch-size START STEP SAMPLES``: an equal share of the samples at each size."""
    written = reading.numbers("rampup-batch-size")
    if written is None:
        return {}
    if len(written) != 3 or not all(one > 0 and float(one).is_integer() for one in written):
        reading.note("rampup-batch-size: not a start, an increment and samples, so it is left out")
        return {}
    start, grows, samples = (int(one) for one in written)
    sizes = range(start, batch, grows)
    if not 0 < len(sizes) <= _MOST_STAGES:
        reading.note(f"rampup-batch-size: {len(sizes)} sizes before {batch}, so it is left out")
        return {}
    each = samples // len(sizes)
    return {"batch_ramp": [{"batch": size, "samples": each * (at + 1)} for at, size in enumerate(sizes)]}


def _others(reading: Reading, recipe: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    bucket = reading.count("ddp-bucket-size")
    if bucket:
        tables["tune"] = {"bucket_mb": bucket * REDUCE_BYTES[recipe["reduce"]] / 2**20}
    for table, key, theirs in (
        ("checkpoint", "every", "save-interval"),
        ("evaluate", "every", "eval-interval"),
        ("evaluate", "batches", "eval-iters"),
    ):
        if (count := reading.count(theirs)) is not None:
            tables.setdefault(table, {})[key] = count
    return tables
