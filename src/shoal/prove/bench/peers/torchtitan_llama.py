"""torchtitan's own Llama, loss and block-wise compilation (its 0.2 series), in a plain loop with autocast.

Its trainer builds its own process group, tokenizer and data loader from a job file and cannot use external rows. The
parts in which a step spends its time can be taken out, at least in 0.2; those are measured here.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from shoal.facts.model.parameters import llama_parameters
from shoal.models import initial
from shoal.prove.bench.journal import Journal
from shoal.prove.bench.setup import PeerSetup

SERIES = "0.2."
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "norm",
    "lm_head": "output",
}


def train(setup: PeerSetup, journal: Journal) -> None:
    found = version("torchtitan")
    if not found.startswith(SERIES):
        raise RuntimeError(
            f"torchtitan {found}: only {SERIES}x has a Llama that can be built outside its trainer"
        )
    from torchtitan.components.loss import cross_entropy_loss

    model = build(setup)
    setup.compile_blocks(model.layers.values())
    loss_of = torch.compile(cross_entropy_loss) if setup.device.type == "cuda" else cross_entropy_loss
    optimizer = setup.adamw(model.parameters())
    for batches in setup.batches(journal):
        total = torch.zeros((), device=setup.device)
        for batch in batches:
            with setup.autocast():
                loss = loss_of(model(batch.tokens), batch.targets) / (batch.count * len(batches))
            loss.backward()
            total += loss.detach()
        setup.clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        journal.note(total)


def build(setup: PeerSetup) -> Any:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    shape = setup.model
    if shape.head_dim * shape.heads != shape.hidden or shape.qkv_bias or shape.qk_norm:
        raise RuntimeError(f"torchtitan's Llama has no place for the attention of {shape.name}")
    scaling = shape.rope_scaling
    stretch = RoPEScalingArgs(scaling_factor=1.0)
    if scaling is not None:
        stretch = RoPEScalingArgs(
            scaling_factor=scaling.factor,
            low_freq_factor=scaling.low_frequency_factor,
            high_freq_factor=scaling.high_frequency_factor,
            original_max_position_embeddings=scaling.original_positions,
        )
    arguments = TransformerModelArgs(
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        # Its MLP width is the next multiple of this above 8/3 of the hidden width, times the multiplier.
        multiple_of=shape.ffn,
        ffn_dim_multiplier=1.5 * shape.ffn / (4 * shape.hidden) * 0.9,
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling_args=stretch,
        max_seq_len=setup.recipe.seq,
    )
    # Not cast afterwards: its table of rotations is complex and would lose its imaginary part.
    usual = torch.get_default_dtype()
    torch.set_default_dtype(setup.states)
    with torch.device(setup.device):
        model = Transformer(arguments)
    torch.set_default_dtype(usual)
    if shape.tied:
        model.output.weight = model.tok_embeddings.weight
    fill(model, setup)
    return model


@torch.no_grad()
def fill(model: nn.Module, setup: PeerSetup) -> None:
    """Load the initial weights that all peers share, under torchtitan's names and in its order of rotary pairs."""
    theirs = dict(model.named_parameters())
    for parameter in llama_parameters(setup.model):
        value = torch.empty(parameter.shape, dtype=setup.states, device=setup.device)
        initial.fill([(parameter.name, initial.whole(parameter.name, value))], setup.model, setup.recipe.seed)
        if "q_proj" in parameter.name or "k_proj" in parameter.name:
            value = interleaved(value, setup.model.head_dim)
        theirs[renamed(parameter.name)].copy_(value)


def renamed(name: str) -> str:
    prefix, rest = "", name.removesuffix(".weight")
    if rest.startswith("model.layers."):
        number, _, rest = rest.removeprefix("model.layers.").partition(".")
        prefix = f"layers.{number}."
    return f"{prefix}{NAMES[rest]}.weight"


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder a head's rows from pairs (i, i + half), as in Hugging Face, to neighbours (2i, 2i + 1)."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)
