"""The questions of ``shoal init``: asked on a terminal with defaults, repeated until the answer is usable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from shoal.facts.cluster import Cluster, notation
from shoal.facts.model import Model, presets
from shoal.facts.problem import BadInput
from shoal.plan.starter import usual_batch, usual_seq
from shoal.train.data.first_row import look_at_rows


def ask_for(given: dict[str, Any], visible: str | None) -> dict[str, Any]:
    """The given options plus the answers; nothing is asked twice."""
    told = dict(given)
    model: Model = _ask(told, "model", "Model: a preset, a model directory, a Hub name", "tiny", presets.find)
    _ask(
        told, "data", "Data: a glob, a directory, a URL", "stdlib", lambda text: look_at_rows(text, "--data")
    )
    cluster: Cluster = _ask(
        told, "on", "Cluster: local, 8xH100, a TOML file", "local", lambda text: notation.find(text, visible)
    )
    _ask(told, "seq", "Tokens per sequence", usual_seq(model), _count)
    _ask(told, "batch", "Sequences per step, over all ranks", usual_batch(cluster), _count)
    return told


def _ask(told: dict[str, Any], name: str, question: str, default: Any, look: Callable[[str], Any]) -> Any:
    """What ``look`` finds for an answer, which is stored as given."""
    if name in told:
        return look(str(told[name]))
    while True:
        sys.stderr.write(f"{question} [{default}] ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            sys.stderr.write("\n")
            raise BadInput(
                "the questions were not answered, so nothing was written",
                "shoal init --yes takes the defaults; shoal init --help lists what can be said as options",
            )
        answer = line.strip() or str(default)
        try:
            found = look(answer)
        except BadInput as error:
            sys.stderr.write(f"{error}\n")
            continue
        told[name] = found if isinstance(found, int) else answer
        return found


def _count(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 9 and int(text) > 0):
        raise BadInput(f"{text!r} is not a whole number above 0", "4096")
    return int(text)
