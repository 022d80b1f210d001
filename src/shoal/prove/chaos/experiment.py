"""A campaign from start to verdict: the run without faults, the run with faults, the comparison."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from shoal.facts.config import Config
from shoal.facts.layout import Layout
from shoal.facts.problem import BadInput, Problem
from shoal.facts.support import refuse_servers
from shoal.plan.resolve import resolve
from shoal.prove.chaos import network
from shoal.prove.chaos.campaign import Broken, Campaign, CampaignSettings, InjectedFault
from shoal.prove.chaos.fault_kinds import BY_NAME, KINDS, FaultKind
from shoal.prove.chaos.schedule import schedule
from shoal.prove.chaos.verdict import ChaosVerdict, difference, steps_lost, weights_differ
from shoal.train.data.collection import Collection
from shoal.train.data.input import open_loader
from shoal.train.data.tokenizers import open_tokenizer
from shoal.train.files import read_rows
from shoal.train.metrics.sample_log import prove as prove_ledger
from shoal.train.run_directory import RunDirectory

# Steps of the run per fault: from the last recovery to the strike, and from there to the next commit.
STEPS_A_FAULT = 4
STEPS_BESIDE = 60

# Settings of every campaign, whatever the config says: commit every step, and notice everything.
ALWAYS = {
    "run.ledger": "true",
    "checkpoint.every": "1",
    "checkpoint.keep": "3",
    "checkpoint.memory": "1",
    "checkpoint.background": "true",
    "evaluate.every": "4",
    "evaluate.batches": "1",
    "evaluate.samples": "0",
    # A missing rank is found by the watchdog, which can see whether it has a processor. torch's own timeout cannot, so
    # it comes later.
    "fault.stall": "1.5",
    "fault.timeout": "5",
    "fault.max_restarts": "10",
    "fault.nonfinite": '"retry"',
    "fault.check_every": "1",
}


# Nothing will happen to the run without faults, so it need not be prepared. None of this affects the mathematics.
UNHURRIED = ("checkpoint.every=1000000", "checkpoint.memory=0", "evaluate.every=0", "fault.check_every=0")


def settings(faults: int, strict: bool, given: list[str]) -> list[str]:
    """The runs' ``--set`` values: the user's last, except for those that the proof depends on."""
    steps = STEPS_A_FAULT * faults + STEPS_BESIDE
    own = [f"{name}={value}" for name, value in ALWAYS.items()]
    return [*given, f"recipe.steps={steps}", f"run.strict={str(strict).lower()}", *own]


def check(layouts: list[str], config: Config, kinds: str, nodes: int = 1) -> list[FaultKind]:
    """Refuse layouts that the run cannot have, and unknown kinds; returns the kinds."""
    refuse_servers(config, "shoal chaos")
    problems = []
    for text in layouts:
        try:
            resolve(config.model_copy(update={"layout": str(Layout.parse(text))}))
        except BadInput as error:
            problems += [
                Problem(f"--layouts: {text}: {problem.what}", problem.fix) for problem in error.problems
            ]
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    for name in names:
        if name not in BY_NAME:
            problems.append(Problem(f"--kinds: there is no {name!r}", ", ".join(BY_NAME)))
        elif BY_NAME[name].least_nodes > nodes:
            problems.append(Problem(f"--kinds: {name} needs several nodes", "--nodes 2"))
        elif nodes > 1 and BY_NAME[name].target == "network":
            problems.append(Problem(f"--kinds: {name} needs a single node", "leave out --nodes"))
    if nodes < 1 or (not problems and all(Layout.parse(text).world % nodes for text in layouts)):
        problems.append(
            Problem(f"--nodes {nodes}: no layout has the same number of ranks on every node", "--nodes 2")
        )
    if problems:
        raise BadInput(problems)
    chosen = [BY_NAME[name] for name in names] or list(KINDS)
    if any(kind.target == "network" for kind in chosen) and not network.possible():
        if names:
            raise BadInput("--kinds: cutting the network needs root and Linux namespaces", "other kinds")
        chosen = [kind for kind in chosen if kind.target != "network"]
    # Launchers in separate networks could not connect.
    return [kind for kind in chosen if kind.least_nodes <= nodes and (nodes == 1 or kind.target != "network")]


def prove(
    config: Path | None,
    settings: list[str],
    layouts: list[str],
    folder: Path,
    seed: int,
    faults: int,
    kinds: list[FaultKind],
    nodes: int,
    say: Callable[[str], None],
    tell: Callable[[InjectedFault], None],
) -> ChaosVerdict:
    """Run without faults, then with them, and compare. Everything is left in ``folder``, even on failure."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    reference, run = RunDirectory(folder / "reference"), RunDirectory(folder / "run")
    say("the run without faults")
    _run_without_faults(config, settings, layouts[0], reference.path)
    plan = schedule(seed, faults, [Layout.parse(layout).world for layout in layouts], kinds, nodes)
    say(f"{faults} faults of {len({one.kind for one in plan})} kinds or more, in {'; '.join(layouts)}")
    own_network = any(one.kind.target == "network" for one in plan)
    campaign = Campaign(CampaignSettings(config, settings, layouts, run.path, own_network, nodes), tell)
    try:
        campaign.carry_out(plan)
    finally:
        record(folder / "faults.jsonl", campaign.struck)
    return judge(run, reference, campaign.struck, time.monotonic() - began)


def judge(
    run: RunDirectory, reference: RunDirectory, struck: list[InjectedFault], seconds: float
) -> ChaosVerdict:
    """Compare the two runs' directories."""
    from shoal.facts.config.file import load

    config = load(run.config, [], None).config
    rows = read_rows(run.metrics)
    data = Collection.open(Path(json.loads(run.manifest.read_text())["data"]))
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.end_token)
    proof = prove_ledger(run.ledger, rows, open_loader(config, data, tokenizer))
    strict = config.run.strict
    return ChaosVerdict(
        tuple(struck),
        strict,
        difference(run, reference, strict),
        weights_differ(run, reference, strict),
        proof,
        steps_lost(struck),
        seconds,
    )


def record(path: Path, struck: list[InjectedFault]) -> None:
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in struck))


def _run_without_faults(config: Path | None, settings: list[str], layout: str, run: Path) -> None:
    """Run the same command that users have."""
    shutil.rmtree(run, ignore_errors=True)
    overrides = [part for setting in [*settings, *UNHURRIED] for part in ("--set", setting)]
    command = [sys.executable, "-m", "shoal", "train", *([str(config)] if config else [])]
    done = subprocess.run(
        [*command, *overrides, "--layout", layout, "--run", str(run)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Broken(f"the run without faults failed: {(done.stderr or done.stdout).strip()[-500:]}")
