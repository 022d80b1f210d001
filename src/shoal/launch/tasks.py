"""Evaluate trained weights on tasks of lm-eval, if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.facts.problem import BadInput, first_line
from shoal.plan.resolve import Job

ENDINGS = (".yaml", ".yml")


def check_tasks(names: list[str], layout: str) -> None:
    """Report what prevents the tasks from running, before any weights are read."""
    if find_spec("lm_eval") is None:
        raise BadInput("--tasks needs lm-eval, which is not installed", "pip install lm_eval")
    if layout != "dp=1":
        raise BadInput(
            f"--tasks with --layout {layout}: tasks are evaluated in one process", "leave out --layout"
        )
    for name in names:
        if name.endswith(ENDINGS) and not Path(name).is_file():
            raise BadInput(
                f"--tasks {name}: there is no such file", "the path of a task's YAML file, or a name"
            )


def score_tasks(job: Job, weights: str, names: list[str], limit: int | None) -> dict[str, dict[str, Any]]:
    """lm-eval's results by task: each metric under lm-eval's own name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from shoal.launch.init_rank import init_rank
    from shoal.train.harness import HarnessModel

    files = all(name.endswith(ENDINGS) for name in names)
    manager = TaskManager(include_defaults=not files)  # its own tasks are thousands of files
    try:
        manager.load(names)
    except Exception as error:  # whatever a dataset's server or a task's own code raises
        raise BadInput(
            f"--tasks {', '.join(names)}: lm-eval cannot load it: {first_line(error)}",
            "lm-eval ls tasks lists those it has; data of its tasks is fetched from the Hub, unless it is here",
        ) from None
    network = HarnessModel(job, init_rank(job, 0, 0, None), weights)
    found: Any = simple_evaluate(
        network, tasks=names, task_manager=manager, limit=limit, log_samples=False, bootstrap_iters=0
    )
    results: dict[str, dict[str, Any]] = found["results"]
    return results
