"""``python -m shoal.launch.jobs.ray_driver JOB.json``: place launchers on Ray's nodes, and replace lost ones.

If a node is removed, its launcher is restarted where Ray finds another node; the others wait for it, or continue
without it (``--nodes 1:2``), as everywhere ([nodes](docs/nodes.md)). The driver decides nothing about the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shoal import __version__
from shoal.facts.problem import BadInput
from shoal.launch.jobs.job import CONFIG, LaunchJob
from shoal.launch.jobs.ray import bundle, connect, excluded
from shoal.launch.report import FAILED, STOPPED
from shoal.launch.signals import STOP_SIGNALS, stoppable
from shoal.train.files import OWNER_ONLY

# Seconds between two looks at the launchers.
LOOK_SECONDS = 1.0
# How long launchers may take to end once one has: the run is over for all.
END_SECONDS = 60.0


class NodeLauncher:
    """An actor that holds a node's devices and runs its launcher, in a process that ends with it."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def version(self) -> str:
        return __version__

    def run(self, words: Sequence[str], place: str, index: int) -> int:
        """Run the launcher to its end; returns its exit code."""
        import ray

        node = f"ray-{index}-{ray.get_runtime_context().get_node_id()[:8]}"
        os.umask(OWNER_ONLY)
        tied = [sys.executable, "-m", "shoal.launch.jobs.tied", str(os.getpid()), *words, "--node", node]
        with Path(self.log).open("ab") as log:
            self.process = subprocess.Popen(
                tied, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=place, start_new_session=True
            )
        return self.process.wait()

    def stop(self) -> None:
        """Stop after the step, with a commit."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


def drive(job: LaunchJob, log: str) -> int:
    """Place the launchers and wait; returns the run's exit code."""
    ray = connect(job)
    try:
        restarts = 0
        while True:
            driver = _Attempt(ray, job, log)
            with stoppable(driver.on_signal, STOP_SIGNALS):
                code = driver.to_end()
            # Stopped from outside: a launcher was told that its node goes away.
            if code != STOPPED or driver.asked or restarts >= job.restarts:
                return code
            restarts += 1
            print(f"exit {code}: starting again, restart {restarts}", flush=True)
    finally:
        ray.shutdown()


class _Attempt:
    """One placement group and its launchers."""

    def __init__(self, ray: Any, job: LaunchJob, log: str) -> None:
        from ray.util.placement_group import placement_group

        self.ray, self.job, self.log = ray, job, log
        self.asked, self.lost = False, 0
        # Strict spread: two launchers on one node would share its devices and memory.
        count, out = job.count.most, excluded(ray, job)
        where = [{"ray.io/node-id": f"!in({','.join(out)})"}] * count if out else None
        more = {"bundle_label_selector": where} if where else {}
        self.group = placement_group([bundle(job)] * count, strategy="STRICT_SPREAD", **more)
        self.actors: list[Any] = []

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        self.asked = True

    def to_end(self) -> int:
        from ray.util.placement_group import remove_placement_group

        try:
            if not self._placed():
                return STOPPED
            self.actors = [self._actor(index) for index in range(self.job.count.most)]
            self._check_versions()
            return self._watch()
        finally:
            for actor in self.actors:
                self.ray.kill(actor)
            remove_placement_group(self.group)

    def _placed(self) -> bool:
        """Wait for the nodes; False if the user has given up."""
        print(f"waiting for {self.job.count.most} nodes with {bundle(self.job)}", flush=True)
        ready = self.group.ready()
        while not self.asked:
            if self.ray.wait([ready], timeout=LOOK_SECONDS)[0]:
                return True
        return False

    def _actor(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        held = bundle(self.job)
        options = {
            "num_cpus": held["CPU"],
            "num_gpus": held.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, index),
            "max_restarts": -1,  # after losing its node: on the next one that Ray finds for the bundle
            "max_concurrency": 2,  # so that it can be stopped while it runs
        }
        return self.ray.remote(NodeLauncher).options(**options).remote(self.log)

    def _check_versions(self) -> None:
        for index, found in enumerate(self.ray.get([actor.version.remote() for actor in self.actors])):
            if found != __version__:
                raise BadInput(
                    f"node {index} has Shoal {found}, this machine {__version__}", "the same everywhere"
                )

    def _begin(self, index: int) -> Any:
        words = self.job.train(str(self.job.folder / CONFIG), str(self.job.run))
        return self.actors[index].run.remote(words, str(self.job.working_directory), index)

    def _watch(self) -> int:
        """Wait for the end of the run. All launchers end with the same exit code, so the first one decides."""
        running = {self._begin(index): index for index in range(len(self.actors))}
        codes: list[int] = []
        deadline, told = float("inf"), False
        while running and time.monotonic() < deadline:
            done, _ = self.ray.wait(list(running), timeout=LOOK_SECONDS)
            if self.asked and not told:
                told = True
                for actor in self.actors:
                    actor.stop.remote()
            for one in done:
                index = running.pop(one)
                if (code := self._code(one)) is not None:
                    codes.append(code)
                    deadline = min(deadline, time.monotonic() + END_SECONDS)
                    continue
                self.lost += 1
                print(f"launcher {index} is lost, with its node or alone", flush=True)
                if not codes and not self.asked and self.lost <= self.job.restarts:
                    running[self._begin(index)] = index
        return max(codes, default=STOPPED if self.asked else FAILED)

    def _code(self, ended: Any) -> int | None:
        """None: the launcher reported no code because its node was lost, or it was killed."""
        try:
            code: int = self.ray.get(ended)
        except self.ray.exceptions.RayActorError:
            return None
        return code if code >= 0 else None


def main() -> int:
    job = LaunchJob.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        return drive(job, str(job.folder / "ray.log"))
    except BadInput as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
