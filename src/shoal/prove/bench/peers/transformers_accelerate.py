"""Hugging Face `transformers` with Accelerate, in the loop that its documentation shows: eager, or layers compiled."""

from __future__ import annotations

import re
from typing import Any

import accelerate
import torch
import transformers
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from shoal.facts.model.checkpoint_views import View, views
from shoal.facts.model.huggingface import write_config
from shoal.facts.model.parameters import llama_parameters
from shoal.facts.model.tensor_split import box_slices
from shoal.models import initial
from shoal.models.initial import Slice
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup, mean_over_ranks

# Matches an expert's tensor in a file, and whether it is one half of the stacked gate_up_proj; if neither, it belongs
# to the stacked down_proj. From transformers 5 on, networks stack experts, but files do not.
ONE_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<name>\w+)\.weight")
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def train(setup: PeerSetup, journal: Journal) -> None:
    transformers.logging.set_verbosity_error()
    on_cpu = setup.device.type == "cpu"
    accelerator = accelerate.Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if setup.mixed else "no",
        gradient_accumulation_steps=setup.accumulation,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.num_processes != setup.world:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes, not {setup.world}")
    network = build(setup)
    fill(network, setup)
    setup.compile_blocks(layers(network))
    model, optimizer = accelerator.prepare(network, setup.adamw(network.parameters()))
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            with accelerator.accumulate(model):
                # Its own loss shifts the labels by one; ours are already shifted.
                loss = model(input_ids=batch.tokens, labels=batch.targets, shift_labels=batch.targets).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and setup.recipe.clip:
                    accelerator.clip_grad_norm_(model.parameters(), setup.recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(batches)
        journal.note(mean_over_ranks(total) if setup.world > 1 else total)


def build(setup: PeerSetup) -> Any:
    """Build the model class that config.json names, directly in its dtype: casting it later would round rotary
    tables too.
    """
    settings = write_config(setup.model)
    config = transformers.AutoConfig.for_model(**{**settings, "use_cache": False})
    with torch.device(setup.device):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=setup.states, attn_implementation="sdpa"
        )
    return network.train()


def layers(network: Any) -> nn.ModuleList:
    """The blocks, under whatever name a family gives them."""
    found: nn.ModuleList = next(
        one for one in network.base_model.children() if isinstance(one, nn.ModuleList)
    )
    return found


@torch.no_grad()
def fill(network: Any, setup: PeerSetup) -> None:
    """Load the initial weights that all peers share, under this family's names."""
    shapes = {parameter.name: parameter.shape for parameter in llama_parameters(setup.model)}
    theirs = dict(network.named_parameters())
    for view in views(setup.model):
        ours = torch.empty(view.canonical_shape, dtype=setup.states, device=setup.device)
        part = Slice(ours, tuple(shapes[view.canonical]), view.canonical_offset)
        initial.fill([(view.canonical, part)], setup.model, setup.recipe.seed)
        _whole(theirs, view)[box_slices(view.tensor_offset, view.shape)] = (
            ours.T if view.transposed else ours.view(view.shape)
        )


def _whole(theirs: dict[str, Any], view: View) -> Tensor:
    """The network's tensor for a tensor of its files."""
    name = view.tensor.replace(".block_sparse_moe.", ".mlp.")
    expert = ONE_EXPERT.fullmatch(name)
    if expert is None:
        tensor: Tensor = theirs[name]
        return tensor
    half = HALVES.get(expert["name"])
    stacked: Tensor = theirs[f"{expert['experts']}.{'down_proj' if half is None else 'gate_up_proj'}"]
    own = stacked[int(expert["number"])]
    return own if half is None else own.chunk(2)[half]
