"""During the training: are its steps as predicted, and if not for long, would it better go on elsewhere?

A training stays on its type of node: what its steps tell says nothing of another's. Looks at what the training tells of
itself anyway, at each look at its job. A drift is told once; what was seen, what the models say since, and what was
offered is one event of the journal, so a controller that is started again neither repeats it nor forgets it.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tula_hpc.candidates import Candidate
from tula_hpc.config import ControllerKind, ReplanKind, Settings
from tula_hpc.control import slow_node
from tula_hpc.control.choosing import chosen_fit, fit_of, predicted_on
from tula_hpc.control.jobs import TRAIN, Jobs, Look
from tula_hpc.control.journal import Attempt, Journal
from tula_hpc.control.moving import MOVED_ENOUGH, Moving
from tula_hpc.display import duration, nodes_and_batch
from tula_hpc.errors import RecordError, TulaError
from tula_hpc.models.drift import LASTING, Cause, Drift, Expected, Window, lasting_drift
from tula_hpc.models.limits import SECONDS_PER_HOUR, Limits, NoFeasibleConfiguration
from tula_hpc.models.posterior import correction
from tula_hpc.models.pricing import Price
from tula_hpc.models.queue_wait import Wait
from tula_hpc.models.replan import CLEAR_GAIN, Offer, Part, Refit, better, refit, relaunched, with_probes, with_row
from tula_hpc.models.selection import Objective
from tula_hpc.models.slow_host import SlowHost
from tula_hpc.models.step_time import StepTimeFit
from tula_hpc.models.words import three_digits
from tula_hpc.prices import price_of
from tula_hpc.runs import RunFolder, read_json

LEAST_LIMIT = 1e-9
"""What is left of a limit that is used up; 0 would be no limit."""

_MEANINGS = {
    Part.SYNC: "taken for synchronisation {by}, as on a network that others use",
    Part.COMPUTE: "taken for computation {by}: look for other load on the nodes, or lower clocks",
    Part.ALL: "taken for whole steps {by}",
}


@dataclass
class Replanning:
    """The watch over one run's training."""

    settings: Settings
    run: RunFolder
    journal: Journal
    jobs: Jobs
    say: Callable[[str], None]
    queue_waits: Callable[[pd.DataFrame], dict[int, Wait]]
    """Of a table of one type of node: number of nodes -> how long a new training would wait."""

    def __post_init__(self) -> None:
        self._seen: Window | None = None
        self._reconsidered: tuple[str, int] | None = None
        self.moving = Moving(self.settings, self.run, self.journal, self.jobs, self.say)

    def look(self, progress: dict[str, Any], looks: list[Look]) -> None:
        """Compare the training's newest steps with what is expected; tell what is lasting, and act on it if wanted.

        Args:
            progress: What the training last told of itself.
            looks: What was seen of the run's jobs.
        """
        measured = self.moving.look(looks)
        state, wanted = self.journal.state(), self.settings.training.replan
        attempt = state.last(TRAIN)
        if wanted is ReplanKind.off or attempt is None or not (attempt.verdict is attempt.ending is None):
            return
        if measured:
            self._go_on_from(attempt, state.drifts[-1], progress)
            return
        windows = self._windows(attempt, progress)
        if len(windows) < LASTING or windows[-1] == self._seen:
            return
        self._seen = windows[-1]
        told = state.drift_of(attempt)
        expected = self._expected(attempt, windows, told)
        drift = lasting_drift(windows, expected)
        if drift is not None:
            self._tell(attempt, drift, progress)
        elif told and wanted is ReplanKind.auto and all(map(expected.agrees, windows[-LASTING:])):
            self._reconsider(attempt, told, progress)

    def _reconsider(self, attempt: Attempt, told: dict[str, Any], progress: dict[str, Any]) -> None:
        """Take what was offered before this controller was started with `auto`, or to an attempt before this one, if it
        still pays; asked once."""
        if self._reconsidered == attempt.key or self.moving.is_measuring():
            return
        self._reconsidered = attempt.key
        if told["cause"] == Cause.NODE.value:
            step_s, usual_s = told["step_time_s"], told["expected_step_time_s"]
            left_s, _ = self._without(attempt, told["node"], step_s, usual_s, progress)
            if left_s is not None:
                self.moving.leave_out(attempt, told["node"], left_s, told["headline"])
        elif told["offer"]:
            offer, _ = self._offer(attempt, StepTimeFit.from_dict(told["step_time"]), progress)
            if offer is not None:
                self.moving.to(attempt, offer, told["headline"])

    def _go_on_from(self, attempt: Attempt, told: dict[str, Any], progress: dict[str, Any]) -> None:
        """Compare again with what was measured beside the training, and move if that still pays."""
        offer, advice = self._offer(attempt, StepTimeFit.from_dict(told["step_time"]), progress)
        if offer is None:
            self.say(f"the training stays where it is. {advice}")
        else:
            self.say(advice)
            self.moving.to(attempt, offer, told["headline"])

    def _windows(self, attempt: Attempt, progress: dict[str, Any]) -> list[Window]:
        """The steps that the attempt's newest launch has told of; none before it has."""
        try:
            launch = read_json(self.run.attempt(attempt.job, attempt.number).launch)["launch"]
        except RecordError:
            return []
        if progress.get("launch") != launch:
            return []
        return [Window(ended, int(steps), step_s, wait_s) for ended, steps, step_s, wait_s in progress["windows"]]

    def _expected(self, attempt: Attempt, windows: list[Window], told: dict[str, Any] | None) -> Expected:
        """What was told last of this configuration; else its prediction, or its first steps where those agree."""
        if told is not None:
            since = f"they took since {_clock(told['since'])}"
            return Expected.seen(told["step_time_s"], told["data_wait_s"], since)
        return self._predicted(self._fit_before(attempt, self._fit_record(attempt)), attempt).settled(windows)

    def _predicted(self, fit: StepTimeFit, attempt: Attempt) -> Expected:
        row = pd.DataFrame([self.jobs.candidate(attempt).record()])
        corrected, ends = self._corrected(attempt), fit.interval(row)
        points = self._fit_record(attempt)["points"]
        wait_per_sample_s = float(pd.Series([p["data_s"] / p["batch_per_rank"] for p in points]).median())
        wait_s = wait_per_sample_s * attempt.batch_per_rank
        corrected *= self._probed_over_predicted(attempt, corrected * float(fit.predict(row)[0]))
        expected_s, low_s, high_s = (corrected * float(seconds[0]) for seconds in (fit.predict(row), *ends))
        return Expected.predicted(expected_s, low_s, high_s, wait_s)

    def _probed_over_predicted(self, attempt: Attempt, predicted_s: float) -> float:
        """What the step time was when the attempt's configuration was measured before the move there; 1 if it was
        not."""
        here = self.jobs.candidate(attempt)
        points = [p for p in self.moving.probed(attempt).points if Candidate.from_record(p) == here]
        return float(points[-1]["step_time_s"]) / predicted_s if points else 1.0

    def _corrected(self, attempt: Attempt) -> float:
        """What the profiled points correct the prediction of an attempt's configuration by, as a factor."""
        record = self._fit_record(attempt)
        row = pd.DataFrame([self.jobs.candidate(attempt).record()])
        return float(correction(chosen_fit(record), pd.DataFrame(record["points"]), row)[0])

    def _fit_record(self, attempt: Attempt) -> Mapping[str, Any]:
        """What fit.json holds of the nodes that the training runs on."""
        return fit_of(read_json(self.run.fit), attempt.node_type)

    # --- what is told -------------------------------------------------------------------------------------------------

    def _tell(self, attempt: Attempt, drift: Drift, progress: dict[str, Any]) -> None:
        record = self._fit_record(attempt)
        offer, fit, found = None, self._fit_before(attempt, record), None
        told = self.journal.state().drift_of(attempt)
        again = told is not None and self._predicted(fit, attempt).holds(drift.step_time_s)
        headline, cause, node, left_s = _again(drift) if again else _headline(drift), drift.cause, None, None
        if cause is Cause.STEPS and not again:
            node = self._slow_node(attempt, drift, record)
        if node is not None:
            cause = Cause.NODE
            headline += f": node {node.host} computes {node.ratio:.2f} x as long as the others"
            left_s, words = self._without(attempt, node.host, drift.step_time_s, drift.expected.step_time_s, progress)
        elif cause is Cause.DATA:
            words = (
                f"A step waits {duration(drift.data_wait_s)} for its data: more data.loader_workers (now "
                f"{self.settings.data.loader_workers}; another number is another run) or nearer data would help, other "
                "nodes or batches would not."
            )
        else:
            found = self._refit(attempt, drift, record, fit)
            fit = found.fit
            by = f"{found.factor:.3g} times as long"
            offer, advice = self._offer(attempt, fit, progress)
            words = advice if again else f"It is {_MEANINGS[found.part].format(by=by)}. {advice}"
        self.journal.drifted(
            attempt,
            num_nodes=attempt.num_nodes,
            batch_per_rank=attempt.batch_per_rank,
            samples=progress["samples"],
            since=drift.since,
            step_time_s=drift.step_time_s,
            data_wait_s=drift.data_wait_s,
            expected_step_time_s=drift.expected.step_time_s,
            cause=cause.value,
            part=None if found is None else found.part.value,
            factor=None if found is None else found.factor,
            step_time=fit.to_dict(),
            offer=None if offer is None else _offer_record(offer),
            **({} if node is None else {"node": node.host}),
            headline=headline,
            words=words,
        )
        self.say(f"{headline}. {words}")
        if self.settings.training.replan is not ReplanKind.auto:
            return
        if offer is not None:
            self.moving.to(attempt, offer, headline)
        elif node is not None and left_s is not None:
            self.moving.leave_out(attempt, node.host, left_s, headline)

    def _slow_node(self, attempt: Attempt, drift: Drift, record: Mapping[str, Any]) -> SlowHost | None:
        launch = read_json(self.run.attempt(attempt.job, attempt.number).launch)["launch"]
        return slow_node.cause_of(drift, self.run, launch, self.jobs.candidate(attempt), record["points"])

    # --- what follows -------------------------------------------------------------------------------------------------

    def _fit_before(self, attempt: Attempt, record: Mapping[str, Any]) -> StepTimeFit:
        """The fit that the training came to its configuration with: what was told of that since takes its place."""
        here = attempt.num_nodes, attempt.batch_per_rank
        elsewhere = [d for d in self.journal.state().drifts if (d["num_nodes"], d["batch_per_rank"]) != here]
        return StepTimeFit.from_dict(elsewhere[-1]["step_time"]) if elsewhere else chosen_fit(record)

    def _refit(self, attempt: Attempt, drift: Drift, record: Mapping[str, Any], fit: StepTimeFit) -> Refit:
        """The models as they are with the recorded time."""
        running = self.jobs.candidate(attempt)
        profiled = (running.num_nodes, running.gpus_per_node, running.batch_per_rank) in fit.measured
        if drift.from_the_start and not profiled and not self.journal.state().drifts:
            fitting = [p for p in record["points"] if Candidate.from_record(p).name not in record["infeasible"]]
            points = pd.DataFrame(fitting).drop(columns=["hosts"])
            with_training = with_row(points, fit, running, drift.step_time_s)
            fit = with_training if with_training.outcome.usable else fit
        return refit(fit, running, drift.step_time_s / self._corrected(attempt))

    def _offer(self, attempt: Attempt, fit: StepTimeFit, progress: dict[str, Any]) -> tuple[Offer | None, str]:
        """A configuration that is worth a new start, if there is one, and what to say of it."""
        try:
            return self._compared(attempt, fit, progress)
        except TulaError as error:  # Slurm does not tell its prices, say; the training goes on
            return None, f"Whether another configuration would be better is not known: {error}"

    def _compared(self, attempt: Attempt, fit: StepTimeFit, progress: dict[str, Any]) -> tuple[Offer | None, str]:
        settings, running, fits = self.settings, self.jobs.candidate(attempt), read_json(self.run.fit)
        price, objective = price_of(settings.of_type(running.node_type)), settings.objective
        left = progress["of_samples"] - progress["samples"]
        if left <= 0:
            return None, "Nothing of the training is left."
        ran_out = {
            self.jobs.candidate(a)
            for a in self.journal.state().of(TRAIN)
            if a.verdict is not None and a.verdict in self.jobs.too_large(a.node_type)
        }
        epochs = left / settings.train_samples
        table = predicted_on(settings, running.node_type, fits, price, drifted=fit, epochs=epochs, ran_out=ran_out)
        probed = self.moving.probed(attempt)
        table = with_probes(table, fit, running, probed.points, probed.why_not)
        start_s, last_wait_s = self._last_start(attempt, progress)
        waits = self.queue_waits(table)
        wait_s = {
            int(n): last_wait_s if n not in waits or waits[n].seconds is None else float(waits[n].seconds or 0.0)
            for n in table["num_nodes"].unique()
        }
        table = relaunched(table, running, start_s, wait_s)
        priced = table.assign(gib=table["measured_memory_gib"].fillna(table["memory_gib"]))
        limits = self._limits_left(price, priced.set_index(["num_nodes", "batch_per_rank"])["gib"])
        try:
            offer = better(table, running, Objective(objective.kind.name), limits, objective.tie_tolerance, start_s)
        except NoFeasibleConfiguration:
            return None, f"No configuration keeps what is left of the limits, this one neither: {_words_of(limits)}."
        if offer is None:
            return None, "No other configuration is worth a new start."
        return offer, self._offer_words(offer, start_s + wait_s[offer.candidate.num_nodes])

    def _last_start(self, attempt: Attempt, progress: dict[str, Any]) -> tuple[float, float]:
        """Seconds that the running job took from its start to its first step, and in the queue before that."""
        folder = self.run.attempt(attempt.job, attempt.number)
        launched = read_json(folder.launch)["time"]
        return max(0.0, progress["started"] - launched), max(0.0, launched - folder.request.stat().st_mtime)

    def _limits_left(self, price: Price, memory_gib: pd.Series) -> Limits:
        """The objective's limits less what the training has used of them."""
        objective, attempts = self.settings.objective, self.journal.state().of(TRAIN)
        begun = self.run.attempt(TRAIN, attempts[0].number).request.stat().st_mtime
        deadline_h, budget = objective.deadline_h, objective.budget
        if deadline_h is not None:
            deadline_h = max(LEAST_LIMIT, deadline_h - (time.time() - begun) / SECONDS_PER_HOUR)
        if budget is not None:
            budget = max(LEAST_LIMIT, budget - sum(self._cost_of(a, price, memory_gib) for a in attempts))
        return Limits(deadline_h, budget, objective.max_nodes)

    def _cost_of(self, attempt: Attempt, price: Price, memory_gib: pd.Series) -> float:
        """What the nodes of an attempt have cost from its start to its last sign of life."""
        folder, candidate = self.run.attempt(attempt.job, attempt.number), self.jobs.candidate(attempt)
        try:
            lasted_s = read_json(folder.heartbeat)["time"] - read_json(folder.launch)["time"]
        except RecordError:  # it never began
            return 0.0
        gib = memory_gib[candidate.num_nodes, candidate.batch_per_rank]
        return float(price.cost(lasted_s, candidate.num_nodes, candidate.gpus_per_node, gib))

    def _offer_words(self, offer: Offer, new_start_s: float) -> str:
        currency = self.settings.pricing.currency
        costs = ""
        if offer.cost is not None and offer.cost_here is not None:
            costs = f", at {currency}{three_digits(offer.cost)} instead of {currency}{three_digits(offer.cost_here)}"
        words = (
            f"What is left would take {duration(_rounded(offer.left_s))} on {nodes_and_batch(offer.candidate)}, "
            f"{duration(_rounded(new_start_s))} of it for the queue and a new start, instead of "
            f"{duration(_rounded(offer.left_here_s))}{costs} ({offer.why})."
        )
        return f"{words}{self._how('there')}"

    def _without(
        self, attempt: Attempt, host: str, step_s: float, usual_s: float, progress: dict[str, Any]
    ) -> tuple[float | None, str]:
        """Seconds of the steps left on other nodes, where a new start without a slow one pays; and what to say of it.

        Args:
            attempt: What runs.
            host: The slow one.
            step_s: What a step takes with it.
            usual_s: And without it.
            progress: What the training last told of itself.
        """
        running, folder = self.jobs.candidate(attempt), self.run.attempt(attempt.job, attempt.number)
        wait_s = self.jobs.wait_without(host, running, read_json(folder.request)["time_limit_min"])
        if wait_s is None:
            return None, "The cluster has no other node in its place, so the training goes on with it."
        steps = (progress["of_samples"] - progress["samples"]) / running.global_batch
        new_start_s, here_s = self._last_start(attempt, progress)[0] + wait_s, steps * step_s
        there_s = steps * usual_s + new_start_s
        if there_s > (1 - CLEAR_GAIN) * here_s:
            return None, "For what is left a new start without it would not pay."
        there, new_start, here = (duration(_rounded(seconds)) for seconds in (there_s, new_start_s, here_s))
        words = (
            f"Without it what is left would take {there}, {new_start} of it for the queue and a new start, instead of "
            f"{here}."
        )
        return steps * usual_s, f"{words}{self._how('without it')}"

    def _how(self, where: str) -> str:
        """How the user has a training go on so, if that is theirs to do."""
        if self.settings.training.replan is ReplanKind.auto:
            return "" if self.moving.may_move() else f" It stays where it is: {MOVED_ENOUGH}."
        command = shlex.join([*read_json(self.run.plan)["command"], "training.replan=auto"])
        here = self.settings.controller.kind is ControllerKind.here
        stop = "end this command (Ctrl-C)" if here else "scancel the controller's job, which `status` names,"
        return f" To go on {where}, {stop} and give: {command}"


def _headline(drift: Drift) -> str:
    now, before = duration(_rounded(drift.step_time_s)), duration(_rounded(drift.expected.step_time_s))
    what = f"{drift.ratio:.2f} x what {drift.expected.source} ({now} instead of {before})"
    return f"since {_clock(drift.since)} steps take {what}"


def _again(drift: Drift) -> str:
    now = duration(_rounded(drift.step_time_s))
    return f"since {_clock(drift.since)} steps take what was predicted again ({now})"


def _words_of(limits: Limits) -> str:
    left = {name: value for name, value in vars(limits).items() if value is not None}
    return ", ".join(f"objective.{name} {value:.3g}" for name, value in left.items())


def _offer_record(offer: Offer) -> dict[str, Any]:
    return {
        "num_nodes": offer.candidate.num_nodes,
        "batch_per_rank": offer.candidate.batch_per_rank,
        "left_s": offer.left_s,
        "left_here_s": offer.left_here_s if math.isfinite(offer.left_here_s) else None,
        "cost": offer.cost,
        "cost_here": offer.cost_here,
    }


def _clock(when: float) -> str:
    """The time of day, with the date where it is not today's."""
    then = time.localtime(when)
    same_day = time.strftime("%F", then) == time.strftime("%F")
    return time.strftime("%H:%M:%S" if same_day else "%F %H:%M", then)


def _rounded(seconds: float) -> float:
    """Three digits of a time."""
    return float(f"{seconds:.3g}")
