"""What a script gets wrong is refused in one line with its fix, and before anything is placed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from tests.train.library.small import Residual, Vision, build, image_loss, optimizer_of, rows
from torch import nn

import shoal
from shoal.facts.problem import BadInput
from shoal.parallel.module_blocks import find_blocks, innermost
from shoal.train.library.batches import Share, StepLoader


@pytest.fixture
def run() -> Iterator[shoal.Run]:
    with shoal.run("dp=1") as run:
        yield run


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_world_that_was_not_started() -> None:
    with pytest.raises(BadInput, match="torchrun --nproc-per-node 4"):
        shoal.run("fsdp=4")
    with pytest.raises(BadInput, match="did you mean 'fsdp'"):
        shoal.run("fdsp=2")


@pytest.mark.parametrize(
    "layout, word",
    [
        ("dp=1,offload=params", "a network that Shoal built"),
        ("dp=1,offload=optimizer@nvme", "offload=optimizer: the host's memory"),
    ],
)
def test_what_a_foreign_module_has_no_part_for(layout: str, word: str) -> None:
    model = Vision()
    with shoal.run(layout) as run, pytest.raises(BadInput, match=word):
        run.prepare(model, sgd(model))


def test_a_grad_scaler(run: shoal.Run) -> None:
    model = Vision()
    with pytest.raises(BadInput, match="bfloat16"):
        run.prepare(model, sgd(model), None, torch.amp.GradScaler("cpu"))


def test_a_grad_scaler_in_the_loop(run: shoal.Run) -> None:
    """Where shards hold no gradients yet, torch would stop at an assertion of its own."""
    model = Vision()
    model, optimizer = run.prepare(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.zeros(1, 3, 9, 9)).sum()).backward()
    with pytest.raises(BadInput, match="bfloat16"):
        scaler.step(optimizer)


def test_a_scheduler_that_no_resume_could_repeat(run: shoal.Run) -> None:
    model = Vision()
    optimizer = sgd(model)
    with pytest.raises(BadInput, match="function of the step"):
        run.prepare(model, optimizer, None, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_an_optimizer_that_steps_by_itself(run: shoal.Run) -> None:
    model = Vision()
    model, optimizer = run.prepare(model, sgd(model))
    model(torch.zeros(1, 3, 9, 9)).sum().backward()
    with pytest.raises(BadInput, match=r"run\.update"):
        optimizer.step()


def test_an_optimizer_of_other_parameters_or_with_steps(run: shoal.Run) -> None:
    model, other = Vision(), Vision()
    with pytest.raises(BadInput, match=r"model\.parameters"):
        run.prepare(model, sgd(other))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(BadInput, match="before the first"):
        run.prepare(model, optimizer)


def test_a_model_without_values(run: shoal.Run) -> None:
    with torch.device("meta"):
        model = Vision()
    with pytest.raises(BadInput, match="meta device"):
        run.prepare(model, sgd(model))


def test_a_loop_that_is_out_of_order(run: shoal.Run) -> None:
    with pytest.raises(BadInput, match=r"run\.prepare"):
        run.update()
    model = Vision()
    model, _ = run.prepare(model, sgd(model))
    with pytest.raises(BadInput, match=r"run\.backward"):
        run.update()
    images = (torch.zeros(2, 3, 9, 9), torch.zeros(2, dtype=torch.long))
    with pytest.raises(BadInput, match="gave no loss"):
        run.step(model, images[:1])
    run.backward(*image_loss(model, images), last=True)
    with pytest.raises(BadInput, match="last=True"):
        run.backward(*image_loss(model, images))
    with pytest.raises(BadInput, match=r"run\.update"):
        run.save()
    run.update()


def test_gradients_that_are_not_finite_change_nothing(run: shoal.Run) -> None:
    for fused in (False, True):
        with shoal.run("dp=1") as one:
            model = Vision()
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            model, _ = one.prepare(model, optimizer)
            before = model.head.weight.detach().clone()
            one.backward(model(torch.full((1, 3, 9, 9), torch.inf)).sum(), count=1)
            one.update()
            assert torch.equal(before, model.head.weight) and one.done == 1


def test_a_step_without_targets_changes_nothing_and_is_finite(run: shoal.Run) -> None:
    model = build("gpt2", exact=False).float()
    model, _ = run.prepare(model, sgd(model))
    before = model.lm_head.weight.detach().clone()
    tokens = torch.ones(2, 6, dtype=torch.long)
    loss = run.step(model, {"input_ids": tokens, "labels": torch.full_like(tokens, -100)})
    assert float(loss) == 0.0 and torch.equal(before, model.lm_head.weight)


def test_labels_are_the_tokens_where_a_batch_has_none(run: shoal.Run) -> None:
    model = build("gpt2", exact=False).float()
    tokens = torch.arange(12).view(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    expected = model(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss
    model, _ = run.prepare(model, sgd(model))
    loss = run.step(model, {"input_ids": tokens, "attention_mask": mask})
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)


# Blocks.


def test_blocks_are_found_by_class_by_size_and_by_hand() -> None:
    model = Vision()
    stages = list(model.stages)
    assert find_blocks(model) == stages
    assert find_blocks(model, Residual) == find_blocks(model, "Residual") == stages
    assert find_blocks(model, ["stages.1", model.head]) == [stages[1], model.head]
    assert find_blocks(model, lambda module: isinstance(module, nn.Linear)) == [model.head, model.unused]
    by_size = find_blocks(model, 400)
    assert by_size == stages and find_blocks(model, 10**9) == []
    assert innermost([model.stages, *stages]) == stages
    assert [type(one).__name__ for one in find_blocks(build("gpt2"))] == ["GPT2Block"] * 3


@pytest.mark.parametrize("wrap", ["Residul", 0, True, 3.5, "stages.9"], ids=str)
def test_blocks_that_are_not_there(wrap: Any) -> None:
    with pytest.raises(BadInput):
        find_blocks(Vision(), wrap)


def test_a_tied_parameter_has_one_unit() -> None:
    with pytest.raises(BadInput, match="tied"):
        find_blocks(build("gpt2"), "transformer.wte")


# Batches.


def test_every_row_is_used_once_an_epoch_in_any_world() -> None:
    data = list(range(20))
    orders = []
    for ranks in (1, 2, 4):
        loaders = [StepLoader(data, Share(rank, ranks, 8, 3), True, list) for rank in range(ranks)]
        epochs = [[list(chain(*parts)) for parts in zip(*loaders, strict=True)] for _ in range(2)]
        orders.append(epochs)
        assert len(loaders[0]) == 3 and loaders[0].dropped == 0
        for epoch in epochs:
            assert sorted(chain(*epoch)) == data
    assert orders[0] == orders[1] == orders[2] and orders[0][0] != orders[0][1]


def test_a_resume_begins_in_the_middle_of_an_epoch() -> None:
    whole = StepLoader(list(range(12)), Share(0, 1, 4, 0), True, list)
    every = [batch for _ in range(3) for batch in whole]
    again = StepLoader(list(range(12)), Share(0, 1, 4, 0), True, list)
    again.done = 5
    assert [batch for _ in range(3) for batch in again] == every[5:]


def test_a_loader_keeps_its_batch_size_and_what_collates() -> None:
    loader = torch.utils.data.DataLoader(rows("vision"), batch_size=6, shuffle=True, drop_last=True)
    found = StepLoader.of(loader, Share(1, 2, 6, 0))
    assert found.shuffle and len(found) == 4
    images, labels = next(iter(found))
    assert images.shape == (3, 3, 9, 9) and labels.shape == (3,)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)
    with pytest.raises(BadInput, match="sampler of its own"):
        StepLoader.of(torch.utils.data.DataLoader(rows("vision"), 6, sampler=weighted), Share(0, 1, 6, 0))


def test_lists_of_numbers_are_tensors() -> None:
    data = [{"input_ids": [row, 1, 2], "text": "a"} for row in range(4)]
    batch = next(iter(StepLoader(data, Share(0, 1, 2, 0), False, None)))
    assert batch["input_ids"].tolist() == [[0, 1, 2], [1, 1, 2]] and batch["text"] == ["a", "a"]


def test_steps_end_with_the_data(run: shoal.Run) -> None:
    model = Vision().double()
    model, _, loader = run.prepare(model, sgd(model), iter(rows("vision")))
    taken = [run.step(model, batch, loss=image_loss) for batch in run.steps(loader, total=100)]
    assert len(taken) == 24
    with shoal.run("dp=1") as short, pytest.raises(BadInput, match="fewer rows"):
        model = Vision()
        whole = torch.utils.data.DataLoader(rows("vision"), batch_size=99, drop_last=True)
        _, _, loader = short.prepare(model, sgd(model), whole)
        list(short.steps(loader, total=1))


def test_a_stream_is_read_by_all_and_shared_out() -> None:
    loaders = [StepLoader(iter(range(10)), Share(rank, 2, 4, 0), False, list) for rank in range(2)]
    assert [list(one) for one in loaders] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_the_batch_has_to_divide(run: shoal.Run) -> None:
    with shoal.run("dp=1,micro=3", batch=8) as one, pytest.raises(BadInput, match="does not divide"):
        model = Vision()
        one.prepare(model, optimizer_of(model), rows("vision"))


def test_the_face_is_stable() -> None:
    assert set(shoal.__all__) >= {
        "BadInput",
        "Cluster",
        "Layout",
        "Model",
        "Run",
        "dryrun",
        "launch",
        "parity",
        "plan",
        "predict",
        "run",
    }
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)
