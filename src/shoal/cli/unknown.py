"""Unknown options and commands: suggest the right one, also from another tool's name for it."""

from __future__ import annotations

from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError

from shoal.facts.config.check import keys_called
from shoal.facts.input.foreign_terms import LATER_COMMANDS, Meaning, layout_pair, meaning, normalised
from shoal.facts.problem import Problem, did_you_mean


def refused(error: CycloptsError) -> Problem:
    """A command-line error in words, with its fix."""
    chain = " ".join(["shoal", *(error.command_chain or ())])
    if isinstance(error, UnknownCommandError) and error.unused_tokens and error.app is not None:
        word = error.unused_tokens[0]
        if chain == "shoal" and word in LATER_COMMANDS:
            return Problem(f'Unknown command "{word}": not implemented yet', LATER_COMMANDS[word])
        guess = did_you_mean(word, [name for name in error.app if not name.startswith("-")])
        return Problem(f'Unknown command "{word}"', f"{guess}; {chain} --help lists them")
    if isinstance(error, UnknownOptionError):
        option = error.token.keyword or error.token.value
        known = {name for argument in error.argument_collection for name in argument.names}
        fix = _option(option, {name for name in known if name.startswith("--")})
        return Problem(f"Unknown option: {option}", fix or f"{chain} --help", option.partition("=")[0])
    name = error.argument.name if error.argument is not None else ""
    return Problem(str(error), f"{chain} --help", name if name.startswith("--") else None)


def _option(option: str, known: set[str]) -> str:
    if not option.startswith("--"):
        return ""
    word = option.partition("=")[0]
    key = keys_called(normalised(word))
    found = meaning(word) or (Meaning(key=key[0]) if len(key) == 1 else None)
    if found is None:
        guess = did_you_mean(word, known)
        return guess if guess.startswith("did you mean") else ""
    if found.layout:
        return f"--layout {layout_pair(found.layout, None)}" if "--layout" in known else ""
    if not found.key:
        return found.sentence
    own = f"--{found.key.rpartition('.')[2]}"
    return f"it is {own} here" if own in known else f"--set {found.key}=…" if "--set" in known else ""
