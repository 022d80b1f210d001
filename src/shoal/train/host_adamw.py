"""AdamW on the host's cores in one pass over a piece (``host_adamw.cpp``), compiled on first use.

Torch's fused update needs gradients as wide as their weights and writes no narrow copy, so the gradient has to be
widened before it and the weight narrowed after it: at best 87 GB/s on the 16 cores beside an H200, with 28 bytes per
parameter. What inductor makes of the same formula reaches 145 GB/s but holds the GIL, so the next forward pass, which
should hide the update, could not be issued. Hence a hand-written kernel, compiled in a second or two and cached.
Without a C++ compiler, torch's update runs in parts (``train/host_update.py``).
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
    FLAGS = (*FLAGS, "-mprefer-vector-width=512")  # gcc defaults to 256 bits on processors that have both
COMPILERS = ("c++", "g++", "clang++")
LONGEST = 120  # seconds, on a busy machine


class NoKernelError(Exception):
    """Why this machine has no kernel."""


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
    """Update a weight in place. All tensors are flat, contiguous and equally long. ``narrow`` receives a copy of the
    new weight, and may share memory with the gradient.

    ``what``: the whole update; only the narrow copy, leaving weight and moments as they were; or only those, later and
    bit-identical, where ``narrow`` only gives its dtype. ``settings``: from ``settings_of``. Raises NoKernelError if
    the kernel cannot be compiled.
    """
    run = getattr(_library(), f"adamw_{what}_{_name(gradient.dtype)}_{_name(narrow.dtype)}")
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (weight, mean, square, gradient, narrow))
    length = ctypes.c_int64(weight.numel())
    run(*pointers, length, (ctypes.c_double * len(settings))(*settings), ctypes.c_int(threads))


def takes(weight: torch.dtype, gradient: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether the kernel supports these dtypes."""
    if weight == torch.float64:
        return gradient == narrow == torch.float64
    if weight != torch.float32 or narrow not in (torch.float32, torch.bfloat16):
        return False
    return gradient in (narrow, torch.float32)


def problem() -> str | None:
    """Why there is no kernel, in one line; None if there is one."""
    try:
        _library()
    except NoKernelError as error:
        return str(error)
    return None


def settings_of(group: dict[str, Any], updates: int, scale: float) -> list[float]:
    """The settings of one update. ``updates``: the number of updates including this one. ``scale``: divides
    gradients.
    """
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
    """The library for this kind of processor; other kinds that share the folder have their own."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "", *COMPILERS))), None)
    if compiler is None:
        raise NoKernelError("the host's AdamW needs a C++ compiler, such as g++")
    known = SOURCE.read_bytes() + " ".join((*FLAGS, compiler, *_processor())).encode()
    built = folder / f"host_adamw-{blake3(known).hexdigest(16)}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a node compile at the same time: rename, so that only complete files have the name.
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
