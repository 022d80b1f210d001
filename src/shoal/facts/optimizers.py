"""Which rule updates a parameter, and what it keeps of it. Decided here once: the engine obeys it, ``predict`` prices
it, a checkpoint is checked against it.

Names and shapes are those of canonical parameters. A matrix is a parameter of two dimensions, or one of a stack of
experts, [experts, out, in]: every expert's matrix is one by itself.
"""

from __future__ import annotations

from typing import Literal

from shoal.facts.blockwise import SCALES, block_length
from shoal.facts.model.parameters import EMBEDDING, HEAD, POSITIONS

Rule = Literal["adamw", "sgd", "lion", "adafactor", "muon"]
RULES: tuple[Rule, ...] = ("adamw", "sgd", "lion", "adafactor", "muon")

# Both ends of the network, whose rows are looked up or scored one by one: an orthogonal matrix means nothing there.
ENDS = frozenset({EMBEDDING, POSITIONS, HEAD})

# The tensors that a rule keeps of a parameter, under torch's names for them. Adafactor's are another matter.
_KEPT: dict[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
# Not the optimizer's, but kept beside its states: an exponential average of the weights (``recipe.ema``).
AVERAGE = "ema"
# Adafactor: of a matrix the means of its squared gradient over each row and each column, of a vector all of them.
ROWS, COLUMNS, UNFACTORED = "row_var", "col_var", "variance"
FACTORS = (ROWS, COLUMNS)
# States that have not one value for each element of a matrix: a checkpoint has them of canonical matrices.
OF_MATRICES = (*FACTORS, *SCALES)
# Lion works through so many elements at a time: what it computes on the way is small.
LION_ELEMENTS = 1 << 24
# So does what rounds stochastically. Bytes that it holds of each on the way: three of int64 to draw the chances; AdamW
# has the hash and five numbers in fp32. A GPU's kernel has them in registers.
ROUNDED_ELEMENTS = 1 << 20
DRAWING_BYTES, ROUNDED_BYTES = 24.0, 28.0
# Where moments are in 8 bits: to the nearest, and what chances add.
CODED_BYTES, CODED_BY_CHANCE = 32.0, 12.0
ITERATIONS = 5  # of Newton and Schulz's, by which Muon makes a matrix orthogonal
# Rules that know how many updates there were.
COUNTING: tuple[Rule, ...] = ("adamw", "adafactor")
# Rules for which all of a matrix has to meet somewhere, and which therefore are no matter of one element alone.
WHOLE: tuple[Rule, ...] = ("adafactor", "muon")


def rule_of(optimizer: Rule, name: str, dimensions: int) -> Rule:
    """Muon is for matrices of the hidden layers; AdamW has embeddings, head, norms and biases."""
    return "adamw" if optimizer == "muon" and (dimensions < 2 or name in ENDS) else optimizer


def states_of(optimizer: Rule, name: str, dimensions: int) -> tuple[str, ...]:
    """The tensors that the optimizer keeps of a parameter."""
    rule = rule_of(optimizer, name, dimensions)
    if rule == "adafactor":
        return FACTORS if dimensions >= 2 else (UNFACTORED,)
    return _KEPT[rule]


def factor_shape(shape: tuple[int, ...], state: str) -> tuple[int, ...]:
    """Of one of Adafactor's means of a matrix, or of a stack of them; of the scales of its blocks."""
    if state in SCALES:
        return (*shape[:-1], shape[-1] // (block_length(shape) or 1))
    return shape[:-1] if state == ROWS else (*shape[:-2], shape[-1])


def states_per_element(optimizer: Rule) -> int:
    """Of an element of a matrix that is not at an end of the network; Adafactor's means are of its rows and columns."""
    return 0 if optimizer == "adafactor" else len(states_of(optimizer, "", 2))
