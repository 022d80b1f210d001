"""Training on mixes, for epochs, with several validation sets: one run, however it is interrupted."""

import json
from itertools import count

import pytest
from rich.console import Console
from tests.conftest import Train

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch.local import tokenised, with_length
from shoal.plan.resolve import resolve
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.outcome import Outcome


def corpus_of(path, letter, documents=60):
    path.write_text(
        "".join(json.dumps({"text": letter * (5 + number % 9)}) + "\n" for number in range(documents))
    )
    return str(path)


@pytest.fixture
def parts(tmp_path):
    return [corpus_of(tmp_path / f"{letter}.jsonl", letter) for letter in "ab"]


def shares(training, step):
    """How many rows of a step are of letter a."""
    batch = training.loader.rows(step, range(training.loader.clock.at(step)))
    return sum(int((row == ord("a")).sum() > (row == ord("b")).sum()) for row in batch.tokens)


def mix(parts, first, then=""):
    return f'[{{source="{parts[0]}", weight={first}{then}}}, {{source="{parts[1]}", weight=1}}]'


def run(training: Training, stop_after: int | None = None) -> Outcome:
    asked = count()
    return training.run_to_end(lambda: next(asked) == stop_after)


def test_a_mix_trains_by_weight_and_continues_to_the_same_bits(training, parts):
    options = {
        "data__mix": mix(parts, 3, ", later=[{step=4, weight=0}]"),
        "recipe__seq": 8,
        "data__within_documents": True,
    }
    whole = training("whole", **options)
    assert [shares(whole, step) for step in range(1, 7)] == [6, 6, 6, 0, 0, 0]
    run(whole)
    stopped = training("stopped", checkpoint__every=100, **options)
    run(stopped, 3)
    continued = training("stopped", checkpoint__every=100, **options)
    assert continued.done == 3
    run(continued)
    one, other = (read_rows(made.run.metrics) for made in (whole, continued))
    assert [row["loss_hex"] for row in one] == [row["loss_hex"] for row in other]


def test_other_weights_are_another_run(training, parts):
    fingerprints = {
        training(name, data__mix=mix(parts, weight, then)).commits.identity["data (hash of its tokens)"]
        for name, weight, then in (("a", 1, ""), ("b", 2, ""), ("c", 2, ", later=[{step=4, weight=3}]"))
    }
    assert len(fingerprints) == 3


def test_weights_that_leave_nothing_are_refused(training, parts):
    nothing = f'[{{source="{parts[0]}", later=[{{step=3, weight=0}}]}}]'
    with pytest.raises(BadInput, match=r"every weight of data.mix is 0 from step 3 on"):
        training("run", data__mix=nothing)


def test_epochs_are_passes_over_the_samples(settings):
    for epochs in (1, 2.5):
        given = [one for one in settings(recipe__epochs=epochs) if not one.startswith("recipe.steps")]
        job = resolve(load(None, given).config)
        data = tokenised(job, Console(stderr=True))
        samples = (len(data.parts[0].train) - 1) // 32
        steps = with_length(job, data).config.recipe.steps
        assert (steps - 1) * 8 < epochs * samples <= steps * 8
    job = resolve(load(None, settings(recipe__steps=7, recipe__epochs=1)).config)
    with pytest.raises(BadInput, match=r"disagree: an epoch of this data has \d+ samples"):
        with_length(job, data)
    assert load(None, ["recipe.epochs=2"]).config.recipe.epochs == 2


def test_every_validation_set_has_its_own_curve_and_one_is_watched(training, parts, corpus):
    named = f'{{first="{parts[0]}", second="{parts[1]}"}}'
    both = training("both", evaluate__source=named, evaluate__every=2, evaluate__watch="second")
    run(both)
    rows = [row for row in read_rows(both.run.metrics) if "validation" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    for row in rows:
        assert set(row["validation"]) == {"heldout", "first", "second"}
        assert row["heldout_loss"] == row["validation"]["second"] != row["validation"]["first"]
    # Each alone is what it is beside the other, and training does not depend on it.
    alone = training("alone", evaluate__source=parts[0], evaluate__every=2)
    run(alone)
    others = [row for row in read_rows(alone.run.metrics) if "validation" in row]
    assert [row["heldout_loss"] for row in others] == [row["validation"]["first"] for row in rows]
    hexes = [[row["loss_hex"] for row in read_rows(made.run.metrics)] for made in (both, alone)]
    assert hexes[0] == hexes[1]


@pytest.mark.parametrize(
    ("set", "words"),
    [
        ('evaluate.source={heldout="a"}', "that name is taken"),
        ('evaluate.watch="other"', r'watch = .*other.* is no validation set: "heldout"'),
    ],
)
def test_what_is_watched_has_to_be_there(set, words):
    with pytest.raises(BadInput, match=words):
        load(None, [set])


def test_a_run_ends_when_the_loss_it_watches_falls_no_longer(training, parts, tmp_path):
    # It learns one letter, and is judged by another.
    options = {
        "data__source": parts[0],
        "data__heldout": 0,
        "evaluate__source": parts[1],
        "evaluate__every": 1,
        "evaluate__patience": 2,
        "recipe__seq": 8,
        "recipe__steps": 40,
        "recipe__lr": 0.05,
        "checkpoint__every": 100,
    }
    whole = training("whole", **options)
    outcome = run(whole)
    rows = read_rows(whole.run.metrics)
    losses = [row["heldout_loss"] for row in rows]
    assert not outcome.stopped and outcome.step == len(rows) < 40
    assert rows[-1]["ended_early"] and not any("ended_early" in row for row in rows[:-1])
    best = losses.index(min(losses))
    assert len(losses) == best + 3
    assert whole.run.ended_early(commits=True) == outcome.step == whole.run.step()
    # Interrupted in between, it remembers how long it has waited.
    stopped = training("stopped", **options)
    run(stopped, outcome.step - 1)
    assert stopped.run.ended_early(commits=True) is None
    continued = training("stopped", **options)
    assert run(continued) == outcome
    assert [row["heldout_loss"] for row in read_rows(continued.run.metrics)] == losses


def test_ranks_end_early_together_and_the_run_is_finished(train: Train, parts) -> None:
    options = {
        "data__source": parts[0],
        "data__heldout": 0,
        "evaluate__source": f'{{other="{parts[1]}", same="{parts[0]}"}}',
        "evaluate__every": 1,
        "evaluate__patience": 2,
        "recipe__seq": 8,
        "recipe__steps": 40,
        "recipe__lr": 0.05,
        "run__strict": True,
    }
    alone = train("alone", **options)
    together = train("together", layout="fsdp=2", **options)
    assert together.hexes == alone.hexes and len(alone.rows) < 40
    assert [row["validation"] for row in together.rows] == [row["validation"] for row in alone.rows]
    again = train("together", layout="fsdp=2", **options)
    assert again.report.message == f"already finished: {len(alone.rows)} steps"
    assert again.rows == together.rows


def test_a_chat_without_answers_is_refused_before_there_is_a_run(train: Train, tmp_path) -> None:
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n"
    )
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chat = {"data__source": tmp_path / "chat.jsonl", "data__format": "chat"}
    with pytest.raises(BadInput, match=r'"bytes" has no chat template'):
        train("run", **chat)
    with pytest.raises(BadInput, match=r"chat\.jsonl:1: no answer"):
        train("run", data__template=tmp_path / "chat.jinja", **chat)
    assert not (tmp_path / "run").exists()


def test_answers_alone_in_every_layout(train: Train, tmp_path) -> None:
    talks = [
        {"prompt": "what " * (1 + number % 3), "completion": "many fish " * (1 + number % 4)}
        for number in range(80)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    options = {
        "data__source": tmp_path / "pairs.jsonl",
        "data__format": "prompt",
        "data__template": "none",
        "data__within_documents": True,
        "recipe__precision": "fp64",
    }
    alone = train("alone", **options)
    assert all(0 < row["targets"] < 8 * 32 for row in alone.rows)
    for layout in ("tp=2", "cp=2", "pp=2,micro=2"):
        other = train(layout.partition("=")[0], layout=layout, **options)
        assert other.losses == pytest.approx(alone.losses, rel=1e-9), layout
