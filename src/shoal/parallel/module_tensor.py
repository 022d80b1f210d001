"""Tensor parallelism of a module that Shoal did not build, by a plan that says which layers are split, and how.

A plan maps module names, with ``*`` for a number, to the split styles of ``transformers``: a Hugging Face model ships
one, or the user gives one. Layers become this rank's part of themselves, as plain tensors; their inputs and outputs are
summed or gathered (``tensor_region``). Attention then has fewer heads, so a module must read their number off the
shapes. Experts with stacked weights are not split: each rank holds some of them and skips the other ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.comm.renamed import all_gather_single
from shoal.facts.model.tensor_split import Box, TensorPart, cut_evenly
from shoal.facts.problem import BadInput
from shoal.models.logits import rows_here
from shoal.parallel.mesh import Mesh
from shoal.parallel.module_stages import STAGE_WORDS, named_modules
from shoal.parallel.tensor_region import SumBackward, SumForward

# Split by output features, and by input features; with ``gather`` or ``split`` the output or input is whole.
COLUMN, COLUMN_GATHER = "colwise", "colwise_gather_output"
ROW, ROW_SPLIT = "rowwise", "rowwise_split_input"
VOCABULARY = "embedding_rowwise"
# Whole on every rank. With the second style, each rank sees only a part of what its gradient depends on.
WHOLE, WHOLE_SUMMED = "replicate", "replicated_with_grad_allreduce"
# A module of stacked experts, called with tokens, the numbers of their experts, and the weights of these.
EXPERTS = "ep_dispatch_experts"
STYLES = (COLUMN, COLUMN_GATHER, ROW, ROW_SPLIT, VOCABULARY, EXPERTS, WHOLE, WHOLE_SUMMED)
# The last is of plans that cut every expert; whole ones are the same network, and their products are larger.
OTHER_NAMES = {"colwise_rep": COLUMN_GATHER, "rowwise_rep": ROW, "moe_tp_experts": EXPERTS}
HEADS = ("num_attention_heads", "num_key_value_heads")

TEACH = 'run.prepare(…, plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}), see docs/library.md; or tp=1'

ADAPTERS = "fsdp= or pp= of a PEFT model; or lora = {…} in a config of shoal train, which has tp"


def plan_of(module: nn.Module, given: Mapping[str, str] | None, tp: int) -> dict[str, str]:
    """The split style of every module that a plan names. ``given``: the user's plan, preferred over the module's
    own.
    """
    own = {name: word for name, word in (given or {}).items() if word not in STAGE_WORDS}
    plan = own or getattr(module, "tp_plan", None)
    if not plan:
        raise BadInput(f"layout tp={tp}: {type(module).__name__} has no plan for tensor parallelism", TEACH)
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        style = OTHER_NAMES.get(word, word)
        names = named_modules(module, pattern)
        if not names and own:
            raise BadInput(
                f"plan: the model has no module {pattern!r}", "names as model.named_modules() has them"
            )
        if names and style not in STYLES:
            raise BadInput(
                f"layout tp={tp}: {word!r} of {pattern} is a way to split that Shoal has not",
                f"tp=1, or a plan of {', '.join(STYLES)}",
            )
        found.update(dict.fromkeys(names, style))
    if not found:
        raise BadInput(
            f"layout tp={tp}: the plan of {type(module).__name__} names none of its modules"
            + (", for PEFT has renamed them" if hasattr(module, "peft_config") else ""),
            ADAPTERS if hasattr(module, "peft_config") else TEACH,
        )
    return found


def check_plan(module: nn.Module, plan: Mapping[str, str], tp: int) -> None:
    """Refuse what does not divide, before any layer is split."""
    config: Any = getattr(module, "config", None)
    for name in HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise BadInput(f"layout tp={tp} does not divide {name}={heads}", "another tp")
    for name, style in plan.items():
        layer = module.get_submodule(name)
        if style in (WHOLE, WHOLE_SUMMED):
            continue
        if hasattr(layer, "base_layer"):
            raise BadInput(f"layout tp={tp}: {name} has an adapter, which is not split here", ADAPTERS)
        if style == EXPERTS:
            _check_experts(layer, name, tp)
            continue
        wanted = nn.Embedding if style == VOCABULARY else nn.Linear
        if not isinstance(layer, wanted):
            raise BadInput(
                f"plan: {name} is a {type(layer).__name__}, and {style!r} splits {wanted.__name__} layers",
                "tp=1",
            )
        width = layer.weight.shape[0 if style == COLUMN else 1]
        if style in (COLUMN, ROW, ROW_SPLIT) and width % tp:
            raise BadInput(f"layout tp={tp} does not divide the {width} features of {name}", "another tp")


def _check_experts(layer: nn.Module, name: str, tp: int) -> None:
    count = getattr(layer, "num_experts", None)
    stacked = [one.shape[0] if one.dim() > 1 else None for one in layer.parameters()]
    if not isinstance(count, int) or not stacked or {*stacked} != {count}:
        raise BadInput(
            f"plan: {name} is a {type(layer).__name__}, and {EXPERTS!r} splits modules whose weights are "
            "stacked, num_experts of each",
            "tp=1",
        )
    if count % tp:
        raise BadInput(f"layout tp={tp} does not divide the {count} experts of {name}", "another tp")


def split_module(
    module: nn.Module, plan: Mapping[str, str], mesh: Mesh
) -> tuple[dict[str, TensorPart], set[str]]:
    """Split a module whose values are the same on all ranks. Returns this rank's part of each parameter, by name,
    and the names of parameters whose gradients tensor ranks have to sum.
    """
    group, tp, index = mesh.group("tp"), mesh.layout.tp, mesh.coords["tp"]
    assert group is not None
    names = {parameter: name for name, parameter in module.named_parameters()}
    parts: dict[str, TensorPart] = {}
    summed: set[str] = set()
    for path, style in plan.items():
        layer: Any = module.get_submodule(path)
        if style == WHOLE_SUMMED:
            summed.update(names[parameter] for parameter in layer.parameters())
        elif style == EXPERTS:
            boxes = [_cut(one, names, 0, tp, index, parts) for one in layer.parameters()]
            # transformers' grouped products look for the number beyond the last where this is said.
            layer.num_experts, layer._is_expert_parallel = boxes[0].shape[0], True
            layer.forward = MethodType(_experts(layer.forward, group, tp, boxes[0]), layer)
        elif style != WHOLE:
            weight, bias = layer.weight, getattr(layer, "bias", None)
            first = _cut(weight, names, 1 if style in (ROW, ROW_SPLIT) else 0, tp, index, parts)
            if isinstance(bias, nn.Parameter) and style in (COLUMN, COLUMN_GATHER):
                _cut(bias, names, 0, tp, index, parts)
            layer.forward = MethodType(_forward(style, group, tp, index, first), layer)
    return parts, summed


def _cut(
    parameter: Tensor,
    names: dict[Any, str],
    dimension: int,
    tp: int,
    index: int,
    parts: dict[str, TensorPart],
) -> Box:
    """Replace a parameter by this rank's box of it; a tied parameter is cut once."""
    name = names[parameter]
    if name not in parts:
        box = cut_evenly(tuple(parameter.shape), dimension, tp, index)
        parameter.data = parameter.data[box.slices].clone()
        parts[name] = TensorPart(box)
    box = parts[name].box
    if box != cut_evenly(box.whole, dimension, tp, index):
        raise BadInput(f"plan: {name} is tied, and split in two ways", "one way for both")
    return box


def _experts(
    whole: Callable[..., Tensor], group: dist.ProcessGroup, tp: int, box: Box
) -> Callable[..., Tensor]:
    """The module's own pass with the experts that are here. Others' tokens get a number beyond the last, which modules
    of ``transformers`` skip, and no weight.
    """
    first, count = box.offset[0], box.shape[0]

    def experts(layer: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        here = (chosen >= first) & (chosen < first + count)
        chosen = torch.where(here, chosen - first, count)
        weights = torch.where(here, SumBackward.apply(weights, group, tp), 0)
        tokens = SumBackward.apply(tokens, group, tp)
        made = whole(tokens, chosen, weights)
        if torch.is_grad_enabled() and not made.requires_grad:
            # No token has come, and the sums of gradients would wait for this rank.
            made = made + sum(0 * one.sum() for one in (tokens, weights, *layer.parameters()))
        summed: Tensor = SumForward.apply(made, group, tp)
        return summed

    return experts


def _forward(style: str, group: dist.ProcessGroup, tp: int, index: int, box: Box) -> Callable[..., Tensor]:
    """The layer's own forward plus its collectives. ``box``: this rank's part of its weight."""

    def column(layer: Any, x: Tensor) -> Tensor:
        return F.linear(SumBackward.apply(x, group, tp), layer.weight, layer.bias)

    def column_gather(layer: Any, x: Tensor) -> Tensor:
        gathered: Tensor = GatherFeatures.apply(column(layer, x), group, tp, index, box.whole[0])
        return gathered

    def row(layer: Any, x: Tensor) -> Tensor:
        summed: Tensor = SumForward.apply(F.linear(x, layer.weight), group, tp)
        return summed if layer.bias is None else summed + layer.bias

    def row_split(layer: Any, x: Tensor) -> Tensor:
        whole: Tensor = SumBackward.apply(x, group, tp)
        return row(layer, whole.narrow(-1, box.offset[1], box.shape[1]))

    def vocabulary(layer: Any, tokens: Tensor) -> Tensor:
        place, here = rows_here(tokens, box.offset[0], box.shape[0])
        found = torch.where(here[..., None], F.embedding(place, layer.weight), 0)
        summed: Tensor = SumForward.apply(found, group, tp)
        return summed

    ways = {
        COLUMN: column,
        COLUMN_GATHER: column_gather,
        ROW: row,
        ROW_SPLIT: row_split,
        VOCABULARY: vocabulary,
    }
    return ways[style]


class GatherFeatures(torch.autograd.Function):
    """Forward: all-gather features. Backward: this rank's slice of a gradient that every rank has in full."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, group: dist.ProcessGroup, ranks: int, index: int, whole: int
    ) -> Tensor:
        most = -(-whole // ranks)
        ctx.first, ctx.size = min(index * most, whole), local.shape[-1]
        # Only the last ranks can have fewer features, so padding ends up at the end.
        padded = F.pad(local, (0, most - local.shape[-1])).movedim(-1, 0).contiguous()
        gathered = padded.new_empty(ranks * most, *padded.shape[1:])
        all_gather_single(gathered, padded, group=group)
        return gathered[:whole].movedim(0, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradient.narrow(-1, ctx.first, ctx.size).contiguous(), None, None, None, None
