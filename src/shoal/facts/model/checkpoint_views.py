"""How checkpoint tensors map to Shoal's parameters: which box of one is which box of the other.

Inside Shoal every model has Llama's names, torch's [out, in] layout and separate projections; a layer's experts are
two stacks, gate and up together, and down. A checkpoint has whatever its family uses on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.facts.model import Model
from shoal.facts.model.parameters import (
    GEMMA_NAMES,
    MIXTRAL_NAMES,
    STACKS,
    Parameter,
    llama_parameters,
    parameters,
)

# The canonical module for each checkpoint module; inside a layer, without the layer's prefix.
_GPT2_MODULES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "ln_1": "input_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_NEOX_MODULES = {
    "gpt_neox.embed_in": "model.embed_tokens",
    "input_layernorm": "input_layernorm",
    "attention.dense": "self_attn.o_proj",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
    "gpt_neox.final_layer_norm": "model.norm",
    "embed_out": "lm_head",
}
# The rows of Phi-3's fused projections, in order.
_PHI3_ROWS: dict[str, Callable[[Model], tuple[tuple[str, int], ...]]] = {
    "qkv_proj": lambda model: (
        ("q_proj", model.heads * model.head_dim),
        ("k_proj", model.kv_heads * model.head_dim),
        ("v_proj", model.kv_heads * model.head_dim),
    ),
    "gate_up_proj": lambda model: (("gate_proj", model.ffn), ("up_proj", model.ffn)),
}
MIXTRAL_MODULES = {theirs: ours for ours, theirs in MIXTRAL_NAMES.items()}
GEMMA_MODULES = {theirs: ours for ours, theirs in GEMMA_NAMES.items()}
_FUSED = ("attn.c_attn", "attention.query_key_value")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class View:
    """A box of a checkpoint tensor that equals, possibly transposed, a box of a canonical parameter.

    One expert's matrix is a box of the stack of all experts, which has one more dimension.
    """

    tensor: str
    tensor_offset: tuple[int, ...]
    canonical: str
    canonical_offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the box in the checkpoint tensor
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return len(self.canonical_offset) > len(self.shape)

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        if self.stacked:
            return (1, *self.shape)
        return self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True, slots=True)
class Overlap:
    """The intersection of a slice of a canonical parameter and a view: one box, in both coordinates."""

    tensor_offset: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    slice_offset: tuple[int, ...]  # relative to the slice's own corner
    slice_shape: tuple[int, ...]


def canonical_parameters(model: Model) -> list[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether weight decay applies: embedding first, layers in order, norm, head."""
    return [(parameter.name, parameter.shape, parameter.decayed) for parameter in llama_parameters(model)]


def views(model: Model) -> list[View]:
    """Every box of every checkpoint tensor. Together they cover each element on either side exactly once."""
    return [view for parameter in parameters(model) for view in _views_of(parameter, model)]


@lru_cache(maxsize=4)
def views_by_tensor(model: Model) -> Mapping[str, Sequence[View]]:
    """The boxes of every checkpoint tensor, by name, in order."""
    found: dict[str, list[View]] = {}
    for view in views(model):
        found.setdefault(view.tensor, []).append(view)
    return found


@lru_cache(maxsize=4)
def tensors_of_parameters(model: Model) -> Mapping[str, Sequence[str]]:
    """The checkpoint tensors that contain a part of each canonical parameter, in order."""
    found: dict[str, dict[str, None]] = {}
    for view in views(model):
        found.setdefault(view.canonical, {})[view.tensor] = None
    return {name: tuple(tensors) for name, tensors in found.items()}


def views_by_parameter(model: Model) -> dict[str, list[View]]:
    """The boxes of every canonical parameter, by name."""
    found: dict[str, list[View]] = {}
    for view in views(model):
        found.setdefault(view.canonical, []).append(view)
    return found


def intersect(view: View, canonical_offset: tuple[int, ...], shape: tuple[int, ...]) -> Overlap | None:
    """The part of a view within a rectangular slice of its canonical parameter, or None."""
    starts, sizes = [], []
    box = zip(view.canonical_offset, view.canonical_shape, strict=True)
    for (box_start, box_size), slice_start, slice_size in zip(box, canonical_offset, shape, strict=True):
        start = max(box_start, slice_start)
        size = min(box_start + box_size, slice_start + slice_size) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    within_slice = _minus(tuple(starts), canonical_offset)
    within_box = _minus(tuple(starts), view.canonical_offset)
    tensor_shape = tuple(sizes)
    if view.stacked:
        within_box, tensor_shape = within_box[1:], tensor_shape[1:]
    if view.transposed:
        within_box, tensor_shape = within_box[::-1], tensor_shape[::-1]
    tensor_offset = tuple(a + b for a, b in zip(view.tensor_offset, within_box, strict=True))
    return Overlap(tensor_offset, tensor_shape, within_slice, tuple(sizes))


def _views_of(parameter: Parameter, model: Model) -> Iterator[View]:
    if parameter.kind == "adapter":
        # Adapters are stored per projection, even if the family's files fuse projections.
        yield _whole(parameter, parameter.name)
        return
    if parameter.kind == "expert":
        yield _stacked(parameter)
        return
    if parameter.kind == "router":
        yield _whole(parameter, parameter.name.replace(".block_sparse_moe.", ".mlp."))
        return
    if model.family == "phi3" and (rows := _PHI3_ROWS.get(parameter.name.rsplit(".", 2)[-2])) is not None:
        path, start = parameter.name.rsplit(".", 2)[0], 0
        for projection, size in rows(model):
            yield _rows(parameter, f"{path}.{projection}.weight", start, 0, size, False)
            start += size
        return
    if model.family in ("gemma2", "gemma3_text") and parameter.layer is not None:
        path, module, leaf = parameter.name.rsplit(".", 2)
        yield _whole(parameter, f"{path}.{GEMMA_MODULES.get(module, module)}.{leaf}")
        return
    if model.family not in ("gpt2", "gpt_neox"):
        yield _whole(parameter, parameter.name)
        return
    module, _, leaf = parameter.name.rpartition(".")
    prefix = ""
    if parameter.layer is not None:
        module = module.split(f".{parameter.layer}.", 1)[1]
        prefix = f"model.layers.{parameter.layer}."
    # GPT-2's Conv1D stores [in, out]; embeddings and an untied head are ordinary.
    transposed = model.family == "gpt2" and parameter.kind in ("attention", "mlp") and leaf == "weight"
    if module in _FUSED:
        for projection, tensor_start, canonical_start, size in _fused_rows(model):
            name = f"{prefix}self_attn.{projection}.{leaf}"
            yield _rows(parameter, name, tensor_start, canonical_start, size, transposed)
    else:
        modules = _GPT2_MODULES if model.family == "gpt2" else _NEOX_MODULES
        yield _whole(parameter, f"{prefix}{modules[module]}.{leaf}", transposed)


def _fused_rows(model: Model) -> Iterator[tuple[str, int, int, int]]:
    """The output rows of a fused projection: (projection, row in the tensor, row in the parameter, count)."""
    if model.family == "gpt2":
        for position, projection in enumerate(_PROJECTIONS):
            yield projection, position * model.hidden, 0, model.hidden
        return
    for head in range(model.heads):
        for position, projection in enumerate(_PROJECTIONS):
            row = (head * len(_PROJECTIONS) + position) * model.head_dim
            yield projection, row, head * model.head_dim, model.head_dim


def _stacked(parameter: Parameter) -> View:
    """One expert's matrix: ``model.layers.0.mlp.experts.7.up_proj.weight``, or Mixtral's ``….experts.7.w3.weight``."""
    _, number, module, leaf = parameter.name.rsplit(".", 3)
    stack, place, each = STACKS[MIXTRAL_MODULES.get(module, module)]
    canonical = f"model.layers.{parameter.layer}.mlp.experts.{stack}.{leaf}"
    return View(parameter.name, (0, 0), canonical, (each * int(number) + place, 0, 0), parameter.shape)


def _whole(parameter: Parameter, canonical: str, transposed: bool = False) -> View:
    origin = (0,) * len(parameter.shape)
    return View(parameter.name, origin, canonical, origin, parameter.shape, transposed)


def _rows(
    parameter: Parameter, canonical: str, tensor_start: int, canonical_start: int, size: int, transposed: bool
) -> View:
    """Some output rows of a fused tensor; they are columns if it is stored transposed."""
    if len(parameter.shape) == 1:
        return View(parameter.name, (tensor_start,), canonical, (canonical_start,), (size,))
    if transposed:
        shape = (parameter.shape[0], size)
        return View(parameter.name, (0, tensor_start), canonical, (canonical_start, 0), shape, transposed)
    shape = (size, parameter.shape[1])
    return View(parameter.name, (tensor_start, 0), canonical, (canonical_start, 0), shape)


def _minus(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(left, right, strict=True))
