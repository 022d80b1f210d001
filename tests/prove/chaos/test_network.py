"""What needs root: a network that is really cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.prove.chaos import network

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not network.possible(), reason="a network namespace needs root"),
]


def test_a_cut_network_changes_nothing(
    settings: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [word for value in settings(recipe__batch=4) for word in ("--set", value)]
    options = ("--faults", "3", "--layouts", "dp=2", "--kinds", "network cut,SIGKILL", "--json")
    with pytest.raises(SystemExit) as ended:
        main(["chaos", *options, "--run", str(tmp_path / "chaos"), *overrides])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    found = json.loads(out)
    assert "network cut" in {fault["kind"] for fault in found["faults"]}
    assert all(fault["named_right"] for fault in found["faults"]), err
    assert found["curve_identical"] and found["weights_identical"] and found["steps_lost"] == 0
