"""``shoal config show``: every value and where it came from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="config", help="Show a config.", help_format="plaintext")


@app.command
def show(
    config: Path | None = None,
    /,
    *,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    layout: str | None = None,
    changed: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show every value of a config and where it came from.

    Example: shoal config show examples/tiny.toml --set recipe.lr=0.001

    Example: shoal config show examples/tiny.toml --changed

    Parameters
    ----------
    config
        A TOML file; without one the embedded default is shown.
    set
        Override one value, as in recipe.lr=0.001. May be given several times.
    layout
        The parallel layout, as in dp=2, or auto.
    changed
        Only values that differ from those of an empty config.
    json
        Print one JSON document: {key: {value, origin}}.
    """
    from shoal.cli.show import print_columns, print_fitted, print_json
    from shoal.facts.config import Config, describe
    from shoal.facts.config.check import toml_value
    from shoal.facts.config.file import flatten, load

    loaded = load(config, set, layout)
    values = flatten(loaded.config)
    if changed:
        usual = flatten(Config())
        values = {key: value for key, value in values.items() if value != usual.get(key)}
    if json:
        print_json({key: {"value": value, "origin": loaded.origin(key)} for key, value in values.items()})
        return 0
    shown = {key: "" if value is None else toml_value(value) for key, value in values.items()}
    rows = [(key, shown[key], loaded.origin(key), describe(key)) for key in values]
    if not rows:
        print("nothing is changed: every value is the default")
        return 0
    titled: list[tuple[str, ...]] = [("key", "value", "from", "meaning"), *rows]
    if sys.stdout.isatty():
        print_fitted(titled, (((0, 1, 2, 3),), ((0, 1, 2), (3,))))
    else:  # one line per key, so that it can be searched
        print_columns(titled)
    return 0
