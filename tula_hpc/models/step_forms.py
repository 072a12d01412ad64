"""The two forms of the step time as formulas, and how their parameters are found from runs.

Seconds and samples throughout; `step_time` states the formulas and is the interface. Parameters are one array in the
order of `ADDITIVE_NAMES` or `OVERLAP_NAMES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

Array = NDArray[Any]

LEAST_ALPHA = 0.01
"""Share of the shortest measured step that the additive form always keeps as its constant."""

ADDITIVE_NAMES = ("alpha", "beta", "s")
OVERLAP_NAMES = ("alpha", "beta", "t0", "c_n", "lambda", "kappa", "c_r", "gamma")
ALPHA, BETA, T0, C_N, LAMBDA, KAPPA, C_R, GAMMA = range(len(OVERLAP_NAMES))

_ONE_BATCH = "One batch size: half of the compute time was taken as independent of the batch."


@dataclass(frozen=True)
class Runs:
    """Measured runs as columns of equal length."""

    nodes: Array
    """N."""
    gpus: Array
    """g, per node."""
    batch: Array
    """b, per rank."""
    step_s: Array
    """Seconds of a step, positive."""
    compute_s: Array
    """Seconds of its computation; NaN where unknown."""

    def take(self, rows: NDArray[np.bool_]) -> Runs:
        """The runs in `rows` only."""
        return Runs(self.nodes[rows], self.gpus[rows], self.batch[rows], self.step_s[rows], self.compute_s[rows])


@dataclass(frozen=True)
class Estimate:
    """Parameters found from runs."""

    values: Array
    """In the order of the form's names; seconds."""
    notes: tuple[str, ...]
    """What the runs could not tell and what was assumed instead."""
    converged: bool
    """False when the optimiser gave up from every start."""


def additive_step(values: Array, nodes: Array, gpus: Array, batch: Array, ring: bool) -> Array:
    """alpha + beta b + s (1 - 1/R) for a ring, s R (R > 1) for a parameter server."""
    return np.asarray(_additive_terms(nodes * gpus, batch, ring) @ values)


def _additive_terms(ranks: Array, batch: Array, ring: bool) -> Array:
    sync = 1 - 1 / ranks if ring else np.where(ranks > 1, ranks, 0.0)
    return np.stack([np.ones_like(batch), batch, sync], axis=1)


def fit_additive(runs: Runs, ring: bool) -> Estimate:
    """Least squares on the step time in seconds with parameters >= 0; the paper names no loss and no bounds.

    alpha keeps a hundredth of the shortest step, so that no prediction is 0 s.
    """
    ranks, batch = runs.nodes * runs.gpus, runs.batch
    terms = _additive_terms(ranks, batch, ring)
    one_batch, one_cluster = len(set(batch)) == 1, len(set(ranks)) == 1
    free = [0] + [1] * (not one_batch) + [2] * (not one_cluster)
    scale = np.maximum(terms[:, free].max(axis=0), 1e-300)
    values = np.zeros(len(ADDITIVE_NAMES))
    lowest = np.zeros(len(free))
    lowest[0] = LEAST_ALPHA * runs.step_s.min()
    bounds = (lowest * scale, np.inf)
    values[free] = optimize.lsq_linear(terms[:, free] / scale, runs.step_s, bounds, method="bvls").x / scale
    notes = []
    if one_batch:
        values[0], values[1] = values[0] / 2, values[0] / 2 / batch[0]
        notes.append(_ONE_BATCH)
    if one_cluster:
        notes.append("One number of ranks: synchronisation is part of alpha and s was set to 0.")
    return Estimate(values, tuple(notes), converged=True)


def overlap_step(values: Array, nodes: Array, gpus: Array, batch: Array) -> Array:
    """(T_c^gamma + T_s^gamma)^(1/gamma), with T_c taken out of the power so that no scale of time overflows."""
    compute, sync, gamma = _overlap_compute(values, batch), _overlap_sync(values, nodes, gpus), values[GAMMA]
    # A power of zero has no complex derivative, so rows without synchronisation get a ratio that is not used.
    ratio = np.where(sync == 0, 1.0, sync / compute)
    return np.asarray(np.where(sync == 0, compute, compute * (1 + ratio**gamma) ** (1 / gamma)))


def _overlap_compute(values: Array, batch: Array) -> Array:
    line = values[ALPHA] + values[BETA] * batch
    return np.asarray(((values[T0] * values[T0]) ** 2 + (line * line) ** 2) ** 0.25)


def _overlap_sync(values: Array, nodes: Array, gpus: Array) -> Array:
    between = values[C_N] + values[LAMBDA] * np.maximum(nodes - 2, 0) + values[KAPPA] * (gpus - 1)
    return np.where(nodes > 1, between, values[C_R] * 2 * (gpus - 1) / gpus)


def _told_apart(runs: Runs) -> tuple[list[int], tuple[str, ...]]:
    """Which parameters of the overlap form the runs can tell, and a note for each other one that matters.

    The rules follow AdaptDL: what has no contrast in the data is set to its simplest value instead of being left to
    the optimiser, which would return an arbitrary one.
    """
    nodes, gpus, batch = runs.nodes, runs.gpus, runs.batch
    between, within = nodes > 1, (nodes == 1) & (gpus > 1)
    synced, known = between | within, np.isfinite(runs.compute_s)
    contrast = len(set(batch[synced])) > 1 and (len(set(batch[synced & known])) > 1 or len(batch) > 3)
    growth = len(set(np.maximum(nodes[between], 2))) > 1
    kappa_note = "" if len(set(gpus)) == 1 else "One number of GPUs per node on several nodes: kappa = 0."
    rules = [
        (ALPHA, len(set(batch)) > 1, _ONE_BATCH),
        (BETA, True, ""),
        (T0, len(set(batch)) > 2, "Fewer than three batch sizes: no floor of the compute time (t0 = 0)."),
        (C_N, between.any(), "No run on several nodes: their synchronisation was taken as 1.1 times that in one node."),
        (LAMBDA, growth, "One number of nodes above 1: no growth of synchronisation with nodes (lambda = 0)."),
        (KAPPA, len(set(gpus[between])) > 1, kappa_note),
        (C_R, within.any(), ""),
        (GAMMA, contrast, "No contrast to tell overlap from none: synchronisation was added in full (gamma = 1)."),
    ]
    return [index for index, told, _ in rules if told], tuple(note for _, told, note in rules if note and not told)


def fit_overlap(runs: Runs, near: Array | None = None) -> Estimate:
    """Bounded quasi-Newton on the log error, in units of the median step and the largest batch.

    The units make the fit independent of whether times are seconds or milliseconds. `near`, the values of a fit to
    almost the same runs, saves the six starts.
    """
    unit, largest = float(np.median(runs.step_s)), float(runs.batch.max())
    nodes, gpus, batch = runs.nodes, runs.gpus, runs.batch / largest
    free, notes = _told_apart(runs)
    known = np.isfinite(runs.compute_s)
    log_step, log_compute = np.log(runs.step_s / unit), np.log(runs.compute_s[known] / unit)

    def loss(values: Array) -> Array:
        # AdaptDL's objective. Its weak pulls (towards no overlap, and growth small against the base) decide only what
        # the measurements leave open. `values` is (parameters, points, 1), the result (points,).
        total = _smooth_rms(np.log(overlap_step(values, nodes, gpus, batch)) - log_step)
        if known.any():
            total = total + _smooth_rms(np.log(_overlap_compute(values, batch[known])) - log_compute)
        if LAMBDA in free:
            total = total + 1e-2 * (values[LAMBDA, :, 0] / values[C_N, :, 0]) ** 2
        return np.asarray(total + 1e-3 * (values[GAMMA, :, 0] - 1) ** 2)

    units = np.array([unit, unit / largest, unit, unit, unit, unit, unit, 1.0])
    starts = _starts() if near is None else [np.maximum(near / units, 1e-3)]
    values, converged = _minimise(loss, free, starts)
    if ALPHA not in free:
        values[ALPHA] = values[BETA] = values[BETA] / 2
    _assume_unseen_link(values, free, float(gpus.max()))
    return Estimate(values * units, notes, converged)


def _smooth_rms(errors: Array) -> Array:
    # The root of a mean square has no derivative at a perfect fit, where synthetic data ends; 1e-4 is far below noise.
    return np.asarray(np.sqrt(np.mean(errors * errors, axis=-1) + 1e-8))


def _starts() -> list[Array]:
    """Six starts: three amounts of overlap times two splits of the median step into compute and synchronisation."""
    return [
        np.array([compute / 2, compute / 2, compute / 10, sync, sync / 10, sync / 10, sync, overlap])
        for overlap in (1.0, 2.0, 4.0)
        for compute, sync in ((0.3, 0.7), (0.8, 0.2))
    ]


def _minimise(loss: Callable[[Array], Array], free: list[int], starts: list[Array]) -> tuple[Array, bool]:
    """The values of the best start, and whether any start converged.

    The gradient is a complex step, Im loss(x + i h) / h: exact to rounding and without a derivation to maintain.
    """
    fixed = np.zeros(len(OVERLAP_NAMES))
    fixed[GAMMA] = 1.0
    bounds = [(1.0, 10.0) if index == GAMMA else (1e-6, None) for index in free]
    steps = 1e-30j * np.eye(len(OVERLAP_NAMES))[:, free]

    def value_and_gradient(x: Array) -> tuple[float, Array]:
        values = fixed.copy()
        values[free] = x
        losses = loss((values[:, None] + steps)[:, :, None])
        return float(losses[0].real), losses.imag / 1e-30

    results = [
        optimize.minimize(value_and_gradient, start[free], jac=True, bounds=bounds, method="L-BFGS-B")
        for start in starts
    ]
    best = min(results, key=lambda result: float(result.fun) if np.isfinite(result.fun) else math.inf)
    fixed[free] = best.x
    return fixed, any(result.success for result in results)


def _assume_unseen_link(values: Array, free: list[int], gpus: float) -> None:
    """Fills in the kind of link never measured, between nodes or within one: the former takes 1.1 times the latter."""
    within = 2 * (gpus - 1) / gpus if gpus > 1 else 1.0
    if C_N not in free:
        values[C_N] = 1.1 * values[C_R] * within
    elif C_R not in free:
        values[C_R] = (values[C_N] + values[KAPPA] * (gpus - 1)) / 1.1 / within
