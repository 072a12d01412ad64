"""BoundedOptimizer: steps between two shares of the weights, in anybody's loop."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tula_hpc.optim.bounded import BoundedOptimizer

FLOOR, CAP, MOST = 0.007, 0.01, 10.0


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def bounded(parameters: Any, lr: float = 0.1, global_batch: int = 64, **options: Any) -> BoundedOptimizer:
    inner = torch.optim.SGD(parameters, lr=lr, momentum=options.pop("momentum", 0.0))
    return BoundedOptimizer(inner, global_batch=global_batch, small_batch=16, **options)


def step_with_ratio(ratio: float, shape: tuple[int, ...] = (4, 4), lr: float = 0.1, **options: Any) -> float:
    """How long the step of a tensor of norm 2 is beside its weights, if the rate times its gradient is `ratio` of
    them."""
    weight = nn.Parameter(torch.full(shape, 2 / math.sqrt(math.prod(shape))))
    before = weight.detach().clone()
    optimizer = bounded([weight], lr=lr, **options)
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight.grad *= ratio * 2 / lr / weight.grad.norm()
    optimizer.step()
    return float((weight.detach() - before).norm() / before.norm())


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.008, 0.008),  # between the bounds nothing is done
        (0.3, CAP),
        (CAP, CAP),
        (0.001, FLOOR),
        (0.0001, MOST * 0.0001),  # no gradient is lengthened more than tenfold
        (0.0, 0.0),
    ],
)
def test_a_step_is_between_the_bounds(ratio: float, expected: float):
    assert step_with_ratio(ratio) == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_bounds_and_factor_are_arguments():
    assert step_with_ratio(0.1, step_cap=0.02) == pytest.approx(0.02, rel=1e-4)
    assert step_with_ratio(0.001, step_floor=0.0) == pytest.approx(0.001, rel=1e-4)
    assert step_with_ratio(0.0001, scale_cap=2) == pytest.approx(0.0002, rel=1e-4)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_both_bounds_are_multiplied(share: float):
    long, short = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = bounded([long, short])
    optimizer.bound_factor = share
    long.grad, short.grad = torch.ones(4, 4), torch.full((4, 4), 0.01)
    optimizer.step()
    assert long.detach() == pytest.approx(1 - share * CAP)
    assert short.detach() == pytest.approx(1 - share * FLOOR)


def test_the_rate_of_the_moment_counts():
    """A scheduler lowers the rate: a step that was shortened is not any more."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = bounded([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.008)
    scales = []
    for _ in range(2):
        weight.grad = torch.ones(4, 4)
        optimizer.step()
        scales.append(float(optimizer.mean_scale))
        schedule.step()
    assert scales == pytest.approx([0.01, 1.0])


def test_each_group_has_its_own_rate_and_can_be_left_alone():
    first, second, alone = (nn.Parameter(torch.ones(3, 3)) for _ in range(3))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.008}, {"params": [alone], "ags": False}]
    optimizer = bounded(groups, lr=0.5)
    for weight in (first, second, alone):
        weight.grad = torch.ones(3, 3)
    optimizer.step()
    assert first.detach() == pytest.approx(1 - CAP)
    assert second.detach() == pytest.approx(1 - 0.008)
    assert alone.detach() == pytest.approx(0.5)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_vector_without_a_gradient_does_not_unbound_the_others(lr: Any):
    """A rate in a tensor may be 0, which is told from the steps."""
    dead, bias, matrix = (nn.Parameter(torch.ones(shape)) for shape in ((3,), (3,), (4, 4)))
    optimizer = bounded([dead, bias, matrix], lr=lr)
    dead.grad, bias.grad, matrix.grad = torch.zeros(3), torch.ones(3), torch.ones(4, 4)
    optimizer.step()
    assert bias.grad[0] == pytest.approx(CAP / 0.1 * math.sqrt(22 / 19), rel=1e-4)


@pytest.mark.parametrize(
    ("lr", "told"),
    [(0.0, {}), (torch.tensor(0.0), {"mean_scale": 1.0, "raised_fraction": 0.0, "lowered_fraction": 0.0})],
    ids=["number", "tensor"],
)
def test_a_gradient_enters_the_momentum_as_it_is_at_rate_zero(lr: Any, told: dict[str, float]):
    """No step is no short step: a warm-up from 0 would begin with gradients that are lengthened tenfold."""
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = bounded([weight], lr=lr, momentum=0.9)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"] == pytest.approx(1.0)
    assert optimizer.statistics() == told


@pytest.mark.parametrize("begin", ["vector", "zero"])
def test_vectors_and_tensors_at_zero_take_the_whole_models_scale(begin: str):
    """A share of weights that are nothing yet would be no step at all."""
    matrix = nn.Parameter(torch.ones(10, 10))
    other = nn.Parameter(torch.ones(5) if begin == "vector" else torch.zeros(5, 5))
    optimizer = bounded([matrix, other], lr=0.1)
    matrix.grad, other.grad = torch.ones(10, 10), torch.full_like(other, 3.0)
    before = other.detach().clone()
    whole_step = 0.1 * math.sqrt(float(matrix.grad.norm() ** 2 + other.grad.norm() ** 2))
    whole_weights = math.sqrt(float(matrix.detach().norm() ** 2 + before.norm() ** 2))
    optimizer.step()
    scale = CAP * whole_weights / whole_step
    assert (other - before).detach() == pytest.approx(-0.1 * 3.0 * scale, rel=1e-4)


def test_a_model_of_zeros_begins():
    weight = nn.Parameter(torch.zeros(3, 3))
    optimizer = bounded([weight])
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    assert weight.detach() == pytest.approx(-0.1)


@pytest.mark.parametrize("batch", [8, 16])
def test_up_to_the_batch_of_the_rate_it_is_the_inner_optimizer(batch: int):
    assert step_with_ratio(0.3, global_batch=batch) == pytest.approx(0.3)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs, targets = batch(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_saved_state_goes_on_to_the_bit():
    whole, parted = net(), net()
    train(whole, bounded(whole.parameters(), momentum=0.9), range(8))
    optimizer = bounded(parted.parameters(), momentum=0.9)
    train(parted, optimizer, range(4))
    later = bounded(parted.parameters(), momentum=0.9)
    later.load_state_dict(optimizer.state_dict())
    train(parted, later, range(4, 8))
    assert same(whole, parted)


def test_a_copy_goes_on_alike():
    model = net()
    optimizer = bounded(model.parameters(), momentum=0.9)
    train(model, optimizer, range(3))
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(other, other_optimizer, range(3, 6))
    assert same(model, other)


def test_parameters_without_gradients_wait():
    """Frozen and unused ones stay, and do not count."""
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.full((2, 2), 100.0))
    optimizer = bounded([unused, used])
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert used.detach() == pytest.approx(1 - CAP)
    assert unused.detach() == pytest.approx(100.0)


def test_a_closure_is_evaluated_once_with_gradients():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = bounded([weight])
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert len(calls) == 1
    assert weight.detach() == pytest.approx(1 - CAP)


def test_what_a_log_gets():
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(4)]
    optimizer = bounded(weights, lr=1.0)
    assert optimizer.statistics() == {}
    for weight, gradient in zip(weights, (1.0, 0.008, 0.001, 0.00001), strict=True):
        weight.grad = torch.full((4, 4), gradient)
    optimizer.step()
    found = optimizer.statistics()
    assert found["mean_scale"] == pytest.approx((0.01 + 1 + 7 + 10) / 4, rel=1e-4)
    assert (found["raised_fraction"], found["lowered_fraction"]) == (0.5, 0.25)


def test_a_parameter_without_elements_does_not_spoil_the_mean_scale():
    weight, empty = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.empty(0, 4))
    optimizer = bounded([weight, empty], lr=1.0)
    weight.grad, empty.grad = torch.ones(4, 4), torch.empty(0, 4)
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] == pytest.approx(CAP)


def test_gradients_in_half_precision_do_not_overflow():
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.float16))
    optimizer = bounded([weight])
    weight.grad = torch.full((64, 64), 1000.0, dtype=torch.float16)
    optimizer.step()
    assert weight.detach().float() == pytest.approx(1 - CAP, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_floor": 0.02}, "step_floor is 0.02 and step_cap 0.01"),
        ({"step_floor": -1.0}, "step_floor is -1.0"),
        ({"step_floor": 0.0, "step_cap": 0.0}, "cap > 0"),
        ({"scale_cap": 0.5}, "scale_cap is 0.5, but must be at least 1"),
        ({"global_batch": 0}, "global_batch is 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        bounded([nn.Parameter(torch.ones(2, 2))], **options)


def test_optimizers_that_are_no_sgd_are_warned_about_or_refused():
    weight = [nn.Parameter(torch.ones(2, 2))]
    with pytest.warns(UserWarning, match="AdamW is not known as an SGD"):
        BoundedOptimizer(torch.optim.AdamW(weight), global_batch=64, small_batch=16)
    with pytest.raises(ValueError, match="LBFGS"), warnings.catch_warnings():
        BoundedOptimizer(torch.optim.LBFGS(weight), global_batch=64, small_batch=16)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = bounded(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()


def ddp_weights(rank: int, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a DDP model on this rank, and of the same model that sees both ranks' samples."""
    alone = net()[:2]
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    optimizers = [bounded(m.parameters(), momentum=0.9) for m in (alone, replica)]
    for step in range(steps):
        inputs, _ = batch(step)
        alone(inputs).square().mean().backward()
        replica(inputs[16 * rank : 16 * rank + 16]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in alone.parameters()], [p.detach() for p in replica.parameters()]


def test_ranks_take_the_same_steps(two_ranks: Any):
    """To the bit, and as one process does that sees both shares of the batch."""
    (alone, first), (_, second) = two_ranks(ddp_weights, 5)
    for a, b, c in zip(alone, first, second, strict=True):
        assert torch.equal(b, c)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
