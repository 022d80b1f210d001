"""The run directory: its contents, its lock, and whether a job may resume what is there. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.facts.config import Config
from shoal.facts.config import file as configfile
from shoal.facts.config.paths import with_absolute_paths
from shoal.facts.input.untrusted_files import parse_toml, read_json, read_settings
from shoal.facts.model import Model
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe
from shoal.facts.redact import redact_values
from shoal.plan.resolve import Job
from shoal.train.checkpoint.manifest import Damaged
from shoal.train.checkpoint.node_memory import (
    flight_place,
    forget,
    forget_flights,
    memory_place,
    other_places,
)
from shoal.train.checkpoint.object_store import ObjectStore
from shoal.train.checkpoint.retention import newest_first, whole
from shoal.train.checkpoint.storage import CheckpointStorage, DirectoryStorage, manifest_of
from shoal.train.files import read_rows, replace_text
from shoal.train.fingerprint import weights_fingerprint

# Where the data came from. Its hash says what it is, so files may move between a stop and a resume.
DATA_ORIGIN = ("source", "mix", "tokenizer", "end_token", "field", "heldout")
# The length of a run.
LENGTH = {"recipe.steps", "recipe.decay"}
SHUFFLE = "data.shuffle"
UNKNOWN = "unknown"
# In the last row of a run that ended before its last step.
EARLY = "ended_early"
# The directory of a job that was written for the run and may not have started: launch/jobs.
JOB = "job"
# The node name of a run's only machine.
ALONE = "0"
DATA_HASH = "data (hash of its tokens)"
WEIGHTS, WEIGHTS_HASH = "model.init_from", "model.init_from (hash of samples of its weights)"


def identity(job: Job, dataset: str) -> dict[str, Any]:
    """The recipe, the data and the origin of the weights: what a resume must share with the run's start."""
    config = job.config
    recipe = resolved_recipe(config.recipe)
    found = {
        **{f"recipe.{name}": value for name, value in recipe.items()},
        **{f"data.{name}": value for name, value in config.data.model_dump(include=set(DATA_ORIGIN)).items()},
        "data.packing": config.data.packing,
        "data.within_documents": config.data.within_documents,
        SHUFFLE: "global" if config.data.shuffle == "global" else f"window of {config.data.window}",
        DATA_HASH: dataset,
        "run.strict": config.run.strict,
        WEIGHTS: config.model.init_from,
        WEIGHTS_HASH: weights_fingerprint(config.model.init_from),
    }
    if config.model.lora is not None:
        # Frozen weights are in no checkpoint, so where the adapters came from is part of their identity.
        found["model.lora.init_from"] = config.model.lora.init_from
    # It goes into every checkpoint.
    return {key: redact_values(value) for key, value in found.items()}


def resolved_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe in canonical form: spans in steps, and the run's length only in steps."""
    values = recipe.model_dump(mode="json", exclude={"tokens", "epochs"})
    return {**values, "warmup": recipe.warmup_steps, "decay": recipe.decay_steps}


class RunDirectory:
    """``runs/NAME``: config, plan, metrics, checkpoints, logs."""

    def __init__(self, path: Path, node: str = ALONE) -> None:
        """``node``: this machine's name, if several share the directory."""
        self.path, self.node = path, node
        self.config = path / "config.toml"
        self.plan = path / "plan.json"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.faults = path / "faults.jsonl"
        self.tuning = path / "tuning.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._untold: list[bytes] = []
        self.stacks = path / "stacks"
        self.ledger = path / "ledger"
        self.profile = path / "profile.json"
        self.profiles = path / "profile"
        self._disk: CheckpointStorage | None = None
        self.extending = False  # more steps than at the start do not make it another run

    def observed(self, rank: int) -> Path:
        """Where a rank writes what was observed of it."""
        (self.path / "observed").mkdir(mode=0o700, exist_ok=True)
        return self.path / "observed" / f"rank-{rank:05d}.json"

    def trace(self, rank: int) -> Path:
        """A rank's profiled step, to open in Perfetto."""
        return self.profiles / f"rank-{rank:05d}.trace.json.gz"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    @cached_property
    def flights(self) -> Path:
        """Flight recorders: in the directory for a single machine; otherwise on each machine, where their only
        readers are.
        """
        alone = self.node == ALONE or self.id == UNKNOWN
        return self.path / ".flight" if alone else flight_place(self.id, self.node)

    def forget_flights(self) -> None:
        """Remove them, once no rank runs here any more."""
        if self.node != ALONE and self.id != UNKNOWN:
            forget_flights(self.id, self.node)

    def flight(self, rank: int) -> Path:
        """Where a rank records what it does, to be read when it no longer responds."""
        return self.flights / f"rank-{rank:05d}"

    def stack_dump(self, rank: int) -> Path:
        """Where a rank writes its stacks on request."""
        return self.flights / f"rank-{rank:05d}.stacks"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the directory, accessible to its owner only, and lock it: two live runs cannot share one."""
        with self.held_by_us() as ours:
            if not ours:
                raise BadInput(
                    f"{self.path} is in use by a live run",
                    "wait for it, stop it, or choose another with --run DIR",
                )
            yield

    @contextmanager
    def held_by_us(self) -> Iterator[bool]:
        """Like ``held``, but yields false if another process holds the lock.

        The lock goes away with the process that holds it, however it ends, so no stale lock is ever left.
        """
        lock = self.path / ".lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(
                f"cannot use {self.path} as a run directory: {error.strerror}", "--run DIR"
            ) from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have moved the whole directory aside in the meantime.
                ours = os.fstat(handle).st_ino == lock.stat().st_ino
            except (BlockingIOError, FileNotFoundError):
                ours = False
            except OSError as error:
                raise BadInput(
                    f"{self.path} cannot be locked ({error.strerror}), so two runs could write to it",
                    "a file system with flock: --run DIR",
                ) from None
            yield ours
        finally:
            os.close(handle)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Keep a file that says a launcher is alive. One found at the start belongs to a launcher that was lost."""
        marker = self.path / ".alive"
        if marker.exists():
            with contextlib.suppress(OSError, ValueError):
                before = read_json(marker)
                self.note_fault(
                    kind="launcher lost",
                    step=self.step(),
                    action=f"continuing after step {self.step()}",
                    message=f"the launcher before this one ({_whose(before)}) ended without reporting an error",
                    began=before["time"],
                )
        replace_text(
            marker, json.dumps({"process": os.getpid(), "node": self.node, "time": time.time()}) + "\n"
        )
        try:
            yield
        finally:
            self.no_longer_alive()

    def no_longer_alive(self) -> None:
        """The launcher is about to end and knows why: remove the file."""
        (self.path / ".alive").unlink(missing_ok=True)

    @property
    def begun(self) -> bool:
        """Whether there is anything to resume, or to lose."""
        if self.step():
            return True
        # One whole row is enough; the file may have a million.
        if not self.metrics.exists():
            return False
        with self.metrics.open("rb") as file:
            return file.readline().endswith(b"\n")

    def check_place(self) -> None:
        """Refuse a path that holds something other than a run; creates and changes nothing."""
        if not self.path.exists():
            return
        signs = (self.path / ".lock", self.config, self.checkpoints, self.path / JOB)
        if not self.path.is_dir() or (any(self.path.iterdir()) and not any(sign.exists() for sign in signs)):
            raise BadInput(f"{self.path} exists and is not a run", "choose another place with --run DIR")
        if (self.checkpoints / "step-00000000").is_dir():
            fix = f"model.init_from = {str(self.path)!r}, and another place with --run DIR"
            raise BadInput(f"{self.path} holds weights that shoal checkpoint import wrote, and no run", fix)

    def finished(self, steps: int, commits: bool) -> bool:
        """Whether all steps are done; in a run without commits, judged by the metrics alone."""
        if commits or self.step() >= steps:
            return self.step() >= steps
        rows = read_rows(self.metrics)
        return bool(rows) and rows[-1]["step"] >= steps

    def ended_early(self, commits: bool) -> int | None:
        """The step after which the run ended because its validation loss stopped falling; None if it did not."""
        rows = read_rows(self.metrics)
        step = int(rows[-1]["step"]) if rows and rows[-1].get(EARLY) else None
        return step if step is not None and (self.step() >= step or not commits) else None

    def keep_in(self, to: str | None) -> None:
        """Set where a job wants its checkpoints, ``checkpoint.to``. Read-only commands use the run's own config."""
        self._disk = self._place(to)

    def check_reachable(self) -> None:
        """Refuse a checkpoint location that is not on disk and cannot be used."""
        if isinstance(self.disk, ObjectStore):
            self.disk.check()

    @property
    def disk(self) -> CheckpointStorage:
        """Where checkpoints are stored: in the directory, or in an object store."""
        return self._disk or self._disk_before()

    def _disk_before(self) -> CheckpointStorage:
        """Where the existing run has put them."""
        try:
            content = parse_toml(read_settings(self.config))
            return self._place(content.get("checkpoint", {}).get("to"))
        except (OSError, ValueError, AttributeError, BadInput):
            return self._place(None)

    def _place(self, to: str | None) -> CheckpointStorage:
        """A run has its directory's name in a store, so it can be found there even if the directory is lost."""
        return (
            DirectoryStorage(self.checkpoints)
            if to is None
            else ObjectStore(f"{to.rstrip('/')}/{self.path.resolve().name}")
        )

    def memory(self) -> DirectoryStorage:
        """Where this machine keeps the latest states in memory."""
        return memory_place(self.id, self.node)

    def adopt_memory(self) -> None:
        """Take over what this machine keeps in memory under another name: it was alone before, or one of several nodes.

        Only the leader calls this: a run on one machine has no other nodes, and on several nodes none is alone.
        """
        mine = self.memory()
        for other in other_places(self.id, self.node):
            if self.node != ALONE and other != memory_place(self.id, ALONE):
                continue
            for step in set(whole(other)) - set(mine.committed()):
                mine.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                other.at(step).rename(mine.at(step))
            shutil.rmtree(other.path, ignore_errors=True)

    def forget_memory(self) -> None:
        """Free the memory, once everything is on disk."""
        forget(self.id)

    @property
    def id(self) -> str:
        """Drawn when the run began and, unlike its path, never used by another run."""
        try:
            return str(read_json(self.manifest)["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return UNKNOWN

    def model(self) -> Model | None:
        """The model the run was last started with; None if unknown."""
        try:
            return Model.model_validate(read_json(self.manifest)["model"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def step(self) -> int:
        """The last saved step, on disk or in memory; 0 before the first."""
        return max([*self.disk.committed(), *self.memory().committed()], default=0)

    def check_continues(self, job: Job, dataset: str) -> None:
        """Refuse a job whose model, data or recipe differs from those of the existing run."""
        self._check_not_elsewhere()
        if not self.begun:
            return
        model, then = self.begun_with()
        fix = "--fresh moves the old run aside; or set it back"
        problems = []
        shapes = _differences(_shape(model), _shape(job.network.model_dump(mode="json")))
        if shapes:
            problems.append(Problem(f"{self.path} holds another model: {'; '.join(shapes)}", fix))
        now = identity(job, dataset)
        # A run older than a recipe field ran with what is now the field's default.
        defaults = {f"recipe.{name}": value for name, value in resolved_recipe(Recipe()).items()}
        if then.get("recipe.states") == "bf16":
            defaults["recipe.rounding"] = "nearest"  # the only choice at the time
        then = {**defaults, SHUFFLE: "global", **then}
        ignored = _moved(then, now) | (LENGTH if self.extending else set())
        if now["recipe.steps"] != then["recipe.steps"]:
            # One cause, reported once.
            ignored |= _follow_length(job.config.recipe, then)
        now, then = (
            {key: value for key, value in side.items() if key not in ignored} for side in (now, then)
        )
        more = f"--extend gives a run more steps; {fix}"
        problems += [
            Problem(
                f"{self.path} holds another run: {text}", more if text.startswith("recipe.steps ") else fix
            )
            for text in _differences(then, now)
        ]
        if problems:
            raise BadInput(problems)

    def _check_not_elsewhere(self) -> None:
        """Refuse a job that looks for checkpoints where there are none: it would silently start over."""
        before = self._disk_before()
        last = max(before.committed(), default=0) if before != self.disk else 0
        if last > self.step():
            raise BadInput(
                f"{self.path} has the checkpoint of step {last} elsewhere: {before.name(last)}",
                "set checkpoint.to back, or copy that to where it says now; --fresh moves the old run aside",
            )

    def begun_with(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Model and identity of the existing run: from the last checkpoint or, before the first, from the manifest.

        Skips a checkpoint with a damaged manifest; a restore will set it aside.
        """
        for place, step in newest_first([self.disk]):
            try:
                found = manifest_of(place, step)
            except (Damaged, OSError):
                continue
            return found.model, found.identity
        try:
            content = read_json(self.manifest)
            return content["model"], content["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(
                f"{self.manifest} cannot be read, so it is unknown which run this is",
                "--fresh moves it aside",
            ) from None

    def move_aside(self) -> Path:
        """Rename the directory, and its prefix in an object store, to the first NAME.old-N that is free."""
        forget(self.id)
        buckets = {place for place in (self.disk, self._disk_before()) if isinstance(place, ObjectStore)}
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists() or not all(
            bucket.beside(f".old-{number}").empty for bucket in buckets
        ):
            number += 1
        for bucket in buckets:
            bucket.move(bucket.beside(f".old-{number}"))
        return self.path.rename(target) if self.path.exists() else target

    def note_fault(self, **row: Any) -> None:
        """Add a row to faults.jsonl, which keeps every fault, including those a resume has undone.

        If the disk is full, the row is written with the next one: a full disk must not end a run that could continue.
        """
        self._untold.append(json.dumps({"time": time.time(), **redact_values(row)}).encode() + b"\n")
        with contextlib.suppress(OSError):
            with self.faults.open("a+b") as file:
                if file.tell() > 0:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a row torn by a full disk must not swallow this one
                        file.write(b"\n")
                file.write(b"".join(self._untold))
            self._untold.clear()

    def read_plan(self) -> dict[str, Any]:
        """The plan that the run started with; empty if there is none."""
        try:
            content: dict[str, Any] = read_json(self.plan)
        except (OSError, ValueError):
            return {}
        return content

    def note_plan(self, plan: dict[str, Any]) -> None:
        """Record the plan of a layout that the run has changed to."""
        with contextlib.suppress(OSError):
            replace_text(self.plan, json.dumps(redact_values(plan), indent=2) + "\n")

    def note_layout(self, job: Job, plan: dict[str, Any]) -> None:
        """Record the layout found to be the fastest; the run uses it from now on."""
        self.note_plan(plan)
        with contextlib.suppress(OSError):
            replace_text(self.config, configfile.write(self._resolved(job)))

    def note_measured(self, measured: dict[str, Any]) -> None:
        """Record in the manifest how the plan compared with measurements."""
        with contextlib.suppress(OSError):
            content = read_json(self.manifest)
            replace_text(self.manifest, json.dumps({**content, "measured": measured}, indent=2) + "\n")

    def _resolved(self, job: Job) -> Config:
        """The config with the chosen layout and, where a name can express it, this directory."""
        changes: dict[str, Any] = {"layout": str(job.layout)}
        given = job.config.run
        name = given.name if given.slug == self.path.name else self.path.name
        place = given.model_copy(update={"dir": str(self.path.parent.absolute()), "name": name})
        if place.slug == self.path.name:
            changes["run"] = place
        return with_absolute_paths(job.config).model_copy(update=changes)

    def write_start(self, job: Job, manifest: dict[str, Any], plan: dict[str, Any]) -> None:
        """Write what is known before the first step."""
        self.logs.mkdir(exist_ok=True, mode=0o700)
        self.checkpoints.mkdir(exist_ok=True, mode=0o700)
        drawn = self.id if self.id != UNKNOWN else secrets.token_hex(8)
        replace_text(self.config, configfile.write(self._resolved(job)))
        replace_text(self.plan, json.dumps(redact_values(plan), indent=2) + "\n")
        replace_text(self.manifest, json.dumps({"id": drawn, **redact_values(manifest)}, indent=2) + "\n")


def _moved(then: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Keys that do not distinguish two runs: where things are, if their content is known to be the same."""
    ignored = set()
    if now[DATA_HASH] == then.get(DATA_HASH):
        ignored |= {f"data.{name}" for name in DATA_ORIGIN}
    if now[WEIGHTS_HASH] is None or then.get(WEIGHTS_HASH) is None:
        # The weights may be gone, as they may once there is a checkpoint, or predate hashing. Then the path decides.
        ignored.add(WEIGHTS_HASH)
        if _absolute(then.get(WEIGHTS)) == _absolute(now[WEIGHTS]):
            ignored.add(WEIGHTS)
    elif now[WEIGHTS_HASH] == then[WEIGHTS_HASH]:
        ignored.add(WEIGHTS)
    return ignored


def _follow_length(recipe: Recipe, then: dict[str, Any]) -> set[str]:
    """Spans that differ only because they are fractions of another number of steps."""
    before = resolved_recipe(recipe.model_copy(update={"steps": then["recipe.steps"]}))
    return {key for name in ("warmup", "decay") if before[name] == then.get(key := f"recipe.{name}")}


def _absolute(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser().absolute()


def _whose(alive: dict[str, Any]) -> str:
    node = alive.get("node", ALONE)
    return f"process {alive['process']}" + (f" on node {node}" if node != ALONE else "")


def _shape(model: dict[str, Any]) -> dict[str, Any]:
    """A model's shape, without its name."""
    return {name: value for name, value in model.items() if name != "name"}


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key} was {then.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
