"""How well the memory model bounds the batch: models x capped memory, on one GPU.

    python -m tests.benchmarks.memory --json FILE        measures, with torch and torchvision alone
    python -m tests.benchmarks.memory --judge FILE       compares it with what the model says, anywhere

For each model and cap the batch is doubled until it does not fit, each time from an emptied allocator, with the steps
that profiling takes (warm-up, AGS refresh, evaluation); then the largest batch that does fit is found by bisection.
`fit_memory` sees the doublings that fitted and the one that did not, and names b_max for each share of the limit.

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
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.ranks.device_memory import GIB, MemoryMeter, allocated_bytes

FRACTIONS = (0.9, 0.95, 1.0)
CAPS = (6, 9, 13, 19, 27, 40)
"""Caps of memory, as what so many times the smallest batch would need."""
TOLERANCE = 0.01
"""Of the batch at which bisection stops."""
WARMUP_STEPS = 2

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


def explore(trial: Trial, limit_of: Callable[[float, Record], float]) -> Record:
    """All that is measured of one model under one cap."""
    seen, first_bad = trial.ladder()
    freely, at_all = trial.largest(trial.fits_freely), trial.largest(trial.fits)
    return {
        "model": trial.case.name,
        "cap_gib": trial.cap_gib,
        "limit_gib": limit_of(trial.cap_gib, trial.known[seen[-1]] or {}),
        "seen": seen,
        "first_bad": first_bad,
        "freely": freely,
        "at_all": at_all,
        "measured": {str(batch): record for batch, record in sorted(trial.known.items())},
    }


def judge(row: Record) -> Record:
    """The row with bounds, whether they run out of memory, and errors of predictions."""
    import pandas as pd

    from tula_hpc.models.memory import MAX_EXTRAPOLATION, fit_memory

    free = {
        int(b): r["memory_gib"] for b, r in row["measured"].items() if r is not None and r["allocator_retries"] == 0
    }

    def fitted(batches: Sequence[int], oom: list[int]) -> Any:
        rows = [{"batch_per_rank": b, "limit_gib": row["limit_gib"], "memory_gib": free[b]} for b in batches]
        return fit_memory(pd.DataFrame(rows), oom)

    def errors(model: Any, used: Sequence[int], bound: float) -> list[float]:
        return [float(model.predict(b)) / gib - 1 for b, gib in free.items() if b not in used and b <= bound]

    seen, three = row["seen"], row["seen"][:3]
    fit = fitted(seen, [row["first_bad"]])
    bounds = {str(share): fit.max_batch_per_rank(row["limit_gib"], share) for share in FRACTIONS}
    return {
        **row,
        "bounds": bounds,
        "oom": {share: bound > row["at_all"] for share, bound in bounds.items()},
        "errors": errors(fit, seen, float("inf")),
        "errors_of_three": errors(fitted(three, []), three, MAX_EXTRAPOLATION * three[-1]),
    }


def shown(row: Record) -> str:
    bounds = "  ".join(
        f"{bound:5d} {bound / row['freely']:4.0%} {bound / row['at_all']:4.0%}{' OOM' if row['oom'][share] else ''}"
        for share, bound in row["bounds"].items()
    )
    error = 100 * max(row["errors"], key=abs, default=float("nan"))
    return (
        f"{row['model']:21s} {row['cap_gib']:6.2f} {row['seen'][-1]:5d} {row['freely']:6d} {row['at_all']:6d}   "
        f"{bounds}   {error:+5.1f}"
    )


def summary(rows: list[Record]) -> str:
    lines = [f"{len(rows)} cases"]
    for share in map(str, FRACTIONS):
        by_freely = [row["bounds"][share] / row["freely"] for row in rows]
        by_all = [row["bounds"][share] / row["at_all"] for row in rows]
        lines.append(
            f"share {share}: {sum(row['oom'][share] for row in rows)} OOM; b_max over the largest that fits freely: "
            f"median {statistics.median(by_freely):.0%}, least {min(by_freely):.0%}, at least 90 % in "
            f"{sum(ratio >= 0.9 for ratio in by_freely)}; that fits at all: median {statistics.median(by_all):.0%}, "
            f"least {min(by_all):.0%}, at least 90 % in {sum(ratio >= 0.9 for ratio in by_all)}"
        )
    for name, words in (("errors", "all doublings"), ("errors_of_three", "three smallest")):
        found = [abs(error) for row in rows for error in row[name]]
        if found:
            lines.append(
                f"memory error, {words}: median {statistics.median(found):.1%}, p90 "
                f"{sorted(found)[int(0.9 * len(found))]:.1%}, largest {max(found):.1%} ({len(found)} batches)"
            )
    return "\n".join(lines)


def measure_all(machine: Gpu | Cpu, smoke: bool, seconds: float, file: Path) -> list[Record]:
    """A row for each model and cap, kept in the file as they come."""
    began, rows, skipped = time.monotonic(), [], 0
    for case in cases(smoke):
        torch.manual_seed(0)
        model = case.build()
        two = [machine.record(case, model, times * case.smallest_batch, None) or {} for times in (1, 2)]
        sizes = [float(record.get("reserved_gib", record["memory_gib"])) for record in two]
        for factor in CAPS[:2] if smoke else CAPS:
            if time.monotonic() - began > seconds:
                skipped += 1
                continue
            cap = sizes[0] + (factor - 1) * (sizes[1] - sizes[0])

            def measure(batch: int, cap: float = cap, case: Case = case, model: nn.Module = model) -> Record | None:
                return machine.record(case, model, batch, cap)

            rows.append(explore(Trial(case, cap, measure), machine.limit_gib))
            row = rows[-1]
            print(
                f"{case.name}: cap {cap:.2f} GiB, doublings to {row['seen'][-1]} fit, freely {row['freely']}, at all "
                f"{row['at_all']}; {len(row['measured'])} batches, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            file.write_text(json.dumps(rows))
    if skipped:
        print(f"no time for {skipped} further cases")
    return rows


def main() -> None:
    """Measures, or prints a row for each model and cap and what they add up to."""
    parser = argparse.ArgumentParser(description="How well the memory model bounds the batch")
    parser.add_argument("--json", type=Path, default=Path("memory.json"), help="file for all that is measured")
    parser.add_argument("--judge", type=Path, help="such a file, to compare with the model instead of measuring")
    parser.add_argument("--smoke", action="store_true", help="a small network on the CPU")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no further case after this long")
    arguments = parser.parse_args()
    if arguments.judge is None:
        smoke = arguments.smoke or not torch.cuda.is_available()
        measured = measure_all(Cpu() if smoke else Gpu(), smoke, arguments.seconds, arguments.json)
    else:
        measured = json.loads(arguments.judge.read_text())
    try:
        rows = [judge(row) for row in measured]
    except ImportError as error:
        print(f"{error}; compare elsewhere: python -m tests.benchmarks.memory --judge {arguments.json}")
        return
    print(
        "                         cap   seen freely at all   b_max, % of freely, % of at all, at 0.9, 0.95, 1   error %"
    )
    for row in rows:
        print(shown(row))
    print(summary(rows))


if __name__ == "__main__":
    main()
