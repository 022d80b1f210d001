"""DPO: loss, gradients and steps are those that anybody would write with ``transformers``; it resumes to the bit."""

import copy
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Train
from tests.models.test_against_transformers import widened
from tests.train.huggingface.models import save_random
from torch import Tensor, nn

from shoal.facts.problem import BadInput
from shoal.facts.targets import IGNORE
from shoal.parallel.shards import gradient
from shoal.train import reference as references
from shoal.train.data.samples import PairSamples
from shoal.train.files import read_rows
from shoal.train.loop import Training
from shoal.train.optimizer import learning_rate

MakeTraining = Callable[..., Training]
STEPS, BATCH = 5, 8
ANSWERS = ("the reef", "far below", "in the bright water", "no", "a shoal")
ROWS = [
    {
        "prompt": f"Where is fish {number}?",
        "chosen": f" {ANSWERS[number % 5]}",
        "rejected": f" {ANSWERS[(number + 1 + number % 3) % 5]} {'?' * (number % 2)}",
    }
    for number in range(24)
]
OPTIONS: dict[str, Any] = {
    "recipe__loss": "dpo",
    "recipe__beta": 0.3,
    "recipe__label_smoothing": 0.1,
    "recipe__precision": "fp64",
    "recipe__seq": 48,
    "recipe__batch": BATCH,
    "recipe__steps": STEPS,
    "recipe__lr": 1e-3,
    "data__format": "preference",
    "data__template": "none",
    "data__heldout": 0.2,
    "evaluate__samples": 0,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def answer(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of each row, the log-probability of its targets."""
    scores = model(tokens).logits.log_softmax(-1)
    found = scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets != IGNORE, found, 0).sum(-1)


def by_hand(model: nn.Module, first: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's loss with label smoothing, a mean over pairs; and the margins."""
    with torch.no_grad():
        before = answer(first, tokens, targets)
    gained = answer(model, tokens, targets) - before
    margins = 0.3 * (gained[0::2] - gained[1::2])
    loss = -0.9 * torch.log(torch.sigmoid(margins)) - 0.1 * torch.log(torch.sigmoid(-margins))
    return loss.mean(), margins.detach()


def test_loss_gradients_and_five_steps_are_those_of_a_plain_loop(
    training: MakeTraining, source: Path, tmp_path: Path
) -> None:
    model = save_random("llama", tmp_path / "model").double().train()
    weights = tmp_path / "model"
    made = training(
        "run", "micro=2", model__path=weights, model__init_from=weights, data__source=source, **OPTIONS
    )
    recipe, step, shape = made.job.config.recipe, made.step, made.job.model
    first = copy.deepcopy(model).eval()
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
    )
    for number in range(1, STEPS + 1):
        whole = made.loader.rows(number, range(BATCH))
        assert whole.count == BATCH // 2
        with widened(model, shape), widened(first, shape):
            loss, margins = by_hand(model, first, whole.tokens, whole.targets)
            optimizer.zero_grad()
            loss.backward()
        batches = [made.loader.rows(number, places) for places in made.program.positions(number)]
        assert len(batches) == BATCH // 2
        measured = step.compute_gradients(number, batches, BATCH // 2)
        if number == 1:
            theirs = dict(model.named_parameters())
            for piece in made.program.pieces:
                expected = theirs[piece.name].grad
                assert expected is not None and expected.abs().max() > 1e-6
                found = gradient(piece).view_as(expected)
                assert (found - expected).abs().max() <= 1e-10 * max(1.0, float(expected.abs().max())), (
                    piece.name
                )
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, number)
        optimizer.step()
        result = step.update(number, measured)
        assert result.loss == pytest.approx(loss.item(), abs=1e-10)
        assert result.measures["reward_margin"] == pytest.approx(float(margins.mean()), abs=1e-10)
        assert result.measures["reward_accuracy"] == float((margins > 0).double().mean())
    trained = {piece.name: piece.tensor.detach() for piece in made.program.pieces}
    assert result.measures["reward_margin"] > 0  # it learns what is preferred
    for name, parameter in model.named_parameters():
        assert (trained[name].view_as(parameter) - parameter).abs().max() < 1e-9, name


def test_the_first_loss_is_that_of_a_coin(training: MakeTraining, source: Path) -> None:
    made = training(data__source=source, **OPTIONS, recipe__dropout=0.0)
    made.run_to_end(lambda: False)
    rows = read_rows(made.run.metrics)
    assert rows[0]["loss"] == pytest.approx(0.6931471805599453, abs=1e-12)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-12)
    assert rows[0]["targets"] == BATCH // 2
    assert {"heldout_loss", "heldout_reward_margin", "heldout_reward_accuracy"} <= rows[-1].keys()
    assert 0 <= rows[-1]["heldout_reward_accuracy"] <= 1


def test_a_stopped_run_continues_to_the_same_bits(training: MakeTraining, source: Path) -> None:
    options = OPTIONS | {"recipe__precision": "fp32", "data__source": source, "checkpoint__every": 100}
    whole = training("whole", **options)
    whole.run_to_end(lambda: False)
    stopped, asked = training("stopped", **options), count()
    stopped.run_to_end(lambda: next(asked) == 2)
    continued = training("stopped", **options)
    assert continued.done == 2
    continued.run_to_end(lambda: False)
    one, other = (read_rows(made.run.metrics) for made in (whole, continued))
    assert [row["loss_hex"] for row in one] == [row["loss_hex"] for row in other]
    for mine, theirs in zip(whole.program.pieces, continued.program.pieces, strict=True):
        assert torch.equal(mine.tensor, theirs.tensor)


def test_the_reference_is_computed_once_and_kept(
    training: MakeTraining, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    real = references.Reference.compute

    def compute(self: references.Reference, *arguments: Any) -> None:
        computed.append(self.missing)
        real(self, *arguments)

    monkeypatch.setattr(references.Reference, "compute", compute)
    options = OPTIONS | {"data__source": source}
    made = training("one", **options)
    (train, held) = made.loader.samples, made.loader.heldout
    assert isinstance(train, PairSamples) and isinstance(held, PairSamples)
    assert computed == [len(train) + BATCH]  # of what is held out, what one evaluation reads
    assert len(held) > BATCH
    # Other runs of the same weights on the same data find it, whatever else they do otherwise.
    training("two", **options | {"recipe__beta": 0.5, "recipe__lr": 1e-4})
    assert len(computed) == 1
    # Other weights have another.
    training("three", **options, recipe__seed=1)
    assert len(computed) == 2
    # A run has its own: without the cache it needs no other. What is damaged is computed again, to the same numbers.
    kept = sorted((tmp_path / "one" / references.FOLDER).glob("*.bin"))
    for path in (tmp_path / "cache" / references.FOLDER).iterdir():
        path.unlink()
    training("one", **options)
    assert len(computed) == 2
    damaged = kept[0].read_bytes()
    for path in (*kept, *(tmp_path / "cache" / references.FOLDER).glob("*")):
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    again = training("one", **options).loader.samples
    assert len(computed) == 3
    assert isinstance(again, PairSamples) and (again.reference == train.reference).all()
    assert kept[0].read_bytes() == damaged


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe__loss": "next_token"}, 'recipe.loss = "next_token" with data.format = "preference"'),
        ({"data__format": "prompt"}, 'recipe.loss = "dpo" with data.format = "prompt"'),
        ({"data__template": "auto"}, 'the tokenizer "bytes" has no chat template'),
        ({"data__loss_on": "all"}, "what is compared is the answers"),
        ({"data__packing": True}, "an answer has a row of its own"),
        ({"recipe__seq": 16}, "pairs are longer than recipe.seq = 16"),
        ({"recipe__batch": 7}, "batch=7 does not divide by dp·fsdp·2"),
        ({"layout": "micro=1"}, "micro=1 parts sequences that the loss compares"),
        ({"recipe__z_loss": 1e-4}, 'recipe.z_loss with recipe.loss = "dpo"'),
        ({"server__servers": 1}, 'server.servers with recipe.loss = "dpo"'),
    ],
)
def test_what_does_not_go_with_it_is_said_in_one_line(
    train: Train, source: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    layout = changes.pop("layout", "dp=1")
    with pytest.raises(BadInput) as refused:
        train("run", layout, **OPTIONS | {"data__source": source} | changes)
    problem, *nearest = refused.value.problems
    assert all("is not legal here" in one.what for one in nearest)
    assert said in problem.what and problem.fix and "\n" not in problem.what
    assert not (tmp_path / "run").exists()


BAD = [
    ({"prompt": "a", "chosen": "b"}, "no 'rejected'"),
    ({"prompt": "a", "chosen": " b", "rejected": " b"}, "chosen and rejected are the same"),
    ({"prompt": "a", "chosen": "b", "rejected": " "}, "'rejected': no answer"),
    ({"chosen": "b", "rejected": "c"}, "'chosen' is a text, and there is no prompt"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_rows_are_said_with_their_line(
    train: Train, source: Path, tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    source.write_text(source.read_text() + json.dumps(row) + "\n")
    with pytest.raises(BadInput) as refused:
        train("run", **OPTIONS | {"data__source": source, "data__max_bad_rows": 0})
    (problem,) = refused.value.problems
    assert f"pairs.jsonl:{len(ROWS) + 1}: {reason}" in problem.what and "chosen" in problem.fix
    assert not (tmp_path / "run").exists()


def test_a_run_is_compared_with_the_weights_it_began_with(
    training: MakeTraining, source: Path, tmp_path: Path
) -> None:
    """Those of another run, which went on meanwhile: what is kept serves, and more of it is refused."""
    first = training("first", recipe__steps=2, checkpoint__every=2)
    first.run_to_end(lambda: False)
    origin = first.run.path
    options = OPTIONS | {"data__source": source, "model__init_from": origin}
    options |= {"recipe__steps": 2, "recipe__batch": 4, "evaluate__batches": 0}
    training("run", **options)
    other = training("first", recipe__steps=4, checkpoint__every=2)
    other.run_to_end(lambda: False)
    assert other.done == 4
    training("run", **options)
    with pytest.raises(BadInput, match="other weights than when the run began"):
        training("run", **options | {"recipe__steps": 5})
    # A new run compares with what they are now.
    training("later", **options)


def test_data_that_was_prepared_for_another_loss(train: Train, training: MakeTraining, source: Path) -> None:
    made = training("pairs", data__source=source, **OPTIONS)
    with pytest.raises(
        BadInput, match=r"pairs of a chosen and a rejected answer, which recipe.loss = .next_token"
    ):
        train("other", data__source=_directory(made))


def _directory(made: Training) -> Path:
    (found,) = (Path(made.job.config.data.cache).expanduser() / "data").iterdir()
    return found


def test_ranks_train_as_one_process(train: Train, source: Path) -> None:
    """Launcher, workers and pipeline: the reference is summed over ranks of which only some have the end."""
    options = OPTIONS | {
        "data__source": source,
        "cluster__on": "4xcpu",
        "fault__timeout": 120,
        "recipe__steps": 3,
    }
    alone = train("alone", **options)
    for number, layout in enumerate(("fsdp=2,pp=2,micro=2", "tp=2,cp=2,micro=4")):
        run = train(f"ranks-{number}", layout, **options | {"data__cache": source.parent / f"cache-{number}"})
        assert run.report.code == 0, run.report.message
        assert run.losses == pytest.approx(alone.losses, abs=1e-12)


def test_a_pass_that_is_stopped_goes_on_where_it_was(
    training: MakeTraining, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "PASSES", 1)
    options = OPTIONS | {"data__source": source, "checkpoint__every": 100}
    whole = training("whole", **options)
    whole.run_to_end(lambda: False)
    asked = count()
    stopped = training("run", **options | {"recipe__seed": 0, "data__cache": source.parent / "other"})
    assert stopped.complete
    made, before = stopped.job, stopped.loader.samples
    run, dataset = stopped.run, _directory(stopped)
    for path in (
        *(run.path / references.FOLDER).iterdir(),
        *(source.parent / "other" / references.FOLDER).iterdir(),
    ):
        path.unlink()
    stopped = Training(made, run, dataset, stopped.mesh, wants_stop=lambda: next(asked) == 2)
    assert not stopped.complete
    outcome = stopped.run_to_end(lambda: False)
    assert (outcome.stopped, outcome.step) == (True, 0)
    after = Training(made, run, dataset, stopped.mesh)
    assert isinstance(before, PairSamples) and isinstance(after.loader.samples, PairSamples)
    assert after.complete and (after.loader.samples.reference == before.reference).all()
    after.run_to_end(lambda: False)
    one, other = (read_rows(run.metrics) for run in (whole.run, after.run))
    assert [row["loss_hex"] for row in one] == [row["loss_hex"] for row in other]
