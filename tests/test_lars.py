"""LARS: the step of the package behind the adapter, computed by hand."""

from __future__ import annotations

import sys

import pytest
import torch

from tula_hpc.optim.lars import lars

RATE, TRUST, DECAY, MOMENTUM = 0.5, 0.02, 0.1, 0.9


def by_hand(weight: torch.Tensor, gradients: list[torch.Tensor], is_matrix: bool) -> torch.Tensor:
    """You et al. 2017, Algorithm 1, with the learning rate outside the momentum buffer."""
    weight, buffer = weight.clone(), torch.zeros_like(weight)
    for gradient in gradients:
        trust, direction = 1.0, gradient
        if is_matrix:
            trust = TRUST * float(weight.norm()) / (float(gradient.norm()) + DECAY * float(weight.norm()))
            direction = gradient + DECAY * weight
        buffer = MOMENTUM * buffer + trust * direction
        weight = weight - RATE * buffer
    return weight


def test_two_steps_are_those_computed_by_hand():
    """Weights take steps in proportion to their norm, with decay; biases take plain momentum steps without it."""
    layer = torch.nn.Linear(2, 2)
    start = {name: p.detach().clone() for name, p in layer.named_parameters()}
    gradients = {
        "weight": [torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0, -1.0], [2.0, 0.5]])],
        "bias": [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.5])],
    }
    options = {"momentum": MOMENTUM, "weight_decay": DECAY, "trust_coefficient": TRUST}
    optimizer = lars(layer.parameters(), RATE, **options)
    for step in range(2):
        for name, parameter in layer.named_parameters():
            parameter.grad = gradients[name][step].clone()
        optimizer.step()
    for name, parameter in layer.named_parameters():
        expected = by_hand(start[name], gradients[name], parameter.ndim > 1)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_layers_and_vectors_are_in_groups_of_their_own():
    """What has one dimension has no decay, and a model of nothing else is trained too."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    groups = lars(model.parameters(), RATE, weight_decay=DECAY).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, DECAY), (3, 0.0)]
    (only,) = lars([torch.nn.Parameter(torch.zeros(3))], RATE).param_groups
    assert only["weight_decay"] == 0.0


def test_groups_are_refused():
    with pytest.raises(TypeError, match="lars got a dict among the parameters"):
        lars([{"params": []}], lr=0.1)  # type: ignore[list-item]


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    """Without the optional dependency the error says how to get it."""
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ImportError, match=r"pip install 'tula-hpc\[lars\]'"):
        lars([torch.nn.Parameter(torch.zeros(3))], RATE)
