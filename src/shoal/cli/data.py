"""``shoal data prepare``: tokenise ahead of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="data", help="Prepare data ahead of a run.", help_format="plaintext")


@app.command
def prepare(
    config: Path | None = None,
    /,
    *,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Tokenise a config's data ahead of time; runs that use the same data reuse it.

    Example: shoal data prepare --set data.source="corpus/*.jsonl" --set data.tokenizer=tokenizer.json

    Parameters
    ----------
    config
        A TOML file; without one the embedded default's data is prepared.
    set
        Override one value, as in data.field=content. May be given several times.
    json
        Print one JSON document.
    """
    from shoal.cli.show import print_json
    from shoal.facts.config.file import load
    from shoal.launch.local import prepared
    from shoal.launch.screen import Console
    from shoal.train.data.collection import Collection
    from shoal.train.data.summary import summarise

    loaded = load(config, set)
    with loaded.located():
        path = prepared(loaded.config.data, Console(stderr=True, highlight=False), loaded.config.evaluate)
        data = Collection.open(path)
        found = summarise(loaded.config, data)
    if json:
        alone = data.parts[0].manifest if len(data.everything) == 1 else {}
        print_json({**alone, "path": str(path), **found.as_json()})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for line in found.lines():
        console.print(line, markup=False)
    console.print(str(path), markup=False)
    return 0
