"""Texts, numbers and tables of the report as HTML; everything passes `escape` once."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from tula_hpc.display import duration

MEMORY_PARTS = {
    "param_gib": "parameters",
    "grad_gib": "gradients",
    "bucket_gib": "gradient buckets",
    "optimizer_gib": "optimiser state",
    "ags_gib": "gradient scaling",
    "other_gib": "process, libraries and cache",
    "outside_gib": "process and libraries",
    "loader_gib": "loader workers",
    "reserve_gib": "allocator's reserve",
    "batch_gib": "batch",
    "workspace_gib": "workspace",
    "activation_gib": "activations",
}
"""Terms of the memory model in words."""
STEP_TIME_MEANINGS = {
    "alpha": "compute time of a step, whatever the batch",
    "beta": "compute time of each sample of a rank",
    "t_floor": "least compute time of a step",
    "s": "synchronisation: times 1 − 1/ranks on a ring, each round of a tree, each rank of a parameter server",
    "l": "latency: for each doubling of the ranks",
    "c_ring": "synchronisation between nodes: of two ranks, and times 2 (1 − 1/ranks) on a ring",
    "lambda": "more synchronisation for each node beyond two",
    "kappa": "more synchronisation for each GPU of a node beyond one",
    "c_r": "synchronisation inside one node",
    "before_sync": "computation before synchronisation can begin: forward and until the first gradients are complete",
    "after_backward": "synchronisation that is left when computation has ended: the last gradients",
}
"""Parameters of the step-time models in words."""
STEP_TIME_FORMULAS = {
    "overlap": "step = computation + synchronisation − the smaller of what could hide and what could be hidden",
    "additive": "step = alpha + beta × batch a rank + synchronisation",
}


def escape(value: object) -> str:
    """Text that is safe in an element and in a quoted attribute."""
    return html.escape(str(value), quote=True)


def facts_list(facts: dict[str, str], wide: bool = False) -> str:
    """A list of names and values; long identifiers may break after their dots, slashes and underscores."""
    look = ' class="wide"' if wide else ""
    items = (f"<div{look}><dt>{escape(name)}</dt><dd>{_breakable(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _breakable(text: str) -> str:
    return re.sub(r"([./_])", r"\1<wbr>", escape(text))


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], classes: Sequence[str] = (), left: Sequence[int] = ()
) -> str:
    """A table that scrolls sideways by itself; numbers stand to the right, the columns `left` to the left."""

    def cells(kind: str, values: Sequence[object]) -> str:
        looks = [' class="left"' if place in left else "" for place in range(len(values))]
        return "".join(f"<{kind}{look}>{escape(value)}</{kind}>" for look, value in zip(looks, values, strict=True))

    looks = classes or [""] * len(rows)
    body = "".join(f'<tr class="{look}">{cells("td", row)}</tr>' for look, row in zip(looks, rows, strict=True))
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{top}<tbody>{body}</tbody></table></div>'


def time_text(seconds: float | None) -> str:
    """Seconds in the unit a person would use, or a dash."""
    return "–" if seconds is None else duration(seconds)


def interval_text(low: float | None, high: float | None) -> str:
    """Two times with a dash; the unit only once where both have it."""
    if low is None or high is None:
        return "–"
    low_text, high_text = duration(low), duration(high)
    number, unit = low_text.split(" ")
    return f"{number if high_text.endswith(f' {unit}') else low_text} – {high_text}"


def gib_text(gib: float | None) -> str:
    """GiB, or MiB for little, or a dash."""
    if gib is None:
        return "–"
    return f"{gib:.3g} GiB" if gib >= 0.1 else f"{1024 * gib:.3g} MiB"


def memory_line(intercept_gib: float, slope_gib: float) -> str:
    """A part of the memory, without the term it does not have."""
    terms = [gib_text(intercept_gib)] if intercept_gib >= 1e-6 else []
    terms += [f"{1024 * slope_gib:.3g} MiB/sample"] if slope_gib > 0 else []
    return " + ".join(terms) or "0"


def money(amount: float | None, currency: str) -> str:
    """An amount with its currency; cents only where they mean something."""
    if amount is None:
        return "–"
    return f"{currency}{amount:,.2f}" if amount >= 1 else f"{currency}{amount:.2g}"


def quantity(value: float | None, unit: str) -> str:
    """A parameter with its unit; times in the size people use."""
    if value is None:
        return "not finite"
    if unit.startswith("of "):
        return f"{value:.3g} {unit}"
    size, short = (1e6, "µs") if 0 < value < 1e-4 else (1e3, "ms") if value < 1 else (1.0, "s")
    return f"{size * value:.3g} {short}{unit.removeprefix('s')}"


def deviation(measured: float, predicted: float) -> str:
    """How much longer or shorter a measured time is."""
    percent = 100 * (measured / predicted - 1)
    return f"{abs(percent):.1f} % {'slower' if percent >= 0 else 'faster'}"


def span(low: int, high: int) -> str:
    """2 to 16, or just 2."""
    return str(low) if low == high else f"{low} to {high}"


def sentence(text: str) -> str:
    """With its first letter large."""
    return text[:1].upper() + text[1:]
