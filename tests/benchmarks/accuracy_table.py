"""Tables of the test accuracies that tests/benchmarks/accuracy.py records.

    python -m tests.benchmarks.accuracy_table [FILE...]

Prints test and train accuracy of every method, what each gains over plain training (which must be among the records),
and the paper's Table I beside ours.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from tula_hpc.paper import published

SMALL_BATCH = 128
FINALS = Path(__file__).parents[1] / "data" / "accuracy" / "finals.jsonl"
PAPERS = {"alexnet": "alexnet", "vgg11": "vgg11", "resnet18": "resnet50", "mobilenetv3": "mobilenetv3"}
"""Task -> model of the paper's Table I. Only AlexNet has the paper's data set; ResNet18 stands for ResNet50."""
NAMES = {"lin": "lrs_linear", "sqrt": "lrs_sqrt"}
"""Rule of `accuracy_methods` -> the method that users give."""
ROWS = {
    "alexnet": "AlexNet, CalTech101",
    "vgg11": "VGG11, CIFAR-10",
    "resnet18": "ResNet18, CIFAR-10",
    "mobilenetv3": "MobileNetV3, CIFAR-10",
}
COLUMNS = ("ags", "lars", "lrs_linear", "lrs_sqrt", "lbt", "polo", "ags_paper")


def read(files: list[Path]) -> list[dict[str, Any]]:
    """Every record of the files that is whole."""
    found = []
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _grouped(records: list[dict[str, Any]]) -> Any:
    """The records by task, batch and method, which has the name that users give."""
    return pd.DataFrame(records).replace({"method": NAMES}).groupby(["task", "batch", "method"])


def _top1(groups: Any) -> Any:
    """Mean test top-1 of each group in words; ± is the standard deviation over seeds, where there are several."""
    mean, std = groups["test_top1"].mean(), groups["test_top1"].std()
    return mean.map("{:.1f}".format) + std.map(lambda each: "" if each != each else f" ± {each:.1f}")


def accuracies(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Mean test top-1 in percent, a row for each task and batch, a column for each method; NaN where it never ran."""
    return _grouped(records)["test_top1"].mean().unstack("method")


def of_large_batches(records: list[dict[str, Any]]) -> pd.DataFrame:
    """The same without the small batch, whose accuracy is what the others aim at."""
    return accuracies(records).drop(index=SMALL_BATCH, level="batch", errors="ignore")


def readme_table(records: list[dict[str, Any]]) -> pd.DataFrame:
    """A row for each task and batch, the small batch beside them."""
    cells = _top1(_grouped(records))
    rows = []
    for task, words in ROWS.items():
        for batch in sorted(set(cells.index.get_level_values("batch")) - {SMALL_BATCH}):
            if (task, batch, "ags") in cells.index:
                row = {"test top-1, %": f"{words}, {batch}"}
                row |= {f"`{method}`": cells.get((task, batch, method)) for method in COLUMNS}
                rows.append(row | {f"`lbt` at {SMALL_BATCH}": cells.get((task, SMALL_BATCH, "lbt"))})
    return pd.DataFrame(rows)


def gains(large: pd.DataFrame) -> pd.DataFrame:
    """Of each method: rows, in how many it is at least `lbt`, mean and least gain over that, and the most it is behind
    the best method of a row.

    `large` is as `of_large_batches` gives it.
    """
    over = large.sub(large["lbt"], axis=0)
    behind = large.rsub(large.max(axis=1), axis=0)
    columns = {
        "rows": over.count(),
        "at least lbt": (over >= 0).sum(),
        "mean gain": over.mean(),
        "least gain": over.min(),
        "most behind": behind.max(),
    }
    return pd.DataFrame(columns).sort_values(["rows", "mean gain"], ascending=False)


def beside_the_papers(large: pd.DataFrame) -> pd.DataFrame:
    """The paper's numbers for each row, ours of the same method in brackets."""
    rows = []
    for task, model in PAPERS.items():
        for batch, papers in published.TABLE1[model].items():
            ours = large.loc[(task, batch)].dropna() if (task, batch) in large.index else pd.Series(dtype=float)
            cells = {name: f"{papers[name]:.1f} ({_or_dash(ours, name)})" for name in papers}
            rows.append({"paper": model, "ours": task, "batch": batch, **cells, "ags": _or_dash(ours, "ags")})
    return pd.DataFrame(rows)


def _or_dash(numbers: Any, name: str) -> str:
    return f"{numbers[name]:.1f}" if name in numbers else "-"


def main() -> None:
    """All tables of the files."""
    parser = argparse.ArgumentParser(description="Tables of test accuracies: by method, gains, beside the paper's")
    parser.add_argument("files", type=Path, nargs="*", default=[FINALS], metavar="FILE")
    files = parser.parse_args().files
    pd.set_option("display.width", 250, "display.max_rows", 200, "display.max_columns", 30)
    records = read(files)
    groups, large = _grouped(records), of_large_batches(records)
    print("Test top-1, ± the standard deviation over seeds, in brackets train top-1, percent\n")
    words = _top1(groups) + groups["train_top1"].mean().map(" ({:.0f})".format)
    print(words.unstack(["task", "batch"]).sort_index(axis=1).fillna("-").to_string())
    print("\nPoints over plain training (lbt), over rows that have both; and from the best of the methods in a row\n")
    print(gains(large).round(1))
    print("\nThe paper's Table I, and ours in brackets\n")
    print(beside_the_papers(large).to_string(index=False))


if __name__ == "__main__":
    main()
