"""What a newcomer reads: a README of one screen, a picture that a command draws, claims with proofs, plain words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs import files

from shoal.cli.main import app, main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
STATUS = (ROOT / "docs" / "status.md").read_text()
# Words for people who are not there: name the rank, the process, the user, the caller.
VAGUE = re.compile(r"\b(nobody|somebody|whoever|anybody|everybody)\b", re.IGNORECASE)


def test_the_readme_is_one_screen() -> None:
    assert len(README.splitlines()) <= 50
    assert len(re.findall(r"!\[", README)) == 2
    assert len(re.findall(r"^\d\. \[", README, re.MULTILINE)) == 5
    # To begin with, and from conversations to an answer.
    blocks = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert [len(block.splitlines()) for block in blocks] == [2, 3]


def test_the_picture_is_what_its_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^`shoal (schedule .*) --svg (.*)`$", INDEX, re.MULTILINE)
    assert f"]({command[1].removeprefix('docs/')})" in INDEX
    with pytest.raises(SystemExit) as left:
        main([*command[0].split(), "--svg", str(tmp_path / "drawn.svg")])
    assert left.value.code == 0
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / command[1]).read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/status.md"])
def test_every_command_exists(page: str) -> None:
    named = re.findall(
        r"\bshoal ([a-z]+)", re.sub(r"shoal (is|on|with|data)\b", "", (ROOT / page).read_text())
    )
    assert named and set(named) <= set(app)


def test_every_claim_says_how_it_was_verified_with_files_that_exist() -> None:
    rows = [line for line in STATUS.splitlines() if line.startswith("| ") and not line.startswith("| what |")]
    assert len(rows) >= 30
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 2 and all(len(cell.strip()) > 2 for cell in cells), row
    for path in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", STATUS):
        assert (ROOT / path).exists(), path


def test_the_architecture_names_every_file_once() -> None:
    """If not: ``python -m tests.docs.files``."""
    named = [path for path, _ in files.listed(files.PAGE.read_text())]
    assert sorted(named) == sorted(files.existing())


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name
)
def test_pages_name_who_acts(page: Path) -> None:
    assert VAGUE.findall(page.read_text()) == []


def test_the_source_names_who_acts() -> None:
    found = [path for path in files.existing() if VAGUE.search((files.SOURCE / path).read_text())]
    assert found == []
