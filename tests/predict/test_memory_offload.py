"""What offload leaves on the device, and what waits in the host's memory and on its disks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.facts.cluster.notation import find
from shoal.facts.config import Lora
from shoal.facts.layout import Layout
from shoal.facts.layout.offload import RING, STAGED, STAGES
from shoal.facts.ledger import Ledger
from shoal.facts.model.parameters import block_parameters, parameter_count
from shoal.facts.model.presets import PRESETS
from shoal.facts.recipe import Recipe
from shoal.predict.memory import ledger
from shoal.predict.workload import Workload

SEVEN = PRESETS["llama2-7b"]
COUNT = parameter_count(SEVEN)
BLOCK = sum(parameter.size for parameter in block_parameters(SEVEN, False))
HEAD = 32000 * 4096
RETURNING = 2 * RING  # new weights on their way, in bf16


def held(layout: str, on: str = "1xRTX4090", lora: Lora | None = None, **recipe: Any) -> Ledger:
    said = {"seq": 2048, "batch": 8, "precision": "bf16", **recipe}
    return ledger(Workload(SEVEN, find(on), Recipe.model_validate(said), Layout.parse(layout), lora=lora))


def test_seven_billion_parameters_fit_one_card_of_24_gigabytes() -> None:
    plain, away = (held(f"micro=1,recompute=full{more}") for more in ("", ",offload=optimizer"))
    assert not plain.device_fits and plain.params + plain.grads > plain.capacity
    assert away.device_fits and away.params == 2 * COUNT
    # The desktop that a card is taken to sit in has the memory; one with half as much, said in a cluster file, has not.
    assert away.fits and away.host_capacity == 112 * 2**30
    small = find("1xRTX4090").model_copy(update={"host_memory": 2**36})
    recipe = Recipe(seq=2048, batch=8, precision="bf16")
    layout = Layout.parse("micro=1,recompute=full,offload=optimizer")
    assert not ledger(Workload(SEVEN, small, recipe, layout)).fits
    assert away.grads == away.optimizer == 0
    # Eight micro-batches: gradients add up in fp32, and come in two blocks at a time.
    assert away.host == COUNT * (4 + 8 + 4) + 2 * BLOCK * 2 + RETURNING
    one = held("micro=1,recompute=full,offload=optimizer", batch=1)
    assert one.host == COUNT * (4 + 8 + 2) + RETURNING


def test_gradients_in_flight_are_two_blocks() -> None:
    """Short sequences, so that nothing else is large."""
    away = held("offload=optimizer", batch=1, seq=16)
    assert away.grads == 0
    # The first block follows the head, whose gradient is still there.
    assert 2 * (HEAD + BLOCK) <= away.buffers <= 2 * (HEAD + 2 * BLOCK)


def test_states_in_files_leave_a_bounded_part_of_them_in_memory() -> None:
    away = held("offload=optimizer@nvme", batch=1)
    assert away.nvme == 12 * COUNT
    assert away.host == 2 * COUNT + 12 * RING


def test_activations_in_files_leave_those_of_two_blocks_in_memory() -> None:
    memory, away = (held(f"micro=1,recompute=full,offload=activations{to}") for to in ("", "@nvme"))
    assert away.nvme == memory.host and away.host == 2 * memory.host / 31
    assert away.peak_allocated == memory.peak_allocated


def test_parameters_that_are_away_leave_two_blocks_on_the_device() -> None:
    optimizer, params = (held(f"micro=1,recompute=full,offload={what}") for what in ("optimizer", "params"))
    assert params.params == params.grads == params.optimizer == 0
    # A new weight is written where it rests, and passes through nothing.
    assert params.host == optimizer.host - RETURNING + 2 * COUNT
    assert optimizer.peak_allocated - params.peak_allocated == 2 * (COUNT - 2 * BLOCK)
    on_disk = held("micro=1,recompute=full,offload=params@nvme")
    assert on_disk.nvme == (12 + 4 + 2) * COUNT
    # A ring of states and gradients, and buffers; twice as many where gradients add up.
    assert on_disk.host == (12 + 4) * RING + 2 * STAGES * STAGED
    assert on_disk.peak_allocated == params.peak_allocated


def test_a_fraction_is_cut_between_tensors() -> None:
    half = held("offload=optimizer:0.5", batch=1, on="1xH200")
    whole = held("offload=optimizer", batch=1, on="1xH200")
    share = (half.host - RETURNING) / (whole.host - RETURNING)
    # No more stays than was asked for, and no more than one tensor less.
    assert 0.5 <= share < 0.5 + HEAD / COUNT
    assert half.optimizer == pytest.approx((1 - share) * 12 * COUNT, abs=16)
    assert whole.peak_allocated < half.peak_allocated < held("dp=1", batch=1, on="1xH200").peak_allocated


@pytest.mark.parametrize(("layout", "arrives"), [("fsdp=4,zero=2", 4), ("fsdp=4", 2)])
def test_ranks_that_sum_every_pass_keep_no_gradients_and_working_weights(layout: str, arrives: int) -> None:
    away = held(f"{layout},micro=1,offload=optimizer", on="4xH100")
    assert away.grads == away.optimizer == 0
    assert away.params == pytest.approx(2 * COUNT / (1 if "zero" in layout else 4), rel=1e-3)
    # Two micro-batches, which add up in fp32.
    waiting = (COUNT * (4 + 8 + 4) + 2 * BLOCK * arrives) / 4
    assert away.host == pytest.approx(waiting + min(RETURNING, 2 * COUNT / 4 / 32), rel=1e-3)


@pytest.mark.parametrize(("layout", "shards"), [("dp=4", 1), ("fsdp=4,zero=1", 4)])
def test_ranks_that_sum_once_a_step_keep_gradients_until_then(layout: str, shards: int) -> None:
    here, away = (held(f"{layout},micro=1{more}", on="4xH100") for more in ("", ",offload=optimizer"))
    assert away.grads == here.grads > 0 and away.optimizer == 0
    returning = min(RETURNING, 2 * COUNT / shards / 32)
    assert away.host == pytest.approx(COUNT * (4 + 8 + 4) / shards + returning, rel=1e-3)


def test_lora_leaves_the_base_in_the_hosts_memory() -> None:
    here, away = (held(f"micro=1,recompute=full{more}", lora=Lora()) for more in ("", ",offload=params"))
    assert here.params == pytest.approx(2 * COUNT, rel=0.02) and away.params == 0
    assert away.host == pytest.approx(2 * COUNT, rel=0.03)


def test_a_node_says_what_it_has(tmp_path: Any) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'device = "RTX4090"\ndevices_per_node = 2\nhost_memory = 240_000_000_000\nnvme = 80_000_000_000'
    )
    small = find(str(file))
    recipe = Recipe(seq=2048, batch=8, precision="bf16")
    asked = Workload(SEVEN, small, recipe, Layout.parse("micro=1,recompute=full,offload=optimizer"))
    in_memory = ledger(asked)
    assert in_memory.host_capacity == 240e9 / 2 * 7 / 8 < in_memory.host
    assert in_memory.device_fits and not in_memory.fits
    on_disk = ledger(replace(asked, layout=Layout.parse("micro=1,recompute=full,offload=optimizer@nvme")))
    assert on_disk.nvme_capacity == 80e9 / 2 * 7 / 8 < on_disk.nvme
    assert on_disk.host <= on_disk.host_capacity and not on_disk.fits
