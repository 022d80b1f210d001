"""Tensor parallelism (``tp``, ``sp``): every rank computes some heads and some features of each block.

Projections into attention and MLP are column-split (by output features), so heads and activations need no
communication; those out of them are row-split (by input features), so ranks hold partial sums of the residual stream.
``tensor_region`` has the collectives, ``vocabulary`` the embedding and the head.

Why not DTensor and ``parallelize_module``: their styles cannot express key/value heads shared by neighbouring ranks,
vocabularies that do not divide, or a loss in chunks, and every operation on a DTensor pays for its dispatch. Plain
tensors and a few explicit collectives cover all of it; ``shoal bench step`` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shoal.facts.model import Model
from shoal.facts.model.parameters import EMBEDDING, by_name
from shoal.facts.model.tensor_split import tensor_part
from shoal.models.decoder import Block, Network
from shoal.models.experts import MixtureOfExperts
from shoal.models.linear import Linear
from shoal.models.router import Routing
from shoal.parallel.tensor_region import TensorRegion, all_gather, all_reduce
from shoal.parallel.vocabulary import VocabularyEmbedding, VocabularyHead


def split(network: Network, model: Model, tp: int, index: int, group: dist.ProcessGroup, sp: bool) -> None:
    """Reduce a meta-device network to rank ``index``'s part of it.

    Works on a pipeline stage too, which has only some of the modules. The gradients that ``facts.boxes.summed_over``
    names are left for the caller to sum, once per step.
    """
    stream = TensorRegion(group, tp, index, sp)
    cut_parameters(network, model, tp, index)
    for block in network.model.layers.values():
        assert isinstance(block, Block)
        split_block(block, stream)
    split_ends(network, model, stream)


def cut_parameters(network: Network, model: Model, tp: int, index: int) -> None:
    """Replace every parameter with this rank's box of it."""
    canonical = by_name(model)
    for name, whole in list(network.named_parameters()):
        box = tensor_part(canonical[name], tp, index).box
        module, _, leaf = name.rpartition(".")
        owner = network.get_submodule(module)
        setattr(owner, leaf, nn.Parameter(whole.new_empty(box.shape), requires_grad=whole.requires_grad))
        if isinstance(owner, Linear):
            owner.out_features, owner.in_features = owner.weight.shape
            if leaf == "weight" and owner.lora_dropout is not None:
                owner.lora_dropout.first = box.offset[1]


def split_block(block: Block, stream: TensorRegion) -> None:
    # One gather serves all projections that read its result. Row-split: the ranks' results are summed first, and the
    # bias is added once.
    attention, mlp = block.self_attn, block.mlp
    attention.register_forward_pre_hook(entering(stream))
    attention.o_proj.reduce = stream.leave
    attention.o_proj.sum_rows = stream.total
    if isinstance(mlp, MixtureOfExperts):
        split_mixture(mlp, stream)
    else:
        mlp.register_forward_pre_hook(entering(stream))
        mlp.down_proj.reduce = stream.leave
        mlp.down_proj.sum_rows = stream.total
    for dropout in (block.attention_dropout, block.mlp_dropout):
        dropout.register_forward_pre_hook(at_local_positions(stream))


def split_mixture(mixture: MixtureOfExperts, stream: TensorRegion) -> None:
    """The router reads the tokens that are local; experts, routed and shared, compute some features of all tokens.

    A routing weight's gradient depends on all features, so it is summed over the ranks, as a token's gradient is.
    """

    def enter(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        chosen = all_gather(routing.chosen, stream.group, stream.ranks) if stream.sp else routing.chosen
        return stream.enter(x), Routing(stream.enter(routing.weights), chosen)

    mixture.enter, mixture.leave = enter, stream.leave
    if mixture.shared_experts is not None:
        mixture.shared_experts.down_proj.sum_rows = stream.total
    if stream.sp:
        mixture.gate.complete = lambda counts: all_reduce(counts, stream.group)


def split_ends(network: Network, model: Model, stream: TensorRegion) -> None:
    decoder = network.model
    embedding, head = decoder.embed_tokens, network.lm_head
    box = tensor_part(by_name(model)[EMBEDDING], stream.ranks, stream.index).box
    if embedding is not None:
        decoder.embed_tokens = VocabularyEmbedding(embedding, box, stream)
        decoder.embedding_dropout.register_forward_pre_hook(at_local_positions(stream))
    if decoder.embed_positions is not None:
        decoder.embed_positions.register_forward_pre_hook(lambda _, arguments: stream.local(arguments[0]))
    if head is not None:
        tied = decoder.embed_tokens if head.tied else None
        network.lm_head = VocabularyHead(head, tied, box, stream)


# Hooks, so that the model's own modules need not know about tensor parallelism.
Hook = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]


def entering(stream: TensorRegion) -> Hook:
    """For attention and MLP: make the first argument hold all tokens."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = arguments
        return stream.enter(hidden), *others

    return hook


def at_local_positions(stream: TensorRegion) -> Hook:
    """For dropout, whose mask hashes token positions: pass the positions of the local tokens."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, positions, noise = arguments
        return x, stream.local(positions), noise

    return hook
