"""Compile blocks with torch.compile: one graph for the layers of all stages here, recomputation inside of it.

The compiler fuses what lies between matrix products. What a block keeps for its backward pass is not left to its
heuristics: checkpointing goes around the block, inside the graph, and its policy keeps what ``facts/layout/kept.py``
lists. Everything else is elementwise and is computed again inside the kernels of the backward pass.

Blocks are alike but for their weights, which are inputs of the graph: it is traced once and serves all layers. Around
``forward`` and not around the module, so that hooks, such as FSDP's, stay outside.

A block whose experts are on several ranks is compiled in parts, around the exchange (``parallel/compile_parts.py``).

If compilation fails on a rank, that rank runs eager from then on and says why. Most of its peers need not follow, for
nothing is sent inside of their blocks. Ranks that meet there do: compiled blocks repeat less in their backward pass
than eager ones, so these ranks agree on each block when they first meet it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.facts.layout import Recompute
from shoal.facts.problem import first_line
from shoal.models import attention_blocks, attention_rectangle, varlen
from shoal.parallel import ring
from shoal.parallel.compile_parts import InParts, exchanges

# What is dear to compute for its size, by the dispatcher's names; what a version lacks is simply never seen.
PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::mm.dtype",
        "aten::addmm",
        "aten::linear",
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::_grouped_mm",
    }
)
RING = "shoal::attend_turn"
ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "shoal::attend_within",
        RING,
        "torch_attn::_varlen_attn",
        "flex_attention",
    }
)
# The rotated queries and keys come out of a concatenation: kept, a backward pass need not turn them again.
ROTATED = frozenset({"aten::cat"})
# Tokens sorted by expert: the order is small, and copies take as long to make as to write and read.
SORTED, COPIED = frozenset({"shoal::sort_by_expert"}), frozenset({"shoal::spread"})
# Results of collectives: with them no traffic is repeated.
RECEIVED = frozenset({"_c10d_functional::wait_tensor"})
KEPT: dict[Recompute, frozenset[str]] = {
    "none": PRODUCTS | ATTENTION | ROTATED | SORTED | COPIED | RECEIVED,
    # Attention is repeated, but not a ring's: it would keep what came from all ranks, or send it again.
    "selective": PRODUCTS | ROTATED | SORTED | RECEIVED | {RING},
    "full": frozenset(),
}

# Training has one shape; what calls the blocks with others gets some of those compiled too.
MOST_SHAPES = 4
# Graphs of one process: for each shape with and without gradients, and each window. Torch would stop at 8.
MOST_GRAPHS = 64

Forward = Callable[..., Any]


class CompiledBlocks:
    """The compiled blocks of a rank, and what became of them."""

    # Compiled or not, a block's collectives are counted as they are issued (``observe/collectives.py``): a graph calls
    # them through torch's dispatcher, one by one. A step whose memory is tracked (``run.observe``) runs eager. The
    # flight recorder, which wraps the methods that Python calls, does not see those that a graph issues.

    def __init__(
        self,
        blocks: list[nn.Module],
        kind: Recompute,
        backend: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """From now on these blocks run compiled. ``forward`` of each is eager, with recomputation applied.

        ``group``: the ranks that meet inside of the blocks.
        """
        _settings()
        self.group = group
        self.problem: str | None = None  # why blocks run eager after all
        self.seconds = 0.0  # that compilation took, first runs included
        self.shapes: set[torch.Size] = set()
        self._met: set[tuple[nn.Module, torch.Size, bool]] = set()
        self._compiled = torch.compile(_checkpointed, backend=backend, dynamic=False, fullgraph=True)
        for block in blocks:
            compiled: Forward = partial(self._graph, kind, type(block).forward, block)
            if exchanges(block):
                compiled = InParts(block, self._graph, kind)
            block.forward = partial(self._run, block, compiled, block.forward)

    def _run(
        self, block: nn.Module, compiled: Forward, eager: Forward, hidden: Tensor, *others: Any
    ) -> Tensor:
        if self.problem is not None or _followed() or not self._takes(hidden.shape):
            return eager(hidden, *others)
        if (key := (block, hidden.shape, torch.is_grad_enabled())) in self._met:
            return compiled(hidden, *others)
        self._met.add(key)
        began = time.perf_counter()
        with _gradients_aside(block):
            output = compiled(hidden, *others)
        self.seconds += time.perf_counter() - began
        return output if self._agreed(hidden.device) else eager(hidden, *others)

    def _graph(self, kind: Recompute, plain: Forward, module: nn.Module, *arguments: Any) -> Any:
        """What ``plain`` gives, from a graph; where there can be none, it sends all the same what peers receive."""
        if self.problem is None:
            try:
                return self._compiled(kind, plain, module, *arguments)
            except _compiler_errors() as error:
                self.problem = first_line(error)
        return plain(module, *arguments)

    def _agreed(self, device: torch.device) -> bool:
        """Whether all ranks that meet in the block go on in the same way; they do once none is compiled."""
        if self.group is None:
            return self.problem is None
        failed = torch.tensor(int(self.problem is not None), device=device)
        dist.all_reduce(failed, group=self.group)
        if failed and self.problem is None:
            self.problem = "another rank that it meets in its blocks could not compile"
        return not failed

    def _takes(self, shape: torch.Size) -> bool:
        """Shapes that are trained on. Others, such as those of a text that grows by a token at a time, run eager."""
        if torch.is_grad_enabled() and len(self.shapes) < MOST_SHAPES:
            self.shapes.add(shape)
        return shape in self.shapes


@contextmanager
def _gradients_aside(block: nn.Module) -> Iterator[None]:
    """Gradients may be wider than their parameters (``grad_dtype``), which the compiler refuses to trace.

    They are there when a block first meets a shape in the midst of training, as an evaluation's.
    """
    held = [(parameter, parameter.grad) for parameter in block.parameters() if parameter.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def _checkpointed(kind: Recompute, plain: Forward, module: nn.Module, *arguments: Any) -> Any:
    # The kind by its name, which the compiler checks; a context given as an argument it takes for any other.
    context = CONTEXTS[kind]
    # Random numbers are hashes here, so there is no generator whose state would have to be kept.
    return checkpoint(plain, module, *arguments, use_reentrant=False, preserve_rng_state=False, **context)


def _keep(
    kept: frozenset[str], context: Any, operator: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    found = operator.name() in kept
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE


# Contexts of checkpointing. Functions of the module, for torch's cache on disk has to find them by name; by their hash
# it knows that a policy is the one it compiled with.


def keep_for_none() -> Any:
    return create_selective_checkpoint_contexts(partial(_keep, KEPT["none"]))


def keep_for_selective() -> Any:
    return create_selective_checkpoint_contexts(partial(_keep, KEPT["selective"]))


# A block's input alone. By a policy too: without one torch 2.11 does not look into functions of autograd, and keeps the
# products in there (of a QLoRA 8B 0.5 GB a block).
def keep_for_full() -> Any:
    return create_selective_checkpoint_contexts(partial(_keep, KEPT["full"]))


CONTEXTS: dict[Recompute, dict[str, Any]] = {
    "none": {"context_fn": keep_for_none},
    "selective": {"context_fn": keep_for_selective},
    "full": {"context_fn": keep_for_full},
}
for kind, context in CONTEXTS.items():
    for function in context.values():
        function.cache_hash = " ".join(sorted(KEPT[kind]))


def _settings() -> None:
    """Of this process. They are private to torch, and the only way to say so; 2.11 to 2.13 have them."""
    import torch._dynamo.config
    import torch._functorch.config

    # What is kept on disk knows graphs, and of our own operators nothing but their names.
    torch.compiler.config.cache_key_tag = _operators_hash()
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    functorch: Any = torch._functorch.config
    for name in (
        # With the forward pass: an error in a backward pass would come when it is too late to run eager.
        "force_non_lazy_backward_lowering",
        # What is kept on disk are graphs and kernels. Functions of autograd are in a graph with all that they do.
        "enable_autograd_cache",
        "autograd_cache_allow_custom_autograd_functions",
    ):
        if hasattr(functorch, name):
            setattr(functorch, name, True)
    # It warns that a region whose policy it is given must not change tensors in place. Blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def _operators_hash() -> str:
    """Changes with the files whose operators blocks call: how they differentiate is in no graph's text."""
    modules = (varlen, attention_blocks, attention_rectangle, ring)
    sources = (Path(module.__file__ or "").read_bytes() for module in modules)
    return blake3(b"".join(sources)).hexdigest(16)


def _followed() -> bool:
    """Whether an observer wants to see every operator, as ``observe/memory.py`` does: torch compiles nothing then."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(not mode.ignore_compile_internals() for mode in modes)


class CacheCounts(NamedTuple):
    """Graphs of this process that were found compiled on disk, and those that were not."""

    hits: int
    misses: int


def cache_counts() -> CacheCounts:
    """As torch counts them, in a place that is private to it (2.11 to 2.13)."""
    from torch._dynamo.utils import counters

    graphs = counters["inductor"]
    return CacheCounts(
        graphs["fxgraph_cache_hit"], graphs["fxgraph_cache_miss"] + graphs["fxgraph_cache_bypass"]
    )


def _compiler_errors() -> tuple[type[Exception], ...]:
    """What torch raises where it cannot trace or compile; whatever else a block raises is its own error."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit
