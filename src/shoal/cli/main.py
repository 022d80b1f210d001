"""``shoal``: all commands, each imported only when it is called; exit codes."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group, Parameter

from shoal import __version__
from shoal.cli.show import print_problems
from shoal.facts.problem import BadInput, Problem
from shoal.launch.redacted import redacted_output
from shoal.launch.report import BAD_INPUT, FAILED, STOPPED
from shoal.launch.signals import STOP_SIGNALS, interrupt, interrupts, stoppable
from shoal.train.files import MAKE_ROOM, disk_is_full, in_words


def _default(value: object) -> str | None:
    """A default as help shows it; nothing if there is none, or for a flag that is off."""
    return None if value is None or value is False or value == "" else str(value)


app = App(
    name="shoal",
    default_parameter=Parameter(show_default=_default),
    help="Many GPUs, one training run: plan, prove, run and recover distributed training.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # we report an interrupted command and choose its exit code
)
# Each command's summary is repeated here, so that listing the commands imports none of them. A line fits a terminal of
# 80 columns.
COMMANDS = {
    "Start": (
        ("doctor", "shoal.cli.doctor:doctor", "Check whether this machine is ready to train."),
        ("init", "shoal.cli.init:init", "Write a commented config."),
        ("config", "shoal.cli.config:app", "Show every value of a config and where it came from."),
        ("data", "shoal.cli.data:app", "Tokenise data ahead of a run."),
    ),
    "Plan": (
        ("plan", "shoal.cli.plan:plan", "What fits, what is fastest, and why not the others."),
        ("schedule", "shoal.cli.schedule:schedule", "Check a pipeline schedule and draw its timeline."),
    ),
    "Prove": (
        ("dryrun", "shoal.cli.dryrun:dryrun", "Run one rank of any layout without hardware; check the plan."),
        ("parity", "shoal.cli.parity:parity", "Prove that layouts train the same model."),
        (
            "profile",
            "shoal.cli.profile:profile",
            "Show where a step's time and memory go, and the prediction.",
        ),
        ("chaos", "shoal.cli.chaos:chaos", "Inject faults into a run and prove that they changed nothing."),
        ("bench", "shoal.cli.bench:app", "Measure collectives, a step, or the planner."),
    ),
    "Run": (
        ("train", "shoal.cli.train:train", "Train; resume where the run left off."),
        ("tune", "shoal.cli.tune:tune", "Train; try the best few layouts first, keep the fastest."),
        ("launch", "shoal.cli.launch:launch", "Write a job for Slurm, Ray, Kubernetes or SageMaker."),
        ("status", "shoal.cli.jobs:status", "Show the state of a submitted job."),
        ("logs", "shoal.cli.jobs:logs", "Show what a submitted job printed."),
        ("cancel", "shoal.cli.jobs:cancel", "Stop a submitted job after a step and a commit."),
        ("ls", "shoal.cli.jobs:ls", "List the submitted jobs of a directory of runs."),
        ("watch", "shoal.cli.watch:watch", "Watch a run live, in the terminal or as a page."),
    ),
    "Keep": (
        ("report", "shoal.cli.report:report", "Show a run on one page: curves, faults, memory, time."),
        ("generate", "shoal.cli.generate:generate", "Write text with a run's weights."),
        ("evaluate", "shoal.cli.evaluate:evaluate", "Compute the loss of a run's weights on data sets."),
        ("replay", "shoal.cli.replay:replay", "Repeat a past step of a run, compared with its record."),
        (
            "checkpoint",
            "shoal.cli.checkpoint:app",
            "List checkpoints; verify every byte; export to Hugging Face.",
        ),
    ),
}
for place, (title, listed) in enumerate(COMMANDS.items()):
    group = Group(title, sort_key=place)
    for number, (command, imported, does) in enumerate(listed):
        app.command(imported, name=command, help=does, group=group, sort_key=number)
_options = Group("Options", sort_key=len(COMMANDS))
for flag in ("--help", "--version"):
    app[flag].group = _options


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 success, 1 failed, 2 bad input, 75 stopped on request."""
    words = sys.argv[1:] if arguments is None else arguments
    _write_what_the_terminal_can()
    _prefer_own_help(words)
    with redacted_output():
        code = _run(words)
    sys.exit(code)


def _run(words: list[str]) -> int:
    as_json = _asks_for_json(words)
    interrupts.clear()
    try:
        with stoppable(interrupt, STOP_SIGNALS):
            code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        from shoal.cli.unknown import refused

        code = fail([refused(error)], BAD_INPUT, as_json)
    except BadInput as error:
        code = fail(error.problems, BAD_INPUT, as_json)
    except KeyboardInterrupt:
        code = _stopped(as_json)
    except BrokenPipeError:
        # The reader of our output, such as head, has closed it. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except OSError as error:
        what = f"{in_words(error)}; {MAKE_ROOM}" if disk_is_full(error) else str(error)
        code = fail([Problem(what)], FAILED, as_json)
    except Exception as error:
        if interrupts:
            # A library that was being imported swallowed the interrupt and was used half imported.
            return _stopped(as_json)
        # A bug of ours. The interpreter would print the same traceback, but without redacting secrets.
        traceback.print_exc()
        code = FAILED
        if as_json:
            print_problems([Problem(f"{type(error).__name__}: {error}")], code)
    return code if isinstance(code, int) else 0


def _asks_for_json(words: list[str]) -> bool:
    """Also for a command line that could not be parsed, where the word might have meant something else."""
    options = words[: words.index("--")] if "--" in words else words
    return any(
        word == "--json" or word.lower() in ("--json=true", "--json=1", "--json=yes") for word in options
    )


def _stopped(as_json: bool) -> int:
    """An interrupt before any worker was started; while workers run, the launcher handles signals itself."""
    print("stopped on request; run the same command to continue", file=sys.stderr)
    # An interrupt that passed through an ``exec`` of text, which dataclasses use, leaves a mark in the interpreter:
    # ``python -m shoal`` would end by SIGINT, whatever its exit code. The next ``exec`` clears it.
    exec("")  # noqa: S102
    if as_json:
        print_problems([Problem("stopped on request", "run the same command to continue")], STOPPED)
    return STOPPED


def _write_what_the_terminal_can() -> None:
    """Print characters that the terminal cannot show as escapes instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a replaced stream keeps its own error handling
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _prefer_own_help(words: list[str]) -> None:
    """A command called by name prints its own full help, so its line in the list is dropped."""
    if not {"--help", "-h"} & set(words):
        return
    called = app
    for word in words:
        if word.startswith("-") or word not in called:
            break
        called = called[word]
        if called.default_command is not None:
            called.help = None
            called.default_command.__doc__ = unbroken(called.default_command.__doc__ or "")


def unbroken(docstring: str) -> str:
    """Join each paragraph into one line, so that the terminal wraps it instead of the source."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        before = lines[-1] if lines else ""
        if _continues(before, line):
            lines[-1] = f"{before} {line.lstrip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _continues(before: str, line: str) -> bool:
    indents = (len(each) - len(each.lstrip()) for each in (before, line))
    rules = any(each.startswith(("---", "- ")) for each in (before, line))
    return bool(before and line) and len(set(indents)) == 1 and not rules


def fail(problems: Sequence[Problem], code: int, as_json: bool) -> int:
    """Report problems to the user and, if requested, as JSON; returns the exit code."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):  # a full disk, or a reader that has gone: the user has been told
            print_problems(problems, code)
            sys.stdout.flush()
    return code
