"""The output of ``shoal plan``: decision, table, curves and footnotes."""

from __future__ import annotations

from shoal.cli.show import counted, print_columns
from shoal.plan.decide import duration
from shoal.plan.explain import GIB, against, binds, percent
from shoal.plan.headroom import chance
from shoal.plan.judge import Plan
from shoal.plan.report import PlanReport
from shoal.plan.scale import Point

HEAD = ("", "GiB", "s/step", "tokens/s/GPU", "MFU", "vs DDP", "binds", "engine", "layout")
ANSWERS = ("answer", "s/step", "GiB free", "out of memory", "unmeasured", "layout")
CURVE = ("GPUs", "seq", "batch", "s/step", "tokens/s", "speed-up", "efficiency", "GPU-hours", "layout")


def show(found: PlanReport, explain: bool) -> None:
    asked = found.asked
    print(
        f"{asked.model.name} on {asked.cluster}, {asked.recipe.batch} sequences of {asked.recipe.seq} tokens per step\n"
    )
    print(found.decision.text)
    for reason in found.decision.reasons:
        print(f"- {reason}")
    if found.chosen is not None:
        print()
        print_columns([ANSWERS, *(_answer(name, each) for name, each in found.chosen.answers.items())])
    if found.plans:
        print()
        print_columns([HEAD, *(_row(found, each) for each in found.plans)])
    for title, points in (("GPUs", found.over_devices), ("sequence length", found.over_sequences)):
        if points:
            print(f"\nover {title}")
            print_columns([CURVE, *map(_point, points)])
    if explain:
        _explain(found)
    _below(found)


def _row(found: PlanReport, plan: Plan) -> tuple[str, ...]:
    memory = plan.memory
    sizes = (
        f"{memory.peak_allocated / GIB:.1f} … {memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f}"
    )
    mark = "✓" if plan is found.choice else "=" if plan.tie else ""
    return (
        mark if plan.fits else "✗",
        sizes,
        f"{plan.step.seconds:.4g} ± {plan.error_bar:.0%}",
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        percent(plan.mfu),
        f"{plan.vs_ddp:.2f}",
        binds(plan),
        "runs" if plan.runs else "not yet",
        str(plan.layout),
    )


def _answer(name: str, plan: Plan) -> tuple[str, ...]:
    memory = plan.memory
    return (
        name,
        f"{plan.step.seconds:.4g} ± {plan.error_bar:.0%}",
        f"{(memory.capacity - memory.device_total) / GIB:.1f}",
        chance(plan.out_of_memory),
        str(len(plan.unmeasured)),
        str(plan.layout),
    )


def _point(point: Point) -> tuple[str, ...]:
    plan = point.plan
    where = (str(point.devices), str(point.seq), str(point.batch))
    if plan is None or point.speedup is None or point.efficiency is None:
        return (*where, "", "", "", "", "", "nothing fits")
    return (
        *where,
        f"{plan.step.seconds:.4g}",
        f"{plan.tokens_per_s:,.0f}",
        f"{point.speedup:.2f}",
        f"{point.efficiency:.0%}",
        _amount(point.cost.gpu_hours) if point.cost else "",
        str(plan.layout),
    )


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _explain(found: PlanReport) -> None:
    best = found.plans[0] if found.plans else None
    for plan in found.plans:
        print(f"\n{plan.layout} ({plan.support})\n  {plan.why}")
        if best is not None and plan is not best:
            print(f"  {against(plan, best)}")
    if found.rejected:
        print("\nrunners-up")
    for layout, reason in found.rejected:
        print(f"  {layout}: {reason}")


def _below(found: PlanReport) -> None:
    chosen = found.choice
    print()
    if chosen is not None and (total := found.cost(chosen)):
        price = f", cost {total.cost:,.0f}" if total.cost is not None else ""
        print(
            f"{total.tokens:,} tokens: {total.steps:,} steps, {duration(total.seconds)} "
            f"± {chosen.error_bar:.0%}, {_amount(total.gpu_hours)} GPU-hours{price}"
        )
    for remedy in found.remedies:
        print(f"alternative: {remedy}" if chosen and chosen.fits else f"would fit: {remedy}")
    if ties := sum(plan.tie and plan is not chosen for plan in found.plans):
        print(f"{counted(ties, 'layout')} (=) within the error bar of the fastest")
    if found.unmeasured:
        print(f"not covered by published runs (wider error bar): {', '.join(found.unmeasured)}")
    asked = found.asked
    if asked.layout is None:
        print(
            (
                f"proven best of {counted(found.searched, 'layout')}"
                if found.proven
                else f"searched {counted(found.searched, 'layout')}, none of which can be faster than "
                f"{found.at_best or 0:.4g} s/step"
            )
            + f", in {found.seconds:.2f} s: {found.evaluated:,} priced, the rest ruled out by bounds"
        )
    if chosen is not None and chosen.fits:
        print(f"next: {chosen.command}")
