"""The wheel holds everything that the sources have, and its command works where only its needs are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def wheel(into: Path) -> Path:
    """Built from a copy of what setuptools reads, so that no build directory is left beside the sources."""
    copy = into / "checkout"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in SOURCE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(into), str(copy)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, timeout=300)
    (built,) = into.glob("*.whl")
    return built


def test_every_file_that_is_no_python_is_declared() -> None:
    """A wheel has Python files by itself; others only if pyproject.toml names them."""
    declared = PROJECT["tool"]["setuptools"]["package-data"]["shoal"]
    named = {path for pattern in declared for path in SOURCE.glob(pattern)}
    others = {
        path
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert others and others == {path for path in named if path.is_file()}


@pytest.mark.system
def test_the_wheel_is_complete_and_its_command_plans(tmp_path: Path) -> None:
    built = wheel(tmp_path)
    assert re.match(rf"shoal-{re.escape(shoal.__version__)}-py3-none-any", built.name)
    with zipfile.ZipFile(built) as archive:
        packed = {name for name in archive.namelist() if name.startswith("shoal/")}
    sources = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == sources
    # Beside what this environment has installed, torch above all, which would take minutes to install again.
    home = tmp_path / "environment"
    venv.create(home, with_pip=True, symlinks=True)
    packages = next(path for path in map(Path, sys.path) if (path / "pydantic").is_dir())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(built)]
    subprocess.run(install, check=True, timeout=300, env=environment)

    def run(*arguments: str) -> str:
        return subprocess.run(
            [str(home / "bin" / "shoal"), *arguments],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout

    where = [str(python), "-c", "import shoal; print(shoal.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(home)
    assert shoal.__version__ in run("--version")
    assert "tiny on 4xcpu" in run("plan", "tiny", "--on", "4xcpu", "--seq", "128", "--batch", "16")
