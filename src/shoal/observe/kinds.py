"""Classify operators and kernels by name."""

from __future__ import annotations

import re

from shoal.facts.collectives import collective

MATRIX, ATTENTION, EMBEDDING, LOSS = "matrix products", "attention", "embedding", "loss"
MEMORY_BOUND = "elementwise"
COPIES = "copies to and from the host"
KINDS = (MATRIX, ATTENTION, MEMORY_BOUND, EMBEDDING, LOSS, COPIES)

# Among nested operators, the outermost one with a telling name decides: attention may use a matrix product.
_OPERATORS = (
    (ATTENTION, re.compile(r"scaled_dot_product|flash_attention|efficient_attention|^shoal::attend")),
    (LOSS, re.compile(r"cross_entropy|nll_loss|log_softmax|CrossEntropy|^shoal::(token|logits)_")),
    (EMBEDDING, re.compile(r"^aten::embedding")),
    (MATRIX, re.compile(r"^aten::(\w*mm|mkldnn_linear\w*)$")),
)
# Kernel names tell less than the operators that launch them, so they are used only in compiled code, which has none.
_KERNELS = (
    (LOSS, re.compile(r"nll_loss|LogSoftMax|log_softmax|Cross_?Entropy", re.IGNORECASE)),
    # Fused kernels are named after everything fused into them; only template kernels are products and attention.
    (MEMORY_BOUND, re.compile(r"^triton_(poi|red|per)_")),
    (ATTENTION, re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)),
    (MATRIX, re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|^triton_tem_\w*mm", re.IGNORECASE)),
    (EMBEDDING, re.compile(r"embedding", re.IGNORECASE)),
)
_LOSS_NODE = re.compile(r"NllLoss|LogSoftmax|CrossEntropy")
# Operators that only wrap others, or that communicate with other ranks.
_TALKING = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NOT_COMPUTING = ("autograd", "profiler", "torch", *_TALKING)


def of_operator(name: str) -> str | None:
    """The kind that an operator's name indicates, or None."""
    return next((kind for kind, pattern in _OPERATORS if pattern.search(name)), None)


def of_kernel(name: str) -> str | None:
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), None)


def computes(name: str) -> bool:
    """Whether it is one of torch's own operators, such as ``aten::mul``, rather than a frame around some."""
    space, colons, _ = name.partition("::")
    return bool(colons) and space not in _NOT_COMPUTING


def is_node_of_loss(name: str) -> bool:
    """Whether it computes the loss's own gradient, including what the loss recomputes."""
    return _LOSS_NODE.search(name) is not None


def talks(name: str) -> bool:
    """An operator that starts a collective; with gloo it also copies the data to send."""
    return name.partition("::")[0] in _TALKING and "::" in name


def is_collective(name: str) -> bool:
    """An NCCL kernel, or work of gloo's threads."""
    return name.startswith("gloo:") or (name.startswith("nccl") and not name.startswith("nccl:"))


def outlives_its_call(name: str) -> bool:
    """Ranges that torch opens when a collective is called and closes when it completes, on any thread."""
    return name.startswith(("nccl:", "gloo:"))


def is_message(name: str) -> bool:
    """A point-to-point message."""
    return name.startswith(("gloo:send", "gloo:recv", "c10d::send", "c10d::recv")) or "SendRecv" in name


def operation(name: str) -> str:
    """The collective's name, for any backend."""
    # NCCL implements all-to-all by sends and receives; a pipeline's messages have been separated before.
    return "all_to_all" if "SendRecv" in name else collective(name) or "other"
