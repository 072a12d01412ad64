"""The training loop: data parallel, resumable in the middle of an epoch, top-1 and top-5 exactly counted."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Subset

from tula_hpc import methods
from tula_hpc.candidates import Candidate
from tula_hpc.config import Precision, Settings
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.bounded import BoundedOptimizer
from tula_hpc.optim.reference import batch_size
from tula_hpc.optim.running_averages import follow_as_many_samples
from tula_hpc.optim.schedules import bound_factor
from tula_hpc.ranks import checkpoints, host_memory
from tula_hpc.ranks.batches import forward, tally, to_device
from tula_hpc.ranks.clock import ForwardTimes
from tula_hpc.ranks.curvature import largest_eigenvalue
from tula_hpc.ranks.device_memory import GIB, peak_bytes
from tula_hpc.ranks.distributed import first_rank_says, inner_module, replicate, sum_over_ranks
from tula_hpc.ranks.gradient_trace import GradientTrace
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.loading import Loader
from tula_hpc.ranks.optimizers import build_averaging, build_optimizer
from tula_hpc.ranks.pace import Pace
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat, TimeIsUp
from tula_hpc.ranks.workloads import SizedDataset, build_dataset, build_loss, build_model, fixed_batch
from tula_hpc.runs import RunFolder, read_json, write_json, write_text

PROGRESS_EVERY_S = 2.0
FIRST_STEPS = 5
"""Steps of a process that say nothing about the others: memory is claimed and kernels are chosen in them."""

LOOK_EVERY_STEPS = 16
"""Local steps of post-local SGD after which a warned training is noticed, if its ranks are not averaged before."""


def train(
    settings: Settings,
    candidate: Candidate,
    me: Rank,
    run: RunFolder,
    device: torch.device,
    warning: EarlyWarning,
    heartbeat: Heartbeat,
) -> None:
    """Train at `candidate` from the newest checkpoint, or from the start; leaves `train/result.json`.

    Progress is counted in samples, so a relaunch with a smaller batch goes on where the larger one ended, with the
    samples of the epoch that were not seen yet.

    Raises:
        torch.OutOfMemoryError: If the batch does not fit.
        TimeIsUp: On rank 0, at the step boundary after the early warning came; the job ends with it.
    """
    began = time.time()
    hyper = settings.training
    heartbeat.now("loading data and building the model")
    loss_fn = build_loss(settings, device)
    train_set, test_set = build_dataset(settings, train=True), build_dataset(settings, train=False)
    host_memory.reset_peak()
    num_samples = len(train_set)
    eval_batch = hyper.eval_batch_per_rank or candidate.batch_per_rank
    model = replicate(build_model(settings), settings, device)
    optimizer = build_optimizer(settings, model, candidate.global_batch)
    if isinstance(optimizer, BoundedOptimizer):
        follow_as_many_samples(inner_module(model), candidate.global_batch, settings.method.small_batch)
    sampler = RemainingSampler(train_set, candidate.batch_per_rank, me.world_size, me.rank, seed=hyper.seed)
    loader = Loader(train_set, candidate.batch_per_rank, settings, device, sampler=sampler)
    averaging = build_averaging(settings, model, optimizer, len(loader))
    curvature_batch = None if hyper.curvature_samples is None else fixed_batch(train_set, hyper.curvature_samples)
    facts = {
        "global_batch": candidate.global_batch,
        "method": settings.method.kind.name,
        "base_lr": methods.base_lr(settings, candidate.global_batch),
        "averaging_period_steps": None if averaging is None else averaging.period,
    }
    own = ForwardTimes(inner_module(model), device, run.forward_times(me.rank), me, FIRST_STEPS)
    pace = Pace(hyper.epochs * candidate.steps_per_epoch(num_samples), FIRST_STEPS, own.close_window)

    first_epoch, samples_in_epoch, spent_s = _restore(checkpoints.load_latest(run.checkpoints), model, optimizer)
    if me.is_first:
        _keep_metrics_before(run, first_epoch)
        checkpoints.forget_unfinished(run.checkpoints)
    samples_at_start = first_epoch * num_samples + samples_in_epoch
    trace = None
    if hyper.trace_gradients and me.is_first:
        trace = GradientTrace(run.gradients, optimizer, candidate.global_batch, samples_at_start)
    writer = _tensorboard(run) if me.is_first else None
    settled = diverged = False
    saved_at = shown_at = time.monotonic()
    start = {
        "samples_at_start": samples_at_start,
        "started": time.time(),
        "launch": me.launch,
        "windows": pace.windows,
    }

    def save(epoch: int, samples_in_epoch: int) -> None:
        if trace is not None:  # before the checkpoint: what goes on from there has the rows of all steps up to it
            trace.write()
        epoch_s = spent_s + time.monotonic() - epoch_began if samples_in_epoch else 0.0
        _save(run, epoch, samples_in_epoch, epoch_s, num_samples, candidate, model, optimizer)

    def leave_if_warned(samples_in_epoch: int) -> None:
        if me.is_first and warning.is_set():
            save(epoch, samples_in_epoch)
            raise TimeIsUp(f"{warning}; a checkpoint was written")

    def between_steps(doing: str) -> None:
        """Of what comes at the end of an epoch."""
        leave_if_warned(num_samples)
        heartbeat.beat(f"{doing}, epoch {epoch + 1}")

    at_each_batch = partial(between_steps, "evaluating")

    def sharpness() -> dict[str, float]:
        """On all ranks alike, so that none waits in a collective for the first one to have it."""
        if curvature_batch is None:
            return {}
        inputs, targets = (to_device(part, device) for part in curvature_batch)
        at_once = max(1, candidate.batch_per_rank // 4)  # of the second derivatives, in the memory of a training step
        eigenvalue = largest_eigenvalue(
            inner_module(model),
            loss_fn,
            inputs,
            targets,
            samples_at_once=at_once,
            on_product=partial(between_steps, "computing the curvature"),
        )
        return {"hessian_eigenvalue": eigenvalue}

    def average_if_due() -> bool:
        """Whether all ranks have the same model after this step, so that one of them can save it: always, but after
        a local step only if an averaging was due, or is made because of a warning. All ranks ask for one together."""
        if averaging is None or not local or averaging.after_step():
            return True
        if averaging.since_average % LOOK_EVERY_STEPS == 0 and first_rank_says(warning.is_set(), device):
            averaging.average()
        return averaging.since_average == 0

    for epoch in range(first_epoch, hyper.epochs):
        local = averaging is not None and epoch >= methods.local_from_epoch(settings)
        # called directly, the module inside DDP neither averages gradients nor broadcasts buffers
        replica = inner_module(model) if local else model
        torch.manual_seed(((hyper.seed * 10_007 + epoch) * 10_007 + me.rank) % 2**63)
        sampler.set_epoch(epoch)
        sampler.seen = samples_in_epoch
        model.train()
        sums = torch.zeros(3, device=device, dtype=torch.float64)  # loss x targets, targets, top-1
        epoch_began = timed_since = waiting_since = time.monotonic()
        steps = 0
        data_wait_s = 0.0
        last_began = min(samples_in_epoch, num_samples - 1) // candidate.global_batch * candidate.global_batch
        lr = methods.learning_rate(settings, candidate.global_batch, epoch + last_began / num_samples)
        if not local:  # steps without synchronisation are not what was predicted
            pace.begin()
        for inputs, targets in loader:
            waited_s = time.monotonic() - waiting_since
            data_wait_s += waited_s
            inputs, targets = to_device(inputs, device), to_device(targets, device)
            batch = batch_size(inputs)
            epochs_done = epoch + samples_in_epoch / num_samples
            lr = methods.learning_rate(settings, candidate.global_batch, epochs_done)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if isinstance(optimizer, BoundedOptimizer):
                optimizer.bound_factor = bound_factor(
                    epochs_done, epochs=hyper.epochs, warmup_epochs=hyper.warmup_epochs
                )
            with autocast(hyper.precision, device):
                outputs, loss = forward(replica, loss_fn, inputs, targets)
            loss.backward()
            left_after = math.ceil((num_samples - samples_in_epoch) / me.world_size) - batch
            last_full_batch = batch == candidate.batch_per_rank and left_after < candidate.batch_per_rank
            if last_full_batch:  # what the epoch has beyond it is no step like the others
                _now(device)
                pace.step(waited_s)
                pace.stop()
            due = last_full_batch and (epoch + 1) % settings.method.refresh_epochs == 0
            if isinstance(optimizer, TulaOptimizer) and (
                due if optimizer.refresh_every is None else optimizer.refresh_due
            ):
                with autocast(hyper.precision, device):
                    optimizer.refresh(model, loss_fn, inputs, targets)
            seen_after = min(samples_in_epoch + batch * me.world_size, num_samples)
            if trace is None:
                optimizer.step()
            else:
                trace.step(epoch + 1, epoch * num_samples + seen_after)
            optimizer.zero_grad(set_to_none=True)

            with torch.no_grad():  # stays on the device: reading a number would make the host wait for it
                sums += tally(outputs, targets, loss, top=(1,))
            samples_in_epoch = seen_after
            steps += 1
            enough_left = left_after >= FIRST_STEPS * candidate.batch_per_rank
            if not settled and epoch == first_epoch and steps == FIRST_STEPS and enough_left:
                timed_since, steps, data_wait_s = _now(device), 0, 0.0
                settled = True
            pace.step(waited_s)
            if me.is_first and time.monotonic() - shown_at > PROGRESS_EVERY_S:
                shown_at = time.monotonic()
                _write_progress(run, settings, epoch * num_samples + samples_in_epoch, num_samples, start)
                warning.look()
            if average_if_due():
                if me.is_first and time.monotonic() - saved_at > 60 * hyper.checkpoint_every_min:
                    saved_at = time.monotonic()
                    save(epoch, samples_in_epoch)
                    pace.leave_out()
                leave_if_warned(samples_in_epoch)
            heartbeat.beat(f"training, epoch {epoch + 1}")
            waiting_since = time.monotonic()

        if averaging is not None and averaging.since_average > 0:
            averaging.average()
        trained_at = _now(device)
        pace.stop()
        loss_sum, count, correct_sum = sum_over_ranks(sums).tolist()
        memory_gib = torch.tensor([peak_bytes(device) / GIB], device=device)
        if dist.is_initialized():
            dist.all_reduce(memory_gib, op=dist.ReduceOp.MAX)
        # of the samples since the last start; unknown if it came after the epoch's last one
        train_loss = loss_sum / count if count else math.nan
        tested = evaluate(settings, model, loss_fn, test_set, eval_batch, me, device, at_each_batch)
        line = {
            "epoch": epoch + 1,
            "samples": (epoch + 1) * num_samples,
            "lr": lr,
            "train_loss": train_loss,
            "train_top1": 100 * correct_sum / count if count else math.nan,
            **tested,
            **facts,
            "num_nodes": candidate.num_nodes,
            "step_time_s": (trained_at - timed_since) / steps if steps else math.nan,
            "data_wait_s": data_wait_s / steps if steps else math.nan,
            "memory_gib": float(memory_gib),
            # with what an interrupted start of the epoch took
            "train_s": spent_s + trained_at - epoch_began,
            "epoch_s": spent_s + time.monotonic() - epoch_began,
            **(optimizer.statistics() if isinstance(optimizer, TulaOptimizer | BoundedOptimizer) else {}),
            **sharpness(),
        }
        samples_in_epoch, spent_s = 0, 0.0
        if me.is_first:
            _append_metrics(run, line)
            _draw(writer, line)
            save(epoch + 1, 0)
            _write_progress(run, settings, (epoch + 1) * num_samples, num_samples, start)
            saved_at = time.monotonic()
        no_loss = not (math.isfinite(train_loss) or math.isfinite(tested["test_loss"]))  # alike on all ranks
        if no_loss and _is_lost(model, device):  # more epochs would only cost
            diverged = True
            break

    if me.is_first:
        if writer is not None:
            writer.close()
        _write_result(run, candidate, {**facts, "diverged": diverged}, began)


def _is_lost(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether a weight on any rank is no finite number any more: no training comes back from that."""
    lost = torch.stack([~p.detach().isfinite().all() for p in model.parameters()]).any().float().to(device)
    if dist.is_initialized():
        dist.all_reduce(lost, op=dist.ReduceOp.MAX)
    return bool(lost)


def _now(device: torch.device) -> float:
    """The host's clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 where the precision asks for it; parameters and gradients stay float32, so no loss scaling is needed."""
    if precision is not Precision.bf16:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def set_precision(precision: Precision) -> None:
    """Whether float32 products may use the tensor cores' shorter TF32 format."""
    torch.set_float32_matmul_precision("highest" if precision is Precision.fp32 else "high")
    torch.backends.cudnn.allow_tf32 = precision is not Precision.fp32


class RemainingSampler(DistributedSampler):
    """This rank's share of what is left of an epoch, whose order depends on seed and epoch alone.

    The ranks take turns, so that after each step the samples seen are the first ones of that order, whatever the number
    of ranks: another number can go on with the rest. Where the rest does not come out even, it is filled up from the
    beginning of the order, as torch does with the whole.
    """

    seen = 0
    """Samples of the epoch that all ranks together have seen."""

    def __init__(self, dataset: SizedDataset, batch_per_rank: int, num_ranks: int, rank: int, seed: int):
        super().__init__(dataset, num_ranks, rank, seed=seed)
        self._num_samples = len(dataset)
        self._batch_per_rank = batch_per_rank

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._num_samples, generator=generator).tolist()
        share = math.ceil((self._num_samples - self.seen) / self.num_replicas)
        rest = (order[self.seen :] + order)[: share * self.num_replicas]
        mine = rest[self.rank :: self.num_replicas]
        # BatchNorm refuses a batch of one; a whole epoch of one sample is left to the model
        one_is_left = share % self._batch_per_rank == 1 and (share > 1 or self.seen > 0)
        return iter(mine[:-1] if one_is_left else mine)


@torch.no_grad()
def evaluate(
    settings: Settings,
    model: torch.nn.Module,
    loss_fn: Any,
    test_set: SizedDataset,
    batch_per_rank: int,
    me: Rank,
    device: torch.device,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Loss and accuracies in percent over the test set, each target counted once, whatever the number of ranks.

    `on_batch` is called before each batch.
    """
    module = inner_module(model)
    if dist.is_initialized():  # each rank has normalised with its own batches since the last broadcast
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
    module.eval()
    mine = Subset(test_set, range(me.rank, len(test_set), me.world_size))
    loader = Loader(mine, batch_per_rank, settings, device)
    sums = torch.zeros(4, device=device, dtype=torch.float64)  # loss x targets, targets, top-1, top-5
    for inputs, targets in loader:
        on_batch()
        inputs, targets = to_device(inputs, device), to_device(targets, device)
        with autocast(settings.training.precision, device):
            outputs, loss = forward(module, loss_fn, inputs, targets)
        sums += tally(outputs, targets, loss, top=(1, 5))
    loss_sum, count, top1_sum, top5_sum = sum_over_ranks(sums).tolist()
    return {"test_loss": loss_sum / count, "test_top1": 100 * top1_sum / count, "test_top5": 100 * top5_sum / count}


def _restore(
    state: dict[str, Any] | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, int, float]:
    """Put a checkpoint into model and optimizer; returns the epoch to go on in, the samples of it already seen, and the
    seconds they took."""
    if state is None:
        return 0, 0, 0.0
    inner_module(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"]), int(state["samples_in_epoch"]), float(state.get("epoch_s", 0.0))


def _save(
    run: RunFolder,
    epoch: int,
    samples_in_epoch: int,
    epoch_s: float,
    epoch_samples: int,
    candidate: Candidate,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    state = {
        "epoch": epoch,
        "samples_in_epoch": samples_in_epoch,
        "epoch_s": epoch_s,
        "global_batch": candidate.global_batch,
        "num_nodes": candidate.num_nodes,
        "model": inner_module(model).state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    checkpoints.save(run.checkpoints, epoch * epoch_samples + samples_in_epoch, state)


def _keep_metrics_before(run: RunFolder, first_epoch: int) -> None:
    """Drop the lines of epochs that will be trained again, and a line torn by a crash."""
    if not run.metrics.exists():
        return
    kept = {line["epoch"]: line for line in run.read_metrics() if line["epoch"] <= first_epoch}
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in kept.values()))


def _append_metrics(run: RunFolder, line: dict[str, Any]) -> None:
    """Add a line; what is not a number (a diverged loss, a norm before the first step) becomes null, as JSON wants."""
    line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _write_progress(
    run: RunFolder, settings: Settings, samples: int, epoch_samples: int, start: dict[str, Any]
) -> None:
    total = settings.training.epochs * epoch_samples
    write_json(run.progress, {"samples": samples, "of_samples": total, "time": time.time(), **start})


def _write_result(run: RunFolder, candidate: Candidate, facts: dict[str, Any], began: float) -> None:
    """The manifest of the whole training, written last."""
    lines = run.read_metrics()
    # an earlier attempt may have trained with a larger batch, or on other nodes
    same = [x for x in lines if (x["global_batch"], x["num_nodes"]) == (candidate.global_batch, candidate.num_nodes)]
    timed = [line["step_time_s"] for line in same if line["step_time_s"] is not None]
    # where targets are no classes there is no accuracy, and a loss that was not finite is null
    known = [line for line in lines if line["test_top1"] is not None]
    best = max(known, key=lambda line: line["test_top1"], default=lines[-1])
    write_json(
        run.train_result,
        {
            "epochs": lines[-1]["epoch"],
            "num_nodes": candidate.num_nodes,
            "batch_per_rank": candidate.batch_per_rank,
            **facts,
            "requested_global_batch": _requested_global_batch(run, candidate),
            "test_loss": lines[-1]["test_loss"],
            "test_top1": lines[-1]["test_top1"],
            "test_top5": lines[-1]["test_top5"],
            "train_top1": lines[-1]["train_top1"],
            "best_test_top1": best["test_top1"],
            "best_epoch": best["epoch"],
            "step_time_s": statistics.median(timed) if timed else None,
            "train_s": sum(line["epoch_s"] for line in lines),
            "memory_gib": lines[-1]["memory_gib"],
            "last_attempt_s": time.time() - began,
            "finished": time.time(),
        },
    )


def _requested_global_batch(run: RunFolder, candidate: Candidate) -> int:
    """The batch that was chosen; a smaller one is used after memory ran out."""
    return int(read_json(run.selection)["global_batch"]) if run.selection.exists() else candidate.global_batch


def _tensorboard(run: RunFolder) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run.tensorboard))


def _draw(writer: Any, line: dict[str, Any]) -> None:
    for key, value in line.items():
        if isinstance(value, float):
            writer.add_scalar(key.replace("_", "/", 1), value, line["epoch"])
