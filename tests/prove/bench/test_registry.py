"""Which peers are measured, and what is said of the others."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.facts.config.file import load
from shoal.facts.layout import Layout
from shoal.plan.resolve import resolve
from shoal.prove.bench import registry
from shoal.prove.bench.registry import PEERS, choose, strategy

PEER_FILES = Path(registry.__file__).parent / "peers"


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name in packages else find_spec("json"))


def shoal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", *arguments])
    return ended.value.code, *capsys.readouterr()


def test_every_file_of_peers_is_a_peer() -> None:
    named = {module for kind in PEERS.values() for module in kind.modules.values()}
    assert named == {path.stem for path in PEER_FILES.glob("*.py")} - {"__init__"}


def test_unknown_and_missing_peers_are_told_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "lightning")
    code, out, err = shoal(capsys, "tiny", "--peers", "shoal,pytorh,fabric", "--json")
    assert code == 2
    first, second = json.loads(out)["problems"]
    assert first["what"] == "--peers pytorh: no such peer" and "did you mean 'pytorch'?" in first["fix"]
    assert second["what"] == "--peers fabric: lightning is not installed"
    assert second["fix"] == "pip install lightning"
    assert "error: --peers pytorh" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--peers", ","], "--peers is empty"),
        (["--out", "/no/such/folder/step.json"], "there is no directory /no/such/folder"),
        (["--layout", "tp=3"], "tp=3"),
        (["--batch", "3", "--layout", "micro=2"], "micro=2"),
    ],
)
def test_bad_input_is_answered_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = shoal(capsys, "tiny", *words)
    assert code == 2 and said in err and "fix:" in err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shoal(capsys, "--help")
    assert code == 0 and "Example: shoal bench step llama3.2-1b" in out


def job(layout: str = "dp=1", **settings: Any) -> Any:
    sets = {"cluster.on": "4xcpu", "model.preset": "tiny", **settings}
    return resolve(load(None, [f"{key}={value}" for key, value in sets.items()], layout).config)


def test_what_is_left_out_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "lightning", "accelerate")
    chosen, left_out = choose(None, job())
    assert [kind.name for kind in chosen] == ["shoal", "pytorch", "pytorch-eager", "deepspeed"]
    assert [str(one) for one in left_out] == [
        "transformers: accelerate is not installed: pip install transformers accelerate",
        "transformers-compiled: accelerate is not installed: pip install transformers accelerate",
        "fabric: lightning is not installed: pip install lightning",
        "torchtitan: measured on a GPU only",
    ]


@pytest.mark.parametrize(
    ("layout", "settings", "names"),
    [
        ("dp=2", {}, {"shoal", "pytorch", "transformers"}),
        ("fsdp=2", {}, {"shoal", "pytorch", "deepspeed"}),
        ("fsdp=2,zero=1", {}, {"shoal", "deepspeed"}),
        ("tp=2", {}, {"shoal", "pytorch"}),
        ("pp=2", {}, {"shoal"}),  # tiny's embedding is its head
        ("dp=2,tp=2", {}, {"shoal"}),
        ("recompute=full", {}, {"shoal"}),
        ("offload=optimizer", {}, {"shoal", "deepspeed"}),
        ("offload=optimizer+params@nvme", {}, {"shoal", "deepspeed"}),
        ("offload=optimizer:0.5", {}, {"shoal"}),
        ("recompute=full,offload=optimizer", {}, {"shoal"}),
        ("dp=1", {"recipe.dropout": 0.1}, {"shoal"}),
        ("dp=1", {"model.preset": "gpt2"}, {"shoal", "transformers"}),
    ],
)
def test_peers_have_a_counterpart_or_are_left_out(
    layout: str, settings: dict[str, Any], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    chosen, left_out = choose(None, job(layout, **settings))
    assert {kind.name for kind in chosen} == names
    assert names | {one.name for one in left_out} == set(PEERS)


def test_strategies() -> None:
    told = ("dp=1", "micro=2", "dp=4", "fsdp=2", "fsdp=2,zero=2", "pp=2,schedule=gpipe", "cp=2", "tp=2,sp=0")
    found = [strategy(Layout.parse(text)) for text in told]
    assert found == ["one", "one", "dp", "fsdp", "zero2", None, None, None]
