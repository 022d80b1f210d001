"""The page about other stacks: every config on it is read by ``shoal init --from`` as the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "stacks.md").read_text()
MOVED = re.findall(
    r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```\n\n`shoal (init my-run\.toml --from \1[^`]*)` writes `layout = \"([^\"]+)\"`",
    PAGE,
    re.MULTILINE | re.DOTALL,
)


def test_every_file_on_the_page_is_tried() -> None:
    assert len(MOVED) == PAGE.count("writes `layout = ") == 4


@pytest.mark.parametrize(("name", "content", "command", "layout"), MOVED, ids=[one[0] for one in MOVED])
def test_a_file_becomes_the_layout_beside_it(
    name: str,
    content: str,
    command: str,
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content, encoding="utf-8")
    for arguments in (command.split(), ["config", "show", "my-run.toml", "--json"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["layout"]["value"] == layout


def test_the_commands_at_the_end_run(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^shoal (plan .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        with pytest.raises(SystemExit) as left:
            main([*command.split(), "--json"])
        assert left.value.code == 0
        assert json.loads(capsys.readouterr().out)["plans"][0]["layout"] == "fsdp=8,micro=2"
