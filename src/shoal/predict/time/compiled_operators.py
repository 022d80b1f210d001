"""The kernels of a compiled block besides matrix products and attention, with the bytes that each moves.

The compiler fuses everything between two products into one kernel: it reads its inputs from memory and writes what a
product, attention or the backward pass reads. Tensors that the backward pass recomputes (all but those in
``facts/layout/saved_activations.py``) are recomputed in the kernel that uses them, and written only if a product reads
them. A pass covers all elements of a tensor, at the compute width.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.facts.model import Model
from shoal.predict.time.operators import (
    BlockOperators,
    EndOperators,
    OperatorWork,
    Tokens,
    Widths,
    biased,
    product_count,
)

# A calibration times one elementwise kernel; fused ones use memory just as well.
PART = "add"
# Dropout saves no mask: every kernel that reads dropped features hashes each one anew, once forward and three times
# backward. That is integer arithmetic; on an H200 one hash takes as long as moving this many bytes (measured on a
# compiled GPT-2 XL with dropout).
HASH_BYTES = 43
HASHES = 1, 3


def compiled_block(model: Model, mine: Tokens, widths: Widths) -> BlockOperators:
    """One layer, one micro-batch."""
    stream, whole = mine.between * model.hidden, mine.inside * model.hidden
    heads, inner = mine.inside * (mine.query + mine.key), mine.inside * mine.inner
    ways_in = 2 if model.gated else 1

    def kernel(elements: float) -> OperatorWork:
        return OperatorWork(PART, elements * widths.compute, 1)

    last = kernel(3 * stream)  # the MLP's output added to the stream
    activation = kernel((ways_in + 1) * inner)
    # Gradients of the inner width; the activation's output, recomputed for a weight gradient.
    activation_back = kernel((1 + 2 * ways_in + 1) * inner)
    turned, turned_back = [], []
    if model.positions == "rotary" or model.qk_norm:
        turned = [kernel(2 * heads)]
        turned_back = [kernel((3 if model.qk_norm else 2) * heads)]
        if model.latent is not None:
            # Rotated tensors, attention's output and attention's gradients are laid out by head; products read and
            # write by token.
            laid_out = kernel(2 * mine.inside * mine.query)
            turned, turned_back = [*turned, laid_out], [*turned_back, laid_out, laid_out]
    # A norm, backward: its input, and its output recomputed for the weight gradients; the gradients that reach it, one
    # from each product that reads it; the stream's gradient, read and written. Then three of these again, column by
    # column, for the gradient of the norm's own weight.
    sums = [kernel(elements) for elements in biased(model, mine)]
    if model.parallel_residual:
        # Both norms read the block's input, and both outputs are added to the stream together.
        joined = kernel(4 * stream)
        forward = [kernel(3 * stream), *turned, activation, joined]
        back = [kernel(3 * stream + (3 + ways_in) * whole + 2 * stream), kernel(6 * stream)]
        return BlockOperators(forward, [activation_back, *turned_back, *back, *sums], [joined])
    forward = [kernel(2 * stream), *turned, kernel(4 * stream), activation, last]
    first_norm_back = [kernel(2 * stream + 3 * whole + 2 * stream), kernel(3 * stream)]
    # The second norm's input is the sum of the block's input and attention's output.
    second_norm_back = [kernel(3 * stream + ways_in * whole + 2 * stream), kernel(3 * stream)]
    if model.output_norms:
        # Forward, these fuse into the sums after them. Backward, each reads its input and its output's gradient.
        behind = [kernel(3 * stream), kernel(3 * stream)]
        activation_back_first, second_norm_back = [*behind, activation_back], [*second_norm_back, *behind]
        backward = [*activation_back_first, *second_norm_back, *turned_back, *first_norm_back, *sums]
        return BlockOperators(forward, backward, [])
    backward = [activation_back, *second_norm_back, *turned_back, *first_norm_back, *sums]
    return BlockOperators(forward, backward, [last])


def compiled_dropout(elements: float) -> EndOperators:
    """Time that dropout masks over this many elements add to kernels that run anyway."""
    ahead, back = ([OperatorWork("hashes", times * HASH_BYTES * elements, 1)] for times in HASHES)
    return EndOperators(ahead, back)


@lru_cache(maxsize=256)
def compiled_operators(model: Model, widths: Widths) -> tuple[int, int]:
    """Kernels launched per layer, forward and backward, including products and attention."""
    found, products = compiled_block(model, Tokens(1, 1, 1, 1, 1), widths), product_count(model)
    return len(found.forward) + products + 1, len(found.backward) + 2 * products + 1
