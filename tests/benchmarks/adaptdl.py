"""The step time of AdaptDL (Pollux, Qiao et al., OSDI'21), fitted as published: a peer of the forms of `step_time`.

    t = (T_c^gamma + T_s^gamma)^(1/gamma),  T_c = alpha_c + beta_c b,  T_s = alpha + beta max(R - 2, 0)

with alpha, beta of their own within a node and between nodes. Minimised is the root mean square log error of the time
without synchronisation plus that of the step, 1e-3 (gamma - 1)^2 and 1e-2 (beta / alpha)^2 of both kinds of link, from
one start, by a bounded quasi-Newton method with exact gradients; all times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import optimize

from tula_hpc.models.step_forms import Array, Runs

LEAST = 1e-8
START = np.array([1e-1, 1e-2, 1e-1, 1e-2, 1e-1, 1e-2, 1 + 1e-3])
"""alpha and beta of computation, between nodes and within one; gamma."""


def fit_adaptdl(runs: Runs) -> Callable[[pd.DataFrame], Array]:
    """Seconds per step of rows of num_nodes, gpus_per_node, batch_per_rank.

    Where compute times are unknown, only step times count.
    """
    nodes, ranks, known = runs.nodes, runs.nodes * runs.gpus, np.isfinite(runs.compute_s)
    start, low, high = START.copy(), np.full(7, LEAST), np.full(7, np.inf)
    low[6], high[6] = 1.0, 10.0
    unseen = []
    if len(set(runs.batch)) == 1:  # half of the time is taken as independent of the batch
        start[0] = low[0] = high[0] = np.nanmean(np.where(known, runs.compute_s, runs.step_s)) / 2
    if not (nodes > 1).any():
        unseen += [2, 3]
    elif ranks[nodes > 1].max() <= 2:
        unseen += [3]
    within = (nodes == 1) & (ranks > 1)
    if not within.any():
        unseen += [4, 5]
    elif ranks[within].max() <= 2:
        unseen += [5]
    start[unseen] = high[unseen] = LEAST

    def loss(values: Array) -> Array:
        step, compute = _step(values, runs.nodes, ranks, runs.batch)
        log_step, log_compute = np.log(step / runs.step_s), np.log(compute / runs.compute_s)[known]
        error = np.sqrt(np.mean(log_step**2))
        if known.any():
            error += np.sqrt(np.mean(log_compute**2))
        slopes = (values[3] / values[2]) ** 2 + (values[5] / values[4]) ** 2
        return np.asarray(error + 1e-3 * (values[6] - 1) ** 2 + 1e-2 * slopes)

    def value_and_gradient(values: Array) -> tuple[float, Array]:
        turned = [loss(values + 1e-30j * row).imag / 1e-30 for row in np.eye(7)]
        return float(loss(values)), np.array(turned)

    bounds = list(zip(low, high, strict=True))
    found = optimize.minimize(value_and_gradient, start, jac=True, bounds=bounds, method="L-BFGS-B").x
    if not (nodes > 1).any():
        found[2] = max(found[2], 1.1 * found[4])
        found[3] = max(found[3], 1.1 * found[5])

    def predict(rows: pd.DataFrame) -> Array:
        nodes, gpus, batch = (rows[name].to_numpy(float) for name in ("num_nodes", "gpus_per_node", "batch_per_rank"))
        return _step(found, nodes, nodes * gpus, batch)[0]

    return predict


def _step(values: Array, nodes: Array, ranks: Array, batch: Array) -> tuple[Array, Array]:
    compute = values[0] + values[1] * batch
    beyond = np.maximum(ranks - 2, 0)
    sync = np.where(nodes > 1, values[2] + values[3] * beyond, values[4] + values[5] * beyond)
    gamma = values[6]
    both = (compute**gamma + sync**gamma) ** (1 / gamma)
    return np.where(ranks > 1, both, compute), compute
