"""The live-byte tracker: every storage once, for as long as it lives, whatever it is resized to."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.observe.collectives import CollectiveCounter
from shoal.observe.memory import MemoryTracker, live_bytes


def test_allocate_view_free_and_resize_by_hand() -> None:
    before = torch.ones(7)
    with MemoryTracker() as tracker:
        assert tracker.live() == {}
        first = torch.empty(100)
        second = torch.zeros(50, dtype=torch.float64)
        assert tracker.live() == {"other": 800}
        view = first[10:20].view(2, 5)
        assert tracker.live() == {"other": 800}
        del first
        assert tracker.live() == {"other": 800}, "a view holds the whole storage"
        del view
        assert tracker.live() == {"other": 400}
        second.add_(1)
        second.untyped_storage().resize_(0)
        assert tracker.live() == {}
        second.untyped_storage().resize_(1600)
        assert tracker.live() == {"other": 1600}
        second.resize_(300)
        assert tracker.live() == {"other": 2400}
        tracker.mark([before], "params")
        assert tracker.live() == {"other": 2400, "params": 28}
        torch.add(before, before, out=torch.empty(0))
        assert tracker.peak == 2400 + 28 + 28
    del second
    assert tracker.live() == {"params": 28}, "what dies afterwards leaves too"
    assert "resize_" not in vars(torch.UntypedStorage), "torch is as it was"


def test_the_peak_and_what_it_was_made_of() -> None:
    with MemoryTracker() as tracker:
        weight = torch.empty(10)
        tracker.mark([weight], "params")
        with tracker.labelled("activations"):
            kept = torch.empty(20)
            resized = torch.empty(30)
            later_a_gradient = torch.empty(40)
        assert tracker.peak == 400
        resized.untyped_storage().resize_(4)
        del kept
        small = torch.empty(5)
        tracker.mark([later_a_gradient], "grads")
        assert tracker.live() == {"activations": 4, "grads": 160, "other": 20, "params": 40}
        assert tracker.peak_by_category() == {"activations": 200, "grads": 160, "params": 40}
        tracker.reset_peak()
        assert tracker.peak == 224 and tracker.peak_by_category() == tracker.live()
        del small, later_a_gradient
        smaller = torch.empty(6)
        assert tracker.peak == 224 and tracker.live()["other"] == live_bytes([smaller])
        assert tracker.peak_by_category() == {"activations": 4, "grads": 160, "other": 20, "params": 40}


def test_rounding_devices_and_what_never_counts() -> None:
    with MemoryTracker(round_to=512) as rounded, MemoryTracker(device="cuda") as other_device:
        held = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
        held.append(torch.empty(10**9, device="meta"))
        held.append(torch.eye(3).to_sparse())
        with FakeTensorMode():
            held.append(torch.empty(10**9))
        assert rounded.live() == {"other": 512 + 512 + 1024}
    assert other_device.peak == 0


def test_a_fake_tensor_counts_on_request_by_the_device_it_pretends_to_be_on() -> None:
    with (
        MemoryTracker(fake=True, device="cpu") as outside,
        FakeTensorMode(),
        MemoryTracker(fake=True) as inside,
    ):
        held = torch.empty(10**9).view(-1, 10)
        assert outside.live() == inside.live() == {"other": 4 * 10**9}
        held.untyped_storage().resize_(0)
        assert outside.live() == inside.live() == {}


def test_live_bytes_counts_a_storage_once() -> None:
    base = torch.empty(10)
    assert live_bytes([base, base[2:4], base.detach(), torch.empty(3, dtype=torch.int64)]) == 40 + 24
    assert live_bytes(nn.Linear(4, 4, device="meta").parameters()) == 80


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def keep_products(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_what_autograd_keeps_and_lets_go_without_any_operator(recompute: str) -> None:
    rows, block = 32, Block()
    contexts: dict[str, Callable[[], object]] = {}
    if recompute == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    with CollectiveCounter() as counter, MemoryTracker() as tracker:
        tracker.mark(block.parameters(), "params")
        batch = torch.ones(rows, 16)
        tracker.mark([batch], "batch")
        with tracker.labelled("activations"):
            if recompute == "none":
                output = block(batch)
            else:
                output = checkpoint(block, batch, use_reentrant=False, **contexts)
        loss = output.sum()
        narrow, wide = rows * 16 * 4, rows * 64 * 4
        # Without recompute relu's output is kept: its own backward and the product after it share that one.
        kept = {"none": wide, "full": 0, "selective": wide + narrow}[recompute]
        assert tracker.live() == {
            "activations": kept + narrow,
            "batch": narrow,
            "other": 4,
            "params": 2 * 16 * 64 * 4,
        }
        loss.backward()
        tracker.mark([parameter.grad for parameter in block.parameters()], "grads")
        assert tracker.live() == {
            "activations": narrow,
            "batch": narrow,
            "grads": 2 * 16 * 64 * 4,
            "other": 4,
            "params": 2 * 16 * 64 * 4,
        }
    assert counter.traffic() == []


def one_step() -> torch.Tensor:
    torch.manual_seed(0)
    block = Block()
    output = block(torch.ones(32, 16))
    loss = torch.nn.functional.cross_entropy(output, torch.zeros(32, dtype=torch.int64))
    loss.backward()
    return loss


def test_agrees_with_the_allocations_that_torchs_profiler_saw() -> None:
    with torch.profiler.profile(profile_memory=True) as profiler:
        one_step()
    held = peak = 0
    for change in allocations(profiler):
        held += change
        peak = max(peak, held)
    with MemoryTracker() as tracker:
        one_step()
    assert tracker.peak == peak


def allocations(profiler: torch.profiler.profile) -> list[int]:
    """Every allocation (positive) and release (negative) of the CPU's allocator, in the order they happened."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    changes: list[tuple[int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if hasattr(event.extra_fields, "alloc_size"):
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(changes)]


WHOLE = 2 * 16 * 64 * 4
# Of two rows: the batch, what lies between the blocks, and the output; inside each block, relu's output.
AFTER_FORWARD = {"params": WHOLE, "other": 2 * 4 * (3 * 16 + 2 * 64)}
AFTER_BACKWARD = {"params": WHOLE, "grads": WHOLE, "other": 2 * 4 * 16}


def settled(tracker: MemoryTracker, expected: dict[str, int]) -> dict[str, int]:
    """What is held once gloo's own threads have let go of their buffers, a moment after the wait for them."""
    patience = time.monotonic() + 10
    while tracker.live() != expected and time.monotonic() < patience:
        time.sleep(0.01)
    return tracker.live()


def gathered(rank: int, world: int) -> list[dict[str, int]]:
    """What is held before the forward pass, in each of two sharded blocks, after it and after the backward pass."""
    blocks = nn.Sequential(Block(), Block())
    for block in (*blocks, blocks):
        fully_shard(block)
    seen = []
    with CollectiveCounter() as counter, MemoryTracker() as tracker:

        def look_inside(block: nn.Module, *anything: object) -> None:
            tracker.mark(block.parameters(), "gathered")
            seen.append(tracker.live())

        for block in blocks:
            block.up.register_forward_pre_hook(partial(look_inside, block))
        tracker.mark(blocks.parameters(), "params")
        seen.append(tracker.live())
        output = blocks(torch.ones(2, 16))
        seen.append(settled(tracker, AFTER_FORWARD))
        output.sum().backward()
        tracker.mark([parameter.grad for parameter in blocks.parameters()], "grads")
        seen.append(settled(tracker, AFTER_BACKWARD))
    assert [(row.op, row.count) for row in counter.traffic()] == [("all_gather", 4), ("reduce_scatter", 2)]
    return seen


def test_gathered_parameters_appear_and_leave_with_fully_shard() -> None:
    for before, in_first, in_second, after, end in run_ranks(2, gathered):
        # Half of each of the two blocks rests on a rank; one block at a time is whole.
        assert before == {"params": WHOLE}
        assert in_first["gathered"] == in_second["gathered"] == WHOLE
        assert after == AFTER_FORWARD
        assert end == AFTER_BACKWARD


def split_peak(mesh: DeviceMesh, fake: bool) -> tuple[int, int]:
    """The peak of one step at tensor parallel 2, and what is held after it."""
    with MemoryTracker(fake=fake) as tracker:
        blocks = nn.Sequential(*(Block() for _ in range(3)))
        for block in blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan, src_data_rank=None)
        tracker.reset_peak()
        blocks(torch.ones(256, 16)).sum().backward()
        return tracker.peak, sum(tracker.live().values())


def sharded_peak(mesh: DeviceMesh, fake: bool) -> tuple[int, int]:
    """The same under fully_shard, where parameters are gathered for their use."""
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    for block in (*blocks, blocks):
        fully_shard(block, mesh=mesh)
    with MemoryTracker(fake=fake) as tracker:
        tracker.mark(blocks.parameters(), "params")
        blocks(torch.ones(256, 16)).sum().backward()
        return tracker.peak, sum(tracker.live().values())


def test_fake_tensors_hold_what_real_ones_do_to_the_byte() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        # The fake ones first: DTensor remembers the shapes it found, and finding them must not count.
        with FakeTensorMode():
            fake = [split_peak(mesh, fake=True), sharded_peak(mesh, fake=True)]
        real = [split_peak(mesh, fake=False), sharded_peak(mesh, fake=False)]
    finally:
        dist.destroy_process_group()
    assert fake == real


def test_a_dtensor_counts_by_its_part_on_this_rank() -> None:
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        with MemoryTracker() as tracker:
            part = DTensor.from_local(torch.ones(8, 4), mesh, [Shard(0)])
            assert tracker.live() == {"other": 128}
            total = part + part
            assert total.shape == (32, 4)
            assert tracker.live() == {"other": 256}
            tracker.mark([part], "params")
            assert tracker.live() == {"other": 128, "params": 128}
            assert live_bytes([part, total]) == 256
            assert tracker.peak == 256
            # What an operator does inside DTensor is seen: here the sum over ranks, gone when relu is done.
            summand = DTensor.from_local(torch.ones(8, 4), mesh, [Partial()])
            torch.relu(summand)
            assert tracker.peak == 256 + 3 * 128
    finally:
        dist.destroy_process_group()
