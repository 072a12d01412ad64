"""The two forms of the step time as formulas, and how their parameters are found from runs.

Seconds and samples throughout; `step_time` states the formulas and is the interface. Parameters are one array in the
order of `ADDITIVE_NAMES` or `OVERLAP_NAMES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

Array = NDArray[Any]
Configurations = tuple[Array, Array, Array, Array]
"""N, g, b and a of each row."""

LEAST_ALPHA = 0.01
"""Share of the shortest measured step that the additive form always keeps as its constant."""

STEP_NOISE = 0.1
"""log(predicted / measured) beyond which a run pulls no harder: usual for small batches between nodes."""
TYPICAL_GAMMA = 3.0
"""Overlap that is assumed until runs say otherwise: data-parallel training hides all but the peak of the two times."""
GAMMA_SPREAD = 0.1
"""log(gamma) this far from the typical one begins to need the support of the runs."""

ADDITIVE_NAMES = ("alpha", "beta", "s", "l")
OVERLAP_NAMES = ("alpha", "beta", "t0", "c_n", "lambda", "kappa", "c_r", "gamma")
ALPHA, BETA, T0, C_N, LAMBDA, KAPPA, C_R, GAMMA = range(len(OVERLAP_NAMES))

_ONE_BATCH = "One batch size: half of the compute time was taken as independent of the batch (alpha, t0 not told)."


class Collective(str, Enum):
    """How gradients are averaged over R ranks; Eq. (2c) and the text below it."""

    RING = "ring"
    TREE = "tree"
    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"
    PARAMETER_SERVER = "parameter_server"


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
    accumulation: Array
    """a, batches computed before each synchronisation."""

    def take(self, rows: NDArray[np.bool_]) -> Runs:
        """The runs in `rows` only."""
        return Runs(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class Estimate:
    """Parameters found from runs."""

    values: Array
    """In the order of the form's names; seconds."""
    unidentified: tuple[str, ...]
    """Parameters that matter and that the runs could not tell."""
    notes: tuple[str, ...]
    """What was assumed instead, one sentence each."""
    converged: bool
    """False when the optimiser gave up from every start."""


def additive_step(values: Array, configurations: Configurations, collective: Collective) -> Array:
    """a (alpha + beta b) + t_sync(R), with the synchronisation of the collective; seconds."""
    return np.asarray(_additive_terms(*configurations, collective) @ values)


def _additive_terms(nodes: Array, gpus: Array, batch: Array, accumulation: Array, collective: Collective) -> Array:
    ranks = nodes * gpus
    ring, rounds = 1 - 1 / ranks, np.ceil(np.log2(ranks))
    sync = {
        Collective.RING: [ring],
        Collective.TREE: [rounds],
        Collective.REDUCE_SCATTER_ALL_GATHER: [ring, rounds],
        Collective.PARAMETER_SERVER: [np.where(ranks > 1, ranks, 0.0)],
    }[collective]
    return np.stack([accumulation, accumulation * batch, *sync], axis=1)


def fit_additive(runs: Runs, collective: Collective) -> Estimate:
    """Least squares on the step time in seconds with parameters >= 0; the paper names no loss and no bounds.

    alpha keeps a hundredth of the shortest step, so that no prediction is 0 s.
    """
    batch, ranks = runs.batch, runs.nodes * runs.gpus
    terms = _additive_terms(runs.nodes, runs.gpus, batch, runs.accumulation, collective)
    one_batch, one_cluster = len(set(batch)) == 1, len(set(ranks)) == 1
    one_sync = len(set(ranks[ranks > 1])) < 2
    rules = [
        (True, ""),
        (not one_batch, _ONE_BATCH),
        (not one_cluster, "One number of ranks: synchronisation is part of alpha and s was set to 0."),
        (not one_sync, "One number of ranks above 1: no latency of the rounds (l = 0)."),
    ][: terms.shape[1]]
    free = [index for index, (told, _) in enumerate(rules) if told]
    scale = np.maximum(terms[:, free].max(axis=0), 1e-300)
    values = np.zeros(terms.shape[1])
    lowest = np.zeros(len(free))
    lowest[0] = LEAST_ALPHA * (runs.step_s / runs.accumulation).min()
    bounds = (lowest * scale, np.inf)
    values[free] = optimize.lsq_linear(terms[:, free] / scale, runs.step_s, bounds, method="bvls").x / scale
    if one_batch:
        values[0], values[1] = values[0] / 2, values[0] / 2 / batch[0]
    untold = [index for index, (told, _) in enumerate(rules) if not told]
    names, notes = (tuple(each[index] for index in untold) for each in (ADDITIVE_NAMES, [note for _, note in rules]))
    return Estimate(values, names, notes, converged=True)


def overlap_step(values: Array, nodes: Array, gpus: Array, batch: Array, accumulation: Array | float = 1.0) -> Array:
    """(a - 1) T_c + (T_c^gamma + T_s^gamma)^(1/gamma), seconds.

    T_c is taken out of the power so that no scale of time overflows.
    """
    compute, sync, gamma = _overlap_compute(values, batch), _overlap_sync(values, nodes, gpus), values[GAMMA]
    # A power of zero has no complex derivative, so rows without synchronisation get a ratio that is not used.
    ratio = np.where(sync == 0, 1.0, sync / compute)
    last = np.where(sync == 0, compute, compute * (1 + ratio**gamma) ** (1 / gamma))
    return np.asarray((accumulation - 1) * compute + last)


def _overlap_compute(values: Array, batch: Array) -> Array:
    line = values[ALPHA] + values[BETA] * batch
    return np.asarray(((values[T0] * values[T0]) ** 2 + (line * line) ** 2) ** 0.25)


def _overlap_sync(values: Array, nodes: Array, gpus: Array) -> Array:
    between = values[C_N] + values[LAMBDA] * _growth(nodes) + values[KAPPA] * (gpus - 1)
    return np.where(nodes > 1, between, values[C_R] * 2 * (gpus - 1) / gpus)


def _growth(nodes: Array) -> Array:
    return np.asarray(np.maximum(nodes - 2, 0))


def _told_apart(runs: Runs) -> tuple[list[int], tuple[str, ...], tuple[str, ...]]:
    """Which parameters of the overlap form the runs can tell; the names of the others that matter, and a note for each.

    What has no contrast in the data is set to its simplest or typical value instead of being left to the optimiser,
    which would return an arbitrary one; so does AdaptDL.
    """
    nodes, gpus, batch = runs.nodes, runs.gpus, runs.batch
    between, within = nodes > 1, (nodes == 1) & (gpus > 1)
    synced, known = between | within, np.isfinite(runs.compute_s)
    batches, several_gpus = len(set(batch)), bool((gpus > 1).any())
    contrast = len(set(batch[synced])) > 1 and (len(set(batch[synced & known])) > 1 or len(batch) > 3)
    growth = len(set(np.maximum(nodes[between], 2))) > 1
    rules = [
        # Of the two constants of computation, two batch sizes tell one; a floor predicts the middle better.
        (ALPHA, batches > 2, "" if batches == 1 else "Two batch sizes: only a floor of the compute time (alpha = 0)."),
        (BETA, True, ""),
        (T0, batches > 1, _ONE_BATCH),
        (
            C_N,
            between.any(),
            "No run on several nodes: their synchronisation (c_n) was taken as 1.1 times that in one.",
        ),
        (LAMBDA, growth, "One number of nodes above 1: no growth of synchronisation with nodes (lambda = 0)."),
        (
            KAPPA,
            len(set(gpus[between])) > 1,
            "One number of GPUs per node on several nodes: kappa = 0, its share is part of c_n."
            if several_gpus
            else "",
        ),
        (
            C_R,
            within.any(),
            "No run on several GPUs of one node: their links (c_r) were taken as 1.1 times faster than "
            "those between nodes."
            if several_gpus
            else "",
        ),
        (GAMMA, contrast, f"No contrast to tell how much overlaps: taken as usual (gamma = {TYPICAL_GAMMA:g})."),
    ]
    untold = [(index, note) for index, told, note in rules if note and not told]
    names = tuple(OVERLAP_NAMES[index] for index, _ in untold)
    return [index for index, told, _ in rules if told], names, tuple(note for _, note in untold)


def fit_overlap(runs: Runs, near: Array | None = None) -> Estimate:
    """Bounded quasi-Newton on the log error, in units of the median step and the largest batch.

    Minimises  sum_i h(e_i / STEP_NOISE) + log(1 + (log(gamma / TYPICAL_GAMMA) / GAMMA_SPREAD)^2), where e_i is
    log(predicted / measured) of each step and of each compute time that is known, and h(x) = 2 (sqrt(1 + x^2) - 1) is
    x^2 for small and 2 |x| for large errors: a run far off pulls no harder than one somewhat off. The pull on gamma
    grows so slowly that it gives way where four runs show that nothing overlaps. The units make the fit
    independent of whether times are seconds or milliseconds. `near`, the values of a fit to almost the same runs,
    saves the six starts.
    """
    unit, largest = float(np.median(runs.step_s)), float(runs.batch.max())
    configurations = (runs.nodes, runs.gpus, runs.batch / largest, runs.accumulation)
    free, unidentified, notes = _told_apart(runs)
    known = np.isfinite(runs.compute_s)
    log_step = np.log(runs.step_s / unit)
    log_compute = np.log(runs.compute_s[known] / runs.accumulation[known] / unit)

    def loss(values: Array) -> Array:
        # `values` is (parameters, points, 1), the result (points,).
        compute = _overlap_compute(values, configurations[2][known])
        misfit = _misfit(np.log(overlap_step(values, *configurations)) - log_step) + _misfit(
            np.log(compute) - log_compute
        )
        return np.asarray(misfit + np.log(1 + (np.log(values[GAMMA, :, 0] / TYPICAL_GAMMA) / GAMMA_SPREAD) ** 2))

    units = np.array([unit, unit / largest, unit, unit, unit, unit, unit, 1.0])
    starts = _starts() if near is None else [np.maximum(near / units, 1e-3)]
    values, converged = _minimise(loss, free, starts)
    if T0 not in free and ALPHA not in free:
        values[ALPHA] = values[BETA] = values[BETA] / 2
    _assume_unseen_link(values, free, float(runs.gpus.max()))
    return Estimate(values * units, unidentified, notes, converged)


def _misfit(errors: Array) -> Array:
    return np.asarray(np.sum(2 * (np.sqrt(1 + (errors / STEP_NOISE) ** 2) - 1), axis=-1))


def _starts() -> list[Array]:
    """Six starts: three amounts of overlap times two splits of the median step into compute and synchronisation."""
    return [
        np.array([compute / 2, compute / 2, compute / 10, sync, sync / 10, sync / 10, sync, overlap])
        for overlap in (1.5, 3.0, 6.0)
        for compute, sync in ((0.3, 0.7), (0.8, 0.2))
    ]


def _minimise(loss: Callable[[Array], Array], free: list[int], starts: list[Array]) -> tuple[Array, bool]:
    """The values of the best start, and whether any start converged.

    The gradient is a complex step, Im loss(x + i h) / h: exact to rounding and without a derivation to maintain.
    """
    fixed = np.zeros(len(OVERLAP_NAMES))
    fixed[GAMMA] = TYPICAL_GAMMA
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
