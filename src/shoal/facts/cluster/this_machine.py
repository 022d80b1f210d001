"""Detect this machine as a cluster of one node, quickly and without torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.facts.cluster import Cluster, assemble, devices
from shoal.facts.cluster.devices import CPU, Device, Precision

# memory.reserved is what the driver keeps for itself: total minus reserved is what CUDA shows a program.
QUERY = ("--query-gpu=name,memory.total,memory.reserved,uuid", "--format=csv,noheader,nounits")
PATIENCE = 20.0  # seconds; the first call after boot loads the driver
SMALLEST_AMD = 8 * devices.GIB  # smaller ones are display adapters or integrated graphics

Runner = Callable[[], str]

ASSUMED_CLOCK = 2.5e9
ASSUMED_BANDWIDTH = 10e9  # bytes/s per core, typical for servers with all cores reading

# fp32 FLOP per cycle and core: lanes × 2 (multiply and add) × pipes. The first flag present counts.
FP32_A_CYCLE = (
    ("avx512f", 64, "two 512-bit FMA pipes (AVX-512)"),
    ("avx2", 32, "two 256-bit FMA pipes (AVX2)"),
    ("sve", 32, "two 256-bit FMA pipes, or four of 128 (SVE)"),
    ("asimd", 16, "two 128-bit FMA pipes (NEON)"),
    ("avx", 16, "256-bit multiply and add pipes (AVX)"),
    ("", 8, "128-bit multiply and add pipes"),
)
# bf16 FLOP per fp32 FLOP, if the processor has instructions for it.
BF16_A_FP32 = (("amx_bf16", 16), ("avx512_bf16", 2), ("bf16", 4))


@dataclass(frozen=True)
class DetectedDevice:
    """One accelerator as described by its driver. Missing information is None."""

    name: str
    total: int | None
    reserved: int | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Cores:
    """The contents of /proc/cpuinfo that determine a peak."""

    flags: frozenset[str]
    clock: float | None  # Hz
    threads_a_core: int


def look(visible: str | None = None, run: Runner | None = None) -> Cluster:
    """This machine: its accelerators of the most common kind, or one ``cpu`` for the whole machine.

    ``visible``: CUDA_VISIBLE_DEVICES (None if not set). ``run`` replaces the call of nvidia-smi.
    """
    host_memory = machine_memory()
    found = chosen(parse_nvidia_smi((run or nvidia_smi)()) or amd(), visible)
    if not found:
        return assemble("local", processor(host_memory), 1, 1, host_memory=host_memory)
    # A run uses devices of one kind; an odd one out (a display card) is ignored.
    (name, count) = Counter(one.name for one in found).most_common(1)[0]
    device = described(next(one for one in found if one.name == name), host_memory)
    return assemble("local", device, 1, count, fast_domain=_joined(device, count), host_memory=host_memory)


def nvidia_smi(*query: str) -> str:
    """nvidia-smi's output; empty if it is missing, fails, or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run(
            [program, *(query or QUERY)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def parse_nvidia_smi(text: str) -> list[DetectedDevice]:
    """One device per line: name, total MiB, then reserved MiB and identifier if the driver gives them."""
    found = []
    for line in text.splitlines():
        name, *rest = (cell.strip() for cell in line.split(","))
        if name and rest:
            total, reserved, uuid, *_ = (*rest, "", "", "")
            found.append(DetectedDevice(name, _mebibytes(total), _mebibytes(reserved), uuid))
    return found


def _mebibytes(cell: str) -> int | None:
    """``81559`` or ``81559 MiB``; None for ``[N/A]``, as on machines with unified memory."""
    number = cell.removesuffix("MiB").strip()
    return (int(number) * 2**20 or None) if number.isdecimal() else None


def amd(root: Path = Path("/sys/class/drm")) -> list[DetectedDevice]:
    """AMD accelerators as listed by the kernel."""
    found = []
    for card in sorted(root.glob("card[0-9]*/device")):
        memory = _read(card / "mem_info_vram_total")
        if _read(card / "vendor") != "0x1002" or not memory.isdecimal() or int(memory) < SMALLEST_AMD:
            continue
        identity = _read(card / "device")
        known = "MI300X" if identity == "0x74a1" else ""
        found.append(DetectedDevice(known or _read(card / "product_name") or f"AMD {identity}", int(memory)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def chosen(found: list[DetectedDevice], visible: str | None) -> list[DetectedDevice]:
    """The devices that CUDA_VISIBLE_DEVICES selects: as in CUDA, the first bad entry ends the list."""
    if visible is None:
        return found
    picked: list[DetectedDevice] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal() and int(entry) < len(found):
            match = found[int(entry)]
        else:
            by_identifier = [one for one in found if entry.startswith("GPU-") and one.uuid.startswith(entry)]
            if len(by_identifier) != 1:
                break
            match = by_identifier[0]
        picked.append(match)
    return picked


def described(found: DetectedDevice, host_memory: int) -> Device:
    """The catalogue's entry with this machine's memory; an unknown device has its own name and no peaks."""
    known = devices.find(found.name)
    if found.total is None:
        memory = known.memory_bytes if known else host_memory
    elif found.reserved is None and known and abs(found.total / known.memory_bytes - 1) < 0.1:
        memory = known.memory_bytes  # the total alone includes the driver's part
    else:
        memory = found.total - (found.reserved or 0)
    if known:
        return known.model_copy(update={"memory_bytes": memory})
    return Device(
        name=found.name,
        memory_bytes=memory,
        source="Not in the catalogue: memory as the driver reports it, links assumed, peaks unknown.",
    )


def _joined(device: Device, count: int) -> int:
    """The devices of this machine that the fast link joins: all of them, except for bridges, which join pairs."""
    if device.fast is None:
        return 1
    return device.fast_domain if count % device.fast_domain == 0 else count


def processor(memory_bytes: int) -> Device:
    """This machine's processor, all cores together, as one device named ``cpu``."""
    cores = parse_cpuinfo(_read(Path("/proc/cpuinfo")))
    count = max(1, usable_threads() // cores.threads_a_core)
    peaks, assumption = estimate(cores, count)
    return CPU.model_copy(
        update={
            "memory_bytes": memory_bytes,
            "peaks": peaks,
            "memory_bandwidth": count * ASSUMED_BANDWIDTH,
            "source": f"Estimated from this machine: {assumption}; {ASSUMED_BANDWIDTH / 1e9:.0f} GB/s a core "
            "assumed; memory as the system reports it.",
        }
    )


def usable_threads() -> int:
    """Hardware threads that this process may use: by its affinity mask, or fewer by its cgroup's quota."""
    mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = cpu_quotas(_read(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))
    # With a quota of 1.5 processors, two threads get three quarters each and wait for each other otherwise.
    return max(1, min([mask, *map(int, quotas)]))


def cpu_quotas(membership: str, root: Path) -> list[float]:
    """The CPU quotas of the cgroups in /proc/self/cgroup and of all their parents, in processors."""
    found = []
    for unified, directory in _control_groups(membership, root, "cpu"):
        if unified:
            quota, _, period = _read(directory / "cpu.max").partition(" ")
        else:
            quota, period = (_read(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        # "max" and -1 mean no limit.
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            found.append(int(quota) / int(period))
    return found


def parse_cpuinfo(text: str) -> Cores:
    """The first entry stands for all, except for the clock. Empty text (no /proc) leaves the assumptions."""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip().lower()] = value.strip()
    flags = frozenset((fields.get("flags") or fields.get("features") or "").split())
    if not flags and platform.machine().lower() in ("arm64", "aarch64"):
        flags = frozenset({"asimd"})
    stated = re.search(r"@\s*([\d.]+)\s*GHz", fields.get("model name", ""))
    running = [
        float(megahertz) for megahertz in re.findall(r"^cpu MHz\s*:\s*(\d+\.?\d*)", text, re.MULTILINE)
    ]
    clock = float(stated[1]) * 1e9 if stated else max(running, default=0.0) * 1e6
    siblings, real = (int(fields.get(key) or 0) for key in ("siblings", "cpu cores"))
    return Cores(flags, clock or None, max(1, round(siblings / real)) if real else 1)


def estimate(cores: Cores, count: int) -> tuple[dict[Precision, float], str]:
    """Peaks of ``count`` cores, and the assumption behind them, in words."""
    fp32_a_cycle, pipes = next(
        (flops, words) for flag, flops, words in FP32_A_CYCLE if not flag or flag in cores.flags
    )
    clock = cores.clock or ASSUMED_CLOCK
    fp32 = count * clock * fp32_a_cycle
    peaks: dict[Precision, float] = {"fp64": fp32 / 2, "fp32": fp32}
    bf16 = next((ratio for flag, ratio in BF16_A_FP32 if flag in cores.flags), None)
    if bf16:
        peaks["bf16"] = fp32 * bf16
    known = "" if cores.clock else " (clock unknown, assumed)"
    return peaks, f"{count} cores × {clock / 1e9:.2f} GHz{known} × {pipes}"


def machine_memory() -> int:
    """Bytes of memory: the machine's, or this process's cgroup limit if that is lower."""
    stated = re.search(r"^MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    if stated:
        total = int(stated[1]) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *memory_limits(_read(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))])


def memory_limits(membership: str, root: Path) -> list[int]:
    """Memory limits of the cgroups in /proc/self/cgroup and of all their parents."""
    found = []
    for unified, directory in _control_groups(membership, root, "memory"):
        limit = _read(directory / ("memory.max" if unified else "memory.limit_in_bytes"))
        if limit.isdecimal() and int(limit) > 0:
            found.append(int(limit))
    return found


def _control_groups(membership: str, root: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Directories of a controller's cgroups, innermost first, with whether each is in the unified hierarchy (v2)."""
    for line in membership.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            joint = root / controllers  # cpu and cpuacct are often mounted together
            base = joint if joint.is_dir() else root / controller
        else:
            continue
        group = base / path.strip("/")
        # In a container the path is the host's and does not exist; the container's own limit is at the root.
        for directory in (group, *group.parents):
            yield controllers == "", directory
            if directory == base:
                break
