"""The collective counter: everything that a rank issues is seen, named and weighed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.facts.traffic import Traffic, read_ranks, show_ranks
from shoal.observe.collectives import CollectiveCounter, IssuedCall

Row = tuple[str, str, int, int]

# torch 2.11 does not run these with gloo, and we do not use them: an exchange of lists, a gather's own backward pass.
NEWER = (
    ()
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    else ("all_to_all", "functional backward")
)


def rows(counter: CollectiveCounter) -> list[Row]:
    return [(row.op, row.group, row.count, row.bytes) for row in counter.traffic()]


def counted(action: Callable[[], object]) -> list[Row]:
    with CollectiveCounter(lambda name, ranks: "all") as counter:
        action()
    return rows(counter)


def every_operation(rank: int, world: int) -> dict[str, list[Row]]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    four, two, eight = torch.ones(4), torch.ones(2), torch.empty(8)
    other = 1 - rank
    group = dist.group.WORLD

    def pairs(size: int) -> list[torch.Tensor]:
        return [torch.ones(size), torch.ones(size)]

    def message() -> None:
        dist.send(four, 1) if rank == 0 else dist.recv(torch.empty(4), 0)

    def message_from_anyone() -> None:
        dist.recv(torch.empty(4)) if rank == 0 else dist.send(four, 0)

    def both_ways() -> None:
        for work in (dist.isend(four, other), dist.irecv(torch.empty(4), other)):
            work.wait()

    def batch() -> None:
        sends = dist.P2POp(dist.isend, four, other)
        for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, torch.empty(4), other)]):
            work.wait()

    def coalesced() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(four)
            dist.all_reduce(two)

    def functional_backward() -> None:
        leaf = four.clone().requires_grad_()
        functional.all_gather_tensor_autograd(leaf, 0, group).sum().backward()

    def implicit() -> None:
        # The product needs a sum over ranks that only DTensor's own operators issue.
        mesh = init_device_mesh("cpu", (world,))
        left = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)], src_data_rank=None)
        right = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        torch.relu(left @ right).redistribute(mesh, [Replicate()])

    actions: dict[str, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, four),
        "scalar": partial(dist.all_reduce, torch.tensor(1, dtype=torch.int64)),
        "async": lambda: dist.all_reduce(four, async_op=True).wait(),
        "all_gather_into": partial(dist.all_gather_into_tensor, eight, four),
        "all_gather": partial(dist.all_gather, pairs(4), four),
        "reduce_scatter_tensor": partial(dist.reduce_scatter_tensor, torch.empty(2), four),
        "reduce_scatter": partial(dist.reduce_scatter, torch.empty(2), pairs(2)),
        "broadcast": partial(dist.broadcast, four, 0),
        "reduce": partial(dist.reduce, four, 0),
        "all_to_all_single": partial(dist.all_to_all_single, torch.empty(4), four),
        "all_to_all": partial(dist.all_to_all, pairs(2), pairs(2)),
        "gather": partial(dist.gather, four, pairs(4) if rank == 0 else None),
        "scatter": partial(dist.scatter, torch.empty(4), pairs(4) if rank == 0 else None),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "message": message,
        "message_from_anyone": message_from_anyone,
        "both_ways": both_ways,
        "batch": batch,
        "coalesced": coalesced,
        "object": partial(dist.broadcast_object_list, [None], 0),
        "functional all_reduce": lambda: functional.all_reduce(four, "sum", group) + 1,
        "functional gather": lambda: functional.all_gather_tensor(four, 0, group) + 1,
        "functional scatter": lambda: functional.reduce_scatter_tensor(four, "sum", 0, group) + 1,
        "functional all_to_all": lambda: functional.all_to_all_single(four, None, None, group) + 1,
        "functional broadcast": lambda: functional.broadcast(four, 0, group) + 1,
        "functional coalesced": lambda: functional.all_reduce_coalesced([four, two], "sum", group),
        "functional backward": functional_backward,
        "implicit": implicit,
    }
    for name in NEWER:
        del actions[name]
    return {name: counted(action) for name, action in actions.items()}


def test_every_operation_is_seen_and_weighed_by_its_largest_buffer() -> None:
    expected: dict[str, list[tuple[str, int, int]]] = {
        "all_reduce": [("all_reduce", 1, 16)],
        "scalar": [("all_reduce", 1, 8)],
        "async": [("all_reduce", 1, 16)],
        "all_gather_into": [("all_gather", 1, 32)],
        "all_gather": [("all_gather", 1, 32)],
        "reduce_scatter_tensor": [("reduce_scatter", 1, 16)],
        "reduce_scatter": [("reduce_scatter", 1, 16)],
        "broadcast": [("broadcast", 1, 16)],
        "reduce": [("reduce", 1, 16)],
        "all_to_all_single": [("all_to_all", 1, 16)],
        "all_to_all": [("all_to_all", 1, 16)],
        "gather": [("gather", 1, 32)],
        "scatter": [("scatter", 1, 32)],
        "barrier": [("barrier", 1, 0)],
        "monitored_barrier": [("barrier", 1, 0)],
        "message": [("send", 1, 16)],
        "message_from_anyone": [("receive", 1, 16)],
        "both_ways": [("receive", 1, 16), ("send", 1, 16)],
        "batch": [("receive", 1, 16), ("send", 1, 16)],
        "coalesced": [("all_reduce", 1, 24)],
        "functional all_reduce": [("all_reduce", 1, 16)],
        "functional gather": [("all_gather", 1, 32)],
        "functional scatter": [("reduce_scatter", 1, 16)],
        "functional all_to_all": [("all_to_all", 1, 16)],
        "functional broadcast": [("broadcast", 1, 16)],
        "functional coalesced": [("all_reduce", 1, 24)],
        "functional backward": [("all_gather", 1, 32), ("reduce_scatter", 1, 32)],
        "implicit": [("all_reduce", 1, 64)],
    }
    for name in NEWER:
        del expected[name]
    first, second = run_ranks(2, every_operation)
    # The lengths, then the pickled objects: bytes that only torch's pickling knows.
    ((operation, _, count, _),) = first.pop("object")
    assert (operation, count) == ("broadcast", 2)
    assert first == {
        name: [(op, "all", count, size) for op, count, size in seen] for name, seen in expected.items()
    }
    # A rank that only receives weighs what it receives.
    assert second["message"] == [("receive", "all", 1, 16)]
    assert second["gather"] == [("gather", "all", 1, 16)]


def sharded_step(rank: int, world: int, kind: str) -> list[tuple[list[IssuedCall], list[Row]]]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*model, model):
            fully_shard(layer, mp_policy=policy)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    def keep(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    seen = []
    for recompute in (False, True):
        with CollectiveCounter({dist.group.WORLD.group_name: "data"}, log=True) as counter:
            batch = torch.ones(2, 4, requires_grad=True)
            if recompute:
                contexts = partial(create_selective_checkpoint_contexts, keep)
                output = checkpoint(forward, batch, use_reentrant=False, context_fn=contexts)
            else:
                output = forward(batch)
            output.float().sum().backward()
        seen.append((counter.calls, rows(counter)))
    return seen


def test_fully_shard_gathers_and_scatters_also_in_the_backward_pass() -> None:
    # Padded to two ranks: (6 x 4 + 6) and (4 x 6 + 4) elements, gathered in bf16, reduced in fp32.
    for (calls, seen), (_, with_recompute) in run_ranks(2, sharded_step, "fsdp"):
        gathers = [("all_gather", "data", size, "bfloat16") for size in (60, 56)]
        scatters = [("reduce_scatter", "data", size, "float32") for size in (112, 120)]
        issued = [(call.op, call.group, call.bytes, call.dtype) for call in calls]
        assert issued == [*gathers, gathers[1], gathers[0], *scatters]
        assert seen == [("all_gather", "data", 4, 232), ("reduce_scatter", "data", 2, 232)]
        assert with_recompute[1] == ("reduce_scatter", "data", 2, 232)


def test_all_reduces_of_ddps_own_hooks() -> None:
    for (_, seen), _ in run_ranks(2, sharded_step, "ddp"):
        assert seen == [("all_reduce", "data", 1, 232)]


def two_groups(rank: int, world: int) -> list[list[Row]]:
    pair = dist.new_group([0, 1])
    with CollectiveCounter({pair.group_name: "tp"}) as counter:
        dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(3), group=pair)
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
    before = rows(counter)
    counter.reset()
    dist.barrier()
    return [before, rows(counter)]


def test_groups_have_the_names_they_were_given_else_their_ranks() -> None:
    for before, after in run_ranks(2, two_groups):
        assert before == [("all_reduce", "ranks 0,1", 1, 16), ("all_reduce", "tp", 2, 16)]
        assert after == []


@pytest.mark.parametrize(
    "ranks,shown",
    [
        ([3], "ranks 3"),
        ([0, 2], "ranks 0,2"),
        ([0, 1, 2, 5], "ranks 0,1,2,5"),
        (range(8), "ranks 0-7"),
        (range(1, 33, 4), "ranks 1-29 by 4"),
    ],
)
def test_ranks_are_shown_shortly(ranks: list[int], shown: str) -> None:
    assert show_ranks(ranks) == shown
    assert read_ranks(shown) == list(ranks)


def test_one_rank_of_a_large_world_that_does_not_exist() -> None:
    dist.init_process_group("fake", rank=5, world_size=4096)
    try:
        mesh = init_device_mesh("cpu", (512, 8), mesh_dim_names=("dp", "tp"))
        names = {mesh.get_group(axis).group_name: axis for axis in ("dp", "tp")}
        with CollectiveCounter(names) as counter:
            dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))
            functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", mesh.get_group("dp")))
            dist.barrier()
    finally:
        dist.destroy_process_group()
    assert counter.traffic() == [
        Traffic("all_reduce", "dp", 1, 16),
        Traffic("all_reduce", "tp", 1, 16),
        Traffic("barrier", "ranks 0-4095", 1, 0),
    ]
