"""The proof of the dry run: strategies that are broken on purpose are found, and named in words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.predict.counted import ask
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.facts.cluster.notation import find
from shoal.facts.layout import Layout
from shoal.facts.layout.parameter_groups import placement
from shoal.facts.schedules.programs import RECEIVES, SENDS, Instruction
from shoal.models import attention
from shoal.observe.collectives import CollectiveCounter
from shoal.parallel import shard, tensor_region
from shoal.parallel.execute import Executor, StepState
from shoal.parallel.pipeline import Channels
from shoal.parallel.shared_gradients import SharedGradients
from shoal.parallel.zero import ShardedStates
from shoal.predict.workload import Workload
from shoal.prove.dryrun import DryRun, dryrun
from shoal.prove.dryrun_findings import Finding, between_stages
from shoal.prove.fake_world import fake_rank
from shoal.prove.pinned_kernels import WrongKernel

SMALL = {"layers": 4, "hidden": 64, "ffn": 160, "head_dim": 8, "vocab": 200}


def question_of(layout: str) -> Workload:
    return ask(layout, SMALL, seq=64, batch=8)


@cache
def clean(layout: str, rank: int) -> DryRun:
    """A dry run of the strategies as they are; to be asked for before anything is broken."""
    seen = dryrun(question_of(layout), rank)
    assert seen.differences(0) == []
    return seen


def the_one(findings: list[Finding], kind: str, begins: str = "") -> str:
    (text,) = (one.text for one in findings if one.kind == kind and one.text.startswith(begins))
    return text


# An extra all-gather.


def test_parameters_that_are_gathered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    once = clean("fsdp=2,zero=1", 0)
    after_update = ShardedStates.after_update

    def twice(states: ShardedStates) -> None:
        after_update(states)
        after_update(states)

    monkeypatch.setattr(ShardedStates, "after_update", twice)
    seen = dryrun(once.workload, 0)
    assert not seen.matches
    text = the_one(seen.findings, "traffic")
    # Once a bucket, and there are two.
    assert text.startswith("all_gather in fsdp: 4 calls with ") and "predicted 2 calls with " in text
    assert "parallel/zero.py:" in text and "(4 times)" in text


def test_one_gather_too_many_in_the_midst_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clean("tp=2", 1)
    leave = tensor_region.TensorRegion.leave

    def gathered(stream: tensor_region.TensorRegion, partial: Tensor) -> Tensor:
        summed = leave(stream, partial)
        tensor_region.all_gather(summed.detach(), stream.group, stream.ranks)
        return summed

    monkeypatch.setattr(tensor_region.TensorRegion, "leave", gathered)
    seen = dryrun(question_of("tp=2"), 1)
    text = the_one(seen.findings, "traffic")
    # Two in each of four blocks, and one after the embedding.
    said = {(row.op, row.group): row.count for row in seen.predicted_traffic}["all_gather", "tp"]
    assert text.startswith(f"all_gather in tp: {said + 9} calls with ")
    assert "parallel/tensor_region.py:" in text


# A forgotten reshard.


def test_parameters_that_stay_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = clean("fsdp=2", 0)
    fully_shard = shard.fully_shard

    def kept(modules: Any, **options: Any) -> Any:
        return fully_shard(modules, **{**options, "reshard_after_forward": False})

    monkeypatch.setattr(shard, "fully_shard", kept)
    seen = dryrun(freed.workload, 0)
    gathers = the_one(seen.findings, "traffic")
    assert gathers.startswith("all_gather in fsdp: ") and seen.traffic < seen.predicted_traffic
    held = the_one(seen.differences(0), "memory", "buffers")
    assert seen.memory.buffers > 2 * freed.memory.buffers
    # By the blocks that are still there, and by the line that runs them.
    assert "layers.3 " in held and "layers.2 " in held and "models/decoder.py:" in held


# Buffers kept alive.


def test_gathered_tokens_that_are_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    clean("tp=2,recompute=full", 0)
    all_gather, kept = tensor_region.all_gather, []

    def keeping(*arguments: Any) -> Tensor:
        kept.append(all_gather(*arguments))
        return kept[-1]

    monkeypatch.setattr(tensor_region, "all_gather", keeping)
    seen = dryrun(question_of("tp=2,recompute=full"), 0)
    assert seen.matches
    text = the_one(seen.differences(0), "memory", "activations")
    assert "self_attn" in text and "parallel/tensor_region.py:" in text
    assert the_one(seen.differences(0), "memory", "peak")


def test_messages_that_are_kept_after_their_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clean("pp=2,micro=1", 0)
    monkeypatch.setattr(Channels, "has_arrived", lambda channels, message: None)
    seen = dryrun(question_of("pp=2,micro=1"), 0)
    assert seen.matches
    text = the_one(seen.differences(0), "memory", "buffers")
    # The output of the stage's last block is what it sends.
    assert "layers.1" in text


# Swapped sends.


def test_a_message_to_the_wrong_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    clean("pp=4,micro=2", 1)
    send = Channels.send

    def astray(channels: Channels, tensor: Tensor, message: Instruction) -> None:
        assert message.peer is not None
        send(channels, tensor, message._replace(peer=2 - message.peer))

    monkeypatch.setattr(Channels, "send", astray)
    seen = dryrun(question_of("pp=4,micro=2"), 1)
    text = the_one(seen.findings, "messages")
    assert text.startswith("message 3 of the step is a send of ") and "with pipeline rank 0;" in text
    assert "the schedule has SF1.0>2, a send of " in text and "parallel/pipeline.py:" in text


def test_messages_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clean("pp=4,micro=2", 1)
    program_of = Executor._program

    def swapped(executor: Executor, micro_batches: int) -> list[Instruction]:
        """The first receive comes before the send that it stood behind."""
        program = list(program_of(executor, micro_batches))
        for number, (one, other) in enumerate(pairwise(program)):
            if one.action in SENDS and other.action in RECEIVES:
                program[number], program[number + 1] = other, one
                return program
        return program  # of the one micro-batch that warms up

    monkeypatch.setattr(Executor, "_program", swapped)
    seen = dryrun(question_of("pp=4,micro=2"), 1)
    assert seen.matches  # the numbers are the same
    text = the_one(seen.findings, "messages")
    assert "is a receive of " in text and "the schedule has SF1.0>2, a send of " in text


def test_a_send_that_is_not_what_its_receiver_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = clean("pp=2,micro=1", 0), clean("pp=2,micro=1", 1)
    assert list(between_stages([first.calls, second.calls])) == []
    send = Channels.send

    def halved(channels: Channels, tensor: Tensor, message: Instruction) -> None:
        send(channels, tensor[:, ::2], message)

    monkeypatch.setattr(Channels, "send", halved)
    broken = dryrun(first.workload, 0)
    text = the_one(list(between_stages([broken.calls, second.calls])), "messages")
    size = 64 * 64 * 4
    assert text.startswith(f"pipeline rank 0 to 1: message 1 leaves with {size // 2:,} bytes of float32 (")
    assert f"is expected with {size:,} of float32 (parallel/pipeline.py:" in text
    # The stage's own messages tell as well, before its neighbour has been run.
    assert "message 1 of the step" in the_one(broken.findings, "messages")


def test_a_stage_that_forgets_a_message() -> None:
    first, second = clean("pp=2,micro=1", 0), clean("pp=2,micro=1", 1)
    forgotten = [call for call in first.calls if call.op == "send"][-1]
    calls = [call for call in first.calls if call is not forgotten]
    text = the_one(list(between_stages([calls, second.calls])), "messages")
    assert text == "pipeline rank 0 to 1: 7 messages are sent and 8 received"


# Messages of another strategy: not the pipeline's business.


@pytest.mark.long
def test_a_ring_beside_a_pipeline_is_not_taken_for_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = "tp=2,pp=2,micro=1"
    usual = [clean(layout, rank) for rank in (0, 2)]
    forward, kept = Executor._forward, []

    def ring(
        executor: Executor, stage: int, micro: int, underway: StepState, place: int | None = None
    ) -> None:
        """As ring attention will: what a computation holds goes to the neighbour on another axis, and comes back."""
        forward(executor, stage, micro, underway, place)
        group, neighbour = executor.mesh.group("tp"), 1 - executor.mesh.coords["tp"]
        kept.append(torch.ones(7, 3))
        ways = [
            dist.P2POp(way, kept[-1], group=group, group_peer=neighbour) for way in (dist.isend, dist.irecv)
        ]
        dist.batch_isend_irecv(ways)

    monkeypatch.setattr(Executor, "_forward", ring)
    seen = [dryrun(question_of(layout), rank) for rank in (0, 2)]
    for ours, before in zip(seen, usual, strict=True):
        others = [call for call in ours.calls if call.peer is not None and call.purpose != "pipeline"]
        assert {(call.op, call.group, call.purpose) for call in others} == {
            ("send", "tp", "tensor"),
            ("receive", "tp", "tensor"),
        }
        assert [call for call in ours.calls if call.purpose == "pipeline"] == [
            call for call in before.calls if call.purpose == "pipeline"
        ]
        # It is not predicted, which is traffic's to say; the schedule has nothing to do with it.
        assert {finding.kind for finding in ours.findings} == {"traffic"}
        assert all(" in tp: 8 calls with " in finding.text for finding in ours.findings)
        messages = [
            sum(size for place, size in one.places.items() if place.category == "messages")
            for one in (ours, before)
        ]
        assert messages[0] == messages[1] > 0
    assert list(between_stages([one.calls for one in seen])) == []


def test_every_group_of_a_rank_knows_what_it_is_for() -> None:
    """Also those that strategies make for themselves: the ring's neighbours are not the pipeline's."""
    layout = Layout(dp=2, fsdp=2, cp=2, tp=4, pp=2, zero=1)
    model = ask("tp=4", SMALL).model
    with fake_rank(layout, 5, "gloo") as mesh:
        SharedGradients(model, mesh, own_head=True)
        channels = Channels(mesh)
        sharded = mesh.group_of(placement(tp=4, cp=2, fsdp=2, dp=2).sharded)
        line, ring = channels.groups[0]["down"], mesh.group("cp")
        assert sharded is not None and ring is not None
        with CollectiveCounter(mesh.names, mesh.purposes, log=True) as counter:
            for group in (line, ring):
                dist.send(torch.ones(2), group=group, group_dst=1 - dist.get_rank(group))
            dist.all_reduce(torch.ones(2), group=sharded)
            dist.all_reduce(torch.ones(2), group=mesh.control)
        named = {purpose: name for name, purpose in mesh.purposes.items()}
    assert set(named) == {"replicate", "shard", "context", "tensor", "pipeline", "control"}
    assert [(call.op, call.purpose) for call in counter.calls] == [
        ("send", "pipeline"),
        ("send", "context"),
        ("all_reduce", "shard"),
        ("all_reduce", "control"),
    ]


# Wrong shapes and wrong kernels end the dry run.


def test_a_shape_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    clean("tp=2,pp=2", 2)
    shape_of = Executor._hidden_shape

    def all_tokens(executor: Executor, batch: Any) -> tuple[int, int, int]:
        rows, length, width = shape_of(executor, batch)
        return rows, length * executor.layout.tp, width

    monkeypatch.setattr(Executor, "_hidden_shape", all_tokens)
    with pytest.raises(RuntimeError, match="Mismatching"):
        dryrun(question_of("tp=2,pp=2"), 2)


@pytest.mark.parametrize("cluster", ["1xcpu", "1xH100"])
def test_attention_that_no_longer_is_fused(cluster: str) -> None:
    workload = replace(question_of("dp=1"), cluster=find(cluster))
    assert dryrun(workload, 0).differences(0) == []
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(WrongKernel, match=r"_safe_softmax.* fused attention"):
        dryrun(workload, 0)


def test_attention_that_no_kernel_is_known_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda query, *rest, **options: query)
    with pytest.raises(WrongKernel, match="no kernel of attention that is known"):
        dryrun(question_of("dp=1"), 0)
