"""Exports judged again as what their targets run: warned, replaced or refused with the nearest that fits there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.exporting import ask, questions, written_by

from shoal.facts.cluster.stack import DEEPSPEED, MEGATRON_CORE, TITAN_CHUNKED, TRANSFORMERS
from shoal.facts.layout import Layout
from shoal.facts.layout.legality import violations
from shoal.facts.layout.stack_limits import gaps
from shoal.facts.problem import BadInput
from shoal.plan.export import STACKS, export
from shoal.plan.export.rejudge import nearest_that_fits, rejudged
from shoal.plan.judge import asked_of, judge
from shoal.predict.workload import Workload

TARGETS = {
    "megatron": {MEGATRON_CORE},
    "megatron-bridge": {MEGATRON_CORE},
    "nemo": {MEGATRON_CORE},
    "torchtitan": {TITAN_CHUNKED},
    "deepspeed": {DEEPSPEED},
    "accelerate": {TRANSFORMERS, DEEPSPEED},
    "sagemaker": {TRANSFORMERS},
}


@pytest.mark.parametrize(
    ("workload", "target"),
    [(one, stack) for one in questions() for stack in STACKS if written_by(stack, one)],
    ids=lambda one: one if isinstance(one, str) else f"{one.model.name} {one.layout}",
)
def test_what_is_judged_is_legal_and_run_there(workload: Workload, target: str) -> None:
    there = export(target, workload).runs_as
    assert there.stack in TARGETS[target]
    assert there.layout.world == workload.layout.world
    assert violations(there.layout, there.model, there.recipe, there.cluster) == []
    # What no other layout could put right is said, and refused where it is exported.
    assert all(gap.changes is None for gap in gaps(there.stack.name, asked_of(there)))
    assert export(target, workload).checked


def eight_billion(layout: str) -> Workload:
    return ask(layout, on="64xH100", seq=8192, batch=512)


def test_an_8b_that_fits_here_and_not_in_megatron() -> None:
    """Its optimizer shards nothing but its own states under a pipeline: weights and fp32 gradients are whole there."""
    planned = judge(eight_billion("fsdp=16,pp=4,micro=2,recompute=selective"))
    assert planned.fits
    with pytest.raises(BadInput) as caught:
        rejudged("megatron", planned)
    said = str(caught.value)
    assert "as megatron runs it, fsdp=16,zero=1,pp=4,micro=2" in said and "of 79.1 GiB" in said
    # The fix is a layout that the target runs and that fits there.
    fix = Layout.parse(said.partition("--layout ")[2].split(" ")[0])
    there = judge(export("megatron", eight_billion(str(fix))).runs_as)
    assert there.fits and there.layout == fix


def test_a_layout_that_the_planner_chose_gives_way() -> None:
    planned = judge(eight_billion("fsdp=64,micro=2"))
    assert planned.fits
    exported, verdict = rejudged("megatron", planned, free=True)
    assert verdict.there.fits and "in its place" in verdict.warning
    assert f"--micro-batch-size {verdict.there.workload.micro}" in exported.files["megatron.sh"]
    assert "runs it as" in verdict.words and verdict.as_json()["fits"] is True


def test_what_is_at_the_memory_s_edge_there_alone_is_warned_of() -> None:
    """Whole fp32 logits leave 8B in micro-batches of two 3 GiB in Megatron, and 30 GiB here."""
    planned = judge(ask("fsdp=8,micro=2", on="8xH100", seq=4096, batch=64))
    there = rejudged("megatron", planned)[1]
    assert planned.out_of_memory < 0.001 < there.there.out_of_memory and there.there.fits
    assert "as megatron runs it, fsdp=8,micro=2 leaves 3.2 GiB free" in there.warning
    instead = Layout.parse(there.warning.partition("; ")[2].split(" ")[0])
    roomy = judge(replace(there.there.workload, layout=instead))
    assert roomy.fits and roomy.out_of_memory <= 0.001
    assert rejudged("torchtitan", planned)[1].warning == ""


def test_tensor_ranks_and_stage_3_become_stage_2_and_are_judged_as_that() -> None:
    planned = judge(ask("fsdp=8,tp=2,micro=1", batch=64))
    _, verdict = rejudged("deepspeed", planned)
    assert verdict.there.layout == Layout.parse("fsdp=8,zero=2,tp=2,sp=0,micro=1")
    # Whole bf16 weights on every tensor rank.
    assert verdict.there.memory.params > 3 * planned.memory.params


def test_disks_do_not_reach_megatron() -> None:
    planned = judge(
        ask("fsdp=8,micro=1,recompute=full,offload=optimizer@nvme+params@nvme", "llama3-70b", batch=64)
    )
    exported, verdict = rejudged("megatron", planned)
    assert verdict.there.memory.nvme == 0 and verdict.there.memory.host > 0
    assert any("NVMe" in gap for gap in exported.cannot)


def test_what_the_target_does_not_run_at_all_is_refused() -> None:
    planned = judge(ask("fsdp=2,tp=2,pp=2,micro=1,recompute=full", batch=64))
    with pytest.raises(BadInput) as caught:
        rejudged("deepspeed", planned)
    assert "PipelineModule goes with neither" in str(caught.value) and "--layout " in str(caught.value)
    _, verdict = rejudged("deepspeed", planned, free=True)
    assert verdict.there.runs and verdict.there.fits


def test_states_that_are_wider_there_are_judged_as_wide() -> None:
    narrow = ask("fsdp=8,micro=1", states="bf16")
    assert export("megatron", narrow).runs_as.recipe.states == "fp32"
    assert export("deepspeed", narrow).runs_as.recipe.states == "bf16"


def test_where_nothing_fits_it_is_said() -> None:
    huge = export("megatron", ask("tp=8,micro=1", "llama3-405b", on="8xH100", batch=8)).runs_as
    assert nearest_that_fits(huge) is None
    planned = replace(judge(ask("tp=8,micro=1", "llama3-405b", on="8xH100", batch=8)))
    with pytest.raises(BadInput, match="nothing that it runs fits"):
        rejudged("megatron", planned)
