"""How fp8 products change a layer's time: they are faster, but their operands must be rounded first.

Assumes compiled blocks, as on GPUs. One pass over an operand finds its largest value, and the next rounds it; the
backward pass rounds inputs again and also lays operands out by column.
"""

from __future__ import annotations

from shoal.facts.model import Model
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.layer import COMPILED_FUSION, LayerShare, Passes, Seconds, products

# Bytes per value: read for the largest, read again and written in fp8; gradients are written twice.
INPUTS = Passes(2 + 2 + 1, 2 + 2 + 1)
GRADIENTS = 2 + 2 + 1 + 1
WEIGHTS = Passes(2 + 1, 2 + 1)


def in_float8(model: Model, kernels: Kernels, share: LayerShare, plain: Seconds, faster: float) -> Seconds:
    """The layer in fp8. ``plain``: the layer in bf16. ``faster``: fp8 matrix throughput relative to bf16."""
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
