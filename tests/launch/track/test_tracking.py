"""What is refused before a run starts; the Prometheus endpoint; keys that ranks do not get."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from shoal.facts.config import Config
from shoal.facts.problem import BadInput
from shoal.launch.environment import passes
from shoal.launch.interfaces import LOOPBACK
from shoal.launch.track.prometheus import Endpoint, exposition
from shoal.launch.track.tracker import TRACKERS
from shoal.launch.track.tracking import check_trackers


def asked(**track: object) -> Config:
    return Config.model_validate({"track": track})


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_with_the_line_to_install_it(
    tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = TRACKERS[tracker]._replace(needs=(("no-such-distribution",),))
    monkeypatch.setitem(TRACKERS, tracker, absent)
    with pytest.raises(BadInput) as caught:
        check_trackers(asked(**{tracker: True}), environment={})
    (problem,) = caught.value.problems
    assert problem.what == f"track.{tracker}: no-such-distribution not installed"
    assert problem.fix.startswith("pip install")


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, int]]]:
    """Answers by the login that it is shown, and with 401 to any other."""
    known: dict[str, int] = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            body = b'{"data": {"viewer": {"id": "1"}}}'
            self.send_response(known.get(self.headers.get("Authorization", ""), 401))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer((LOOPBACK, 0), Answer) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://{LOOPBACK}:{serving.server_port}", known
        serving.shutdown()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in TRACKERS.items():
        monkeypatch.setitem(TRACKERS, name, kind._replace(needs=(("torch",),)))


def test_without_a_login_wandb_is_refused_unless_it_is_offline(
    tmp_path: Path, all_installed: None, server: tuple[str, dict[str, int]]
) -> None:
    netrc = tmp_path / "netrc"
    place, known = server
    alone = {"NETRC": str(netrc), "WANDB_BASE_URL": place}
    config = asked(wandb=True)
    with pytest.raises(BadInput, match="no login for W&B"):
        check_trackers(config, environment=alone)
    check_trackers(config, environment={**alone, "WANDB_MODE": "offline"})
    netrc.write_text(f"machine {LOOPBACK} login user password 0123456789\n")
    netrc.chmod(0o600)
    known[basic("api", "0123456789")] = 200
    check_trackers(config, environment=alone)


@pytest.mark.parametrize(
    ("tracker", "address", "login", "shown"),
    [
        ("wandb", "WANDB_BASE_URL", {"WANDB_API_KEY": "k" * 40}, basic("api", "k" * 40)),
        (
            "mlflow",
            "MLFLOW_TRACKING_URI",
            {"MLFLOW_TRACKING_USERNAME": "user-0", "MLFLOW_TRACKING_PASSWORD": "word-0"},
            basic("user-0", "word-0"),
        ),
        ("mlflow", "MLFLOW_TRACKING_URI", {"MLFLOW_TRACKING_TOKEN": "0123"}, "Bearer 0123"),
        (
            "trackio",
            "HF_ENDPOINT",
            {"HF_TOKEN": "hf_0123", "TRACKIO_SPACE_ID": "one/space"},
            "Bearer hf_0123",
        ),
    ],
)
def test_a_login_that_has_expired_is_refused_and_a_silent_server_is_not(
    tracker: str,
    address: str,
    login: dict[str, str],
    shown: str,
    all_installed: None,
    server: tuple[str, dict[str, int]],
    tmp_path: Path,
) -> None:
    place, known = server
    config, environment = asked(**{tracker: True}), {"HOME": str(tmp_path), address: place, **login}
    with pytest.raises(BadInput) as caught:
        check_trackers(config, environment=environment)
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"track.{tracker}: ") and f"track.{tracker} = false" in problem.fix
    assert not any(secret in str(problem) for secret in login.values())
    for status in (200, 500):  # what its server cannot do is said while the run goes on
        known[shown] = status
        check_trackers(config, environment=environment)
    check_trackers(config, environment={**environment, address: f"http://{LOOPBACK}:9"})


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"port {port} cannot be used"):
            check_trackers(asked(prometheus=port))
    check_trackers(asked(prometheus=port))


def test_prometheus_is_told_the_last_step() -> None:
    endpoint = Endpoint("run", LOOPBACK, 0)
    address = f"http://{LOOPBACK}:{endpoint.port}"
    try:
        assert 'shoal_up{run="run"} 1.0' in urlopen(f"{address}/metrics").read().decode()
        endpoint.tell({"step": 4, "loss": 0.25, "mfu": None, "layout": "dp=2", "validation": {"web-1": 2.0}})
        with urlopen(f"{address}/metrics") as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        numbers = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
        assert numbers['shoal_step{run="run"}'] == "4.0" and numbers['shoal_loss{run="run"}'] == "0.25"
        assert numbers['shoal_validation_web_1{run="run"}'] == "2.0"
        assert not any("mfu" in name or "layout" in name for name in numbers)
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{address}/config.toml")
    finally:
        endpoint.close()


def test_a_name_cannot_break_the_exposition() -> None:
    assert 'shoal_up{run="a\\"b\\\\\\nc"} 1.0' in exposition('a"b\\\nc', None, 0.0)


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI"),
        *("TRACKIO_WRITE_TOKEN", "TRACKIO_SERVER_URL", "HF_TOKEN"),
    ],
)
def test_ranks_get_no_tracker_s_key(name: str) -> None:
    config = asked(tensorboard=True, wandb=True, mlflow=True, trackio=True)
    assert not passes(name, config)
