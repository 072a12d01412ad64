"""What the report says where a training did not go as it was chosen: strips of HTML, empty where it did."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tula_hpc import methods
from tula_hpc.control.verdicts import Verdict
from tula_hpc.display import nodes_and_batch
from tula_hpc.markup import escape, sentence

if TYPE_CHECKING:
    from tula_hpc.report import Records


def relaunch_notice(records: Records) -> str:
    """A strip that says so when the training did not use what was chosen."""
    chosen, used = records.selection, records.trained_with()
    if chosen is None or not used or chosen["global_batch"] == used["global_batch"]:
        return ""
    trainings = [a for a in records.attempts if a.job == "train"]
    reasons = [
        attempt.reason
        for attempt, following in pairwise(trainings)
        if attempt.verdict and attempt.verdict.out_of_memory and following.batch_per_rank < attempt.batch_per_rank
    ]
    if not reasons and any(a.successor is not None for a in trainings):
        return ""  # another notice says where it was moved to
    because = f" The training ran out of memory and went on with a smaller batch: {reasons[-1]}" if reasons else ""
    text = (
        f"Chosen was a global batch of {chosen['global_batch']}; in the end the training used {used['global_batch']}."
    )
    return f'<div class="notice"><strong>{escape(text)}</strong>{escape(because)}</div>'


def method_notice(records: Records) -> str:
    """A strip for what one would not expect of the method at the batch that was used, or chosen."""
    used = records.trained_with() or records.selection
    if used is None:
        return ""
    node_type = (records.selection or {}).get("node_type", "")
    ranks = used["num_nodes"] * records.settings.of_type(node_type).cluster.ranks_per_node
    return "".join(
        f'<div class="notice">{escape(sentence(note))}.</div>'
        for note in methods.notes(records.settings, used["global_batch"], ranks)
    )


def drift_notice(records: Records) -> str:
    """A strip for what the training's steps told that nobody had predicted, and what was done about it."""
    items = [f"{sentence(drift['headline'])}. {drift['words']}" for drift in records.drifts]
    for a in records.attempts:
        if a.verdict is Verdict.replanned and a.successor is not None:
            without = f", without {a.successor.without}" if a.successor.without else ""
            there = f"{nodes_and_batch(a.successor)}{without}"
            items.append(f"Attempt {a.number} of the training saved, and the next one went on with {there}.")
    if not items:
        return ""
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<div class="notice"><strong>The steps did not stay as predicted.</strong><ul>{listed}</ul></div>'
