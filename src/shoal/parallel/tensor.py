"""Tensor parallelism (``tp``, ``sp``): every rank computes some heads and some features of each block.

The projections into attention and MLP are split by output features, so that heads and activations need no exchange;
those out of them by input features, so that ranks hold partial sums of the residual stream. ``sequence`` has the
exchange, ``vocabulary`` the embedding and the head.

Why not DTensor and ``parallelize_module``: key/value heads that neighbouring ranks share, vocabularies that do not
divide and a loss in chunks are outside what their styles express, and every operation on a DTensor pays for its
dispatch. Plain tensors and a few explicit collectives do all of it; ``shoal bench step`` holds the two against each
other.
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
    """Turn a network that was built on the meta device into rank ``index``'s part of it.

    A pipeline stage, which has some of the modules, becomes its part of those. The gradients that
    ``facts.boxes.summed_over`` names are left for the caller to sum, once a step.
    """
    stream = TensorRegion(group, tp, index, sp)
    cut_parameters(network, model, tp, index)
    for block in network.model.layers.values():
        assert isinstance(block, Block)
        split_block(block, stream)
    split_ends(network, model, stream)


def cut_parameters(network: Network, model: Model, tp: int, index: int) -> None:
    """Put this rank's box of every parameter in its place."""
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
    # One gather serves all the projections that read its result. Split by input features: ranks' results are added up,
    # and then the bias, once.
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
    """Its router reads the tokens that are here; experts, routed and shared, some features of all tokens.

    A weight's gradient comes from all features, so it is a sum over the ranks, as that of a token is.
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


# Hooks, so that the model's own modules need not know.
Hook = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]


def entering(stream: TensorRegion) -> Hook:
    """For attention and MLP: all tokens of the first argument."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = arguments
        return stream.enter(hidden), *others

    return hook


def at_local_positions(stream: TensorRegion) -> Hook:
    """For dropout, whose mask hashes a token's position: those of the tokens that are here."""

    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, positions, noise = arguments
        return x, stream.local(positions), noise

    return hook
