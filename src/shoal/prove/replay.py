"""Replay a past step of a run from the nearest checkpoint, in any layout, and compare it with the run's records.

The state before the step is branched into a scratch run (``train/branch.py``), where real training continues. Its
results for the step, and for those up to the run's next checkpoint, must equal the run's: bit for bit in the run's own
layout and in strict mode, otherwise within rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from rich.console import Console

from shoal.facts.config import Config
from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch import local
from shoal.launch.ranks import run_ranks
from shoal.launch.scratch import check_scratch
from shoal.plan.resolve import Job, resolve
from shoal.prove.replay_rank import NotFinite, RankFindings, ReplayRequest, SampleLoss, run_replay_rank
from shoal.train.branch import branch
from shoal.train.checkpoint.listing import ListedCheckpoint, list_checkpoints
from shoal.train.checkpoint.manifest import StoredPiece
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.files import private_files, read_rows
from shoal.train.run_directory import RunDirectory

# Relative differences that rounding causes: of losses and norms, and of a tensor relative to its largest element.
ROUNDING = {
    "fp64": (1e-10, 1e-8),
    "fp32": (1e-4, 1e-2),
    "bf16": (2e-2, 1e-1),
    "fp16": (2e-2, 1e-1),
    "fp8": (5e-2, 2e-1),
}
PATIENCE = 7 * 24 * 3600.0  # seconds: the nearest checkpoint may be many steps before
NUMBERS = ("loss", "grad_norm")
ORDER = ("weight", "output", "gradient")  # the order in which a step reaches them
WORST_SAMPLES = 5


@dataclass(frozen=True)
class ReplayedStep:
    """The recorded step, and the replayed one."""

    step: int
    recorded: dict[str, float | None]
    replayed: dict[str, float | None]
    identical: bool  # the loss is bit-equal
    same: bool  # as equal as it has to be


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between the run's checkpoint and the replay's."""

    tensor: str
    state: str
    index: tuple[int, ...]  # of the largest difference
    recorded: float
    replayed: float
    difference: float  # relative to the tensor's largest element
    rank: int  # the run's rank that held and wrote this element


@dataclass(frozen=True)
class ReplayVerdict:
    """The results of a replay."""

    start: int  # the checkpoint it began with; 0: the initial weights
    layout: str
    exact: bool  # compared bit for bit
    steps: list[ReplayedStep]
    checkpoint: int | None  # the checkpoint that was compared, if there was one
    tensors: int  # number of differing tensors
    worst: TensorDifference | None
    not_finite: NotFinite | None  # the first that the step reaches
    samples: list[SampleLoss]  # the samples with the largest loss

    @property
    def same(self) -> bool:
        return all(one.same for one in self.steps) and not self.tensors and self.not_finite is None


def replay(path: Path, step: int, layout: str, visible: str | None, console: Console) -> ReplayVerdict:
    """Run the replay. Bad input raises before a process is started."""
    run = RunDirectory(path)
    if not run.config.is_file():
        raise BadInput(f"{path} is no run", "name a run's directory, runs/NAME")
    recorded = {row["step"]: row for row in read_rows(run.metrics)}
    if step not in recorded:
        last = max(recorded, default=0)
        raise BadInput(f"--step {step}: {path} has recorded steps 1 to {last}", f"--step {last}")
    found = [one for one in list_checkpoints(path) if not one.damage and one.where != "set aside"]
    start = max((one for one in found if one.step < step), key=lambda one: one.step, default=None)
    ahead = [one for one in found if one.step >= step]
    target = min(ahead, key=lambda one: one.step, default=None)
    last = target.step if target is not None else step
    job = _job(run, layout, visible)
    local.check_devices(job, visible)
    check_scratch(job, Path(gettempdir()))
    if start is None:
        local.check_weights(job, None)
    dataset = local.tokenised(job, console)
    local.warm_workers((*local.PRELOAD, "shoal.prove.replay_rank"), job.config)
    with TemporaryDirectory(prefix="shoal-replay-") as folder, private_files():
        scratch = RunDirectory(Path(folder) / "run")
        scratch.path.mkdir()
        scratch.write_start(job, {}, {})
        if start is not None:
            branch(job, scratch, start, dataset.fingerprint)
        request = ReplayRequest(job, scratch.path, dataset.path, step, last)
        seen: list[RankFindings] = run_ranks(job.layout.world, run_replay_rank, (request,), PATIENCE)
        again = {row["step"]: row for row in read_rows(scratch.metrics)}
        exact = job.config.run.strict or all(
            str(job.layout) == recorded[one]["layout"] for one in range(step, last + 1) if one in recorded
        )
        limits = (0.0, 0.0) if exact else ROUNDING[job.config.recipe.precision]
        steps = [
            _compared(recorded[one], again[one], limits[0])
            for one in range(step, last + 1)
            if one in recorded and one in again
        ]
        differing = _differing(target, scratch, limits[1]) if target is not None else []
    return ReplayVerdict(
        start.step if start is not None else 0,
        str(job.layout),
        exact,
        steps,
        target.step if target is not None else None,
        len(differing),
        max(differing, key=lambda one: one.difference, default=None),
        _first(seen),
        _worst_samples(seen),
    )


def _job(run: RunDirectory, layout: str, visible: str | None) -> Job:
    """The run's own job in another layout: nothing is evaluated or observed, and its last state is kept."""
    given = load(run.config, None, layout if layout != "own" else None).config
    values = given.model_dump()
    values["checkpoint"] |= {"every": 10**9, "to": None, "memory": 0}
    values["evaluate"] |= {"every": 0, "batches": 0, "samples": 0}
    values["run"] |= {"observe": False, "ledger": False}
    values["server"]["servers"] = 0
    values["fault"]["nonfinite"] = "skip"
    return resolve(Config.model_validate(values), visible)


def _compared(then: dict[str, Any], now: dict[str, Any], limit: float) -> ReplayedStep:
    before, after = ({name: row.get(name) for name in NUMBERS} for row in (then, now))
    identical = then.get("loss_hex") == now.get("loss_hex")
    same = all(_close(before[name], after[name], limit) for name in NUMBERS)
    return ReplayedStep(then["step"], before, after, identical, same and (identical or limit > 0))


def _close(one: float | None, other: float | None, limit: float) -> bool:
    """Whether two values agree; non-finite ones were recorded as null."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= limit * max(abs(one), abs(other))


def _differing(target: ListedCheckpoint, scratch: RunDirectory, limit: float) -> list[TensorDifference]:
    """Tensors of the run's checkpoint, state by state, that differ from the scratch run's."""
    theirs, ours = Checkpoint(target.place, target.step), Checkpoint(scratch.disk, target.step)
    found = []
    both = _held(theirs) & _held(ours)
    for state in sorted(theirs.states & ours.states):
        for name in (name for name in theirs.manifest.shapes if (state, name) in both):
            then, now = (one.tensor(state, name).double() for one in (theirs, ours))
            largest = max(float(now.abs().max()), 1e-30)
            apart = ((then - now).abs() / largest).nan_to_num(nan=math.inf, posinf=math.inf)
            place = int(apart.reshape(-1).argmax())
            amount = float(apart.reshape(-1)[place])
            if amount > limit:
                index = _index(place, tuple(then.shape))
                owner = _owner(theirs, state, name, index)
                values = float(then.reshape(-1)[place]), float(now.reshape(-1)[place])
                found.append(TensorDifference(name, state, index, *values, amount, owner))
    return found


def _held(checkpoint: Checkpoint) -> set[tuple[str, str]]:
    """(state, tensor) pairs of the checkpoint whose states have their tensor's shape."""
    shapes = checkpoint.manifest.shapes
    return {
        (one.state, one.tensor) for one in checkpoint.all_pieces() if len(one.size) == len(shapes[one.tensor])
    }


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.insert(0, place % size)
        place //= size
    return tuple(index)


def _owner(checkpoint: Checkpoint, state: str, name: str, index: tuple[int, ...]) -> int:
    """The rank whose file has an element: ranks write what they hold."""

    def holds(piece: StoredPiece) -> bool:
        box = zip(piece.offset, piece.size, index, strict=True)
        return all(start <= at < start + size for start, size, at in box)

    pieces = (one for one in checkpoint.all_pieces() if (one.state, one.tensor) == (state, name))
    digits = "".join(filter(str.isdigit, next(one for one in pieces if holds(one)).file.partition(".")[0]))
    return int(digits or 0)


def _first(seen: list[RankFindings]) -> NotFinite | None:
    """By kind and, within a kind, in network order, which is the order in which a rank reached them."""
    for what in ORDER:
        for rank in seen:
            for one in rank.not_finite:
                if one.what == what:
                    return one
    return None


def _worst_samples(seen: list[RankFindings]) -> list[SampleLoss]:
    """Merge ranks' losses: ranks that share a row report the same loss, or a part of it each."""
    rows: dict[int, list[SampleLoss]] = {}
    for rank in seen:
        for one in rank.samples:
            rows.setdefault(one.row, []).append(one)
    whole = [replace(each[0], loss=max(one.loss for one in each)) for each in rows.values()]
    ordered = sorted(whole, key=lambda one: (-one.loss if one.loss == one.loss else -math.inf, one.row))
    return ordered[:WORST_SAMPLES]
