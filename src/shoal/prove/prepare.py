"""What a proof checks and prepares before it starts a process."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir

from rich.console import Console

from shoal.facts.layout import Layout, parse_layouts
from shoal.facts.problem import BadInput, Problem
from shoal.facts.support import refuse_servers
from shoal.launch import local
from shoal.launch.scratch import check_scratch
from shoal.plan.resolve import Job
from shoal.prove import coverage

SETS = {
    "quick": coverage.QUICK,
    "4d": coverage.MANY_AXES,
    "experts": (*coverage.EXPERTS, *coverage.MANY_AXES),
    "full": (*coverage.FULL, *coverage.EXPERTS, *coverage.MANY_AXES),
}


def layouts(text: str, job: Job) -> list[Layout]:
    """Layouts separated by ";", or a named set. In strict mode all sets are that mode's own."""
    refuse_servers(job.config, "shoal parity")
    if text in SETS:
        chosen = coverage.legal(coverage.STRICT if job.config.run.strict else SETS[text], job)
        if text == "quick":
            chosen = [layout for layout in chosen if layout.world <= 4]
        if not chosen:
            suits = f"{job.model.name}, batch {job.config.recipe.batch} and {job.cluster.devices} device(s)"
            raise BadInput(
                f"no layout of the set {text} suits {suits}",
                "--set cluster.share=true (ranks share a GPU), --set cluster.on=4xcpu, or a larger recipe.batch",
            )
        return chosen
    named = parse_layouts(text)
    if not named:
        raise BadInput("--layouts is empty", '--layouts "dp=2;fsdp=2", or quick, 4d, experts or full')
    return named


def ready(
    job: Job, chosen: list[Layout], precisions: list[str], steps: int, visible: str | None, console: Console
) -> Path:
    """Report everything wrong with any of the layouts, at once; otherwise prepare the data and a warm server for the
    processes.
    """
    from shoal.prove.parity import job_of

    problems = []
    if steps < 1:
        problems.append(Problem(f"--steps {steps}: must be 1 or more", "--steps 3"))
    for layout in chosen:
        try:
            asked = job_of(job.config, layout, precisions[0], visible)
            local.check_devices(asked, visible)
            check_scratch(asked, Path(gettempdir()))
        except BadInput as error:
            problems.extend(
                Problem(f"{layout}: {problem.what}", problem.fix, "--layouts") for problem in error.problems
            )
    if problems:
        raise BadInput(problems)
    dataset = local.tokenised(job, console)
    local.warm_workers((*local.PRELOAD, "shoal.prove.parity_rank"), job.config)
    return dataset.path
