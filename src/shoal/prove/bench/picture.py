"""A benchmark as a bar chart: one self-contained SVG."""

from __future__ import annotations

from html import escape

from shoal.prove.bench.result import SHOAL, PeerResult, StepBench

WIDTH, ROW, TOP, LEFT, RIGHT = 860, 34, 76, 190, 250
OURS, THEIRS, DIFFERS = "#2a6f97", "#b8c4cc", "#d1495b"


def svg(bench: StepBench) -> str:
    """Tokens per second of every peer, fastest first; a whisker spans the slowest to the fastest round."""
    rows = sorted(bench.measured, key=bench.tokens_per_s, reverse=True)
    most = max((bench.job.config.recipe.tokens_per_step / min(row.medians) for row in rows), default=1.0)
    height = TOP + ROW * len(rows) + 34
    recipe = bench.job.config.recipe
    states = "" if recipe.states == recipe.precision else f" with {recipe.states} states"
    title = f"{bench.job.model.name}, one training step on {bench.job.cluster.device.name}"
    below = (
        f"tokens/s; sequence {recipe.seq:,}, batch {recipe.batch}, {recipe.precision}{states}, "
        f"layout {bench.job.layout}"
    )
    bars = "".join(_bar(bench, row, number, most) for number, row in enumerate(rows))
    note = (
        f"{bench.rounds} rounds of {bench.steps} steps in turns, medians; whiskers: slowest and fastest round"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="16" y="28" font-size="17">{escape(title)}</text>'
        f'<text x="16" y="50" fill="#555">{escape(below)}</text>{bars}'
        f'<text x="16" y="{height - 12}" font-size="11" fill="#777">{escape(note)}</text></svg>\n'
    )


def _bar(bench: StepBench, row: PeerResult, number: int, most: float) -> str:
    def across(rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * rate / most

    rate, top = bench.tokens_per_s(row), TOP + ROW * number
    middle = top + (ROW - 10) / 2
    tokens = bench.job.config.recipe.tokens_per_step
    low, high = across(tokens / max(row.medians)), across(tokens / min(row.medians))
    agrees = bench.agrees(row)
    colour = DIFFERS if not agrees else OURS if row.name == SHOAL else THEIRS
    words = [f"{rate:,.0f}"]
    if row.peak_allocated is not None:
        words.append(f"{row.peak_allocated / 2**30:.1f} GiB")
    if (ratio := bench.ratio(row)) is not None:
        words.append(f"Shoal {ratio[0]:.2f} ×")
    if not agrees:
        words.append("its loss differs")
    label = f'<text x="{LEFT - 10}" y="{middle + 5:.0f}" text-anchor="end">{escape(row.name)}</text>'
    bar = (
        f'<rect x="{LEFT}" y="{top}" width="{across(rate) - LEFT:.1f}" height="{ROW - 10}" fill="{colour}">'
        f"<title>{escape(row.what)}</title></rect>"
    )
    whisker = f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="#333" stroke-width="1.5"/>'
    value = f'<text x="{high + 10:.1f}" y="{middle + 5:.0f}">{escape(" · ".join(words))}</text>'
    return label + bar + whisker + value
