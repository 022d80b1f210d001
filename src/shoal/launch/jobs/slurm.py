"""Slurm: one batch file, one launcher per node. Slurm places, queues and requeues; Shoal continues the run."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from shoal.facts.config import Config
from shoal.facts.input.untrusted_files import parse_toml
from shoal.facts.problem import BadInput, closest
from shoal.launch.jobs import state
from shoal.launch.jobs.follow import last_lines
from shoal.launch.jobs.job import CANCELLED, CONFIG, EXIT, LaunchJob
from shoal.launch.jobs.record import JobRecord
from shoal.launch.jobs.state import JobState
from shoal.launch.jobs.targets import ask, last_words
from shoal.launch.report import STOPPED
from shoal.launch.track.tracking import END_SECONDS, trackers_of

SCRIPT, LOG, FRUITLESS_FILE = "job.sbatch", "slurm.log", "fruitless"
MISSING = "run it where Slurm's commands are; --dry-run shows the job anywhere"
# How long launchers may continue after one has ended without a message: they wait for it in vain.
LEFT_SECONDS = 60
# How often in a row a job is requeued without progress: whatever ends it each time would end it again.
FRUITLESS = 10
# Slurm's exit code when a node could not open the job's output file.
NO_LOG = "0:53"
# The run directory is shared, so launchers connect through it, and any of them may lead. srun's task variables, and a
# user's MASTER_ADDR, would make them connect elsewhere.
LEFT_OUT = "SLURM_PROCID MASTER_ADDR MASTER_PORT"
# Slurm's variables for a job's processes, and those among them that configure Slurm itself.
OF_A_JOB, KEPT = ("SLURM_", "SLURMD_"), ("SLURM_CONF", "SLURM_CLUSTERS")
# Slurm's message for a job it has forgotten. Other messages mean something else.
FORGOTTEN = "Invalid job id"
# Slurm's names for a job's states. A completing job still has processes.
STATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"), state.PENDING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"), state.RUNNING),
    "COMPLETED": state.FINISHED,
    "CANCELLED": state.CANCELLED,
}


def write(job: LaunchJob) -> dict[str, str]:
    return {SCRIPT: script(job)}


def script(job: LaunchJob) -> str:
    """The batch file. Its shell runs on the first node and starts every launcher as a task of one step."""
    folder, run = str(job.folder), str(job.run)
    lines = [f"#SBATCH {shlex.quote(line)}" for line in _directives(job)]
    train = shlex.join(job.train(f"{folder}/{CONFIG}", run))
    step = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", *_each_node(job)]
    heartbeat = shlex.quote(f"{run}/heartbeat")
    return f"""#!/bin/bash
{chr(10).join(lines)}
# Written by shoal launch. One launcher per node; each starts the ranks of its node.
set -u
folder={shlex.quote(folder)}
restarts=${{SLURM_RESTART_COUNT:-0}}
rm -f "$folder/{EXIT}"
launchers= early=
# Before the time limit: srun passes it on, launchers finish the step, commit and exit with {STOPPED}.
trap 'early=1; [ -z "$launchers" ] || kill -USR1 "$launchers" 2> /dev/null' USR1

# A directory that is not shared would have every node lead a run of its own.
seen="$folder/seen-$SLURM_JOB_ID-$restarts"
touch "$seen"
if ! srun --ntasks-per-node=1 bash -c 'for try in 1 2 3 4 5; do [ -e "$0" ] && exit 0; sleep 1; done
    echo "error: node $(hostname) does not see $0: the run directory is not shared; fix: --run on a shared file system"
    exit 2' "$seen"; then
    echo "$SLURM_JOB_ID 2" > "$folder/{EXIT}"
    exit 2
fi
rm -f "$seen"

{shlex.join(step)} \\
    bash -c {shlex.quote(f'unset {LEFT_OUT}; exec {train} --node "$SLURMD_NODENAME"')} &
launchers=$!
[ -z "$early" ] || kill -USR1 "$launchers"
while true; do
    wait "$launchers"
    code=$?
    kill -0 "$launchers" 2> /dev/null || break
done

# {STOPPED}: stopped after a commit. Above 128: a launcher was lost to a signal. Anything else would end the same again.
# A job that is cancelled meanwhile is no longer running, and is not to come back.
if [ "$code" -eq {STOPPED} ] || [ "$code" -gt 128 ]; then
    # Whatever kills launchers before they have done a step more would do it a thousand times.
    step=$(cat {heartbeat} 2> /dev/null || echo 0)
    read -r of before times 2> /dev/null < "$folder/{FRUITLESS_FILE}" || of=
    [ "$of" = "$SLURM_JOB_ID" ] && [ "$before" = "$step" ] && times=$((times + 1)) || times=0
    echo "$SLURM_JOB_ID $step $times" > "$folder/{FRUITLESS_FILE}"
    if [ "$times" -ge {FRUITLESS} ]; then
        echo "exit $code: not back into the queue: {FRUITLESS} restarts in a row without a step beyond $step"
    elif [ "$(cat "$folder/{CANCELLED}" 2> /dev/null)" != "$SLURM_JOB_ID" ] \\
            && [ "$restarts" -lt {job.restarts} ] \\
            && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
        echo "exit $code: back into the queue, restart $((restarts + 1))"
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    fi
fi
echo "$SLURM_JOB_ID $code" > "$folder/{EXIT}"
exit "$code"
"""


def _directives(job: LaunchJob) -> list[str]:
    """The #SBATCH directives, one per line."""
    log = str(job.folder / LOG).replace("%", "%%")
    found = [f"--job-name={job.name}", f"--nodes={job.count.most}", "--ntasks-per-node=1"]
    found += [f"--gpus-per-node={job.devices}"] if job.on_gpus else []
    found += ["--exclusive", "--mem=0"] if job.whole_nodes else []
    found += [f"--cpus-per-task={cpus}"] if (cpus := _cpus(job)) else []
    found += [f"--time={_clock(job.time_limit)}"] if job.time_limit else []
    for name in ("partition", "account", "exclude"):
        found += [f"--{name}={value}"] if (value := getattr(job, name)) else []
    found += [f"--chdir={job.working_directory}", f"--output={log}", "--open-mode=append", "--requeue"]
    # With fewer nodes than requested the run continues, in another layout.
    found += ["--no-kill"] if job.count.least < job.count.most else []
    found += [f"--signal=B:USR1@{job.warning}", *job.options]
    if bad := [line for line in found if re.search(r"[\0\r\n]", line) or not line.startswith("-")]:
        raise BadInput(f"{bad[0]!r} is no option of sbatch", "--option=--reservation=NAME, one each")
    return found


def _config(job: LaunchJob) -> Config:
    return Config.model_validate(parse_toml(job.config))


def _patience(job: LaunchJob) -> int:
    """The leader may be alone at the end: it sends trackers the last steps when the others have ended."""
    return LEFT_SECONDS + (int(END_SECONDS) if trackers_of(_config(job).track) else 0)


def _cpus(job: LaunchJob) -> int | None:
    """Cores per node: on CPUs one per rank; if we get whole nodes, all of them."""
    return job.cpus or (None if job.on_gpus else job.devices)


def _each_node(job: LaunchJob) -> list[str]:
    found = [f"--cpus-per-task={cpus}"] if (cpus := _cpus(job)) else []
    # If fewer nodes are allowed, the remaining launchers continue; otherwise they would wait for the lost one in vain.
    found += ["--no-kill", "--wait=0"] if job.count.least < job.count.most else [f"--wait={_patience(job)}"]
    if job.image:
        mounts = ",".join([f"{job.run}:{job.run}", *job.mounts])
        found += [f"--container-image={job.image}", f"--container-mounts={mounts}"]
    return found


def _clock(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:{rest:02d}"


def check(job: LaunchJob) -> str:
    """``sbatch --test-only``: whether Slurm accepts the file, and when it would start."""
    if job.image and "--container-image" not in ask(["srun", "--help"], MISSING).stdout:
        raise BadInput("--image: this Slurm has no pyxis, so no containers", "leave it out, or ask for pyxis")
    done = ask(["sbatch", "--test-only"], MISSING, script(job), _environment())
    if done.returncode == 0:
        return last_words(done)
    said = last_words(done)
    if "partition" in said.lower():
        known = ask(["sinfo", "--noheader", "--format=%R"], MISSING).stdout.split()
        meant = closest(job.partition or "", known)
        fix = f"--partition {meant}" if meant else f"there are: {', '.join(sorted(set(known))) or 'none'}"
        raise BadInput(f"--partition {job.partition}: Slurm has no such partition", fix)
    wants = f"{job.count.most} nodes of {job.devices} {job.device if job.on_gpus else 'cores'}"
    raise BadInput(f"Slurm does not take the job ({wants}): {said}", "sinfo says what there is")


def submit(job: LaunchJob) -> str:
    done = ask(["sbatch", "--parsable", str(job.folder / SCRIPT)], MISSING, environment=_environment())
    if done.returncode:
        raise BadInput(f"sbatch refused {job.folder / SCRIPT}: {last_words(done)}", "see sbatch's manual")
    return done.stdout.strip().partition(";")[0]


def _environment() -> dict[str, str]:
    """The environment the job inherits. If submitted from within a job, that job's size must not leak: srun would
    use it, or refuse because two sizes differ.
    """
    mine = dict(os.environ)
    inside = "SLURM_JOB_ID" in mine
    return {name: word for name, word in mine.items() if not (inside and name.startswith(OF_A_JOB))} | {
        name: mine[name] for name in KEPT if name in mine
    }


def by_hand(job: LaunchJob) -> str:
    return shlex.join(["sbatch", str(job.folder / SCRIPT)])


def status(record: JobRecord) -> JobState:
    """From the controller, as long as it remembers the job; afterwards, from what the job recorded."""
    done = ask(["scontrol", "--oneliner", "show", "job", record.id], MISSING)
    if done.returncode and FORGOTTEN not in done.stderr:
        raise BadInput(f"Slurm says nothing of job {record.id}: {last_words(done)}", "ask again")
    facts = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
    word = facts.get("JobState", "")
    code, restarts = record.exit_code, int(facts.get("Restarts", "0"))
    known = STATES.get(word, state.FAILED) if word else state.UNKNOWN
    if code is not None and known in state.OVER:
        known = state.ended(code, record.asked_to_end)
    detail = f"{word} {'' if facts.get('Reason') in (None, 'None') else facts['Reason']}".strip()
    if facts.get("ExitCode") == NO_LOG:
        detail += f"; its node cannot write to {record.job.folder}: is the run directory shared?"
    nodes = facts.get("NodeList", "").replace("(null)", "")
    return JobState(known, detail or "Slurm no longer knows it", nodes, restarts, code)


def logs(record: JobRecord, lines: int) -> str:
    return last_lines(record.job.folder / LOG, lines)


def log_file(record: JobRecord) -> Path:
    return record.job.folder / LOG


def cancel(record: JobRecord, now: bool) -> str:
    found = status(record)
    if found.over:
        raise BadInput(f"job {record.id} is over: {found.state}", "nothing to cancel")
    record.note_cancelled()
    if now or found.state == state.PENDING:
        words, told = ["scancel", record.id], f"cancelled job {record.id}"
    else:
        words = ["scancel", "--batch", "--signal=USR1", record.id]
        told = f"job {record.id} finishes its step, commits and ends"
    done = ask(words, MISSING)
    if done.returncode:
        raise BadInput(f"scancel: {last_words(done)}", f"shoal status {record.run}")
    return told
