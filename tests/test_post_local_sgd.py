"""Post-local SGD: what an averaging does to model and momentum, and when it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.optim.post_local_sgd import PostLocalSGD

Run = Callable[..., list[Any]]


def net() -> nn.Module:
    """Weights in channels_last, buffers of BatchNorm (one an integer), a frozen and a tied parameter, two types."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    first.bias.requires_grad_(False)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), first, last]
    layers[0].to(memory_format=torch.channels_last)
    return nn.Sequential(*layers)


def local_steps(rank: int, steps: int, period: int, momentum: str) -> dict[str, Any]:
    """Take local steps on data of the rank's own; the state before and after the last averaging, and when they came."""
    model = net()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    averaging = PostLocalSGD(replica, optimizer, period=period, momentum=momentum)  # type: ignore[arg-type]
    conv = model[0].weight
    before_at, stride = conv.data_ptr(), conv.stride()
    found: dict[str, Any] = {"averaged_after": []}
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(8, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        averaging.module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before, momenta = state(model), buffers_of(optimizer)
        if averaging.after_step():
            found["averaged_after"].append(step)
            found |= {"before": before, "momenta_before": momenta}
    found |= {"after": state(model), "momenta": buffers_of(optimizer)}
    found["in_place"] = conv.data_ptr() == before_at and conv.stride() == stride and model[4].weight is model[5].weight
    return found


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def buffers_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [values["momentum_buffer"].clone() for values in optimizer.state.values()]


def test_models_are_equal_after_an_averaging_and_only_then(two_ranks: Run):
    """Parameters and BatchNorm's statistics become the mean over the ranks, after every third step and no other."""
    first, second = two_ranks(local_steps, 6, 3, "keep")
    assert first["averaged_after"] == second["averaged_after"] == [3, 6]
    for name, mean in first["after"].items():
        assert torch.equal(mean, second["after"][name]), name
        if mean.is_floating_point():
            torch.testing.assert_close(mean, (first["before"][name] + second["before"][name]) / 2)
    assert not torch.equal(first["before"]["0.weight"], second["before"]["0.weight"])
    assert not torch.equal(first["before"]["1.running_mean"], second["before"]["1.running_mean"])


def test_averages_are_written_in_place(two_ranks: Run):
    """A parameter keeps its memory, its channels_last strides and its ties."""
    assert all(found["in_place"] for found in two_ranks(local_steps, 2, 1, "keep"))


@pytest.mark.parametrize("momentum", ["keep", "reset", "average"])
def test_momentum_follows_its_policy(two_ranks: Run, momentum: str):
    """An averaging leaves the ranks' momenta alone, clears them or averages them."""
    first, second = two_ranks(local_steps, 2, 2, momentum)
    for mine, other, now, now_other in zip(
        first["momenta_before"], second["momenta_before"], first["momenta"], second["momenta"], strict=True
    ):
        assert not torch.equal(mine, other)
        if momentum == "keep":
            assert torch.equal(now, mine)
            assert torch.equal(now_other, other)
        else:
            assert torch.equal(now, now_other)
            torch.testing.assert_close(now, (mine + other) / 2 if momentum == "average" else torch.zeros_like(mine))


def used_by_one(rank: int) -> list[Any]:
    """Average where one rank alone has trained a layer; that layer's momenta before and after."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaging = PostLocalSGD(model, optimizer, period=1, momentum="average")
    for layer in model if rank == 0 else model[:1]:
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = buffers_of(optimizer)
    averaging.after_step()
    return [before, buffers_of(optimizer), state(model)]


def test_a_layer_that_one_rank_has_not_used_is_averaged(two_ranks: Run):
    """What a rank has no momentum of counts as 0; nobody waits for it."""
    (before, after, model), (_, others, other_model) = two_ranks(used_by_one)
    assert (len(after), len(others)) == (4, 2)
    torch.testing.assert_close(after[2:], [momentum / 2 for momentum in before[2:]])
    torch.testing.assert_close(model, other_model, rtol=0, atol=0)


def compiled(rank: int) -> list[torch.Tensor]:
    """The gradient of a local step through torch.compile(DDP(model))."""
    replica = torch.compile(DistributedDataParallel(nn.Linear(2, 1)), backend="eager")
    averaging = PostLocalSGD(replica, torch.optim.SGD(replica.parameters(), lr=0.1), period=2)
    averaging.module(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return [p.grad for p in replica.parameters() if p.grad is not None]


def test_local_steps_of_a_compiled_replica_are_local(two_ranks: Run):
    first, second = two_ranks(compiled)
    assert [grad.flatten().tolist() for grad in first] == [[1.0, 1.0], [1.0]]
    assert [grad.flatten().tolist() for grad in second] == [[2.0, 2.0], [1.0]]


def test_a_parameter_of_one_number_has_a_momentum_as_well():
    """A learnt temperature is of shape (); so is Adam's count of steps, which stays."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    for optimizer, name in ((torch.optim.SGD, "momentum_buffer"), (torch.optim.Adam, "exp_avg")):
        inner = optimizer([model.scale], **({"lr": 0.1, "momentum": 0.9} if name == "momentum_buffer" else {}))
        model.scale.grad = torch.tensor(1.0)
        inner.step()
        PostLocalSGD(model, inner, period=1, momentum="reset").average()
        assert inner.state[model.scale][name] == 0
        assert inner.state[model.scale].get("step", 1) == 1


def test_tensors_of_two_types_are_averaged_together():
    """Half-precision weights beside fp32 statistics are no obstacle, also without other ranks."""
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.BatchNorm1d(2))
    averaging = PostLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), period=1)
    before = state(model)
    assert averaging.after_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("options", "words"), [({"period": 0}, "period is 0"), ({"momentum": "lose"}, "keep, reset")])
def test_senseless_options_are_refused(options: dict[str, Any], words: str):
    """A bad value is named with its limit or its choices."""
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=words):
        PostLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"period": 1, **options})
