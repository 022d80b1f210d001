"""Which attention kernel a device uses; prediction and dry run must agree, because memory depends on it."""

from __future__ import annotations

from typing import Literal

from shoal.facts.cluster.devices import Device, Precision

AttentionKernel = Literal["fused", "unfused"]


def attention_kernel(device: Device, precision: Precision) -> AttentionKernel:
    """As torch's SDPA chooses: fused kernels (cuDNN's, flash, memory-efficient; a CPU's own) keep no scores.

    CUDA has none for fp64.
    """
    return "unfused" if device.name != "cpu" and precision == "fp64" else "fused"


def repeats_keys(bytes_a_value: int) -> bool:
    """Whether heads that share keys and values are given copies of them: no fused kernel of CUDA's shares in fp32.

    On every device alike, so that a run without a GPU shows what one with it holds.
    """
    return bytes_a_value >= 4


def answers_by_token(cpu: bool, bytes_a_value: int) -> bool:
    """Whether attention's result lies token by token, as the next projection reads it; else it is copied once more.

    CUDA's kernel for fp32 does (the memory-efficient one). Those for 16 bits, cuDNN's, answer head by head, as CPU's.
    """
    return not cpu and bytes_a_value >= 4
