"""A batch that grows: samples are its clock, in any layout and over any interruption."""

from itertools import count

import pytest
from tests.conftest import Train

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.plan.resolve import resolve
from shoal.train.files import read_rows

RAMP = "[{batch=2, samples=5}, {batch=4, samples=14}]"
BATCHES = [2, 2, 2, 4, 4, 8]


def run(training, stop_after=None):
    asked = count()
    return training.run_to_end(lambda: next(asked) == stop_after)


@pytest.mark.parametrize("micro", ["", ",micro=1"])
def test_every_sample_is_used_once_and_a_resume_keeps_the_clock(training, micro):
    options = {"recipe__batch_ramp": RAMP, "layout": f"dp=1{micro}", "run__ledger": True}
    whole = training("whole", **options)
    used = [sample for step in range(1, 7) for sample in whole.loader.used(step)]
    plain = training("plain", run__ledger=True)
    assert used == [sample for step in range(1, 7) for sample in plain.loader.used(step)][: len(used)]
    run(whole)
    rows = read_rows(whole.run.metrics)
    assert [row["samples"] for row in rows] == [sum(BATCHES[: step + 1]) for step in range(6)]
    assert [row["tokens"] for row in rows] == [row["samples"] * 32 for row in rows]
    assert [row["targets"] for row in rows] == [batch * 32 for batch in BATCHES]
    for stop in (1, 3, 4):
        run(training(f"stop-{stop}", checkpoint__every=100, **options), stop)
        continued = training(f"stop-{stop}", checkpoint__every=100, **options)
        assert continued.done == stop
        run(continued)
        assert [row["loss_hex"] for row in read_rows(continued.run.metrics)] == [
            row["loss_hex"] for row in rows
        ]


def test_another_layout_keeps_the_clock_in_the_middle_of_the_ramp(train: Train) -> None:
    options = {"recipe__batch_ramp": RAMP, "recipe__precision": "fp64", "run__strict": True}
    alone = train("alone", layout="dp=1", **options)
    together = train("together", layout="fsdp=2", **options)
    assert alone.hexes == together.hexes and alone.tensors() == together.tensors()
    piped = train("piped", layout="pp=2", **options)
    assert piped.hexes == alone.hexes


def test_ramps_that_cannot_be(settings):
    for ramp in (
        "[{batch=16, samples=5}]",
        "[{batch=4, samples=9}, {batch=2, samples=20}]",
        "[{batch=8, samples=5}]",
    ):
        with pytest.raises(BadInput, match="must grow from stage to stage"):
            load(None, settings(recipe__batch_ramp=ramp))
    with pytest.raises(BadInput, match=r"recipe.batch_ramp: batch=2 does not divide by dp·fsdp = 4"):
        resolve(load(None, settings(recipe__batch_ramp=RAMP, cluster__on="4xcpu"), "dp=4").config)
    chosen = resolve(load(None, settings(recipe__batch_ramp=RAMP, cluster__on="4xcpu")).config).layout
    assert 2 % chosen.data_ranks == 0


def test_tokens_of_a_ramp_are_counted_in_samples():
    given = ["recipe.seq=10", "recipe.batch=8", f"recipe.batch_ramp={RAMP}"]
    assert load(None, [*given, "recipe.tokens=220"]).config.recipe.steps == 6
    assert load(None, [*given, "recipe.tokens=221"]).config.recipe.steps == 7
