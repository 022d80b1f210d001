"""What products in fp8 make of a layer's time: they are faster, and their operands are rounded first.

Compiled, as they are on GPUs. The largest value of an operand is found in one pass over it, and the next rounds it; the
backward pass rounds inputs again, and lays operands out by column as well.
"""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.layer import COMPILED_FUSION, LayerShare, Passes, Seconds, products

# Bytes for each value: read for its largest, read again and written in fp8; of gradients, written twice.
INPUTS = Passes(2 + 2 + 1, 2 + 2 + 1)
GRADIENTS = 2 + 2 + 1 + 1
WEIGHTS = Passes(2 + 1, 2 + 1)


def in_float8(model: Model, kernels: Kernels, share: LayerShare, plain: Seconds, faster: float) -> Seconds:
    """``plain``: the layer in bf16. ``faster``: how many times faster the device multiplies in fp8."""
    saved = {"forward": 0.0, "input": 0.0, "weight": 0.0}
    forward = backward = 0.0
    for rows, inner, columns, times in products(model, share):
        saved["forward"] += times * kernels.product(rows, inner, columns)
        saved["input"] += times * kernels.product(rows, columns, inner)
        saved["weight"] += times * kernels.product(inner, rows, columns)
        # Projections of the same width read the same input, which is rounded once.
        forward += INPUTS.forward * rows * inner + times * WEIGHTS.forward * inner * columns
        backward += INPUTS.backward * rows * inner + times * WEIGHTS.backward * inner * columns
        backward += times * GRADIENTS * rows * columns
    kept = 1 - 1 / faster
    ahead = kernels.moved(forward * COMPILED_FUSION) - kept * saved["forward"]
    back = kernels.moved(backward * COMPILED_FUSION)
    return Seconds(
        plain.forward + ahead,
        plain.input + back - kept * saved["input"],
        plain.weight - kept * saved["weight"],
        plain.again,
        plain.full + ahead,
    )
