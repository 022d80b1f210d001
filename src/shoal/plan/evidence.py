"""How well supported a prediction is: which of its parts were ever held against a published run, and what follows.

Every axis and policy of a layout is a claim with a name. How many of the 908 published rows of Shoal's collection
support each one is written down here; a test counts them again.
"""

from __future__ import annotations

from shoal.facts import calibration
from shoal.predict.question import Question

# Published rows that support a claim. What is not listed has none.
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

# What rows that were not fitted are off by, on average and with something to spare.
BASE = 0.07
# How much wider an error bar is for each claim that no row supports, and for a device kind that was never measured.
UNMEASURED = 0.05
UNKNOWN_DEVICE = 0.08
WIDEST = 0.5

# The largest published run, and the longest sequences.
LARGEST = 2520
LONGEST = 65536

DEVICE = "device "


def claims(question: Question) -> list[str]:
    """What a prediction relies on, by name."""
    layout, device = question.layout, question.cluster.device.name
    found = [f"recompute={layout.recompute}", f"precision={question.recipe.precision}", f"{DEVICE}{device}"]
    if layout.fsdp * layout.cp > 1:
        found.append(f"zero={layout.zero}")
        if layout.dp > 1:
            found.append("sharding within replicas")
    elif layout.dp > 1:
        found.append("dp")
    if layout.tp > 1:
        found.append("tp")
        if layout.sp:
            found.append("sp")
    if layout.cp > 1:
        found.append(f"cp_kind={layout.cp_kind}")
    if layout.pp > 1:
        found.append(f"schedule={layout.schedule}")
    if question.model.experts is not None:
        found.append("experts")
    if layout.ep > 1:
        found.append("ep")
    if question.model.latent is not None:
        found.append("latent attention")
    found += [f"offload={part}" for part in layout.offload]
    if question.lora is not None:
        found.append("lora")
    if layout.world > question.cluster.devices_per_node:
        found.append("several nodes")
    if question.recipe.seq > LONGEST:
        found.append(f"sequences over {LONGEST}")
    if layout.tp > question.cluster.fast_domain:
        found.append("tp across nodes")
    if layout.world > LARGEST:
        found.append(f"more than {LARGEST} GPUs")
    return found


def unmeasured(question: Question) -> list[str]:
    """The claims that no published row supports. A device kind counts as measured where its kernels were."""
    known = calibration.find(question.cluster).known
    return [
        claim
        for claim in claims(question)
        if not ROWS.get(claim) and not (known and claim.startswith(DEVICE))
    ]


def error_bar(question: Question) -> float:
    """By which share of itself a predicted step time may be off."""
    wider = sum(UNKNOWN_DEVICE if claim.startswith(DEVICE) else UNMEASURED for claim in unmeasured(question))
    return min(WIDEST, BASE + wider)
