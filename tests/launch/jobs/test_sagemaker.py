"""SageMaker's requests against botocore's own model of the service; a job's life with boto3 against moto."""

from __future__ import annotations

import copy
import json
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Capture, shoal_
from tests.launch.jobs.test_kubernetes import keys

from shoal.facts.problem import BadInput
from shoal.launch.jobs.sagemaker import validate

pytestmark = pytest.mark.system
pytest.importorskip("boto3", reason="pip install -e '.[system]'")
WORDS = ["launch", "--to", "sagemaker", "--layout", "fsdp=16", "--set", "run.name=my run"]
ON = ["--set", "cluster.on=2xml.p5.48xlarge"]
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:1"
PLACE = ["--role", "arn:aws:iam::123456789012:role/train", "--bucket", "s3://mine/runs", "--image", IMAGE]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def written(capsys: Capture) -> dict[str, str]:
    code, out, err = shoal_(capsys, *WORDS, *ON, *PLACE, "--dry-run", "--json")
    assert (code, err) == (0, "")
    files: dict[str, str] = json.loads(out)["files"]
    return files


def test_the_request_is_valid_and_no_typo_is(written: dict[str, str]) -> None:
    request = json.loads(written["request.json"])
    validate(request)
    for *path, name in keys(request):
        wrong = copy.deepcopy(request)
        inner = wrong
        for step in path:
            inner = inner[step]
        inner[f"{name}x"] = inner.pop(name)
        with pytest.raises(BadInput, match=r"SageMaker's request: "):
            validate(wrong)
    for section, name, value in (
        ("ResourceConfig", "InstanceType", "ml.p5.49xlarge"),
        ("ResourceConfig", "InstanceCount", "2"),
        ("OutputDataConfig", "S3OutputPath", "mine/runs"),
    ):
        wrong = copy.deepcopy(request)
        wrong[section][name] = value
        with pytest.raises(BadInput, match=name):
            validate(wrong)


def test_every_instance_is_a_launcher(written: dict[str, str]) -> None:
    request = json.loads(written["request.json"])
    assert request["ResourceConfig"] | {"VolumeSizeInGB": 0} == {
        "InstanceType": "ml.p5.48xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 0,
    }
    program = written["train.sh"]
    subprocess.run(["bash", "-n"], input=program, text=True, check=True)
    assert '--nodes 2 --node "$host" --meet algo-1:' in program and "cluster.backend=smddp" in program
    # All instances put theirs into the same folder of the bucket.
    assert "run=/opt/ml/checkpoints/$host/my-run" in program and '--run "$run"' in program
    config = tomllib.loads(written["config.toml"])
    assert config["checkpoint"]["to"] == "s3://mine/runs/checkpoints" and config["layout"] == "fsdp=16"
    compile(written["sagemaker_job.py"], "sagemaker_job.py", "exec")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*ON], "SageMaker needs --role"),
        (
            [*ON, "--role", "arn:aws:iam::12:role/train", *PLACE[2:]],
            "RoleArn: 'arn:aws:iam::12:role/train' does not fit",
        ),
        (["--set", "cluster.on=2x8xL4", *PLACE], "no instance of SageMaker"),
        ([*ON, "--nodes", "4", *PLACE], "4 ranks on each instance, and an ml.p5.48xlarge has 8 devices"),
    ],
)
def test_what_sagemaker_does_not_take_is_one_line(
    words: list[str], said: str, capsys: Capture, tmp_path: Path
) -> None:
    code, _, err = shoal_(capsys, *WORDS, *words, "--submit")
    assert code == 2 and said in err and len(err.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    moto = pytest.importorskip("moto", reason="pip install -e '.[system]'")
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        boto3.client("s3").create_bucket(Bucket="mine")
        yield boto3


def test_a_job_is_sent_watched_and_stopped(aws: Any, capsys: Capture, tmp_path: Path) -> None:
    code, _, err = shoal_(capsys, *WORDS, *ON, *PLACE, "--submit", "--no-follow")
    assert code == 0, err
    record = json.loads((tmp_path / "runs" / "my-run" / "job.json").read_text())
    job = aws.client("sagemaker").describe_training_job(TrainingJobName=record["id"])
    assert job["ResourceConfig"]["InstanceCount"] == 2
    body = aws.client("s3").get_object(Bucket="mine", Key="runs/my-run/job/config.toml")["Body"].read()
    assert tomllib.loads(body.decode())["layout"] == "fsdp=16"
    _, out, _ = shoal_(capsys, "status", "runs/my-run", "--json")
    told = json.loads(out)
    assert (told["target"], told["id"], told["nodes"]) == ("sagemaker", record["id"], "2 x ml.p5.48xlarge")
    assert told["state"] in ("running", "finished")  # moto's jobs are soon done
