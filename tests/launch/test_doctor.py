"""The doctor: sound on this machine, and with a fix for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.facts.cluster.this_machine import look
from shoal.launch import doctor

WELL = {"trouble": "", "version": "2.13.0", "distributed": True, "all_reduce_seconds": 0.004, "devices": 2}


def test_this_machine_is_examined_for_real(tmp_path: Path) -> None:
    checks = {check.name: check for check in doctor.examine(tmp_path / "runs" / "first")}
    assert {"python", "torch", "gloo on loopback", "devices", "port", "host name", "disk", "clock"} <= set(
        checks
    )
    assert checks["torch"].status == "ok"
    assert checks["gloo on loopback"].status == "ok"
    assert checks["gloo on loopback"].detail.startswith("4 MiB between two processes")
    assert all(check.fix for check in checks.values() if check.status != "ok")
    assert list(tmp_path.iterdir()) == []


def test_requirements_as_metadata_writes_them() -> None:
    assert doctor.parse_requirement("torch<2.14,>=2.11") == ("torch", "<2.14,>=2.11", "")
    assert doctor.parse_requirement('ray[default]>=2; extra == "ray"') == ("ray", ">=2", "ray")
    assert doctor.parse_requirement("numpy") == ("numpy", "", "")


@pytest.mark.parametrize(
    ("version", "bounds", "kept"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.11", ">=2.11.0", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9.1", ">=2.11", False),
        ("5.1", "!=5.1", False),
        ("1.0", "", True),
    ],
)
def test_bounds(version: str, bounds: str, kept: bool) -> None:
    assert doctor.within(version, bounds) is kept


def test_missing_and_stale_packages_have_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["pydantic>=999", "not-there>=1", 'not-there-either; extra == "hf"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: needs)
    stale, missing, extra = doctor.dependencies()
    assert (stale.status, stale.fix) == ("failed", "pip install 'pydantic>=999'")
    assert (missing.status, missing.fix) == ("failed", "pip install 'not-there>=1'")
    assert extra.status == "ok"
    assert extra.detail.startswith("not installed: pip install -e '.[hf]'")


@pytest.mark.parametrize(
    ("answers", "name", "detail"),
    [
        ({"trouble": "ImportError: libtorch"}, "torch imports", "ImportError: libtorch"),
        (
            {"trouble": "", "version": "2.13.0", "distributed": False},
            "torch.distributed",
            "not in this build",
        ),
        ({"trouble": "slow", "version": "2.13.0", "distributed": True}, "gloo on loopback", "slow"),
    ],
)
def test_what_is_wrong_with_torch(answers: dict[str, object], name: str, detail: str) -> None:
    *_, last = doctor.torch_works(answers)
    assert (last.name, last.status) == (name, "failed")
    assert detail in last.detail
    assert last.fix


def test_a_torch_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE", 0.1)
    assert doctor.ask_torch() == {"trouble": "no answer within 0 s"}


@pytest.mark.parametrize(("seen", "status"), [(2, "ok"), (1, "warning"), (0, "failed"), (None, "failed")])
def test_torch_must_see_what_the_drivers_list(seen: int | None, status: str) -> None:
    here = look(run=lambda: "NVIDIA H200, 143771\n" * 2)
    check = doctor.devices(here, {**WELL, "devices": seen})
    assert check.status == status
    assert bool(check.fix) is (status != "ok")


def test_a_run_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    (check,) = doctor.storage(tmp_path / "file")
    assert check.status == "failed"
    assert "--run" in check.fix


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK", 2**80)
    disk = next(check for check in doctor.storage(tmp_path) if check.name == "disk")
    assert disk.status == "failed"
    assert "free some space" in disk.fix


def test_small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(doctor, "LEAST_SHARED_MEMORY", 2**80)
    warned = {
        check.name for check in doctor.limits(accelerated=True) if check.status == "warning" and check.fix
    }
    assert {"open files", "locked memory"} <= warned
    assert all(
        check.status == "ok" for check in doctor.limits(accelerated=False) if check.name == "open files"
    )


def test_a_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "no-such-host.invalid")
    check = doctor.host_name()
    assert check.status == "warning"
    assert "/etc/hosts" in check.fix
