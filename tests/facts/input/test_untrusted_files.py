"""Files that others wrote: whatever is in them, the answer is one line, soon, and in little memory."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shoal.facts.calibration import file as calibrationfile
from shoal.facts.cluster import notation
from shoal.facts.config.file import load
from shoal.facts.input.untrusted_files import (
    DEEPEST,
    LARGEST_JSON,
    LARGEST_SETTINGS,
    check_plain,
    parse_json,
    parse_toml,
    read_json,
)
from shoal.facts.model import presets
from shoal.facts.problem import MOST_PROBLEMS, BadInput, Problem
from shoal.plan.importers import read_foreign

SECONDS = 10  # of this process: generous, for what took minutes or did not end


@pytest.fixture(autouse=True)
def bounded() -> Any:
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


JSON = {
    "deep": deep(100_000),
    "deeper than Python's own limit is from here": deep(500),
    "digits": "9" * 100_000,
    "cut off": '{"a": ',
    "not text": "\ud800",
}


@pytest.mark.parametrize("kind", JSON)
def test_json_that_no_code_could_walk_through(kind: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(JSON[kind].encode(errors="surrogatepass"))
    assert parse_json(deep(DEEPEST)) is not None


TOML = {
    "a key of many parts": "a." * 100_000 + "a = 1",
    "a table of many parts": "[" + "a." * 100_000 + "a]",
    "quoted parts": '"a" . ' * 40_000 + "a = 1",
    "deep arrays": "a = " + deep(50_000),
    "digits": "a = " + "9" * 200_000,
}


@pytest.mark.parametrize("kind", TOML)
def test_toml_that_takes_for_ever(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_toml(TOML[kind])
    path = tmp_path / "hostile.toml"
    path.write_text(TOML[kind])
    for read in (load, lambda path: notation.find(str(path))):
        with pytest.raises(BadInput, match=r"hostile.toml"):
            read(path)
    assert parse_toml(".".join("a" * DEEPEST) + " = 1")
    assert parse_toml(f'a = "{"word. " * 50}"')


def test_overrides_have_limits_too() -> None:
    for override in (
        "data.mix." + "a." * 5000 + "a=1",
        "data.mix=" + deep(5000),
        "recipe.lr={" + "a." * 5000 + "a=1}",
    ):
        with pytest.raises(BadInput):
            load(None, [override])


def test_a_file_is_read_no_further_than_it_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(ValueError, match="longer than 16 MiB"):
        read_json(path)
    with pytest.raises(BadInput, match=r"config.json(.|\n)*longer than 16 MiB"):
        presets.find(str(path))
    for name in ("a.toml", "a.json", "a.yaml"):
        path.rename(path := tmp_path / name)
        with pytest.raises(BadInput, match=rf"{name}(.|\n)*longer than 256 KiB"):
            load(path) if name == "a.toml" else read_foreign(path)
    with pytest.raises(BadInput, match="longer than 256 KiB"):
        notation.find(str(path.rename(tmp_path / "a.toml")))
    (tmp_path / "a.toml").rename(tmp_path / "cpu.json")
    (warning,) = calibrationfile.use(tmp_path)
    assert "longer than 16 MiB" in warning
    assert tracemalloc.get_traced_memory()[1] < 4 * LARGEST_JSON
    tracemalloc.stop()
    assert LARGEST_SETTINGS < LARGEST_JSON


def test_yaml_that_stands_for_more_than_it_says(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))]
    path = tmp_path / "accelerate.yaml"
    for text in (
        "\n".join(["distributed_type: NO", *lines]),
        "distributed_type: &a [*a]",
        "a: " + deep(3000),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"accelerate.yaml is not valid YAML"):
            read_foreign(path)
    shared: list[Any] = []
    for _ in range(60):
        shared = [shared, shared, shared]
    with pytest.raises(ValueError, match=r"stands for more|nested deeper"):
        check_plain(shared)


def test_a_million_mistakes_are_told_in_a_few() -> None:
    told = BadInput([Problem("x" * 100_000, "y" * 100_000)] * 100_000)
    assert len(told.problems) == MOST_PROBLEMS + 1 and len(str(told)) < 1_000_000
    assert told.problems[-1].what == f"and {100_000 - MOST_PROBLEMS} more like these"


def test_what_another_process_found_keeps_its_fix() -> None:
    import pickle

    found = BadInput([Problem("one", "this"), Problem("two", "that")])
    assert pickle.loads(pickle.dumps(found)).problems == found.problems
