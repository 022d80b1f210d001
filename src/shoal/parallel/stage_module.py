"""The part of the network that one pipeline stage holds; without a pipeline, all of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.facts.layout.stages import Stage
from shoal.models.decoder import Network
from shoal.models.documents import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the network together."""

    tokens: Tensor  # int64 [rows, seq]
    positions: Tensor
    documents: Documents | None
    targets: Tensor | None  # None: no loss is asked for
    noise: Tensor | None


class StageModule(nn.Module):
    """Some consecutive blocks; in the first segment after the embedding, in the last before the norm and the head."""

    def __init__(self, network: Network, stage: Stage, own_head: bool) -> None:
        """``own_head``: a tied head gets a copy of the embedding, whose gradients are then summed apart."""
        super().__init__()
        self.network = network
        self.stage = stage
        self.copied_head = own_head and stage.last and network.shape.tied
        if self.copied_head:
            tied = network.lm_head.matrix()
            network.lm_head.weight = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
            network.lm_head.tied = ()
        decoder = network.model
        for name in list(decoder.layers):
            if int(name) not in stage.layers:
                del decoder.layers[name]
        absent: list[tuple[nn.Module, str]]
        absent = [] if stage.first else [(decoder, "embed_tokens"), (decoder, "embed_positions")]
        absent += [] if stage.last else [(decoder, "norm"), (network, "lm_head")]
        for owner, child in absent:
            setattr(owner, child, None)

    def forward(self, inputs: Tensor, batch: MicroBatch, place: int | None = None) -> Tensor:
        """Tokens or hidden states in; out come hidden states or, at the end, the sum of the losses.

        With ``place`` the end gives the scores of the token after that place.
        """
        hidden: Tensor = self.network(inputs, batch.positions, batch.documents, batch.noise)
        if not self.stage.last:
            return hidden
        if place is not None:
            return self.network.lm_head.scores(hidden, place)
        assert batch.targets is not None
        loss: Tensor
        loss, _ = self.network.lm_head(hidden, batch.targets)
        return loss


def materialize(segment: StageModule, device: torch.device) -> None:
    """Storage for the parameters of a segment on the meta device; their values are still to come.

    Not torch's ``to_empty`` where it can be helped: it puts the new tensor in the old one's place, which tensors
    without data, as a dry run's are, do not allow. FSDP needs it, for it refers to its parameters.
    """
    for module in segment.modules():
        own = list(module.named_parameters(recurse=False))
        if any(isinstance(parameter, DTensor) for _, parameter in own):
            module.to_empty(device=device, recurse=False)
            continue
        for name, parameter in own:
            empty = torch.empty_like(parameter, device=device)
            setattr(module, name, nn.Parameter(empty, parameter.requires_grad))


def split_stages(network: Network, stages: list[Stage], own_head: bool) -> list[StageModule]:
    """One segment for each of these stages, out of a network on the meta device."""
    # The copies share nothing, and on the meta device they hold nothing.
    networks = [network, *(copy.deepcopy(network) for _ in stages[1:])]
    return [StageModule(part, stage, own_head) for part, stage in zip(networks, stages, strict=True)]
