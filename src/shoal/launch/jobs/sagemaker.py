"""SageMaker: a CreateTrainingJob request that runs Shoal, and the same for SDK 3.

There is no shared directory: nodes connect to the first host, and checkpoints are in the bucket (``checkpoint.to``).
"""

from __future__ import annotations

import json
import pprint
import re
import shlex
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.facts.cluster import clouds
from shoal.facts.config import Config
from shoal.facts.config import file as configfile
from shoal.facts.input.untrusted_files import parse_toml
from shoal.facts.problem import BadInput, first_line
from shoal.launch.jobs import state
from shoal.launch.jobs.job import CONFIG, LaunchJob
from shoal.launch.jobs.record import JobRecord
from shoal.launch.jobs.state import JobState
from shoal.plan.export.sagemaker import INSTANCES

REQUEST, SDK, PROGRAM = "request.json", "sagemaker_job.py", "train.sh"
MISSING = "pip install boto3; --dry-run shows the request anywhere"
# SageMaker's longest job without a quota increase; its maximum of retries; the volume size.
LONGEST, MOST_RETRIES, VOLUME_GB = 5 * 86400, 30, 500
PORT = 29500
CHECKPOINTS = "/opt/ml/checkpoints"
# Placeholders for a role, bucket or image that was not named: shown in a dry run, refused by --submit.
ROLE, BUCKET = "arn:aws:iam::123456789012:role/your-role", "s3://your-bucket/shoal"
# SageMaker's names for a job's states.
STATES = {
    "InProgress": state.RUNNING,
    "Stopping": state.RUNNING,
    "Completed": state.FINISHED,
    "Failed": state.FAILED,
    "Stopped": state.STOPPED,
}


def write(job: LaunchJob) -> dict[str, str]:
    return {
        REQUEST: json.dumps(request(job), indent=2) + "\n",
        PROGRAM: program(job),
        SDK: sdk_script(job),
        CONFIG: config_there(job),
    }


def instance_of(job: LaunchJob) -> str:
    """The instance type: what ``cluster.on`` names, or the one with eight of its devices."""
    said = str(parse_toml(job.config)["cluster"]["on"])
    name = said.partition("@")[0].strip().lower().rpartition("ml.")[2] or said
    name = re.sub(r"^\d+x", "", name)
    found = clouds.find(name)
    if found is None and job.devices == 8 and job.device in INSTANCES:
        return INSTANCES[job.device]
    if found is None or not name.partition(".")[2]:
        known = ", ".join(sorted(INSTANCES.values()))
        raise BadInput(
            f"cluster.on = {said}: no instance of SageMaker",
            f"2xml.p5.48xlarge, say; with eight GPUs: {known}",
        )
    if found.devices != job.devices:
        raise BadInput(
            f"layout {job.layout}: {job.devices} ranks on each instance, and an ml.{name} has {found.devices} devices",
            f"a layout of {found.devices * job.count.most} ranks",
        )
    return f"ml.{name}"


def config_there(job: LaunchJob) -> str:
    """The config, with checkpoints in the bucket unless another place is named: an instance's disk is lost with it."""
    config = Config.model_validate(parse_toml(job.config))
    if config.checkpoint.to is not None:
        return job.config
    kept = config.checkpoint.model_copy(update={"to": f"{_bucket(job)}/checkpoints"})
    return configfile.write(config.model_copy(update={"checkpoint": kept}))


def program(job: LaunchJob) -> str:
    """What each instance runs, in a container that has Shoal."""
    meet = f" --meet algo-1:{PORT}" if job.count.most > 1 else ""
    train = shlex.join(["shoal", "train", "--nodes", job.nodes])
    return f"""#!/bin/bash
# Written by shoal launch. One launcher per instance; each starts the ranks of its instance.
here=$(dirname "$0")
host=$(python -c 'import json; print(json.load(open("/opt/ml/input/config/resourceconfig.json"))["current_host"])')
# SageMaker's own collectives, where the container has them.
backend=()
python -c 'import smdistributed.dataparallel.torch.torch_smddp' 2> /dev/null && backend=(--set cluster.backend=smddp)
# A folder for each instance: all of them go to the same place in the bucket.
run={CHECKPOINTS}/$host/{shlex.quote(job.name)}
exec {train} --node "$host"{meet} --run "$run" "${{backend[@]}}" "$here/{CONFIG}"
"""


def request(job: LaunchJob) -> dict[str, Any]:
    """The CreateTrainingJob request, as boto3 and the command line accept it."""
    bucket = _bucket(job)
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"{bucket}/{job.name}/job/",
        "S3DataDistributionType": "FullyReplicated",
    }
    return {
        "TrainingJobName": _name(job),
        "RoleArn": job.role or ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": _image(job),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", f"/opt/ml/input/data/config/{PROGRAM}"],
        },
        "InputDataConfig": [{"ChannelName": "config", "DataSource": {"S3DataSource": source}}],
        "OutputDataConfig": {"S3OutputPath": f"{bucket}/{job.name}/output"},
        "ResourceConfig": {
            "InstanceType": instance_of(job),
            "InstanceCount": job.count.most,
            "VolumeSizeInGB": VOLUME_GB,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": job.time_limit or LONGEST},
        # The run's metrics and logs, for the next job that resumes it.
        "CheckpointConfig": {"S3Uri": f"{bucket}/{job.name}/run", "LocalPath": CHECKPOINTS},
        "RetryStrategy": {"MaximumRetryAttempts": max(1, min(job.restarts, MOST_RETRIES))},
        "Tags": [{"Key": "shoal", "Value": __version__}],
    }


def sdk_script(job: LaunchJob) -> str:
    """The same with SDK 3, which uploads this directory itself."""
    asked = request(job)
    compute = {"instance_type": asked["ResourceConfig"]["InstanceType"], "instance_count": job.count.most}
    return f'''"""SageMaker SDK 3: {job.name} in {job.layout}. Run it in the folder where it was written."""

from pathlib import Path

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import CheckpointConfig, Compute, OutputDataConfig, SourceCode, StoppingCondition

compute = {pprint.pformat({**compute, "volume_size_in_gb": VOLUME_GB}, sort_dicts=False)}


def trainer() -> ModelTrainer:
    return ModelTrainer(
        base_job_name={_name(job)!r},
        training_image={_image(job)!r},
        role={asked["RoleArn"]!r},
        source_code=SourceCode(source_dir=str(Path(__file__).parent), command="bash {PROGRAM}"),
        compute=Compute(**compute),
        stopping_condition=StoppingCondition(max_runtime_in_seconds={job.time_limit or LONGEST}),
        output_data_config=OutputDataConfig(s3_output_path={asked["OutputDataConfig"]["S3OutputPath"]!r}),
        checkpoint_config=CheckpointConfig(s3_uri={asked["CheckpointConfig"]["S3Uri"]!r}, local_path="{CHECKPOINTS}"),
    )


if __name__ == "__main__":
    trainer().train()
'''


def _bucket(job: LaunchJob) -> str:
    return (job.bucket or BUCKET).rstrip("/")


def _image(job: LaunchJob) -> str:
    return job.image or f"123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:{__version__}"


def _name(job: LaunchJob) -> str:
    letters = re.sub(r"[^a-zA-Z0-9]+", "-", job.name).strip("-")[:40].strip("-")
    return letters or "shoal"


def check(job: LaunchJob) -> str:
    """Validate the request with boto3, without contacting AWS."""
    for flag in ("role", "bucket", "image"):
        if getattr(job, flag) is None:
            example = {"role": ROLE, "bucket": BUCKET, "image": _image(job)}[flag]
            raise BadInput(f"SageMaker needs --{flag}", f"--{flag} {example}")
    validate(request(job))
    return f"a valid request for {job.count.most} x {instance_of(job)}"


def validate(asked: dict[str, Any]) -> None:
    """Validate against botocore's model of the service: names, types, lengths, and patterns, which botocore leaves
    to AWS.
    """
    if find_spec("botocore") is None:
        raise BadInput("botocore is not installed here", MISSING)
    from botocore.validate import ParamValidator

    shape = _shape()
    found = ParamValidator().validate(asked, shape).generate_report().splitlines() or _strange(asked, shape)
    if found:
        raise BadInput(f"SageMaker's request: {'; '.join(found)}", "the flag or the config that says so")


@cache
def _shape() -> Any:
    """The parameters of CreateTrainingJob, as botocore knows them."""
    import botocore.session

    service = botocore.session.get_session().get_service_model("sagemaker")
    return service.operation_model("CreateTrainingJob").input_shape


def _strange(value: Any, shape: Any, where: str = "") -> list[str]:
    """Values that are not in an enumeration or do not match the service's pattern."""
    if shape.type_name == "structure":
        inside = [
            (inner, shape.members[name], f"{where}.{name}".lstrip(".")) for name, inner in value.items()
        ]
        return [line for one in inside for line in _strange(*one)]
    if shape.type_name == "list":
        return [line for inner in value for line in _strange(inner, shape.member, where)]
    if shape.type_name != "string":
        return []
    if shape.enum:
        return [] if value in shape.enum else [f"{where}: {value!r} is not one that it knows"]
    try:
        fits = re.fullmatch(shape.metadata.get("pattern", ".*"), value, re.DOTALL)
    except re.error:  # a Java pattern, with character classes that Python lacks
        return []
    return [] if fits else [f"{where}: {value!r} does not fit"]


def _client() -> Any:
    if find_spec("boto3") is None:
        raise BadInput("boto3 is not installed here", MISSING)
    import boto3

    return boto3


def _asked(call: Any, **words: Any) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(**words)
    except (BotoCoreError, ClientError) as error:
        raise BadInput(f"AWS: {first_line(error)}", "aws configure; is the role allowed to?") from None


def submit(job: LaunchJob) -> str:
    boto3 = _client()
    bucket, _, prefix = _bucket(job).removeprefix("s3://").partition("/")
    files = boto3.client("s3")
    for name in (CONFIG, PROGRAM):
        key = f"{prefix}/{job.name}/job/{name}".lstrip("/")
        _asked(files.put_object, Bucket=bucket, Key=key, Body=(job.folder / name).read_bytes())
    # A name can be used once per account.
    asked = request(job) | {
        "TrainingJobName": f"{_name(job)}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    }
    _asked(boto3.client("sagemaker").create_training_job, **asked)
    return str(asked["TrainingJobName"])


def by_hand(job: LaunchJob) -> str:
    where = shlex.quote(f"{_bucket(job)}/{job.name}/job/")
    copied = f"aws s3 cp --recursive {shlex.quote(str(job.folder))} {where}"
    return f"{copied} && aws sagemaker create-training-job --cli-input-json file://{job.folder / REQUEST}"


def status(record: JobRecord) -> JobState:
    told = _asked(_client().client("sagemaker").describe_training_job, TrainingJobName=record.id)
    known = STATES.get(told["TrainingJobStatus"], state.UNKNOWN)
    if known == state.STOPPED and record.asked_to_end:
        known = state.CANCELLED
    nodes = f"{record.job.count.most} x {instance_of(record.job)}"
    return JobState(known, told.get("FailureReason") or told.get("SecondaryStatus", ""), nodes)


def logs(record: JobRecord, lines: int) -> str:
    streams = _client().client("logs")
    group = "/aws/sagemaker/TrainingJobs"
    found = _asked(
        streams.filter_log_events, logGroupName=group, logStreamNamePrefix=f"{record.id}/", limit=10_000
    )
    return "\n".join(event["message"].rstrip() for event in found["events"][-lines:])


def log_file(record: JobRecord) -> Path | None:
    return None


def cancel(record: JobRecord, now: bool) -> str:
    """SageMaker sends SIGTERM and kills after two minutes; there is no other way."""
    record.note_cancelled()
    _asked(_client().client("sagemaker").stop_training_job, TrainingJobName=record.id)
    return f"{record.id} finishes its step, commits and ends"
