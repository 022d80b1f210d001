"""Which layout to train the next steps in: measured, worth a visit, or decided. Needs no torch.

Layouts drop out one by one: a layout is visited, or revisited, only if its expected saving over the remaining steps
exceeds the cost of the moves and of steps that may be slower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median

from shoal.launch.tuning.belief import Belief, chance_slower, expected_saving, measured

# The most layouts to try, including the run's first: the plan's best few.
MOST_LAYOUTS = 4
# Steps of a process that are not samples. The first creates optimizer states, compiles and loads kernels; the second
# may be observed.
WARM_UP = 2
# The least samples per visit; if steps are short, as many as take this many seconds, or the run's steps divided by
# this.
SAMPLES, SAMPLED_SECONDS, SHARE_OF_RUN = 4, 1.0, 20
# The least steps per visit.
VISIT = WARM_UP + SAMPLES
# A layout that three visits cannot tell from the fastest is as fast.
MOST_VISITS = 3
# The assumed cost of a move before the first one: workers end, new ones are forked and read a commit.
MOVE_SECONDS = 2.0


@dataclass
class Trial:
    """One layout: what was expected of it, and what was measured."""

    layout: str
    predicted: float  # seconds per step, by the plan or an earlier search
    error_bar: float  # of that, as a fraction
    planned: float = 0.0  # by the plan alone
    samples: list[float] = field(default_factory=list)
    warm_ups: list[list[float]] = field(default_factory=list)  # seconds of each visit's first steps
    steps: int = 0  # trained in this layout
    visits: int = 0
    failed: str = ""  # why it is not tried again

    @property
    def belief(self) -> Belief | None:
        return measured(self.samples, self.visits) if self.samples else None

    @property
    def slow_starts(self) -> list[float]:
        """For each visit, how many seconds longer its first steps took than the others."""
        usual = median(self.samples) if self.samples else 0.0
        return [sum(max(0.0, one - usual) for one in steps) for steps in self.warm_ups] if usual else []


@dataclass(frozen=True)
class LayoutMove:
    """A change of layout between two steps."""

    after: int  # the last step before it
    source: str
    target: str
    seconds: float  # from the end of one step to the start of the next


@dataclass(frozen=True)
class TuningChoice:
    """The layout to use next, and why."""

    layout: str
    why: str
    final: bool  # nothing else is worth trying


class Trials:
    """Everything known of the layouts, updated with the rows of a run's steps."""

    def __init__(self, trials: list[Trial], steps: int) -> None:
        """The first trial is the run's first layout. ``steps``: of the whole run."""
        self.of = {trial.layout: trial for trial in trials}
        self.first = trials[0]
        self.steps = steps
        self.step = 0  # the last completed step
        self.moves: list[LayoutMove] = []
        self.decided: TuningChoice | None = None
        self._current: Trial | None = None
        self._here = 0  # samples of the current visit
        self._starting = ""  # the attempt in which the current visit began
        self._rows: Counter[str] = Counter()

    @property
    def current(self) -> Trial:
        return self._current or self.first

    @property
    def measured(self) -> dict[str, Belief]:
        """Layouts that were tried and did not fail, in order."""
        every = {name: trial.belief for name, trial in self.of.items() if not trial.failed}
        return {name: belief for name, belief in every.items() if belief is not None}

    def add(self, step: int, layout: str, attempt: str, seconds: float, comparable: bool = True) -> None:
        """Add a completed step. ``attempt``: which start of the workers did it. Not ``comparable``: its batch
        differs.
        """
        trial = self.of.get(layout)
        self.step = max(self.step, step)
        if trial is None:  # a layout for the devices left after a fault
            return
        trial.steps += 1
        if trial is not self._current:
            self._current, self._here, self._starting = trial, 0, attempt
            trial.visits += 1
            trial.warm_ups.append([])
        self._rows[attempt] += 1
        if self._rows[attempt] <= WARM_UP:
            if attempt == self._starting:  # a restart after a fault is not part of a visit
                trial.warm_ups[-1].append(seconds)
        elif comparable and self.decided is None:
            trial.samples.append(seconds)
            self._here += 1

    def moved(self, move: LayoutMove) -> None:
        self.moves.append(move)

    def fail(self, layout: str, why: str) -> None:
        self.of[layout].failed = why

    @property
    def enough(self) -> bool:
        """Whether this visit has enough samples."""
        if self._here < SAMPLES:
            return False
        most = max(SAMPLES, self.steps // SHARE_OF_RUN)
        return self._here >= most or sum(self.current.samples[-self._here :]) >= SAMPLED_SECONDS

    @property
    def move_seconds(self) -> float:
        """The expected cost of a move, slow first steps included, which the first layout had as well."""
        taken = [move.seconds for move in self.moves]
        starts = [seconds for trial in self.of.values() for seconds in trial.slow_starts]
        return (median(taken) if taken else MOVE_SECONDS) + (median(starts) if starts else 0.0)

    def believed(self, trial: Trial) -> Belief:
        """A belief about an untried layout: its prediction, corrected by the typical error of those tried."""
        if (known := trial.belief) is not None:
            return known
        ratios = [belief.seconds / self.of[name].predicted for name, belief in self.measured.items()]
        seconds = trial.predicted * (median(ratios) if ratios else 1.0)
        return Belief(seconds, seconds * trial.error_bar)

    def net_saving(self, trial: Trial) -> float:
        """Seconds that a visit to this layout is expected to save over the run, minus its expected cost."""
        best, other = self._best(), self.believed(trial)
        belief = self.measured[best]
        saving = expected_saving(belief, other)
        slower = chance_slower(belief, other)
        # From any layout but the best, a move is due anyway.
        moves = slower + (best == self.current.layout)
        lost = saving + other.seconds - belief.seconds  # per step of the visit, where it is slower
        left = max(0, self.steps - self.step - VISIT)
        return saving * left - moves * self.move_seconds - VISIT * lost

    def _best(self) -> str:
        known = self.measured
        return min(known, key=lambda name: known[name].seconds)

    def next(self) -> TuningChoice | None:
        """Where to go now that the current layout is known well enough; None: stay for another step."""
        if self.decided is not None or not self.enough:
            return None
        best = self._best()
        worth = {
            name: self.net_saving(trial)
            for name, trial in self.of.items()
            if name not in (best, self.current.layout) and not trial.failed and trial.visits < MOST_VISITS
        }
        most = max(worth, key=lambda name: worth[name], default=None)
        if most is not None and worth[most] > 0:
            return TuningChoice(most, f"expected to save {worth[most]:.1f} s of the run", final=False)
        return self._decide()

    def fall_back(self, layout: str) -> str | None:
        """The layout to use after one that does not run: the fastest measured one, otherwise the fastest predicted."""
        left = [trial for trial in self.of.values() if not trial.failed and trial.layout != layout]
        known = [trial for trial in left if trial.samples]
        return min(known or left, key=lambda trial: self.believed(trial).seconds).layout if left else None

    def _decide(self) -> TuningChoice:
        best, here = self._best(), self.current.layout
        seconds, left = self.measured, self.steps - self.step
        untried = [trial for trial in self.of.values() if not trial.samples and not trial.failed]
        rest = f"; {_count(len(untried), 'other')} would cost more than expected to save" if untried else ""
        saved = (seconds[here].seconds - seconds[best].seconds) * left
        if best != here and saved <= self.move_seconds:
            why = f"a move to {best} costs about {self.move_seconds:.1f} s and would save {saved:.1f}"
            return TuningChoice(here, why, final=True)
        return TuningChoice(best, f"the fastest of {_count(len(seconds), 'layout')} tried{rest}", final=True)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
