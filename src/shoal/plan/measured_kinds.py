"""Kinds of measured runs, the planner's error on each, and a workload's distance from the nearest.

Rows of one source with the same device, axes and nodes form a kind; only rows on which no constant was fitted count.
``tests/plan/test_measured_kinds.py`` recounts them.
"""

from __future__ import annotations

from math import log2, sqrt
from typing import NamedTuple

from shoal.predict.workload import Workload


class MeasuredKind(NamedTuple):
    """A group of similar rows."""

    source: str
    device: str
    tp: bool
    pp: bool
    nodes: bool  # more than one
    rows: int
    error: float  # mean relative error of these rows' predictions
    devices: float  # geometric means
    hidden: float
    seq: float


KINDS: tuple[MeasuredKind, ...] = (
    MeasuredKind("korthikanti", "A100-80GB", True, False, False, 1, 0.009, 8.0, 6140.0, 2050.0),
    MeasuredKind("korthikanti", "A100-80GB", True, True, True, 2, 0.034, 379.0, 22900.0, 2050.0),
    MeasuredKind("llm-foundry", "A100-40GB", False, False, False, 14, 0.039, 8.0, 1970.0, 5250.0),
    MeasuredKind("llm-foundry", "A100-40GB", False, False, True, 9, 0.024, 47.0, 2370.0, 2050.0),
    MeasuredKind("llm-foundry", "A100-80GB", False, False, False, 29, 0.04, 8.0, 1780.0, 5200.0),
    MeasuredKind("llm-foundry", "H100", False, False, False, 14, 0.077, 8.0, 2930.0, 5250.0),
    MeasuredKind("llm-foundry", "H100", False, False, True, 13, 0.039, 79.2, 4440.0, 2050.0),
    MeasuredKind("megatron-sc21", "A100-80GB", True, True, True, 3, 0.096, 1700.0, 15100.0, 2050.0),
    MeasuredKind("torchtitan", "A100-80GB", False, False, True, 3, 0.062, 64.0, 5560.0, 5160.0),
    MeasuredKind("torchtitan", "H100-96GB", False, False, False, 6, 0.056, 8.0, 4250.0, 4600.0),
    MeasuredKind("torchtitan", "H100-96GB", False, False, True, 1, 0.023, 128.0, 4100.0, 8190.0),
    MeasuredKind("torchtitan", "H100-96GB", True, False, True, 5, 0.06, 84.4, 6790.0, 6210.0),
    MeasuredKind("vtrain-multi", "A100-80GB", False, False, True, 3, 0.043, 64.0, 3070.0, 2050.0),
    MeasuredKind("vtrain-multi", "A100-80GB", False, True, True, 3, 0.011, 203.0, 5370.0, 2050.0),
    MeasuredKind("vtrain-multi", "A100-80GB", True, False, True, 8, 0.036, 90.5, 3650.0, 2050.0),
    MeasuredKind("vtrain-multi", "A100-80GB", True, True, True, 36, 0.062, 483.0, 8850.0, 2050.0),
    MeasuredKind("vtrain-single", "A100-80GB", False, False, False, 93, 0.029, 3.8, 1440.0, 1020.0),
    MeasuredKind("vtrain-single", "A100-80GB", False, True, False, 163, 0.031, 4.39, 1450.0, 1020.0),
    MeasuredKind("vtrain-single", "A100-80GB", True, False, False, 195, 0.079, 5.17, 1440.0, 1020.0),
    MeasuredKind("vtrain-single", "A100-80GB", True, True, False, 129, 0.068, 6.66, 1490.0, 1020.0),
    # One rank of Shoal's own engine, eager and compiled, on a calibrated H200: docs/accuracy.md.
    MeasuredKind("shoal", "H200", False, False, False, 59, 0.06, 1.0, 3000.0, 3000.0),
)

# The software that ran a source's rows, as a prefix of its stack's name.
SOFTWARE = {
    "vtrain": "megatron",
    "megatron": "megatron",
    "korthikanti": "megatron",
    "torchtitan": "torchtitan",
    "llm": "llm-foundry",
    "shoal": "shoal",
}
GENERATIONS = (
    ("A100", "A800"),
    ("H100", "H200", "H800", "GH200", "H20"),
    ("B200", "B300", "GB200"),
    ("MI3",),
)

# Distances between a workload and a kind, in steps: other software, a device of the same generation or of another, an
# axis that only one of them has, a claim that no row supports.
OTHER_SOFTWARE = 0.3
SAME_GENERATION, OTHER_DEVICE = 0.3, 1.5
ONE_AXIS = 0.5
UNMEASURED = 2.0
# Ratios that count as one step: sixteen times as many devices, four times as long sequences, a stream three times as
# wide.
DEVICES, SEQUENCE, WIDTH = 4.0, 2.0, 1.6

# Extra error per step of distance. Fitted without a source or a model width, about one step away, its rows are off by
# up to six points more (docs/accuracy.md).
APART = 0.065
# Turns a mean error into a bar that most rows are within.
MOST_ROWS = 1.25
# Kinds with few rows are shrunk towards the overall mean, which counts as this many rows.
USUAL_ROWS, USUAL_ERROR = 5, 0.055


def apart(workload: Workload, kind: MeasuredKind, unmeasured: int, known: bool) -> float:
    """Euclidean distance from a kind, in steps. ``unmeasured``: unsupported claims; ``known``: a measured device."""
    layout, name = workload.layout, workload.cluster.device.name
    device = 0.0
    if name != kind.device:
        alike = any(name.startswith(group) and kind.device.startswith(group) for group in GENERATIONS)
        device = SAME_GENERATION if alike or known else OTHER_DEVICE
    axes = (layout.tp > 1) != kind.tp, (layout.pp > 1) != kind.pp, (workload.cluster.nodes > 1) != kind.nodes
    software = SOFTWARE[kind.source.split("-")[0]]
    steps = [
        0.0 if workload.stack.name.startswith(software) else OTHER_SOFTWARE,
        device,
        log2(layout.world / kind.devices) / DEVICES,
        log2(workload.recipe.seq / kind.seq) / SEQUENCE,
        log2(workload.model.hidden / kind.hidden) / WIDTH,
        *(ONE_AXIS * differs for differs in axes),
        *[UNMEASURED] * unmeasured,
    ]
    return sqrt(sum(step * step for step in steps))


def typical(kind: MeasuredKind) -> float:
    """The expected error of a further row of a kind."""
    return (kind.rows * kind.error + USUAL_ROWS * USUAL_ERROR) / (kind.rows + USUAL_ROWS)


def expected_error(workload: Workload, unmeasured: int, known: bool) -> float:
    """The relative error expected of a prediction: that of the nearest kind's rows, plus a share for the distance."""
    return min(MOST_ROWS * typical(kind) + APART * apart(workload, kind, unmeasured, known) for kind in KINDS)
