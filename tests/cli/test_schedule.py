from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.cli.main import main


def test_a_timeline_its_instructions_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "zbv.svg"
    with pytest.raises(SystemExit) as ended:
        main(
            ["schedule", "pp=2,schedule=zbv", "--micro-batches", "4", "--instructions", "--svg", str(picture)]
        )
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "rank 0: F0.0 SF0.0>1" in printed and "idle" in printed
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schedule", "pp=2", "--micro-batches", "3", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["idle"] == pytest.approx(1 / 4) and document["in_flight"] == [2, 1]
    assert document["programs"][1][0] == "RF1.0<0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pp=2,schedule=gpipe,chunks=2"], "chunks"),
        (["pp=2", "--micro-batches", "0"], "--micro-batches 0"),
        (["pp=2,shedule=zb"], "schedule"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
