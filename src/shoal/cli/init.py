"""``shoal init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def init(
    path: Path = Path("shoal.toml"), /, *, force: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Write a commented config: every key, its default and its meaning, all commented out.

    Example: shoal init my-run.toml && shoal train my-run.toml

    Parameters
    ----------
    path
        Where to write it.
    force
        Replace a file that is there.
    """
    import shlex

    from shoal.facts.configfile import template
    from shoal.facts.problem import BadInput

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise BadInput(f"{path} exists", "another name, or --force to replace it") from None
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror}", "a file in a directory that exists"
        ) from None
    print(f"wrote {path}; edit it, then: shoal train {shlex.quote(str(path))}")
    return 0
