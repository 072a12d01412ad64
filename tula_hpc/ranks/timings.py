"""The timing file: what each rank of a profiling job writes, and how all of them become one checked row.

`rank-0003.csv` holds a row per timed step, seconds; `rank-0003.json` says who measured it, with what, how much memory
it took, and ends the record: it is written last and names the length and hash of the CSV. A point counts only when all
ranks' files are there, whole, of the same attempt, and their numbers make sense.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import statistics
from collections.abc import Sequence
from typing import Any

from tula_hpc.candidates import Candidate
from tula_hpc.errors import RecordError
from tula_hpc.models.memory_parts import MEMORY_PARTS
from tula_hpc.runs import AttemptFolder, read_json, write_json, write_text

COLUMNS = ("step", "data_s", "forward_s", "backward_s", "sync_s", "optimizer_s", "step_s")


def write_rank(attempt: AttemptFolder, rank: int, rows: Sequence[Sequence[float]], meta: dict[str, Any]) -> None:
    """Write one rank's record, the JSON last.

    Args:
        attempt: Folder of the attempt.
        rank: Rank of the writer.
        rows: One row a timed step in the order of COLUMNS, seconds.
        meta: Everything else; see `ranks.profiling`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([int(step), *(f"{value:.9f}" for value in values)] for step, *values in rows)
    write_text(attempt.rank_csv(rank), text.getvalue())
    digest = hashlib.sha256(text.getvalue().encode()).hexdigest()
    end = {"rank": rank, "attempt": attempt.number, "rows": len(rows), "csv_sha256": digest, "complete": True}
    write_json(attempt.rank_json(rank), {**meta, **end})


def read_rank(attempt: AttemptFolder, rank: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """One rank's rows and meta data.

    Raises:
        RecordError: If a file is missing, torn, of another attempt, or holds a number that no clock gives.
    """
    meta = read_json(attempt.rank_json(rank))
    path = attempt.rank_csv(rank)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path} is missing") from None
    if not meta.get("complete") or hashlib.sha256(text.encode()).hexdigest() != meta.get("csv_sha256"):
        raise RecordError(
            f"{path} is not the file that {attempt.rank_json(rank).name} speaks of; it is torn or was changed"
        )
    if meta["attempt"] != attempt.number or meta["rank"] != rank:
        raise RecordError(f"{path} is of attempt {meta['attempt']}, rank {meta['rank']}; it lies in the wrong place")
    header, *lines = csv.reader(io.StringIO(text))
    rows = [dict(zip(header, map(float, line), strict=True)) for line in lines]
    if [row["step"] for row in rows] != [float(i) for i in range(meta["rows"])]:
        raise RecordError(f"{path} does not hold the steps 0 to {meta['rows'] - 1}, each once")
    memory = meta["memory"]
    for key, value in {"memory_gib": memory["memory_gib"], "limit_gib": memory["limit_gib"], **memory["parts"]}.items():
        known = value is not None or key != "limit_gib"  # no limit can be read on macOS, say
        if known and not 0 <= value < math.inf:
            raise RecordError(f"{attempt.rank_json(rank)}: memory {key} is {value}, which is no amount of memory")
    for key in ("compute_step_s", "allreduce_s"):
        if not 0 <= meta[key] < math.inf:
            raise RecordError(f"{attempt.rank_json(rank)}: {key} is {meta[key]}, which is not a time")
    for row in rows:
        wrong = [key for key, value in row.items() if not math.isfinite(value) or value < 0]
        if wrong or row["step_s"] == 0:
            raise RecordError(f"{path} step {row['step']:.0f}: {', '.join(wrong) or 'step_s'} is not a time")
    return rows, meta


def read_point(attempt: AttemptFolder, candidate: Candidate) -> dict[str, Any]:
    """All ranks of one profiling attempt as one row of the table that the models are fitted to.

    The slowest rank of each step is the step's time (the others wait for it), and the median over steps the point's.
    `compute_time_s` is the slowest rank's; `sync_time_s` is the shortest exposed wait over ranks, since what the others
    wait longer is the slowest rank's compute and not the network. Memory is that of the rank that took most.

    Raises:
        RecordError: Naming the file that is missing, torn, stale or nonsensical.
    """
    present = {path.name for path in attempt.path.glob("rank-*.json")}
    surplus = present - {attempt.rank_json(rank).name for rank in range(candidate.world_size)}
    if surplus:
        raise RecordError(
            f"{attempt.path} holds {', '.join(sorted(surplus))}, but {candidate.name} has {candidate.world_size} ranks"
        )
    ranks = [read_rank(attempt, rank) for rank in range(candidate.world_size)]
    metas = [meta for _, meta in ranks]
    for meta in metas:
        if meta["world_size"] != candidate.world_size or meta["batch_per_rank"] != candidate.batch_per_rank:
            raise RecordError(
                f"{attempt.rank_json(meta['rank'])} was measured with {meta['world_size']} ranks and batch "
                f"{meta['batch_per_rank']}, not {candidate.world_size} and {candidate.batch_per_rank}"
            )
    if len({meta.get("launch") for meta in metas}) != 1:
        raise RecordError(f"{attempt.path}: the ranks' files are of different launches of the job, so some are stale")
    if len({meta["rows"] for meta in metas}) != 1:
        raise RecordError(f"{attempt.path}: the ranks timed different numbers of steps")
    fullest = max(metas, key=lambda meta: meta["memory"]["memory_gib"])["memory"]
    limits = [meta["memory"]["limit_gib"] for meta in metas]
    steps = range(metas[0]["rows"])

    def per_step(column: str, over_ranks: Any) -> float:
        return statistics.median(over_ranks(rows[i][column] for rows, _ in ranks) for i in steps)

    return {
        **candidate.record(),
        "global_batch": candidate.global_batch,
        "step_time_s": per_step("step_s", max),
        "compute_time_s": max(meta["compute_step_s"] for meta in metas),
        "sync_time_s": per_step("sync_s", min),
        **{column: per_step(column, max) for column in ("data_s", "forward_s", "backward_s", "optimizer_s")},
        "step_time_p10_s": _quantile([max(rows[i]["step_s"] for rows, _ in ranks) for i in steps], 0.1),
        "step_time_p90_s": _quantile([max(rows[i]["step_s"] for rows, _ in ranks) for i in steps], 0.9),
        "allreduce_s": max(meta["allreduce_s"] for meta in metas),
        "memory_gib": fullest["memory_gib"],
        **{part: fullest["parts"][part] for part in MEMORY_PARTS if part in fullest["parts"]},
        "limit_gib": min((limit for limit in limits if limit is not None), default=None),
        "allocator_retries": max(meta["memory"]["allocator_retries"] for meta in metas),
        "gradient_mib": metas[0]["gradient_bytes"] / 2**20,
        "hosts": sorted({meta["host"] for meta in metas}),
        "device": metas[0]["device"],
        "timed_steps": metas[0]["rows"],
        "attempt": attempt.number,
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
