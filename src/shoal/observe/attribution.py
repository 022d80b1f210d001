"""Attribute a tensor to the module and pass that created it, and so to a memory category.

In the forward pass that is the module being called. In the backward pass autograd runs nodes created by a module's
forward pass; nodes are numbered in order of creation, so a node's number identifies the module.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shoal.facts.strategies import BY_NAME, PIPELINE, STRATEGIES
from shoal.observe.collectives import group_of_call
from shoal.observe.source_lines import line_of_ours
from shoal.observe.subclasses import plain_tensors

# Categories by code location: the innermost frame on the stack that is listed here decides.
PLACES = {
    **{
        place if place.startswith("torch/") else f"shoal/{place}": one.memory
        for one in STRATEGIES
        for place in one.made_in
    },
    "shoal/parallel/shared_gradients.py": "buffers",
    "shoal/train/optimizer.py": "buffers",
    "torch/optim/": "buffers",
}
# Full gradients that FSDP accumulates over the micro-batches of a pipeline.
ADDED_UP = "to_accumulated_grad_if_needed"
# What a pipeline sends becomes a message, whatever it was before. Others send tensors that they hold for another
# reason.
SENDS = ("c10d::send", "c10d::batch_p2p_ops")
OF_WEIGHTS = {"params", "buffers", "grads", "optimizer"}
# ``models/wide_product.py``: the head's weight gradient, where the loss goes through its tokens in chunks.
PRODUCTS = ("aten::mm", "aten::addmm", "shoal::wide_product")
GROUPED = torch.ops.aten._grouped_mm.default
STACKED = 3  # dimensions of a grouped product of tokens with each other: an expert weight gradient
LOOKED_UP = (torch.ops.aten.embedding_dense_backward.default,)
DEPTH = 40  # stack frames to inspect


# Returns a tensor's category.
Known = Callable[[Tensor], str | None]


class Attribution(NamedTuple):
    """A tensor's category, and the module and pass that created it."""

    category: str
    module: str
    phase: str  # "forward" or "backward"
    where: str  # the line of Shoal's code that was executing

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


class AllocatingCode(NamedTuple):
    """Code that allocates, kept alive so that its identity stays unique; None: its purpose is unknown."""

    code: CodeType
    category: str | None


def _category_of(code: CodeType) -> str | None:
    if code.co_name == ADDED_UP:
        return "grads"
    return next((kind for part, kind in PLACES.items() if part in code.co_filename), None)


class Attributions:
    """Tracks the active modules of some networks, and says where a new tensor comes from."""

    def __init__(
        self, networks: Iterable[nn.Module], parameters: Iterable[Tensor], purposes: Mapping[str, str]
    ) -> None:
        """``parameters``: those that the networks compute with. ``purposes``: what groups of ranks are for."""
        self._purposes = purposes
        self._names = {
            module: _short(name) for network in networks for name, module in network.named_modules()
        }
        self._parameters = list(parameters)
        self._stack: list[str] = [""]
        # From each of these node numbers on, nodes belong to the module next to it.
        self._numbers: list[int] = [0]
        self._owners: list[str] = [""]
        self._places: dict[int, AllocatingCode] = {}

    def __enter__(self) -> Attributions:
        self._shapes = {shape for plain in plain_tensors(self._parameters) for shape in _either_way(plain)}
        self._hooks = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def of(self, operator: Any, arguments: tuple[Any, ...], result: Tensor, known: Known) -> Attribution:
        """The attribution of an operator's result while it executes; ``known``: the category of its arguments."""
        node = current_node()
        if node is not None and len(self._stack) == 1:
            module, phase = self._owner(node), "backward"
        else:
            module, phase = self._stack[-1], "forward" if node is None else "backward"
        category = self._by_place()
        if category is None and self._is_of_a_weight(operator, arguments, result, phase, known):
            category = "buffers"
        if category is None:
            category = "logits" if module == "lm_head" else "activations"
        return Attribution(category, module, phase, line_of_ours())

    def sent_as(self, operator: Any, arguments: tuple[Any, ...]) -> str | None:
        """The new category of a sent tensor; None if it does not change."""
        if operator._schema.name not in SENDS:
            return None
        group = group_of_call(operator, arguments, {})
        purpose = self._purposes.get(group.group_name) if group is not None else None
        return BY_NAME[PIPELINE].memory if purpose == PIPELINE else None

    def _is_of_a_weight(
        self, operator: Any, arguments: tuple[Any, ...], result: Tensor, phase: str, known: Known
    ) -> bool:
        """Whether the result is a cast weight, or its gradient before it reaches the gradient buffers."""
        sources = {known(tensor) for tensor in plain_tensors(arguments)}
        if not sources or sources <= OF_WEIGHTS:
            return bool(sources)
        # A weight gradient is the product of two activations, an input gradient that of one and the weight. Some
        # schedules compute it after the backward pass, when no module is active; the loss computes the head's in the
        # forward pass.
        late = phase == "backward" or len(self._stack) == 1 or self._stack[-1] == "lm_head"
        product = late and operator._schema.name in PRODUCTS and not sources & OF_WEIGHTS
        stacked = operator is GROUPED and result.dim() == STACKED
        return (product and result.shape in self._shapes) or stacked or operator in LOOKED_UP

    def _by_place(self) -> str | None:
        frame: FrameType | None = sys._getframe(2)
        for _ in range(DEPTH):
            if frame is None:
                return None
            code = frame.f_code
            # By identity: a code object's hash covers all of its contents, and this is looked up for every frame.
            known = self._places.get(id(code))
            if known is None:
                known = self._places[id(code)] = AllocatingCode(code, _category_of(code))
            if known.category is not None:
                return known.category
            frame = frame.f_back
        return None

    def _owner(self, node: Any) -> str:
        return self._owners[bisect_right(self._numbers, number_of(node)) - 1]

    def _entered(self, module: nn.Module, arguments: Any) -> None:
        name = self._names.get(module)
        self._stack.append(self._stack[-1] if name is None else name)
        self._note()

    def _left(self, module: nn.Module, arguments: Any, result: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = next_number()
        if number == self._numbers[-1]:
            self._owners[-1] = self._stack[-1]
        else:
            self._numbers.append(number)
            self._owners.append(self._stack[-1])


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to, from the parameter's full name."""
    return _short(parameter.rpartition(".")[0])


def _short(name: str) -> str:
    """Drop the common prefix of all names: the decoder's own name is empty, like the network's."""
    return f"{name}.".removeprefix("network.").removeprefix("model.").removesuffix(".")


def _either_way(tensor: Tensor) -> tuple[torch.Size, ...]:
    return (tensor.shape, tensor.shape[::-1]) if tensor.dim() == 2 else ()


# Three private functions of torch (2.11 to 2.13): no public API tells which node the backward pass is at.


def current_node() -> Any:
    """The autograd node being executed; None outside a backward pass."""
    return torch._C._current_autograd_node()


def next_number() -> int:
    """The number that the next node created in this thread will have."""
    return torch._C._autograd._get_sequence_nr()


def number_of(node: Any) -> int:
    """A node's number; an accumulation node, where gradients end, has one beyond all others."""
    return int(node._sequence_nr())


for _function in ("_current_autograd_node", "_autograd"):
    if not hasattr(torch._C, _function):
        raise RuntimeError(f"torch {torch.__version__} has no torch._C.{_function}")
