"""``shoal dryrun`` as a person and as a script meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.predict.counted import ask
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.cli.main import main
from shoal.parallel.zero import ShardedStates
from shoal.predict.memory import ledger
from shoal.prove.dryrun_findings import FLOOR, in_memory

Capture = pytest.CaptureFixture[str]
TINY = ["tiny", "--on", "2xcpu", "--seq", "96", "--batch", "4"]
FP32 = ["--precision", "fp32"]
LEDGER = {
    "params",
    "grads",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "peak_allocated",
    "reserved",
    "device_total",
    "capacity",
    "worst_stage",
}


def dryrun(capfd: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as caught:
        main(["dryrun", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capfd.readouterr()


def test_json_has_the_fields_of_the_contract(capfd: Capture) -> None:
    code, out, err = dryrun(capfd, *TINY, "--layout", "fsdp=2", "--rank", "1", "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["layout"], document["world"], document["rank"]) == ("fsdp=2", 2, 1)
    assert set(document["memory"]) >= LEDGER and set(document["predicted"]) >= LEDGER
    assert document["matches"] is True and document["memory_matches"] is True and document["findings"] == []
    assert document["traffic"] == document["predicted_traffic"]
    assert {row["op"] for row in document["traffic"]} == {"all_gather", "all_reduce", "reduce_scatter"}
    assert set(document["traffic"][0]) == {"op", "group", "count", "bytes"}
    assert document["seconds"] > 0
    # All that is held at the peak is some module's, or nobody's.
    assert sum(document["modules"].values()) == document["memory"]["peak_allocated"]
    assert err == "tiny on 2xcpu, fsdp=2: one rank of 2\n"


def test_every_stage_and_what_passes_between_them(capfd: Capture) -> None:
    code, out, err = dryrun(capfd, *TINY, "--layout", "pp=2", "--stages", "--json")
    assert code == 0
    document = json.loads(out)
    stages = document["stages"]
    assert [(one["stage"], one["rank"], one["matches"]) for one in stages] == [(0, 0, True), (1, 1, True)]
    assert document["matches"] is True and document["between_stages"] == []
    # The document's own ledger is the fullest stage's.
    assert document["memory"] == max((one["memory"] for one in stages), key=lambda one: one["peak_allocated"])
    assert [line.split("  ")[0] for line in err.splitlines()[1:]] == ["ok", "ok"]


def test_a_config_and_tables_for_a_person(
    settings: Callable[..., list[str]], tmp_path: Path, capfd: Capture
) -> None:
    config = tmp_path / "small.toml"
    config.write_text("[run]\nname = 'small'\n")
    changes = [word for setting in settings() for word in ("--set", setting)]
    before = sorted(tmp_path.iterdir())
    code, out, err = dryrun(capfd, str(config), *changes, "--set", "cluster.on=4xH100", "--layout", "fsdp=4")
    assert code == 0, out
    assert out.splitlines()[-1] == "as predicted"
    first_words = [line.split("  ")[0] for line in out.splitlines()]
    for word in ("params", "optimizer", "activations", "peak_allocated", "all_gather", "most of it"):
        assert word in first_words, out
    assert "on 4xH100, fsdp=4: one rank of 4" in err
    assert sorted(tmp_path.iterdir()) == before  # nothing was written


def test_a_difference_is_said_and_ends_with_1(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedStates, "after_update", lambda states: None)
    code, out, _ = dryrun(capfd, *TINY, "--layout", "fsdp=2,zero=1")
    assert code == 1
    assert "DIFFERS  traffic: all_gather in fsdp: none, predicted 2 calls with " in out
    assert out.splitlines()[-1] == "differs from the prediction"


def test_a_few_kilobytes_of_a_toy_are_no_difference(capfd: Capture) -> None:
    """98,304 bytes are logits where activations were predicted: 4 % of a toy's, and nothing to anybody."""
    code, out, _ = dryrun(capfd, *TINY, "--layout", "fsdp=2,micro=1", "--precision", "bf16", "--json")
    document = json.loads(out)
    seen, predicted = document["memory"]["activations"], document["predicted"]["activations"]
    assert abs(seen - predicted) > 0.01 * predicted, "the case is not the one meant"
    assert (code, document["findings"], document["memory_matches"]) == (0, [], True)


@pytest.mark.parametrize(("extra", "differs"), [(FLOOR, False), (FLOOR + 1, True)])
def test_where_a_difference_begins(extra: int, differs: bool) -> None:
    predicted = replace(ledger(ask("dp=1")), buffers=4 * FLOOR, peak_allocated=4 * FLOOR)
    seen = replace(predicted, buffers=4 * FLOOR + extra, peak_allocated=4 * FLOOR + extra)
    assert len(list(in_memory(seen, predicted, {}))) == 2 * differs
    # In a model that needs a GPU it is the percent that counts.
    large = replace(predicted, buffers=400 * FLOOR, peak_allocated=400 * FLOOR)
    beyond = replace(large, buffers=404 * FLOOR + extra, peak_allocated=404 * FLOOR + extra)
    assert len(list(in_memory(beyond, large, {}))) == 2


def test_a_wrong_kernel_is_an_error(capfd: Capture) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        code, out, err = dryrun(capfd, *TINY, "--layout", "dp=2")
    assert (code, out) == (1, "")
    assert "error: the dry run went through aten::_safe_softmax; cpu would use fused attention" in err


def test_help_has_examples(capfd: Capture) -> None:
    code, out, _ = dryrun(capfd, "--help")
    assert code == 0
    assert "Example: shoal dryrun llama3-405b --on 16384xH100" in out
    assert "shoal dryrun examples/tiny.toml --layout fsdp=2,pp=2" in out and "--stages" in out


@pytest.mark.parametrize(
    ("arguments", "said", "fix"),
    [
        (
            ["tiny", "--seq", "64", "--batch", "4"],
            "a model needs --on, --seq and --batch",
            "shoal dryrun tiny ",
        ),
        ([*TINY, "--layout", "fsdp=2", "--rank", "2"], "--rank 2: the layout fsdp=2 has 2 ranks", "--rank 1"),
        ([*TINY, "--layout", "fsdp=2", "--rank", "-1"], "--rank -1: the layout fsdp=2 has 2", "--rank 1"),
        ([*TINY, "--layout", "pp=2", "--rank", "0", "--stages"], "mutually exclusive", "use one of them"),
        ([*TINY, "--set", "recipe.lr=1"], "--set without a config", "--layout"),
        (
            [*TINY, "--layout", "fsdp=2,offload=activations"],
            "does not train with it",
            "recompute=full",
        ),
        ([*TINY, "--layout", "dp=3"], "batch=4 does not divide by dp·fsdp = 3", "dp=2"),
        ([*TINY, "--layout", "dp=two"], "dp=two", "dp=1"),
        ([*TINY, "--precision", "fp7"], 'recipe.precision = "fp7"', "fp8"),
        (["nothing", *TINY[1:]], "'nothing' is neither a preset", "presets: tiny"),
        (["missing.toml"], "there is no config file missing.toml", "shoal init"),
        (["small.toml", "--set", "run.strict=true"], "run.strict", "--set run.strict=false"),
        (["small.toml", "--on", "8xH100"], "--on with a config", "--set cluster.on=8xH100"),
        (["small.toml", "--precision", "bf16"], "--precision with", "--set recipe.precision=bf16"),
        (["small.toml", "--layout", "dp=3", "--set", "recipe.batch=4"], "does not divide by dp", "dp=2"),
    ],
)
def test_bad_input_is_refused_with_a_fix_before_anything_runs(
    arguments: list[str],
    said: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text("[run]\nname = 'small'\n")
    code, out, err = dryrun(capfd, *arguments)
    assert (code, out) == (2, ""), err
    assert said in err and fix in err.partition("fix: ")[2]
    assert "one rank of" not in err
