"""Time of unpacking a layer's frozen 4-bit weights (QLoRA) before each use.

It reads codes and scales and writes bf16; on an H200 at 1.85 TB/s, where copies reach 4.1 (``benchmarks/kernels.py``).
"""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.facts.nf4 import WIDTH
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.layer import LayerShare, Seconds, products

MOVED = float(WIDTH) + 2
# Relative to the memory rate of other kernels.
RATE = 0.45


def unpacked(model: Model, kernels: Kernels, share: LayerShare, plain: Seconds) -> Seconds:
    """``plain``: the layer with weights in the compute precision."""
    parameters = sum(one.parameters for one in products(model, share))
    each = kernels.moved(MOVED * parameters) / RATE
    return plain._replace(forward=plain.forward + each, input=plain.input + each, full=plain.full + each)
