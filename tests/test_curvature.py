"""The largest eigenvalue of a Hessian, against Hessians that are small enough to be written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from tula_hpc.candidates import Candidate
from tula_hpc.checks import check
from tula_hpc.config import Settings
from tula_hpc.ranks.curvature import largest_eigenvalue
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat
from tula_hpc.ranks.training import train
from tula_hpc.runs import RunFolder


class Quadratic(nn.Module):
    """A model whose output is w' A w / 2, so that the Hessian is A."""

    def __init__(self, eigenvalues: list[float]):
        super().__init__()
        n = len(eigenvalues)
        q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(1))).Q
        self.matrix = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float32)) @ q.T
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight @ self.matrix @ self.weight / 2 + 0 * inputs.sum()


def the_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def exact(model: nn.Module, loss_fn: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """All eigenvalues, in rising order."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        weights = {n: piece.view(shape) for n, piece, shape in zip(names, pieces, shapes, strict=True)}
        return loss_fn(functional_call(model, weights, (inputs,)), targets)

    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return torch.linalg.eigvalsh(hessian(loss, flat))


@pytest.mark.parametrize(
    "eigenvalues",
    [[3, 1, 0.5], [-3, 1, 0.5], [-3, 2.9, 1], [-2, 2, 1], [-3, -2, -1], [0, 0, 0], [2, 0, -1]],
    ids=["positive", "negative", "near tie", "tie", "all negative", "flat", "mixed"],
)
def test_the_algebraically_largest_is_found(eigenvalues: list[float]):
    """Whatever is largest in magnitude, and where two of opposite sign compete."""
    nothing = torch.zeros(1)
    found = largest_eigenvalue(Quadratic(eigenvalues), the_output, nothing, nothing, iterations=500, tolerance=1e-3)
    assert found == pytest.approx(max(eigenvalues), abs=0.02)


def small_net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    return model, torch.randn(30, 4), torch.randint(3, (30,))


@pytest.mark.parametrize("at_once", [None, 7])
def test_a_net_has_the_eigenvalue_of_its_exact_hessian(at_once: int | None):
    """With BatchNorm and dropout, all samples at once or a few at a time."""
    model, inputs, targets = small_net()
    loss_fn = nn.CrossEntropyLoss()
    expected = float(exact(model.eval(), loss_fn, inputs, targets)[-1])
    found = largest_eigenvalue(model, loss_fn, inputs, targets, tolerance=1e-3, samples_at_once=at_once)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("at_once", [None, 3])
def test_batches_in_dicts_and_tuples_have_the_same_curvature(at_once: int | None):
    """Samples are taken from each of their tensors."""
    net, inputs, targets = small_net()
    expected = largest_eigenvalue(net, nn.functional.cross_entropy, inputs, targets, samples_at_once=at_once)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.net(batch["x"])

    def loss(outputs: Tensor, wanted: tuple[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, wanted[0])

    found = largest_eigenvalue(Named(), loss, {"x": inputs}, (targets,), samples_at_once=at_once)
    assert found == pytest.approx(expected, rel=1e-5)


def test_nothing_of_the_model_is_touched():
    """Mode of each module, buffers, gradients and the random stream are what they were."""
    model, inputs, targets = small_net()
    model.train()
    model[1].eval()
    nn.CrossEntropyLoss()(model(inputs), targets).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    stream = torch.get_rng_state()
    largest_eigenvalue(model, nn.CrossEntropyLoss(), inputs, targets)
    assert torch.equal(stream, torch.get_rng_state())
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True) if p.grad is not None)


def test_attention_has_curvature():
    """The fast attention kernels cannot be derived twice; a slower one is taken."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Linear(4, 12)

        def forward(self, inputs: Tensor) -> Tensor:
            q, k, v = self.queries(inputs).chunk(3, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, k, v).mean(1)

    torch.manual_seed(0)
    inputs, targets = torch.randn(5, 6, 4), torch.randint(4, (5,))
    assert largest_eigenvalue(Attention(), nn.CrossEntropyLoss(), inputs, targets) > 0


def test_each_epochs_metrics_hold_it_and_the_training_is_the_same(
    tiny_settings: Callable[..., Settings], tmp_path: Path
):
    """The key stands in every line; losses are those of a training that nobody measured."""

    def lines(name: str, *overrides: str) -> list[dict[str, Any]]:
        run = RunFolder(tmp_path / name)
        me = Rank(0, 1, 0, "test", "test")
        train(
            tiny_settings(*overrides), Candidate(1, 32), me, run, torch.device("cpu"), EarlyWarning(), Heartbeat(None)
        )
        return run.read_metrics()

    measured, plain = lines("measured", "training.curvature_samples=64"), lines("plain")
    assert all(line["hessian_eigenvalue"] > 0 for line in measured)
    assert not any("hessian_eigenvalue" in line for line in plain)
    assert [line["train_loss"] for line in measured] == [line["train_loss"] for line in plain]


def test_more_samples_than_there_are_are_refused(tiny_settings: Callable[..., Settings]):
    """The message names key, value and limit."""
    (problem,) = check(tiny_settings("training.curvature_samples=257"))
    assert "training.curvature_samples is 257" in problem
    assert "256" in problem
