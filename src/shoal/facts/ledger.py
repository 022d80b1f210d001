"""The memory ledger: bytes that one rank holds at the peak of a step, by category."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CATEGORIES = ("params", "grads", "optimizer", "activations", "logits", "buffers")
# Tracked separately, but part of a category.
PART_OF = {"messages": "buffers"}
# Bytes in host memory: never part of device memory, even if both are the same memory.
HOST = "host"


@dataclass(frozen=True)
class Ledger:
    """The first six add up to ``peak_allocated``; what the device needs on top is a range."""

    params: int  # stored weights
    grads: int  # gradients that accumulate or wait for the update
    optimizer: int  # its states, including master weights
    activations: int  # saved for backward passes, gradients in flight within them, and the batch itself
    logits: int
    buffers: int  # gathered or cast weights, gradients being reduced, messages between stages, tokens between experts
    peak_allocated: int
    reserved: int  # by the allocator, with libraries' workspaces and fragmentation
    device_total: int  # with the CUDA context and communicators
    device_p90: int  # the same at the 90th percentile of fragmentation, which must fit
    capacity: int
    worst_stage: int  # the pipeline rank that this ledger is for
    master: int = 0  # of ``optimizer``, the fp32 copies of half-precision weights
    instant: str = ""  # the moment of the step
    host: int = 0  # offloaded to host memory
    host_capacity: int = 0  # a device's share of host memory
    nvme: int = 0  # offloaded to disk
    nvme_capacity: int = 0  # a device's share of the disks

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host <= self.host_capacity and self.nvme <= self.nvme_capacity

    @property
    def device_fits(self) -> bool:
        return self.device_p90 <= self.capacity

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
