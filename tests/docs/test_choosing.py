"""The decision guide says what the planner says, and what is known of the errors that circulate."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from tests.docs import choosing
from tests.docs.choosing import RUNGS, Rung, gradients_over_nvlink, hours_of_70b, p5, twenty_bytes

from shoal.cli.main import main

PAGE = choosing.PAGE.read_text()


def test_the_page_is_what_the_planner_says() -> None:
    """If not: ``python -m tests.docs.choosing``."""
    assert "<!-- ladder -->" in PAGE and "<!-- errors -->" in PAGE
    assert choosing.written(PAGE) == PAGE


def test_a_strategy_makes_it_fit_or_faster() -> None:
    for rung in RUNGS[1:]:
        without, with_it = (choosing.judged(command) for command in rung.commands)
        assert with_it.memory.fits, rung
        assert not without.memory.fits or with_it.step.seconds < without.step.seconds, rung
    # Nothing is gained by sharding what fits.
    sharded, replicas = (choosing.judged(command) for command in RUNGS[0].commands)
    assert replicas.memory.fits and replicas.step.seconds < (1 + replicas.error_bar) * sharded.step.seconds


def test_the_errors_that_circulate() -> None:
    assert "20 bytes" in twenty_bytes()[0] and twenty_bytes()[1].startswith("18,")
    assert f"{280 / 900:.2f} s" in gradients_over_nvlink()[0]
    # 2 · 7/8 · 280 GB one way at 450 GB/s.
    assert f"{2 * 7 / 8 * 280 / 450:.2f} s" in gradients_over_nvlink()[1]
    assert "p5.48xlarge 8 × H100" in p5()[2] and "p4d.24xlarge 8 × A100-40GB" in p5()[2]
    # 6 · 70.6e9 · 15e12, and attention on top.
    assert hours_of_70b()[1] == "4.7M at 400 TFLOP/s" and "6.3e24 FLOP" in hours_of_70b()[2]


def planned(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    with pytest.raises(SystemExit) as left:
        main([*shlex.split(command)[1:], "--json"])
    assert left.value.code == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.long
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.with_it)
def test_the_command_says_what_the_page_says(
    rung: Rung, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(choosing.ROOT)
    for command in rung.commands:
        (plan,) = [
            plan
            for plan in planned(command, capsys)["plans"]  # type: ignore[attr-defined]
            if plan["layout"] == str(choosing.asked(command).layout)
        ]
        assert plan["step"]["seconds"] == pytest.approx(choosing.judged(command).step.seconds)


@pytest.mark.long
def test_the_dry_run_at_the_end_is_of_what_the_plan_before_it_chooses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both are run with the page's other commands by test_commands.py, and the dry run whole by ``make test-full``."""
    plan, dryrun = re.findall(r"^shoal (?:plan|dryrun) .*$", PAGE, re.MULTILINE)
    chosen = planned(plan, capsys)["chosen"]
    assert f"--layout {chosen['layout']}" in dryrun  # type: ignore[index]
