"""``shoal bench``: collectives; a training step next to other stacks; the planner next to published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.cli.bench_comm import comm
from shoal.cli.bench_step import step

app = App(
    name="bench",
    help="Measure collectives, or a training step next to other stacks; compare the planner with published runs.",
    help_format="plaintext",
)
app.command(comm)
app.command(step)

WORST = 10


@app.command
def plan(*, runs: Path, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Compare the planner with published runs: predicted step time and memory for every row of a table.

    Example: shoal bench plan --runs published_runs.csv

    Where a row leaves a value blank, the planner chooses it.

    Parameters
    ----------
    runs
        A CSV table with one run per row: model shape, GPUs, layout and measured step time.
    json
        Print one JSON document: {rows, sources}.
    """
    from shoal.cli.show import print_columns, print_json
    from shoal.plan.accuracy import as_json, judged, sources, worst
    from shoal.plan.published_runs import read

    rows = judged(read(runs))
    if json:
        print_json(as_json(rows))
        return 0

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:+.1%}"

    def size(value: float | None) -> str:
        return percent(value).removeprefix("+")

    print_columns(
        [
            ("source", "rows", "timed", "mean error", "largest", "bias", "judged to fit"),
            *(
                (
                    name,
                    str(source.rows),
                    str(source.n),
                    size(source.mean_abs_error),
                    size(source.max_abs_error),
                    percent(source.bias),
                    str(source.fit),
                )
                for name, source in sources(rows).items()
            ),
        ]
    )
    print(f"\nlargest errors of {len(rows)}:")
    print_columns(
        [
            ("id", "layout", "predicted s", "measured s", "error"),
            *(
                (
                    row.id,
                    row.layout,
                    f"{row.predicted_step_s:.4g}",
                    f"{row.measured_step_s:.4g}",
                    percent(row.error),
                )
                for row in worst(rows, WORST)
            ),
        ]
    )
    return 0
