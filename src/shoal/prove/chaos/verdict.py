"""The verdict of a campaign: same losses, same weights, every sample once, and the cost of each fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.prove.chaos.campaign import InjectedFault
from shoal.prove.chaos.fault_kinds import BY_NAME
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.files import read_rows
from shoal.train.metrics.sample_log import Proof
from shoal.train.run_directory import RunDirectory

# Relative tolerance for curves whose sums were computed in another order.
ROUNDING = 1e-4


@dataclass(frozen=True)
class ChaosVerdict:
    """``strict``: identical means bit-equal; otherwise within fp32 rounding."""

    struck: tuple[InjectedFault, ...]
    strict: bool
    first_difference: str
    weights_differ: str
    proof: Proof
    steps_lost: int
    seconds: float

    @property
    def holds(self) -> bool:
        same = not self.first_difference and not self.weights_differ
        return same and self.proof.holds and self.steps_lost == 0

    @property
    def most_redone(self) -> int:
        """The most uncommitted steps that one fault made the run repeat."""
        gone = Counter[int]()
        for one in self.struck:
            if one.resumed is not None:
                gone[one.resumed] += one.gone
        return max((count - gone[began] for began, count in self.proof.undone), default=0)

    def named(self) -> tuple[int, int]:
        """Faults that were attributed correctly, and the number of faults that could be."""
        judged = [one.named_right for one in self.struck if one.named_right is not None]
        return sum(judged), len(judged)

    def recovery(self, *targets: str) -> list[float]:
        """Seconds from fault to next commit, for faults of these targets."""
        return [
            one.recovered_s
            for one in self.struck
            if one.recovered_s is not None and BY_NAME[one.kind].target in targets
        ]

    def as_json(self) -> dict[str, Any]:
        right, judged = self.named()
        return {
            "faults": [
                {
                    "kind": one.kind,
                    "rank": one.rank,
                    "step": one.step,
                    "point": one.point,
                    "world": one.world,
                    "layout": one.layout,
                    "in_recovery": one.in_recovery,
                    "detected_s": one.detected_s,
                    "recovered_s": one.recovered_s,
                    "named_right": one.named_right,
                    "spared": one.spared,
                }
                for one in self.struck
            ],
            "steps_lost": self.steps_lost,
            "steps_destroyed": sum(one.gone for one in self.struck),
            "steps_redone": self.proof.redone,
            "most_redone": self.most_redone,
            "curve_identical": not self.first_difference,
            "weights_identical": not self.weights_differ,
            "strict": self.strict,
            "samples": {"steps": self.proof.steps, "used": self.proof.samples, "once": self.proof.holds},
            "named_right": right,
            "named": judged,
            "recovery_median_s": {
                target: statistics.median(found) if (found := self.recovery(target)) else None
                for target in ("rank", "launcher", "node", "one node")
            },
            "recovery_worst_s": max(
                self.recovery("rank", "launcher", "node", "one node", "checkpoint"), default=None
            ),
            "seconds": self.seconds,
        }


def difference(run: RunDirectory, reference: RunDirectory, strict: bool) -> str:
    """Where two curves first differ, in words; empty if they do not."""
    mine, theirs = read_rows(run.metrics), read_rows(reference.metrics)
    for one, other in zip(mine, theirs, strict=False):
        same = one["loss_hex"] == other["loss_hex"]
        if not strict and not same:
            loss, wanted = (float.fromhex(row["loss_hex"]) for row in (one, other))
            same = abs(loss - wanted) <= ROUNDING * abs(wanted)
        if one["step"] != other["step"] or not same:
            return f"step {one['step']}: {one['loss']}; without faults step {other['step']}: {other['loss']}"
    if len(mine) != len(theirs):
        return f"{len(mine)} steps where there were {len(theirs)} without faults"
    return ""


def weights_differ(run: RunDirectory, reference: RunDirectory, strict: bool) -> str:
    """The first tensor that differs between the last checkpoints, optimizer states included; empty if none does."""
    mine, theirs = (Checkpoint(one.disk, one.disk.committed()[-1]) for one in (run, reference))
    if mine.step != theirs.step:
        return f"the last checkpoint is step {mine.step}, and {theirs.step} without faults"
    for state in sorted(theirs.states):
        for name in theirs.manifest.shapes:
            one, other = mine.tensor(state, name), theirs.tensor(state, name)
            if not torch.equal(one, other) and (strict or not torch.allclose(one, other, 1e-3, 1e-5)):
                return f"{state} of {name}: {int((one != other).sum())} of {one.numel()} elements differ"
    return ""


def steps_lost(struck: Sequence[InjectedFault]) -> int:
    """Committed steps that a recovery did not resume from although a copy of them was left."""
    lost = 0
    for one in struck:
        if one.resumed is not None and not one.in_recovery:
            # A second fault, which strikes during recovery, may destroy a step of its own.
            gone = sum(other.gone for other in struck if other.number in (one.number, one.number + 1))
            lost += max(0, one.committed - one.resumed - gone)
    return lost
