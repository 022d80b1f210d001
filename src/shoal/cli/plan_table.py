"""The output of ``shoal plan``: decision, table, curves and footnotes."""

from __future__ import annotations

from shoal.cli.show import counted, print_fitted, print_wrapped
from shoal.facts.cluster.stack import SHOAL
from shoal.plan.amounts import seconds_per_step, short
from shoal.plan.compare import Compared, best_of
from shoal.plan.decide import duration
from shoal.plan.explain import GIB, against, binds, percent
from shoal.plan.goodput import in_words
from shoal.plan.headroom import chance, free_bytes
from shoal.plan.judge import Plan
from shoal.plan.report import PlanReport
from shoal.plan.scale import Cost, Point

HEAD = ("", "GiB", "s/step", "tokens/s/GPU", "MFU", "vs DDP", "engine", "binds", "layout")
# All on one line; the layout above; the layout above and the bottleneck below.
WIDE = [(0, 1, 2, 3, 4, 5, 6, 7, 8)]
ARRANGED = (WIDE, [(0, 8), (1, 2, 3, 4, 5, 6, 7)], [(0, 8), (1, 2, 3, 4, 5, 6), (7,)])
ANSWERS = ("answer", "s/step", "GiB free", "out of memory", "unmeasured", "layout")
ANSWERS_ARRANGED = ([(0, 1, 2, 3, 4, 5)], [(0, 5), (1, 2, 3, 4)])
CURVE = ("GPUs", "seq", "batch", "s/step", "tokens/s", "speed-up", "efficiency", "GPU-hours", "layout")
CURVE_ARRANGED = (WIDE, [(8,), (0, 1, 2, 3, 4, 5, 6, 7)])


def show(found: PlanReport, explain: bool) -> None:
    asked = found.asked
    batch = counted(asked.recipe.batch, "sequence")
    print(f"{asked.model.name} on {asked.cluster}, {batch} of {asked.recipe.seq} tokens per step\n")
    if found.number is not None and found.number.asked is asked:
        print_wrapped(found.number.text)
        print()
    print_wrapped(found.decision.text)
    for reason in found.decision.reasons:
        print_wrapped(f"- {reason}", "  ")
    if found.chosen is not None:
        print()
        answers = [_answer(name, each) for name, each in found.chosen.answers.items()]
        print_fitted([ANSWERS, *answers], ANSWERS_ARRANGED)
    if found.plans:
        print()
        print_fitted([HEAD, *(_row(found, each) for each in found.plans)], ARRANGED)
    for title, points in (("GPUs", found.over_devices), ("sequence length", found.over_sequences)):
        if points:
            print(f"\nover {title} (100%: where a GPU does the most)")
            print_fitted([CURVE, *map(_point, points)], CURVE_ARRANGED)
    if explain:
        _explain(found)
    _below(found)


COMPARED = ("cluster", "s/step", "tokens/s/GPU", "tokens/day", "days", "GPU-hours", "cost", "kWh", "layout")
COMPARED_ARRANGED = (WIDE, [(0, 8), (1, 2, 3, 4, 5, 6, 7)])


def show_compared(rows: list[Compared]) -> None:
    """One line per cluster."""
    asked = rows[0].found.asked
    length = f", {asked.tokens:,} tokens" if asked.tokens else ""
    batches = {row.found.asked.recipe.batch for row in rows}
    batch = counted(asked.recipe.batch, "sequence") if len(batches) == 1 else "a usual batch"
    print(f"{asked.model.name}, {batch} of {asked.recipe.seq} tokens per step{length}\n")
    print_fitted([COMPARED, *map(_compared, rows)], COMPARED_ARRANGED)
    print()
    for said in best_of(rows):
        print(said)
    for row in rows:
        for verdict in row.found.verdicts:
            print_wrapped(f"{row.found.asked.cluster}: {verdict.text}", "  ")
        if row.plan is None:
            print_wrapped(f"{row.found.asked.cluster}: {row.found.decision.text}", "  ")
    if asked.tokens is None:
        print("--tokens 1T adds days, GPU-hours and kWh; --price the cost")
    print_wrapped(
        "kWh at the GPUs' rated power, without hosts, network and cooling; each cluster alone has the reasons"
    )


def _compared(row: Compared) -> tuple[str, ...]:
    plan, total = row.plan, row.cost
    name = str(row.found.asked.cluster)
    if plan is None or row.tokens_per_day is None:
        return (name, *[""] * 7, "nothing fits")
    return (
        name,
        f"{seconds_per_step(plan.step.seconds)} ± {plan.error_bar:.0%}",
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        short(row.tokens_per_day),
        f"{total.days:.3g}" if total else "",
        _amount(total.gpu_hours) if total else "",
        f"{total.cost:,.0f}" if total and total.cost is not None else "",
        _amount(total.kwh) if total and total.kwh is not None else "",
        str(plan.layout),
    )


def _row(found: PlanReport, plan: Plan) -> tuple[str, ...]:
    memory = plan.memory
    sizes = (
        f"{memory.peak_allocated / GIB:.1f} … {memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f}"
    )
    mark = "✓" if plan is found.choice and not found.nothing_runs else "=" if plan.tie else ""
    return (
        mark if plan.fits else "✗",
        sizes,
        f"{seconds_per_step(plan.step.seconds)} ± {plan.error_bar:.0%}",
        f"{plan.tokens_per_s_per_gpu:,.0f}",
        percent(plan.mfu),
        f"{plan.vs_ddp:.2f}",
        "runs" if plan.runs else "not yet",
        binds(plan),
        str(plan.layout),
    )


def _answer(name: str, plan: Plan) -> tuple[str, ...]:
    memory = plan.memory
    return (
        name,
        f"{seconds_per_step(plan.step.seconds)} ± {plan.error_bar:.0%}",
        f"{free_bytes(memory) / GIB:.1f}",
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
        seconds_per_step(plan.step.seconds),
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
        print(f"\n{plan.layout} ({plan.support})")
        print_wrapped(f"  {plan.why}", "  ")
        if best is not None and plan is not best:
            print_wrapped(f"  {against(plan, best)}", "  ")
    if found.rejected:
        print("\nrunners-up")
    for layout, reason in found.rejected:
        print_wrapped(f"  {layout}: {reason}", "    ")


def _below(found: PlanReport) -> None:
    chosen = found.choice
    print()
    if chosen is not None and (total := found.cost(chosen)):
        _cost(total, chosen)
    for verdict in found.verdicts:
        print_wrapped(verdict.text, "  ")
    if found.number is not None and found.number.asked is not found.asked:
        print_wrapped(f"in time: {found.number.text}", "  ")
    if found.affordable is not None:
        print_wrapped(found.affordable.text, "  ")
    if found.asked.tokens is not None and found.asked.lora is None:
        print_wrapped(found.optimal.text, "  ")
    for remedy in found.remedies:
        fits = chosen is not None and chosen.fits and not found.nothing_runs
        print_wrapped(f"{'alternative' if fits else 'would fit'}: {remedy}", "  ")
    if ties := sum(plan.tie and plan is not chosen for plan in found.plans):
        print(f"{counted(ties, 'layout')} (=) within the error bar of the fastest")
    if found.unmeasured:
        print_wrapped(f"not covered by published runs (wider error bar): {', '.join(found.unmeasured)}", "  ")
    asked = found.asked
    if asked.layout is None:
        best = (
            f"proven best of {counted(found.searched, 'layout')}"
            if found.proven
            else f"searched {counted(found.searched, 'layout')}, none of which can be faster than "
            f"{seconds_per_step(found.at_best or 0)} s/step"
        )
        print_wrapped(
            f"{best}, in {found.seconds:.2f} s: {found.evaluated:,} priced, the rest ruled out by bounds",
            "  ",
        )
    if found.measurement is not None:
        print_wrapped(f"what would change this: {found.measurement.text}", "  ")
        if found.measurement.factor is not None:
            print(f"measure: {found.measurement.command}")
    if found.nothing_runs and found.remedies:
        chosen = found.remedies[0].plan
    if chosen is not None and chosen.fits:
        print(f"next: {chosen.command}")
        if chosen.runs and chosen.nodes > 1 and found.asked.stack is SHOAL:
            print_wrapped(
                f"shoal train is for each of the {chosen.nodes} nodes, in a directory that they share, with "
                "--set cluster.interface=NAME for the network between them (docs/nodes.md)"
            )
            print("or as a job: shoal launch plan.toml --to slurm --submit (docs/clusters.md)")


def _cost(total: Cost, plan: Plan) -> None:
    price = f", cost {total.cost:,.0f}" if total.cost is not None else ""
    energy = f", {_amount(total.kwh)} kWh of the GPUs" if total.kwh is not None else ""
    print_wrapped(
        f"{total.tokens:,} tokens: {total.steps:,} steps, {duration(total.seconds)} "
        f"± {plan.error_bar:.0%}, {_amount(total.gpu_hours)} GPU-hours{price}{energy}",
        "  ",
    )
    if total.goodput is not None:
        print_wrapped(f"goodput {in_words(total.goodput)}", "  ")
