"""Time that adapters add to a layer's projections, forward and backward.

Their products are too narrow to need much compute: the time goes into passes over the projections' inputs and outputs.
Forward, A reads a projection's input; B's result is added to the projection's output, which is read and written.
Backward, both factors' gradients read the output gradient; A's reads the input again, and its input gradient is
written and added.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.model import Model
from shoal.facts.model.parameters import block_parameters, is_matrix
from shoal.facts.model.tensor_split import tensor_part
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.layer import LayerShare, Seconds

# Passes over a projection's inputs and outputs.
FORWARD, BACKWARD = (1, 2), (3, 2)


def beside(model: Model, kernels: Kernels, share: LayerShare, plain: Seconds) -> Seconds:
    """The layer with adapters. ``plain``: the layer without them."""
    inputs, outputs = adapted_widths(model, share.experts, share.adapted, share.tp)
    ahead, back = (
        kernels.moved(float(kernels.width) * share.tokens * (ways[0] * inputs + ways[1] * outputs))
        for ways in (FORWARD, BACKWARD)
    )
    return plain._replace(forward=plain.forward + ahead, input=plain.input + back, full=plain.full + ahead)


@lru_cache(maxsize=1024)
def adapted_widths(model: Model, experts: bool, targets: tuple[str, ...], tp: int) -> tuple[int, int]:
    """Total input and output features of a layer's projections with adapters, on a tensor rank."""
    inputs = outputs = 0
    for one in block_parameters(model, experts):
        if is_matrix(one.name, one.shape) and one.name.rsplit(".", 2)[-2] in targets:
            out, into = tensor_part(one, tp, 0).box.shape
            inputs, outputs = inputs + into, outputs + out
    return inputs, outputs
