"""Every command that a page shows is run: here, page by page and small, or by a test that takes its words from there.

A command that is added to a page is run by that. If it cannot be, it needs a test of its own (``ELSEWHERE``) or a
reason (``NOT_HERE``); without either, tests here fail.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tests.cli.command import Capture, shoal_
from tests.docs import questions
from tests.docs.sessions import ALONE, finished_run, lay_out, small
from tests.docs.shown import ROOT, Shown, shown
from tests.docs.test_stacks import MOVED

from shoal.cli.main import app, main

# Taken from the page and run by another test, which has what it needs: a cluster, a launcher, files of its own. Each
# asks ``words_of`` for these very words.
ELSEWHERE = {
    ("docs/clusters.md", "shoal status"): "tests/launch/jobs/test_jobs.py",
    ("docs/clusters.md", "shoal logs"): "tests/launch/jobs/test_jobs.py",
    ("docs/clusters.md", "shoal cancel runs"): "tests/launch/jobs/test_jobs.py",
    ("docs/clusters.md", "shoal ls"): "tests/launch/jobs/test_jobs.py",
    ("docs/clusters.md", "srun -N4"): "tests/launch/jobs/test_slurm.py",
    ("docs/launchers.md", "srun --ntasks-per-node=8"): "tests/launch/jobs/test_slurm.py",
    ("docs/launchers.md", "srun --ntasks-per-node=1"): "tests/launch/jobs/test_slurm.py",
    ("docs/launchers.md", "torchrun"): "tests/launch/adopt/test_adopted.py",
    ("docs/launchers.md", "mpirun"): "tests/launch/adopt/test_mpirun.py",
    ("docs/launchers.md", "shoal train run.toml --nodes 2"): "tests/launch/nodes/test_meet.py",
    ("docs/library.md", "torchrun"): "tests/launch/test_library.py",
    ("docs/library.md", "python script.py"): "tests/launch/test_library.py",
    ("docs/nodes.md", "shoal train"): "tests/launch/nodes/processes.py",
    ("docs/chaos.md", "shoal chaos"): "tests/prove/chaos/test_campaign.py",
    ("docs/strategies/offload.md", "shoal chaos"): "tests/prove/chaos/test_campaign.py",
    ("docs/tune.md", "shoal tune examples/tiny.toml"): "tests/docs/test_tune.py",
    ("docs/huggingface.md", "shoal evaluate runs/NAME --tasks"): "tests/cli/test_tasks.py",
}
# What no test runs, and why.
NOT_HERE = {
    "all_reduce_perf": "NVIDIA's, on GPUs; a file as it prints is read by the next command",
    "mpirun -np 32 all_reduce_perf": "the same on four nodes",
    "python benchmarks/offload.py": "it measures a GPU",
    "python benchmarks/scratch_update.py": "it measures a disk, and takes minutes",
    "python benchmarks/offload_peers.py": "DeepSpeed is in an environment of its own",
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py": "Megatron's: shoal init reads it, and runs nothing of it",
    "make test": "it runs these tests",
}
# What takes minutes is run small with the others, and whole by `make test-full`.
LARGE = ("--stages", "--layouts full", "--layouts 4d", "dryrun llama3-8b", "dryrun mixtral-8x7b")
PAGES = sorted({one.page for one in shown()})
NEEDS_NO_FILES = ("plan", "schedule")


def is_run_elsewhere(one: Shown) -> bool:
    if one.page == "docs/questions.md":
        command = one.line.removeprefix("shoal ")
        return command in {question.command for question in questions.questions()}  # test_questions.py
    if one.page == "docs/stacks.md" and one.words[:2] == ("shoal", "init"):
        return shlex.join(one.words[1:]) in {command for _, _, command, _ in MOVED}  # test_stacks.py
    return any(one.page == page and one.line.startswith(start) for page, start in ELSEWHERE)


def reason_not_here(one: Shown) -> str:
    return next((reason for start, reason in NOT_HERE.items() if one.line.startswith(start)), "")


def is_command(one: Shown) -> bool:
    """In a sentence a command's name may stand alone, with a flag, or with a word in capitals for any value."""
    placeholders = any(re.fullmatch(r"[A-Z|]{3,}(\.\w+)?", word) for word in one.words)
    whole = any(word == "--on" or re.search(r"[=/]|\.toml$", word) for word in one.words)
    return one.block or (whole and not placeholders)


# The first page that shows a command, as it is run.
FIRST = {
    shlex.join(small(one.shoal)): one.page for one in reversed([*shown()]) if one.shoal and is_command(one)
}


def test_the_pages_show_commands() -> None:
    commands = [one for one in shown() if is_command(one)]
    assert len({one.words for one in commands if one.block}) > 120
    assert len({one.words for one in commands if not one.block}) > 40
    first = {one.shoal[0] for one in commands if one.shoal}
    assert first == {*app} - {"--help", "-h", "--version", "schedule"} | {"schedule"}, (
        "a command no page shows"
    )


def test_what_is_run_elsewhere_is_taken_from_its_page() -> None:
    for (page, start), test in ELSEWHERE.items():
        assert any(one.page == page and one.line.startswith(start) for one in shown()), (page, start)
        assert f'words_of("{page}", "{start}")' in (ROOT / test).read_text(encoding="utf-8"), (page, start)
    for start in NOT_HERE:
        assert any(one.line.startswith(start) for one in shown()), start


@pytest.mark.parametrize(
    "one", sorted({one.words: one for one in shown()}.values()), ids=lambda one: one.line
)
def test_the_command_line_takes_it(one: Shown) -> None:
    """Every command and every flag exists, and takes such a value."""
    words = one.shoal
    if words is None:
        return
    if is_command(one):
        app.parse_args(words, exit_on_error=False, print_error=False)
        return
    name, called = [], app
    for word in words:
        if word.startswith("-") or word not in called:
            break
        called = called[word]
        name.append(word)
    assert name or words == ("--version",), one
    flags = {word.split("=")[0] for word in words if word.startswith("--")} - {"--version"}
    if flags:
        known = {flag for argument in called.assemble_argument_collection() for flag in argument.names}
        assert flags <= known, one


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(
    page: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = {one.words: one for one in shown() if one.page == page and is_command(one)}.values()
    typed = [one for one in mine if not is_run_elsewhere(one) and not reason_not_here(one)]
    files = {"--links", "--svg"}
    if any(one.shoal is None or one.shoal[0] not in NEEDS_NO_FILES or files & {*one.words} for one in typed):
        lay_out(tmp_path)
    elif typed:
        for name in ("benchmarks", "examples"):
            (tmp_path / name).symlink_to(ROOT / name)
    for one in typed:
        if one.words[:2] == ("python", "benchmarks/parity.py"):
            # It calls the command, and keeps in the repository what that prints.
            run_shoal(small(("parity", *one.words[2:])), capsys, tmp_path)
        elif one.shoal is None:
            run_other(one, tmp_path, monkeypatch)
        elif one.shoal[0] not in ALONE or FIRST[shlex.join(small(one.shoal))] == page:
            run_shoal(small(one.shoal), capsys, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    sorted({one.line for one in shown() if is_command(one) and any(word in one.line for word in LARGE)}),
    ids=str,
)
def test_what_takes_minutes(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(line)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main(words) if program == "shoal" else runpy.run_path(words[0], run_name="__main__")
    assert not ended.value.code


def run_shoal(words: list[str], capsys: Capture, place: Path) -> None:
    made = [word for word in words if re.match(r"runs/[\w-]+", word)]
    if words[0] == "train" and "--run" not in words:
        name = "tiny" if "examples/tiny.toml" in words else "NAME"
        # A run's checkpoints stay where they began to be.
        name = "stored" if any(word.startswith("checkpoint.to=") for word in words) else name
        words = [*words, "--run", f"runs/{name}"]
    elif words[0] not in ("train", "chaos", "profile"):
        for path in made:
            finished_run(place, "/".join(path.split("/")[:2]))
    # In place of an object store, a directory by its URL.
    words = [word.replace("checkpoint.to=store", f"checkpoint.to=file://{place}/store") for word in words]
    if "--branch" in words:
        # Of another run with the same model and batch.
        shutil.copytree(place / "runs" / "NAME", place / "runs" / "a", dirs_exist_ok=True)
    if words[0] == "init":
        (place / words[1]).unlink(missing_ok=True)
    if "--export" in words:
        (place / "ds_config.json").unlink(missing_ok=True)
    with left_by_ctrl_c() if "--web" in words else contextlib.nullcontext():
        code, out, err = shoal_(capsys, *words, *(["--port", "0"] if "--web" in words else []))
    # A profile or a comparison of speeds may find fault with this busy machine, not with the command.
    assert code == 0, (words, out[-2000:], err[-4000:])
    assert out or err, words


@contextlib.contextmanager
def left_by_ctrl_c() -> Iterator[None]:
    """The page of ``--web`` is open until a reader leaves."""
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    yield
    timer.cancel()


def run_other(one: Shown, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    match one.words:
        case ("make", target):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ("pip", "install", needed):
            # Installing asks the network: that it exists by this name is what a page can get wrong.
            named = re.fullmatch(r"shoal\[(\w+)\]", needed)
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert named[1] in extras if named else distribution(needed), needed
        case ("python", "-m", "pytest", *paths):
            if "-k" in paths:
                chosen = paths.index("-k")
                assert paths[chosen + 1] in (ROOT / paths[0]).read_text(), paths
                del paths[chosen : chosen + 2]
            assert all((ROOT / path).exists() for path in paths), paths  # and so run by `make test`
        case ("python", "-c", code):
            exec(code, {})
        case ("tensorboard", "--logdir", folder):
            assert [*Path(folder).rglob("events*")]
        case _:
            raise AssertionError(f"nothing runs this: {one}")
