"""The Hessian's largest eigenvalue against the whole Hessian of a model that is small enough to have one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tula_hpc.ranks.curvature import largest_eigenvalue


def exact(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, sign: float) -> torch.Tensor:
    """All eigenvalues of the Hessian of the loss, times `sign`."""
    names, start = zip(*model.named_parameters(), strict=True)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([p.numel() for p in start])
        parameters = {n: part.view_as(p) for n, part, p in zip(names, parts, start, strict=True)}
        return sign * F.cross_entropy(torch.func.functional_call(model, parameters, (inputs,)), targets)

    return torch.linalg.eigvalsh(
        torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in start]))
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_eigenvalue_is_the_algebraically_largest(sign: float):
    """As the whole Hessian has it; with the sign of the loss turned, the dominant eigenvalue is negative."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    inputs, targets = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    expected = exact(model, inputs, targets, sign)
    assert (expected.abs().argmax() == len(expected) - 1) == (sign > 0)
    found = largest_eigenvalue(
        model, lambda out, wanted: sign * F.cross_entropy(out, wanted), inputs, targets, iterations=2000, tolerance=1e-9
    )
    assert found == pytest.approx(float(expected[-1]), rel=1e-3, abs=1e-4)


def test_nothing_of_the_model_changes():
    """Gradients, buffers, mode and the random stream are as they were."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(), torch.nn.Linear(6, 3)
    )
    inputs, targets = torch.randn(20, 4), torch.randint(3, (20,))
    F.cross_entropy(model(inputs), targets).backward()
    before = [t.clone() for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]  # type: ignore[union-attr]
    random = torch.get_rng_state()
    largest_eigenvalue(model, F.cross_entropy, inputs, targets)
    after = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
