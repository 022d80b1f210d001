"""The live view: what it follows, what it answers, and to which requests it does not."""

from __future__ import annotations

import http.client
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Capture, shoal_
from tests.report.made_runs import HOSTILE, made_run, metrics_row

from shoal.launch.screen import Console
from shoal.observe.flight_recorder import Channel, FlightRecorder
from shoal.report.watch.follow import RunFollower, seconds_left
from shoal.report.watch.plot import plotted
from shoal.report.watch.snapshot import snapshot
from shoal.report.watch.terminal import frame
from shoal.report.watch.web import WatchServer, is_loopback


def append(run: Path, *steps: int, torn: str = "") -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps(metrics_row(step, 40, 2, "pp=2", 0, 0.1)) + "\n")
        file.write(torn)


def going_on(run: Path) -> None:
    """As a launcher that lives leaves it: this process."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["host"]["name"] = os.uname().nodename
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / ".alive").write_text(json.dumps({"process": os.getpid(), "node": "0", "time": 0}))


def asked(server: WatchServer, path: str, **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        connection.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_only_new_rows_are_read_and_a_resume_begins_anew(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", finished=False)
    going_on(run)
    follower = RunFollower(run)
    assert follower.run.last_step == 40 and follower.run.state == "running"
    append(run, 41, torn='{"step": 42, "lo')
    assert follower.look().last_step == 41 and len(follower.run.metrics) == 41
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 2.0, "step_s": 0.5}\n')
    assert follower.look().last_step == 42
    assert seconds_left(follower.run) == pytest.approx(38 * 0.31, rel=0.1)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "shorter").write_text("".join(rows[:30]))
    (run / "shorter").rename(run / "metrics.jsonl")
    assert follower.look().metrics.steps == list(range(1, 31))


def test_ranks_tell_what_they_do_and_which_one_lags(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", finished=False)
    going_on(run)
    channel = Channel("group-1", "dp", (0, 1))
    recorders = [FlightRecorder(run / ".flight" / f"rank-{rank:05d}") for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        recorder.enter("step", 41)
        index = recorder.describe(channel)
        assert index is not None
        for _ in range(3 - 2 * rank):
            recorder.note(index, b"all_reduce", 8, b"here:1")
    views = RunFollower(run).ranks()
    assert [(one.phase, one.step, one.entered, one.behind) for one in views] == [
        ("step", 41, 3, 0),
        ("step", 41, 1, 2),
    ]
    assert all(one.memory and one.memory_is == "resident" for one in views)


def test_a_frame_has_all_parts_and_prints_no_control_codes(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", hostile="\x1b[2J evil [bold]x[/bold]")
    for width in (60, 160):
        screen = io.StringIO()
        console = Console(file=screen, width=width, highlight=False)
        console.print(frame(RunFollower(run), console, rank=1))
        text = screen.getvalue()
        assert "\x1b[2J" not in text and "[bold]x" in text
        for words in ("finished", "loss", "tokens/s", "ranks", "rank 1 failed", "straggler", "log of rank 1"):
            assert words in text, words
        assert max(map(len, text.splitlines())) <= width


def test_a_curve_in_letters() -> None:
    falling = [float(value) for value in range(100, 0, -1)]
    lines = plotted(falling, 20, 4)
    assert [len(line) for line in lines] == [20] * 4
    assert lines[0][0] != "⠀" and lines[0][-1] == "⠀" and lines[-1][-1] != "⠀"
    assert plotted([1.0, None, 1.0], 6, 2, plain=True)[0].strip(" *") == ""
    assert plotted([], 5, 2) == [" " * 5] * 2


def test_the_commands_one_frame_and_its_document(tmp_path: Path, capsys: Capture) -> None:
    run = made_run(tmp_path / "run")
    code, out, _ = shoal_(capsys, "watch", str(run), "--once")
    assert code == 0 and "step 40/40" in out.replace("\u00a0", " ")
    code, out, _ = shoal_(capsys, "watch", str(run), "--json")
    told = json.loads(out)
    assert code == 0 and told["summary"]["step"] == 40 and told["events"][-1]["what"] == "killed"
    for words in (["--rank", "-1"], ["--port", "70000"]):
        code, _, error = shoal_(capsys, "watch", str(run), "--once", *words)
        assert code == 2 and "fix:" in error
    assert shoal_(capsys, "watch", str(tmp_path / "no"), "--once")[0] == 2


def test_the_page_is_served_to_this_machine(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", hostile=HOSTILE)
    with WatchServer(RunFollower(run)) as server:
        status, text, headers = asked(server, "/")
        assert status == 200 and HOSTILE not in text and headers["Cache-Control"] == "no-store"
        status, text, _ = asked(server, "/state.json")
        state = json.loads(text)
        assert status == 200 and state["summary"]["step"] == 40 and "loss" in state["charts"]
        assert "<" not in text
        status, text, _ = asked(server, "/log.json?rank=1")
        assert status == 200 and json.loads(text)["lines"][0] == "rank 1 began"
        assert asked(server, "/log.json?rank=77")[1] == '{"rank": 77, "lines": []}'
        for rank in ("../../x", "-1", "1e9", "99999999999", "%C2%B2"):
            assert asked(server, f"/log.json?rank={rank}")[0] == 400
        assert asked(server, "/config.toml")[0] == 404
        for name in ("localhost:9", "127.0.0.1", "[::1]:80"):
            assert asked(server, "/state.json", Host=name)[0] == 200
        for name in ("evil.example:7425", "", "127.0.0.1.evil.example"):
            assert asked(server, "/state.json", Host=name)[0] == 403


def test_from_elsewhere_a_token_is_needed(tmp_path: Path) -> None:
    with WatchServer(RunFollower(made_run(tmp_path / "run")), "0.0.0.0") as server:
        assert len(server.token) >= 32 and server.address.endswith(f"?token={server.token}")
        for path in (
            "/",
            "/state.json",
            "/log.json?rank=0",
            "/?token=wrong",
            f"/state.json?token={server.token}",
        ):
            assert asked(server, path)[0] == 401, path
        status, _, headers = asked(server, f"/?token={server.token}")
        assert (
            status == 303
            and headers["Location"] == "/"
            and "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
        )
        cookie = headers["Set-Cookie"].split(";")[0]
        assert asked(server, "/state.json", Cookie=cookie)[0] == 200
        assert asked(server, "/state.json", Cookie=cookie[:-1])[0] == 401
    assert is_loopback("::1") and is_loopback("127.0.0.9") and not is_loopback("10.0.0.1")


def test_secrets_in_a_log_are_not_shown(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run / "logs" / "rank-00000.log").write_text("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz123456\n" * 3)
    assert "abcdefghij" not in "".join(RunFollower(run).log(0))


def test_a_run_without_steps_is_watched_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    assert snapshot(RunFollower(run))["state"] == "no step yet"
