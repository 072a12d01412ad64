"""The knee of training time against global batch: where larger batches stop to pay (the paper's section III-A3)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from tula_hpc.candidates import keys_of

Array = NDArray[Any]

KNEE_GAIN = 0.10
"""Share of the training time that a doubling of the global batch must save to be worth it at the knee."""
KNEE_AGREEMENT = 0.05
"""Kneedle's knee decides where its time is within this share of that of the knee by gain."""
MIN_KNEE_POINTS = 5
"""Different global batches below which Kneedle is not asked: on few uneven points it returns an end point or none."""
POINTS_PER_DOUBLING = 16
"""Density of the curve handed to Kneedle."""

_AXES = {"log2_axis": "logarithmic", "linear_axis": "linear"}


def find_knee(rows: pd.DataFrame) -> tuple[int, dict[str, Any]]:
    """Index of the row at the knee of training time against global batch, and how it was found.

    By gain: the batch beyond which a doubling saves less than `KNEE_GAIN` of the time, so that T B^e is least with
    e = -log2(1 - KNEE_GAIN). That is Kneedle's criterion, the point farthest below a line, on log T against log B and
    with a line of this slope in place of the one through both ends: it does not depend on the range of batches, knows
    curves of any shape and number of points, and moves little when the times do.

    By Kneedle, as in the paper: on the lower envelope over clusters, made non-increasing and interpolated on log2 B,
    because on five to eight raw points it returns end points; on log2 B and on B. Kneedle scales both axes to [0, 1]:
    on T = p/B + q, with r = B_max / B_min, its knee is at B_min ln(r) on log2 B and at B_min sqrt(r) on B whatever p
    and q are. On wide ranges that is long before larger batches stop to pay. So Kneedle decides where it agrees with
    the gain, on either axis: a candidate within `KNEE_AGREEMENT` of its time. The two rules then cannot differ by more.

    Nodes of another type are other clusters under the same envelope. By gain that is the best of the types' own knees,
    since the least of T B^e over all rows is the least of the least of each type. Prices play no part in it.
    """
    curve = envelope(rows)
    batches = np.unique(rows["global_batch"].to_numpy(dtype=float))
    score = np.log(curve["train_time_s"]) - math.log2(1 - KNEE_GAIN) * np.log(curve["global_batch"].astype(float))
    by_gain = int(score.idxmin())
    kneedles, objection = _kneedle_both(batches, curve)
    record: dict[str, Any] = {
        **kneedles,
        "points": len(batches),
        "min_global_batch": int(batches[0]),
        "max_global_batch": int(batches[-1]),
    }
    span = f"global batches {record['min_global_batch']} to {record['max_global_batch']}"
    times = rows["train_time_s"]
    for axis, knee in kneedles.items():
        near = by_gain if knee is None else _nearest(curve, knee)
        if knee is not None and abs(times[near] / times[by_gain] - 1) <= KNEE_AGREEMENT:
            index, rule = near, "kneedle"
            why = f"It is at the knee of training time over {span} (Kneedle, {_AXES[axis]} axis: {knee:.0f})."
            break
    else:
        index, rule = by_gain, "gain_per_doubling"
        gain = f"a doubling beyond saves less than {KNEE_GAIN:.0%} of it"
        if rows["global_batch"][index] == batches[-1]:
            gain = "no larger one is in the grid and feasible"
            if len(batches) > 1:
                gain += f", and each halving costs more than a doubling by {KNEE_GAIN:.0%} saves"
        why = f"It is at the knee of training time over {span}: {gain}. {objection}."
    return index, {**record, "global_batch": int(rows["global_batch"][index]), "rule": rule, "why": why}


def envelope(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that are faster than every row of the same or a smaller global batch, by rising global batch."""
    best = rows.sort_values(["global_batch", "train_time_s", *keys_of(rows.columns)]).drop_duplicates("global_batch")
    times = best["train_time_s"]
    return best.loc[times < times.cummin().shift(fill_value=math.inf)]


def _nearest(curve: pd.DataFrame, batch: float) -> int:
    """Index of the row of the curve whose global batch is nearest, in doublings."""
    distance = np.abs(np.log2(curve["global_batch"].to_numpy(dtype=float)) - math.log2(batch))
    return int(curve.index.to_numpy()[np.argmin(distance)])


def _kneedle_both(batches: Array, curve: pd.DataFrame) -> tuple[dict[str, float | None], str]:
    """Kneedle's knees on the log2 and on the linear axis, as global batches, and why they might not decide."""
    if len(batches) < MIN_KNEE_POINTS:
        few = "one global batch is" if len(batches) == 1 else f"{len(batches)} global batches are"
        return dict.fromkeys(_AXES), f"{few} too few for Kneedle"
    times = curve["train_time_s"].to_numpy(dtype=float)
    # Dominated batches stay on the curve as a plateau: they are feasible and belong to its range.
    held = np.searchsorted(curve["global_batch"].to_numpy(dtype=float), batches, side="right") - 1
    line = PchipInterpolator(np.log2(batches), times[held])
    doublings = math.log2(batches[-1] / batches[0])
    x = np.linspace(math.log2(batches[0]), math.log2(batches[-1]), max(2, round(doublings * POINTS_PER_DOUBLING) + 1))
    log_knee, linear_knee = _kneedle(x, line(x)), _kneedle(np.exp2(x), line(x))
    found = {"log2_axis": None if log_knee is None else float(np.exp2(log_knee)), "linear_axis": linear_knee}
    places = [f"{knee:.0f} ({_AXES[axis]} axis)" for axis, knee in found.items() if knee is not None]
    if not places:
        return found, "Kneedle finds no knee"
    return found, f"Kneedle, whose answer depends on that range, sees it at {' and '.join(places)}"


def _kneedle(x: Array, y: Array) -> float | None:
    """x at the knee of a non-increasing curve, or None; a point that is not below the chord of the ends is no knee."""
    from kneed import KneeLocator

    with warnings.catch_warnings():
        # kneed warns when it finds nothing; None says so already.
        warnings.simplefilter("ignore")
        knee = KneeLocator(x, y, curve="convex", direction="decreasing").knee
    if knee is None:
        return None
    chord = np.interp(knee, [x[0], x[-1]], [y[0], y[-1]])
    return float(knee) if np.interp(knee, x, y) < chord else None
