"""The table of ``shoal plan`` on terminals of any width: every column is there, and no layout is broken."""

from __future__ import annotations

import json

import pytest
from tests.cli.command import Capture, shoal_

ASKED = ("plan", "llama3-8b", "--on", "16xH100", "--seq", "4096", "--batch", "64", "--top", "4", "--curve")


@pytest.mark.parametrize("columns", [80, 120, 400])
def test_a_table_fits_its_terminal(columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = shoal_(capsys, *ASKED, "--tokens", "1T", "--price", "2")
    _, document, _ = shoal_(capsys, *ASKED, "--json")
    found = json.loads(document)
    assert code == 0
    # A command is for a shell, which would take a broken one apart.
    lines = [line for line in out.splitlines() if not line.startswith("next: ")]
    layouts = [one["layout"] for one in found["plans"]]
    layouts += [point["layout"] for curve in found["curve"].values() for point in curve if point["layout"]]
    for layout in layouts:
        assert any(layout in line.split() for line in lines), layout
    too_long = [line for line in lines if len(line) > columns]
    assert [line for line in too_long if line.split()[-1] not in layouts] == []
    for one in found["plans"]:
        assert f"{one['tokens_per_s_per_gpu']:,.0f}" in out and one["binds"] in out
    one_line = [
        line for line in lines if layouts[0] in line.split() and f"{found['plans'][0]['mfu']:.1%}" in line
    ]
    assert bool(one_line) is (columns == 400)


def test_several_nodes_are_in_the_next_command(capsys: Capture) -> None:
    _, out, _ = shoal_(capsys, *ASKED[:-1], "--layout", "fsdp=16")
    (line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert line.endswith("&& shoal train plan.toml --nodes 2") and "for each of the 2 nodes" in out
    _, out, _ = shoal_(capsys, *ASKED[:3], "8xH100", *ASKED[4:-1], "--layout", "fsdp=8,micro=1")
    (line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert line.endswith("&& shoal train plan.toml")
