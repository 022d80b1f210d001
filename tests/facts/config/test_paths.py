"""Paths in a config: a file's are relative to the file, those of --set to where the command is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.facts.config import Config
from shoal.facts.config.file import load, write
from shoal.facts.config.paths import of_any_place, seen_from, with_absolute_paths
from shoal.plan.resolve import resolve
from shoal.train.data.sources import find_files
from shoal.train.run_directory import WEIGHTS_HASH, RunDirectory, identity

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config in a folder with all that it names beside it; the working directory is another one."""
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for place in (folder / "texts", folder / "weights", elsewhere):
        place.mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("a text")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "small.json").write_bytes((EXAMPLES / "small.json").read_bytes())
    (folder / "cluster.toml").write_text('device = "H100"\nnodes = 2\n')
    (folder / "weights" / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (folder / "run.toml").write_text(
        '[model]\npath = "small.json"\ninit_from = "./weights"\n'
        '[data]\nsource = "texts/*.txt"\ntokenizer = "tokenizer.json"\n'
        '[cluster]\non = "cluster.toml"\n'
    )
    monkeypatch.chdir(elsewhere)
    return folder


@pytest.mark.parametrize("relative", [False, True])
def test_a_files_paths_are_relative_to_it(project: Path, relative: bool) -> None:
    path = Path(os.path.relpath(project / "run.toml")) if relative else project / "run.toml"
    config = load(path).config
    assert config.model.path == str(project / "small.json")
    assert config.model.init_from == str(project / "weights")
    assert config.data.source == str(project / "texts" / "*.txt")
    assert config.data.tokenizer == str(project / "tokenizer.json")
    assert config.cluster.on == str(project / "cluster.toml")
    assert [file.path for file in find_files(config.data.source)] == [project / "texts" / "a.txt"]
    assert config.run.dir == "runs" and config.data.cache == Config().data.cache


def test_those_of_set_are_relative_to_the_working_directory(project: Path) -> None:
    here = Path.cwd()
    config = load(project / "run.toml", ["data.source=../other/*.txt", 'model={path="m.json"}']).config
    assert config.data.source == str(here.parent / "other" / "*.txt")
    assert config.model.path == str(here / "m.json")
    assert load(None, ["data.tokenizer=t.json"]).config.data.tokenizer == str(here / "t.json")


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ('[data]\nsource = "stdlib"', "source", "stdlib"),
        ('[data]\ntokenizer = "bytes"', "tokenizer", "bytes"),
        ('[data]\nsource = "/a/b.txt"', "source", "/a/b.txt"),
        ('[data]\nsource = "~/b.txt"', "source", "~/b.txt"),
    ],
)
def test_words_and_whole_paths_stay(project: Path, written: str, key: str, value: str) -> None:
    (project / "other.toml").write_text(written)
    assert getattr(load(project / "other.toml").config.data, key) == value


def test_a_preset_is_no_path_also_where_a_directory_has_its_name(project: Path) -> None:
    (project / "tiny").mkdir()
    for text, found in (("tiny", "tiny"), ("8xcpu", "8xcpu"), ("local", "local")):
        (project / "other.toml").write_text(f'[model]\npreset = "{text}"\n[cluster]\non = "{text}"\n')
        config = load(project / "other.toml").config
        assert (config.model.preset, config.cluster.on) == (found, found)
    (project / "other.toml").write_text('[model]\npreset = "small.json"\n')
    assert resolve(load(project / "other.toml", ["cluster.on=1xcpu"]).config).model.name == "small"


def test_a_directory_with_signs_of_a_pattern_in_its_name(project: Path) -> None:
    odd = project / "run[1]*"
    project.joinpath("texts").rename(project / "kept")
    (odd / "texts").mkdir(parents=True)
    (odd / "texts" / "b.txt").write_text("another")
    for source in ("texts/*.txt", "texts/b.txt"):
        (odd / "run.toml").write_text(f'[data]\nsource = "{source}"\n')
        found = find_files(load(odd / "run.toml").config.data.source)
        assert [file.path for file in found] == [odd / "texts" / "b.txt"]


def test_a_parent_is_the_real_one(project: Path) -> None:
    (project / "configs").mkdir()
    (project / "configs" / "run.toml").write_text('[data]\nsource = "../texts/a.txt"\n')
    link = Path("link")
    link.symlink_to(project / "configs")
    assert load(link / "run.toml").config.data.source == str(project / "texts" / "a.txt")


def test_the_config_of_a_run_works_from_anywhere(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolve(load(project / "run.toml", ["cluster.on=1xcpu", "run.name=x"]).config)
    run = RunDirectory(Path("runs") / "x")
    run.path.mkdir(parents=True)
    run.write_start(job, {}, {})
    config, directory = run.config.absolute(), run.path.absolute()
    monkeypatch.chdir(tmp_path)
    again = load(config).config
    assert (again.model, again.data) == (job.config.model, job.config.data)
    assert Path(again.run.dir) / again.run.slug == directory


def test_a_program_may_leave_its_paths_relative(project: Path) -> None:
    config = Config.model_validate({"data": {"source": "texts/*.txt"}, "model": {"path": "small.json"}})
    found = with_absolute_paths(config)
    assert found.data.source == str(Path.cwd() / "texts" / "*.txt")
    assert load(None).config == with_absolute_paths(load(None).config)
    assert write(found) == write(with_absolute_paths(found))


@pytest.mark.parametrize("changed", [False, True])
def test_it_stays_the_same_run_where_config_data_and_weights_were_moved(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    overrides = ["cluster.on=1xcpu"]
    job = resolve(load(project / "run.toml", overrides).config)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    began = {"identity": identity(job, "tokens"), "model": job.model.model_dump(mode="json")}
    run.write_start(job, began, {})
    run.metrics.write_text('{"step": 1}\n')
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "moved"
    project.rename(moved)
    if changed:
        (moved / "weights" / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 64)
    job = resolve(load(moved / "run.toml", overrides).config)
    if not changed:
        run.check_continues(job, "tokens")
        return
    with pytest.raises(Exception, match=r"another run: model\.init_from") as refused:
        run.check_continues(job, "tokens")
    assert WEIGHTS_HASH in str(refused.value)


def test_weights_that_are_gone_are_known_by_their_place(project: Path, tmp_path: Path) -> None:
    job = resolve(load(project / "run.toml", ["cluster.on=1xcpu"]).config)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    model = job.model.model_dump(mode="json")
    run.write_start(job, {"identity": identity(job, "tokens"), "model": model}, {})
    run.metrics.write_text('{"step": 1}\n')
    (project / "weights" / "model.safetensors").unlink()
    run.check_continues(job, "tokens")
    (project / "weights").rename(project / "others")
    other = resolve(
        load(project / "run.toml", ["cluster.on=1xcpu", f"model.init_from={project}/others"]).config
    )
    with pytest.raises(Exception, match=r"another run: model\.init_from was"):
        run.check_continues(other, "tokens")


def test_nodes_agree_whose_mounts_differ(project: Path, tmp_path: Path) -> None:
    here = load(project / "run.toml").config.model_dump(mode="json")
    project.rename(tmp_path / "mount")
    there = load(tmp_path / "mount" / "run.toml").config.model_dump(mode="json")
    assert here != there and of_any_place(here) == of_any_place(there)
    other = load(tmp_path / "mount" / "run.toml", ["data.source=b/*.jsonl"]).config.model_dump(mode="json")
    assert of_any_place(other) != of_any_place(there)


def test_a_path_for_a_config_elsewhere(project: Path) -> None:
    assert seen_from(project, "m/config.json") == "../elsewhere/m/config.json"
    assert seen_from(Path(), "m") == "m"
    assert seen_from(project, "/m") == "/m"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_find_what_lies_beside_them(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(example).config
    if config.model.init_from is None:
        assert resolve(config).model.layers > 0
    else:
        assert Path(config.model.init_from).parent.parent == EXAMPLES
