"""The paper's claims by what was measured and lies in tests/data: writes tula_hpc/paper/measured.csv.

    python -m tests.benchmarks.claims

The command `paper claims` shows that file. A claim that no record speaks of is not in it. The README's tables of claims
and accuracies are written anew as well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.benchmarks import accuracy_table
from tula_hpc.candidates import Candidate
from tula_hpc.models.knee import find_knee
from tula_hpc.models.memory import fit_memory
from tula_hpc.models.pricing import MemoryPrice
from tula_hpc.models.search import SearchMode, next_round
from tula_hpc.models.step_time import fit_step_time
from tula_hpc.paper import claims, published
from tula_hpc.paper.claims import (
    ALIKE,
    LINEAR_PERCENT,
    MEASURED,
    Measured,
    against,
    elsewhere,
    holds,
    or_as_printed,
    speedup,
)
from tula_hpc.paper.command import markdown
from tula_hpc.paper.timing import against_nodes, plateau

DATA = Path(__file__).parents[1] / "data"
README = DATA.parent.parent / "README.md"
STEP_TIMES = DATA / "step-times" / "h100-10gbit.csv"
PAPER_SMALL = DATA / "paper-small"
SAMPLES = {"resnet50": 1281167, "vgg11": 50000, "alexnet": 6941, "mobilenetv3": 24485}
H100, H200 = "4 H100, 10 Gbit/s", "H200"
TIMES = "synthetic images, TF32"
SMALL_DATA = "CIFAR-10 and CalTech101, ResNet18 for ResNet50, bfloat16"


def main() -> None:
    MEASURED.write_text(pd.DataFrame(measured()).to_csv(index=False), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    for table in (claims.table(claims.shipped()), accuracy_table.readme_table(_trainings())):
        old = rf"^\| {re.escape(table.columns[0])} \|.*\n(\|.*\n)*"
        new = markdown(table).replace("\\", r"\\")
        readme = re.sub(old, f"{new}\n", readme, flags=re.MULTILINE)
    README.write_text(readme, encoding="utf-8")
    print(f"wrote {MEASURED} and tables of {README}")


def measured() -> list[Measured]:
    """Every claim that the records speak of."""
    rows = [*_times(), *_memory(), *_errors(), *_accuracies(), *_gradients()]
    order = [claim.key for claim in published.CLAIMS]
    return sorted(rows, key=lambda row: order.index(row.key))


def _tables() -> dict[str, pd.DataFrame]:
    """The measured step times of each model, with the times of an epoch of the paper's data set."""
    table = pd.read_csv(STEP_TIMES)
    table["global_batch"] = table["num_nodes"] * table["gpus_per_node"] * table["batch_per_rank"]
    table["epoch_s"] = table["step_time_s"] * np.ceil(table["model"].map(SAMPLES) / table["global_batch"])
    table["train_time_s"] = table["train_s"] = table["epoch_s"]
    return {model: rows.reset_index(drop=True) for model, rows in table.groupby("model")}


def _row(key: str, here: str, verdict: str, setting: str = TIMES) -> Measured:
    return Measured(key, here, H100, setting, verdict, str(STEP_TIMES.relative_to(DATA.parent.parent)))


def _times() -> list[Measured]:
    found = []
    for model, table in _tables().items():
        sizes = sorted(table["num_nodes"].unique())
        largest = table[table["num_nodes"] == sizes[-1]]
        flat = plateau(model, largest)
        found.append(_row(f"plateau-{model}", f"{flat.here} ({sizes[-1]} nodes)", flat.verdict))
        end = largest["global_batch"].max()
        knee = find_knee(largest)[1]["global_batch"]
        words = f"{'at least ' if knee == end else ''}{knee} ({sizes[-1]} nodes)"
        found.append(_row(f"knee-{model}", words, elsewhere(knee, published.KNEE[model], largest=end)))
        paid = MemoryPrice(0.15).cost(largest["train_s"], sizes[-1], 1, largest["memory_gib"])
        cheapest = largest["global_batch"].iloc[int(np.argmin(paid))]
        verdict = elsewhere(cheapest, published.CHEAPEST_BY_MEMORY[model], largest=end)
        found.append(_row(f"memory-price-{model}", f"{cheapest} ({sizes[-1]} nodes)", verdict))
        by_batch = largest.sort_values("global_batch")["train_s"]
        times = by_batch.iloc[0] / by_batch.min()
        words = f"{times:.2g}x (batch {largest['global_batch'].min()} against the fastest, {sizes[-1]} nodes)"
        found.append(_row(f"speedup-{model}", words, speedup(times, model)))
        if len(sizes) > 1 and 2 in sizes:
            for key, answer in against_nodes(model, table, sizes[-2], sizes[-1]).items():
                found.append(_row(key, *answer))
    return found


def _memory() -> list[Measured]:
    """How far a line is off through the parts of the peak on the largest cluster, over all models and batches."""
    found = []
    for key, part in (("activation-linear", "activation_gib"), ("batch-linear", "batch_gib")):
        off = []
        for table in _tables().values():
            rows = table[table["num_nodes"] == table["num_nodes"].max()]
            batch, gib = rows["batch_per_rank"].to_numpy(dtype=float), rows[part].to_numpy(dtype=float)
            off += list(100 * np.abs(np.polyval(np.polyfit(batch, gib, 1), batch) / gib - 1))
        words = f"a line is off by {np.median(off):.2g} % (median), {max(off):.2g} % at most"
        found.append(_row(key, words, holds(float(np.median(off)) < LINEAR_PERCENT)))
    return found


def _errors() -> list[Measured]:
    """Median errors of the default models, each model's points by themselves, as in Fig. 11."""
    errors: dict[str, list[float]] = {"full-error": [], "partial-error": [], "memory-error": []}
    for table in _tables().values():
        grid = [Candidate.from_record(row) for row in table.to_dict("records")]
        corners = set(next_round(SearchMode.partial, grid, (), ()).candidates)
        at_corner = np.array([candidate in corners for candidate in grid])
        full, partial = fit_step_time(table), fit_step_time(table[at_corner])
        errors["full-error"].append(_median(full.predict(table), table["step_time_s"]))
        unseen = table[~at_corner]
        errors["partial-error"].append(_median(partial.predict(unseen), unseen["step_time_s"]))
        memory = fit_memory(table[at_corner], [])
        alone = table["num_nodes"] * table["gpus_per_node"] == 1
        errors["memory-error"].append(_median(memory.predict(table["batch_per_rank"], alone), table["memory_gib"]))
    bounds = {
        "full-error": published.FULL_ERROR_PERCENT,
        "partial-error": published.PARTIAL_ERROR_PERCENT,
        "memory-error": published.MEMORY_ERROR_PERCENT,
    }
    return [
        _row(key, f"{min(values):.2g} to {max(values):.2g} %", against(max(values), bounds[key]))
        for key, values in errors.items()
    ]


def _median(told: object, seen: object) -> float:
    return float(np.median(100 * np.abs(np.asarray(told, dtype=float) / np.asarray(seen, dtype=float) - 1)))


def _trainings() -> list[dict[str, Any]]:
    return accuracy_table.read([accuracy_table.FINALS])


def _accuracies() -> list[Measured]:
    """How far accuracy falls with the batch, and what the default method gains over plain training, in whole
    trainings and in the short ones of scale small."""
    records = _trainings()
    plain = accuracy_table.accuracies(records).loc["alexnet"]["lbt"].dropna()
    small, large = plain.index[0], plain.index[-1]
    seen = [r["train_top1"] for r in records if (r["task"], r["batch"], r["method"]) == ("alexnet", large, "lbt")]
    words = f"{plain[small]:.0f} % to {plain[large]:.0f} % (batch {small} to {large})"
    setting = f"CalTech101, 64 of 80 px, bfloat16; train accuracy falls as well, to {np.mean(seen):.0f} %"
    gains = accuracy_table.gains(accuracy_table.of_large_batches(records)).loc[["ags", "ags_paper"]]
    gained = "{:.1f} points; as printed {:.1f}".format(*gains["mean gain"])
    as_good = "; as printed ".join(f"{row['at least lbt']:.0f} of {row['rows']:.0f}" for _, row in gains.iterrows())
    shorter = json.loads((PAPER_SMALL / "table1.json").read_text(encoding="utf-8"))["claims"]
    gained += f"; at small {shorter['gain']}"
    as_good += f"; at small {shorter['never-worse']}"
    return [
        _accuracy("gap", words, setting, holds(plain[large] < plain[small] - ALIKE)),
        _accuracy("gain", gained, SMALL_DATA, or_as_printed(dict(gains["mean gain"] >= published.MEAN_GAIN))),
        _accuracy("never-worse", as_good, SMALL_DATA, or_as_printed(dict(gains["at least lbt"] == gains["rows"]))),
    ]


def _gradients() -> list[Measured]:
    """What the jobs of Fig. 5 to 8 found at scale small."""
    found = []
    for path in sorted(PAPER_SMALL.glob("fig0[5-8].json")):
        said, record = json.loads(path.read_text(encoding="utf-8")), str(path.relative_to(DATA.parent.parent))
        for key, words in said["claims"].items():
            found.append(Measured(key, words, H200, SMALL_DATA, said["verdicts"][key], record))
    return found


def _accuracy(key: str, here: str, setting: str, verdict: str) -> Measured:
    return Measured(key, here, H200, setting, verdict, str(accuracy_table.FINALS.relative_to(DATA.parent.parent)))


if __name__ == "__main__":
    main()
