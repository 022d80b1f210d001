"""DeepSeek-V3 as its report has it: 180 thousand H800-hours for a trillion tokens."""

from __future__ import annotations

from dataclasses import replace

from shoal.facts.cluster.stack import DEEPSEEK, SHOAL
from shoal.plan.judge import Plan, judge
from shoal.plan.request import plan_request

HOURS = 180e3
# Sixteen stages in two directions, experts over eight nodes, optimizer states sharded, norms and projections repeated.
LAYOUT = "fsdp=128,zero=1,pp=16,schedule=dualpipev,ep=64,micro=1,recompute=selective"


def judged() -> Plan:
    asked = plan_request(
        "deepseek-v3", "2048xH800", seq=4096, batch=15360, layout=LAYOUT, tokens="1T", precision="fp8"
    )
    assert asked.layout is not None
    return judge(replace(asked.workload(asked.layout), stack=DEEPSEEK))


def test_within_the_error_bar() -> None:
    plan = judged()
    hours = plan.world * plan.step.seconds / plan.workload.recipe.tokens_per_step * 1e12 / 3600
    assert abs(hours / HOURS - 1) < plan.error_bar
    assert abs(hours / HOURS - 1) < 0.15


def test_it_is_its_software_that_makes_the_difference() -> None:
    """An engine that sends a token to every expert, and waits for it, would take twice as long."""
    plan = judged()
    plain = judge(replace(plan.workload, stack=replace(DEEPSEEK, sends_once=False, expert_overlap=0.0)))
    assert plain.step.seconds > 1.8 * plan.step.seconds
    assert judge(replace(plan.workload, stack=SHOAL)).step.seconds > plan.step.seconds
