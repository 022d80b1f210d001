"""Run directories as ``shoal train`` writes them, of any length and number of ranks, without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shoal.facts.config.file import load
from shoal.launch.manifest import describe_plan
from shoal.plan.resolve import resolve

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'


def made_run(
    path: Path,
    steps: int = 40,
    ranks: int = 2,
    layout: str = "pp=2",
    experts: int = 0,
    faults: bool = True,
    hostile: str = "",
    finished: bool = True,
) -> Path:
    """``hostile``: a text to be found wherever a stranger can put one."""
    path.mkdir(parents=True)
    whole = steps if finished else 2 * steps
    given = load(
        None,
        [f"recipe.steps={whole}", "recipe.batch=16", "cluster.share=true"],
        layout,
    )
    job = resolve(given.config, None, 1)
    plan = {**describe_plan(job), "world": ranks}
    _write(path / "plan.json", plan)
    _write(
        path / "manifest.json",
        _manifest(job.cluster.model_dump(mode="json"), job.network.model_dump(mode="json"), hostile),
    )
    (path / "config.toml").write_text(
        f'layout = "{layout}"\n[run]\nname = {json.dumps("run " + hostile)}\n[recipe]\nsteps = {whole}\n'
        '[[data.mix]]\nsource = "web.jsonl"\nweight = 3.0\nlater = [{step = 20, weight = 1.0}]\n'
        '[[data.mix]]\nsource = "code.jsonl"\nweight = 1.0\n'
    )
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(
                json.dumps(metrics_row(step, steps, ranks, layout, experts, plan["step"]["seconds"])) + "\n"
            )
    (path / "samples.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "step": step,
                    "prompt": "Once upon a time" + hostile,
                    "text": f"there was {step}\nfish{hostile}",
                }
            )
            + "\n"
            for step in range(steps // 4, steps + 1, max(1, steps // 4))
        )
    )
    if faults:
        rows = [
            {
                "time": 1.79e9,
                "kind": "killed",
                "step": steps // 2,
                "rank": 1,
                "message": f"rank 1 failed{hostile}",
                "action": "restarting",
                "attempt": 1,
            },
            {"time": 1.79e9 + 1, "kind": "restart", "attempt": 1, "resumed_step": steps // 2 - 5},
            {
                "time": 1.79e9 + 2,
                "kind": "straggler",
                "step": steps // 2,
                "ranks": [1],
                "action": "rank 1 takes 3.0 ms per step",
            },
        ]
        (path / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "observed").mkdir()
    for rank in range(ranks):
        _write(path / "observed" / f"rank-{rank:05d}.json", observed(rank, layout))
    (path / "logs").mkdir()
    for rank in range(ranks):
        (path / "logs" / f"rank-{rank:05d}.log").write_text(f"rank {rank} began\nline {hostile}\n")
    return path


def metrics_row(
    step: int, steps: int, ranks: int, layout: str, experts: int, predicted: float
) -> dict[str, Any]:
    loss = 2 + 8 * math.exp(-4 * step / steps) + 0.1 * math.sin(step)
    row: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "loss_hex": loss.hex(),
        "grad_norm": 1 + 0.3 * math.cos(step),
        "lr": 1e-3 * (1 - step / (steps + 1)),
        "tokens": step * 2048,
        "samples": step * 16,
        "targets": 2048,
        "step_s": 0.3 + 0.02 * math.sin(step / 7),
        "input_wait_s": 0.001,
        "tokens_per_s": 7000.0,
        "model_flops_per_s": 1e10,
        "mfu": 0.31,
        "memory_peak": 400 << 20,
        "world": ranks,
        "layout": layout if step <= 3 * steps // 4 else f"{layout},micro=1",
        "attempt": "a-1" if step <= steps // 2 - 5 else "a-2",
        "commit_wait_s": 0.0,
        "predicted_step_s": predicted,
    }
    if step % max(1, steps // 10) == 0:
        row["heldout_loss"] = loss + 0.2
        row["validation"] = {"books": loss + 0.2, "code": loss + 0.4}
    if experts:
        row["expert_load"] = [100 + (step * expert) % 50 for expert in range(experts)]
        row["expert_imbalance"] = 1.5
    return row


def observed(rank: int, layout: str) -> dict[str, Any]:
    parts = {
        "params": 1 << 20,
        "grads": 1 << 20,
        "optimizer": 2 << 20,
        "activations": (20 + rank % 7) << 20,
        "messages": 1 << 18,
    }
    return {
        "step": 2,
        "rank": rank,
        "layout": layout,
        "traffic": [
            {"op": "send", "group": "ranks 0,1", "count": 2, "bytes": 262144},
            {"op": "all_reduce", "group": "pp", "count": 2, "bytes": 32},
        ],
        "peak": sum(parts.values()),
        "peak_by_category": parts,
    }


def _manifest(cluster: dict[str, Any], model: dict[str, Any], hostile: str) -> dict[str, Any]:
    return {
        "id": "0123456789abcdef",
        "started": "2026-11-18T15:00:00Z",
        "shoal": "0.1.0",
        "python": "3.11.7",
        "packages": {"torch": "2.13.0"},
        "host": {"name": "elsewhere" + hostile, "system": "Linux", "cores": 2},
        "cluster": cluster,
        "git": "2583a2f45ce1dda5d7c3fa6b424e64545219002c",
        "model": model,
        "parameters": 411200,
        "data": "/data",
        "data_parts": [
            {
                "source": "web.jsonl" + hostile,
                "role": "training",
                "documents": 900,
                "tokens": 123456,
                "heldout_tokens": 99,
                "rows": 1000,
                "bad_rows": {"no field 'text'" + hostile: 7},
            },
            {
                "source": "code.jsonl",
                "role": "training",
                "documents": 10,
                "tokens": 1234,
                "heldout_tokens": 9,
                "rows": 10,
                "bad_rows": {},
            },
        ],
        "memory_peak": "resident set of the first rank's process",
        "mfu": "of a guess",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
