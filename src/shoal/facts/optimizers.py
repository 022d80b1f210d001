"""Which rule updates a parameter, and which states it keeps. Decided once here: the engine executes it, ``predict``
prices it, checkpoints are checked against it.

Names and shapes are those of canonical parameters. A matrix is a two-dimensional parameter, or one matrix in a stack
of experts, [experts, out, in].
"""

from __future__ import annotations

from typing import Literal

from shoal.facts.blockwise import SCALES, block_length
from shoal.facts.model.parameters import EMBEDDING, HEAD, POSITIONS

Rule = Literal["adamw", "sgd", "lion", "adafactor", "muon"]
RULES: tuple[Rule, ...] = ("adamw", "sgd", "lion", "adafactor", "muon")

# Both ends of the network, whose rows are looked up or scored one by one: orthogonalising them makes no sense.
ENDS = frozenset({EMBEDDING, POSITIONS, HEAD})

# The tensors that a rule keeps per parameter, under torch's names. Adafactor is handled separately.
_KEPT: dict[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
# Not the optimizer's, but stored with its states: an exponential average of the weights (``recipe.ema``).
AVERAGE = "ema"
# Adafactor: for a matrix the means of its squared gradient over each row and each column, for a vector all elements.
ROWS, COLUMNS, UNFACTORED = "row_var", "col_var", "variance"
FACTORS = (ROWS, COLUMNS)
# States without one value per element of a matrix: a checkpoint stores them for canonical matrices.
OF_MATRICES = (*FACTORS, *SCALES)
# Lion processes this many elements at a time, which keeps its temporaries small.
LION_ELEMENTS = 1 << 24
# The same for stochastic rounding. Bytes of temporaries per element: three int64 to draw the random bits; AdamW has
# the hash and five fp32 numbers. A GPU kernel keeps them in registers.
ROUNDED_ELEMENTS = 1 << 20
DRAWING_BYTES, ROUNDED_BYTES = 24.0, 28.0
# With 8-bit moments: rounding to nearest, and what stochastic rounding adds.
CODED_BYTES, CODED_BY_CHANCE = 32.0, 12.0
ITERATIONS = 5  # of Newton–Schulz, with which Muon orthogonalises a matrix
# Rules that depend on the number of updates so far.
COUNTING: tuple[Rule, ...] = ("adamw", "adafactor")
# Rules that need a whole matrix in one place, and so cannot be split by element.
WHOLE: tuple[Rule, ...] = ("adafactor", "muon")


def rule_of(optimizer: Rule, name: str, dimensions: int) -> Rule:
    """Muon updates the hidden layers' matrices; AdamW updates embeddings, head, norms and biases."""
    return "adamw" if optimizer == "muon" and (dimensions < 2 or name in ENDS) else optimizer


def states_of(optimizer: Rule, name: str, dimensions: int) -> tuple[str, ...]:
    """The tensors that the optimizer keeps of a parameter."""
    rule = rule_of(optimizer, name, dimensions)
    if rule == "adafactor":
        return FACTORS if dimensions >= 2 else (UNFACTORED,)
    return _KEPT[rule]


def factor_shape(shape: tuple[int, ...], state: str) -> tuple[int, ...]:
    """The shape of one of Adafactor's means of a matrix or a stack of them; or of its blocks' scales."""
    if state in SCALES:
        return (*shape[:-1], shape[-1] // (block_length(shape) or 1))
    return shape[:-1] if state == ROWS else (*shape[:-2], shape[-1])


def states_per_element(optimizer: Rule) -> int:
    """States per element of a hidden matrix; Adafactor's row and column means do not count."""
    return 0 if optimizer == "adafactor" else len(states_of(optimizer, "", 2))
