"""What the paper says, as numbers: arXiv 2603.18112v1, section, figure and table as named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODELS = {"resnet50": "ResNet50", "vgg11": "VGG11", "alexnet": "AlexNet", "mobilenetv3": "MobileNetV3"}

TABLE1: dict[str, dict[int, dict[str, float]]] = {
    "resnet50": {
        1024: {"lbt": 79.67, "lars": 83.26, "polo": 74.03, "lrs_linear": 83.33, "ags_paper": 85.28},
        2048: {"lbt": 75.55, "lars": 85.02, "polo": 65.58, "lrs_linear": 74.44, "ags_paper": 84.58},
        4096: {"lbt": 64.72, "lars": 86.77, "polo": 62.46, "lrs_linear": 70.11, "ags_paper": 82.16},
    },
    "vgg11": {
        1024: {"lbt": 83.30, "lars": 52.93, "polo": 82.90, "lrs_linear": 7.50, "ags_paper": 84.42},
        2048: {"lbt": 75.92, "lars": 50.91, "polo": 81.13, "lrs_linear": 5.00, "ags_paper": 82.58},
        4096: {"lbt": 70.24, "lars": 48.64, "polo": 79.50, "lrs_linear": 5.00, "ags_paper": 81.14},
    },
    "alexnet": {
        256: {"lbt": 80.62, "lars": 55.40, "polo": 85.11, "lrs_linear": 83.38, "ags_paper": 84.44},
        512: {"lbt": 72.80, "lars": 56.00, "polo": 85.95, "lrs_linear": 72.30, "ags_paper": 83.00},
        1024: {"lbt": 62.60, "lars": 57.00, "polo": 85.67, "lrs_linear": 32.74, "ags_paper": 81.20},
    },
    "mobilenetv3": {
        1024: {"lbt": 76.80, "lars": 67.64, "polo": 81.14, "lrs_linear": 78.66, "ags_paper": 81.56},
        2048: {"lbt": 71.15, "lars": 72.82, "polo": 75.54, "lrs_linear": 10.00, "ags_paper": 79.68},
        4096: {"lbt": 66.48, "lars": 74.29, "polo": 73.91, "lrs_linear": 5.00, "ags_paper": 75.70},
    },
}
"""Test accuracy in percent; called top-1, but ResNet50's is top-5 (section IV-B), and others must be."""

ACCURACY_AGAINST_BATCH: dict[str, dict[int, float]] = {
    "alexnet": {128: 82.0, 2048: 37.0},
    "mobilenetv3": {256: 80.0, 8192: 20.0},
}
"""Section II-B, Fig. 2: what the text says in numbers."""

KNEE = {"resnet50": 8192, "vgg11": 8192, "alexnet": 1024, "mobilenetv3": 2048}
"""Global batch at the knee on 16 nodes (section IV-C)."""

PLATEAU = {"resnet50": 8192, "vgg11": 4096, "alexnet": 2048, "mobilenetv3": 2048}
"""Global batch beyond which the epoch time hardly falls (section II-A, Fig. 1)."""

CHEAPEST_BY_MEMORY = {"resnet50": 16384, "vgg11": 16384, "alexnet": 2048, "mobilenetv3": 1024}
"""Global batch of least cost on 16 nodes where memory is paid for (section IV-C, Fig. 10)."""

MEAN_GAIN = 8.8
"""Points of accuracy by which Tula is better than LBT, mean over the rows of Table I."""
SPEEDUP = {"resnet50": 16.0, "vgg11": 20.0, "alexnet": 8.0, "mobilenetv3": 7.7}
"""Of the chosen over a naive configuration, at most (section VII); which one is the naive one is not said."""

FULL_ERROR_PERCENT = (2.0, 5.0)
PARTIAL_ERROR_PERCENT = (7.5, 14.0)
MEMORY_ERROR_PERCENT = (8.0, 14.0)
"""Ranges of the models' median errors (section IV-C, Fig. 11)."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper that can be measured."""

    key: str
    result: str
    """The job that measures it."""
    where: str
    """Figure, table or section."""
    statement: str
    published: str


def _per_model(
    key: str, result: str, where: str, statement: str, values: Mapping[str, float], unit: str
) -> list[Claim]:
    return [
        Claim(f"{key}-{model}", result, where, f"{statement}, {MODELS[model]}", f"{value:g}{unit}")
        for model, value in values.items()
    ]


CLAIMS: list[Claim] = [
    Claim(
        "fewer-nodes-faster", "fig01", "Fig. 1", "fewer nodes are faster at the same global batch: MobileNetV3, 1024, "
        "twice the nodes against once", "more than 2x the time",
    ),
    Claim(
        "weak-scaling", "fig01", "Fig. 1", "more nodes are faster at the same batch a node: ResNet50, 32, twice "
        "the nodes against once", "20 % less time",
    ),
    *_per_model("plateau", "fig01", "Fig. 1", "batch from which the epoch time hardly falls", PLATEAU, ""),
    Claim("gap", "fig02", "Fig. 2", "accuracy falls with the batch, AlexNet from 128 to 2048", "82 % to 37 %"),
    Claim("activation-linear", "fig04", "Fig. 4a", "activation memory is proportional to the batch", "linear"),
    Claim("batch-linear", "fig04", "Fig. 4b", "a linear model predicts the memory of a batch", "linear"),
    Claim(
        "small-batch-norms", "fig05", "Fig. 5a", "early gradients of small batches are larger than those of large ones",
        "larger",
    ),
    Claim("hessian", "fig05", "Fig. 5b", "the gradient's norm follows the Hessian's largest eigenvalue", "similar"),
    Claim("variability", "fig06", "Fig. 6", "gradient variability mirrors the accuracy's course", "correlated"),
    Claim("static-resnet50", "fig07", "Fig. 7a", "static scaling is better than none for every s, ResNet50", "4 of 4"),
    Claim("static-alexnet", "fig07", "Fig. 7c", "static scaling is better than none only for s = 2, AlexNet", "1 of 4"),
    Claim("delta-resnet50", "fig08", "Fig. 8a", "threshold 0.8 is worse than 0.5, ResNet50", "worse"),
    Claim("delta-vgg11", "fig08", "Fig. 8b", "at 0.2, s = 2, 4, 8 end alike and s = 16 lower, VGG11", "12 points"),
    *_per_model("knee", "fig09", "Fig. 9", "knee on the largest cluster", KNEE, ""),
    *_per_model(
        "memory-price", "fig10", "Fig. 10", "cheapest batch on the largest cluster if memory is paid",
        CHEAPEST_BY_MEMORY, "",
    ),
    Claim("memory-error", "fig11", "Fig. 11a", "median error of predicted memory", "8 to 14 %"),
    Claim("full-error", "fig11", "Fig. 11b", "median error of predicted time, full search", "2 to 5 %"),
    Claim("partial-error", "fig11", "Fig. 11b", "median error of predicted time, partial search", "7.5 to 14 %"),
    Claim("gain", "table1", "Table I", "Tula less LBT, mean over the rows", f"{MEAN_GAIN} points"),
    Claim("never-worse", "table1", "Table I", "rows in which Tula is at least LBT", "12 of 12"),
    *_per_model("speedup", "headline", "Section VII", "chosen against naive configuration", SPEEDUP, "x"),
]  # fmt: skip
