"""The inputs that determine a block's activation memory, and the result of pricing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.facts.cluster.stack import Stack
from shoal.facts.layout import ContextKind, Recompute
from shoal.facts.model import Adapters


class BlockPeak(NamedTuple):
    """One candidate peak of a block's backward pass."""

    bytes: float  # beyond what is saved between passes; includes a recomputed forward pass
    made: float | None  # how many of the MLP's weight gradients exist by then; None: all of the block's
    exchange: float = 0.0  # counted as buffers: what context ranks send and receive
    waiting: int = 0  # how many of the MLP's weight gradients wait for those of other tokens
    added: int = 0  # and how many of those are being added to them


class BlockActivations(NamedTuple):
    """Bytes of one block and one micro-batch on one rank."""

    resting: float  # saved between the passes
    working: tuple[BlockPeak, ...]  # candidate peaks of the backward pass
    opening: float  # at the first weight gradient of the backward pass, beyond ``resting``
    rounding: float  # extra bytes just before that, while its operands are rounded to fp8
    inner: float  # the MLP's product
    put_off: float  # what deferred weight gradients of the MLP still need
    deferred: float  # saved between the two halves of a split backward pass
    held_input: bool  # whether ``resting`` includes the block's input itself
    reads_input: bool  # whether the backward pass needs the input after the forward pass is recomputed
    forward: float = 0.0  # peak of the forward pass beyond ``resting``, if that can be the step's peak
    after_experts: float = 0.0  # when the routed experts' backward pass is over, beyond ``resting``
    # While the gradients of gate_proj and up_proj are accumulated, beyond ``resting``; and how many of these matrices
    # at once.
    adding_way_in: float = 0.0
    added_ways_in: int = 0
    # Of ``opening``, what has gone as the first gradient of experts is added up; 0: what is put off, as of an MLP.
    released: float = 0.0

    @property
    def fullest(self) -> float:
        """The peak of the backward pass, beyond ``resting``."""
        return max(self.opening, *(moment.bytes for moment in self.working))


@dataclass(frozen=True)
class BlockWorkload:
    """Everything besides the model that determines what a block saves."""

    tokens: int  # tokens that a rank attends for; with tensor parallelism those of its group
    rows: int  # sequences that they belong to
    seq: int  # length of a whole sequence
    tp: int
    sp: bool
    compute: int  # c, bytes per value
    stack: Stack
    recompute: Recompute
    cpu: bool
    dropout: bool
    cp: int  # context-parallel ranks per sequence
    context: ContextKind | None  # how they exchange it; None without context parallelism
    adapters: Adapters | None  # None: all weights are trained
    compiled: bool = False
    fp8: bool = False
    ep: int = 1  # expert-parallel ranks
    nodes: int = 1  # nodes that those span
    parts: int = 1  # parts in which tokens travel to their experts
    crossed: int = 0  # tokens received from other nodes by a rank that forwards them
    trained: frozenset[str] | None = None  # projections that recipe groups do not freeze; None: all
    norms: bool = True  # whether norms are trained

    @property
    def stream(self) -> float:
        """Tokens of the residual stream on this rank."""
        return self.tokens / self.tp if self.sp else self.tokens

    @property
    def wide(self) -> int:
        return max(self.compute, 4)
