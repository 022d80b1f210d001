"""``tuning.jsonl``: the history of a search for the fastest layout, so that a stopped run continues it. Needs no torch.

Step times are in ``metrics.jsonl``, once; this file has the layouts, the moves between them and the decision.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput
from shoal.launch.tuning.account import account
from shoal.launch.tuning.candidates import Tried, candidates, in_layout
from shoal.launch.tuning.expected import expected
from shoal.launch.tuning.trials import LayoutMove, Trial, Trials, TuningChoice
from shoal.plan.resolve import Job
from shoal.train.files import RowFile, read_rows, replace_text
from shoal.train.run_directory import RunDirectory

# Kinds of rows. A new "begin" voids all rows before it.
BEGIN, MOVE, MOVED, MEASURED, FAILED, DECIDED = "begin", "move", "moved", "measured", "failed", "decided"


def layouts_to_try(
    job: Job, run: RunDirectory | None, tried: Tried, check: Callable[[Job], None]
) -> tuple[list[Job], str]:
    """Like ``candidates``. A run that has begun a search continues with its layouts, unless others are named now."""
    begun = _begun(read_rows(run.tuning)) if run is not None and run.begun else []
    if begun:
        before = [_same(job, row["layout"], check) for row in begun[0]["layouts"]]
        jobs = [one for one in before if one is not None]
        named = [_same(job, str(layout), check) for layout in tried.named]
        known = {one.layout for one in jobs}
        if len(jobs) == len(before) and all(one is not None and one.layout in known for one in named):
            return jobs, ""
    return candidates(job, tried, check)


def _same(job: Job, layout: str, check: Callable[[Job], None]) -> Job | None:
    """The job in a layout; None if it can no longer be trained in it."""
    try:
        return in_layout(job, Layout.parse(layout), check, [])
    except BadInput:
        return None


def _begun(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows from the last "begin" on."""
    places = [place for place, row in enumerate(rows) if row.get("kind") == BEGIN]
    return rows[places[-1] :] if places else []


def last_decision(run: RunDirectory) -> dict[str, Any] | None:
    """The result of the last search, as decided then; None if there was none."""
    found = [row for row in _begun(read_rows(run.tuning)) if row["kind"] == DECIDED]
    return (
        {key: value for key, value in found[-1].items() if key not in ("time", "kind", "layout")}
        if found
        else None
    )


class Tuning:
    """A run's search: its layouts as jobs, what is known of them, and the file that records it."""

    def __init__(self, run: RunDirectory, jobs: Sequence[Job], why_alone: str = "") -> None:
        """Continues the search that the run has begun, if it was among the same layouts.

        ``jobs``: the run in each layout, its first layout first. ``why_alone``: why there is only one.
        """
        self.run = run
        self.jobs = {str(job.layout): job for job in jobs}
        self.recipe = jobs[0].config.recipe
        every = read_rows(run.tuning)
        replace_text(run.tuning, "".join(json.dumps(row) + "\n" for row in every))  # without a torn line
        self._file = RowFile(run.tuning)
        self.rows = _begun(every)
        done = run.step()
        begun: dict[str, Any] = self.rows[0] if self.rows else {"layouts": [], "step": 0}
        if [row["layout"] for row in begun["layouts"]] == [*self.jobs] and begun["step"] <= done:
            self.start = int(begun["step"])
            named = ("layout", "predicted_step_s", "error_bar", "planned_step_s")
            rows = [Trial(*(row[name] for name in named)) for row in begun["layouts"]]
            self.trials = Trials(rows, self.recipe.steps)
            self._replay(done)
            return
        self.start, self.rows = done, []
        found = expected(jobs)
        self.trials = Trials(found, self.recipe.steps)
        self.trials.step = done
        told = [
            {
                "layout": one.layout,
                "predicted_step_s": one.predicted,
                "error_bar": one.error_bar,
                "planned_step_s": one.planned,
            }
            for one in found
        ]
        self.note(BEGIN, step=done, layouts=told)
        if why_alone:
            self.decide(TuningChoice(found[0].layout, why_alone, final=True))

    def _replay(self, done: int) -> None:
        """Rebuild what is known, from the step rows that a resume keeps and from the recorded history."""
        trials = self.trials
        trials.step = self.start
        for row in read_rows(self.run.metrics):
            if self.start < row["step"] <= done:
                self.add(row)
        for row in self.rows:
            if row["kind"] == MOVED:
                trials.moved(LayoutMove(row["step"], row["from"], row["to"], row["seconds"]))
            elif row["kind"] == FAILED:
                trials.fail(row["layout"], row["why"])
            elif row["kind"] == DECIDED:
                trials.decided = TuningChoice(row["layout"], row["why"], final=True)

    @property
    def job(self) -> Job:
        """The job in the layout that the run continues in."""
        trials = self.trials
        if trials.decided is not None:
            return self.jobs[trials.decided.layout]
        asked = [row["to"] for row in self.rows if row["kind"] == MOVE]
        layout = asked[-1] if asked else trials.current.layout
        if trials.of[layout].failed:
            layout = trials.fall_back(layout) or layout
        return self.jobs[layout]

    def add(self, row: dict[str, Any]) -> None:
        """Take in a row of ``metrics.jsonl``. A ramp's smaller batches take less time, and are not compared."""
        whole = self.recipe.clock.at(row["step"]) == self.recipe.batch
        self.trials.add(row["step"], row["layout"], str(row.get("attempt")), row["step_s"], whole)

    def decide(self, choice: TuningChoice) -> None:
        """Record the search's result."""
        self.trials.decided = choice
        self.note(DECIDED, layout=choice.layout, **account(self.trials))

    def note(self, kind: str, **row: Any) -> None:
        found = {"time": time.time(), "kind": kind, **row}
        self.rows.append(found)
        self._file.append(found)
