"""The table of parallelism and memory strategies: each one's layout keys, source file, memory category and
messages.

Parity disables strategies in this order and names the file of the one at fault; a dry run attributes memory and
messages to them; configs and the planner's search leave out those without a file. Every key of a layout belongs to
exactly one row, checked on import.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from shoal.facts.layout import Layout
from shoal.facts.ledger import HOST


@dataclass(frozen=True)
class Strategy:
    """One strategy. ``name`` is also the purpose recorded for the messages its ranks exchange."""

    name: str
    key: str  # the layout key that enables it: the strategy is in use where this differs from its default
    policies: tuple[str, ...] = ()  # keys that configure it and have no meaning without it
    resets: tuple[str, ...] = ()  # keys of other strategies that may lose their legality without this one
    file: str = ""  # the source file; empty: the engine does not run it yet
    unrun: tuple[str, ...] = ()  # for ``offload``: the parts that the engine does not run yet
    # Policy values that have a source file of their own.
    elsewhere: dict[tuple[str, object], str] = field(default_factory=dict)
    off: str = "1"  # the key's value when the strategy is off, as a layout writes it
    memory: str = ""  # ledger category of the tensors its code allocates
    made_in: tuple[str, ...] = ()  # where those are allocated: our files, or directories of torch
    strict: bool = True  # whether it can sum in the order of a single rank
    # What a step waits for if its messages are not overlapped, and how to reduce that.
    exposed: tuple[str, str] = ("", "")

    @property
    def runs(self) -> bool:
        """Whether the engine runs it; for ``offload``, apart from the parts in ``unrun``."""
        return bool(self.file)

    def lacks(self, layout: Layout) -> bool:
        """Whether the layout asks for a part of it that the engine does not run."""
        if not self.works(layout):
            return False
        return not self.runs or any(set(part.kinds) & set(self.unrun) for part in layout.offload)

    def works(self, layout: Layout) -> bool:
        """Whether the layout uses it."""
        return bool(getattr(layout, self.key) != Layout.model_fields[self.key].default)

    def file_in(self, layout: Layout) -> str:
        """The source file, given this layout's policies."""
        elsewhere = (file for (key, value), file in self.elsewhere.items() if getattr(layout, key) == value)
        return next(elsewhere, self.file)


# Purposes of messages: two strategies' names, and the control messages that belong to no strategy.
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
    """Map every key of a layout to its strategy; raises if a key belongs to none or to several."""
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
    """Strategies that a layout uses and the engine does not run."""
    return [one for one in STRATEGIES if one.lacks(layout)]


def purpose_of(group: str) -> str:
    """The purpose of a process group, from its name: ``pp``, ``tp copies``, ``fsdp·cp/ep``, ``world``."""
    axis = re.split("[ ·/]", group)[0]
    return CONTROL if axis in ("control", "world") else OWNERS[axis].name
