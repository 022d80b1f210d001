"""``shoal``: the commands, each imported only when it is called."""

from __future__ import annotations

import sys

from cyclopts import App, CycloptsError
from rich.console import Console

from shoal import __version__
from shoal.facts.problem import BadInput

BAD_INPUT = 2

app = App(
    name="shoal",
    help="Many GPUs, one training run: plan, prove, run and keep distributed training.",
    version=__version__,
    help_format="plaintext",
)
# What each does is said here as well as there, so that the list of commands needs none of them imported.
for command, place, does in (
    ("train", "shoal.cli.train:train", "Train here; continue where the run left off."),
    ("init", "shoal.cli.init:init", "Write a commented config."),
    ("config", "shoal.cli.config:app", "Show every value of a config and where it came from."),
    ("data", "shoal.cli.data:app", "Tokenise data ahead of a run."),
    ("doctor", "shoal.cli.doctor:doctor", "Is this machine ready?"),
):
    app.command(place, name=command, help=does)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 success, 1 failed, 2 bad input, 75 stopped on request."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        complain(str(error), "shoal --help, or shoal COMMAND --help")
        code = BAD_INPUT
    except BadInput as error:
        for problem in error.problems:
            complain(problem.what, problem.fix)
        code = BAD_INPUT
    sys.exit(code if isinstance(code, int) else 0)


def complain(what: str, fix: str = "") -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error: {what}", markup=False)
    if fix:
        console.print(f"  fix: {fix}", markup=False)
