from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from shoal.facts.model import Model
from shoal.facts.model.checkpoint_views import canonical_parameters
from shoal.models.attention import attend
from shoal.models.decoder import Network, build
from shoal.models.documents import Documents

Shape = Callable[..., Model]
Make = Callable[..., Network]
Rows = tuple[torch.Tensor, torch.Tensor]

GPT2 = {"norm": "layer", "gated": False, "activation": "gelu_tanh", "positions": "learned", "kv_heads": 4}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied": True}, {"qk_norm": True, "head_dim": 12}, {**GPT2, **BIASES}, {"parallel_residual": True}],
)
def test_built_on_meta_with_the_canonical_names_and_shapes(shape: Shape, changes: dict[str, Any]) -> None:
    model = shape(**changes)
    network = build(model, dtype=torch.bfloat16)
    wanted = {name: size for name, size, _ in canonical_parameters(model)}
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == wanted
    assert {name for name, _ in network.named_parameters()} == set(wanted)
    assert all(one.is_meta and one.dtype == torch.bfloat16 for one in network.parameters())
    assert not list(network.buffers())


def test_tied_survives_leaving_the_meta_device(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(tied=True))
    assert made.lm_head.matrix() is made.model.embed_tokens.weight
    loss, _ = made.lm_head(made(*rows), rows[0])
    loss.backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.mark.parametrize("changes", [{}, {"window": 3}, GPT2])
def test_a_packed_row_equals_separate_rows(
    shape: Shape, network: Make, rows: Rows, changes: dict[str, Any]
) -> None:
    made = network(shape(init_std=0.2, **changes), compute=torch.float64, dtype=torch.float64)
    tokens, _ = rows
    lengths = [7, 4, 5]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand_as(tokens)
    documents = torch.cat([torch.full((n,), which) for which, n in enumerate(lengths)]).expand_as(tokens)
    packed = made(tokens, positions, Documents.of(documents))
    parts = [
        made(part, torch.arange(part.shape[1]).expand_as(part)) for part in torch.split(tokens, lengths, 1)
    ]
    assert (packed - torch.cat(parts, 1)).abs().max() < 1e-12
    assert (packed - made(tokens, positions * 0 + torch.arange(16))).abs().max() > 1e-3


def test_rows_do_not_see_the_future(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(init_std=0.2))
    tokens, positions = rows
    changed = tokens.clone()
    changed[:, 10:] = 0
    before, after = made(tokens, positions), made(changed, positions)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-5)
    assert (before[:, 10:] - after[:, 10:]).abs().max() > 1e-2


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {**GPT2, **BIASES, "tied": True}])
def test_bf16_activations_of_fp32_parameters(
    shape: Shape, network: Make, rows: Rows, changes: dict[str, Any]
) -> None:
    made = network(shape(**changes), compute=torch.bfloat16)
    hidden = made(*rows)
    assert hidden.dtype == torch.bfloat16
    loss, _ = made.lm_head(hidden, rows[0])
    assert loss.dtype == torch.float32
    loss.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
    # Parameters that were rounded beforehand, as FSDP's mixed precision does, give the same bits.
    rounded = build(made.shape, compute=torch.bfloat16, dtype=torch.bfloat16, device="cpu")
    rounded.load_state_dict(made.state_dict())
    assert torch.equal(rounded(*rows), hidden)


def test_dropout_follows_the_row_and_not_its_place(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(init_std=0.2), dropout=0.3, compute=torch.float64, dtype=torch.float64)
    tokens, positions = rows
    noise = torch.tensor([11, -7, 13])
    whole = made(tokens, positions, noise=noise)
    turned = made(tokens.flip(0), positions, noise=noise.flip(0))
    assert torch.allclose(whole, turned.flip(0), rtol=0, atol=1e-12)
    assert torch.allclose(whole[1:2], made(tokens[1:2], positions[1:2], noise=noise[1:2]), rtol=0, atol=1e-12)
    assert (whole - made(tokens, positions, noise=noise + 1)).abs().max() > 0.1
    assert (whole - made(tokens, positions)).abs().max() > 0.1


def test_attend_can_be_replaced(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(window=5, window_layers=(1,)))
    seen: list[tuple[int | None, float]] = []

    def spy(*tensors: Any, scale: float, window: int | None, cap: float | None) -> torch.Tensor:
        seen.append((window, scale))
        return attend(*tensors, scale=scale, window=window, cap=cap)

    expected = made(*rows)
    for block in made.model.layers.values():
        block.self_attn.attend = spy
    assert torch.equal(made(*rows), expected)
    assert seen == [(None, 8**-0.5), (5, 8**-0.5)]


def test_one_graph_for_the_compiler(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(window=5, window_layers=(1,), qk_norm=True), dropout=0.1)
    tokens, positions = rows
    arguments = (tokens, positions, Documents.of(positions // 6), torch.tensor([1, 2, 3]))
    compiled = torch.compile(made, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*arguments), made(*arguments))


def test_one_graph_for_all_blocks(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(layers=4), dropout=0.1)
    tokens, positions = rows
    arguments = (tokens, positions, Documents.of(positions // 6), torch.tensor([1, 2, 3]))
    expected = made(*arguments)
    graphs = CompileCounter()
    for block in made.model.layers.values():
        block.compile(backend=graphs, fullgraph=True, dynamic=False)
    assert torch.equal(made(*arguments), expected)
    assert graphs.frame_count == 1


def test_layers_drop_different_features(shape: Shape, network: Make, rows: Rows) -> None:
    made = network(shape(), dropout=0.5)
    seen: list[torch.Tensor] = []
    for block in made.model.layers.values():
        block.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[4]))
    tokens, positions = rows
    made(tokens, positions, noise=torch.tensor([1, 2, 3]))
    assert len({int(key) for keys in seen for key in keys}) == 6
