"""AdamW on the host's cores in one pass over a piece (``host_adamw.cpp``), compiled when it is first needed.

Torch's fused update takes gradients as wide as their weights and writes no narrow copy, so that a gradient has to be
widened before it and a weight narrowed after it: at best 87 GB/s on the 16 cores beside an H200, of 28 bytes a
parameter. What inductor makes of the same formula reaches 145, but holds Python's lock meanwhile: the next forward
pass, which the update is to hide behind, could not be issued. So it is compiled by hand, in a second or two, and kept.
Where there is no C++ compiler, torch's update in parts does (``train/host_update.py``).
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import Tensor

from shoal.facts.calibration.file import cache_folder

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS: tuple[str, ...] = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS = (*FLAGS, "-mprefer-vector-width=512")  # gcc keeps to 256 bits where a processor has both
COMPILERS = ("c++", "g++", "clang++")
LONGEST = 120  # seconds, on a machine that is busy


class NoKernelError(Exception):
    """Why this machine has none."""


def adamw_(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    narrow: Tensor,
    settings: list[float],
    threads: int,
    what: Literal["whole", "narrow", "states"] = "whole",
) -> None:
    """All flat, contiguous and as long. ``narrow``: a copy of the new weight; it may be the gradient's own memory.

    ``what``: all of the update; the narrow copy alone, which leaves weight and moments as they were; or these alone,
    later and to the same bits, where ``narrow`` says no more than its type. ``settings``: as ``settings_of``.
    NoKernelError where it cannot be compiled.
    """
    run = getattr(_library(), f"adamw_{what}_{_name(gradient.dtype)}_{_name(narrow.dtype)}")
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (weight, mean, square, gradient, narrow))
    length = ctypes.c_int64(weight.numel())
    run(*pointers, length, (ctypes.c_double * len(settings))(*settings), ctypes.c_int(threads))


def takes(weight: torch.dtype, gradient: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether it is made for these."""
    if weight == torch.float64:
        return gradient == narrow == torch.float64
    if weight != torch.float32 or narrow not in (torch.float32, torch.bfloat16):
        return False
    return gradient in (narrow, torch.float32)


def problem() -> str | None:
    """Why there is none, in a line."""
    try:
        _library()
    except NoKernelError as error:
        return str(error)
    return None


def settings_of(group: dict[str, Any], updates: int, scale: float) -> list[float]:
    """Of an update. ``updates``: how many there are with it. ``scale``: what gradients are divided by."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    root_correction = (1 - beta2**updates) ** 0.5
    moments = [1 - beta1, beta2, 1 - beta2]
    return [
        scale,
        lr / (1 - beta1**updates),
        root_correction,
        *moments,
        group["eps"],
        lr * group["weight_decay"],
    ]


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_compiled(cache_folder() / "kernels")))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).splitlines()[0]
        raise NoKernelError(f"the host's AdamW could not be compiled: {said}") from None


def _compiled(folder: Path) -> Path:
    """The library, for this kind of processor; another kind that shares the folder has one of its own."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "", *COMPILERS))), None)
    if compiler is None:
        raise NoKernelError("the host's AdamW needs a C++ compiler, such as g++")
    known = SOURCE.read_bytes() + " ".join((*FLAGS, compiler, *_processor())).encode()
    built = folder / f"host_adamw-{blake3(known).hexdigest(16)}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a node compile at once: whole files alone have the name.
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / built.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONGEST)
            made.replace(built)
    return built


def _processor() -> tuple[str, ...]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.system(), platform.machine(), flags


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
