"""The loop: stopping anywhere, resuming to the same bits, and what a step's loss is a mean over."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.conftest import network_of

from shoal.observe.flight_recorder import COMMIT
from shoal.train.data.loader import Batch, _collate
from shoal.train.files import read_rows
from shoal.train.guard.nonfinite import SKIPPED
from shoal.train.loop import Training
from shoal.train.outcome import Outcome
from shoal.train.step import IssuedStep

MakeTraining = Callable[..., Training]


def run(training: Training, stop_after: int | None = None) -> Outcome:
    """Run to the end, or until that many steps of this call are done."""
    asked = count()
    return training.run_to_end(lambda: next(asked) == stop_after)


def hexes(training: Training) -> list[str]:
    return [row["loss_hex"] for row in read_rows(training.run.metrics)]


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"recipe__dropout": 0.2, "data__within_documents": True},
    "sgd": {"recipe__optimizer": "sgd", "recipe__schedule": "wsd", "recipe__lr": 0.1},
    "bf16": {"recipe__precision": "bf16", "recipe__states": "bf16"},
    "fp16": {"recipe__precision": "fp16"},
    "fp64": {"recipe__precision": "fp64", "data__packing": False},
}


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        # A plain run at every step; the others in their warm-up and after it.
        *((name, (1, 2, 3, 4, 5) if name == "plain" else (1, 4)) for name in RUNS),
        *(pytest.param(name, (2, 3, 5), marks=pytest.mark.full) for name in RUNS if name != "plain"),
    ],
)
def test_a_run_stopped_at_any_step_continues_to_the_same_bits(
    training: MakeTraining, name: str, stops: tuple[int, ...]
) -> None:
    options = RUNS[name]
    whole = training("whole", **options)
    assert run(whole) == Outcome(stopped=False, step=6)
    for stop in stops:
        stopped = training(f"stop-{stop}", checkpoint__every=100, **options)
        assert run(stopped, stop) == Outcome(stopped=True, step=stop)
        continued = training(f"stop-{stop}", checkpoint__every=100, **options)
        assert continued.done == stop
        assert run(continued) == Outcome(stopped=False, step=6)
        assert hexes(continued) == hexes(whole), stop
        for piece, other in zip(whole.state.pieces, continued.state.pieces, strict=True):
            assert piece.name == other.name
            assert torch.equal(piece.tensor, other.tensor), (stop, piece.name)
            mine, theirs = (
                whole.state.optimizer.state[piece.tensor],
                continued.state.optimizer.state[other.tensor],
            )
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert torch.equal(value, theirs[key]), (stop, piece.name, key)
        assert continued.state.scale == whole.state.scale


def test_a_crash_after_a_commit_repeats_the_lost_steps_exactly(training: MakeTraining) -> None:
    whole = training("whole")
    run(whole)
    crashed = training("crashed", checkpoint__every=2)
    # Five steps recorded, four committed, and a torn sixth line: what a power cut leaves.
    with pytest.raises(KeyboardInterrupt):
        asked = count()

        def pull_the_plug() -> bool:
            if next(asked) == 5:
                raise KeyboardInterrupt
            return False

        crashed.run_to_end(pull_the_plug)
    with crashed.run.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    continued = training("crashed", checkpoint__every=2)
    assert continued.done == 4
    run(continued)
    assert hexes(continued) == hexes(whole)
    assert [row["step"] for row in read_rows(continued.run.metrics)] == [1, 2, 3, 4, 5, 6]


def test_steps_that_are_read_late_change_nothing(training: MakeTraining) -> None:
    """As on a GPU: a step is issued before the last one's numbers are read, except where its state is kept."""
    options = {"checkpoint__every": 5, "recipe__steps": 9, "recipe__dropout": 0.2}
    at_once = training("at-once", **options)
    run(at_once)
    late = training("late", **options)
    late.runs_ahead = True
    read: list[int] = []
    late.announce = lambda phase, step, *part: read.append(step) if phase == COMMIT else None
    issued, issue = [], late.step.issue

    def noted(step: int, *rest: Any) -> IssuedStep:
        issued.append((step, read[-1] if read else 0))
        return issue(step, *rest)

    late.step.issue = noted  # type: ignore[method-assign]
    assert run(late, stop_after=7) == Outcome(stopped=True, step=7)
    # Of each step, the last that was read before: the first two are, and what is committed.
    assert issued == [(1, 0), (2, 1), (3, 2), (4, 2), (5, 4), (6, 5), (7, 5)]
    continued = training("late", **options)
    continued.runs_ahead = True
    assert continued.done == 7 and run(continued) == Outcome(stopped=False, step=9)
    assert hexes(continued) == hexes(at_once)
    for piece, other in zip(at_once.state.pieces, continued.state.pieces, strict=True):
        assert torch.equal(piece.tensor, other.tensor), piece.name
    waits = [(row["step_s"], row["input_wait_s"]) for row in read_rows(late.run.metrics)]
    assert all(0 <= waited <= seconds for seconds, waited in waits)


def test_a_gradient_that_is_not_finite_is_told_of_late(training: MakeTraining) -> None:
    late = training("late", recipe__steps=6)
    late.runs_ahead = True
    spoil = late.step.compute_gradients

    def spoiled(step: int, *rest: Any) -> torch.Tensor:
        if step != 4:
            return spoil(step, *rest)
        with torch.no_grad():
            whole = [piece.tensor.clone() for piece in late.step.pieces]
            kept.extend(whole)
        return torch.full_like(spoil(step, *rest), math.nan)

    kept: list[torch.Tensor] = []
    late.step.compute_gradients = spoiled  # type: ignore[method-assign]
    before, update = [], late.step.issue_update

    def noted(step: int, *rest: Any) -> IssuedStep:
        if step == 5:
            before.extend(piece.tensor.clone() for piece in late.step.pieces)
        return update(step, *rest)

    late.step.issue_update = noted  # type: ignore[method-assign]
    run(late)
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
    (fault,) = read_rows(late.run.faults)
    assert fault["kind"] == "nonfinite" and fault["step"] == 4 and fault["action"] == SKIPPED
    assert [row["loss"] is None for row in read_rows(late.run.metrics)] == [False] * 3 + [True] + [False] * 2


def test_padding_changes_no_loss(training: MakeTraining, even: Path) -> None:
    """The same documents with sixteen more places of padding a row: no target more, and the same curve."""
    options = {"data__source": even, "recipe__precision": "fp64", "data__heldout": 0, "data__packing": False}
    filled = training("filled", recipe__seq=31, **options)
    padded = training("padded", recipe__seq=47, **options)
    run(filled), run(padded)
    for one, other in zip(read_rows(filled.run.metrics), read_rows(padded.run.metrics), strict=True):
        assert one["targets"] == other["targets"] == 8 * 31
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-12)


def test_packing_changes_no_loss(training: MakeTraining, even: Path) -> None:
    """Two documents in a row, attention within each: the sums over all documents, and every gradient, are the same."""
    options = {"data__source": even, "recipe__precision": "fp64", "data__heldout": 0}
    apart = training("apart", recipe__seq=40, data__packing=False, **options)
    packed = training("packed", recipe__seq=64, data__within_documents=True, **options)
    sums = []
    for made in (apart, packed):
        # The last packed row would need one more token than there is, so its two documents count on neither side.
        rows = len(packed.loader.samples) * (1 if made is packed else 2)
        batch = collate(made, range(rows))
        assert (batch.documents is None) == (made is apart)
        hidden = network_of(made)(batch.tokens, batch.positions, batch.documents)
        loss, targets = network_of(made).lm_head(hidden, batch.targets)
        loss.backward()
        sums.append((float(loss.detach()), int(targets)))
    assert sums[0][1] == sums[1][1] == 62 * 31
    assert sums[1][0] == pytest.approx(sums[0][0], rel=1e-12)
    theirs = dict(network_of(packed).named_parameters())
    for name, parameter in network_of(apart).named_parameters():
        assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-9, atol=1e-10), name


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """Documents of 32 tokens each, their end included."""
    corpus = tmp_path / "even.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{7919 * number:031d}"}) + "\n" for number in range(64)))
    return corpus


def collate(made: Training, numbers: range) -> Batch:
    """Samples by their number in the data and not in the order of training."""
    samples = [made.loader.samples[number] for number in numbers]
    return _collate(made.loader.samples, samples, list(numbers))


def test_checkpoints_are_kept_and_the_last_step_is_committed(training: MakeTraining) -> None:
    kept = training("kept", recipe__steps=7, checkpoint__every=2, checkpoint__keep=2)
    run(kept)
    assert kept.run.disk.committed() == [6, 7]
    never = training("never", recipe__steps=3, checkpoint__every=0)
    run(never)
    assert never.run.disk.committed() == []


def test_the_loss_is_a_mean_over_targets_and_not_a_mean_of_means(training: MakeTraining) -> None:
    """Against plain torch: every row of the first batch by itself, in fp64."""
    made = training("mean", data__packing=False, recipe__precision="fp64", recipe__steps=1)
    total, targets = 0.0, 0
    with torch.no_grad():
        for position in range(8):
            row = made.loader.rows(1, [position])
            logits = network_of(made).lm_head.logits(network_of(made)(row.tokens, row.positions))[0]
            wanted = row.targets[0]
            kept = wanted != -100
            chosen = logits.log_softmax(-1)[kept].gather(1, wanted[kept][:, None])
            total, targets = total - float(chosen.sum()), targets + int(kept.sum())
    run(made)
    (row,) = read_rows(made.run.metrics)
    assert row["targets"] == targets
    assert row["loss"] == pytest.approx(total / targets, rel=1e-12)


def test_weights_can_come_from_transformers(
    training: MakeTraining, small_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small_model.parent))
    theirs.save_pretrained(tmp_path / "weights")
    made = training("hf", model__init_from=tmp_path / "weights")
    batch = made.loader.rows(1, range(8))
    with torch.no_grad():
        ours = network_of(made).lm_head.logits(network_of(made)(batch.tokens, batch.positions))
        assert torch.allclose(ours, theirs(batch.tokens).logits, atol=1e-5)
