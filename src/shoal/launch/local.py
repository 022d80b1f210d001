"""Train on this machine: check everything, then start one worker per rank."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from shoal.facts.cluster import this_machine as machine
from shoal.facts.config import Config, DataSection, EvaluateSection
from shoal.facts.config.implied import own_tokenizer, tokenizer_of
from shoal.facts.layout.offload import waiting
from shoal.facts.losses import LOSSES
from shoal.facts.model import hub
from shoal.facts.problem import BadInput
from shoal.launch.backend import check_backend
from shoal.launch.environment import passed_on
from shoal.launch.interfaces import address_of
from shoal.launch.manifest import describe_plan, describe_run
from shoal.launch.report import FINISHED, Report
from shoal.launch.scratch import check_scratch, clear_scratch
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.launch.track.tracking import check_trackers, tracked
from shoal.launch.tuning.candidates import Tried
from shoal.launch.tuning.record import Tuning, last_decision, layouts_to_try
from shoal.plan.resolve import Job
from shoal.predict.memory.states import rank_states
from shoal.train.checkpoint.lease import leased
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.data.collection import Collection, gather
from shoal.train.data.dataset import QUARANTINE, check_vocabulary
from shoal.train.data.prepare import prepare as prepare_data
from shoal.train.data.samples import PairSamples, cut_samples
from shoal.train.data.summary import described
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.files import private_files, read_rows
from shoal.train.run_directory import RunDirectory, identity

WORKER = "shoal.launch.worker:work"
ATTEMPT = "shoal.launch.supervisor:Supervisor"
# With a parameter server, the agent runs the servers, and workers are started beside it.
SERVED, SERVED_WORKER = (
    "shoal.launch.parameter_servers:ServedSupervisor",
    "shoal.launch.server:work_for_servers",
)
TUNING = "shoal.launch.tuning.supervisor:TuningSupervisor"
# Imported before workers fork. torch's optimizers import its compiler on first use, which takes two seconds.
PRELOAD = ("shoal.launch.worker", "torch._dynamo")


def train(
    job: Job,
    run: RunDirectory,
    fresh: bool,
    console: Console,
    visible: str | None = None,
    entrypoint: str | None = None,
    tried: Tried | None = None,
) -> Report:
    """Train ``job`` in ``run`` to its end, from its current state. Bad input raises before anything is spawned.

    ``visible`` is the value of CUDA_VISIBLE_DEVICES; ``entrypoint`` ("module:function") what a rank's process calls, or
    a parameter server's worker. ``tried``: layouts to try in the first steps.
    """
    served = job.config.server.servers > 0
    entrypoint = entrypoint or (SERVED_WORKER if served else WORKER)
    check(job, run, visible)
    with ExitStack() as held:
        if run.path.exists():
            held.enter_context(run.held())
        dataset = tokenised(job, console)
        job = with_length(job, dataset, console)
        if tried is None and job.config.tune.search and job.config.layout == "auto":
            tried = Tried()
        layouts: tuple[list[Job], str] = ([job], "")
        if tried is not None:
            checked = partial(_check_layout, run=run, visible=visible)
            layouts = layouts_to_try(job, None if fresh else run, tried, checked)
        start = prepare(job, run, fresh, console, dataset, held)
        if isinstance(start, Report):
            return replace(start, tuning=last_decision(run)) if tried is not None else start
        warm_workers([*PRELOAD, entrypoint.partition(":")[0]], job.config)
        attempt: Callable[..., Any] = load_attempt(SERVED if served else ATTEMPT if tried is None else TUNING)
        if tried is not None:
            with private_files():
                tuning = Tuning(run, *layouts)
            if tuning.job.layout != job.layout:
                console.print(f"tuning: going on in {tuning.job.layout}", markup=False)
            job, attempt = tuning.job, partial(attempt, tuning)
        count = partial(devices_here, job, visible)
        with begun(job, run, console, start):
            return attempt(job, run, dataset.path, console, entrypoint, count).run_to_end()


def _check_layout(job: Job, run: RunDirectory, visible: str | None, nodes: int = 1) -> None:
    """Refuse a layout that cannot be trained here, or on these nodes."""
    check_devices(job, visible, nodes)
    check_memory(job, nodes)
    check_scratch(job, run.path, nodes)


def check(job: Job, run: RunDirectory, visible: str | None, nodes: int = 1) -> None:
    """Refuse a job that cannot be trained here, or on these nodes. Creates nothing."""
    _check_layout(job, run, visible, nodes)
    check_backend(job)
    address_of(job.config.cluster.interface)
    check_trackers(job.config, nodes)
    run.check_place()
    run.keep_in(job.config.checkpoint.to)
    run.check_reachable()


def prepare(
    job: Job, run: RunDirectory, fresh: bool, console: Console, dataset: Collection, held: ExitStack
) -> Report | dict[str, Any]:
    """Check that this job continues the existing run, or begin one. Returns what is known of it, or how it ended."""
    fingerprint = dataset.fingerprint
    if not fresh:
        run.check_continues(job, fingerprint)
    check_weights(job, run if not fresh else None)
    if fresh and run.begun:
        console.print(f"moved the previous run to {run.move_aside()}", markup=False)
    if not run.path.exists():
        held.enter_context(run.held())
        run.check_continues(job, fingerprint)  # another launcher may have been faster
    steps = job.config.recipe.steps
    commits = job.config.checkpoint.every > 0
    early = run.ended_early(commits)
    if early is not None:
        steps = early
    if early is not None or run.finished(steps, commits):
        rows = read_rows(run.metrics)
        row = rows[-1] if rows else None
        done = f"already finished: {steps} steps"
        return Report(FINISHED, run.path, steps, done, row, row.get("heldout_loss") if row else None)
    known = describe_run(job, dataset.path)
    return {
        **known,
        "data_parts": described(job.config, dataset),
        "identity": identity(job, fingerprint),
    }


@contextmanager
def begun(job: Job, run: RunDirectory, console: Console, start: dict[str, Any]) -> Iterator[None]:
    """Inside the context a launcher leads the run, and the run directory says so."""
    with private_files():
        run.adopt_memory()
        clear_scratch(job, run.path)
        if run.step():
            console.print(f"resuming {run.path} after step {run.step()}", markup=False)
        for line in (*job.notes, compile_line(job)):
            if line is not None:
                console.print(line, markup=False)
        run.write_start(job, start, describe_plan(job))
        try:
            # ``alive`` innermost: the report that trackers get is of a finished run.
            with _held_in_store(run, console), tracked(job, run, console), run.alive():
                yield
        finally:
            clear_scratch(job, run.path)


def _held_in_store(run: RunDirectory, console: Console) -> AbstractContextManager[None]:
    """Lock the object store: a run of the same name on another machine has another directory but the same
    checkpoints.
    """
    if not isinstance(run.disk, ObjectStore):
        return nullcontext()

    def say(text: str) -> None:
        console.print(text, markup=False)

    return leased(run.disk, run.path, say, lambda: os.kill(os.getpid(), signal.SIGTERM))


def compile_line(job: Job) -> str | None:
    """A line for the user about compilation; None if it was neither requested nor the default."""
    on, why_not = job.compilation
    if on:
        return "compiling, about 20 s; later runs and restarts find it in the cache"
    return f"not compiled: {why_not}" if why_not else None


def load_attempt(kind: str) -> type[Any]:
    """Load an ``Attempt`` class, given as "module:name", only now: importing torch takes seconds, and bad input is
    reported before.

    A signal in that time is remembered and handled afterwards: raised inside an import, it could get lost in a
    library's ``except``.
    """
    asked: list[int] = []
    with stoppable(lambda number, frame: asked.append(number), STOP_SIGNALS):
        module, _, name = kind.partition(":")
        attempt: type[Any] = getattr(importlib.import_module(module), name)
    if asked:
        raise KeyboardInterrupt
    return attempt


def devices_here(job: Job, visible: str | None) -> int | None:
    """How many devices this machine has now; None if any number of ranks can run."""
    if job.cluster.device.name == "cpu" or job.config.cluster.share:
        return None
    return machine.look(visible).devices


def check_devices(job: Job, visible: str | None, nodes: int = 1) -> None:
    """Refuse a described cluster that is not here: it can be planned for anywhere, but trained on only in place."""
    if job.cluster.device.name == "cpu":
        return
    here = machine.look(visible)
    if job.config.cluster.share and here.device.name != "cpu":
        return
    wanted = -(-job.layout.world // nodes)
    if here.device.name == "cpu" or here.devices < wanted:
        found = "no GPU" if here.device.name == "cpu" else f"{here.devices}x{here.device.name}"
        on_each = " on each node" if nodes > 1 else ""
        raise BadInput(
            f"layout {job.layout} needs {wanted} x {job.cluster.device.name}{on_each}; this machine has {found}",
            "--set cluster.on=local, or --set cluster.on=4xcpu for processes on the CPU",
        )


def check_memory(job: Job, nodes: int = 1) -> None:
    """Refuse a model whose weights, gradients and optimizer states alone exceed memory.

    Offloaded states are not counted. A CPU that trains is its own host: there only states in files are elsewhere.
    """
    on_cpu = job.cluster.device.name == "cpu"
    states = rank_states(job.model, job.config.recipe, job.layout)
    away, resting = (waiting(job.layout.offload, what) for what in ("optimizer", "params"))
    # Gradients are in files only if both weights and optimizer states are.
    in_files = resting is not None and resting.nvme and away is not None and away.nvme
    if away is not None and (away.nvme or not on_cpu):
        for kind in ("optimizer",) if on_cpu and not in_files else ("optimizer", "grads"):
            states[kind] = round(states[kind] * (1 - away.fraction))
    if resting is not None and (resting.nvme or not on_cpu):
        states["params"] = round(states["params"] * (1 - resting.fraction))
    needed = sum(states.values()) * (job.layout.world // nodes if on_cpu else 1)
    if needed > job.cluster.device.memory_bytes:
        raise BadInput(
            f"weights, gradients and optimizer states of {job.model.name} take {needed / 2**30:.1f} GiB, "
            f"without activations; {job.cluster.device.name} has {job.cluster.device.memory_bytes / 2**30:.1f}",
            "a smaller model, or --set recipe.states=bf16",
        )


def tokenised(job: Job, console: Console, key: str = "data.source") -> Collection:
    """The tokenised data, refused if it has ids that the model has no row for. ``key``: the setting that named its
    source.
    """
    data = job.config.data
    tokenizer = open_tokenizer(data.tokenizer, data.end_token)
    if tokenizer.vocab > job.model.vocab:  # known without reading any text
        raise BadInput(
            f"tokenizer {data.tokenizer} has {tokenizer.vocab} tokens (the last, with id {tokenizer.vocab - 1}), "
            f"but {job.model.name} has a vocabulary of {job.model.vocab}",
            f"the model's own tokenizer, or a model with a vocabulary of at least {tokenizer.vocab}",
        )
    own = own_tokenizer(job.config.model.model_dump())
    if data.tokenizer == "bytes" and own is not None and any(one.templated for one in data.parts):
        raise BadInput('data.tokenizer = "bytes" has no chat template', f'data.tokenizer = "{own[1]}"')
    collection = Collection.open(prepared(data, console, job.config.evaluate, key))
    for dataset in collection.everything:
        check_vocabulary(dataset, job.model.vocab)
        bad = dataset.manifest["bad_rows"]
        if bad:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in bad.items())
            rows = f"{sum(bad.values())} of {dataset.manifest['rows']} rows"
            console.print(f"left out {rows} ({reasons}); see {dataset.path / QUARANTINE}", markup=False)
    cut = cut_samples(collection, data, job.config.recipe.seq, tokenizer.end)
    _check_loss(job.config, collection)
    for part in cut.parts:
        if isinstance(part, PairSamples) and part.left_out:
            pairs = f"{part.left_out} of {part.left_out + len(part) // 2} pairs"
            console.print(f"left out {pairs}: longer than recipe.seq = {part.seq}", markup=False)
    if job.config.evaluate.watched not in cut.validation:
        console.print("not enough validation text for one sample: evaluation is off", markup=False)
    return collection


def _check_loss(config: Config, collection: Collection) -> None:
    """Refuse data that was prepared for another loss."""
    loss = config.recipe.loss
    for dataset in collection.everything:
        if dataset.pairs != ("preference" in LOSSES[loss].formats):
            holds = "pairs of a chosen and a rejected answer" if dataset.pairs else "no pairs of answers"
            raise BadInput(
                f'{str(dataset.path)!r} holds {holds}, which recipe.loss = "{loss}" does not train on',
                'recipe.loss = "dpo" for rows of data.format = "preference", "next_token" for all others',
            )


def with_length(job: Job, collection: Collection, console: Console | None = None) -> Job:
    """The job with ``recipe.epochs`` converted to steps of this data. ``console`` is told if they train nothing."""
    data, recipe = job.config.data, job.config.recipe
    if recipe.epochs is None:
        return job
    cut = cut_samples(collection, data, recipe.seq, open_tokenizer(data.tokenizer, data.end_token).end)
    steps = recipe.clock.steps_for_epochs(recipe.epochs, len(cut.train))
    if "steps" in recipe.model_fields_set and recipe.steps != steps:
        raise BadInput(
            f"recipe.steps = {recipe.steps} and recipe.epochs = {recipe.epochs:g} disagree: an epoch of this data has "
            f"{len(cut.train)} samples, so the run has {steps} steps",
            "keep one: recipe.steps or recipe.epochs",
        )
    if console is not None and steps == 1 and recipe.schedule != "constant":
        console.print(
            f"note: {recipe.epochs:g} epochs of {len(cut.train)} samples are one step, with which the learning rate "
            f"ends: almost nothing is learned; fix: recipe.batch below {recipe.batch}, or more recipe.epochs",
            markup=False,
        )
    config = job.config.model_copy(update={"recipe": recipe.model_copy(update={"steps": steps})})
    return replace(job, config=config)


def fetched(job: Job, console: Console) -> Job:
    """The job with initial weights on this machine: fetches them from the Hub if necessary."""
    name, shape = job.config.model.init_from, job.config.model.path
    if name is None or not hub.is_hub_name(name):
        return job
    console.print(f"fetching {name} from the Hub, unless it is here", markup=False)
    place = str(hub.fetch(name, hub.WEIGHTS))
    model = job.config.model.model_copy(
        update={"init_from": place, "path": place if shape == name else shape}
    )
    changes: dict[str, Any] = {"model": model}
    data = job.config.data
    if "tokenizer" not in data.model_fields_set and (found := tokenizer_of(Path(place))) is not None:
        console.print(f"tokenizer: that of {name} (data.tokenizer is not set)", markup=False)
        changes["data"] = data.model_copy(update={"tokenizer": found})
    return replace(job, config=job.config.model_copy(update=changes))


def check_weights(job: Job, run: RunDirectory | None) -> None:
    """Refuse initial weights that are incomplete, or of another model; a run with a checkpoint needs none.

    A run that trains adapters does: it reads the frozen base at every start.
    """
    lora, needed = job.config.model.lora, not (run and run.step())
    if lora is not None or (job.config.model.init_from is not None and needed):
        from shoal.train.first_weights import first_weights

        first_weights(job)


def warm_workers(preload: Sequence[str], config: Config | None = None) -> None:
    """Start the server that workers are forked from, with torch already imported: a restart then costs no import.

    It gets the same environment variables as workers; ``config`` may request more.

    Server and workers are forked with the stop signals blocked. A Ctrl-C, or a signal to the whole process group, is
    for the launcher alone; a worker accepts signals again once it has its own session.
    """
    modules = ["shoal.launch.server_first", *preload, "shoal.launch.server_last"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with passed_on(config):
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # starting the tracker has unblocked some
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepared(
    data: DataSection, console: Console, evaluate: EvaluateSection | None = None, key: str = "data.source"
) -> Path:
    """The directory of the tokenised data, created now or found: of one source, or of all sources."""
    cache = Path(data.cache).expanduser() / "data"
    key = "data.mix: source" if data.mix else key
    parts = [_prepared_source(part, cache, console, key) for part in data.parts]
    weights = [[part.weight, [[change.step, change.weight] for change in part.later]] for part in data.mix]
    sources = evaluate.sources if evaluate is not None else {}
    for_validation = {
        name: data.model_copy(update={"source": source, "mix": [], "heldout": 0.0})
        for name, source in sources.items()
    }
    validation = {
        name: _prepared_source(one, cache, console, "evaluate.source") for name, one in for_validation.items()
    }
    return gather(cache, parts, weights, validation)


def _prepared_source(data: DataSection, cache: Path, console: Console, key: str) -> Path:
    columns = (TextColumn("tokenising {task.fields[source]}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None, source=data.source)
        return prepare_data(
            data.source,
            tokenizer=data.tokenizer,
            end_token=data.end_token,
            field=data.field,
            format=data.format,
            template=data.template,
            loss_on=data.loss_on,
            cache=cache,
            heldout=data.heldout,
            max_bad_rows=data.max_bad_rows,
            workers=data.workers,
            ray=data.ray,
            keep=data.window if data.shuffle == "window" else 0,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            key=key,
        )
