"""Compile blocks with torch.compile: one graph for the layers of all local stages, with recomputation inside it.

The compiler fuses what lies between matmuls. What a block saves for its backward pass is not left to the compiler's
heuristics: checkpointing wraps the block inside the graph, and its policy keeps what
``facts/layout/saved_activations.py`` lists. Everything else is elementwise and is recomputed inside the backward
kernels.

Blocks differ only in their weights, which are inputs of the graph: it is traced once and serves all layers. Compilation
wraps ``forward``, not the module, so that hooks, such as FSDP's, stay outside.

A block whose experts are on several ranks is compiled in parts, around the exchange (``parallel/compile_parts.py``).

If compilation fails on a rank, that rank runs eager from then on and says why. Most peers need not follow, because
their blocks communicate nothing. Ranks that communicate inside blocks must: a compiled block recomputes less in its
backward pass than an eager one, so these ranks agree on each block when they first reach it.
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
from shoal.models.linear import Linear
from shoal.parallel import ring
from shoal.parallel.compile_parts import InParts, exchanges
from shoal.parallel.deferred import Deferred

# Operators that are expensive for the size of their result, by dispatcher name; names that a torch version lacks never
# match.
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
# Rotated queries and keys come out of a concatenation: keeping it saves the rotation in the backward pass.
ROTATED = frozenset({"aten::cat"})
# Tokens sorted by expert: the order is small, and making copies again costs as much as writing and reading them.
SORTED, COPIED = frozenset({"shoal::sort_by_expert"}), frozenset({"shoal::spread"})
# Results of collectives: keeping them means no traffic is repeated.
RECEIVED = frozenset({"_c10d_functional::wait_tensor"})
KEPT: dict[Recompute, frozenset[str]] = {
    "none": PRODUCTS | ATTENTION | ROTATED | SORTED | COPIED | RECEIVED,
    # Attention is recomputed, except ring attention: it would either keep what came from all ranks or send it again.
    "selective": PRODUCTS | ROTATED | SORTED | RECEIVED | {RING},
    "full": frozenset(),
}

# Training has one shape; of other callers' shapes only a few are compiled too.
MOST_SHAPES = 4
# Graphs per process: one for each shape, with and without gradients, and each window. Torch would stop at 8.
MOST_GRAPHS = 64

Forward = Callable[..., Any]


class CompiledBlocks:
    """A rank's compiled blocks, and how their compilation went."""

    # Compiled or not, a block's collectives are counted as they are issued (``observe/collectives.py``): a graph calls
    # them through torch's dispatcher, one by one. A step whose memory is tracked (``run.observe``) runs eager. The
    # flight recorder, which wraps the Python methods, does not see those that a graph issues.

    def __init__(
        self,
        blocks: list[nn.Module],
        kind: Recompute,
        backend: str,
        group: dist.ProcessGroup | None = None,
        deferred: Deferred | None = None,
    ) -> None:
        """Make these blocks run compiled. Their ``forward`` must be eager, with recomputation applied.

        ``group``: the ranks that communicate inside the blocks. ``deferred``: where backward passes leave weight
        gradients for later.
        """
        _settings()
        self.group, self.deferred = group, deferred
        self._tokens = 0  # of the block's input that runs now
        self.problem: str | None = None  # why blocks run eager after all
        self.seconds = 0.0  # seconds of compilation, including first runs
        self.shapes: set[torch.Size] = set()
        self._met: set[tuple[nn.Module, torch.Size, bool]] = set()
        self._compiled = torch.compile(checkpointed, backend=backend, dynamic=False, fullgraph=True)
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
        self._tokens = hidden.shape[:-1].numel()
        if (key := (block, hidden.shape, torch.is_grad_enabled())) in self._met:
            return compiled(hidden, *others)
        self._met.add(key)
        began = time.perf_counter()
        with _gradients_aside(block):
            output = compiled(hidden, *others)
        self.seconds += time.perf_counter() - began
        return output if self._agreed(hidden.device) else eager(hidden, *others)

    def _graph(self, kind: Recompute, plain: Forward, module: nn.Module, *arguments: Any) -> Any:
        """Run ``plain`` as a graph; where there can be none, run it eager and still join the peers' collectives."""
        if self.problem is None:
            try:
                carried = ([], ()) if self.deferred is None else self.deferred.carriers(module, self._tokens)
                return self._compiled(kind, plain, module, *carried, *arguments)
            except _compiler_errors() as error:
                self.problem = first_line(error)
        return plain(module, *arguments)

    def _agreed(self, device: torch.device) -> bool:
        """Whether all ranks that communicate in the block still run it compiled; if not, all fall back to eager."""
        if self.group is None:
            return self.problem is None
        failed = torch.tensor(int(self.problem is not None), device=device)
        dist.all_reduce(failed, group=self.group)
        if failed and self.problem is None:
            self.problem = "another rank that it meets in its blocks could not compile"
        return not failed

    def _takes(self, shape: torch.Size) -> bool:
        """Whether to compile for a shape: training shapes only. Others, such as a text that grows token by token, run
        eager.
        """
        if torch.is_grad_enabled() and len(self.shapes) < MOST_SHAPES:
            self.shapes.add(shape)
        return shape in self.shapes


@contextmanager
def _gradients_aside(block: nn.Module) -> Iterator[None]:
    """Hide gradients while tracing: they may be wider than their parameters (``grad_dtype``), which the compiler
    refuses.

    Gradients exist when a block first meets a shape in the middle of training, as in an evaluation.
    """
    held = [(parameter, parameter.grad) for parameter in block.parameters() if parameter.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def checkpointed(
    kind: Recompute,
    plain: Forward,
    module: nn.Module,
    linears: list[Linear],
    carriers: tuple[Tensor, ...],
    *arguments: Any,
) -> Any:
    """Run a block's eager forward pass; as a graph this is all that is compiled.

    ``linears`` and ``carriers`` belong to a split backward pass (``parallel/deferred.py``); otherwise they are empty.
    """
    for number, linear in enumerate(linears):
        linear.carriers = carriers[2 * number], carriers[2 * number + 1]
    # Pass the kind by name, which the compiler guards on; contexts passed as arguments all look alike to it.
    context = CONTEXTS[kind]
    # Random numbers are hashes here, so there is no generator state to keep.
    output = checkpoint(plain, module, *arguments, use_reentrant=False, preserve_rng_state=False, **context)
    for linear in linears:
        linear.carriers = None
    return output


def _keep(
    kept: frozenset[str], context: Any, operator: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    found = operator.name() in kept
    return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE


# Checkpointing contexts. They are module-level functions because torch's on-disk cache looks them up by name; their
# hash tells it that the policy is the one it compiled with.


def keep_for_none() -> Any:
    return create_selective_checkpoint_contexts(partial(_keep, KEPT["none"]))


def keep_for_selective() -> Any:
    return create_selective_checkpoint_contexts(partial(_keep, KEPT["selective"]))


# Keep a block's input alone. This needs a policy too: without one, torch 2.11 does not look into autograd functions and
# keeps the matmuls inside them (0.5 GB per block of a QLoRA 8B).
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
    """Set process-wide compiler settings. They are private to torch and the only way; torch 2.11 to 2.13 have them."""
    import torch._dynamo.config
    import torch._functorch.config

    # The on-disk cache knows graphs, but only the names of our custom operators.
    torch.compiler.config.cache_key_tag = _operators_hash()
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
    functorch: Any = torch._functorch.config
    for name in (
        # Compile the backward with the forward pass: an error in the backward pass would come too late to fall back to
        # eager.
        "force_non_lazy_backward_lowering",
        # The on-disk cache holds graphs and kernels. A graph includes all that its autograd functions do.
        "enable_autograd_cache",
        "autograd_cache_allow_custom_autograd_functions",
    ):
        if hasattr(functorch, name):
            setattr(functorch, name, True)
    # It warns that a region with a policy must not mutate tensors in place. Blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def _operators_hash() -> str:
    """A hash of the files that define the operators of blocks: a graph's text does not show how they differentiate."""
    modules = (varlen, attention_blocks, attention_rectangle, ring)
    sources = (Path(module.__file__ or "").read_bytes() for module in modules)
    return blake3(b"".join(sources)).hexdigest(16)


def _followed() -> bool:
    """Whether an observer wants to see every operator, as ``observe/memory.py`` does: torch then compiles nothing."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(not mode.ignore_compile_internals() for mode in modes)


class CacheCounts(NamedTuple):
    """How many of this process's graphs were found in the on-disk cache, and how many were not."""

    hits: int
    misses: int


def cache_counts() -> CacheCounts:
    """Torch's own counts, from a private place (2.11 to 2.13)."""
    from torch._dynamo.utils import counters

    graphs = counters["inductor"]
    return CacheCounts(
        graphs["fxgraph_cache_hit"], graphs["fxgraph_cache_miss"] + graphs["fxgraph_cache_bypass"]
    )


def _compiler_errors() -> tuple[type[Exception], ...]:
    """The exceptions torch raises when it cannot trace or compile; anything else a block raises is its own error."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit
