"""``shoal init``: write a commented config: planned for a model, or from another stack's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from shoal.facts.problem import Problem
    from shoal.plan.starter import Wish


def init(
    path: Path = Path("shoal.toml"),
    /,
    *,
    model: str | None = None,
    data: str | None = None,
    on: str | None = None,
    seq: int | None = None,
    batch: int | None = None,
    steps: int | None = None,
    layout: str | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    gpus: int | None = None,
    yes: Annotated[bool, Parameter(negative=())] = False,
    force: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a commented config that is ready to run: every key with its meaning, and a planned layout.

    Example: shoal init my-run.toml --model llama3-8b --data "corpus/*.jsonl" --on 8xH100

    Example: shoal init my-run.toml --from ds_config.json --on 8xH100

    In a terminal it asks for whatever you leave out; elsewhere, without options, it writes every key at its default.

    Keys that this version does not run are marked.

    Parameters
    ----------
    path
        Where to write it.
    model
        A preset such as llama3-8b or a config.json; or, with its weights, a model directory, a Hub name or a run.
    data
        A glob, directory or URL of text, JSONL, Parquet or Arrow files; stdlib is text that every machine has.
    on
        The cluster: 8xH100, 2x8xA100-80GB (nodes x devices), local, or a TOML file.
    seq
        Tokens per sequence.
    batch
        Sequences per step, over all ranks.
    steps
        Length of the run.
    layout
        Use this layout instead of the planner's.
    from_
        A file of DeepSpeed, Accelerate, Megatron, torchtitan, NeMo or SageMaker; nothing in it is executed.
    gpus
        Number of ranks, if that file does not say and --on is not given.
    yes
        Ask nothing; derive whatever is missing from the rest.
    force
        Overwrite existing files.
    json
        Print one JSON document.
    """
    import os
    import shlex
    import sys

    from shoal.cli.show import print_json
    from shoal.facts.problem import BadInput

    if gpus is not None and from_ is None:
        raise BadInput("--gpus goes with --from", "--on 8xH100; or shoal init --from ds_config.json --gpus 8")
    _refuse_existing([path], force)
    said = {
        "model": model,
        "data": data,
        "on": on,
        "seq": seq,
        "batch": batch,
        "steps": steps,
        "layout": layout,
    }
    given = {name: value for name, value in said.items() if value is not None}
    notes: list[str] = []
    refused: list[Problem] = []
    if from_ is not None:
        from shoal.plan.convert import convert

        converted = convert(path, from_, gpus, given, _rows(given), os.environ.get("CUDA_VISIBLE_DEVICES"))
        files, notes, refused = converted.files, converted.notes, converted.refused
    elif given or yes or _may_ask(json):
        files = _planned(path, given, ask=_may_ask(json) and not yes)
    else:
        from shoal.plan.commented import commented

        files = {path: commented({})}
    _refuse_existing(list(files), force)
    _write(files, force)
    if json:
        said_no = [{"what": one.what, "fix": one.fix} for one in refused]
        print_json({"written": [str(file) for file in files], "notes": notes, "refused": said_no})
        return 0
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for one in refused:
        print(f"the engine will refuse: {one}", file=sys.stderr)
    begin = "put right what is refused" if refused else "edit it"
    print(f"wrote {' and '.join(map(str, files))}; {begin}, then: shoal train {shlex.quote(str(path))}")
    return 0


def _may_ask(json: bool) -> bool:
    """Whether a user sees the questions and can answer them."""
    import sys

    return not json and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _planned(path: Path, given: dict[str, Any], ask: bool) -> dict[Path, str]:
    """A config from the given options and the answers."""
    import os
    import sys

    from shoal.cli.init_questions import ask_for
    from shoal.cli.show import use_calibration, warn_of_length
    from shoal.plan.commented import commented
    from shoal.plan.starter import Wish, start

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    use_calibration()
    if ask:
        given = ask_for(given, visible)
    wish = Wish(**given)
    wish = _with_rows(wish, _rows(given))
    started = start(wish, path.parent, visible)
    model = started.plan.workload.model
    warn_of_length(model, started.plan.workload.recipe.seq)
    print(f"planned {started.tables['layout']} for {wish.model} on {wish.on}", file=sys.stderr)
    return {path: commented(started.tables, started.head)}


def _rows(given: dict[str, Any]) -> dict[str, Any]:
    """What the data's first row tells about all rows; empty if no data is named."""
    if "data" not in given:
        return {}
    from shoal.train.data.first_row import look_at_rows

    return look_at_rows(given["data"], "--data")


def _with_rows(wish: Wish, rows: dict[str, Any]) -> Wish:
    """Rows become text by the tokenizer's template; without a tokenizer, a prompt is followed by its answer."""
    from dataclasses import replace

    from shoal.facts.config.implied import own_tokenizer
    from shoal.facts.model.hub import is_hub_name
    from shoal.facts.problem import BadInput
    from shoal.plan.starter import model_table

    without = own_tokenizer(model_table(wish.model, Path())) is None and not is_hub_name(wish.model)
    if rows.get("format") == "chat" and without:
        raise BadInput(
            f"--data {wish.data} holds conversations, and {wish.model} has no tokenizer with a chat template",
            "--model with the directory of a chat model",
        )
    if rows.get("format") == "prompt" and without:
        rows = {**rows, "template": "none"}
    return replace(wish, rows=rows)


def _refuse_existing(paths: list[Path], force: bool) -> None:
    from shoal.cli.show import unwritable
    from shoal.facts.problem import BadInput, Problem

    try:
        problems = [
            Problem(f"{path} exists", "another name, or --force to replace it")
            for path in paths
            if path.exists() and not path.is_dir() and not force
        ]
        problems += unwritable(paths)
    except OSError as error:  # an impossible file name
        raise BadInput(f"cannot write to it: {error.strerror}", "a file in a directory that exists") from None
    if problems:
        raise BadInput(problems)


def _write(files: dict[Path, str], force: bool) -> None:
    from shoal.facts.problem import BadInput

    for path, text in files.items():
        try:
            with path.open("w" if force else "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise BadInput(
                f"cannot write {path}: {error.strerror}", "a file in a directory that exists"
            ) from None
