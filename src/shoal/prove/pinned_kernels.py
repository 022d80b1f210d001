"""Pin the attention kernels of the target device for a dry run, and fail if others were used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.facts.cluster.attention_kernels import AttentionKernel, answers_by_token, attention_kernel
from shoal.facts.precision import COMPUTE_BYTES
from shoal.observe.subclasses import takes_itself_apart
from shoal.predict.workload import Workload
from shoal.prove.fake_world import Mode

# The operators that tensors without data go through here: a CPU's kernel saves what CUDA's fused ones save, which is
# queries, keys, values, the result and a log-sum-exp per query and head. The unfused form is the same code everywhere.
OPERATORS: dict[str, AttentionKernel] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "fused",
    "aten::_scaled_dot_product_cudnn_attention": "fused",
    "aten::_scaled_dot_product_flash_attention": "fused",
    "aten::_scaled_dot_product_efficient_attention": "fused",
    "aten::_safe_softmax": "unfused",
    "aten::_softmax": "unfused",
}
# Attention's softmax has four dimensions (rows, heads, tokens, features); a router's has fewer.
HEADS = 4
# Windows and rings use custom operators, which save the same on every device and in every precision.
ANYWHERE = ("shoal::attend_within", "shoal::attend_turn")


class WrongKernel(RuntimeError):
    """The step used another kernel than the target device would."""


class UsedKernels(Mode):
    """Records which attention kernels a step uses."""

    def __init__(self, wanted: AttentionKernel, device: str, by_token: bool) -> None:
        super().__init__()
        self.wanted, self.device = wanted, device
        self.by_token = by_token  # the layout of the device kernel's result
        self.used: dict[str, AttentionKernel] = {}
        self.anywhere = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if takes_itself_apart(types):
            return NotImplemented
        name = func._schema.name
        result = func(*args, **(kwargs or {}))
        self.anywhere |= name in ANYWHERE
        if name in OPERATORS and args[0].dim() == HEADS:
            self.used[name] = OPERATORS[name]
            if self.by_token and OPERATORS[name] == "fused":
                output, *others = result
                return (output.transpose(1, 2).contiguous().transpose(1, 2), *others)
        return result

    def check(self) -> None:
        """Raise unless all attention used the device's kernel."""
        wrong = [name for name, kind in self.used.items() if kind != self.wanted]
        if wrong or not (self.used or self.anywhere):
            went = " and ".join(wrong) or "no kernel of attention that is known"
            raise WrongKernel(
                f"the dry run went through {went}; {self.device} would use {self.wanted} attention, "
                "so its memory would be another"
            )


@contextmanager
def pinned(workload: Workload) -> Iterator[UsedKernels]:
    """Inside the context, attention is computed the way the workload's device would compute it."""
    device = workload.cluster.device
    wanted = attention_kernel(device, workload.recipe.precision)
    unfused = sdpa_kernel(SDPBackend.MATH) if wanted == "unfused" else nullcontext()
    by_token = answers_by_token(device.name == "cpu", COMPUTE_BYTES[workload.recipe.precision])
    with unfused, UsedKernels(wanted, device.name, by_token) as kernels:
        yield kernels


def _known() -> None:
    missing = [name for name in OPERATORS if not hasattr(torch.ops.aten, name.removeprefix("aten::"))]
    if missing:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)}")


_known()
