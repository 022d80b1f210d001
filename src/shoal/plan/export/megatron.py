"""Export to Megatron-LM: a shell script with its command-line arguments.

Checked against the parser and the checks of Megatron-LM with core 0.20 (August 2026).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from shoal.facts.cluster.stack import MEGATRON_CORE
from shoal.facts.layout.stages import cut
from shoal.plan.export import megatron_model
from shoal.plan.export.shared import (
    Exported,
    bucket_elements,
    machines,
    offloads,
    settled,
    sharding,
    torchrun,
)
from shoal.predict.workload import USUAL, Workload

FILE = "megatron.sh"
CHECKED = "Megatron-LM with core 0.20"
STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def write(workload: Workload) -> Exported:
    workload, notes, runs_as = settled_here(workload)
    nodes, _ = machines(workload)
    every_node = f"  # on each of {nodes} nodes" if nodes > 1 else ""
    command = f"{'HEAD_NODE=first-node ' if nodes > 1 else ''}bash {FILE}{every_node}"
    return Exported({FILE: _script(workload)}, command, [*notes, *cannot(workload)], runs_as, CHECKED)


def settled_here(workload: Workload) -> tuple[Workload, list[str], Workload]:
    """The workload in a layout that Megatron's core runs, notes on changes, and the workload as it will run."""
    runs_as, notes = settled(MEGATRON_CORE, workload)
    written = replace(workload, layout=runs_as.layout)
    return written, notes, replace(runs_as, lora=None)


def _script(workload: Workload) -> str:
    words = [
        *_layout(workload),
        *_data_ranks(workload),
        *megatron_model.arguments(workload),
        *_recipe(workload),
    ]
    lines = [f"    {shlex.join(word)}" for word in words]
    # FSDP's communication needs several hardware queues; that of tensor and context parallelism exactly one.
    queues = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS" if uses_fsdp(workload) else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    )
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Megatron-LM: {workload.model.name} in {workload.layout}. Run it where pretrain_gpt.py is; further",
            "# arguments are passed on. In place of --mock-data name your own --data-path and tokenizer.",
            "set -euo pipefail",
            queues,
            "ARGUMENTS=(",
            *lines,
            ")",
            f'exec {torchrun(workload)} pretrain_gpt.py "${{ARGUMENTS[@]}}" "$@"',
            "",
        ]
    )


def uses_fsdp(workload: Workload) -> bool:
    """Megatron-FSDP shards gradients and parameters; it combines with everything but pipelines."""
    return sharding(workload) > 1 and workload.layout.pp == 1


def sequence_parallel(workload: Workload) -> bool:
    return workload.layout.tp > 1 and workload.layout.sp


def stage_layout(workload: Workload) -> str | None:
    """Shoal's stages in Megatron's notation, ``Et*7|t*8|t*7L``; None if all stages are equal, which is its default."""
    stages = cut(workload.model, workload.layout.pp * workload.layout.chunks, workload.recipe.seq)
    if len({len(stage.layers) for stage in stages}) == 1:
        return None
    return "|".join(
        f"{'E' if stage.first else ''}t*{len(stage.layers)}{'L' if stage.last else ''}" for stage in stages
    )


def _layout(workload: Workload) -> Iterator[list[str]]:
    layout = workload.layout
    yield ["--tensor-model-parallel-size", str(layout.tp)]
    if sequence_parallel(workload):
        yield ["--sequence-parallel", "--tp-comm-overlap"]
    yield ["--context-parallel-size", str(layout.cp)]
    if layout.cp > 1:
        yield ["--cp-comm-type", "p2p" if layout.cp_kind == "ring" else "a2a"]
    yield ["--pipeline-model-parallel-size", str(layout.pp)]
    if layout.pp > 1:
        stages = stage_layout(workload)
        if stages is not None:
            yield ["--pipeline-model-parallel-layout", stages]
        elif layout.chunks > 1:
            each = workload.model.layers // (layout.pp * layout.chunks)
            yield ["--num-layers-per-virtual-pipeline-stage", str(each)]
    if workload.model.experts is not None:
        # Shoal does not split routed experts, whatever tp is.
        yield ["--expert-model-parallel-size", str(layout.ep), "--expert-tensor-parallel-size", "1"]
    if layout.recompute == "full":
        yield [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ]
    if layout.recompute == "selective":
        yield ["--recompute-granularity", "selective", "--recompute-modules", *recomputed_modules(workload)]
    waiting = offloads(workload)
    if "optimizer" in waiting:
        fraction = str(waiting["optimizer"].fraction)
        yield ["--optimizer-cpu-offload", "--optimizer-offload-fraction", fraction]
        yield ["--use-precision-aware-optimizer"]
    if "activations" in waiting and layout.pp == 1 and layout.recompute == "none":
        yield ["--cpu-offloading-num-layers", str(offloaded_layers(workload))]


def recomputed_modules(workload: Workload) -> list[str]:
    """What is cheap to recompute; attention's scores are never saved, since its kernel recomputes them."""
    return ["layernorm", "moe_act"] if workload.model.experts is not None else ["layernorm"]


def offloaded_layers(workload: Workload) -> int:
    return max(1, round(offloads(workload)["activations"].fraction * workload.model.layers))


def own_buckets(workload: Workload) -> bool:
    """Whether bucket sizes were set: Shoal's default is small here, and Megatron's grows with the data ranks."""
    return workload.tune.bucket_mb not in (USUAL.bucket_mb, MEGATRON_CORE.bucket_mb)


def _data_ranks(workload: Workload) -> Iterator[list[str]]:
    layout, zero = workload.layout, sharding(workload)
    if layout.data_ranks * layout.cp > 1:
        yield ["--overlap-grad-reduce"]
        if own_buckets(workload):
            yield ["--ddp-bucket-size", str(bucket_elements(workload))]
    if zero:
        yield ["--use-distributed-optimizer", "--overlap-param-gather"]
        if layout.dp > 1:
            yield ["--num-distributed-optimizer-instances", str(layout.dp)]
    if uses_fsdp(workload):
        yield ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", STRATEGIES[zero]]
        yield ["--no-gradient-accumulation-fusion", "--ckpt-format", "fsdp_dtensor"]
        if zero == 3:
            yield ["--init-model-with-meta-device"]


def _recipe(workload: Workload) -> Iterator[list[str]]:
    recipe = workload.recipe
    yield ["--micro-batch-size", str(workload.micro), "--global-batch-size", str(recipe.batch)]
    yield ["--seq-length", str(recipe.seq), "--train-iters", str(recipe.steps)]
    yield ["--calculate-per-token-loss"]
    yield ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]
    if recipe.optimizer == "adamw":
        yield ["--optimizer", "adam", "--adam-beta1", str(recipe.beta1), "--adam-beta2", str(recipe.beta2)]
        yield ["--adam-eps", str(recipe.eps)]
    else:
        yield ["--optimizer", "sgd", "--sgd-momentum", str(recipe.momentum)]
    yield ["--weight-decay", str(recipe.weight_decay), "--clip-grad", str(recipe.clip)]
    yield ["--lr", str(recipe.peak_lr), "--min-lr", f"{recipe.peak_lr * recipe.lr_min:.6g}"]
    yield ["--lr-warmup-iters", str(recipe.warmup_steps), "--lr-decay-iters", str(recipe.steps)]
    if recipe.schedule == "wsd":
        yield ["--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear"]
        yield ["--lr-wsd-decay-iters", str(recipe.decay_steps)]
    else:
        yield ["--lr-decay-style", recipe.schedule]
    yield ["--attention-dropout", str(recipe.dropout), "--hidden-dropout", str(recipe.dropout)]
    # Megatron rejects seed 0.
    yield ["--seed", str(max(1, recipe.seed)), "--init-method-std", str(workload.model.init_std)]
    if recipe.precision in ("bf16", "fp8"):
        yield ["--bf16"]
    if recipe.precision == "fp8":
        yield ["--fp8-format", "hybrid"]
    if recipe.precision == "fp16":
        yield ["--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "2000", "--hysteresis", "1"]
    if recipe.precision != "fp32":
        yield ["--grad-reduce-in-bf16" if recipe.reduce == "bf16" else "--accumulate-allreduce-grads-in-fp32"]


def cannot(workload: Workload) -> Iterator[str]:
    """Settings that Megatron's arguments cannot express; shared with NeMo, which runs on the same core."""
    yield from _cannot_place(workload)
    yield from _cannot_keep(workload)
    yield from _cannot_compute(workload)
    yield from megatron_model.cannot(workload)


def _cannot_place(workload: Workload) -> Iterator[str]:
    zero = sharding(workload)
    if zero == 3 and (workload.tune.prefetch != 1 or workload.tune.persist_below):
        yield "prefetch and persist_below: nearest: Megatron-FSDP's suggested communication unit size"


def _cannot_keep(workload: Workload) -> Iterator[str]:
    if workload.layout.recompute == "selective":
        modules = " and ".join(recomputed_modules(workload))
        yield f"recompute=selective, which keeps matrix products alone: nearest: recompute modules {modules}"


def _cannot_compute(workload: Workload) -> Iterator[str]:
    recipe = workload.recipe
    if recipe.precision == "fp64":
        yield "precision=fp64: nearest: fp32"
    if recipe.states != "fp32":
        yield f"states={recipe.states}: nearest: fp32 master weights; --exp-avg-dtype narrows the moments"
    if recipe.seed == 0:
        yield "seed=0: nearest: 1"
    if recipe.z_loss:
        yield f"z_loss={recipe.z_loss}: its head's loss is the cross-entropy alone; nearest: 0"
