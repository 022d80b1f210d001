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
    products_forward = products_input = products_weight = 0.0
    forward = backward = 0.0  # bytes
    for one in products(model, share):
        ahead, inputs, weights = kernels.ways(one, share.compiled)
        products_forward += ahead
        products_input += inputs
        products_weight += weights
        # Projections of the same width read the same input, which is rounded once.
        rows = one.groups * one.rows
        forward += INPUTS.forward * rows * one.inner + WEIGHTS.forward * one.parameters
        backward += INPUTS.backward * rows * one.inner + WEIGHTS.backward * one.parameters
        backward += one.times * GRADIENTS * rows * one.columns
    saved = 1 - 1 / faster
    ahead = kernels.moved(forward * COMPILED_FUSION) - saved * products_forward
    back = kernels.moved(backward * COMPILED_FUSION)
    return Seconds(
        plain.forward + ahead,
        plain.input + back - saved * products_input,
        plain.weight - saved * products_weight,
        plain.again,
        plain.full + ahead,
    )
