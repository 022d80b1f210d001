"""Numbers beyond all machines, in any place where one may be written: one message, at once, and exit 2."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shoal.cli.main import main

SECONDS = 10  # of this process; each of these took minutes, or ended in a traceback
PLAN = ("plan", "tiny", "--seq", "128", "--batch", "16")
Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *words: str) -> None:
    began = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert time.process_time() - began < SECONDS
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), (words, err)
    assert err.startswith("error: ") and "Traceback" not in err and len(err) < 20_000


HUGE = 10**18 + 1
CLUSTERS = [
    *(f'device = "H100"\n{key} = {HUGE}' for key in ("nodes", "devices_per_node", "fast_domain")),
    *(f'device = "H100"\nnodes = {value}' for value in ("true", "1.5", "inf", "-1", "9" * 5000)),
    *(f'device = "H100"\nhost_memory = {value}' for value in ("1e308", "1" + "0" * 400, "-1")),
    *(
        f'device = "H100"\n[{link}]\nbandwidth = {value}'
        for link in ("fast", "network")
        for value in ("inf", "1e-308")
    ),
    *(f'device = "H100"\n[network]\nlatency = {value}' for value in ("nan", "1e308", "-1")),
    *(f'[device]\nname = "x"\nmemory_bytes = {value}' for value in ("1e308", "1" + "0" * 300, "0")),
    *(
        f'[device]\nname = "x"\nmemory_bytes = 80e9\n{line}'
        for line in (
            "peaks = {bf16 = 1e-308}",
            "peaks = {bf16 = 1e308}",
            "memory_bandwidth = 1e-308",
            "power = inf",
        )
    ),
]


@pytest.mark.parametrize("text", CLUSTERS, ids=range(len(CLUSTERS)))
def test_a_cluster(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    refused(capsys, *PLAN, "--on", str(path))


@pytest.mark.parametrize("on", ["99999999999xH100", "9" * 5000 + "xH100", "99999999x99999999xH100", "0xH100"])
def test_a_cluster_in_words(on: str, capsys: Capture) -> None:
    refused(capsys, *PLAN, "--on", on)


@pytest.mark.parametrize(
    "flags",
    [
        ("--lora", str(HUGE)),
        ("--layout", f"dp={HUGE}"),
        ("--layout", "dp=" + "9" * 5000),
        ("--layout", f"pp=8,schedule=interleaved,chunks={HUGE}"),
        ("--tokens", "9" * 31),
        ("--price", "inf", "--tokens", "1T"),
    ],
)
def test_a_plan(flags: tuple[str, ...], capsys: Capture) -> None:
    refused(capsys, *PLAN, "--on", "8xH100", *flags)


@pytest.mark.parametrize(
    ("layout", "count"), [("pp=100000", 8), ("pp=4", HUGE), ("pp=1024,schedule=zbv", 4096)]
)
def test_a_schedule(layout: str, count: int, capsys: Capture) -> None:
    refused(capsys, "schedule", layout, "--micro-batches", str(count))


@pytest.mark.parametrize(
    "value",
    [
        *(f"{key}={HUGE}" for key in ("recipe.seq", "recipe.batch", "data.workers", "evaluate.samples")),
        *(
            f"{key}=1e300"
            for key in ("fault.timeout", "fault.stall", "tune.bucket_mb", "evaluate.temperature")
        ),
        "recipe.lr=inf",
        "recipe.eps=nan",
    ],
)
def test_a_config(value: str, capsys: Capture) -> None:
    refused(capsys, "config", "show", "--set", value)
