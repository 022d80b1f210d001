"""Where calibrations are kept: whole files by device kind, read with care, used only when a command says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.predict.calibrated import measurements, stored

from shoal.facts import calibration
from shoal.facts.calibration import file
from shoal.facts.cluster.notation import find


def kept(folder: Path, made: file.Stored) -> Path:
    path = file.file_of(folder, made.measured.device)
    path.write_text(made.model_dump_json(indent=1))
    return path


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = kept(tmp_path, stored())
    assert path == tmp_path / "H200.json"
    assert file.read(path) == stored()


def test_one_device_kind_uses_it_and_no_other(tmp_path: Path) -> None:
    kept(tmp_path, stored())
    before = calibration.find(find("8xH100"))
    assert file.use(tmp_path) == []
    used = calibration.find(find("1xH200"))
    assert used.measured == measurements() and used.known
    assert used.words == f"measured here on 2026-11-15 ({tmp_path / 'H200.json'})"
    assert calibration.find(find("8xH100")) == before
    file.use(None)
    assert calibration.find(find("1xH200")).measured is None


def test_a_device_that_no_catalogue_knows_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = kept(tmp_path, stored(device="Some GPU (8 GB) / x"))
    assert path.name == "Some-GPU-8-GB-x.json"
    assert file.use(tmp_path) == []


def damaged(text: str) -> dict[str, str]:
    document = json.loads(text)
    return {
        "half of it": text[: len(text) // 2],
        "nothing": "",
        "another version": json.dumps(document | {"format": 99}),
        "a negative time": text.replace('"seconds": 90.0', '"seconds": -1.0'),
        "not a number": text.replace('"busy": 0.6', '"busy": NaN'),
        "a missing part": json.dumps({key: value for key, value in document.items() if key != "device"}),
        "another device": text.replace('"device": "H200"', '"device": "H100"'),
    }


@pytest.mark.parametrize("how", damaged(stored().model_dump_json(indent=1)))
def test_a_damaged_file_is_a_warning_that_says_what_to_do(tmp_path: Path, how: str) -> None:
    text = stored().model_dump_json(indent=1)
    path = tmp_path / "H200.json"
    path.write_text(damaged(text)[how])
    assert path.read_text() != text
    (warning,) = file.use(tmp_path)
    assert str(path) in warning and warning.endswith("run shoal profile --calibrate, or delete the file")
    assert "\n" not in warning
    assert calibration.find(find("1xH200")).measured is None


def test_no_folder_is_no_calibration(tmp_path: Path) -> None:
    assert file.use(tmp_path / "never made") == []


def test_the_cache_can_be_elsewhere() -> None:
    assert file.default_folder({"SHOAL_CACHE": "/data/cache"}) == Path("/data/cache/calibration")
    assert file.default_folder({}) == Path("~/.cache/shoal/calibration").expanduser()
