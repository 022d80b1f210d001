"""Checkpoints of more than a gigabyte: Shoal's beside torch's DCP, and what saving in the background costs training.

Both write and read the same tensors in the same directory, by turns; what they write is flushed to disk by both. Before
a load is timed the kernel is told to forget the files ("cold"); then it is timed once more ("warm"). Everything side by
side runs as unurgently as Shoal's background write. Where others use the machine each timing waits for a calm moment,
for so long; what a way costs in CPU seconds does not depend on them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from record import record
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shoal.facts.cluster.this_machine import usable_threads
from shoal.facts.config import TuneSection
from shoal.facts.layout import Layout
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.launch import local
from shoal.launch.ranks import run_ranks
from shoal.models.initial import fill
from shoal.parallel.mesh import Mesh
from shoal.train.checkpoint.read import Checkpoint
from shoal.train.checkpoint.save import NICE, Saver
from shoal.train.checkpoint.storage import DirectoryStorage
from shoal.train.checkpoint.write_plan import piece_slices
from shoal.train.data.loader import Batch
from shoal.train.program import assemble, blueprint
from shoal.train.state import State

MODEL = PRESETS["tiny"].model_copy(
    update={
        "name": "90M",
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 4,
        "head_dim": 64,
        "ffn": 2048,
        "vocab": 16384,
        "max_positions": 1024,
    }
)
RECIPE = Recipe(seq=128, batch=8, lr=1e-4)
STATES = ("exp_avg", "exp_avg_sq")
SECONDS = 3000.0
# How much of the processors' time is idle in a calm moment.
CALM = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=["dp=1", "fsdp=2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=5, help="with a save behind them, and as many without; 0: none"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path.cwd(), help="on the disk that is to be measured"
    )
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a calm moment")
    options = parser.parse_args()
    local.warm_workers((*local.PRELOAD, "checkpoints"))
    for layout in options.layouts:
        world = Layout.parse(layout).world
        with tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=options.directory) as folder:
            arguments = (layout, Path(folder), options.rounds, options.steps, options.patience)
            measured = run_ranks(world, measure, arguments, SECONDS)[0]
        record(
            "checkpoints",
            layout=layout,
            ranks=world,
            model=MODEL.name,
            rounds=options.rounds,
            load_after=os.getloadavg()[0],
            **measured,
        )


def measure(
    rank: int,
    world: int,
    store: dist.Store,
    layout: str,
    folder: Path,
    rounds: int,
    steps: int,
    patience: float,
) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, usable_threads() // world))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if world > 1:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS)
        )
    bench = Bench(layout, rank, store, folder, patience)
    found: dict[str, Any] = {"gigabytes": bench.gigabytes}
    if steps:
        found |= bench.steps(steps)
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    return found | bench.rounds(rounds)


class Bench:
    """One rank's network, after a step, and both ways to save and load it."""

    def __init__(self, layout: str, rank: int, store: dist.Store, folder: Path, patience: float) -> None:
        self.patience = patience
        self.mesh = Mesh(Layout.parse(layout), rank, torch.device("cpu"), store)
        network = blueprint(MODEL, RECIPE)
        self.step = assemble(network, RECIPE, TuneSection(), self.mesh, partial(fill, model=MODEL, seed=0))
        optimizer, scale = self.step.optimizer, self.step.scale
        self.state = State(MODEL, self.step.placed, optimizer, RECIPE, scale, self.mesh)
        self.batch = self._batch()
        self.number = 0
        self.train()
        self.gigabytes = sum(piece.tensor.nbytes for piece in self.state.pieces) * 3 / 1e9
        if self.mesh.world > 1:
            self.gigabytes = self.mesh.hosts.sum_floats([self.gigabytes])[0]
        self.ours, self.theirs = DirectoryStorage(folder / "shoal"), folder / "dcp"
        self.saver = Saver("disk", self.ours, self.state.new_stage(), self.mesh, "bench")
        self.step.before_update = self.saver.stage.hold_update
        self.tensors = self._for_dcp()

    def train(self) -> float:
        began = time.perf_counter()
        self.number += 1
        self.step(self.number, [self.batch], RECIPE.batch * RECIPE.seq)
        return time.perf_counter() - began

    # What a save costs training.

    def steps(self, count: int) -> dict[str, Any]:
        alone, behind, stalls, writes = [], [], [], []
        self.train()
        self._save_ours()  # the first one allocates what later ones use again
        for _ in range(count):
            self._settle()
            alone.append(self.train())
            self.saver.start(self._manifest(), self.state.states())
            stalls.append(self.saver.waited)
            self.saver.waited = 0.0
            # Every step that begins while it is being written.
            while not (saved := self.saver.take_results()):
                behind.append(self.train())
                self._together()
            writes.append(saved[0].seconds)
            self._settle()
        step, stall = statistics.median(alone), statistics.median(stalls)
        return {
            "tokens_a_step": RECIPE.batch * RECIPE.seq,
            "step_s": step,
            "stall_s": stall,
            "stall_share_of_step": stall / step,
            "step_behind_write_s": statistics.median(behind),
            "slowdown_behind_write": statistics.median(behind) / step - 1,
            "background_write_s": statistics.median(writes),
        }

    # Side by side.

    def rounds(self, count: int) -> dict[str, Any]:
        ways = {"shoal": (self._save_ours, self._load_ours), "dcp": (self._save_dcp, self._load_dcp)}
        seconds: dict[str, dict[str, list[float]]] = {}
        processor: dict[str, dict[str, list[float]]] = {}
        self._save_ours()
        for number in range(count):
            for name in sorted(ways, reverse=bool(number % 2)):
                save, load = ways[name]
                self._clear()
                for what, action in (("save", save), ("load_cold", load), ("load_warm", load)):
                    self._settle(forget=what == "load_cold")
                    wall, used = self._timed(action)
                    seconds.setdefault(what, {}).setdefault(name, []).append(wall)
                    processor.setdefault(what, {}).setdefault(name, []).append(used)
        return {what: self._side_by_side(seconds[what], processor[what]) for what in seconds}

    def _side_by_side(
        self, seconds: dict[str, list[float]], processor: dict[str, list[float]]
    ) -> dict[str, Any]:
        rates = {name: [self.gigabytes / wall for wall in walls] for name, walls in seconds.items()}
        pairs = zip(rates["shoal"], rates["dcp"], strict=True)
        return {
            "gb_per_s": rates,
            "best_gb_per_s": {name: max(found) for name, found in rates.items()},
            "median_ratio": statistics.median(ours / theirs for ours, theirs in pairs),
            "ratio_of_best": max(rates["shoal"]) / max(rates["dcp"]),
            "cpu_s_a_gb": {
                name: statistics.median(used) / self.gigabytes for name, used in processor.items()
            },
        }

    def _save_ours(self) -> None:
        self.saver.start(self._manifest(), self.state.states())
        self.saver.finish()
        self._together()
        (saved,) = self.saver.take_results()
        assert not saved.error, saved.error

    def _save_dcp(self) -> None:
        dcp.save(self.tensors, checkpoint_id=self.theirs)

    def _load_ours(self) -> None:
        checkpoint = Checkpoint(self.ours, self.number, max(2, usable_threads() // self.mesh.world))
        held = self.step.optimizer.state
        states = [
            (kind, piece.name, part)
            for kind in STATES
            for piece in self.state.pieces
            for part in piece_slices(piece, held[piece.tensor][kind])
        ]
        weights = [
            ("weight", piece.name, part)
            for piece in self.state.pieces
            for part in piece_slices(piece, piece.tensor)
        ]
        checkpoint.fill(MODEL, [*weights, *states])
        self.state.settle()

    def _load_dcp(self) -> None:
        dcp.load(self.tensors, checkpoint_id=self.theirs)

    def _for_dcp(self) -> dict[str, Tensor]:
        held = self.step.optimizer.state
        found = {}
        for piece in self.state.pieces:
            for kind, tensor in (
                ("weight", piece.tensor.data),
                *((kind, held[piece.tensor][kind]) for kind in STATES),
            ):
                found[f"{kind}.{piece.name}"] = self._as_sharded(tensor, piece.box.whole)
        return found

    def _as_sharded(self, tensor: Tensor, whole: tuple[int, ...]) -> Tensor:
        if self.mesh.world == 1:
            return tensor
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            tensor, self.mesh.axes("fsdp"), [Shard(0)], shape=torch.Size(whole), stride=stride
        )

    def _manifest(self) -> Any:
        return self.state.manifest(self.number, 0, {})

    def _batch(self) -> Batch:
        rows = RECIPE.batch // self.mesh.layout.data_ranks
        numbers = torch.Generator().manual_seed(self.mesh.rank)
        tokens = torch.randint(MODEL.vocab, (rows, RECIPE.seq + 1), generator=numbers)
        return Batch(
            tokens=tokens[:, :-1].contiguous(),
            targets=tokens[:, 1:].contiguous(),
            positions=torch.arange(RECIPE.seq).repeat(rows, 1),
            documents=None,
            rows=torch.arange(rows),
            count=rows * RECIPE.seq,
        )

    # The same conditions for everybody.

    def _timed(self, action: Callable[[], None]) -> tuple[float, float]:
        """Seconds until all ranks are done, and seconds of processors that all of them used."""
        began, before = time.perf_counter(), time.process_time()
        action()
        self._together()
        wall = time.perf_counter() - began
        return wall, self.mesh.hosts.sum_floats([time.process_time() - before])[0]

    def _together(self) -> None:
        if self.mesh.world > 1:
            dist.barrier()

    def _clear(self) -> None:
        self._together()
        if self.mesh.rank == 0:
            for path in (self.ours.path, self.theirs):
                shutil.rmtree(path, ignore_errors=True)
        self._together()

    def _settle(self, forget: bool = False) -> None:
        """Nothing is left to be written and, where it is to be forgotten, nothing is in the page cache."""
        self._together()
        if self.mesh.rank == 0:
            os.sync()
            for path in (*self.ours.path.rglob("*"), *self.theirs.rglob("*")) if forget else ():
                if path.is_file():
                    handle = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(handle)
            wait_for_calm(self.patience)
        self._together()


def wait_for_calm(patience: float) -> None:
    """Until others leave the processors alone for a moment."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        idle, total = idle_time()
        time.sleep(0.3)
        later_idle, later_total = idle_time()
        if later_idle - idle > CALM * (later_total - total):
            return


def idle_time() -> tuple[int, int]:
    """How long all processors have been idle, and how long they have been there."""
    times = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return times[3] + times[4], sum(times)


if __name__ == "__main__":
    main()
