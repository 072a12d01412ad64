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
ALLREDUCE_NOISE = 0.03
"""log(T_s / all-reduce measured by itself) beyond which it is of no use: between nodes the two agree to 1-2 %."""
ALLREDUCE_WEIGHT = 3.0
"""The most that an all-reduce can weigh, which is what a step 17 % off does."""

SETTLED = 1e-6
"""Relative change of the loss below which a start is done; the smaller, the longer a fit takes."""

ADDITIVE_NAMES = ("alpha", "beta", "s", "l")
OVERLAP_NAMES = ("alpha", "beta", "t_floor", "c_ring", "lambda", "kappa", "c_r", "before_sync", "after_backward")
ALPHA, BETA, T_FLOOR, C_RING, LAMBDA, KAPPA, C_R, BEFORE_SYNC, AFTER_BACKWARD = range(len(OVERLAP_NAMES))
COMPUTE, SYNC = slice(ALPHA, T_FLOOR + 1), slice(C_RING, C_R + 1)

TYPICAL_SHARES = {BEFORE_SYNC: 0.35, AFTER_BACKWARD: 0.08}
"""Assumed until runs say otherwise: a third of computation is the forward pass, and the last bucket is a small one (but
see `_usual_shares`)."""
SHARE_SPREADS = {BEFORE_SYNC: 0.15, AFTER_BACKWARD: 0.25}
"""log(share) this far from the typical one begins to need the support of the runs."""
FIRST_BUCKET_MIB, BUCKET_MIB = 1.0, 25.0
"""Gradients that DDP averages at once: those complete first, then so much at a time."""
ONE_BUCKET = 0.95
"""after_backward that is usual where nothing is averaged before all gradients are complete."""
FLOOR_POWER = 3.0
"""Power of the sum of the least compute time and the line: 1 adds them, infinite takes the larger. It is part of what
the parameters mean: with another one, t_floor gets another name, and fits on record are refused."""
SHARPNESS = 6.0
"""Power of the smooth minimum of what could hide and what could be hidden; infinite: the smaller of the two."""

_ONE_BATCH = "One batch size: half of the compute time was taken as independent of the batch (alpha, t_floor not told)."


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
    allreduce_s: Array
    """Seconds of an all-reduce as large as the gradients over the same ranks, by itself; NaN where unknown."""
    gradient_mib: Array
    """MiB of the gradients; NaN where unknown."""

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
    """a T_c + T_s - m, with m the smooth minimum of (1 - before_sync) T_c and (1 - after_backward) T_s; seconds."""
    compute = _compute(values, batch)[0]
    return _step(values, compute, _sync_terms(nodes, gpus) @ values[SYNC], accumulation)[0]


def _step(values: Array, compute: Array, sync: Array, accumulation: Array | float) -> tuple[Array, Array, Array]:
    """The step, and how much of one more second of what could hide, and of what could be hidden, is hidden.

    Their ratio is taken to the power, so that no scale of time overflows.
    """
    hiding, hideable = (1 - values[BEFORE_SYNC]) * compute, (1 - values[AFTER_BACKWARD]) * sync
    share = (1 + (hideable / hiding) ** SHARPNESS) ** (-1 / SHARPNESS)
    hidden = hideable * share
    by_hiding, by_hideable = (hidden / hiding) ** (SHARPNESS + 1), share ** (SHARPNESS + 1)
    return np.asarray(accumulation * compute + sync - hidden), by_hiding, by_hideable


def _compute(values: Array, batch: Array) -> tuple[Array, Array, Array]:
    """T_c, and its slopes by alpha, which times the batch is that by beta, and by t_floor."""
    line = values[ALPHA] + values[BETA] * batch
    compute = (values[T_FLOOR] ** FLOOR_POWER + line**FLOOR_POWER) ** (1 / FLOOR_POWER)
    return compute, (line / compute) ** (FLOOR_POWER - 1), (values[T_FLOOR] / compute) ** (FLOOR_POWER - 1)


def _sync_terms(nodes: Array, gpus: Array) -> Array:
    """What c_ring, lambda, kappa and c_r are multiplied by, in the last axis."""
    between = nodes > 1
    terms = [
        np.where(between, _ring(nodes * gpus), 0.0),
        between * _growth(nodes),
        between * (gpus - 1),
        np.where(between, 0.0, _ring(gpus)),
    ]
    return np.stack(terms, axis=-1).astype(float)


def _ring(ranks: Array | float) -> Array:
    """How often a ring of so many ranks moves the gradients over each link; 1 for two ranks."""
    return np.asarray(2 * (ranks - 1) / ranks)


def _growth(nodes: Array) -> Array:
    return np.asarray(np.maximum(nodes - 2, 0))


def _usual_shares(runs: Runs) -> dict[int, float]:
    """`TYPICAL_SHARES`, but for gradients so few that all beside the first bucket wait for the end of backward.

    MobileNetV3 has 17 MiB, and of 15 ms of an all-reduce by itself 11 to 12 were waited for at any batch.
    """
    known = runs.gradient_mib[np.isfinite(runs.gradient_mib)]
    mib = float(known.max()) if len(known) else math.inf
    after_backward = TYPICAL_SHARES[AFTER_BACKWARD]
    if mib <= FIRST_BUCKET_MIB:
        after_backward = ONE_BUCKET
    elif mib <= FIRST_BUCKET_MIB + BUCKET_MIB:
        after_backward = max(after_backward, min(1 - FIRST_BUCKET_MIB / mib, ONE_BUCKET))
    return {**TYPICAL_SHARES, AFTER_BACKWARD: after_backward}


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
    usual = {
        share: f"No contrast to tell how much overlaps: {OVERLAP_NAMES[share]} was taken as usual ({typical:g})."
        for share, typical in _usual_shares(runs).items()
    }
    rules = [
        # Of the two constants of computation, two batch sizes tell one; a floor predicts the middle better.
        (ALPHA, batches > 2, "" if batches == 1 else "Two batch sizes: only a floor of the compute time (alpha = 0)."),
        (BETA, True, ""),
        (T_FLOOR, batches > 1, _ONE_BATCH),
        (
            C_RING,
            between.any(),
            "No run on several nodes: synchronisation of two (c_ring) was taken as 1.1 times that in one.",
        ),
        (LAMBDA, growth, "One number of nodes above 1: no growth of synchronisation with nodes (lambda = 0)."),
        (
            KAPPA,
            len(set(gpus[between])) > 1,
            "One number of GPUs per node on several nodes: kappa = 0, its share is part of c_ring."
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
        *((share, contrast, note) for share, note in usual.items()),
    ]
    untold = [(index, note) for index, told, note in rules if note and not told]
    names = tuple(OVERLAP_NAMES[index] for index, _ in untold)
    return [index for index, told, _ in rules if told], names, tuple(note for _, note in untold)


def fit_overlap(runs: Runs, near: Array | None = None) -> Estimate:
    """Bounded quasi-Newton on the log error, in units of the median step and the largest batch.

    Minimises  sum_i h(e_i / STEP_NOISE) + sum_j w(d_j / ALLREDUCE_NOISE) + sum_k log(1 + (log(k / typical) / spread)^2)
    where e_i is log(predicted / measured) of each step and of each compute time that is known, d_j is log(T_s /
    measured) of each all-reduce that is known, and k is before_sync and after_backward.
    - h(x) = 2 (sqrt(1 + x^2) - 1) is x^2 for small and 2 |x| for large errors: a run far off pulls no harder than one
      somewhat off.
    - w(x) = ALLREDUCE_WEIGHT x^2 / (1 + x^2): an all-reduce is near T_s or tells nothing of it, as inside a node, where
      steps with synchronisation cost the host far more than the sum takes.
    - The pulls on the shares grow so slowly that they give way where four runs show that nothing overlaps.
    The units make the fit independent of whether times are seconds or milliseconds. `near`, the values of a fit to
    almost the same runs, saves the four starts.
    """
    unit, largest = float(np.median(runs.step_s)), float(runs.batch.max())
    batch, terms = runs.batch / largest, _sync_terms(runs.nodes, runs.gpus)
    free, unidentified, notes = _told_apart(runs)
    known, told = np.isfinite(runs.compute_s), np.isfinite(runs.allreduce_s)
    log_step = np.log(runs.step_s / unit)
    log_compute = np.log(runs.compute_s[known] / runs.accumulation[known] / unit)
    log_allreduce = np.log(runs.allreduce_s[told] / unit)
    usual = _usual_shares(runs)
    shares, typical, spread = list(usual), np.array(list(usual.values())), np.array(list(SHARE_SPREADS.values()))

    def loss(values: Array) -> tuple[float, Array]:
        """What is minimised, and its gradient."""
        (compute, by_line, by_floor), sync = _compute(values, batch), terms @ values[SYNC]
        step, by_hiding, by_hideable = _step(values, compute, sync, runs.accumulation)
        of_steps, step_pull = _misfit(np.log(step) - log_step)
        of_computes, compute_pull = _misfit(np.log(compute[known]) - log_compute)
        of_sums, sync_pull = _bounded_misfit(np.log(sync[told]) - log_allreduce)
        unusual = np.log(values[shares] / typical) / spread
        per_step = step_pull / step
        per_compute = per_step * (runs.accumulation - (1 - values[BEFORE_SYNC]) * by_hiding)
        per_compute[known] += compute_pull / compute[known]
        per_sync = per_step * (1 - (1 - values[AFTER_BACKWARD]) * by_hideable)
        per_sync[told] += sync_pull / sync[told]
        gradient = np.zeros(len(OVERLAP_NAMES))
        per_line = per_compute * by_line
        gradient[COMPUTE] = per_line.sum(), per_line @ batch, per_compute @ by_floor
        gradient[SYNC] = per_sync @ terms
        gradient[BEFORE_SYNC] = per_step @ (by_hiding * compute)
        gradient[AFTER_BACKWARD] = per_step @ (by_hideable * sync)
        gradient[shares] += 2 * unusual / (1 + unusual**2) / spread / values[shares]
        return of_steps + of_computes + of_sums + float(np.log(1 + unusual**2).sum()), gradient

    units = np.array([unit, unit / largest, unit, unit, unit, unit, unit, 1.0, 1.0])
    starts = _starts(usual) if near is None else [np.maximum(near / units, 1e-3)]
    values, converged = _minimise(loss, free, starts, usual)
    if T_FLOOR not in free and ALPHA not in free:
        values[ALPHA] = values[BETA] = values[BETA] / 2
    _assume_unseen_link(values, free, float(runs.gpus.max()))
    return Estimate(values * units, unidentified, notes, converged)


def _misfit(errors: Array) -> tuple[float, Array]:
    """sum of h, and the slope of h at each error."""
    roots = np.sqrt(1 + (errors / STEP_NOISE) ** 2)
    return float(2 * (roots.sum() - len(roots))), 2 * errors / STEP_NOISE**2 / roots


def _bounded_misfit(errors: Array) -> tuple[float, Array]:
    """sum of w, and the slope of w at each error."""
    if not len(errors):
        return 0.0, errors
    more = 1 + (errors / ALLREDUCE_NOISE) ** 2
    return float(ALLREDUCE_WEIGHT * (1 - 1 / more).sum()), ALLREDUCE_WEIGHT * 2 * errors / ALLREDUCE_NOISE**2 / more**2


def _starts(usual: dict[int, float]) -> list[Array]:
    """Usual overlap and next to none, each with two splits of the median step into compute and synchronisation."""
    return [
        np.array([compute / 2, compute / 2, compute / 10, sync, sync / 50, sync / 10, sync, *shares])
        for shares in (usual.values(), (0.95, usual[AFTER_BACKWARD]))
        for compute, sync in ((0.3, 0.7), (0.8, 0.2))
    ]


def _minimise(
    loss: Callable[[Array], tuple[float, Array]], free: list[int], starts: list[Array], usual: dict[int, float]
) -> tuple[Array, bool]:
    """The values of the best start, and whether any start converged."""
    fixed = np.zeros(len(OVERLAP_NAMES))
    fixed[list(usual)] = list(usual.values())
    bounds = [(1e-2, 1 - 1e-6) if index in usual else (1e-6, None) for index in free]

    def value_and_gradient(x: Array) -> tuple[float, Array]:
        values = fixed.copy()
        values[free] = x
        value, gradient = loss(values)
        return value, gradient[free]

    results = [
        optimize.minimize(
            value_and_gradient, start[free], jac=True, bounds=bounds, method="L-BFGS-B", options={"ftol": SETTLED}
        )
        for start in starts
    ]
    best = min(results, key=lambda result: float(result.fun) if np.isfinite(result.fun) else math.inf)
    fixed[free] = best.x
    return fixed, any(result.success for result in results)


def _assume_unseen_link(values: Array, free: list[int], gpus: float) -> None:
    """Fills in the kind of link never measured, between nodes or within one: two of the former take 1.1 times as long
    as one node."""
    between, within = float(_ring(2 * gpus)), float(_ring(gpus)) if gpus > 1 else 1.0
    if C_RING not in free:
        values[C_RING] = 1.1 * values[C_R] * within / between
    elif C_R not in free:
        values[C_R] = (values[C_RING] * between + values[KAPPA] * (gpus - 1)) / 1.1 / within
