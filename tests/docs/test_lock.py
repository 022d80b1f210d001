"""What `make setup` and `make test-system` install: complete, of versions that are allowed, and naming no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "requirements" / "dev.lock").read_text()
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", TEXT, re.MULTILINE))


def test_every_line_is_a_version_or_its_hash() -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    form = re.compile(r"[a-z0-9-]+==[\w.+!-]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert lines and all(form.fullmatch(line) for line in lines)
    for name in LOCKED:
        assert re.search(rf"^{name}==\S+ \\\n    --hash", TEXT, re.MULTILINE), name


def test_what_is_declared_is_locked_but_for_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [Requirement(text) for text in (*project["dependencies"], *extras["hf"], *extras["dev"])]
    missing = {canonicalize_name(one.name) for one in declared} - LOCKED.keys()
    assert missing == {"torch"}, "make lock writes it anew"
    for one in declared:
        if (version := LOCKED.get(canonicalize_name(one.name))) is not None:
            assert one.specifier.contains(version), f"{one} but {version}: make lock writes it anew"
    # What installs it and what builds Shoal without a look at the network.
    assert {"pip", "setuptools"} <= LOCKED.keys()


def test_what_system_tests_need_is_constrained_to_versions_that_are_allowed() -> None:
    lines = (ROOT / "requirements" / "system.txt").read_text().splitlines()[1:]
    versions = dict(line.split("==") for line in lines)
    assert not versions.keys() & LOCKED.keys() and not any(name.startswith("torch") for name in versions)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for text in (*extras["system"], *extras["track"]):
        one = Requirement(text)
        if one.name != "shoal":
            version = (versions | LOCKED)[canonicalize_name(one.name)]
            assert one.specifier.contains(version), f"{one} but {version}: make lock writes it anew"
