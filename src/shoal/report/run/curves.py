"""Curves over the steps of one or several runs, with events marked on them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.facts.losses import LOSSES
from shoal.report.columns import medians, rounded, thinned
from shoal.report.events import RunEvent, marks
from shoal.report.markup import Markup, chart, figure, grid
from shoal.report.run.summary import counted
from shoal.report.run_files import RunFiles

# Pixels per curve; several runs share them.
PIXELS, FEWEST = 800, 160
COLOURS = 8

Chart = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """A run with its events, and how its series are named and coloured: by its index if there are several runs."""

    run: RunFiles
    events: list[RunEvent]
    number: int = 0
    of: int = 1

    @property
    def alone(self) -> bool:
        return self.of == 1

    def label(self, words: str) -> str:
        return words if self.alone else f"{self.run.name}: {words}"

    def colour(self, usual: int) -> int:
        return usual if self.alone else self.number % COLOURS + 1

    def kept(self, column: Sequence[float | None]) -> list[int]:
        """Indices of rows to draw; always includes those at an event."""
        steps = self.run.metrics.steps
        near = (bisect_right(steps, event.step) - 1 for event in self.events[:400])
        return thinned(column, self._pixels, (place + by for place in near for by in (0, 1)))

    @property
    def _pixels(self) -> int:
        return max(FEWEST, PIXELS // self.of)

    def series(
        self, column: Sequence[float | None], words: str, colour: int, **style: bool
    ) -> list[dict[str, Any]]:
        """Series to draw; empty if no row has a value. A long curve shows the median of every pixel and, pale behind
        it, the minimum and maximum; each is a real row. ``exact``: draw a series without scatter as it is.
        """
        places = self.kept(column)
        if not places:
            return []
        if style.pop("exact", False) or style.get("points") or len(column) <= 2 * self._pixels:
            return [self._drawn(column, places, self.label(words), colour, **style)]
        middle = medians(column, self._pixels // 2)
        return [
            self._drawn(column, places, self.label(f"{words}, lowest and highest"), colour, faint=True),
            self._drawn(column, middle, self.label(words), colour, **style),
        ]

    def _drawn(
        self, column: Sequence[float | None], places: list[int], name: str, colour: int, **style: bool
    ) -> dict[str, Any]:
        rows = self.run.metrics
        tokens, hours = rows.column("tokens"), rows.hours()
        return {
            "name": name,
            "colour": self.colour(colour),
            "x": {
                "step": [rows.steps[place] for place in places],
                "tokens": [tokens[place] for place in places],
                "hours": [rounded(hours[place]) for place in places],
            },
            "y": [rounded(column[place]) for place in places],
            **style,
        }

    def field(self, name: str, words: str, colour: int, **style: bool) -> list[dict[str, Any]]:
        return self.series(self.run.metrics.column(name), words, colour, **style)


def made(runs: Sequence[Drawn], series: Iterable[list[dict[str, Any]]], **more: Any) -> Chart | None:
    """A chart of all series that exist, with the runs' events; None if there are none."""
    found = [one for several in series for one in several]
    if not found:
        return None
    told = [mark for drawn in runs for mark in marks(drawn.run, drawn.events, 400 // len(runs))]
    return {"series": found, "marks": told, **more}


def training(runs: Sequence[Drawn]) -> tuple[Markup, dict[str, Chart]]:
    """Loss and validation, learning rate, gradient norm, and whatever else this kind of training reports."""
    charts: dict[str, Chart | None] = {
        "loss": made(runs, (one for drawn in runs for one in _losses(drawn))),
        "lr": made(runs, (drawn.field("lr", "learning rate", 3, exact=True) for drawn in runs)),
        "grad_norm": made(runs, (drawn.field("grad_norm", "gradient norm", 5) for drawn in runs)),
    }
    words = {
        "loss": (
            "Loss",
            "metrics.jsonl: loss, heldout_loss, validation",
            f"Nats per {counted(runs[0].run.metrics)}.",
        ),
        "lr": ("Learning rate", "metrics.jsonl: lr", ""),
        "grad_norm": ("Gradient norm", "metrics.jsonl: grad_norm", "Before clipping."),
    }
    for name in (name for one in LOSSES.values() for name in one.measures):
        pair = (
            one
            for drawn in runs
            for one in (
                drawn.field(name, "training", 1),
                drawn.field(f"heldout_{name}", "validation", 4, points=True),
            )
        )
        charts[name] = made(runs, pair)
        words[name] = (name.replace("_", " ").capitalize(), f"metrics.jsonl: {name}, heldout_{name}", "")
    return _figures(charts, words, wide=("loss",))


def _losses(drawn: Drawn) -> Iterable[list[dict[str, Any]]]:
    rows = drawn.run.metrics
    yield drawn.field("loss", "training loss", 1)
    sets = {name: found for name, found in rows.validation.items() if found}
    if len(sets) > 1:
        for number, (name, found) in enumerate(sorted(sets.items())[:COLOURS]):
            column: list[float | None] = [None] * len(rows)
            for place, value in found:
                column[place] = value
            yield drawn.series(column, f"validation: {name}", (4, 2, 3, 5, 7, 8, 6, 1)[number], points=True)
    else:
        yield drawn.field("heldout_loss", "validation loss", 4, points=True, dash=not drawn.alone)


def throughput(runs: Sequence[Drawn]) -> tuple[Markup, dict[str, Chart]]:
    charts = {
        "tokens_per_s": made(
            runs,
            (one for drawn in runs for one in _rates(drawn)),
            format="count",
            zero=True,
        ),
        "mfu": made(runs, (drawn.field("mfu", "MFU", 2) for drawn in runs), format="percent", zero=True),
    }
    of = {str(drawn.run.manifest.get("mfu", "")) for drawn in runs}
    peak = of.pop().removeprefix("of ")[:240] if len(of) == 1 else ""
    told = f"Peak FLOP/s: {peak[:1].lower()}{peak[1:]}" if peak else ""
    words = {
        "tokens_per_s": (
            "Tokens per second",
            "metrics.jsonl: tokens_per_s, predicted_step_s",
            "All ranks together.",
        ),
        "mfu": ("Model FLOPs utilisation (MFU)", "metrics.jsonl: mfu", told),
    }
    return _figures(charts, words)


def _rates(drawn: Drawn) -> Iterable[list[dict[str, Any]]]:
    rows = drawn.run.metrics
    yield drawn.field("tokens_per_s", "tokens/s", 1)
    if not drawn.alone:
        return
    each = zip(*(rows.column(name) for name in ("tokens_per_s", "step_s", "predicted_step_s")), strict=True)
    predicted = [rate * took / said if rate and took and said else None for rate, took, said in each]
    yield drawn.series(predicted, "predicted", 6, dash=True, exact=True)


def _figures(
    charts: dict[str, Chart | None], words: dict[str, tuple[str, str, str]], wide: Sequence[str] = ()
) -> tuple[Markup, dict[str, Chart]]:
    found = {name: one for name, one in charts.items() if one is not None}
    return grid(
        *(
            figure(
                chart(name, words[name][0]), words[name][0], [words[name][1]], words[name][2], name in wide
            )
            for name in found
        )
    ), found
