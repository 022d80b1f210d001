"""The scenarios of docs/planner.md, as the planner sees them. ``python -m tests.docs.scenarios`` writes them there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from shoal.facts.layout import RECOMPUTES, Layout, divisors
from shoal.facts.layout.legality import Case, broken
from shoal.plan.decide import duration
from shoal.plan.explain import GIB, binds, percent, strategy
from shoal.plan.judge import Plan, judge
from shoal.plan.report import PlanReport, plan_report
from shoal.plan.request import PlanRequest, plan_request
from shoal.predict.memory import ledger
from shoal.predict.time.step import step

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def replicas(devices: int) -> Iterator[dict[str, Any]]:
    yield {"dp": devices}


def sharded(devices: int, *stages: int) -> Iterator[dict[str, Any]]:
    """FSDP, HSDP and the other stages of ZeRO."""
    for fsdp, zero in product(divisors(devices)[1:], stages):
        yield {"dp": devices // fsdp, "fsdp": fsdp, "zero": zero}


def tensor(devices: int) -> Iterator[dict[str, Any]]:
    for tp in (2, 4, 8):
        for data in sharded(devices // tp, 1, 2, 3):
            yield {**data, "tp": tp}


def three_dimensional(devices: int) -> Iterator[dict[str, Any]]:
    orders = [{"schedule": "1f1b"}, {"schedule": "zb"}]
    orders += [{"schedule": "interleaved", "chunks": chunks} for chunks in (2, 3, 4, 6)]
    for tp, pp, order, zero in product((2, 4, 8), (2, 4, 8, 16), orders, (1, 3)):
        yield {"fsdp": devices // tp // pp, "zero": zero, "tp": tp, "pp": pp, **order}


def offloaded(devices: int) -> Iterator[dict[str, Any]]:
    for away in ("optimizer", "optimizer+params", "optimizer+params+activations"):
        yield {"fsdp": devices, "offload": Layout.parse(f"offload={away}").offload}


@dataclass(frozen=True)
class Scenario:
    """A job, the strategy that textbooks name for it, and which layouts that is."""

    job: str
    model: str
    on: str
    seq: int
    batch: int
    family: str
    members: Callable[[int], Iterator[dict[str, Any]]]
    lora: int | None = None

    @property
    def asked(self) -> PlanRequest:
        return plan_request(self.model, self.on, seq=self.seq, batch=self.batch, lora=self.lora)


SCENARIOS = (
    Scenario("LoRA of 7B", "llama2-7b", "8xH100", 4096, 64, "DDP", replicas, lora=16),
    Scenario("all of 8B", "llama3-8b", "8xH100", 4096, 64, "FSDP or ZeRO-2", lambda all: sharded(all, 2, 3)),
    Scenario(
        "all of 13B", "llama2-13b", "8xH100", 4096, 64, "FSDP or ZeRO-2", lambda all: sharded(all, 2, 3)
    ),
    Scenario("all of 70B", "llama3-70b", "32xH100", 4096, 128, "HSDP or ZeRO-3", lambda all: sharded(all, 3)),
    Scenario("pretraining 70B", "llama3-70b", "128xH100", 8192, 256, "sharding + TP", tensor),
    Scenario("pretraining 175B", "gpt3-175b", "1024xH100", 2048, 1536, "3D", three_dimensional),
    Scenario("70B on one node", "llama3-70b", "8xH100", 4096, 64, "ZeRO-3 with offload", offloaded),
)


def best_member(scenario: Scenario) -> Plan | None:
    """The fastest of the family that fits, by trying all."""
    asked = scenario.asked
    recipe, best = asked.recipe, None
    for degrees, micro, recompute in product(
        scenario.members(asked.cluster.devices), (1, 2, 4, 8), RECOMPUTES
    ):
        layout = Layout(**degrees, micro=micro, recompute=recompute)
        if any(broken(Case.of(layout, asked.model, recipe, asked.cluster))):
            continue
        workload = asked.workload(layout)
        seconds = step(workload).seconds
        if (best is None or seconds < best[0]) and ledger(workload).fits:
            best = seconds, workload
    return judge(best[1]) if best else None


COLUMNS = (
    "job",
    "textbook",
    "the planner's choice",
    "tokens/s/GPU",
    "MFU",
    "vs DDP",
    "best of the textbook family",
)


def compared(plan: Plan, family: Plan | None) -> str:
    """The family's best beside the planner's choice."""
    if family is None:
        return "does not fit"
    if family.layout == plan.layout:
        return "the same"
    slower = family.step.seconds / plan.step.seconds - 1
    verdict = "a tie" if slower <= plan.error_bar else "slower"
    return f"`{family.layout}`, {-1 + 1 / (1 + slower):+.1%} tokens/s: {verdict}; {binds(family)}"


def beside_ddp(plan: Plan) -> str:
    return f"{plan.vs_ddp:.2f}" + ("" if plan.ddp_fits else " (DDP does not fit)")


def row(scenario: Scenario) -> str:
    found = plan_report(scenario.asked)
    plan = found.choice
    assert plan is not None
    family = best_member(scenario)
    cells = (
        f"{scenario.job}: {scenario.on}, {scenario.batch}×{scenario.seq}",
        scenario.family,
        f"`{plan.layout}`: {strategy(plan.layout, plan.workload.lora)}",
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        percent(plan.mfu),
        beside_ddp(plan),
        compared(plan, family),
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    return "\n".join([head, *map(row, SCENARIOS)])


# The layout that Meta published for Llama 3 405B on 16,384 H100 (The Llama 3 Herd of Models, table 4), with what they
# say of its schedule and without recomputation; then with it.
HERD = plan_request("llama3-405b", "16384xH100", seq=8192, batch=2048)
PUBLISHED = (
    "fsdp=128,tp=8,pp=16",
    "fsdp=128,tp=8,pp=16,schedule=interleaved,chunks=7",
    "fsdp=128,tp=8,pp=16,schedule=interleaved,chunks=7,recompute=full",
)


def line(plan: Plan) -> str:
    memory = plan.memory
    fits = "fits" if plan.fits else "does not fit"
    return (
        f"| `{plan.layout}` | {memory.device_p90 / GIB:.1f}, {fits} | {duration(plan.step.seconds)} "
        f"± {plan.error_bar:.0%} | {plan.model_tflops_per_gpu:.0f} | {percent(plan.mfu)} | {binds(plan)} |"
    )


def herd() -> str:
    found: PlanReport = plan_report(HERD)
    judged = [judge(HERD.workload(Layout.parse(layout))) for layout in PUBLISHED]
    head = "| layout | GiB of 79.1 | step | TFLOP/s/GPU | MFU | bottleneck |\n|---|---|---|---|---|---|"
    rather = "\n".join([head, *map(line, [*judged, *filter(None, [found.choice])])])
    return f"{rather}\n\nThe decision, out of {found.searched:,} layouts: {found.decision.text}"


def block(name: str, content: str, page: str) -> str:
    """The page with what stands between a block's marks replaced."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return marks.sub(lambda found: found[1] + content + found[2], page)


def written(page: str) -> str:
    return block("405B", herd(), block("scenarios", table(), page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
