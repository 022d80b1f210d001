"""Loss on held-out text, and texts the model writes."""

from __future__ import annotations

import torch

from shoal.models.decoder import Network
from shoal.models.generate import generate
from shoal.models.random import key
from shoal.parallel.mesh import Mesh
from shoal.train.data.loader import Loader
from shoal.train.data.tokenizers import Tokenizer


@torch.no_grad()
def heldout_loss(network: Network, loader: Loader, mesh: Mesh, most: int, micro: int) -> float | None:
    """Mean loss a token over ``most`` held-out samples, spread evenly; None where there is nothing to predict.

    Which rank sees which sample changes no sum. All ranks run equally many rows, for some strategies meet in every
    forward pass; rows past the last sample are empty.
    """
    count, ranks = min(most, loader.heldout_count), mesh.layout.data_ranks
    chosen = [number * loader.heldout_count // count for number in range(count)]
    chosen += [loader.heldout_count] * (-count % ranks)
    mine = chosen[mesh.data_index :: ranks]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    targets = 0
    for start in range(0, len(mine), micro):
        batch = loader.heldout_rows(mine[start : start + micro]).to(mesh.device)
        loss_sum, _ = network.lm_head(network(batch.tokens, batch.positions, batch.documents), batch.targets)
        total += loss_sum
        targets += batch.count
    loss, seen = mesh.sum_floats([float(total), targets])
    return loss / seen if seen else None


@torch.no_grad()
def write_samples(
    network: Network,
    tokenizer: Tokenizer,
    prompts: list[torch.Tensor],
    count: int,
    temperature: float,
    seed: int,
    step: int,
) -> list[tuple[str, str]]:
    """(prompt, continuation) for each prompt; the numbers drawn are a hash of (seed, step, sample)."""
    texts = []
    device = next(network.parameters()).device
    for number, prompt in enumerate(prompts):
        written = generate(
            network,
            prompt.to(device)[None],
            count,
            temperature,
            key(seed, step, f"sample {number}"),
            tokenizer.end,
        )[0]
        texts.append((tokenizer.decode(prompt.tolist()), tokenizer.decode(written[len(prompt) :].tolist())))
    return texts
