"""A plan as one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from shoal.plan.compare import Compared
from shoal.plan.decide import duration
from shoal.plan.explain import GIB, HELD, SPENT, binds, percent
from shoal.plan.goodput import in_words
from shoal.plan.judge import Plan
from shoal.plan.report import PlanReport
from shoal.plan.scale import Point

COLOURS = ("#2a6f97", "#61a5c2", "#e07a5f", "#f2cc8f", "#81b29a", "#9a8c98", "#6d6875")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #1d2b35 }
table { border-collapse: collapse; width: 100%; margin: 1em 0 }
th, td { text-align: left; padding: .3em .6em; border-bottom: 1px solid #d9e2e8; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code { font-size: 92%; overflow-wrap: anywhere }
.bar { display: flex; height: 1.1em; min-width: 14em; background: #eef3f6 }
.bar span { display: block; height: 100% }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
.decision { font-size: 110%; background: #f4f8fa; padding: .8em 1em; border-left: 4px solid #2a6f97 }
"""


def page(found: PlanReport, compared: Sequence[Compared] = ()) -> str:
    """The whole answer. Everything that a user wrote is escaped."""
    asked = found.asked
    title = f"{asked.model.name} on {asked.cluster}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{asked.recipe.batch} sequences of {asked.recipe.seq} tokens per step, {asked.recipe.precision}.</p>",
        f'<p class="decision">{escape(found.decision.text)}</p>',
        _list([found.number.text] if found.number else []),
        _compared(compared),
        _list(found.decision.reasons),
        _cost(found),
        _list(verdict.text for verdict in found.verdicts),
        _titled("The measurement that would change this", _measurement(found)),
        _plans(found),
        _curve("Scaling: the same step on fewer and more GPUs", found.over_devices),
        _curve("Sequence length, at the same tokens per step", found.over_sequences),
        _titled("What would make it fit", _list(map(str, found.remedies))),
        _titled("Runners-up", _list(f"{layout}: {reason}" for layout, reason in found.rejected), folded=True),
        _titled("Not covered by published runs (wider error bar)", _list(found.unmeasured)),
        f"<p>{found.searched:,} layouts searched in {found.seconds:.2f} s. Times and sizes are predictions.</p>",
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _measurement(found: PlanReport) -> str:
    if found.measurement is None:
        return ""
    return f"<p>{escape(found.measurement.text)} <code>{escape(found.measurement.command)}</code></p>"


def _compared(rows: Sequence[Compared]) -> str:
    if not rows:
        return ""
    titles = ("cluster", "tokens/s/GPU", "tokens/day", "days", "GPU-hours", "cost", "kWh", "layout")
    said = ""
    for row in rows:
        plan, total = row.plan, row.cost
        numbers = (
            plan.tokens_per_s_per_gpu if plan else None,
            row.tokens_per_day,
            total.days if total else None,
            total.gpu_hours if total else None,
            total.cost if total else None,
            total.kwh if total else None,
        )
        cells = "".join(f'<td class="number">{_number(number)}</td>' for number in numbers)
        layout = str(plan.layout) if plan else "nothing fits"
        said += f"<tr><td>{escape(str(row.found.asked.cluster))}</td>{cells}<td><code>{escape(layout)}</code></td></tr>"
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<h2>Clusters side by side</h2><table><tr>{head}</tr>{said}</table>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _titled(title: str, content: str, folded: bool = False) -> str:
    if not content:
        return ""
    if folded:
        return f"<details><summary>{escape(title)}</summary>{content}</details>"
    return f"<h2>{escape(title)}</h2>{content}"


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _cost(found: PlanReport) -> str:
    total = found.cost(found.choice) if found.choice else None
    if total is None:
        return ""
    price = f", cost {total.cost:,.0f}" if total.cost is not None else ""
    return (
        f"<p>{total.tokens:,} tokens: {total.steps:,} steps, {duration(total.seconds)}, "
        f"{total.gpu_hours:,.0f} GPU-hours{price}.</p>"
        + (f"<p>Goodput {escape(in_words(total.goodput))}.</p>" if total.goodput else "")
    )


def _plans(found: PlanReport) -> str:
    if not found.plans:
        return ""
    slowest = max(plan.step.seconds for plan in found.plans)
    titles = ("layout", "step", "where the time goes", "memory", "tokens/s/GPU", "MFU", "vs DDP", "binds")
    rows = "".join(_plan(plan, slowest) for plan in found.plans)
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f"<table><tr>{head}</tr>{rows}</table>{_key('Time', SPENT.values())}{_key('Memory', HELD.values())}"
    )


def _plan(plan: Plan, slowest: float) -> str:
    memory = plan.memory
    most = max(memory.capacity, memory.device_p90)
    time = _bar([getattr(plan.step, name) / slowest for name in SPENT])
    held = _bar([getattr(memory, name) / most for name in HELD])
    sizes = f"{memory.device_p90 / GIB:.1f} of {memory.capacity / GIB:.1f} GiB"
    beside = f"{plan.vs_ddp:.2f}" + ("" if plan.ddp_fits else " (does not fit)")
    numbers = (f"{plan.tokens_per_s_per_gpu:,.0f}", percent(plan.mfu), beside)
    return (
        f"<tr><td><code>{escape(str(plan.layout))}</code><br>{escape(plan.support)}</td>"
        f'<td class="number">{duration(plan.step.seconds)} ± {plan.error_bar:.0%}</td><td>{time}</td>'
        f"<td>{held}{sizes}{'' if plan.fits else ': does not fit'}</td>"
        + "".join(f'<td class="number">{number}</td>' for number in numbers)
        + f"<td>{escape(binds(plan))}</td></tr>"
    )


def _bar(shares: list[float]) -> str:
    pieces = "".join(
        f'<span style="width:{share:.2%};background:{colour}"></span>'
        for share, colour in zip(shares, COLOURS, strict=False)
        if share > 0
    )
    return f'<div class="bar">{pieces}</div>'


def _key(title: str, names: Iterable[str]) -> str:
    entries = "".join(
        f'<span style="background:{colour}"></span>{escape(name)}'
        for name, colour in zip(names, COLOURS, strict=False)
    )
    return f'<p class="key">{title}:{entries}</p>'


def _curve(title: str, points: list[Point]) -> str:
    if not points:
        return ""
    most = max((point.speedup or 0.0 for point in points), default=0.0) or 1.0
    rows = "".join(_point(point, most) for point in points)
    titles = ("GPUs", "sequence", "batch", "speed-up", "", "efficiency", "GPU-hours", "layout")
    head = "".join(f"<th>{column}</th>" for column in titles)
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{rows}</table>"


def _point(point: Point, most: float) -> str:
    where = "".join(f'<td class="number">{value}</td>' for value in (point.devices, point.seq, point.batch))
    if point.plan is None or point.speedup is None or point.efficiency is None:
        return f'<tr>{where}<td colspan="5">nothing fits</td></tr>'
    hours = f"{point.cost.gpu_hours:,.0f}" if point.cost else ""
    return (
        f'<tr>{where}<td class="number">{point.speedup:.2f}</td><td>{_bar([point.speedup / most])}</td>'
        f'<td class="number">{point.efficiency:.0%}</td><td class="number">{hours}</td>'
        f"<td><code>{escape(str(point.plan.layout))}</code></td></tr>"
    )
