"""Small nets, their data, and optimizers around them, for the tests of adaptive gradient scaling."""

import torch
from torch import nn
from torch.optim import SGD

from tula_hpc.optim.ags import TulaOptimizer

BATCH = 16
SCALES = {"element": (3, 4), "channel": (3, 1), "tensor": (), "global": ()}


def sgd(parameters, lr=0.1):
    return SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def noisy_net():
    """BatchNorm has buffers, Dropout draws random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def data(step=0, batch=BATCH):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(batch, 6, generator=generator), torch.randint(3, (batch,), generator=generator)


def train(model, optimizer, steps, first=0, refresh_every=0, scheduler=None):
    """Plain training; returns the weights after each step."""
    history = []
    for step in range(first, first + steps):
        inputs, targets = data(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if refresh_every and step % refresh_every == 0:
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        history.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return history


def tula(model, **options):
    return TulaOptimizer(sgd(model.parameters()), **({"global_batch": BATCH, "small_batch": 4} | options))


def with_gradients(values, **options):
    """An optimizer (learning rate 1) on one weight vector, and a function that steps with a given gradient and
    returns what the step multiplied it by."""
    weight = nn.Parameter(torch.zeros(len(values)))
    optimizer = TulaOptimizer(SGD([weight], lr=1.0), **({"global_batch": 4, "small_batch": 2} | options))

    def step(gradient):
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        return ((before - weight.detach()) / torch.tensor(gradient)).tolist()

    return optimizer, step


class Mean(nn.Module):
    """Loss = mean over samples of w . x, so that the gradient is the mean of the samples."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, inputs):
        return inputs @ self.weight


def mean_loss(outputs, targets):
    return outputs.mean()
