"""Ledger: bytes that one rank holds at the peak of a step, by category."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CATEGORIES = ("params", "grads", "optimizer", "activations", "logits", "buffers")
# What is tracked by itself and is a part of a category.
PART_OF = {"messages": "buffers"}
# What waits in the host's memory: no part of what the device holds, also where both are one memory.
HOST = "host"


@dataclass(frozen=True)
class Ledger:
    """The first six add up to ``peak_allocated``; what comes on top of it is a band."""

    params: int  # weights at rest
    grads: int  # gradients that add up or wait for the update
    optimizer: int  # its states, master weights included
    activations: int  # what backward passes still need, their gradients on the way, the batch itself
    logits: int
    buffers: int  # weights gathered or cast, gradients on their way, messages between stages, tokens between experts
    peak_allocated: int
    reserved: int  # as the allocator holds it, with libraries' workspaces and what fragments
    device_total: int  # with the context and the communicators
    device_p90: int  # the same at the 90th percentile of fragmentation, which has to fit
    capacity: int
    worst_stage: int  # the rank of the pipeline that this is
    master: int = 0  # of ``optimizer``, the fp32 copies of half-precision weights
    instant: str = ""  # the moment of the step
    host: int = 0  # waiting in the host's memory
    host_capacity: int = 0  # a device's share of it
    nvme: int = 0  # and on its disks
    nvme_capacity: int = 0  # a device's share of those

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host <= self.host_capacity and self.nvme <= self.nvme_capacity

    @property
    def device_fits(self) -> bool:
        return self.device_p90 <= self.capacity

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
