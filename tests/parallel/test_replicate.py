"""Replicas: gradients summed over real processes, in buckets that never change."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import run_ranks

from shoal.facts.layout import Layout
from shoal.facts.layout.ranks import coordinates
from shoal.facts.model.presets import PRESETS
from shoal.models.decoder import Network, build
from shoal.models.initial import initialise
from shoal.parallel.mesh import Mesh
from shoal.parallel.pipeline import my_stages
from shoal.parallel.replicate import Replicate
from shoal.parallel.shards import held_parameters
from shoal.parallel.stage_module import split_stages

SHAPE = PRESETS["tiny"].model_copy(
    update={"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "ffn": 24, "vocab": 32}
)


def make_network(dtype: torch.dtype = torch.float64) -> Network:
    network = build(SHAPE, compute=dtype, dtype=dtype).to_empty(device="cpu")
    initialise(network, SHAPE, 0)
    return network


def make_replica(
    rank: int, world: int, bucket_bytes: int, reduce_dtype: torch.dtype | None = None
) -> tuple[Network, Replicate]:
    """The network as the one segment of a rank."""
    mesh = Mesh(Layout(dp=world), rank, torch.device("cpu"))
    network = make_network()
    segments = split_stages(network, my_stages(SHAPE, mesh.layout, 0, 8), own_head=False)
    return network, Replicate(held_parameters(segments, SHAPE, mesh), mesh, bucket_bytes, reduce_dtype)


def backward(network: Network, row: int, without_blocks: bool = False) -> None:
    tokens, positions = (torch.arange(8) * (row + 3) % 32)[None], torch.arange(8)[None]
    hidden = network.model.embed(tokens, positions, None) if without_blocks else network(tokens, positions)
    loss, _ = network.lm_head(hidden, tokens.roll(-1))
    loss.backward()


def summed(
    rank: int, world: int, bucket_bytes: int, reduce_bf16: bool, without_blocks: tuple[int, ...] = ()
) -> tuple[dict[str, torch.Tensor], int]:
    """Two micro-batches a rank, twice over: the second step must not see the first one's gradients."""
    network, replicate = make_replica(rank, world, bucket_bytes, torch.bfloat16 if reduce_bf16 else None)
    for _ in range(2):
        replicate.start_step()
        for number in range(2):
            row, last = rank * 2 + number, number == 1
            replicate.before_backward(0, last)
            backward(network, row, row in without_blocks)
            replicate.after_backward(0, last)
        replicate.finish_step()
    gradients = {piece.name: piece.tensor.grad.clone() for piece in replicate.pieces}
    return gradients, len(replicate.stages[0].buckets)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bucket_bytes,count", [(1, None), (10_000, None), (2**30, 1)])
def test_gradients_are_the_sum_over_ranks(world: int, bucket_bytes: int, count: int | None) -> None:
    reference = make_network()
    for row in range(2 * world):
        backward(reference, row)
    results = run_ranks(world, summed, bucket_bytes, False)
    for gradients, buckets in results:
        assert buckets == (count or buckets) and (count or buckets > 1)
        for name, parameter in reference.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14), name
            assert torch.equal(gradients[name], results[0][0][name]), name


def test_gradients_may_travel_in_less_precision() -> None:
    exact, _ = run_ranks(2, summed, 2**20, False)[0]
    rounded, _ = run_ranks(2, summed, 2**20, True)[0]
    for name, gradient in exact.items():
        assert not torch.equal(gradient, rounded[name])
        assert torch.allclose(gradient, rounded[name], rtol=2e-2, atol=2e-2 * float(gradient.abs().max())), (
            name
        )


@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
@pytest.mark.parametrize(
    "without_blocks", [(3,), (2, 3), (0, 3), (0, 1, 2, 3)], ids=["last", "a rank", "mixed", "all"]
)
def test_a_parameter_without_gradient_adds_nothing_and_the_sums_are_right(
    bucket_bytes: int, without_blocks: tuple[int, ...]
) -> None:
    """Rows that leave the blocks and the last norm out, in a rank's last micro-batch or in all that it has."""
    reference = make_network()
    for row in range(4):
        backward(reference, row, row in without_blocks)
    results = run_ranks(2, summed, bucket_bytes, False, without_blocks)
    for gradients, _ in results:
        for name, parameter in reference.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(gradients[name], expected, rtol=1e-12, atol=1e-14), name
            assert torch.equal(gradients[name], results[0][0][name]), name


def agree(rank: int, world: int) -> tuple[list[int], list[float]]:
    mesh = Mesh(Layout(dp=world), rank, torch.device("cpu"))
    return mesh.hosts.sum_integers([rank, 1]), mesh.hosts.sum_floats([0.5, rank])


def test_ranks_agree_on_small_sums() -> None:
    assert run_ranks(3, agree) == [([3, 3], [1.5, 3.0])] * 3
    alone = Mesh(Layout(), 0, torch.device("cpu"))
    assert alone.hosts.sum_integers([7]) == [7] and alone.group("dp") is None


def test_ranks_run_from_the_slowest_axis_to_the_fastest() -> None:
    layout = Layout(pp=2, dp=2, fsdp=2, cp=2, tp=2)
    assert coordinates(1, layout) == {"tp": 1, "cp": 0, "fsdp": 0, "dp": 0, "pp": 0}
    assert coordinates(16, layout) == {"tp": 0, "cp": 0, "fsdp": 0, "dp": 0, "pp": 1}
    assert len({tuple(coordinates(rank, layout).items()) for rank in range(32)}) == 32
