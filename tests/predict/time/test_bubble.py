"""Idle time of pipelines: formulas against schedules that are played through."""

from __future__ import annotations

import pytest

from shoal.facts.layout import SCHEDULES
from shoal.predict.time.bubble import follows, full, idle, played

CHUNKS = {"interleaved": (2, 4), "zb": (1, 2), "zbv": (2,), "dualpipev": (2,)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_formulas_are_what_playing_gives(schedule: str, pp: int) -> None:
    for chunks in CHUNKS.get(schedule, (1,)):
        for micro_batches in (1, pp - 1, pp, pp + 1, 2 * pp, 2 * pp + 1, 3 * pp):
            if micro_batches and follows(schedule, pp, chunks, micro_batches):
                formula, seen = (how(schedule, pp, chunks, micro_batches) for how in (full, played))
                assert formula.work == pytest.approx(seen.work), micro_batches
                # A pipeline that is just full may wait for two messages fewer.
                assert formula.messages == pytest.approx(seen.messages, abs=2.1), micro_batches


def test_a_pipeline_that_never_fills_idles_more() -> None:
    for schedule in ("interleaved", "zb", "zbv"):
        chunks = CHUNKS[schedule][-1]
        assert idle(schedule, 4, chunks, 2).work > idle(schedule, 4, chunks, 8).work


def test_deep_pipelines_that_never_fill_are_played_at_a_smaller_depth() -> None:
    deep, true = idle("zbv", 8, 2, 8), played("zbv", 8, 2, 8)
    assert deep.work == pytest.approx(true.work, rel=0.35)


def test_one_rank_never_idles() -> None:
    assert idle("1f1b", 1, 1, 4) == (0.0, 0.0)


def test_one_forward_one_backward_idles_as_gpipe_does() -> None:
    assert idle("1f1b", 4, 1, 16).work == idle("gpipe", 4, 1, 16).work == 3
