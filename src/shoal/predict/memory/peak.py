"""A candidate memory peak of a step: bytes by ledger category, without parameters and optimizer states."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Bytes."""

    name: str = ""
    grads: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0

    def total(self) -> float:
        """Bytes on the device."""
        return self.grads + self.activations + self.logits + self.buffers

    def plus(
        self,
        name: str,
        *,
        grads: float = 0.0,
        activations: float = 0.0,
        logits: float = 0.0,
        buffers: float = 0.0,
    ) -> Peak:
        """Another moment, given by differences from this one; negative where memory has been freed."""
        return Peak(
            name,
            self.grads + grads,
            self.activations + activations,
            self.logits + logits,
            self.buffers + buffers,
        )
