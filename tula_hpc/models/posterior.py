"""What a fitted form and the measured points say together: measured points are known within noise, their neighbours
better than the rest.

The form leaves an error log(measured / predicted) at each measured point. It is taken as a Gaussian process over
(log2 N, log2 g, log2 b) with the form's own typical error as standard deviation and a correlation of exp(-d) at a
distance of d doublings (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, Eq. 2.23 and 2.24). One
doubling was the most likely of 1/2 to 8 on subsets of the public traces, where the errors of points further apart are
close to independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tula_hpc.candidates import SIZES
from tula_hpc.models.step_time import StepTimeFit

Array = NDArray[Any]

NOISE = 0.005
"""log error of one measurement: the spread of a median over repeated runs."""


@dataclass(frozen=True)
class Posterior:
    """log(true / predicted by the form) of each row of a table."""

    mean: Array
    """(rows,); what the form is corrected by."""
    covariance: Array
    """(rows, rows); the uncertainty of the difference of two rows is C_ii + C_jj - 2 C_ij."""


def posterior(fit: StepTimeFit, measured: pd.DataFrame, table: pd.DataFrame) -> Posterior:
    """Conditions the error of `fit` in each row of `table` on the measured steps.

    Args:
        fit: The form, fitted to these or other measurements.
        measured: num_nodes, gpus_per_node, batch_per_rank, step_time_s; several rows of a configuration count with
            their median, rows without a positive finite time not at all. Neither do rows with allocator_retries, if
            that is known: a form is not fitted to them, and their neighbours do not share what slows them.
        table: num_nodes, gpus_per_node, batch_per_rank.
    """
    seen = pd.DataFrame(columns=[*SIZES, "step_time_s"], dtype=float)
    if len(measured):
        rows = measured.reindex(columns=[*SIZES, "step_time_s", "allocator_retries"]).astype(float)
        usable = np.isfinite(rows["step_time_s"]) & (rows["step_time_s"] > 0) & ~(rows["allocator_retries"] > 0)
        seen = rows.loc[usable]
        seen = seen.groupby(SIZES, as_index=False)["step_time_s"].median()
    prior = fit.log_error**2 * _correlation(table, table)
    if seen.empty:
        return Posterior(np.zeros(len(table)), prior)
    left = np.log(seen["step_time_s"].to_numpy() / fit.predict(seen))
    across = fit.log_error**2 * _correlation(table, seen)
    known = fit.log_error**2 * _correlation(seen, seen) + NOISE**2 * np.eye(len(seen))
    weights = np.linalg.solve(known, across.T).T
    return Posterior(weights @ left, prior - weights @ across.T)


def correction(fit: StepTimeFit, measured: pd.DataFrame, table: pd.DataFrame) -> Array:
    """(rows,): what to multiply the seconds of `fit` by in each row of `table`; 1 if nothing is measured."""
    if measured.empty:
        return np.ones(len(table))
    return np.asarray(np.exp(posterior(fit, measured, table).mean))


def _correlation(a: pd.DataFrame, b: pd.DataFrame) -> Array:
    first, second = (np.log2(rows[SIZES].to_numpy(dtype=float)) for rows in (a, b))
    return np.asarray(np.exp(-np.sqrt(((first[:, None] - second[None]) ** 2).sum(axis=-1))))
