"""Time of adapters beside a layer's projections, in either pass.

Their products are too narrow to compute much: what takes time are passes over what projections read and give.
Forward, A reads a projection's input; what B makes is added to its result, which is read and written. Backward, both
factors' gradients read the result's; A's reads the input again, and what it sends on is written and added.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.model import Model
from shoal.facts.model.parameters import block_parameters, is_matrix
from shoal.facts.model.tensor_split import tensor_part
from shoal.predict.time.kernels import Kernels
from shoal.predict.time.layer import LayerShare, Seconds

# Passes over a projection's features in and out.
FORWARD, BACKWARD = (1, 2), (3, 2)


def beside(model: Model, kernels: Kernels, share: LayerShare, plain: Seconds) -> Seconds:
    """``plain``: the layer without them."""
    inputs, outputs = adapted_widths(model, share.experts, share.adapted, share.tp)
    ahead, back = (
        kernels.moved(float(kernels.width) * share.tokens * (ways[0] * inputs + ways[1] * outputs))
        for ways in (FORWARD, BACKWARD)
    )
    return plain._replace(forward=plain.forward + ahead, input=plain.input + back, full=plain.full + ahead)


@lru_cache(maxsize=1024)
def adapted_widths(model: Model, experts: bool, targets: tuple[str, ...], tp: int) -> tuple[int, int]:
    """Features in and out of all projections of a layer that have adapters, on a tensor rank."""
    inputs = outputs = 0
    for one in block_parameters(model, experts):
        if is_matrix(one.name, one.shape) and one.name.rsplit(".", 2)[-2] in targets:
            out, into = tensor_part(one, tp, 0).box.shape
            inputs, outputs = inputs + into, outputs + out
    return inputs, outputs
