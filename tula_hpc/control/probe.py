"""Measures a choice before the long training, unless that was done: a prediction may be off, in memory most of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tula_hpc.candidates import Candidate
from tula_hpc.display import Display, duration
from tula_hpc.models.selection import Selection
from tula_hpc.models.words import configuration
from tula_hpc.runs import RunFolder, read_json

MOST_PROBES = 5
"""Choices that are measured for one training; each that does not hold leads to the next."""


@dataclass(frozen=True)
class Probe:
    """Tries a choice with a profiling job, which takes full steps, evaluates a batch and writes a checkpoint."""

    run: RunFolder
    display: Display
    measured: Callable[[], set[Candidate]]
    """Candidates whose measurement is on record."""
    measure: Callable[[Candidate], object]
    fit: Callable[[], None]
    """Fits again to all that is on record."""

    def teaches(self, choice: Selection) -> bool:
        """Measure the choice and fit again; whether the fit then knows of it what it did not know before.

        A choice that was measured has shown its time and its memory: another measurement would tell nothing. A
        controller that was killed on the way finds what there is on record, and goes on from there.
        """
        candidate = choice.candidate
        if candidate.name in _known(read_json(self.run.fit)):
            return False
        if candidate not in self.measured():
            self.display.explain(
                f"{configuration(pd.Series(choice.to_dict()))} would be chosen and was not measured; measuring it "
                "before the training begins (search.verify_choice)"
            )
            self.measure(candidate)
        self.fit()
        fit = read_json(self.run.fit)
        if candidate.name not in _known(fit):
            self.display.explain(f"{candidate.name} could not be measured; the training will show whether it works")
            return False
        for point in fit["points"]:
            if _name(point) == candidate.name:
                seconds, predicted_s = point["step_time_s"], choice.predicted["step_time_s"] or math.nan
                self.display.say(
                    f"{candidate.name}: a step takes {duration(seconds)}, {seconds / predicted_s - 1:+.0%} against the "
                    f"prediction, and {point['memory_gib']:.2f} GiB of a rank's memory"
                )
        return True


def _known(fit: dict[str, Any]) -> set[str]:
    """Names of the candidates that a fit knows by their own measurement, or by how it ended."""
    return {*map(_name, fit["points"]), *fit["infeasible"], *fit["failed"]}


def _name(point: dict[str, Any]) -> str:
    return Candidate.from_record(point).name
