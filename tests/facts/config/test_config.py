"""The config's schema: defaults for everything, a slug that is always one directory, words for every key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.facts.config import Config, ModelSection, RunSection, describe, find_field
from shoal.facts.config.file import flatten
from shoal.facts.problem import BadInput
from shoal.facts.recipe import Recipe


def test_everything_has_a_default_and_a_meaning() -> None:
    config = Config()
    assert config.layout == "auto"
    assert config.model.preset == "tiny"
    assert config.data.source == "stdlib"
    assert config.recipe == Recipe()
    keys = list(flatten(config))
    assert [key for key in keys if not describe(key)] == []
    for section in ("run", "model", "data", "recipe", "evaluate", "checkpoint", "compile", "tune", "fault"):
        assert any(key.startswith(f"{section}.") for key in keys)
    # Descriptions are printed on any terminal.
    assert all(describe(key).isascii() for key in keys)


def test_keys_are_looked_up_by_their_dotted_name() -> None:
    assert describe("model.lora.rank") == "rank of the adapters"
    for nothing in ("", "nothing", "run.nothing", "run.name.deeper", "recipe.lr.", ".lr"):
        assert find_field(nothing) is None
        assert describe(nothing) == ""


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("default", "default"),
        ("My run!", "my-run"),
        ("lr 0.001, seed 3", "lr-0.001-seed-3"),
        ("../x", "x"),
        ("..", "run"),
        (".", "run"),
        ("/", "run"),
        ("/etc/passwd", "etc-passwd"),
        ("a/../../b", "a-..-..-b"),
        ("~/x", "x"),
        (".hidden", "hidden"),
        ("!!!", "run"),
        (" ", "run"),
        ("a\nb\0c", "a-b-c"),
        ("Größe", "größe"),
        ("Gro\u0308ße", "größe"),
        ("実験 1", "実験-1"),
        ("x" * 500, "x" * 120),
        ("é" * 500, "é" * 60),
    ],
)
def test_slugs(name: str, slug: str) -> None:
    assert RunSection(name=name).slug == slug


@given(st.text(min_size=1))
def test_a_slug_is_always_one_directory(name: str) -> None:
    slug = RunSection(name=name).slug
    assert slug not in ("", ".", "..")
    assert Path(slug).name == slug
    assert not slug.startswith((".", "-", "~"))
    assert len(slug.encode()) <= 120
    assert RunSection(name=slug).slug == slug


def test_a_nameless_run_is_refused() -> None:
    with pytest.raises(ValidationError):
        RunSection(name="")


def test_layouts_are_kept_in_canonical_form() -> None:
    assert Config(layout=" auto\n").layout == "auto"
    assert Config(layout="tp=2 fsdp=4 schedule=zb").layout == "fsdp=4,tp=2"
    with pytest.raises(BadInput, match="unknown key 'foo'"):
        Config(layout="foo=1")


def test_weights_imply_their_shape_unless_one_is_named() -> None:
    assert ModelSection(init_from="m").path == "m"
    assert ModelSection(init_from="m", preset="gpt2").path is None
    assert ModelSection(init_from="m", path="other").path == "other"


def test_values_without_end_are_refused() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            Config.model_validate({"tune": {"bucket_mb": value}})
