"""A compiled run as a user starts one: told so, close to an eager one, compiled once, and the same bits again."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from tests.conftest import Train, after_steps

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.launch.compile_cache import FOLDER, private_folder, use_compile_cache
from shoal.launch.local import compile_line
from shoal.observe.flight_recorder import FlightReader
from shoal.plan.resolve import resolve
from shoal.train.run_directory import RunDirectory

# No evaluation: its graph would be one more to compile, which on a CPU takes half a minute.
OPTIONS = {"recipe__steps": 60, "evaluate__batches": 0, "recipe__dropout": 0.1}


@pytest.mark.system  # the compiler calls the machine's own for C++, and that takes a minute
def test_killed_and_continued_to_the_same_bits(
    train: Train, tmp_path: Path, warm_server: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The compiler that is used on every machine. The second run, and the restart in it, find all graphs on disk."""
    eager = train("eager", **OPTIONS)
    assert "compil" not in capfd.readouterr().err
    whole = train("whole", compile__enabled=True, **OPTIONS)
    assert "compiling, about 20 s" in capfd.readouterr().err
    assert whole.rows[0]["compiled"]["misses"] > 0
    log = whole.directory.log(0).read_text()
    assert "eager" not in log and "pickle" not in log
    cache = warm_server / "compiled"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {"aotautograd", "fxgraph", "precompiled_headers"} <= {path.name for path in cache.iterdir()}
    # Of the first step alone: after it, a difference in the last bit grows.
    for name in ("loss", "grad_norm"):
        assert whole.rows[0][name] == pytest.approx(eager.rows[0][name], rel=1e-6)
    assert whole.losses == pytest.approx(eager.losses, rel=1e-3)

    run = tmp_path / "killed"

    def kill() -> None:
        snapshot = FlightReader(RunDirectory(run).flight(0)).look()
        assert snapshot is not None
        os.kill(snapshot.pid, signal.SIGKILL)

    with after_steps(run, 5, kill):
        killed = train("killed", compile__enabled=True, **OPTIONS)
    kinds = [json.loads(line)["kind"] for line in killed.directory.faults.read_text().splitlines()]
    assert kinds == ["killed", "restart"]
    found = [row["compiled"] for row in killed.rows if "compiled" in row]
    assert found and all(one["hits"] > 0 and one["misses"] == 0 for one in found)
    assert killed.hexes == whole.hexes
    assert killed.tensors() == whole.tensors()


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, None),
        ({"compile": {"enabled": True}}, "compiling, about 20 s"),
        ({"compile": {"enabled": True}, "run": {"strict": True}}, "not compiled: strict mode runs eager"),
        ({"compile": {"enabled": True}, "layout": "pp=2,schedule=zb,micro=2"}, "compiling, about 20 s"),
        (
            {"cluster": {"on": "2xH200"}, "layout": "pp=2,schedule=zb,micro=2"},
            "not compiled: schedule=zb splits backward passes",
        ),
        ({"cluster": {"on": "1xH200"}}, "compiling, about 20 s"),
        ({"cluster": {"on": "1xH200"}, "compile": {"enabled": False}}, None),
        ({"cluster": {"on": "1xH200"}, "recipe": {"precision": "fp64"}}, None),
    ],
)
def test_what_a_user_is_told(config: dict, line: str | None) -> None:
    base = {"cluster": {"on": "2xcpu"}, "layout": str(Layout())}
    said = compile_line(resolve(Config.model_validate({**base, **config})))
    assert said is None if line is None else (said or "").startswith(line)


def test_the_cache_is_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"SHOAL_CACHE": str(tmp_path / "shoal"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    use_compile_cache(1, environment)
    folder = tmp_path / "shoal" / "compiled"
    assert environment[FOLDER] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(folder) == folder
    # Where others can write, or someone has put a link, it is not used.
    folder.chmod(0o770)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for refused in (folder, link):
        other = private_folder(refused)
        assert other not in (refused, tmp_path)
        assert stat.S_IMODE(other.stat().st_mode) == 0o700
        other.rmdir()
        assert "compiled code is not kept for later runs" in capsys.readouterr().out
    folder.chmod(0o700)
    # What the user has chosen holds; what torch has chosen, as it was imported, does not.
    theirs = str(Path(tempfile.gettempdir()) / "torchinductor_someone")
    for given, used in (("/chosen", "/chosen"), (theirs, str(folder))):
        chosen = {**environment, FOLDER: given}
        use_compile_cache(1, chosen)
        assert chosen[FOLDER] == used
