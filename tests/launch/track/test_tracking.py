"""What is refused before a run starts; the Prometheus endpoint; keys that ranks do not get."""

from __future__ import annotations

import socket
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


def test_without_a_login_wandb_is_refused_unless_it_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", TRACKERS["wandb"]._replace(needs=(("torch",),)))
    netrc = tmp_path / "netrc"
    nobody = {"NETRC": str(netrc)}
    config = asked(wandb=True)
    with pytest.raises(BadInput, match="no login for W&B"):
        check_trackers(config, environment=nobody)
    check_trackers(config, environment={**nobody, "WANDB_MODE": "offline"})
    check_trackers(config, environment={**nobody, "WANDB_API_KEY": "0" * 40})
    netrc.write_text("machine api.wandb.ai login user password 0123456789\n")
    netrc.chmod(0o600)
    check_trackers(config, environment=nobody)


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
