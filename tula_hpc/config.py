"""Every setting of a run and its meaning.

The dataclasses are the schema that Hydra composes `conf/` into; `checks.check` is the one place that refuses values.
Fields marked `result=False` do not change what a run finds out, so they are left out of the signature that names the
run folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tula_hpc.candidates import Candidate, candidate_grid, doublings
from tula_hpc.errors import RecordError
from tula_hpc.models.search import SearchMode
from tula_hpc.runs import RunFolder, write_text


class ClusterKind(Enum):
    auto = "auto"
    local = "local"
    slurm = "slurm"


class ControllerKind(Enum):
    here = "here"
    slurm = "slurm"


class GpuRequest(Enum):
    gpus_per_node = "gpus_per_node"
    gres = "gres"
    none = "none"


class Until(Enum):
    choice = "choice"
    result = "result"


class DataKind(Enum):
    real = "real"
    synthetic = "synthetic"


class Precision(Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class ObjectiveKind(Enum):
    time = "time"
    cost = "cost"
    knee = "knee"
    time_to_result = "time_to_result"


class ProfilingKind(Enum):
    array = "array"
    packed = "packed"
    single = "single"


class PricingKind(Enum):
    node_hour = "node_hour"
    memory = "memory"
    spot = "spot"
    service_units = "service_units"


class MethodKind(Enum):
    ags = "ags"
    ags_measured = "ags_measured"
    ags_paper = "ags_paper"
    lbt = "lbt"
    lrs_linear = "lrs_linear"
    lrs_sqrt = "lrs_sqrt"
    lars = "lars"
    polo = "polo"
    static = "static"

    @property
    def scales_gradients(self) -> bool:
        return self in (MethodKind.ags, MethodKind.ags_measured, MethodKind.ags_paper, MethodKind.static)

    @property
    def measures_scales(self) -> bool:
        return self in (MethodKind.ags_measured, MethodKind.ags_paper)


class OptimizerKind(Enum):
    sgd = "sgd"
    adamw = "adamw"


class ReplanKind(Enum):
    off = "off"
    offer = "offer"
    auto = "auto"


class Granularity(Enum):
    element = "element"
    channel = "channel"
    tensor = "tensor"
    # `global` is a keyword, so the member cannot be written as the others are
    model = "global"


class Gate(Enum):
    current = "current"
    lagged = "lagged"
    off = "off"


class LocalMomentum(Enum):
    keep = "keep"
    reset = "reset"
    average = "average"


class StepTimeForm(Enum):
    overlap = "overlap"
    additive = "additive"


class Collective(Enum):
    ring = "ring"
    tree = "tree"
    reduce_scatter_all_gather = "reduce_scatter_all_gather"
    parameter_server = "parameter_server"


NO_RESULT = {"result": False}
# Has no part in a signature while it is empty: the setting came after the first run folders.
UNSIGNED_IF_EMPTY = {"unsigned_if_empty": True}


def no_result(default: Any) -> Any:
    """A field that does not change the result of a run."""
    return field(default=default, metadata=NO_RESULT)


@dataclass
class NodeType:
    """One type of node of a cluster that has several; what is null here is as in `cluster`, `grid` and `pricing`.

    The fields are called as there, so that `Settings.of_type` can put them in their places.
    """

    partition: str | None = None
    account: str | None = no_result(None)
    qos: str | None = no_result(None)
    constraint: str | None = None
    """Node features to ask for, where types share a partition."""
    gpus_per_node: int | None = None
    """GPUs, and ranks, on each node of this type."""
    gpu_type: str | None = None
    cpus_per_rank: int | None = None
    memory_gib: float | None = None
    """Host memory to ask for on each node, GiB."""
    max_memory_gib: float | None = no_result(None)
    network_interface: str | None = None
    setup: list[str] | None = None
    """Shell lines in place of `cluster.setup`, where nodes of this type need others."""
    python: str | None = None
    max_nodes: int | None = None
    """Most nodes of this type; `grid.max_nodes` bounds them as well."""
    price_per_node_hour: float | None = None
    """For `pricing=node_hour` and `spot`; give it for every type, or for none where the objective is no cost."""
    price_per_gib_hour: float | None = None
    """For `pricing=memory`; give it for every type, or for none."""
    interruptions_per_node_hour: float | None = None
    """For `pricing=spot`."""
    billing_weights: str | None = None
    """For `pricing=service_units`. Null, as in `pricing`: those of the type's partition, asked of Slurm."""


@dataclass
class ClusterSettings:
    kind: ClusterKind = ClusterKind.auto
    """Where jobs run: `slurm`, `local` (processes on this machine), or `auto`: Slurm if its controller answers."""
    gpus_per_node: int = 0
    """GPUs, and ranks, on each node. 0: CPUs, one rank a node."""
    cpus_per_rank: int = 1
    """CPU cores for each rank, which its loader processes (`data.loader_workers`) share; also the threads that PyTorch
    computes with there."""
    memory_gib: float | None = None
    """Host memory to ask for on each node, GiB. Null: the partition's default."""
    max_memory_gib: float | None = no_result(None)
    """Most host memory to ask for when a job was killed for its lack, GiB a node. Null: what the nodes have."""
    partition: str | None = None
    account: str | None = no_result(None)
    qos: str | None = no_result(None)
    constraint: str | None = None
    """Node features to ask for, as `sbatch --constraint`."""
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    """How this site wants GPUs asked for: `--gpus-per-node`, `--gres=gpu:`, or not at all."""
    gpu_type: str | None = None
    """Type name in the GPU request, as in `--gpus-per-node=h100:4`. Null: any."""
    profile_time_limit_min: int = no_result(15)
    """Time limit of one profiling job, minutes; one that measures several candidates gets more if it may need it."""
    train_time_limit_min: int | None = no_result(None)
    """Time limit of the training job, minutes. Null: half as long again as predicted, and ten minutes to start."""
    max_running_jobs: int = no_result(4)
    """Profiling jobs of one array that may run at once. On `local` always 1: they would disturb each other's times."""
    exclusive_profiling: bool = True
    """Whether profiling jobs get whole nodes, so that no other work, theirs or ours, is in their times."""
    poll_interval_s: float = no_result(30.0)
    """Seconds between two looks at the queue, which all your runs share; fewer where Slurm soon forgets ended jobs."""
    file_lag_s: float = no_result(60.0)
    """Seconds after a job has left the queue in which its last file may still become visible on this machine."""
    hang_timeout_min: float = no_result(30.0)
    """A running job without a sign of progress for this long is ended, minutes."""
    resubmit_cancelled: bool = no_result(False)
    """Jobs that were cancelled one by one are not run again, unless the command is started again with this true."""
    setup: list[str] = field(default_factory=list)
    """Shell lines of yours that run in the batch script before Python starts, such as `module load cuda`."""
    srun_args: list[str] = field(default_factory=list)
    """Arguments added to srun, such as `--container-image=...` at a site with containers."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options by their long name with underscores, such as `exclusive: true`; not those that a setting
    or this tool decides. Hosts in `exclude` are left out beside those that broke down."""
    python: str | None = None
    """Python to run on the nodes. Null: the one that runs this command."""
    network_interface: str | None = None
    """Network interface for gloo and NCCL, such as `ib0`. Null: they choose."""
    node_types: dict[str, NodeType] = field(default_factory=dict, metadata=UNSIGNED_IF_EMPTY)
    """Several partitions or GPU types in one run: what each differs in, and its price, by a name of yours, as in
    '+cluster.node_types={a100: {partition: gpu-a100, price_per_node_hour: 6}, h100: {partition: gpu-h100,
    price_per_node_hour: 12}}'. What a type leaves out is as in `cluster`, `grid` and `pricing`, so those hold what all
    types share. Each is profiled and modelled on its own, one choice is made over all, and a training runs on one. Only
    on Slurm."""

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus_per_node)


@dataclass
class ControllerSettings:
    kind: ControllerKind = ControllerKind.here
    """Where the command itself waits for its jobs: `here`, or in a small Slurm job (`slurm`), and returns at once."""
    partition: str | None = None
    """Partition of that job. Null: `cluster.partition`, and without one that of the first of `cluster.node_types`."""
    time_limit_min: int = 1440
    """Its time limit, minutes, or the partition's if that is shorter; shortly before the end it queues itself again."""
    memory_gib: float = 1.0
    """Host memory of that job, GiB."""
    python: str | None = None
    """Python to run there. Null: the one that runs this command; `cluster.python` may be one inside a container."""


@dataclass
class WorkloadSettings:
    name: str = "???"
    model: dict[str, Any] = field(default_factory=dict)
    """`_target_`: import path of a callable that returns a torch module; the other keys are its arguments."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """`_target_`: import path of a callable that takes `root` and `train` (bool) and the other keys, and returns a map
    style torch data set of (input, target): a tensor, or tensors in a tuple or dict, and a class index, or an int64
    tensor of them, one for each place in the sample. Targets of other kinds are trained on, without accuracies."""
    loss: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.nn.CrossEntropyLoss"})
    """`_target_`: import path of the loss; called as loss(outputs, targets), mean over the batch. For class indices the
    outputs are (batch, classes) or (batch, classes, places), as torch's CrossEntropyLoss wants them."""
    train_samples: int = 0
    """Samples in the training set (D of Eq. 4a)."""
    test_samples: int = 0
    input_shape: list[int] = field(default_factory=list)
    """Shape of one input, such as [3, 224, 224]; synthetic data has it."""
    num_classes: int = 0
    sequence_length: int | None = None
    """Tokens in a sample, where that is a matter of choice: the workload's model and data set take it as
    ${workload.sequence_length}, so that it is set, or swept, in one place. It changes step time and memory, so each
    length is measured by itself."""
    vocabulary: int | None = None
    """Different tokens, taken likewise. With it and `sequence_length`, synthetic data is sequences of tokens, with the
    next token at each place as target."""
    unscaled: list[str] = field(default_factory=list)
    """Parameters whose gradients `ags` and `ags_measured` leave as they are: patterns of names, with * and ?, such as
    ['*norm*', '*embed*']. One that fits no parameter of the model is an error. `ags_paper` scales all, as printed."""
    find_unused_parameters: bool = field(default=False, metadata=UNSIGNED_IF_EMPTY)
    """Whether there are parameters that some steps do not use, such as a head that is not asked: several ranks then
    look for them in each step. Without it such a model runs on one rank only."""
    data_files: list[str] = field(default_factory=list)
    """Paths below `data.root`; the data set is there if one of them is. Empty: nothing to check."""


@dataclass
class DataSettings:
    kind: DataKind = DataKind.real
    """`synthetic`: random tensors of the true shapes and sizes, to profile without the data; one batch stays on the
    device, so that no profiled step waits for a loader."""
    root: str = "data"
    """Folder of the data sets, seen by every node."""
    download: bool = no_result(False)
    """Fetch a missing data set on this machine before anything is submitted; never on a compute node."""
    train_samples: int | None = None
    """Use only this many training samples. Null: all."""
    test_samples: int | None = None
    """Use only this many test samples. Null: all."""
    loader_workers: int = 0
    """Loader processes of each rank."""


@dataclass
class GridSettings:
    min_nodes: int = 2
    max_nodes: int = 16
    """Cluster sizes tried are min_nodes, 2 min_nodes ... up to this (paper: 2 to 16)."""
    min_global_batch: int = 32
    """Smallest batch over all ranks (paper: 32)."""
    max_global_batch: int | None = None
    """Largest batch over all ranks. Null: the data set."""
    min_batch_per_rank: int = 1
    max_batch_per_rank: int = 1024
    """Largest batch tried on one rank; what does not fit in memory is found out and left out."""


@dataclass
class SearchSettings:
    mode: SearchMode = SearchMode.partial
    """`full` measures every candidate; `partial` the corners of the grid of each type of node: the smallest and the
    largest cluster, from one node on the smallest one of several, and one node of several GPUs, each with its smallest
    and largest batch; `adaptive` three points, and a fourth on one node of several GPUs, then up to three a round on
    which the decision depends most, until no other candidate could beat the choice by more than `tolerance`, or a
    budget is spent. Partial waits in the queue once; adaptive once a round, and decides better; full is for small
    grids, and where the whole curve is wanted."""
    tolerance: float = 0.02
    """For `adaptive`: how much better, as a share, an unmeasured candidate must possibly be to be worth measuring."""
    max_points: int | None = None
    """For `adaptive`: most candidates that this run tries; what it takes over from other runs is free. Null: any."""
    max_node_hours: float | None = None
    """For `adaptive`: most node-hours of profiling, each candidate counted with what `plan` expects of it at most
    (a minute to start, and `max_seconds`). Null: any."""
    max_minutes: float | None = None
    """For `adaptive`: no round begins later than this many minutes after the run began, waits in the queue included;
    what is submitted by then is still waited for. Null: any."""
    warmup_steps: int = 5
    """Steps dropped before timing: buckets, momentum and kernel plans are made in them."""
    timed_steps: int = 20
    compute_steps: int = 8
    """Further steps without gradient synchronisation, for the compute-only time."""
    max_seconds: float = 60.0
    """A candidate whose steps are slow is timed for about this long, with fewer steps but at least 3 of each kind."""
    step_time: StepTimeForm = StepTimeForm.overlap
    """Form of the step-time model: `overlap`, or the paper's `additive` one (Eq. 2). Both are fitted and reported."""
    collective: Collective = Collective.ring
    """How the additive form takes gradients to be exchanged (Eq. 2c)."""
    memory_fraction: float | None = None
    """Share of a rank's memory that a candidate may be predicted to use. On GPUs: of what is left
    beside parameters, gradients, optimizer state and context, which do not fluctuate. Null: 0.98 on GPUs, 0.95 on CPUs.

    The upper end of the interval must stay below it, which already keeps free what the prediction may be off. In 24
    capped cases on an H200 no bound ran out of memory, up to 1; 0.98 reaches nine tenths of the largest batch without
    allocator retries in 20, 0.95 in 17 (tests/data/benchmarks/memory.txt). Seven bounds, most of AlexNet, are beyond
    that batch (four at 0.95): they fit with retries, which the measurement before the long training sees. On CPUs,
    where a batch too large is killed, there are too few cases to go so far."""
    verify_choice: bool = True
    """Whether a choice that was not measured is measured before the long training. That is a job more, which tells
    whether it fits and is as fast as predicted; if not, the next one is chosen, up to five times. Likewise beside the
    training before `training.replan=auto` moves it."""


@dataclass
class ProfilingSettings:
    kind: ProfilingKind = ProfilingKind.array
    """How candidates share jobs: `array`: a job each; `packed`: one job for each number of nodes measures its batches
    one after the other; `single`: one job of the largest size measures all. On `cluster=local` they are the same."""


@dataclass
class ObjectiveSettings:
    kind: ObjectiveKind = ObjectiveKind.knee
    """`time`: fastest; `cost`: cheapest; `knee`: where larger batches stop to pay, on the fastest nodes for each batch
    whatever they cost; `time_to_result`: fastest counting the wait in the queue."""
    deadline_h: float | None = None
    """Hours that the training may take by the upper end of its prediction, with the wait in the queue where that is
    known (`queue_wait_min`); validation and start-up come on top. Null: any."""
    budget: float | None = None
    """What the training may cost by the upper end of its prediction, in `pricing.currency`. Null: anything."""
    max_nodes: int | None = None
    """Most nodes to train on. Null: `grid.max_nodes`, which also bounds what is measured."""
    tie_tolerance: float = 0.02
    """Candidates within this share of the best count as equal, and up to twice as far off where the interval of their
    prediction reaches down to the best; the smaller batch of them is taken. 0: the exact best."""
    queue_wait_min: dict[Any, Any] = field(default_factory=dict)
    """For `time_to_result` and `deadline_h`: how long a training waits in your queue, minutes by number of nodes, as in
    '+objective.queue_wait_min={1: 5, 8: 240}'; between two of them it is interpolated, outside the nearest is taken.
    The same for every one of `cluster.node_types`. Empty: Slurm's estimates when the choice is made, for the partition
    in question, of which one that Slurm does not give counts as 0."""


@dataclass
class PricingSettings:
    kind: PricingKind = PricingKind.node_hour
    price_per_node_hour: float = 2.48
    """For `node_hour` (paper: 2.48, a cloud V100 in 2025) and `spot`."""
    price_per_gib_hour: float = 0.15
    """For `memory`: price of one GiB of GPU memory in use for an hour (paper: 0.15)."""
    interruptions_per_node_hour: float = 0.05
    """For `spot`: how often one node is taken away, per hour. A training of N nodes is interrupted N times as often."""
    checkpoint_interval_min: float = 10.0
    """For `spot`: minutes between two checkpoints, half of which an interruption loses on average."""
    restart_min: float = 5.0
    """For `spot`: minutes from an interruption until the training goes on, with the wait for another node."""
    billing_weights: str | None = None
    """For `service_units`: units an hour for one of each resource, as Slurm's TRESBillingWeights, such as
    CPU=1.0,Mem=0.25G,GRES/gpu=16; on a command line "pricing.billing_weights='...'". Null: those of the partition,
    asked of Slurm."""
    currency: str = "$"
    """Stands before every cost."""


@dataclass
class MethodSettings:
    kind: MethodKind = MethodKind.ags
    """`ags`: the learning rate scaled by the batch, and gradients so that each tensor's step is between two shares of
    its weights, and running averages of batch normalisation with a momentum below 0.1 follow as many samples as at
    `small_batch`; `ags_measured`: gradients times scales measured on a small batch; `ags_paper`: that as printed
    (Algorithm 1); `lbt`: plain large-batch training; `lrs_linear`, `lrs_sqrt`: the learning rate scaled by the batch,
    or by its square root; `lars`: a rate for each layer, scaled by the batch; `polo`: post-local SGD; `static`: the
    gradients of steps that are not sensitive times a constant. Choose by group, as in `method=polo`. A setting that is
    for other methods is refused; one that names none is for `ags_measured`."""
    small_batch: int = 128
    """For any method: the global batch that the learning rate was tuned for. `ags_measured` and `ags_paper` scale
    towards its gradients; `ags`, `lrs_linear`, `lrs_sqrt` and `lars` scale the rate by how much larger, or smaller, the
    batch is."""
    step_floor: float = 0.007
    """For `ags`: a step's share of a tensor's weights (learning rate x gradient, norms) below which the gradient is
    lengthened, at most `scale_cap` times; 0: never. Both bounds rise with the warm-up from a tenth, and fall to
    zero at the end of the training."""
    step_cap: float = 0.01
    """For `ags`: the share above which it is shortened."""
    delta_threshold: float = 0.5
    """For `ags_measured`, `ags_paper` and `static`: gradient variability (Eq. 5) at which a step is sensitive and is
    left unscaled."""
    static_scale: float = 2.0
    """For `static`: what the gradients of steps that are not sensitive are multiplied by (s of Eq. 8)."""
    granularity: Granularity = Granularity.element
    """One scale an element (as printed), channel, tensor, or for the whole model (`model`)."""
    gate: Gate = Gate.current
    """Which step's variability decides: this one's, the last one's, or none (`off`: always scaled)."""
    scale_floor: float | None = None
    """Smallest scale. Null: 1 / largest scale; the paper prints none, which is 0."""
    refresh_epochs: int = 1
    """For `ags_measured` and `ags_paper`: epochs between two measurements of the scales."""
    refresh_samples: int = 1
    """Sub-batches averaged in each measurement."""
    refresh_steps: int | None = None
    """Steps between two measurements, the first at once; replaces `refresh_epochs`."""
    scale_smoothing: float = 0.0
    """Weight of the past in the averages, over measurements, of the two squared norms behind a scale; 0: none."""
    delta_smoothing: float = 0.0
    """Weight of the past in an average of the squared norm that variability is taken of; 0, as printed: none."""
    exponent: float = 1.0
    """Power of the ratio of norms: 1 as printed; 2 gives AdaScale's gain."""
    scale_cap: float | None = None
    """For `ags` and `ags_measured`: largest scale. Null: 10 for `ags`, and (global batch / small batch) to the power of
    exponent / 2 for the other."""
    lars_lr: float | None = None
    """For `lars`: the learning rate at `small_batch`. Null: `training.lr`, as in the paper, although LARS wants a rate
    of its own, often ten to a hundred times that of SGD."""
    trust_coefficient: float = 0.001
    """For `lars`: how far a step may move a layer at learning rate 1, as a share of its norm."""
    local_from_epoch: int | None = None
    """For `polo`: epochs of synchronous training before the local phase. Null: those of `training.warmup_epochs`."""
    sync_per_epoch: int = 4
    """For `polo`: how often the ranks' models are averaged in an epoch of the local phase (paper: 4)."""
    local_momentum: LocalMomentum = LocalMomentum.keep
    """For `polo`: what an averaging does to the ranks' momentum. With `keep` a training that was interrupted goes on
    with that of the first rank; with `reset` or `average`, as if nothing had happened."""


@dataclass
class TrainingSettings:
    epochs: int = 10
    lr: float = 0.01
    """Learning rate tuned for `method.small_batch`, before the first milestone."""
    optimizer: OptimizerKind = OptimizerKind.sgd
    """`sgd`, or `adamw`: for `method=lbt`, `lrs_linear` and `lrs_sqrt`, the rule of Adam's rate (arXiv 2205.10287).
    AdamW divides by the size of the gradients, so under `ags_measured` and `ags_paper` it undoes the scaling; `ags`,
    `lars` and `polo` refuse it."""
    momentum: float = 0.9
    """For `sgd`, and for `method=lars`."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """For `adamw`: weight of the past in its averages of the gradient and of its square."""
    eps: float = 1e-8
    """For `adamw`: added to the size of the gradients that it divides by."""
    weight_decay: float = 0.0005
    """Of all parameters; `adamw` decays the weights themselves, and wants larger values, such as 0.01."""
    milestones: list[int] = field(default_factory=list)
    """Epochs after which the learning rate is multiplied by `lr_decay`."""
    lr_decay: float = 0.1
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up from a tenth of `lr`, to the scaled rate where the method scales it; every method has
    it, and it does not shift the milestones (paper: 5)."""
    precision: Precision = Precision.fp32
    channels_last: bool = False
    """Keep images and convolutions in the order (batch, height, width, channels). On GPUs, with `precision=bf16` above
    all, convolutions want it: VGG11 at batch 1024 took some 6 ms a step with it on an H200, 120 without."""
    seed: int = 0
    eval_batch_per_rank: int | None = None
    """Batch of the evaluation. Null: the training's batch, which is known to fit."""
    checkpoint_every_min: float = no_result(10.0)
    """Minutes between two checkpoints inside an epoch; one is always written at the end of an epoch."""
    max_relaunches: int = no_result(4)
    """How often the training may be started again after each kind of end: out of memory, a lost node, preemption ..."""
    replan: ReplanKind = field(default=ReplanKind.offer, metadata=NO_RESULT)
    """What happens when steps lastingly take another time than predicted, as on a network that others have begun to
    use: `offer` says so, and which configuration on the same type of node would be better for the rest; `auto` measures
    that beside the training (`search.verify_choice`) and, if it still pays, has the training save and go on there, at
    most twice, likewise without a node that has become slow; `off` (in a YAML file: 'off') does not look."""
    trace_gradients: bool = False
    """Whether `train/gradients.csv` gets a row for each step: the gradient's norm, its variability (Eq. 5) and what it
    was scaled by. Costs a norm of all gradients a step on the first rank, in training only: profiling does without."""
    curvature_samples: int | None = None
    """On so many training samples, always the same ones, every rank computes the largest eigenvalue of the loss'
    Hessian at the end of each epoch: `hessian_eigenvalue` in `metrics.jsonl`. A few hundred take up to 200 times their
    forward and backward passes, twice differentiated, in float32 and outside all measured times. Null: not computed."""
    collective_timeout_s: float = no_result(300.0)
    """A rank that waits longer than this for the others ends, and so does its job."""


@dataclass
class Settings:
    name: str = "???"
    """Name of the experiment; the run folder begins with it."""
    run_root: str = no_result("runs")
    """Folder that holds all run folders; every node must see it."""
    until: Until = field(default=Until.result, metadata=NO_RESULT)
    """How far to go: `choice` profiles, fits and chooses, and does not train; the same command with `result` goes on
    and trains."""
    controller: ControllerSettings = field(default_factory=ControllerSettings, metadata=NO_RESULT)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    data: DataSettings = field(default_factory=DataSettings)
    grid: GridSettings = field(default_factory=GridSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    profiling: ProfilingSettings = field(default_factory=ProfilingSettings, metadata=NO_RESULT)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    pricing: PricingSettings = field(default_factory=PricingSettings)
    method: MethodSettings = field(default_factory=MethodSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def train_samples(self) -> int:
        """Training samples in use: the data set's, or fewer if `data.train_samples` says so."""
        return min(self.workload.train_samples, self.data.train_samples or self.workload.train_samples)

    @property
    def test_samples(self) -> int:
        return min(self.workload.test_samples, self.data.test_samples or self.workload.test_samples)

    @property
    def memory_fraction(self) -> float:
        """`search.memory_fraction`, or what stands for it."""
        if self.search.memory_fraction is not None:
            return self.search.memory_fraction
        return 0.98 if self.cluster.gpus_per_node else 0.95

    @property
    def node_types(self) -> list[str]:
        """Names of the types of node, in the user's order; a single empty one where the run has no types."""
        return list(self.cluster.node_types) or [""]

    def of_type(self, node_type: str) -> Settings:
        """The settings of a run on nodes of this type only; these themselves for the empty name.

        Whatever is asked of one type is asked of these: its jobs, its price, what its measurements depend on.
        """
        if not node_type:
            return self
        own = self.cluster.node_types[node_type]
        given = {f.name: value for f in dataclasses.fields(own) if (value := getattr(own, f.name)) is not None}

        def with_own(section: Any, **changes: Any) -> Any:
            names = {f.name for f in dataclasses.fields(section)}
            return dataclasses.replace(section, **{k: v for k, v in given.items() if k in names}, **changes)

        bounds = dataclasses.replace(
            self.grid, max_nodes=min(self.grid.max_nodes, own.max_nodes or self.grid.max_nodes)
        )
        cluster, pricing = with_own(self.cluster, node_types={}), with_own(self.pricing)
        return dataclasses.replace(self, cluster=cluster, pricing=pricing, grid=bounds)

    def grid_candidates(self) -> list[Candidate]:
        """The candidates of this run, type by type, each sorted by nodes, then batch."""
        largest = min(self.grid.max_global_batch or self.train_samples, self.train_samples)
        batches = doublings(self.grid.min_batch_per_rank, self.grid.max_batch_per_rank)
        found = []
        for node_type in self.node_types:
            own = self.of_type(node_type)
            nodes = doublings(own.grid.min_nodes, own.grid.max_nodes)
            ranks = own.cluster.ranks_per_node
            found += candidate_grid(nodes, ranks, batches, self.grid.min_global_batch, largest, node_type)
        return found


START_S = 60.0
"""Taken for the start of a profiling attempt: processes, data set, rendezvous and warm-up."""


def expected_attempt_s(settings: Settings) -> float:
    """How long measuring a candidate takes at most, as far as one can tell before."""
    return settings.search.max_seconds + START_S


def conf_dir() -> Path:
    """The folder of configuration files: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def to_plain(settings: Any) -> Any:
    """Settings as JSON-ready values; enumerations by name."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {f.name: to_plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    if isinstance(settings, Enum):
        return settings.name
    if isinstance(settings, dict):
        return {str(key): to_plain(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [to_plain(value) for value in settings]
    return settings


def from_plain(plain: dict[str, Any]) -> Settings:
    """The settings that `to_plain` wrote; raises omegaconf's errors on keys or values the schema does not know."""
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(OmegaConf.structured(Settings), _taken_as_it_is(plain))
    return OmegaConf.to_object(merged)  # type: ignore[return-value]


def _taken_as_it_is(value: Any) -> Any:
    """The same values with each `${` of their texts escaped: what it referred to was put in when they were composed,
    and what is left, such as a shell's variable in `cluster.setup`, is meant so."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, dict):
        return {key: _taken_as_it_is(part) for key, part in value.items()}
    return [_taken_as_it_is(part) for part in value] if isinstance(value, list) else value


def write_settings(run: RunFolder, settings: Settings) -> None:
    """Put the settings down in a run's folder, with a sum that tells when they are no longer these."""
    import yaml

    text = yaml.safe_dump(to_plain(settings), sort_keys=False)
    write_text(run.config, f"{_sum_line(text)}\n{text}")


_SUM = "# the settings of this run, sha256 "


def _sum_line(text: str) -> str:
    return _SUM + hashlib.sha256(text.encode()).hexdigest()


def read_settings(run: RunFolder) -> Settings:
    """The settings in a run's folder.

    Raises:
        RecordError: If they are torn, missing, or not those of this version.
    """
    from omegaconf.errors import OmegaConfBaseException

    plain = read_plain_settings(run)
    try:
        return from_plain(plain)
    except OmegaConfBaseException as error:
        problem = f"{error.full_key or 'it'}: {(str(error).splitlines() or ['?'])[0]}"
        raise RecordError(
            f"{run.config} is not of this version of tula_hpc ({problem}). Use the version that began the run "
            f"(`software` in {run.plan.name}), or begin anew with the same experiment"
        ) from None


def read_plain_settings(run: RunFolder) -> dict[str, Any]:
    """What `to_plain` wrote into a run's folder, of whatever version.

    Raises:
        RecordError: If it is torn, missing or was edited: a run's results are those of the settings it was begun with.
    """
    import yaml

    try:
        text = run.config.read_text(encoding="utf-8")
        first, _, rest = text.partition("\n")
        plain = yaml.safe_load(text)
    except FileNotFoundError:
        raise RecordError(
            f"{run.config} is missing; give the command that began the run again, which writes it anew"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        plain = None
    if not isinstance(plain, dict) or (first.startswith(_SUM) and first != _sum_line(rest)):
        raise RecordError(
            f"{run.config} is not whole, or was edited; delete it and give the command that began the run again, which "
            "writes it anew (with other settings it begins another run)"
        )
    return plain
