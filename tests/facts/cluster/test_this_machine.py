"""What the look at a machine makes of what drivers and the kernel say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.facts.cluster import this_machine
from shoal.facts.cluster.devices import CPU, find
from shoal.facts.cluster.this_machine import (
    Cores,
    DetectedDevice,
    chosen,
    described,
    estimate,
    look,
    parse_cpuinfo,
    parse_nvidia_smi,
)

MIB = 2**20
H200 = "NVIDIA H200, 143771, 616, GPU-9533ff13-49a5-1ffb-c2a9-3147e0241cc3\n"


def test_rows_of_nvidia_smi() -> None:
    assert parse_nvidia_smi(H200) == [
        DetectedDevice("NVIDIA H200", 143771 * MIB, 616 * MIB, "GPU-9533ff13-49a5-1ffb-c2a9-3147e0241cc3")
    ]
    assert parse_nvidia_smi("NVIDIA A10G, 23028 MiB\n") == [DetectedDevice("NVIDIA A10G", 23028 * MIB)]
    assert parse_nvidia_smi("NVIDIA GB10, [N/A]\n") == [DetectedDevice("NVIDIA GB10", None)]
    assert parse_nvidia_smi("No devices were found\n\n") == []
    assert parse_nvidia_smi("") == []


def test_a_machine_of_eight() -> None:
    cluster = look(run=lambda: H200 * 8)
    assert (cluster.devices, cluster.nodes, cluster.fast_domain) == (8, 1, 8)
    assert cluster.device.name == "H200"
    assert cluster.device.memory_bytes == 143155 * MIB  # what CUDA showed on that very device
    assert str(cluster) == "local"


@pytest.mark.parametrize("count", [1, 6, 12])
def test_any_number_of_devices_is_a_machine(count: int) -> None:
    cluster = look(run=lambda: "NVIDIA H100 80GB HBM3, 81559\n" * count)
    assert (cluster.devices, cluster.fast_domain) == (count, count)


def test_without_what_the_driver_keeps_the_catalogue_knows_better() -> None:
    h100 = find("H100")
    assert h100 is not None
    assert (
        described(DetectedDevice("NVIDIA H100 80GB HBM3", 81559 * MIB), 0).memory_bytes == h100.memory_bytes
    )
    # A variant with the same name but other memory keeps its own.
    assert described(DetectedDevice("NVIDIA H100", 65247 * MIB), 0).memory_bytes == 65247 * MIB


def test_an_unknown_device_keeps_its_name_and_has_no_peaks() -> None:
    cluster = look(run=lambda: "NVIDIA Z9000, 99999, 99, GPU-1\n" * 2)
    assert cluster.device.name == "NVIDIA Z9000"
    assert cluster.device.memory_bytes == 99900 * MIB
    assert cluster.device.peaks == {}
    assert (cluster.devices, cluster.fast) == (2, None)


def test_a_device_that_shares_the_hosts_memory() -> None:
    assert described(DetectedDevice("NVIDIA GB10", None), 128 * 2**30).memory_bytes == 128 * 2**30


def test_the_odd_one_out_does_not_take_part() -> None:
    cluster = look(run=lambda: "NVIDIA T1000, 4096\n" + "NVIDIA A100-SXM4-40GB, 40960\n" * 2)
    assert (cluster.device.name, cluster.devices) == ("A100-40GB", 2)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("0", "a"),
        ("3, 1", "db"),
        ("0,7,1", "a"),
        ("GPU-c", "c"),
        ("GPU-", ""),
        ("nonsense", ""),
    ],
)
def test_only_visible_devices_count(visible: str | None, names: str) -> None:
    found = [DetectedDevice(name, MIB, None, f"GPU-{name}{name}") for name in "abcd"]
    assert "".join(one.name for one in chosen(found, visible)) == names


def test_hidden_devices_leave_the_processor() -> None:
    assert look(visible="", run=lambda: H200).device.name == "cpu"


def fake_nvidia_smi(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_nvidia_smi_on_the_path_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 'echo "NVIDIA L40S, 46068"; echo "NVIDIA L40S, 46068"'
    script = f'case "$1" in --query-gpu=name,memory.total*) {rows};; esac'
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    cluster = look()
    assert (cluster.device.name, cluster.devices, cluster.fast_domain) == ("L40S", 2, 1)


@pytest.mark.parametrize("script", ["echo 'NVIDIA L40S, 46068'; exit 9", "sleep 5"])
def test_a_failing_or_hanging_nvidia_smi_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(this_machine, "PATIENCE", 0.2)
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    assert this_machine.nvidia_smi() == ""


def test_amd_devices_from_the_kernel(tmp_path: Path) -> None:
    def card(number: int, **files: str) -> None:
        device = tmp_path / f"card{number}" / "device"
        device.mkdir(parents=True)
        for name, text in files.items():
            (device / name).write_text(text + "\n", encoding="utf-8")

    card(0, vendor="0x1002", device="0x74a1", mem_info_vram_total=str(192 * 2**30))
    card(1, vendor="0x1002", device="0x1234", mem_info_vram_total=str(48 * 2**30), product_name="AMD W7900")
    card(2, vendor="0x1002", device="0x1638", mem_info_vram_total=str(2**29))  # a processor's own graphics
    card(3, vendor="0x10de", device="0x2330")
    assert this_machine.amd(tmp_path) == [
        DetectedDevice("MI300X", 192 * 2**30),
        DetectedDevice("AMD W7900", 48 * 2**30),
    ]


XEON = """processor : 0
model name\t: Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz
cpu MHz\t\t: 1200.000
siblings\t: 64
cpu cores\t: 32
flags\t\t: fpu avx avx2 fma avx512f avx512_bf16

processor : 1
cpu MHz\t\t: 3500.000
"""


def test_peaks_of_processors() -> None:
    xeon = parse_cpuinfo(XEON)
    assert (xeon.clock, xeon.threads_a_core) == (2.9e9, 2)
    peaks, assumption = estimate(xeon, 32)
    assert peaks["fp32"] == 32 * 2.9e9 * 64
    assert peaks["fp64"] * 2 == peaks["fp32"] == peaks["bf16"] / 2
    assert "AVX-512" in assumption
    assert "assumed" not in assumption
    assert parse_cpuinfo(XEON.replace("@ 2.90GHz", "")).clock == 3.5e9


def test_an_unknown_clock_is_assumed_and_said_so() -> None:
    arm = parse_cpuinfo("processor : 0\nFeatures : fp asimd atomics\n")
    peaks, assumption = estimate(arm, 2)
    assert peaks == {"fp64": 40e9, "fp32": 80e9}
    assert "clock unknown, assumed" in assumption


def test_without_proc_there_is_still_an_answer() -> None:
    peaks, _ = estimate(parse_cpuinfo(""), 1)
    assert peaks["fp32"] > 0
    assert estimate(Cores(frozenset(), None, 1), 1)[0]["fp32"] == 20e9


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "300", "a/b/memory.max": "500"}, [500, 300]),
        ("0::/not/here\n", {"memory.max": "700"}, [700]),
        ("4:memory:/x\n2:cpu:/x\n", {"memory/x/memory.limit_in_bytes": "900"}, [900]),
        ("", {}, []),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], limits: list[int]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    assert this_machine.memory_limits(membership, tmp_path) == limits


@pytest.mark.parametrize(
    ("membership", "files", "quotas"),
    [
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, [1.5]),
        ("0::/not/here\n", {"cpu.max": "200000 50000"}, [4.0]),
        (
            "3:cpu,cpuacct:/x\n4:memory:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"},
            [2.0],
        ),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            [0.5],
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("", {}, []),
    ],
)
def test_processor_quotas_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], quotas: list[float]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n", encoding="utf-8")
    assert this_machine.cpu_quotas(membership, tmp_path) == quotas


@pytest.mark.parametrize(
    ("quotas", "threads"), [([], 8), ([3.0], 3), ([2.9], 2), ([0.5], 1), ([64.0], 8), ([6.0, 4.0], 4)]
)
def test_threads_are_those_that_the_machine_really_gives(
    quotas: list[float], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(this_machine, "cpu_quotas", lambda membership, root: quotas)
    assert this_machine.usable_threads() == threads


def test_the_processor_is_one_device_for_the_whole_machine() -> None:
    cluster = look(run=lambda: "")
    assert (cluster.device.name, cluster.devices) == (CPU.name, 1)
    assert cluster.host_memory == cluster.device.memory_bytes > 2**28
    assert "assumed" in cluster.device.source


def test_the_look_is_quick_and_needs_no_torch() -> None:
    def seconds() -> float:
        started = time.perf_counter()
        look(run=lambda: "")
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.05
    code = "import sys; from shoal.facts.cluster.this_machine import look; look(); print({'torch', 'numpy'} & set(sys.modules))"  # noqa: E501
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no /proc, no sched_getaffinity."""
    monkeypatch.setattr(this_machine, "_read", lambda path: "")
    monkeypatch.delattr(this_machine.os, "sched_getaffinity", raising=False)
    cluster = look(run=lambda: "")
    assert cluster.device.memory_bytes > 2**28
    assert cluster.device.peaks["fp32"] > 0
