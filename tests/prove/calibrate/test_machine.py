"""A whole calibration of this machine at a reduced size: through the same code, in seconds."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tests.predict.calibrated import faster, stored

from shoal.cli.main import main
from shoal.facts import calibration
from shoal.facts.calibration import file
from shoal.facts.calibration.measurements import HostWork
from shoal.prove.calibrate import CalibrationReport, calibrate, copies, host, machine
from shoal.prove.calibrate.drift import compared, words
from shoal.prove.calibrate.kernels import Effort
from shoal.prove.calibrate.sizes import ACCELERATOR, CalibrationSizes, Load, sizes

LOAD = Load(
    precision=torch.float32,
    states=torch.float32,
    widths=((32, 64, (16, 64)), (64, 32, (16,))),
    attention=((16, 32, 1), (16, 64, 2)),
    tokens=(16, 64),
    losses=((16, 64),),
    lookups=((16, 64),),
    weights=(2**8, 2**12),
    updates=(2**8,),
)
HALF = Load(
    precision=torch.bfloat16,
    states=torch.float32,
    widths=((16, 16, (16,)),),
    # No head has a size below zero: what cannot be made is left out, and the rest is kept.
    attention=((-1, 16, 1), (16, 16, 1)),
    tokens=(16,),
    losses=((16, 16),),
    lookups=((16, 16),),
    weights=(2**8,),
)
SMALL = CalibrationSizes(
    loads=(LOAD, HALF),
    heads=4,
    head_dims=(8,),
    hidden=32,
    inner=64,
    side=32,
    filler=2**8,
    copied=0,
    updated=2**18,
)
EFFORT = Effort((0.0, 0.0), (0.1, 0.1), 0.02)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CalibrationReport, str]]:
    """One calibration for all tests, its disk barely touched and its host failing."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "LONGEST", 0.0)

        def busy(device: torch.device) -> HostWork:
            raise RuntimeError("the host is busy")

        patch.setattr(host, "host_work", busy)
        folder = tmp_path_factory.mktemp("cache") / "calibration"
        console = Console(file=output, width=200)
        yield calibrate(console, "", folder, EFFORT, SMALL), output.getvalue()
    calibration.forget()


def test_everything_is_measured_and_kept(made: tuple[CalibrationReport, str]) -> None:
    measured, _ = made
    assert file.read(measured.path) == measured.stored
    assert measured.path.name == "cpu.json"
    seen = measured.stored.measured
    assert len(seen.products["fp32"]) == 9 and len(seen.attention["fp32"]) == 2
    ways = ("norm", "rotary", "gate", "lookup", "layer norm")
    for part in (*ways, *(f"{way} backward" for way in ways), "loss", "add", "copy", "sum", "weights"):
        assert part in seen.parts["fp32"] and part in seen.parts["bf16"]
    assert {"adamw 32 bit", "norm 32 bit"} <= seen.parts["fp32"].keys()
    assert {"torch", "shoal", "python"} <= seen.versions.keys()
    assert seen.copies.disk_write and seen.copies.disk_read and not seen.copies.to_device
    assert seen.host_update is not None and 1e7 < seen.host_update < 1e13
    links = measured.stored.fast
    assert links is not None and links.bandwidth and links.start + links.hop > 0


def test_one_failure_costs_itself_alone_and_is_told(made: tuple[CalibrationReport, str]) -> None:
    measured, told = made
    seen = measured.stored.measured
    assert seen.host is None
    assert len(seen.attention["bf16"]) == 1
    assert [text.split(":")[0] for text in seen.missing] == [
        "attention bf16 forward -1 4 1 16 1",
        "attention bf16 backward -1 4 1 16 1",
        "host",
    ]
    assert "the host is busy" in told
    assert any("the host is busy" in line for line in measured.lines())


def test_progress_is_told_with_the_time_that_passed(made: tuple[CalibrationReport, str]) -> None:
    lines = made[1].splitlines()
    assert all(line[:4].strip().isdecimal() and line[5:7] == "s " for line in lines), lines
    for part in ("products", "host", "copies", "disk", "links", "done"):
        assert any(part in line for line in lines)


def test_plan_says_that_it_uses_it(
    made: tuple[CalibrationReport, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured, _ = made
    monkeypatch.setenv(file.VARIABLE, str(measured.path.parents[1]))

    def planned(*more: str) -> str:
        asked = ["plan", "tiny", "--on", "1xcpu", "--seq", "64", "--batch", "2", "--precision", "fp32"]
        with pytest.raises(SystemExit) as left:
            main([*asked, *more])
        assert left.value.code == 0
        return capfd.readouterr().out

    line = f"rates: measured here on {measured.stored.measured.date[:10]} ({measured.path})"
    with_it, without = planned(), planned("--no-calibration")
    assert line in with_it and "rates:" not in without
    assert '"rates": "measured here' in planned("--json")
    assert with_it.splitlines()[2] != without.splitlines()[2]


def test_a_second_one_is_compared_with_the_first(made: tuple[CalibrationReport, str]) -> None:
    measured, _ = made
    rates = compared(measured.stored, measured.stored)
    assert {rate.kind for rate in rates} == {
        "matrix products",
        "attention",
        "moved bytes",
        "host update",
        "disk",
        "links",
    }
    assert not any(rate.notable for rate in rates)


def test_drift_is_a_sentence() -> None:
    before, after = stored(), stored(**faster(0.88))
    told = words(compared(before, after), before.measured.date)
    (sentence,) = [line for line in told if line.startswith("drift: ")]
    assert sentence == (
        "drift: matrix products reach 440 TFLOP/s bf16, 12% less than on 2026-11-15: "
        "power cap, clock or another tenant"
    )


def test_starting_operators_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's own measurement; on a CPU it also sees the kernels, so only its sense is checked here."""
    monkeypatch.setattr(host, "RECIPE", host.RECIPE.model_copy(update={"precision": "fp32"}))
    monkeypatch.setattr(host, "TIMES", 3)
    # Processor time: on a machine that others use as well, eight layers may well be through sooner than two.
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=time.thread_time))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = host.started(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    assert found.forward > 0 and found.backward > 0


def test_a_small_accelerator_is_spared_the_largest() -> None:
    small = sizes(torch.device("cuda"), 16 * 2**30)
    for load in small.loads:
        assert load.widths and load.attention and load.tokens and load.weights
        assert max(row for _, _, rows in load.widths for row in rows) <= 4096
    assert sizes(torch.device("cuda"), 140 * 2**30) is ACCELERATOR


def test_a_device_that_torch_cannot_use_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.facts.cluster.notation import find
    from shoal.facts.problem import BadInput

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "look", lambda visible: find("1xH200"))
    with pytest.raises(BadInput, match="cannot use it"):
        calibrate(Console(file=io.StringIO()), None)
