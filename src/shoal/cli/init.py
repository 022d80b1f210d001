"""``shoal init``: write a commented config, or convert another tool's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def init(
    path: Path = Path("shoal.toml"),
    /,
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    gpus: int | None = None,
    on: str | None = None,
    force: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a commented config: every key, its default and its meaning, all commented out.

    Example: shoal init my-run.toml && shoal train my-run.toml

    Example: shoal init my-run.toml --from ds_config.json --on 8xH100

    Parameters
    ----------
    path
        Where to write it.
    from_
        A DeepSpeed JSON or Accelerate YAML to convert; settings without a counterpart are listed.
    gpus
        Number of ranks, if that file does not say.
    on
        The cluster to run on, as in 8xH100; also sets the number of ranks.
    force
        Overwrite an existing file.
    """
    import shlex
    import sys

    from shoal.facts.config.file import template
    from shoal.facts.problem import BadInput

    text = template()
    notes: list[str] = []
    if from_ is not None:
        from shoal.plan.importers import read_foreign, render

        tables, notes = read_foreign(from_, gpus, on)
        text = render(tables, notes, from_.name)
    elif gpus is not None or on is not None:
        raise BadInput("--gpus and --on go with --from", "shoal init --from ds_config.json --gpus 8")
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadInput(f"{path} exists", "another name, or --force to replace it") from None
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror}", "a file in a directory that exists"
        ) from None
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"wrote {path}; edit it, then: shoal train {shlex.quote(str(path))}")
    return 0
