"""The cost and gain of a search for the fastest layout, in seconds. Needs no torch.

Both are relative to a run that keeps its first layout.
"""

from __future__ import annotations

from typing import Any

from shoal.launch.tuning.trials import Trial, Trials


def account(trials: Trials) -> dict[str, Any]:
    """As JSON: the layouts, the moves, the choice, cost and gain so far, and what is still expected."""
    known, here = trials.measured, trials.current.layout
    chosen = trials.decided.layout if trials.decided else here
    base = known[trials.first.layout].seconds if trials.first.layout in known else None
    gaps = {name: base - belief.seconds for name, belief in known.items()} if base is not None else {}
    spent = {name: gap * trials.of[name].steps for name, gap in gaps.items()}
    slow = sum(seconds for trial in trials.of.values() for seconds in _after_moves(trial, trials))
    cost = {
        "moves_s": sum(move.seconds for move in trials.moves),
        "warm_up_s": slow,
        "slower_steps_s": -sum(min(0.0, seconds) for seconds in spent.values()),
    }
    gain = {
        "saved_s": sum(max(0.0, seconds) for seconds in spent.values()),
        "expected_s": gaps.get(chosen, 0.0) * (trials.steps - trials.step),
    }
    return {
        "step": trials.step,
        "steps": trials.steps,
        "first": trials.first.layout,
        "chosen": chosen if trials.decided else None,
        "why": trials.decided.why if trials.decided else "the run has ended before there was a decision",
        "layouts": [_row(trial) for trial in trials.of.values()],
        "moves": [
            {"after_step": one.after, "from": one.source, "to": one.target, "seconds": one.seconds}
            for one in trials.moves
        ],
        "cost": cost,
        "gain": gain,
        "net_s": sum(gain.values()) - sum(cost.values()),
    }


def _after_moves(trial: Trial, trials: Trials) -> list[float]:
    """Slow starts caused by moves. The very first visit's does not count: a run without a search has it too."""
    return trial.slow_starts[1:] if trial is trials.first else trial.slow_starts


def _row(trial: Trial) -> dict[str, Any]:
    belief = trial.belief
    return {
        "layout": trial.layout,
        "planned_step_s": trial.planned,
        "predicted_step_s": trial.predicted,
        "error_bar": trial.error_bar,
        "measured_step_s": belief.seconds if belief else None,
        "spread_s": belief.spread if belief else None,
        "samples": len(trial.samples),
        "steps": trial.steps,
        "visits": trial.visits,
        "failed": trial.failed or None,
    }
