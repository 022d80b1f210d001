"""How well published runs support a prediction, and its error bar.

Every axis and policy of a layout is a named claim. This file records how many of the 908 published rows of Shoal's
collection support each; a test recounts them. An error bar is that of the nearest rows.
"""

from __future__ import annotations

from shoal.facts import calibration
from shoal.facts.cluster.stack import Stack
from shoal.facts.layout import ContextKind, Offload, Recompute, Schedule, Zero
from shoal.plan.measured_kinds import expected_error
from shoal.plan.practice import usual_zero
from shoal.predict.workload import Workload

# Published rows per claim. Claims not listed have none.
ROWS = {
    "device A100-40GB": 29,
    "device A100-80GB": 831,
    "device H100": 33,
    "device H100-96GB": 15,
    "dp": 453,
    "precision=bf16": 116,
    "precision=fp16": 792,
    "recompute=full": 833,
    "recompute=none": 65,
    "recompute=selective": 10,
    "schedule=1f1b": 425,
    "schedule=interleaved": 1,
    "several nodes": 107,
    "sp": 7,
    "tp": 471,
    "tp across nodes": 3,
    "zero=3": 116,
}

WIDEST = 0.5

# Device count of the largest published run, longest sequence, and shortest step in seconds.
LARGEST = 2520
LONGEST = 65536
SHORTEST = 0.058149

DEVICE = "device "
# Stacks with constants that were fitted on no row.
UNFITTED = ("megatron", "deepspeed", "transformers")
SIZES = ("sequences over", "more than")


def claims(workload: Workload) -> list[str]:
    """The claims that a prediction relies on, by name."""
    layout, model, cluster = workload.layout, workload.model, workload.cluster
    found = [f"precision={workload.recipe.precision}", f"{DEVICE}{cluster.device.name}"]
    found += of_order(layout.pp, layout.schedule, layout.recompute)
    found += of_states(layout.dp, layout.shards, layout.zero, layout.offload, workload.stack)
    found += of_share(layout.cp, layout.cp_kind, layout.ep)
    if layout.tp > 1:
        found.append("tp")
        if layout.sp:
            found.append("sp")
    if workload.stack.name in UNFITTED:
        found.append(f"stack {workload.stack.name}")
    if model.experts is not None:
        found.append("experts")
    if model.latent is not None:
        found.append("latent attention")
    if workload.lora is not None:
        found.append("lora")
    if layout.world > cluster.devices_per_node:
        found.append("several nodes")
    if workload.recipe.seq > LONGEST:
        found.append(f"sequences over {LONGEST}")
    if layout.tp > cluster.fast_domain:
        found.append("tp across nodes")
    if layout.world > LARGEST:
        found.append(f"more than {LARGEST} GPUs")
    return found


# Claims about a layout, by the steps in which a search decides it.


def of_share(cp: int, kind: ContextKind, ep: int) -> list[str]:
    found = [f"cp_kind={kind}"] if cp > 1 else []
    return [*found, "ep"] if ep > 1 else found


def of_order(pp: int, schedule: Schedule, recompute: Recompute) -> list[str]:
    again = f"recompute={recompute}"
    return [again, f"schedule={schedule}"] if pp > 1 else [again]


def of_states(dp: int, shards: int, zero: Zero, offload: tuple[Offload, ...], stack: Stack) -> list[str]:
    away = [f"offload={part}" for part in offload]
    if shards == 1:
        return ["dp", *away] if dp > 1 else away
    within = ["sharding within replicas"] if dp > 1 else []
    if (usual := usual_zero(stack)) != 3:
        # What every run of a stack does is not a claim besides the stack itself.
        return [*([] if zero == usual else [f"zero={zero} of {stack.name}"]), *within, *away]
    return [f"zero={zero}", *within, *away]


def unmeasured(workload: Workload) -> list[str]:
    """The claims that no published row supports. A device kind counts as measured if its kernels were."""
    known = calibration.find(workload.cluster).known
    return [
        claim
        for claim in claims(workload)
        if not ROWS.get(claim) and not (known and claim.startswith(DEVICE))
    ]


def error_bar(workload: Workload, seconds: float) -> float:
    """The relative error expected of a predicted step time: see ``plan/measured_kinds.py``.

    Below the shortest published step, the error is assumed to be as many milliseconds as there: such steps wait for
    the host, whose speed differs between machines.
    """
    known = calibration.find(workload.cluster).known
    # Devices and sizes are part of the distance between kinds.
    doubts = sum(not claim.startswith((DEVICE, *SIZES)) for claim in unmeasured(workload))
    return min(WIDEST, expected_error(workload, doubts, known) * max(1.0, SHORTEST / seconds))
