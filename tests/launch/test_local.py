"""``shoal train`` for real: launcher, agent and worker processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
from tests.conftest import Train, after_steps, workers

from shoal.facts.config.file import load
from shoal.facts.problem import BadInput
from shoal.launch.report import FAILED, FINISHED, STOPPED
from shoal.train.run_directory import RunDirectory


def test_a_run_leaves_what_the_contract_names(train: Train) -> None:
    run = train(evaluate__every=3, evaluate__samples=1)
    assert run.report.code == FINISHED
    directory = run.directory
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for file in ("config.toml", "plan.json", "manifest.json", "metrics.jsonl", "logs/rank-00000.log"):
        assert (directory.path / file).is_file(), file
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6]
    fields = "step loss grad_norm lr tokens samples step_s tokens_per_s model_flops_per_s mfu memory_peak world layout"
    assert set(fields.split()) | {"loss_hex"} <= set(run.rows[0])
    assert all(float.fromhex(row["loss_hex"]) == row["loss"] for row in run.rows)
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]
    assert run.rows[2]["heldout_loss"] and run.rows[-1]["heldout_loss"] and "heldout_loss" not in run.rows[0]
    samples = [json.loads(line) for line in directory.samples.read_text().splitlines()]
    assert [row["step"] for row in samples] == [3, 6]
    assert directory.disk.committed() == [4, 6]
    assert json.loads(directory.plan.read_text())["layout"] == "dp=1"


@pytest.mark.parametrize(
    "precision,tolerance", [pytest.param("fp32", 2e-6, marks=pytest.mark.long), ("fp64", 1e-12)]
)
def test_replicas_and_accumulation_change_no_loss(train: Train, precision: str, tolerance: float) -> None:
    """Unpacked rows of unequal lengths: every micro-batch and every rank has another number of targets."""
    options = {"recipe__precision": precision, "data__packing": False}
    alone = train("alone", **options)
    assert len({row["targets"] for row in alone.rows}) > 1
    for name, layout in (
        ("accumulated", "dp=1,micro=2"),
        ("two", "dp=2"),
        ("both", "dp=2,micro=1"),
        ("four", "dp=4"),
    ):
        other = train(name, layout, **options)
        assert other.report.code == FINISHED, other.report.message
        for mine, theirs in zip(alone.rows, other.rows, strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=tolerance), (name, mine["step"])
            assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=tolerance * 10)
            assert theirs["targets"] == mine["targets"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_finishes_the_step_commits_and_the_same_command_continues(
    train: Train, tmp_path: Path, number: signal.Signals
) -> None:
    options = {"recipe__steps": 70, "checkpoint__every": 1000, "recipe__dropout": 0.1}
    with after_steps(tmp_path / "stopped", 5, lambda: os.kill(os.getpid(), number)):
        stopped = train("stopped", "dp=2", **options)
    assert stopped.report.code == STOPPED, stopped.report.message
    assert 5 <= stopped.report.step == len(stopped.rows) < 70
    assert stopped.directory.disk.committed() == [stopped.report.step]
    if number != signal.SIGTERM:
        return
    continued = train("stopped", "dp=2", **options)
    assert continued.report.code == FINISHED
    whole = train("whole", "dp=2", **options)
    assert continued.hexes == whole.hexes
    assert continued.tensors() == whole.tensors()


@pytest.mark.parametrize(
    "precision,tolerance", [pytest.param("fp32", 2e-5, marks=pytest.mark.long), ("fp64", 1e-10)]
)
def test_a_chain_of_resumes_in_other_layouts_is_one_run(
    train: Train, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """Stopped five times and continued split in other ways: losses, weights and optimizer states of one process."""
    options = {
        "recipe__steps": 60,
        "checkpoint__every": 1000,
        "recipe__precision": precision,
        "recipe__lr": 1e-3,
    }
    options |= {"cluster__on": "4xcpu", "fault__timeout": 60}
    layouts = [
        "fsdp=4",
        "fsdp=2,tp=2,offload=params",
        "dp=2,pp=2",
        "tp=2,cp=2",
        "offload=params:0.5",
        "zero=1,cp=2",
    ]
    whole = train("whole", **options)
    done = 0
    for layout in layouts[:-1]:
        with after_steps(tmp_path / "moved", done + 3, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            stopped = train("moved", layout, **options)
        assert stopped.report.code == STOPPED, stopped.report.message
        assert done + 3 <= stopped.report.step < 60
        done = stopped.report.step
    moved = train("moved", layouts[-1], **options)
    assert moved.report.code == FINISHED, moved.report.message
    assert list(dict.fromkeys(row["layout"] for row in moved.rows)) == layouts
    assert moved.losses == pytest.approx(whole.losses, rel=tolerance)
    mine, theirs = moved.checkpoint(), whole.checkpoint()
    assert mine.states == theirs.states == {"weight", "exp_avg", "exp_avg_sq"}
    assert mine.manifest.scalars == theirs.manifest.scalars
    for state in sorted(theirs.states):
        for name in theirs.manifest.shapes:
            one, other = mine.tensor(state, name), theirs.tensor(state, name)
            # Relative to the largest: AdamW makes the smallest gradients count as much as any.
            assert float((one - other).abs().max()) <= 100 * tolerance * float(other.abs().max()), (
                state,
                name,
            )


def test_strict_runs_are_the_same_to_the_bit_in_any_layout(train: Train) -> None:
    """Losses, weights and optimizer states. Rows have unequal numbers of targets."""
    options = {"run__strict": True, "data__packing": False, "evaluate__samples": 1}
    alone = train("alone", **options)
    assert {key.split()[0] for key in alone.tensors()} == {"weight", "exp_avg", "exp_avg_sq"}
    for layout in ("fsdp=2", "pp=2"):
        other = train(layout, layout, **options)
        assert other.report.code == FINISHED, other.report.message
        assert other.hexes == alone.hexes, layout
        assert other.tensors() == alone.tensors(), layout
        assert other.rows[-1]["heldout_loss"] == alone.rows[-1]["heldout_loss"], layout
        assert other.directory.samples.read_text() == alone.directory.samples.read_text(), layout


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2",
        pytest.param("fsdp=2,offload=optimizer:0.7@nvme", marks=pytest.mark.long),
        pytest.param("fsdp=2,offload=params", marks=pytest.mark.full),
    ],
)
def test_a_killed_worker_is_replaced_and_the_curve_is_the_same(
    train: Train, tmp_path: Path, layout: str
) -> None:
    # Training waits for its commits: a slow disk would still be at that of step 5 when step 15 is done.
    options = {"recipe__steps": 50, "checkpoint__every": 5, "checkpoint__background": False}
    with after_steps(tmp_path / "killed", 15, lambda: os.kill(workers()[1], signal.SIGKILL)):
        killed = train("killed", layout, **options)
    assert killed.report.code == FINISHED, killed.report.message
    faults = [json.loads(line) for line in killed.directory.faults.read_text().splitlines()]
    assert [row["kind"] for row in faults] == ["killed", "restart"]
    assert faults[0]["rank"] == 1 and faults[0]["message"] == "rank 1 failed: killed by SIGKILL"
    assert faults[1]["resumed_step"] >= 10
    whole = train("whole", layout, **options)
    assert killed.hexes == whole.hexes
    assert killed.tensors() == whole.tensors()
    assert not (tmp_path / "killed" / "scratch").exists()


def test_a_worker_that_keeps_dying_is_named(train: Train, tmp_path: Path) -> None:
    with after_steps(tmp_path / "run", 1, lambda: os.kill(workers()[1], signal.SIGKILL)):
        run = train(layout="dp=2", recipe__steps=2000, fault__max_restarts=0)
    assert run.report.code == FAILED
    assert run.report.message.startswith("rank 1 failed: killed")
    assert "rank-00001.log" in run.report.message


def test_one_ranks_own_error_that_comes_again_is_shown(train: Train, tmp_path: Path) -> None:
    """A directory in the place of rank 1's log fails rank 1; rank 0 only notices that it is gone."""
    (tmp_path / "run" / "logs" / "rank-00001.log").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    run = train(layout="dp=2")
    assert run.report.code == FAILED
    assert run.report.message.startswith("rank 1 failed: IsADirectoryError")
    assert "Traceback" not in run.report.message
    faults = [json.loads(line) for line in run.directory.faults.read_text().splitlines()]
    assert [(row["kind"], row["rank"], row["action"]) for row in faults] == [
        ("error", 1, "restarting"),
        ("error", 1, "restarting"),
        ("error", 1, "giving up"),
    ]


def test_a_full_disk_keeps_the_last_commit(train: Train, tmp_path: Path) -> None:
    """The kernel refuses the writer every byte beyond the first thousand of a file: the next commit cannot succeed."""

    def fill() -> None:
        for worker in workers():
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (1000, 1000))

    with after_steps(tmp_path / "run", 20, fill):
        run = train(layout="dp=2", recipe__steps=40, checkpoint__every=8)
    assert run.report.code == FAILED
    assert run.report.message.startswith("rank 0 failed: the disk is full")
    # The commit of step 16 may have been on its way.
    assert run.report.step in (8, 16)
    assert not list(run.directory.checkpoints.glob(".unfinished*"))
    continued = train(layout="dp=2", recipe__steps=40, checkpoint__every=8)
    assert continued.report.code == FINISHED
    assert continued.hexes == train("whole", "dp=2", recipe__steps=40, checkpoint__every=8).hexes


def test_a_live_run_keeps_its_directory(train: Train, tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "run")
    with held.held(), pytest.raises(BadInput, match="in use by a live run"):
        train()


def test_what_one_rank_does_alone_may_take_longer_than_a_collective(train: Train) -> None:
    """Rank 0 writes a long sample while rank 1 waits: seconds, where a collective may take one."""
    run = train(layout="dp=2", evaluate__every=3, evaluate__sample_tokens=1000, fault__timeout=1)
    assert run.report.code == FINISHED, run.report.message
    assert not run.directory.faults.exists()


def test_a_run_without_checkpoints_is_not_overwritten(train: Train) -> None:
    first = train(checkpoint__every=0)
    again = train(checkpoint__every=0)
    assert again.report.code == FINISHED and "already" in again.report.message
    assert again.rows == first.rows
    with pytest.raises(BadInput, match=r"recipe\.seed was 0, now 1"):
        train(checkpoint__every=0, recipe__seed=1)


def test_a_run_that_was_stopped_once_and_then_finished_is_finished(train: Train, tmp_path: Path) -> None:
    options = {"recipe__steps": 70, "checkpoint__every": 0}
    with after_steps(tmp_path / "run", 3, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert train(**options).report.code == STOPPED
    assert train(**options).report.code == FINISHED
    assert "already" in train(**options).report.message


def test_a_recipe_spelled_differently_is_the_same_run(train: Train) -> None:
    train(recipe__steps=4, recipe__warmup=2)
    again = train(recipe__tokens=4 * 8 * 32, recipe__steps=4, recipe__warmup="50%")
    assert "already" in again.report.message


def test_the_written_config_leads_back_to_its_run(train: Train, tmp_path: Path) -> None:
    run = train(layout="auto", recipe__steps=2)
    config = load(run.directory.config).config
    assert Path(config.run.dir) / config.run.slug == tmp_path / "run"
    assert config.layout == "dp=1"


def test_bad_rows_are_announced_and_none_may_mean_none(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": "all arrive " * 9})] * 60
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows, '{"text": ', '{"other": 1}']))
    train(data__source=tmp_path / "bad.jsonl", recipe__steps=1)
    assert "left out 2 of 62 rows (broken JSON: 1, no field 'text': 1)" in capfd.readouterr().err
    with pytest.raises(BadInput, match="2 of the 62 rows"):
        train("none", data__source=tmp_path / "bad.jsonl", data__max_bad_rows=0)


def test_fresh_moves_the_old_run_aside(train: Train, tmp_path: Path) -> None:
    first = train(recipe__steps=2)
    again = train(recipe__steps=2)
    assert again.report.code == FINISHED and "already" in again.report.message
    with pytest.raises(BadInput, match=r"recipe\.lr was 0\.01, now 0\.02"):
        train(recipe__steps=2, recipe__lr=0.02)
    fresh = train(recipe__steps=2, recipe__lr=0.02, fresh=True)
    assert fresh.hexes[1:] != first.hexes[1:]
    assert RunDirectory(tmp_path / "run.old-1").step() == 2


def test_another_models_checkpoint_is_refused(train: Train, tmp_path: Path) -> None:
    train(recipe__steps=2)
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(BadInput, match=r"holds another model: .*layers was 2, now 8"):
        train(recipe__steps=2, model__path="", model__preset="tiny")
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")) == before


def test_bad_input_spawns_and_writes_nothing(train: Train, tmp_path: Path, small_model: Path) -> None:
    config = json.loads(small_model.read_text())
    narrow = tmp_path / "narrow.json"
    narrow.write_text(json.dumps({**config, "vocab_size": 256}))
    for reason, options in {
        "vocabulary of 256": {"model__path": narrow},
        "no file": {"data__source": tmp_path / "nothing-*.jsonl"},
        "does not divide": {"recipe__batch": 7, "layout": "dp=2"},
        "heads": {"layout": "tp=3"},
        "init_from": {"model__init_from": tmp_path},
        "a sample takes 100001": {"recipe__seq": 100_000},
        "weights, gradients and optimizer states": {"model__path": "", "model__preset": "llama3-70b"},
    }.items():
        with pytest.raises(BadInput, match=reason):
            train("bad", **options)
        assert not (tmp_path / "bad").exists(), reason


def test_a_step_can_be_observed(train: Train) -> None:
    run = train("observed", "fsdp=2", run__observe=True, recipe__steps=3)
    plain = train("plain", "fsdp=2", recipe__steps=3)
    assert run.hexes == plain.hexes and not (plain.directory.path / "observed").exists()
    for rank in range(2):
        seen = json.loads(run.directory.observed(rank).read_text())
        assert (seen["step"], seen["rank"], seen["layout"]) == (2, rank, "fsdp=2")
        assert {(row["op"], row["group"]) for row in seen["traffic"]} >= {
            ("all_gather", "fsdp"),
            ("reduce_scatter", "fsdp"),
        }
        # Every message, from the sum of the step's targets on.
        planned = json.loads(run.directory.plan.read_text())["traffic"]
        kept = ("op", "group", "count", "bytes")
        assert [[row[name] for name in kept] for row in seen["traffic"]] == sorted(
            [row[name] for name in kept] for row in planned
        )
        held = seen["peak_by_category"]
        assert held["params"] > 0 and held["optimizer"] >= 2 * held["params"]
        assert sum(held.values()) == seen["peak"]
