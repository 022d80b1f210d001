"""Profile: a few steps on the hardware at hand, next to their prediction."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shoal.facts import calibration
from shoal.facts.layout.ranks import AXES
from shoal.facts.ledger import CATEGORIES
from shoal.facts.problem import BadInput
from shoal.facts.strategies import PIPELINE, purpose_of
from shoal.launch import local
from shoal.launch.scratch import check_scratch
from shoal.observe.kinds import COPIES
from shoal.plan.judge import Plan, as_json, judge
from shoal.plan.resolve import Job
from shoal.prove.measured_bubble import MeasuredPipeline, compare
from shoal.prove.profile_drift import of_run
from shoal.prove.profile_verdict import Evidence, verdict
from shoal.train.files import private_files, replace_text
from shoal.train.run_directory import RunDirectory

if TYPE_CHECKING:
    from shoal.prove.profile_rank import RankProfile

# A percentage error of a part below this fraction of the whole means nothing.
NEXT_TO_NOTHING = 1e-3


class ProfileFailed(RuntimeError):
    """A rank failed; the message is its own error."""


@dataclass(frozen=True)
class Profile:
    """What every rank measured, and the plan it is compared with."""

    job: Job
    plan: Plan
    seen: list[RankProfile]
    run: RunDirectory

    @property
    def seconds(self) -> float:
        """Seconds of an uninstrumented step, by the slowest rank's clock: no rank can start the next step without
        it.
        """
        return max(median(rank.seconds) for rank in self.seen)

    @property
    def input_wait(self) -> float:
        return max(median(rank.waits) for rank in self.seen)

    @property
    def spread(self) -> float:
        """How much the timed steps differ, as a fraction of their median."""
        times = self.seen[0].seconds
        return (max(times) - min(times)) / median(times)

    @cached_property
    def busiest(self) -> RankProfile:
        """The rank that computes longest, which is also the one that is predicted."""
        return max(self.seen, key=lambda rank: rank.spent.compute + rank.spent.recompute)

    @cached_property
    def fullest(self) -> RankProfile:
        return max(self.seen, key=peak)

    @cached_property
    def pipeline(self) -> MeasuredPipeline | None:
        return compare(self.job.layout, self.plan.workload.accumulation, self.seen)

    @cached_property
    def step(self) -> dict[str, float]:
        """The busiest rank's step, with the keys of ``Plan.step``.

        ``other`` is the rest of an uninstrumented step: host gaps, input wait, unintended copies.
        """
        spent = self.busiest.spent
        copies = spent.kinds.get(COPIES, 0.0)
        parts = {
            "compute": spent.compute - copies,
            "recompute": spent.recompute,
            "exposed_comm": spent.exposed_comm,
            "bubble": spent.bubble,
            "optimizer": spent.optimizer,
            "offload": copies if self.job.layout.offload else 0.0,
        }
        parts = {name: value * self._scale for name, value in parts.items()}
        return {
            "seconds": self.seconds,
            **parts,
            "other": max(0.0, self.seconds - sum(parts.values())),
        }

    @property
    def _scale(self) -> float:
        """The factor from the profiled step to an uninstrumented one. On a CPU the profiler slows everything alike.

        A GPU computes at its usual speed: only the host's gaps get longer, unless there were none.
        """
        spent = self.busiest.spent
        on_gpu = self.busiest.allocated is not None
        busy = spent.seconds - spent.input_wait - spent.host_gaps
        return min(1.0, self.seconds / busy) if on_gpu and busy else self.seconds / spent.seconds

    @cached_property
    def kinds(self) -> dict[str, float]:
        """Seconds of the step's computation by kind."""
        kinds = self.busiest.spent.kinds
        return {kind: seconds * self._scale for kind, seconds in kinds.items() if kind != COPIES}

    @cached_property
    def communication(self) -> dict[str, Any]:
        """Process groups that communicate, and for each collective the time that no computation hides."""
        spent = self.busiest.spent
        return {
            "total": spent.communication * self._scale,
            "exposed": {name: seconds * self._scale for name, seconds in spent.exposed.items()},
        }

    @property
    def copies(self) -> float:
        """Seconds of copies to and from the host that are not offload."""
        unasked = not self.job.layout.offload
        return self.busiest.spent.kinds.get(COPIES, 0.0) * self._scale if unasked else 0.0

    @property
    def host_gaps(self) -> float:
        """The rest of a step, in which the device waits for Python."""
        return max(0.0, self.step["other"] - self.input_wait - self.copies)

    @property
    def host_gaps_error(self) -> float | None:
        """Of all that is ``other``, only host gaps are predicted."""
        gaps = self.host_gaps
        return self.plan.step.other / gaps - 1 if gaps > self.seconds * NEXT_TO_NOTHING else None

    @cached_property
    def memory(self) -> dict[str, Any]:
        """The fullest rank's bytes, with the keys of ``Ledger``. Categories are the tracker's, and add up to its
        peak.
        """
        rank = self.fullest
        own = {name: rank.categories.get(name, 0) for name in CATEGORIES}
        # The tracker has finer categories for buffers, such as messages between stages.
        own["buffers"] += rank.peak - sum(own.values())
        return {
            **own,
            "peak_allocated": peak(rank),
            "peak_live": rank.peak,
            "reserved": rank.reserved,
            "capacity": self.job.cluster.device.memory_bytes,
            "worst_stage": rank.place["pp"],
            "instant": rank.moment,
        }

    @cached_property
    def errors(self) -> dict[str, dict[str, float]]:
        """Predicted over measured, minus one, for every part that is not negligible."""
        memory = ("peak_allocated", *CATEGORIES, *(("reserved",) if self.memory["reserved"] else ()))
        pairs = {
            "step": {name: (getattr(self.plan.step, name), ours) for name, ours in self.step.items()},
            "memory": {name: (getattr(self.plan.memory, name), self.memory[name]) for name in memory},
        }
        whole = {"step": self.seconds, "memory": peak(self.fullest)}
        return {
            what: {
                name: predicted / measured - 1
                for name, (predicted, measured) in parts.items()
                if measured > whole[what] * NEXT_TO_NOTHING
            }
            for what, parts in pairs.items()
        }

    @cached_property
    def rates(self) -> calibration.Calibration:
        """The calibration that the predicted times use."""
        return calibration.find(self.job.cluster)

    @property
    def groups(self) -> list[str]:
        """Groups that communicate, the one that the step waits for longest first.

        From the trace, if it distinguishes groups; with gloo it only does if there is just one.
        """
        waits: dict[str, float] = {}
        for name, seconds in self.communication["exposed"].items():
            group = name.partition(" ")[2]
            waits[group] = waits.get(group, 0.0) + seconds
        seen = {group: seconds for group, seconds in waits.items() if group in AXES}
        found = seen or self.plan.step.links
        links = sorted(found.items(), key=lambda link: -link[1])
        return [group for group, seconds in links if seconds and purpose_of(group) != PIPELINE]

    @cached_property
    def evidence(self) -> Evidence:
        step = self.step
        stages: dict[int, dict[int, float]] = {}
        for rank in self.seen:
            stages.setdefault(rank.place["pp"], {})[rank.rank] = rank.spent.compute + rank.spent.recompute
        return Evidence(
            workload=self.plan.workload,
            seconds=self.seconds,
            predicted_seconds=self.plan.step.seconds,
            peak=peak(self.fullest),
            predicted_peak=self.plan.memory.peak_allocated,
            input_wait=self.input_wait / self.seconds,
            exposed_comm=step["exposed_comm"] / self.seconds,
            optimizer=step["optimizer"] / self.seconds,
            recompute=step["recompute"] / self.seconds,
            host_gaps=self.host_gaps / self.seconds,
            copies=(step["offload"] + self.copies) / self.seconds,
            links=tuple(self.groups),
            pipeline=self.pipeline,
            stages=tuple(stages[number] for number in sorted(stages)),
            spread=self.spread,
            rates=self.rates.words,
            rates_measured=self.rates.measured is not None,
            shared=self.job.config.cluster.share and self.job.layout.world > self.job.cluster.devices,
        )

    @cached_property
    def verdict(self) -> list[str]:
        return [*of_run(self.plan.workload, self.kinds, self.seconds), *verdict(self.evidence)]

    def document(self) -> dict[str, Any]:
        """The content of profile.json and of ``--json``."""
        predicted = as_json(self.plan)
        pipeline = self.pipeline
        return {
            "layout": str(self.job.layout),
            "device": self.job.cluster.device.name,
            "measured": {
                "step": self.step,
                "memory": self.memory,
                "input_wait": self.input_wait,
                "kinds": self.kinds,
                "communication": self.communication,
                "host_gaps": self.host_gaps,
                "profiled_seconds": self.busiest.spent.seconds,
                "rank": self.busiest.rank,
            },
            "predicted": {name: predicted[name] for name in ("step", "memory", "error_bar")},
            "error": self.errors,
            "rates": self.rates.words,
            "pipeline": None if pipeline is None else {**asdict(pipeline), "apart": pipeline.apart},
            "ranks": [_rank(rank) for rank in self.seen],
            "verdict": self.verdict,
            "traces": [str(self.run.trace(rank.rank)) for rank in self.seen],
        }


def peak(rank: RankProfile) -> int:
    """The allocator's own peak if there is one, otherwise the tracker's."""
    return rank.peak if rank.allocated is None else rank.allocated


def profile(
    job: Job, run: RunDirectory, warm_up: int, console: Console, visible: str | None = None
) -> Profile:
    """Profile ``job``; traces go to ``run``, which is otherwise unchanged. Bad input raises before that."""
    if warm_up < 1:
        raise BadInput(
            f"--steps {warm_up}: the first step makes optimizer states, so one is needed", "--steps 3"
        )
    local.check_devices(job, visible)
    local.check_memory(job)
    run.check_place()
    check_scratch(job, run.path)
    plan = judge(job.workload())
    with ExitStack() as held:
        if run.path.exists():
            held.enter_context(run.held())
        dataset = local.tokenised(job, console)
        local.check_weights(job, None)
        if not run.path.exists():
            held.enter_context(run.held())
        local.warm_workers((*local.PRELOAD, "shoal.prove.profile_rank"), job.config)
        held.enter_context(private_files())
        # torch takes seconds to import, and bad input was reported without it.
        from shoal.launch.ranks import RankFailed, run_ranks
        from shoal.prove.profile_rank import ProfileRequest, take_part

        # Traces of an earlier profile may be from more ranks.
        shutil.rmtree(run.profiles, ignore_errors=True)
        run.profiles.mkdir(mode=0o700)
        order = ProfileRequest(job, dataset.path.resolve(), warm_up, RunDirectory(run.path.resolve()))
        try:
            seen = run_ranks(job.layout.world, take_part, (order,), max(600.0, 4 * job.config.fault.timeout))
        except RankFailed as failure:
            raise ProfileFailed(str(failure)) from failure
        measured = Profile(job, plan, seen, run)
        replace_text(run.profile, json.dumps(measured.document(), indent=2) + "\n")
        return measured


def _rank(rank: RankProfile) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "place": rank.place,
        "seconds": rank.seconds,
        "input_wait": rank.waits,
        "spent": asdict(rank.spent),
        "exposed_comm": rank.spent.exposed_comm,
        "peak_live": rank.peak,
        "categories": rank.categories,
        "peak_allocated": rank.allocated,
        "reserved": rank.reserved,
        "traffic": rank.traffic,
    }
