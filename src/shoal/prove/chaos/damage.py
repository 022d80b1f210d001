"""Damage to the newest checkpoint of a run, as disks, people and crashes do it. Needs no torch."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from shoal.train.checkpoint.manifest import NAME
from shoal.train.checkpoint.place import Directory
from shoal.train.rundir import RunDirectory


def damage(run: RunDirectory, kind: str, numbers: random.Random) -> int:
    """Damage the newest copy in memory; or, where the disk has it too, that on disk, and memory is lost as well.

    Returns how many committed steps are thereby gone for good, whatever anybody does.
    """
    disk, root = Directory(run.checkpoints), run.memory().path.parent
    # Several nodes have several copies.
    memories = [Directory(path) for path in root.iterdir()] if root.is_dir() else []
    in_memory = sorted({step for memory in memories for step in memory.committed()})
    on_disk = disk.committed()
    copies, steps, gone = memories, in_memory, 0
    if not in_memory or (in_memory[-1:] == on_disk[-1:] and len(on_disk) > 1 and numbers.random() < 0.3):
        shutil.rmtree(root, ignore_errors=True)
        copies, steps, gone = [disk], on_disk, 1
    elif on_disk[-1:] < in_memory[-1:]:
        gone = in_memory[-1] - max(on_disk, default=0)
    seed = numbers.getrandbits(32)
    for copy in copies:
        target, choice = copy.at(steps[-1]), random.Random(seed)
        if target.is_dir():
            _carry_out(kind, target, choice.choice(sorted(target.glob("*.bin"))), choice, disk)
    return gone


def _carry_out(kind: str, target: Path, file: Path, numbers: random.Random, disk: Directory) -> None:
    content = bytearray(file.read_bytes())
    if kind == "flipped bit":
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        file.write_bytes(content)
    elif kind == "truncated file":
        file.write_bytes(content[: numbers.randrange(len(content))])
    elif kind == "missing file":
        file.unlink()
    elif kind == "torn manifest":
        manifest = (target / NAME).read_bytes()
        (target / NAME).write_bytes(manifest[: numbers.randrange(len(manifest))])
    elif kind == "swapped files":
        others = [other for other in target.glob("*.bin") if other != file]
        # Alone it is swapped with that of the step before, which is as long.
        other = numbers.choice(others) if others else disk.at(disk.committed()[-2]) / file.name
        file.write_bytes(other.read_bytes())
        if others:
            other.write_bytes(content)
