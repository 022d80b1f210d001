"""``shoal config show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="config", help="Look at a config.", help_format="plaintext")


@app.command
def show(
    config: Path | None = None,
    /,
    *,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    layout: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Every value of a config and where it came from.

    Example: shoal config show examples/tiny.toml --set recipe.lr=0.001

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is shown.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    layout
        Where the work happens, as in dp=2, or auto.
    json
        Print one JSON document: {key: {value, origin}}.
    """
    from shoal.cli.show import print_json
    from shoal.facts.configfile import describe, flatten, load

    loaded = load(config, set, layout)
    values = flatten(loaded.config)
    origins = {key: loaded.origin(key) for key in values}
    if json:
        print_json({key: {"value": value, "origin": origins[key]} for key, value in values.items()})
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "value", "from", "meaning", box=None, pad_edge=False)
    for key, value in values.items():
        shown = "" if value is None else repr(value) if not isinstance(value, bool) else str(value).lower()
        table.add_row(key, shown, origins[key], describe(key))
    Console(highlight=False).print(table)
    return 0
