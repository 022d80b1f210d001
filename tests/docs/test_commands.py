"""Every ``shoal`` command that a page shows: the command line takes it, and a test runs it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.command import Capture, shoal_

from shoal.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOAL = re.compile(r"^(?:\$ |\.venv/bin/)?shoal (.*)$|^(?:torchrun|srun|mpirun) .*?shoal (.*)$", re.MULTILINE)
# What is written for a reader to put something in its place; and what stands for a list of forms.
FORMS = re.compile(r"\[--|…")

# Where each command is run, with options such as the pages': a page's own paths and sizes are not those of a test.
RUN_BY = {
    "bench comm": "tests/cli/test_bench_comm.py",
    "bench plan": "tests/cli/test_bench.py",
    "bench step": "tests/prove/bench/test_step.py",
    "cancel": "tests/launch/jobs/test_jobs.py",
    "chaos": "tests/prove/chaos/test_campaign.py",
    "checkpoint export": "tests/train/huggingface/test_export.py",
    "checkpoint import": "tests/train/huggingface/test_import.py",
    "checkpoint ls": "tests/cli/test_checkpoint.py",
    "checkpoint verify": "tests/cli/test_checkpoint.py",
    "config show": "tests/cli/test_main.py",
    "data prepare": "tests/train/data/test_summary.py",
    "doctor": "tests/cli/test_json_problems.py",
    "dryrun": "tests/cli/test_dryrun.py",
    "evaluate": "tests/cli/test_evaluate.py",
    "generate": "tests/cli/test_generate.py",
    "init": "tests/cli/test_init.py",
    "launch": "tests/launch/jobs/test_slurm.py",
    "logs": "tests/launch/jobs/test_jobs.py",
    "ls": "tests/launch/jobs/test_jobs.py",
    "parity": "tests/prove/test_parity.py",
    "plan": "tests/cli/test_plan.py",
    "profile": "tests/cli/test_profile.py",
    "replay": "tests/prove/test_replay.py",
    "report": "tests/report/test_report.py",
    "status": "tests/launch/jobs/test_jobs.py",
    "train": "tests/train/test_branch.py",
    "tune": "tests/docs/test_tune.py",
    "watch": "tests/report/test_watch.py",
}


def shown() -> Iterator[tuple[str, list[str]]]:
    """Every command in a block of its own, with the page that shows it."""
    for page in PAGES:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            for own, launched in SHOAL.findall(block.replace("\\\n", " ")):
                line = own or launched
                if not FORMS.search(line):
                    # What the last lines of a run say of a command stands behind it without a mark.
                    words = shlex.split(re.sub(r"  [a-z].*", "", line), comments=True)
                    yield page.relative_to(ROOT).as_posix(), words


SHOWN = list(shown())


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 90
    assert {words[0] for _, words in SHOWN} >= {
        "plan",
        "train",
        "parity",
        "dryrun",
        "report",
        "watch",
        "launch",
    }


@pytest.mark.parametrize(
    ("page", "words"), SHOWN, ids=lambda one: one if isinstance(one, str) else " ".join(one)
)
def test_the_command_line_takes_it(page: str, words: list[str]) -> None:
    """Every flag exists and takes such a value. A command that pages show first needs a test that runs it."""
    app.parse_args(words, exit_on_error=False, print_error=False)
    name = " ".join(words[: 2 if words[0] in ("bench", "checkpoint", "config", "data") else 1])
    test = ROOT / RUN_BY[name]
    for word in name.split():
        assert re.search(rf"[\"' ]{word}[\"' ]", test.read_text(encoding="utf-8")), (page, name, test)


@pytest.mark.long
@pytest.mark.parametrize(
    "line", sorted({shlex.join(words) for _, words in SHOWN if words[0] in ("plan", "schedule")})
)
def test_plans_on_the_pages_are_made(
    line: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.log").write_text("# nccl-tests print their table here\n")
    code, out, err = shoal_(capsys, *shlex.split(line))
    if "links.log" in line:
        assert (code, "links.log" in err) == (2, True)
    else:
        assert (code, bool(out)) == (0, True), err
