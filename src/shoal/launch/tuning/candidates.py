"""The layouts that a run tries: those within the error bar of the plan's best, or those the user names. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.facts import support
from shoal.facts.layout import Layout, nearest
from shoal.facts.problem import BadInput, Problem
from shoal.facts.recipe import Recipe
from shoal.launch.tuning.expected import known_steps
from shoal.launch.tuning.trials import MOST_LAYOUTS, VISIT
from shoal.plan.resolve import Job
from shoal.plan.search import searched


@dataclass(frozen=True)
class Tried:
    """What to try besides the run's first layout: the plan's choices, unless named."""

    named: tuple[Layout, ...] = ()
    most: int = MOST_LAYOUTS


def candidates(job: Job, tried: Tried, check: Callable[[Job], None]) -> tuple[list[Job], str]:
    """The job in each layout, its first layout first; and if that is the only one, the reason.

    ``check`` raises if a job cannot be trained here.
    """
    _check(job, tried.most)
    if tried.named:
        problems: list[Problem] = []
        others = [in_layout(job, layout, check, problems) for layout in tried.named]
        if problems:
            raise BadInput(problems)
        distinct = _distinct([job, *(one for one in others if one is not None)])
        if len(distinct) == 1:
            raise BadInput(
                f"one layout only, {job.layout}: nothing to compare it with", '--layouts "dp=4;fsdp=4"'
            )
        return distinct, ""
    if job.config.layout == "auto":
        job = _fastest_known(job, check)
    recipe, compile = _smallest(job.config.recipe), job.config.compile.enabled
    plans = searched(replace(job.workload(), recipe=recipe, compile=compile), runnable=True).plans
    strict, rows = job.config.run.strict, job.config.recipe.loss_facts.rows
    found = [(plan.tie, plan.layout.replace(micro=rows) if strict else plan.layout) for plan in plans]
    legal = [(tie, in_layout(job, layout, check, [])) for tie, layout in found]
    every = _distinct([job, *(one for _, one in legal if one is not None)])
    if len(every) == 1:
        raise BadInput(
            f"{job.layout} is the only layout that is legal here and fits: nothing to compare it with",
            "shoal train without tune.search, more devices, or --layouts",
        )
    ties = _distinct([job, *(one for tie, one in legal if tie and one is not None)])
    why = "" if ties[1:] else f"no other layout is predicted to be within the error bar of {job.layout}"
    return ties[: tried.most], why


def _check(job: Job, most: int) -> None:
    """Refuse settings that make a search impossible."""
    support.refuse_servers(job.config, "a search for the fastest layout")
    steps = job.config.recipe.steps
    if steps < 2 * VISIT:
        raise BadInput(
            f"recipe.steps = {steps} is too few to try layouts: two of them take {VISIT} steps each",
            f"--set recipe.steps={2 * VISIT} or more, or shoal train without tune.search",
        )
    if most < 2:
        raise BadInput(f"--most {most}: nothing to compare", f"--most {MOST_LAYOUTS}, or any number from 2")


def in_layout(job: Job, layout: Layout, check: Callable[[Job], None], problems: list[Problem]) -> Job | None:
    """The same job in another layout; None if it cannot be trained in it, with the reason added to ``problems``."""
    config, rows = job.config, job.config.recipe.loss_facts.rows
    if config.run.strict and layout.micro is None:
        layout = layout.replace(micro=rows)
    devices = None if config.cluster.share else job.cluster
    wrong = support.missing(config, job.model, layout)
    for recipe in dict.fromkeys([config.recipe, _smallest(config.recipe)]):
        wrong += nearest.problems(layout, job.model, recipe, devices, config.run.strict, support.runs)
    found = replace(job, layout=layout)
    if not wrong:
        try:
            check(found)
        except BadInput as error:
            wrong = list(error.problems)
    problems.extend(replace(problem, where="--layouts") for problem in wrong)
    return None if wrong else found


def _fastest_known(job: Job, check: Callable[[Job], None]) -> Job:
    """The job in the layout that an earlier search of the same work found fastest, if there was one."""
    found = (in_layout(job, Layout.parse(name), check, []) for name in known_steps(job))
    return next((one for one in found if one is not None), job)


def _smallest(recipe: Recipe) -> Recipe:
    """The recipe with a batch that divides all batches of a ramp, so that a layout that divides it divides them all."""
    return recipe.model_copy(update={"batch": recipe.batch_unit, "batch_ramp": ()})


def _distinct(jobs: Sequence[Job]) -> list[Job]:
    return list({job.layout: job for job in jobs}.values())
