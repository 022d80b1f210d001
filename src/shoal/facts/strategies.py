"""Strategies: one row for each, with its keys, its file, whether the engine runs it, and what it makes and sends.

Parity switches strategies off in this order and blames their files; a dry run attributes memory and messages to them;
configs and the planner's search leave out what has no file yet. Every key of a layout belongs to one row: this module
cannot be imported otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from shoal.facts.layout import Layout
from shoal.facts.ledger import HOST


@dataclass(frozen=True)
class Strategy:
    """``name`` is also the purpose of what its ranks send each other."""

    name: str
    key: str  # of the layout; it differs from its default where the strategy is at work
    policies: tuple[str, ...] = ()  # keys that say how, and mean nothing without it
    resets: tuple[str, ...] = ()  # other strategies' keys, whose values need not be legal without it
    file: str = ""  # where it lives; empty: the engine does not run it yet
    unrun: tuple[str, ...] = ()  # of ``offload``, the parts that the engine does not run yet
    # A policy's value with its own file.
    elsewhere: dict[tuple[str, object], str] = field(default_factory=dict)
    off: str = "1"  # how a layout says that it is not wanted
    memory: str = ""  # the category of what its code makes
    made_in: tuple[str, ...] = ()  # that code: files of ours, or directories of torch
    strict: bool = True  # whether it can add up in the order of one rank
    # What a step waits for where its messages are not hidden, and what helps.
    exposed: tuple[str, str] = ("", "")

    @property
    def runs(self) -> bool:
        """Whether the engine runs it; of ``offload`` all but what ``unrun`` names."""
        return bool(self.file)

    def lacks(self, layout: Layout) -> bool:
        """Whether a layout asks for something of it that the engine does not run."""
        if not self.works(layout):
            return False
        return not self.runs or any(set(part.kinds) & set(self.unrun) for part in layout.offload)

    def works(self, layout: Layout) -> bool:
        """Whether it is at work in a layout."""
        return bool(getattr(layout, self.key) != Layout.model_fields[self.key].default)

    def file_in(self, layout: Layout) -> str:
        """Where it lives, with the policies of this layout."""
        elsewhere = (file for (key, value), file in self.elsewhere.items() if getattr(layout, key) == value)
        return next(elsewhere, self.file)


# What is sent for no strategy's sake has a purpose too: what all ranks agree on.
PIPELINE, SHARD, CONTROL = "pipeline", "shard", "control"

STRATEGIES = (
    Strategy("recompute", "recompute", file="parallel/recompute.py", off="none"),
    Strategy(
        "tensor",
        "tp",
        policies=("sp",),
        file="parallel/tensor.py",
        memory="activations",
        made_in=("parallel/tensor_region.py",),
        strict=False,
        exposed=("tensor-parallel collectives", "a smaller tp and more fsdp"),
    ),
    Strategy(
        "context",
        "cp",
        policies=("cp_kind",),
        file="parallel/context.py",
        elsewhere={("cp_kind", "ring"): "parallel/ring.py", ("cp_kind", "ulysses"): "parallel/ulysses.py"},
        memory="buffers",
        made_in=("parallel/ring_exchange.py",),
        strict=False,
        exposed=("context-parallel keys and values", "a smaller cp"),
    ),
    Strategy(
        "expert",
        "ep",
        file="parallel/experts.py",
        memory="activations",
        made_in=("parallel/dispatch.py", "parallel/dispatch_by_node.py", "parallel/token_exchange.py"),
        strict=False,
        exposed=("expert all-to-all", "a smaller ep"),
    ),
    Strategy(
        PIPELINE,
        "pp",
        policies=("schedule", "chunks"),
        resets=("micro",),
        file="parallel/pipeline.py",
        memory="messages",
        made_in=("parallel/pipeline.py",),
        exposed=("pipeline messages", "more micro-batches, or a smaller pp"),
    ),
    Strategy(
        SHARD,
        "fsdp",
        policies=("zero", "unit"),
        resets=("micro", "ep"),
        file="parallel/shard.py",
        elsewhere={("zero", 1): "parallel/zero.py", ("zero", 2): "parallel/zero.py"},
        memory="buffers",
        made_in=("torch/distributed/fsdp/", "parallel/zero.py"),
        exposed=(
            "weight all-gather and gradient reduce-scatter",
            "a larger micro, or zero=2 or zero=1 if it fits",
        ),
    ),
    Strategy(
        "replicate",
        "dp",
        resets=("micro", "ep"),
        file="parallel/replicate.py",
        memory="buffers",
        made_in=("parallel/replicate.py",),
        exposed=("gradient all-reduce", "more tokens per step (recipe.batch), or recipe.reduce=bf16"),
    ),
    Strategy("accumulate", "micro", file="train/step.py"),
    Strategy(
        "offload",
        "offload",
        file="parallel/offload/activations.py",
        off="none",
        memory=HOST,
        made_in=("parallel/offload/host_memory.py",),
    ),
)


def owners(layout: type[Layout]) -> dict[str, Strategy]:
    """The strategy that every key of a layout belongs to; raises where that is none, or several."""
    keys = [(key, one) for one in STRATEGIES for key in (one.key, *one.policies)]
    count = Counter(key for key, _ in keys)
    wrong = [
        key for key in {**layout.model_fields, **count} if count[key] != 1 or key not in layout.model_fields
    ]
    if wrong:
        raise LookupError(
            f"facts/strategies.py: not in one row each, or no keys of a layout: {', '.join(wrong)}"
        )
    return dict(keys)


OWNERS = owners(Layout)
BY_NAME = {one.name: one for one in STRATEGIES}


def missing(layout: Layout) -> list[Strategy]:
    """What is at work in a layout and not run by the engine."""
    return [one for one in STRATEGIES if one.lacks(layout)]


def purpose_of(group: str) -> str:
    """What a group of ranks communicates for, by its name: ``pp``, ``tp copies``, ``fsdp·cp/ep``, ``world``."""
    axis = re.split("[ ·/]", group)[0]
    return CONTROL if axis in ("control", "world") else OWNERS[axis].name
