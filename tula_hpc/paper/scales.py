"""How large a result is measured: which command lines stand for which part of the paper.

    smoke   a tiny net on two and more CPU nodes, minutes: whether everything works, and nothing about the paper
    small   one host with GPUs, about an hour: the paper's models, random images for times, CIFAR-10 and CalTech101 with
            fewer epochs for accuracies
    paper   2 to 16 nodes and the paper's data, models and epochs

The same part of two results is the same command line, so it is measured once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tula_hpc.errors import ConfigError

Run = tuple[str, ...]
"""The arguments of one command of this package."""


@dataclass(frozen=True)
class Scale:
    """One size of all results. Keys are the paper's models."""

    name: str
    words: str
    profiled: Mapping[str, Run]
    """What the models' times and memory are measured with; the grid included."""
    trained: Mapping[str, Run]
    """What their accuracies are measured with."""
    nodes: int
    """A training runs on these."""
    local_nodes: int
    """A training with post-local SGD runs on these: it needs two ranks."""
    seeds: int
    batches: Mapping[str, tuple[int, ...]]
    """Global batches whose plain accuracy is compared (Fig. 2)."""
    table1: Mapping[str, tuple[int, ...]]
    """Rows of Table I: global batches of each model."""
    static_batches: Mapping[str, int]
    """Global batch of each model's static scalings (Fig. 7, 8)."""
    static_scales: tuple[int, ...]
    curvature_samples: int
    """Samples that the Hessian's eigenvalue is computed on (Fig. 5)."""
    says_something: bool = True
    """About the paper; else no claim gets a verdict."""
    ranks_per_node: int = 1
    """Of the cluster at hand: the batch of a rank follows from it."""

    def profile(self, model: str, *more: str) -> Run:
        """Times and memory of the model's whole grid, to the choice."""
        return (*self.profiled[model], "search=full", "until=choice", *more)

    def training(self, model: str, global_batch: int, method: str = "lbt", seed: int = 0, *more: str) -> Run:
        """One training at a global batch, with a line for each step's gradient."""
        nodes = self.local_nodes if method == "polo" else self.nodes
        each = max(1, global_batch // (nodes * self.ranks_per_node))
        return (
            *self.trained[model],
            f"method={method}",
            *(f"grid.{end}_nodes={nodes}" for end in ("min", "max")),
            *(f"grid.{end}_batch_per_rank={each}" for end in ("min", "max")),
            "grid.min_global_batch=1",
            f"training.seed={seed}",
            "training.trace_gradients=true",
            *more,
        )


_PAPER = {
    "resnet50": "resnet50_imagenet",
    "vgg11": "vgg11_cifar100",
    "alexnet": "alexnet_caltech101",
    "mobilenetv3": "mobilenetv3_caltech256",
}
_TABLE1 = {
    "resnet50": (1024, 2048, 4096),
    "vgg11": (1024, 2048, 4096),
    "alexnet": (256, 512, 1024),
    "mobilenetv3": (1024, 2048, 4096),
}

PAPER = Scale(
    name="paper",
    words="2 to 16 nodes, the paper's data, models and epochs",
    profiled={model: (f"+experiment={name}",) for model, name in _PAPER.items()},
    trained={model: (f"+experiment={name}",) for model, name in _PAPER.items()},
    nodes=16,
    local_nodes=16,
    seeds=3,
    batches={
        "resnet50": (32, 128, 512, 1024, 2048, 4096),
        "vgg11": (32, 128, 512, 1024, 2048, 4096),
        "alexnet": (128, 256, 512, 1024, 2048),
        "mobilenetv3": (256, 512, 1024, 2048, 4096, 8192),
    },
    table1=_TABLE1,
    static_batches=dict.fromkeys(_PAPER, 1024),
    static_scales=(2, 4, 8, 16),
    curvature_samples=256,
)

# Images come from four processes beside each GPU. Where channels are not last, VGG11's step takes twenty times as long
# in bfloat16 (an H200, torch 2.11): its backward pass 114 ms at batch 1024.
_ON_A_GPU: Run = (
    "training.precision=bf16",
    "training.channels_last=true",
    "data.loader_workers=4",
    "cluster.cpus_per_rank=4",
)

SMALL = Scale(
    name="small",
    words="one host with GPUs: random images for times; CIFAR-10 and CalTech101 with fewer epochs for accuracies",
    profiled={
        model: (
            f"+experiment={name}",
            "data=synthetic",
            "grid.min_nodes=1",
            "grid.max_nodes=4",
            "grid.min_batch_per_rank=16",
            "grid.max_batch_per_rank=512",
            "training.precision=tf32",
            "search.timed_steps=12",
            "search.compute_steps=5",
            "search.max_seconds=8",
        )
        for model, name in _PAPER.items()
    },
    trained={
        "resnet50": ("+experiment=resnet18_cifar10", "training.epochs=15", "training.milestones=[8,11,13]", *_ON_A_GPU),
        "vgg11": ("+experiment=vgg11_cifar10", "training.epochs=30", "training.milestones=[15,21,26]", *_ON_A_GPU),
        "alexnet": (
            "+experiment=alexnet_caltech101",
            "workload.dataset.image_size=96",
            "training.epochs=30",
            "training.milestones=[15,21,26]",
            *_ON_A_GPU,
        ),
        "mobilenetv3": (
            "+experiment=mobilenetv3_cifar10",
            "training.epochs=20",
            "training.milestones=[10,16]",
            *_ON_A_GPU,
        ),
    },
    nodes=1,
    local_nodes=2,
    seeds=1,
    batches={
        "resnet50": (128, 1024, 4096),
        "vgg11": (128, 1024, 4096),
        "alexnet": (128, 512, 2048),
        "mobilenetv3": (256, 1024, 4096),
    },
    table1=_TABLE1,
    # AlexNet's 30 epochs are 210 steps at 1024, in which it learns nothing, however it is scaled (test accuracy 9.7 %)
    static_batches=dict.fromkeys(_PAPER, 1024) | {"alexnet": 256},
    static_scales=(2, 4, 8, 16),
    curvature_samples=256,
)

_TINY: Run = (
    "+experiment=quickstart",
    "search.warmup_steps=1",
    "search.timed_steps=3",
    "search.compute_steps=3",
)
_TINY_GRID: Run = (
    "grid.min_nodes=1",
    "grid.max_nodes=2",
    "grid.min_batch_per_rank=16",
    "grid.max_batch_per_rank=64",
    "grid.min_global_batch=16",
    "profiling=single",
)
_TINY_TRAINING: Run = (
    "training.epochs=3",
    "training.warmup_epochs=1",
    "training.milestones=[2]",
    "data.train_samples=512",
    "data.test_samples=128",
)

SMOKE = Scale(
    name="smoke",
    words="one tiny net in the place of all four: whether everything works, and nothing about the paper",
    profiled=dict.fromkeys(_PAPER, (*_TINY, *_TINY_GRID)),
    trained=dict.fromkeys(_PAPER, (*_TINY, *_TINY_TRAINING)),
    says_something=False,
    nodes=1,
    local_nodes=2,
    seeds=1,
    batches=dict.fromkeys(_PAPER, (32, 128)),
    table1=dict.fromkeys(_PAPER, (128,)),
    static_batches=dict.fromkeys(_PAPER, 128),
    static_scales=(4,),
    curvature_samples=32,
)

SCALES = {scale.name: scale for scale in (SMOKE, SMALL, PAPER)}


def scale_of(name: str) -> Scale:
    """The scale of that name. Raises ConfigError on any other."""
    if name not in SCALES:
        raise ConfigError([f"--scale is {name!r}; there are {', '.join(SCALES)}"])
    return SCALES[name]
