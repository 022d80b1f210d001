"""One call of ``shoal train`` or ``shoal tune`` that looks for the fastest layout while it trains.

A move is a stop between two steps, with a commit, and a start of the workers in another layout from the warm server:
the same as a resume, but without a new launcher.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from shoal.launch.failure import CRASHED, ERROR
from shoal.launch.manifest import describe_plan
from shoal.launch.progress import Tail
from shoal.launch.rendezvous import REGROUP
from shoal.launch.report import Report
from shoal.launch.scratch import clear_scratch
from shoal.launch.supervisor import Supervisor
from shoal.launch.tuning.account import account
from shoal.launch.tuning.expected import remember
from shoal.launch.tuning.record import FAILED, MEASURED, MOVE, MOVED, Tuning
from shoal.launch.tuning.trials import LayoutMove, TuningChoice
from shoal.plan.resolve import Job
from shoal.train.guard.crash_loops import OUT_OF_MEMORY


@dataclass(frozen=True)
class _Departure:
    """A move in progress: the workers were asked to stop, and those of the new layout have not done a step yet."""

    source: str
    choice: TuningChoice


class TuningSupervisor(Supervisor):
    """Moves between layouts until one is chosen; from then on it is a normal supervisor."""

    def __init__(self, tuning: Tuning, job: Job, *rest: Any) -> None:
        super().__init__(job, *rest)
        self.tuning, self.trials = tuning, tuning.trials
        self._steps = Tail(self.run.metrics, self.run.step(), launch=f"{self.name}-")
        self._departed = self._on_the_way()
        self._stopped_for_it = False  # the workers ended because they were asked to
        self._over = False  # devices are gone, and with them the layouts
        self._last_row = time.monotonic()

    def _on_the_way(self) -> _Departure | None:
        """A move that the previous launcher began and did not finish."""
        source, target = self.trials.current.layout, str(self.job.layout)
        if source == target:
            return None
        return _Departure(source, TuningChoice(target, "begun before", final=self.trials.decided is not None))

    def run_to_end(self) -> Report:
        report = super().run_to_end()
        clear_scratch(self.job, self.run.path)
        self._read_steps()
        return replace(report, tuning=account(self.trials))

    # While workers run.

    def _look_around(self) -> None:
        super()._look_around()
        self._read_steps()
        crew = self.agent.crew
        running = crew.processes and crew.first_death is None
        if running and self._departed is None and not self._over and not self.asked:
            choice = self.trials.next()
            if choice is not None:
                self._follow(choice)

    def _read_steps(self) -> None:
        now = time.monotonic()
        for row in self._steps.read():
            departed = self._departed
            if departed is not None and row["layout"] == departed.choice.layout:
                self._arrive(departed, row["step"], now - row["step_s"] - self._last_row)
            self.tuning.add(row)
            self._last_row = now

    def _follow(self, choice: TuningChoice) -> None:
        """Report the measurement and the next layout; stop the workers if it is a different one."""
        trials, here = self.trials, self.trials.current
        belief, step = trials.measured[here.layout], trials.step
        samples = len(here.samples)
        self.tuning.note(
            MEASURED,
            step=step,
            layout=here.layout,
            step_s=belief.seconds,
            spread_s=belief.spread,
            samples=samples,
        )
        self._say(step, f"{here.layout}: {belief.seconds:.3g} s/step, the median of {samples}")
        if choice.final:
            self.tuning.decide(choice)
            remember(self.job, trials)
            self._say(step, f"chosen: {choice.layout}, {choice.why}")
            self.run.note_layout(self.tuning.job, describe_plan(self.tuning.job))
        if choice.layout == here.layout:
            return
        if not choice.final:
            self._say(step, f"trying {choice.layout}, {choice.why}")
        self.tuning.note(MOVE, step=step, **{"from": here.layout, "to": choice.layout}, why=choice.why)
        self._departed = _Departure(here.layout, choice)
        self.rendezvous.attempt().set(REGROUP, "1")

    def _arrive(self, departed: _Departure, step: int, seconds: float) -> None:
        move = LayoutMove(step - 1, departed.source, departed.choice.layout, max(0.0, seconds))
        self._departed = None
        self.trials.moved(move)
        ends = {"from": move.source, "to": move.target}
        self.tuning.note(MOVED, step=move.after, **ends, seconds=move.seconds)
        self._say(move.after, f"moved to {move.target} in {move.seconds:.1f} s")

    def _say(self, step: int, text: str) -> None:
        self.progress.say(f"step {step:>6}  tuning: {text}")

    # Between two rounds.

    def _goes_on(self) -> bool:
        outcomes = [] if self.result is None else list(self.result.return_values.values())
        stopped = bool(outcomes) and all(one is not None and one.stopped for one in outcomes)
        self._stopped_for_it = stopped and self._departed is not None and not self.asked
        if self._stopped_for_it:
            self.agent.forget_restarts()
        return self._stopped_for_it

    def _before_round(self, number: int) -> None:
        job = self._next_job(number - 1) if number > 1 else self.job
        if job.layout != self.job.layout:
            clear_scratch(self.job, self.run.path)
            self.run.note_plan(describe_plan(job))
        self._assign(job, number)

    def _next_job(self, ended: int) -> Job:
        departed, moved = self._departed, self._stopped_for_it
        self._stopped_for_it = False
        if moved and departed is not None:
            return self.tuning.jobs[departed.choice.layout]
        if (other := self._without_what_failed(ended)) is not None:
            return other
        self._judge(ended)
        before = self.job.layout
        self._refit()
        if self.job.layout != before:
            self._over, self._departed = True, None
        elif departed is not None and str(before) == departed.source:
            # A fault came before the stop. A decision still holds; a trial will be decided again.
            if departed.choice.final:
                return self.tuning.jobs[departed.choice.layout]
            self._departed = None
        return self.job

    def _without_what_failed(self, ended: int) -> Job | None:
        """Drop a layout that does not run here and continue in another. None: the fault has another cause."""
        layout, trials = str(self.job.layout), self.trials
        if trials.decided is not None or self._over:
            return None
        failure, trial = self._cause(), trials.of[layout]
        unable = failure.kind in (ERROR, CRASHED) and not trial.steps
        if failure.final or not (unable or failure.kind == OUT_OF_MEMORY):
            return None
        other = trials.fall_back(layout)
        if other is None:
            return None  # the layout is not the cause
        why = str(failure).splitlines()[0]
        trials.fail(layout, why)
        self.logs.redact(self.run.logs)
        self.tuning.note(FAILED, step=self.run.step(), layout=layout, why=why)
        self.run.note_fault(
            kind=failure.kind,
            step=self._step_of(failure.rank),
            rank=failure.rank,
            action=f"{layout} is not tried again; going on in {other}",
            message=str(failure),
            attempt=ended,
        )
        self._departed = _Departure(layout, TuningChoice(other, f"{layout} failed", final=False))
        return self.tuning.jobs[other]
