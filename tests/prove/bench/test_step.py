"""A step of every peer of the development environment: all train the same, and the report says so."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shoal.cli.main import main
from shoal.prove.bench import measure as measuring


def bench(model: Path, *arguments: str) -> tuple[object, str]:
    words = ["--seq", "16", "--batch", "4", "--steps", "1", "--on", "2xcpu", *arguments]
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main(["bench", "step", str(model), *words])
    return ended.value.code, printed.getvalue()


# AdamW's update hardly depends on the size of gradients, unless eps is large: so a loss tells who clips and decays.
TELLING = [
    word
    for setting in ("recipe.lr=0.01", "recipe.eps=0.01", "recipe.weight_decay=1.0")
    for word in ("--set", setting)
]
# A missing clip is 7e-4, a tenth less weight decay 4e-6 apart; two stacks that do the same, 1e-7.
CLOSE = 1e-6


def peers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["peers"]}


Bench = tuple[dict[str, Any], Path, Path]


@pytest.fixture(scope="module")
def measured(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One run with two micro-batches a step and gradients that are clipped."""
    folder = tmp_path_factory.mktemp("bench")
    picture, out = folder / "step.svg", folder / "step.json"
    files = ("--picture", str(picture), "--out", str(out))
    chosen = ("--peers", "shoal,pytorch,pytorch-eager,transformers")
    settings = ("--layout", "micro=2", "--clip", "0.05", "--rounds", "2", *TELLING)
    code, printed = bench(small_model, *chosen, *settings, "--json", *files)
    assert code == 0
    return json.loads(printed), picture, out


def test_all_peers_train_the_same(measured: Bench) -> None:
    rows = peers(measured[0])
    assert list(rows) == ["shoal", "pytorch", "pytorch-eager", "transformers"]
    for row in rows.values():
        assert row["failure"] is None and row["agrees"], row
        assert row["losses"] == pytest.approx(rows["shoal"]["losses"], rel=CLOSE) and len(row["losses"]) == 3


def test_the_document(measured: Bench) -> None:
    document, _, out = measured
    said = json.loads(out.read_text())
    assert said["peers"] == document["peers"]
    assert document["ok"] is True and document["device"] == "cpu" and document["world"] == 1
    assert document["tokens_per_step"] == 64 and document["micro"] == 2 and document["recipe"]["clip"] == 0.05
    assert {"python", "torch", "cuda", "cudnn", "shoal"} <= set(document["versions"])
    assert {"commit", "time", "shape", "parameters", "layout", "flops_per_token", "how"} <= set(document)
    rows = peers(document)
    for row in rows.values():
        assert [len(steps) for steps in row["step_s_by_round"]] == [
            1,
            1,
        ]  # the settling step is not among them
        assert row["step_s_low"] <= row["step_s"] <= row["step_s_high"]
        assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"])
        assert row["model_tflops"] == pytest.approx(row["tokens_per_s"] * document["flops_per_token"] / 1e12)
        assert row["peak_allocated"] is None  # of a CPU
    assert rows["shoal"]["shoal_over_this"] is None
    low, high = rows["pytorch"]["shoal_over_this_95"]
    assert low <= rows["pytorch"]["shoal_over_this"] <= high
    assert set(rows["transformers"]["versions"]) == {"transformers", "accelerate"}


def test_the_picture_is_xml_that_asks_nothing_of_a_network(measured: Bench) -> None:
    text = measured[1].read_text()
    tree = ElementTree.fromstring(text)
    words = " ".join("".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text"))
    assert all(name in words for name in ("shoal", "pytorch-eager", "transformers"))
    assert text.count("http") == 1 and "href" not in text  # the name of SVG itself
    assert len(tree.findall("{http://www.w3.org/2000/svg}path")) == 4  # a whisker each


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "pp=2"])
def test_plain_counterparts_of_layouts_train_the_same(untied_model: Path, layout: str) -> None:
    settings = ("--layout", f"{layout},micro=1", "--clip", "0.05", "--rounds", "1", *TELLING)
    code, printed = bench(untied_model, "--peers", "shoal,pytorch", *settings, "--json")
    rows = peers(json.loads(printed))
    assert code == 0 and list(rows) == ["shoal", "pytorch"]
    assert rows["pytorch"]["failure"] is None
    assert rows["pytorch"]["losses"] == pytest.approx(rows["shoal"]["losses"], rel=CLOSE)


def test_master_weights_in_bf16_and_a_fresh_start_for_every_turn(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "all_fit", lambda job, kinds: False)
    words = ("--peers", "shoal,pytorch", "--precision", "bf16", "--rounds", "2", "--json")
    code, printed = bench(small_model, *words)
    document = json.loads(printed)
    rows = peers(document)
    assert code == 0 and document["together"] is False and "started anew" in document["how"]
    assert [len(row["step_s_by_round"]) for row in rows.values()] == [2, 2]
    assert all(row["agrees"] and len(row["losses"]) == 3 for row in rows.values())


def test_a_peer_that_fails_is_a_row_with_its_reason(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a file of peers that is not there, in its own process."""
    from dataclasses import replace

    from shoal.prove.bench.registry import ONE, PEERS

    broken = replace(PEERS["pytorch"], modules={ONE: "not_there"})
    monkeypatch.setitem(PEERS, "pytorch", broken)
    code, printed = bench(small_model, "--peers", "shoal,pytorch", "--rounds", "1")
    assert code == 0
    assert (
        "pytorch failed: ModuleNotFoundError: No module named 'shoal.prove.bench.peers.not_there'" in printed
    )
    assert "the reference" in printed
