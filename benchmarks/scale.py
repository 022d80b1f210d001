"""From 8 to 16,384 ranks: what the control plane costs, with Shoal's own code and synthetic ranks. No GPU is needed.

    python benchmarks/scale.py                      # everything; half an hour on two quiet cores
    python benchmarks/scale.py --only exchange --worlds 64,512
    python benchmarks/scale.py --page               # docs/scale.md from what was measured

Writes benchmarks/data/scale.json. How each figure is obtained is said in docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import scale_checkpoint, scale_exchange, scale_start  # noqa: E402 found from here

from shoal.facts.layout import Layout  # noqa: E402
from shoal.facts.model.presets import PRESETS  # noqa: E402
from shoal.parallel.control_tree import sockets  # noqa: E402

DATA, PAGE = ROOT / "benchmarks" / "data" / "scale.json", ROOT / "docs" / "scale.md"
MODEL = "llama3-405b"
A_NODE = scale_exchange.A_NODE
# World → the layout that writes a checkpoint, and another that resumes from it.
LAYOUTS = {
    8: ("tp=8", "tp=4,fsdp=2"),
    64: ("tp=8,fsdp=8", "tp=8,pp=2,fsdp=4"),
    512: ("tp=8,pp=16,fsdp=4", "tp=8,pp=8,fsdp=8"),
    1024: ("tp=8,pp=16,fsdp=8", "tp=8,pp=8,fsdp=16"),
    4096: ("tp=8,pp=16,fsdp=32", "tp=8,pp=8,fsdp=64"),
    16384: ("tp=8,pp=16,fsdp=128", "tp=8,pp=8,fsdp=256"),
}
# At the largest world.
TARGETS = {
    "exchange_cpu_ms": 50,
    "start_operations": 256,
    "resume_bytes": 50e6,
    "resume_s": 2.0,
    "sockets": 64,
}
# Of a rank, beside those of the tree: to the leader's store.
STORE_SOCKETS = 1
BEGIN, END = "<!-- from benchmarks/data/scale.json -->", "<!-- end -->"


def exchange(world: int, exchanges: int = 20) -> dict[str, Any]:
    nodes = max(1, world // A_NODE)
    return scale_exchange.measured(nodes, world, exchanges, sockets=world)


def checkpoint(world: int, model: str = MODEL) -> dict[str, Any]:
    """One commit, and two resumes from it: of ranks of the same layout, and of ranks of another."""
    layout, other = LAYOUTS[world]
    with tempfile.TemporaryDirectory() as folder:
        place = scale_checkpoint.CountingStorage(Path(folder))
        found: dict[str, Any] = {"layout": layout, "resumed_in": other}
        found |= scale_checkpoint.write(
            scale_checkpoint.SyntheticRanks(PRESETS[model], Layout.parse(layout)), place
        )
        for name, resumed in (("resume", layout), ("resume_elsewhere", other)):
            # Of three ranks, the one that reads most.
            tried = [_resumed(model, resumed, rank, Path(folder)) for rank in (0, world // 2 + 1, world - 1)]
            found[name] = max(tried, key=lambda one: (one["bytes"], one["seconds"]))
    return found


def _resumed(model: str, layout: str, rank: int, folder: Path) -> dict[str, float]:
    """The quickest of three: what else this machine does is no part of it."""
    tries = (scale_checkpoint.resume_elsewhere(model, layout, rank, folder) for _ in range(3))
    return min(tries, key=lambda one: one["seconds"])


def start(world: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        return scale_start.file_operations(world, Path(folder))


def control_sockets(world: int) -> dict[str, int]:
    """The most of any rank, counted over all of them; a sample of ranks holds them in tests/parallel."""
    return {
        "most": STORE_SOCKETS
        + max(sockets(rank, world) for rank in range(0, world, 1 if world < 4096 else 16))
    }


def rows(data: dict[str, Any]) -> list[str]:
    """The table of the page."""
    lines = [
        "| ranks | nodes | an exchange: leader's processor time, ms | while a rank is late, ms | messages of a node | "
        "sockets of a rank | metadata of a 405B checkpoint, MB | read by a rank at resume, MB | "
        "in another layout, MB | "
        "seconds of that, processor time | file operations at the start: a launcher's, a rank's | at resume | "
        "at commit |",
        "|" + "---|" * 13,
    ]
    for world, found in sorted(((int(key), value) for key, value in data["worlds"].items())):
        talk, stored = found["exchange"], found["checkpoint"]
        same, other = stored["resume"], stored["resume_elsewhere"]
        cells = [
            f"{world:,}",
            f"{max(1, world // A_NODE):,}",
            f"{talk['exchange_cpu_ms']:.1f}",
            f"{talk['late_exchange_cpu_ms']:.1f}",
            f"{talk['messages_of_a_follower']}",
            f"{found['sockets']['most']}",
            f"{stored['metadata_bytes'] / 1e6:.0f}",
            f"{same['bytes'] / 1e6:.1f}",
            f"{other['bytes'] / 1e6:.1f}",
            f"{max(same['seconds'], other['seconds']):.1f}, {max(same['cpu_s'], other['cpu_s']):.1f}",
            f"{found['start']['launcher']}, {found['start']['rank']}",
            f"{max(same['operations'], other['operations'])}",
            f"{stored['commit_operations_of_the_first_rank']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_page(data: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *rows(data), END]) + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", default=",".join(map(str, LAYOUTS)), help="ranks, separated by commas")
    parser.add_argument("--only", choices=("exchange", "checkpoint", "sockets", "start"), help="one part")
    parser.add_argument("--out", type=Path, default=DATA, help="where figures are kept; others there stay")
    parser.add_argument(
        "--page", action="store_true", help="write docs/scale.md from them, and measure nothing"
    )
    given = parser.parse_args()
    if given.page:
        write_page(json.loads(given.out.read_text()))
        return
    parts = {"exchange": exchange, "checkpoint": checkpoint, "sockets": control_sockets, "start": start}
    for world in map(int, given.worlds.split(",")):
        for name, measure in parts.items():
            if given.only in (None, name):
                found = measure(world)
                print(world, name, json.dumps(found), flush=True)
                _keep(given.out, world, name, found)


def _keep(path: Path, world: int, name: str, found: dict[str, Any]) -> None:
    data = json.loads(path.read_text()) if path.exists() else {"worlds": {}}
    data["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
    data["worlds"].setdefault(str(world), {})[name] = found
    data["worlds"] = dict(sorted(data["worlds"].items(), key=lambda item: int(item[0])))
    path.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
