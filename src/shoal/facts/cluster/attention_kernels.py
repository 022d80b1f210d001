"""Which attention kernel a device uses. Prediction and dry run must agree, because memory depends on it."""

from __future__ import annotations

from typing import Literal

from shoal.facts.cluster.devices import Device, Precision

AttentionKernel = Literal["fused", "unfused"]


def attention_kernel(device: Device, precision: Precision) -> AttentionKernel:
    """The kernel that torch's SDPA chooses: fused ones (cuDNN's, flash, memory-efficient; a CPU's own) save no scores.

    CUDA has none for fp64.
    """
    return "unfused" if device.name != "cpu" and precision == "fp64" else "fused"


def repeats_keys(bytes_a_value: int) -> bool:
    """Whether shared key/value heads are repeated for every query head: no fused CUDA kernel shares them in fp32.

    The same on every device, so that a run without a GPU shows what a GPU would hold.
    """
    return bytes_a_value >= 4


def answers_by_token(cpu: bool, bytes_a_value: int) -> bool:
    """Whether attention's output is laid out by token, as the next projection reads it; otherwise it is copied once
    more.

    CUDA's fp32 kernel (memory-efficient) does. Its 16-bit kernels (cuDNN's) and those of CPUs return it by head.
    """
    return not cpu and bytes_a_value >= 4
