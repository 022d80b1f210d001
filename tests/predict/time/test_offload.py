"""Offload time: the host's update at the rate its GPUs share, copies over the link, files; what hides behind what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.facts import calibration
from shoal.facts.calibration import DISK_BOTH, UPDATE, UPDATE_MOST, NodeRates, node_rates
from shoal.facts.calibration.file import read
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.model.parameters import parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.time.step import StepTime, step
from shoal.predict.workload import Workload

SEVEN = PRESETS["llama2-7b"]
COUNT = parameter_count(SEVEN)
H200 = Path(__file__).parents[3] / "benchmarks" / "data" / "calibration" / "H200.json"
LINK = 0.87 * 63e9  # of an H200


def taken(layout: str, on: str | Cluster = "1xH200", lora: Lora | None = None, **recipe: Any) -> StepTime:
    said = {"seq": 16, "batch": 1, "precision": "bf16", **recipe}
    cluster = find(on) if isinstance(on, str) else on
    return step(Workload(SEVEN, cluster, Recipe.model_validate(said), Layout.parse(layout), lora=lora))


def test_where_nothing_is_computed_a_step_waits_for_the_host() -> None:
    """28 bytes a parameter; what little forward pass there is hides a little."""
    host = taken("offload=optimizer").offload
    assert host == pytest.approx(28 * COUNT / UPDATE + 2 * COUNT / LINK, rel=0.1)
    through_disk = taken("offload=optimizer@nvme").offload
    assert through_disk == pytest.approx(2 * 12 * COUNT / DISK_BOTH, rel=0.05)


def test_a_long_forward_pass_hides_the_update_and_a_long_backward_pass_the_gradients() -> None:
    here, away = (taken(layout, seq=4096, batch=32) for layout in ("dp=1", "offload=optimizer"))
    assert away.seconds == pytest.approx(here.seconds, rel=0.02) and away.seconds >= here.seconds
    assert away.optimizer == 0


def test_more_micro_batches_hide_no_more_of_the_update() -> None:
    """Only the first one's forward pass comes after the update, and every one's gradients leave."""
    one, two = (taken("micro=1,offload=optimizer", seq=1024, batch=batch) for batch in (1, 2))
    assert two.offload > one.offload > 0.5


def test_the_gpus_of_a_node_share_its_memory() -> None:
    alone, eight = (
        node_rates(find(on), calibration.built_in(find(on).device)) for on in ("1xH100", "8xH100")
    )
    assert alone.update == UPDATE and eight.update == UPDATE_MOST / 8
    assert eight.link == eight.update < alone.link
    replicas = taken("dp=8,offload=optimizer", on="8xH100", batch=8)
    assert replicas.offload > 1.9 * taken("offload=optimizer", on="1xH100").offload


def test_a_cluster_file_says_what_its_memory_reaches(tmp_path: Any) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text('device = "H200"\ndevices_per_node = 1\nhost_bandwidth = 27.5e9\n')
    assert taken("offload=optimizer", on=find(str(slow))).offload == pytest.approx(
        4 * taken("offload=optimizer").offload, rel=0.15
    )


def test_lora_fetches_the_whole_base() -> None:
    """For the forward pass and again for the backward pass of every micro-batch."""
    one = taken("offload=params", lora=Lora()).offload
    assert one == pytest.approx(2 * 2 * COUNT / LINK, rel=0.1)
    four = taken("micro=1,offload=params", lora=Lora(), batch=4).offload
    assert four == pytest.approx(4 * one, rel=0.1)
    assert taken("offload=optimizer", lora=Lora()).offload < 0.02 * one


def test_weights_come_in_beside_the_computation() -> None:
    exposed = [taken("offload=params", lora=Lora(), seq=seq).offload for seq in (512, 4096, 32768)]
    assert exposed[0] > exposed[1] > exposed[2]
    assert exposed[2] < 0.1 * taken("offload=params", lora=Lora(), seq=32768).seconds


def test_a_smaller_fraction_is_never_slower_until_nothing_is_lost() -> None:
    fractions = (0.1, 0.25, 0.5, 0.75, 1.0)
    times = [taken(f"offload=optimizer:{part}", seq=4096, batch=8).seconds for part in fractions]
    here = taken("dp=1", seq=4096, batch=8).seconds
    assert times == sorted(times) and times[-1] > times[0] >= here
    assert times[0] == pytest.approx(here, rel=0.01)


def test_what_is_measured_takes_the_place_of_judgement() -> None:
    cluster = find("1xH200")
    known = calibration.built_in(cluster.device)
    # A file of before the host's update was measured has none.
    stored = read(H200)
    rates = known.model_copy(update={"measured": stored.measured, "host": stored.host})
    copies = stored.measured.copies
    found = node_rates(cluster, rates)
    assert (found.disk_read, found.disk_write, found.update) == (copies.disk_read, copies.disk_write, UPDATE)
    assert stored.host is not None and found.link == stored.host.bandwidth
    newer = stored.measured.model_copy(update={"host_update": 77e9})
    assert node_rates(cluster, rates.model_copy(update={"measured": newer})).update == 77e9


def test_a_disk_that_is_read_and_written_at_once_has_a_rate_of_its_own() -> None:
    """As far as there are both; an older calibration, which has none, prices them in turn."""
    alone = NodeRates(update=1.0, link=1.0, disk_read=4.0, disk_write=2.0)
    assert alone.disk_seconds(8.0, 8.0) == 8 / 4 + 8 / 2
    both = alone.model_copy(update={"disk_both": 5.0})
    assert both.disk_seconds(8.0, 8.0) == 16 / 5
    assert both.disk_seconds(12.0, 8.0) == 16 / 5 + 4 / 4
    assert both.disk_seconds(8.0, 12.0) == 16 / 5 + 4 / 2
