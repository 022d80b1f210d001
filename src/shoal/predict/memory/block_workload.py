"""What decides a block's activation memory, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.facts.cluster.stack import Stack
from shoal.facts.layout import ContextKind, Recompute
from shoal.facts.model import Adapters


class BlockPeak(NamedTuple):
    """A moment of a block's backward pass."""

    bytes: float  # beyond what rests; a repeated forward pass included
    made: float | None  # how many of the MLP's weights' gradients are there by then; None: all of the block's
    exchange: float = 0.0  # in buffers: what other context ranks send and are sent
    waiting: int = 0  # how many of the MLP's weights' gradients wait for those of other tokens


class BlockActivations(NamedTuple):
    """Bytes of one block and one micro-batch on one rank."""

    resting: float  # kept between the passes
    working: tuple[BlockPeak, ...]  # the fullest moments of its backward pass
    opening: float  # at that pass's first product, when the first weight gradient is made, beyond what rests
    rounding: float  # and before that, while its operands are rounded to fp8, on top
    inner: float  # the MLP's product
    put_off: float  # of its weights' gradients, what those that are put off still need
    deferred: float  # kept between the two halves of a backward pass that is split
    held_input: bool  # whether ``resting`` holds the block's input itself
    reads_input: bool  # whether the backward pass needs it, once the forward pass is repeated
    forward: float = (
        0.0  # the fullest moment of its forward pass beyond what rests, where that can be the peak
    )
    after_experts: float = 0.0  # when routed experts' backward pass is over, beyond what rests
    # As the gradient of the MLP's way in is added up, beyond what rests; of so many of its matrices at once.
    adding_way_in: float = 0.0
    added_ways_in: int = 0
    # Of ``opening``, what has gone as the first gradient of experts is added up; 0: what is put off, as of an MLP.
    released: float = 0.0

    @property
    def fullest(self) -> float:
        """The most of its backward pass, beyond what rests."""
        return max(self.opening, *(moment.bytes for moment in self.working))


@dataclass(frozen=True)
class BlockWorkload:
    """Everything besides the model that decides what a block keeps."""

    tokens: int  # that a rank attends for; with tensor parallelism its group's
    rows: int  # sequences that they are of
    seq: int  # of a whole sequence
    tp: int
    sp: bool
    compute: int  # c
    stack: Stack
    recompute: Recompute
    cpu: bool
    dropout: bool
    cp: int  # ranks that share a sequence
    context: ContextKind | None  # how they exchange it; None: they are one
    adapters: Adapters | None  # None: all weights are trained
    compiled: bool = False
    fp8: bool = False
    ep: int = 1  # ranks that share experts
    nodes: int = 1  # that these are on
    parts: int = 1  # in which tokens travel to them
    crossed: int = 0  # tokens that come from there to a rank that passes them on
    trained: frozenset[str] | None = None  # projections that groups do not freeze; None: all
    norms: bool = True  # whether these are trained

    @property
    def stream(self) -> float:
        """Tokens of the residual stream that are here."""
        return self.tokens / self.tp if self.sp else self.tokens

    @property
    def wide(self) -> int:
        return max(self.compute, 4)
