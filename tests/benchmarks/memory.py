"""How well the memory model bounds the batch: models x capped memory, on one GPU.

    python -m tests.benchmarks.memory --csv FILE         measures, with torch and torchvision alone
    python -m tests.benchmarks.memory --judge FILE       compares it with what the model says, anywhere

FILE has a row for each batch that was tried, written case by case: the same command again goes on with the cases that
are missing, so a run that is cut off loses one case at most. --expandable measures with the allocator's expandable
segments instead; those are cases of their own, in the same file or another.

For each model and cap the batch is doubled until it does not fit, each time from an emptied allocator, with the steps
that profiling takes (warm-up, AGS refresh, evaluation); then the largest batch that does fit is found by bisection.
`fit_memory` sees the doublings that fitted and the one that did not, and names b_max for each share: of what m0 leaves
of the limit ("rest", the rule on GPUs), or of the whole limit ("whole", the rule on CPUs).

    freely   the largest batch without allocator retries, which is what the tool calls feasible
    at all   the largest batch that does not run out of memory, retries or not
    error    predicted memory over measured, of batches that ran freely and that the fit had not seen
    three    the same for fits to the three smallest batches, up to what they may extrapolate to

Without a GPU, or with --smoke, a small network shows that the script works: each batch in a process of its own, and
what exceeds the cap counts as not fitting.
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import gc
import io
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.ranks.device_memory import GIB, MemoryMeter, allocated_bytes

FRACTIONS = (0.95, 0.98, 1.0)
CAPS = (6, 9, 13, 19, 27, 40)
"""Caps of memory, as what so many times the smallest batch would need."""
RULES = ("rest", "whole")
"""What a share is of."""
TOLERANCE = 0.01
"""Of the batch at which bisection stops."""
WARMUP_STEPS = 2
COLUMNS = (
    "model",
    "allocator",
    "cap_factor",
    "cap_gib",
    "batch",
    "fits",
    "memory_gib",
    "limit_gib",
    "allocator_retries",
)
"""Of the file. A case is a model, an allocator and a factor of `CAPS`; fits: yes, retries (it did with some), no."""
EXPANDABLE = "expandable_segments:True"

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model to train."""

    name: str
    build: Callable[[], nn.Module]
    pixels: int
    classes: int
    smallest_batch: int


def cases(smoke: bool) -> list[Case]:
    """The models, or a small one."""
    if smoke:
        from tula_hpc.ranks.workloads import small_cnn

        return [Case("small_cnn, 32 px", lambda: small_cnn(3, 32, 10, 64), 32, 10, 32)]
    from torchvision import models

    return [
        Case("alexnet, 224 px", lambda: models.alexnet(num_classes=101), 224, 101, 32),
        Case("vgg11, 32 px", lambda: models.vgg11(num_classes=100), 32, 100, 64),
        Case("mobilenet_v3, 224 px", lambda: models.mobilenet_v3_large(num_classes=257), 224, 257, 4),
        Case("resnet50, 224 px", lambda: models.resnet50(num_classes=1000), 224, 1000, 4),
    ]


def train_a_little(case: Case, model: nn.Module, batch: int, device: torch.device, meter: MemoryMeter) -> Record:
    """What profiling would record of a few steps; raises torch.OutOfMemoryError."""
    model = model.to(device).train()
    sgd = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    optimizer = TulaOptimizer(
        sgd, global_batch=batch, small_batch=max(2, case.smallest_batch // 2), granularity="tensor"
    )
    loss_fn = nn.CrossEntropyLoss()
    activation_bytes = 0

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(batch, 3, case.pixels, case.pixels, device=device)
        return inputs, torch.randint(case.classes, (batch,), device=device)

    for step in range(WARMUP_STEPS + 2):
        x, y = next_batch()
        before = allocated_bytes(device)
        loss = loss_fn(model(x), y)
        activation_bytes = allocated_bytes(device) - before
        loss.backward()
        if step == WARMUP_STEPS:
            optimizer.refresh(model, loss_fn, x, y)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        x, y = next_batch()
        model.eval()
        loss_fn(model(x), y)
    return meter.record(model, optimizer, sum(t.numel() * t.element_size() for t in (x, y)), activation_bytes)


class Gpu:
    """Trains under a cap of what the allocator may take."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.cuda.init()
        self._total = torch.cuda.get_device_properties(0).total_memory

    def record(self, case: Case, model: nn.Module, batch: int, cap_gib: float | None) -> Record | None:
        """None if the batch does not fit."""
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap_gib or 1e9) * GIB / self._total))
        self._forget()
        try:
            found = train_a_little(case, copy.deepcopy(model), batch, self.device, MemoryMeter(self.device, 1))
        except torch.OutOfMemoryError:
            found = None
        self._forget()  # outside of the except block, whose traceback keeps tensors alive
        return found

    def limit_gib(self, cap_gib: float, record: Record) -> float:
        """What a device would have on which the allocator can have no more than the cap."""
        return cap_gib + float(record["parts"]["outside_gib"])

    def _forget(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


class Cpu:
    """Trains in a process of its own, and compares its resident memory with the cap."""

    device = torch.device("cpu")

    def record(self, case: Case, model: nn.Module, batch: int, cap_gib: float | None) -> Record | None:
        """None if the batch takes more than the cap."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def work() -> None:
            there.send(train_a_little(case, model, batch, self.device, MemoryMeter(self.device, 1)))

        process = context.Process(target=work)
        process.start()
        found: Record = here.recv()
        process.join()
        return found if cap_gib is None or found["memory_gib"] <= cap_gib else None

    def limit_gib(self, cap_gib: float, record: Record) -> float:
        return cap_gib


@dataclass
class Trial:
    """One model under one cap."""

    case: Case
    cap_gib: float
    measure: Callable[[int], Record | None]
    known: dict[int, Record | None] = field(default_factory=dict)

    def fits(self, batch: int) -> bool:
        if batch not in self.known:
            self.known[batch] = self.measure(batch)
        return self.known[batch] is not None

    def fits_freely(self, batch: int) -> bool:
        record = self.known[batch] if self.fits(batch) else None
        return record is not None and record["allocator_retries"] == 0

    def ladder(self) -> tuple[list[int], int]:
        """The doublings that fit freely, and the first that does not."""
        batch, fitted = self.case.smallest_batch, []
        while self.fits_freely(batch):
            fitted.append(batch)
            batch *= 2
        return fitted, batch

    def largest(self, good: Callable[[int], bool]) -> int:
        """By bisection from what is known, to `TOLERANCE`."""
        low = max((b for b in self.known if good(b)), default=0)
        high = min((b for b in self.known if b > low and not good(b)), default=2 * low)
        while good(high):
            low, high = high, 2 * high
        while high - low > max(1, TOLERANCE * low):
            middle = (low + high) // 2
            low, high = (middle, high) if good(middle) else (low, middle)
        return low


class Key(NamedTuple):
    """What tells a case from others in the file."""

    model: str
    allocator: str
    cap_factor: int


@dataclass
class Measured:
    """A case as the file holds it: the batches of one model under one cap."""

    key: Key
    cap_gib: float
    limit_gib: float
    free_gib: dict[int, float]
    """GiB of each batch that fitted without retries."""
    retried: list[int]
    """Batches that fitted with retries."""
    failed: list[int]
    """Batches that ran out of memory."""

    @property
    def freely(self) -> int:
        """The largest batch that fitted without retries."""
        return max(self.free_gib)

    @property
    def at_all(self) -> int:
        """The largest batch that did not run out of memory."""
        return max([*self.free_gib, *self.retried])

    @property
    def ladder(self) -> tuple[list[int], int]:
        """As `Trial.ladder`, which began with the smallest batch of all."""
        batch, fitted = min([*self.free_gib, *self.retried, *self.failed]), []
        while batch in self.free_gib:
            fitted.append(batch)
            batch *= 2
        return fitted, batch


# --- the file ---------------------------------------------------------------------------------------------------------


def rows_of(key: Key, trial: Trial, limit_of: Callable[[float, Record], float]) -> list[Record]:
    """Measures all that is wanted of one model under one cap: a row for each batch."""
    seen, _ = trial.ladder()
    trial.largest(trial.fits_freely)
    trial.largest(trial.fits)
    limit_gib = limit_of(trial.cap_gib, trial.known[seen[-1]] or {})
    rows = []
    for batch, record in sorted(trial.known.items()):
        fits = "no" if record is None else "yes" if record["allocator_retries"] == 0 else "retries"
        found = {} if record is None else {name: record[name] for name in ("memory_gib", "allocator_retries")}
        sizes = {"cap_gib": trial.cap_gib, "limit_gib": limit_gib}
        rows.append({**key._asdict(), **sizes, "batch": batch, "fits": fits, **found})
    return rows


def read(file: Path) -> tuple[list[str], list[Record]]:
    """Comments and rows of a file; none where there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    comments = [line for line in lines if line.startswith("#")]
    return comments, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def keep(file: Path, comments: Sequence[str], rows: Sequence[Record]) -> None:
    """Write all anew, so that the file is whole at any time."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        gib = {k: f"{v:.6f}" for k, v in row.items() if isinstance(v, float)}
        writer.writerow({**row, **gib})
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(f"{comment}\n" for comment in comments) + text.getvalue(), encoding="utf-8")
    new.replace(file)


def key_of(row: Record) -> Key:
    return Key(row["model"], row["allocator"], int(row["cap_factor"]))


def cases_in(rows: Sequence[Record]) -> list[Measured]:
    """The cases of a file, in its order."""
    found: dict[Key, Measured] = {}
    for row in rows:
        key = key_of(row)
        case = found.setdefault(key, Measured(key, float(row["cap_gib"]), float(row["limit_gib"]), {}, [], []))
        batch = int(row["batch"])
        if row["fits"] == "yes":
            case.free_gib[batch] = float(row["memory_gib"])
        else:
            (case.retried if row["fits"] == "retries" else case.failed).append(batch)
    return list(found.values())


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass
class Judged:
    """What the memory model says of a case."""

    case: Measured
    bounds: dict[tuple[str, float], int]
    """b_max by rule and share."""
    errors: list[float]
    """Of batches that the fit to all doublings had not seen, relative."""
    errors_of_three: list[float]
    """The same of fits to the three smallest batches."""

    def of_freely(self, rule: str, share: float) -> float:
        return self.bounds[rule, share] / self.case.freely

    def of_all(self, rule: str, share: float) -> float:
        return self.bounds[rule, share] / self.case.at_all

    def ran_out(self, rule: str, share: float) -> bool:
        """Whether so large a batch failed, or was not seen to fit."""
        return self.bounds[rule, share] >= min([self.case.at_all + 1, *self.case.failed])


def judge(case: Measured) -> Judged:
    """A case with bounds and errors of predictions."""
    import pandas as pd

    from tula_hpc.models.memory import MAX_EXTRAPOLATION, MemoryFit, fit_memory

    free = case.free_gib

    def fitted(batches: Sequence[int], oom: list[int]) -> MemoryFit:
        rows = [{"batch_per_rank": b, "limit_gib": case.limit_gib, "memory_gib": free[b]} for b in batches]
        return fit_memory(pd.DataFrame(rows), oom, on_gpus=True)

    def errors(fit: MemoryFit, used: Sequence[int], bound: float) -> list[float]:
        return [float(fit.predict(b)) / gib - 1 for b, gib in free.items() if b not in used and b <= bound]

    seen, first_bad = case.ladder
    fit, three = fitted(seen, [first_bad]), seen[:3]
    by_rule = {"rest": fit, "whole": dataclasses.replace(fit, on_gpus=False)}
    return Judged(
        case,
        {(rule, share): by_rule[rule].max_batch_per_rank(fraction=share) for rule in RULES for share in FRACTIONS},
        errors(fit, seen, float("inf")),
        errors(fitted(three, []), three, MAX_EXTRAPOLATION * three[-1]),
    )


def shown(judged: Judged) -> str:
    """A line of a case."""
    case = judged.case
    bounds = "  ".join(
        f"{judged.of_freely(*which):5.0%}{'!' if judged.ran_out(*which) else ' '}" for which in judged.bounds
    )
    error = 100 * max(judged.errors, key=abs, default=float("nan"))
    return (
        f"{case.key.model:21s} {case.cap_gib:6.2f} {case.ladder[0][-1]:5d} {case.freely:6d} {case.at_all:6d}   "
        f"{bounds}   {error:+5.1f}"
    )


def _errors_line(name: str, errors: Sequence[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return f"{name:21s} no such batch"
    p90 = sizes[int(0.9 * len(sizes))]
    return f"{name:21s} {statistics.median(sizes):6.1%} {p90:6.1%} {sizes[-1]:7.1%}   {len(sizes):4d} batches"


def summary(found: Sequence[Judged]) -> str:
    """What cases add up to: bounds by rule and share, and errors by model."""
    lines = [
        f"{len(found)} cases           of freely                 at all",
        "share of    OOM   >= 90 %  median  least    >= 90 %  median  least",
    ]
    for rule in RULES:
        for share in FRACTIONS:
            columns = ""
            for ratios in ([j.of_freely(rule, share) for j in found], [j.of_all(rule, share) for j in found]):
                enough = sum(ratio >= 0.9 for ratio in ratios)
                columns += f"   {enough:7d} {statistics.median(ratios):7.0%} {min(ratios):6.0%}"
            lines.append(f"{share:4.2f} {rule:5s} {sum(j.ran_out(rule, share) for j in found):4d}{columns}")
    lines += ["", "memory error          median    p90 largest"]
    lines.append(_errors_line("all doublings", [error for j in found for error in j.errors]))
    lines.append(_errors_line("three smallest", [error for j in found for error in j.errors_of_three]))
    for model in dict.fromkeys(j.case.key.model for j in found):
        lines.append(_errors_line(model, [error for j in found if j.case.key.model == model for error in j.errors]))
    return "\n".join(lines)


def verdict(rows: Sequence[Record]) -> str:
    """All that `--judge` prints of the rows of a file, the cases of each allocator for themselves."""
    cases, parts = cases_in(rows), []
    for allocator in dict.fromkeys(case.key.allocator for case in cases):
        found = [judge(case) for case in cases if case.key.allocator == allocator]
        shares = "  ".join(f"{share:5.2f} " for _ in RULES for share in FRACTIONS)
        parts += [
            f"allocator: {allocator}; b_max as a share of freely (! runs out of memory) by what the share is of",
            " " * 49 + "".join(f"{rule:24s}" for rule in RULES).rstrip(),
            f"{'':24s}cap  seen freely at all   {shares}   error %",
            *map(shown, found),
            "",
            summary(found),
            "",
        ]
    return "\n".join(parts)


# --- measuring --------------------------------------------------------------------------------------------------------


def where(smoke: bool) -> str:
    """Day, hardware, versions and command, for the file."""
    hardware = f"{platform.machine()} CPU" if smoke else torch.cuda.get_device_name(0)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    command = " ".join(["python", *sys.orig_argv[1:]])
    return f"# {time.strftime('%Y-%m-%d %H:%M')}  {hardware}  {versions}  {command}"


def measure_all(machine: Gpu | Cpu, smoke: bool, allocator: str, seconds: float, file: Path) -> list[Record]:
    """The rows of the file with those of all models and caps, kept there case by case; none is measured again."""
    began, (comments, rows) = time.monotonic(), read(file)
    comments.append(where(smoke))
    there, skipped = set(map(key_of, rows)), 0
    for case in cases(smoke):
        factors = CAPS[:2] if smoke else CAPS
        keys = [key for factor in factors if (key := Key(case.name, allocator, factor)) not in there]
        if not keys or time.monotonic() - began > seconds:
            skipped += len(keys)
            continue
        torch.manual_seed(0)
        model = case.build()
        two = [machine.record(case, model, times * case.smallest_batch, None) or {} for times in (1, 2)]
        sizes = [float(record.get("reserved_gib") or record["memory_gib"]) for record in two]
        for key in keys:
            if time.monotonic() - began > seconds:
                skipped += 1
                continue
            cap = sizes[0] + (key.cap_factor - 1) * (sizes[1] - sizes[0])

            def measure(batch: int, cap: float = cap, case: Case = case, model: nn.Module = model) -> Record | None:
                return machine.record(case, model, batch, cap)

            new = rows_of(key, Trial(case, cap, measure), machine.limit_gib)
            rows += new
            keep(file, comments, rows)
            found = cases_in(new)[0]
            print(
                f"{case.name}: cap {cap:.2f} GiB, doublings to {found.ladder[0][-1]} fit, freely {found.freely}, at "
                f"all {found.at_all}; {len(new)} batches, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    if skipped:
        print(f"no time for {skipped} further cases; the same command goes on with them")
    return rows


def main() -> None:
    """Measures, or prints a row for each model and cap and what they add up to."""
    parser = argparse.ArgumentParser(description="How well the memory model bounds the batch")
    parser.add_argument("--csv", type=Path, default=Path("memory.csv"), help="file of measured batches, to go on with")
    parser.add_argument("--judge", type=Path, help="such a file, to compare with the model instead of measuring")
    parser.add_argument("--smoke", action="store_true", help="a small network on the CPU")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no further case after this long")
    parser.add_argument("--expandable", action="store_true", help=f"set PYTORCH_ALLOC_CONF={EXPANDABLE}")
    arguments = parser.parse_args()
    if arguments.judge is not None:
        print(verdict(read(arguments.judge)[1]))
        return
    if arguments.expandable:  # torch reads them when CUDA starts; the second is the name in older versions
        os.environ.update(PYTORCH_ALLOC_CONF=EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE)
    smoke = arguments.smoke or not torch.cuda.is_available()
    if smoke and arguments.expandable:
        parser.error(
            "--expandable is a setting of the allocator of GPUs, and there is none, or --smoke leaves it alone"
        )
    allocator = "expandable" if arguments.expandable else "default"
    rows = measure_all(Cpu() if smoke else Gpu(), smoke, allocator, arguments.seconds, arguments.csv)
    try:
        print(verdict(rows))
    except ImportError as error:
        print(f"{error}; compare elsewhere: python -m tests.benchmarks.memory --judge {arguments.csv}")


if __name__ == "__main__":
    main()
