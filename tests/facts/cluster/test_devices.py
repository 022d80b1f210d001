"""The catalogue: right units, sources, and names that find their entry."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from shoal.facts import calibration
from shoal.facts.cluster.devices import CPU, DEVICES, GIB, Device, find, normalised, unknown

ACCELERATORS = [device for device in DEVICES if device is not CPU]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_entry_has_a_source_and_a_memory(device: Device) -> None:
    assert len(device.source) > 20
    assert device.memory_bytes >= GIB
    assert device.memory_bytes % 2**20 == 0
    assert device.peaks["fp32"] >= device.peaks["fp64"]


@pytest.mark.parametrize("device", ACCELERATORS, ids=lambda device: device.name)
def test_units_are_consistent(device: Device) -> None:
    half = device.peaks["fp16"]
    assert 1e13 <= half <= 1e16 and device.peaks.get("bf16", half) == half
    assert half >= device.peaks.get("tf32", half) >= device.peaks["fp32"] or "tf32" not in device.peaks
    assert device.memory_bandwidth is not None
    assert 3e11 <= device.memory_bandwidth <= 1e13
    assert 1e10 <= device.network.bandwidth <= 1e11
    assert 1.5e10 <= device.host_link.bandwidth <= 4.5e11
    assert device.power is not None
    assert 70 <= device.power <= 1500
    if device.fast is None:
        assert device.fast_domain == 1
    else:
        assert device.host_link.bandwidth < device.fast.bandwidth <= 9e11
        assert device.fast_domain in (2, 8, 72)
        assert device.network.bandwidth < device.fast.bandwidth


@pytest.mark.parametrize("name", ["V100", "T4"])
def test_before_ampere_there_is_no_bf16(name: str) -> None:
    device = find(name)
    assert device is not None
    assert "fp16" in device.peaks and not {"bf16", "tf32", "fp8"} & device.peaks.keys()


def test_a_rate_is_known_for_every_accelerator() -> None:
    """Else it would be guessed from whether it multiplies in 8 bits."""
    assert {device.name for device in ACCELERATORS} == {*calibration.DEVICES, *calibration.JUDGED}


def test_amd_reaches_less_of_its_peak_than_hopper() -> None:
    amd, hopper = calibration.JUDGED["MI300X"], calibration.DEVICES["H100"]
    assert amd.matmul < 0.75 * hopper.matmul and amd.flash.forward < hopper.flash.forward


@pytest.mark.parametrize("device", ACCELERATORS, ids=lambda device: device.name)
def test_eight_bits_run_at_twice_the_rate_of_sixteen(device: Device) -> None:
    """A rate with sparsity in one of the two would show here."""
    if "fp8" in device.peaks:
        assert device.peaks["fp8"] == pytest.approx(2 * device.peaks["bf16"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth", "per_direction", "gibibytes"),
    [
        ("A100-40GB", 312e12, 1555e9, 300e9, 40),
        ("A100-80GB", 312e12, 2039e9, 300e9, 80),
        ("H100", 989e12, 3.35e12, 450e9, 80),
        ("H200", 989e12, 4.8e12, 450e9, 140),
        ("B200", 2.25e15, 7.7e12, 900e9, 179),
        ("GB200", 2.5e15, 8e12, 900e9, 185),
        ("MI300X", 1307e12, 5.3e12, 448e9, 192),
        ("MI325X", 1307e12, 6e12, 448e9, 256),
        ("H20", 148e12, 4e12, 450e9, 96),
        ("H800", 989e12, 3.35e12, 200e9, 80),
        ("A800", 312e12, 2039e9, 200e9, 80),
        ("B300", 2.25e15, 8e12, 900e9, 268),
    ],
)
def test_datasheet_figures(
    name: str, bf16: float, bandwidth: float, per_direction: float, gibibytes: float
) -> None:
    device = find(name)
    assert device is not None
    assert device.fast is not None
    assert device.peaks["bf16"] == pytest.approx(bf16, rel=1e-3)
    assert device.memory_bandwidth == pytest.approx(bandwidth)
    assert device.fast.bandwidth == per_direction
    assert device.memory_bytes / GIB == pytest.approx(gibibytes, rel=0.015)


def test_no_name_means_two_devices() -> None:
    names = Counter(normalised(name) for device in DEVICES for name in (device.name, *device.aliases))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "H100"),
        ("H100-SXM", "H100"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("V100", "V100-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("CPU", "cpu"),
    ],
)
def test_names_as_people_and_drivers_spell_them(spelling: str, name: str) -> None:
    device = find(spelling)
    assert device is not None
    assert device.name == name


def test_an_unknown_name_gets_a_suggestion() -> None:
    assert find("H10") is None
    assert unknown("h10")[1] == "did you mean 'H100'?"
    assert "A100-40GB" in unknown("abacus")[1]


def test_a_precision_without_units_runs_in_the_next_wider_one() -> None:
    a100 = find("A100-80GB")
    assert a100 is not None
    assert a100.peak("fp8") == a100.peaks["bf16"]
    assert CPU.peak("fp8") == CPU.peaks["fp32"]
    assert Device(name="unknown", memory_bytes=GIB).peak("bf16") is None


def test_devices_are_frozen_and_hashable() -> None:
    with pytest.raises(ValidationError):
        CPU.name = "gpu"
    assert len({*DEVICES, *DEVICES}) == len(DEVICES)
