"""``shoal profile`` on real ranks: the pipeline's bubble, where time and memory go, and what is written down."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.facts.ledger import CATEGORIES
from shoal.facts.problem import BadInput
from shoal.observe.breakdown import TimeBreakdown
from shoal.observe.intervals import Interval
from shoal.plan.resolve import resolve
from shoal.prove import profile_rank as profiled_module
from shoal.prove.measured_bubble import compare
from shoal.prove.profile import Profile, ProfileFailed, profile
from shoal.prove.profile_rank import RankProfile
from shoal.train.run_directory import RunDirectory

Settings = Callable[..., list[str]]
# Two processes' profilers read the same clock, each through a conversion of its own.
CLOCKS = 2e-3


def profiled(place: Path, layout: str, settings: list[str], warm_up: int = 1) -> Profile:
    job = resolve(load(None, settings, layout).config)
    return profile(job, RunDirectory(place), warm_up, Console(stderr=True))


def parts(spent: TimeBreakdown) -> float:
    idle = spent.bubble + spent.input_wait + spent.exposed_comm + spent.host_gaps
    return spent.compute + spent.recompute + spent.optimizer + idle


def test_two_real_stages_are_seen_on_one_clock(settings: Settings, tmp_path: Path) -> None:
    """How long they idle depends on who else uses the machine; in which order things happen does not."""
    seen = profiled(tmp_path, "pp=2,micro=2,schedule=1f1b", settings(recipe__batch=4))
    pipeline = seen.pipeline
    assert pipeline is not None
    assert pipeline.even == pytest.approx(1 / 3)  # two stages, two micro-batches
    assert 0 < pipeline.scheduled < 1 and 0 < pipeline.measured < 1
    first, second = (rank.computations for rank in seen.seen)
    assert set(first) == {"F0.0", "F0.1", "B0.0", "B0.1"}
    assert set(second) == {"F1.0", "F1.1", "B1.0", "B1.1"}
    for micro in (0, 1):
        # What a stage needs is there before it begins, by the clock of another process.
        assert first[f"F0.{micro}"][1] < second[f"F1.{micro}"][0] + CLOCKS
        assert second[f"B1.{micro}"][1] < first[f"B0.{micro}"][0] + CLOCKS
    # Messages between stages are buffers too.
    assert sum(seen.memory[name] for name in CATEGORIES) == seen.memory["peak_allocated"]
    assert seen.memory["buffers"] == pytest.approx(seen.plan.memory.buffers, rel=0.01)
    for rank in seen.seen:
        assert parts(rank.spent) == pytest.approx(rank.spent.seconds)
        assert rank.spent.bubble > 0


def test_a_bubble_that_the_schedule_does_not_explain_shows() -> None:
    def seen(rank: int, computations: dict[str, Interval]) -> RankProfile:
        nothing = TimeBreakdown(1.0, {}, 0, 0, 0, 0, {}, 0, 0)
        return RankProfile(rank, {"pp": rank}, [1.0], [0.0], nothing, computations, 0, {}, "", [])

    layout = Layout.parse("pp=2,schedule=gpipe")
    first = {"F0.0": (100, 101), "F0.1": (101, 102), "B0.0": (106, 108), "B0.1": (108, 110)}
    prompt = {"F1.0": (101, 102), "F1.1": (102, 103), "B1.0": (104, 106), "B1.1": (106, 108)}
    late = {name: (start + 1, end + 1) for name, (start, end) in prompt.items()}
    held_up = {**first, "B0.0": (107, 109), "B0.1": (109, 111)}
    usual = compare(layout, 2, [seen(0, first), seen(1, {**prompt, "B1.0": (103, 105), "B1.1": (105, 107)})])
    assert usual is not None
    assert usual.scheduled == usual.even == pytest.approx(1 / 3)
    assert usual.measured == pytest.approx(1 - 12 / 20)  # the last stage's gradients took a second to arrive
    worse = compare(layout, 2, [seen(0, held_up), seen(1, late)])
    assert worse is not None and worse.scheduled == pytest.approx(1 / 3)
    assert worse.measured == pytest.approx(1 - 12 / 22)
    assert worse.busy == [6, 6]


def test_one_profile_of_two_ranks_says_all_of_it(settings: Settings, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.profiles.mkdir(parents=True)
    (run.path / ".lock").touch()
    stale = run.trace(5)
    stale.touch()
    seen = profiled(run.path, "fsdp=2,micro=2,recompute=full", settings())
    document = json.loads(run.profile.read_text())
    assert document["error"] == seen.errors
    for rank in document["ranks"]:
        spent = rank["spent"]
        assert 0 < rank["exposed_comm"] <= spent["communication"]
        assert {"all_gather fsdp", "reduce_scatter fsdp"} <= set(spent["exposed"])
        assert spent["recompute"] > 0 and spent["optimizer"] > 0 and spent["bubble"] == 0
        assert {"matrix products", "attention", "elementwise", "embedding", "loss"} <= set(spent["kinds"])
        assert parts(seen.seen[rank["rank"]].spent) == pytest.approx(spent["seconds"])
    step = dict(document["measured"]["step"])
    assert set(step) == set(document["predicted"]["step"])
    assert step.pop("seconds") == pytest.approx(sum(step.values()))
    memory = document["measured"]["memory"]
    predicted = document["predicted"]["memory"]
    assert memory["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.01)
    names = ("params", "grads", "optimizer", "activations", "logits", "buffers")
    assert sum(memory[name] for name in names) == memory["peak_live"] == memory["peak_allocated"]
    assert abs(document["error"]["memory"]["peak_allocated"]) < 0.02
    assert document["verdict"]
    # Traces of this profile alone, each a whole one.
    assert not stale.exists()
    for path in map(Path, document["traces"]):
        with gzip.open(path, "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"shoal step", "shoal input", "shoal F0.0", "shoal B0.1"} <= names


def test_a_run_that_is_there_is_left_as_it_was(train: Any, settings: Settings) -> None:
    run = train(recipe__steps=3).directory
    files = [path for path in run.path.rglob("*") if path.is_file() and path.name not in (".lock", ".writer")]
    before = {path: path.read_bytes() for path in files}
    profiled(run.path, "dp=1", settings(recipe__steps=3))
    assert {path: path.read_bytes() for path in files} == before
    assert run.profile.is_file()
    with run.held(), pytest.raises(BadInput, match="in use by a live run"):
        profiled(run.path, "dp=1", settings())


def test_bad_input_writes_nothing(settings: Settings, tmp_path: Path) -> None:
    place = tmp_path / "run"
    with pytest.raises(BadInput, match="--steps 0"):
        profiled(place, "dp=1", settings(), warm_up=0)
    with pytest.raises(BadInput, match="this machine has"):
        profiled(place, "dp=8", settings(cluster__on="8xH100", recipe__precision="bf16"))
    weights = tmp_path / "weights"
    weights.mkdir()
    with pytest.raises(BadInput, match="weights"):
        profiled(place, "dp=1", settings(model__init_from=weights))
    with pytest.raises(BadInput, match="optimizer states of llama3-405b take"):
        without = [value for value in settings() if not value.startswith("model.path")]
        profiled(place, "dp=1", [*without, "model.preset=llama3-405b"])
    with pytest.raises(BadInput, match="is not a run"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").touch()
        profiled(tmp_path / "other", "dp=1", settings())
    with pytest.raises(BadInput, match="no-such-disk does not exist"):
        profiled(place, "offload=optimizer@nvme", settings(offload__scratch=tmp_path / "no-such-disk"))
    assert not place.exists()


def broken(rank: int, *rest: Any) -> None:
    raise RuntimeError(f"this is {rank}")


def test_a_rank_that_fails_is_named(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiled_module, "take_part", broken)
    with pytest.raises(ProfileFailed, match="rank 0: RuntimeError: this is 0"):
        profiled(tmp_path / "run", "dp=1", settings())
