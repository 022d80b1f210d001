"""``make lock``: writes ``dev.lock``, the development environment with the hash of every file that pip may install.

Versions are what pip chooses today for ``.[hf,dev]`` on Python 3.11; hashes are those of every wheel for that Python,
on any platform, and of the source, as the package index that pip is set to lists them. Torch is left to its range in
``pyproject.toml``, with what it alone needs: its builds differ by device, and come from other places.

And ``system.txt``, the versions alone of what ``make test-system`` needs beside that, as constraints: with them pip has
nothing to search for, which takes it minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pip._internal.models.index import PyPI
from pip._vendor.packaging.utils import (
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

HERE = Path(__file__).parent
PYTHON = (3, 11)
# Beside the environment itself: what installs it, and what builds Shoal.
TOOLS = ("pip", "setuptools>=77")
NOT_LOCKED = re.compile(r"shoal|torch|triton|pytorch-triton.*|nvidia-.*|cuda-.*")
SYSTEM_HEAD = "# Constraints of make test-system's packages on Python 3.11. Written by make lock.\n"
HEAD = """\
# The development environment on Python 3.11 but for torch; make setup installs it. Written by make lock.
"""


def chosen(extras: str, constraints: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names and versions that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report, fixed = Path(folder) / "report.json", Path(folder) / "fixed.txt"
        fixed.write_text("".join(f"{name}=={version}\n" for name, version in (constraints or {}).items()))
        ask = [*pip(), "install", "-qq", "--dry-run", "--ignore-installed", "--report", str(report)]
        ask += ["--constraint", str(fixed)]
        subprocess.run([*ask, f"{HERE.parent}[{extras}]", *TOOLS], check=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    versions = {canonicalize_name(one["name"]): one["version"] for one in found}
    return {name: versions[name] for name in sorted(versions) if not NOT_LOCKED.fullmatch(name)}


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of every file of a version that Python 3.11 can install."""
    request = urllib.request.Request(  # noqa: S310 (whatever index the user has set)
        f"{index()}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+html, text/html;q=0.5"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        page = answer.read().decode()
    found = set()
    for link in re.findall(r'href="([^"]+)"', page):
        url = urlsplit(unescape(link))
        digest = re.fullmatch(r"sha256=([0-9a-f]{64})", url.fragment)
        if digest and fits(unquote(url.path).rpartition("/")[2], version):
            found.add(digest[1])
    if not found:
        sys.exit(f"the index lists no file of {name} {version} with a hash")
    return sorted(found)


def fits(file: str, version: str) -> bool:
    """Whether a file is of this version, and for Python 3.11."""
    try:
        if not file.endswith(".whl"):
            return str(parse_sdist_filename(file)[1]) == version
        _, of, _, tags = parse_wheel_filename(file)
    except ValueError:
        return False
    ours = any(
        tag.interpreter in ("cp311", "py3", "py311")
        or (tag.abi == "abi3" and re.fullmatch(r"cp3([2-9]|1[01])", tag.interpreter))
        for tag in tags
    )
    return ours and str(of) == version


def index() -> str:
    """The package index that pip is set to, which is named in no file of ours."""
    told = subprocess.run([*pip(), "config", "get", "global.index-url"], capture_output=True, text=True)
    configured = told.stdout.strip() if told.returncode == 0 else PyPI.simple_url
    return os.environ.get("PIP_INDEX_URL", configured).rstrip("/")


def pip() -> list[str]:
    return [sys.executable, "-m", "pip"]


def main() -> None:
    if sys.version_info[:2] != PYTHON:
        sys.exit("make lock needs Python 3.11, for which the lock is")
    lines, locked = [HEAD], chosen("hf,dev")
    for name, version in locked.items():
        each = [f"    --hash=sha256:{digest}" for digest in hashes(name, version)]
        lines.append(" \\\n".join([f"{name}=={version}", *each]) + "\n")
    (HERE / "dev.lock").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {HERE / 'dev.lock'}: {len(lines) - 1} packages")
    write_system(locked)


def write_system(locked: dict[str, str]) -> None:
    """What is locked stays as it is."""
    beside = chosen("hf,dev,system", locked)
    lines = [SYSTEM_HEAD, *(f"{name}=={version}\n" for name, version in beside.items() if name not in locked)]
    (HERE / "system.txt").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {HERE / 'system.txt'}: {len(lines) - 1} packages")


if __name__ == "__main__":
    main()
