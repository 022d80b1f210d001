"""One moment of a step: bytes by category of the ledger, besides parameters and optimizer states."""

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
        """On the device."""
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
        """Another moment: what comes on top of this one, or has gone since."""
        return Peak(
            name,
            self.grads + grads,
            self.activations + activations,
            self.logits + logits,
            self.buffers + buffers,
        )
