"""What the live page gets on each request: plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shoal.report.events import events
from shoal.report.numbers import count, duration, percent, size
from shoal.report.run import curves
from shoal.report.run.curves import Drawn
from shoal.report.run.summary import summary
from shoal.report.watch.follow import RunFollower, happened, seconds_left, stragglers


def snapshot(follower: RunFollower) -> dict[str, Any]:
    """The run's current state; contains no markup."""
    run = follower.look()
    told = events(run)
    found = summary(run, told)
    drawn = Drawn(run, told)
    _, training = curves.training([drawn])
    _, throughput = curves.throughput([drawn])
    rows, left = run.metrics, seconds_left(run)
    numbers = [
        ("Step", f"{run.last_step:,}", f"of {run.steps:,}" if run.steps is not None else ""),
        ("Loss", _four(found.loss), f"nats/{found.mean_over}"),
        (
            "Validation loss",
            _four(found.heldout_loss),
            "" if found.best_step is None else f"lowest at {found.best_step:,}",
        ),
        ("Tokens/s", count(rows.last("tokens_per_s")), f"MFU {percent(rows.last('mfu'))}"),
        ("s/step", duration(rows.last("step_s")), f"predicted {duration(found.predicted_step_s)}"),
        ("Peak memory", size(rows.last("memory_peak")), "first rank"),
        ("Learning rate", _few(rows.last("lr")), f"gradient norm {_few(rows.last('grad_norm'))}"),
        (
            "Time left",
            duration(left) if left is not None else "–",
            f"{duration(found.training_s)} of steps so far",
        ),
    ]
    return {
        "name": found.name,
        "state": found.state,
        "model": found.model,
        "layout": found.layout,
        "world": found.world,
        "numbers": [{"name": name, "value": value, "note": note} for name, value, note in numbers],
        "charts": {**training, **throughput},
        "ranks": [asdict(one) for one in follower.ranks()],
        "stragglers": stragglers(run),
        "events": [
            {"step": one.step, "kind": one.kind, "what": one.what, "text": one.text, "when": one.when}
            for one in happened(run)
        ],
        "notes": run.notes,
        "summary": found.as_json(),
    }


def _four(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _few(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
