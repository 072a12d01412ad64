"""Test accuracy of large batches by method: many trainings from images on the GPU, several at a time, resumable.

    python -m tests.benchmarks.accuracy run PLAN... --data FOLDER --records FILE [--gpus 0,1] [--per-gpu 3] \
        [--minutes M]

FOLDER holds `cifar10-images/{train,test}/<class>/*.jpg` and `caltech101/101_ObjectCategories/<class>/*.jpg`, or their
`.tar.xz`. A run that FILE has is not repeated, and one that the time cuts off is not recorded. Hyper-parameters are
the paper's (section IV); ResNet18 has the paper's ResNet50's with a fifth of the epochs, MobileNetV3 its own with half
of them. All runs have five warm-up epochs, drop the last batch of an epoch if it is not full, and compute in bfloat16.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import io
import itertools
import json
import math
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from tests.benchmarks import accuracy_methods
from tests.benchmarks.accuracy_table import SMALL_BATCH, read
from tula_hpc.optim.schedules import lr_factor
from tula_hpc.ranks.workloads import resnet18_32px

GRACE_S = 15.0
"""For the epoch that the end of the time falls into."""


@dataclass(frozen=True)
class Task:
    """A model, its data and its hyper-parameters."""

    data: str
    build: Callable[[int], nn.Module]
    epochs: int
    lr: float
    weight_decay: float
    milestones: tuple[int, ...]
    lr_decay: float
    batches: tuple[int, ...]


def _torchvision(name: str) -> Callable[[int], nn.Module]:
    def build(num_classes: int) -> nn.Module:
        from torchvision import models

        return getattr(models, name)(num_classes=num_classes)

    return build


TASKS = {
    "alexnet": Task("caltech101", _torchvision("alexnet"), 100, 0.01, 5e-4, (25, 50, 75), 0.1, (256, 512, 1024)),
    "vgg11": Task("cifar10", _torchvision("vgg11"), 125, 0.01, 5e-4, (50, 75, 100), 0.2, (1024, 2048, 4096)),
    "resnet18": Task("cifar10", resnet18_32px, 50, 0.05, 5e-4, (20, 30, 40), 0.1, (1024, 2048, 4096)),
    "mobilenetv3": Task(
        "cifar10", _torchvision("mobilenet_v3_large"), 60, 0.01, 1e-4, (20, 40), 0.1, (1024, 2048, 4096)
    ),
}

Split = tuple[Tensor, Tensor]
"""Images, uint8, (samples, 3, pixels, pixels), and classes, int64."""


# --- data -------------------------------------------------------------------------------------------------------------


def load(folder: Path, name: str) -> dict[str, Split]:
    """Train and test images of a data set, decoded once and kept beside the archive."""
    cache = Path("/tmp") / f"{name}.pt"
    if not cache.exists():
        partial = cache.with_suffix(f".{os.getpid()}")
        torch.save({"cifar10": _cifar10, "caltech101": _caltech101}[name](folder), partial)
        partial.rename(cache)
    return torch.load(cache, weights_only=True)


def _files(folder: Path, archive: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of every image, sorted."""
    packed = folder / f"{archive}.tar.xz"
    if packed.exists():
        with tarfile.open(packed) as tar:
            found = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
        yield from sorted(found.items())
    else:
        for path in sorted((folder / archive).rglob("*.jpg")):
            yield str(path.relative_to(folder)), path.read_bytes()


def _pixels(content: bytes, side: int) -> Tensor:
    """The middle square of an image, (3, side, side)."""
    import numpy as np
    from PIL import Image, ImageOps

    image = ImageOps.fit(Image.open(io.BytesIO(content)).convert("RGB"), (side, side))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _split(files: list[tuple[str, bytes]], side: int) -> Split:
    classes = sorted({name.split("/")[-2] for name, _ in files})
    images = torch.stack([_pixels(content, side) for _, content in files])
    return images, torch.tensor([classes.index(name.split("/")[-2]) for name, _ in files])


def _cifar10(folder: Path) -> dict[str, Split]:
    files = [(n, c) for n, c in _files(folder, "cifar10-images") if n.endswith(".jpg")]
    return {part: _split([f for f in files if f"/{part}/" in f[0]], 32) for part in ("train", "test")}


def _caltech101(folder: Path) -> dict[str, Split]:
    """Every fifth image of the sorted list is a test image, as in `ranks.workloads.caltech101`."""
    files = [(n, c) for n, c in _files(folder, "caltech101-80px") if n.endswith(".jpg") and "BACKGROUND" not in n]
    images, classes = _split(files, 80)
    test = torch.arange(len(classes)) % 5 == 0
    return {"train": (images[~test], classes[~test]), "test": (images[test], classes[test])}


_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _normal(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (_MEAN, _STD))
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def _augmented(images: Tensor, size: int) -> Tensor:
    """A random crop and flip of each image; images of the crop's size are padded by an eighth first."""
    pad = size // 8 if images.shape[-1] == size else 0
    images = F.pad(images, (pad,) * 4)
    n, room = len(images), images.shape[-1] - size + 1
    rows = torch.randint(room, (n, 1, 1, 1), device=images.device) + torch.arange(size, device=images.device).view(
        1, 1, size, 1
    )
    columns = torch.randint(room, (n, 1, 1, 1), device=images.device) + torch.arange(size, device=images.device)
    columns = torch.where(torch.rand(n, 1, 1, 1, device=images.device) < 0.5, columns, columns.flip(-1))
    sample = torch.arange(n, device=images.device).view(n, 1, 1, 1)
    channel = torch.arange(3, device=images.device).view(1, 3, 1, 1)
    return images[sample, channel, rows, columns]


# --- one training -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, size: int) -> dict[str, float]:
    """Share of right answers among the first and the first five guesses, percent, and mean loss."""
    model.eval()
    top1 = top5 = loss = 0.0
    for images, classes in zip(split[0].split(2000), split[1].split(2000), strict=True):
        off = (images.shape[-1] - size) // 2
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(_normal(images[..., off : off + size, off : off + size])).float()
        hits = outputs.topk(5).indices == classes[:, None]
        top1, top5 = top1 + hits[:, 0].sum().item(), top5 + hits.sum().item()
        loss += F.cross_entropy(outputs, classes, reduction="sum").item()
    model.train()
    n = len(split[1])
    return {"top1": 100 * top1 / n, "top5": 100 * top5 / n, "loss": loss / n}


def _average_anew(model: nn.Module, images: Tensor, size: int, batch: int) -> None:
    """Statistics of the normalisation over eight batches with the weights as they are: its running averages follow the
    weights by up to hundreds of steps, of which a large batch leaves few.
    """
    chosen = (torch.randint(len(images), (batch,), device=images.device) for _ in range(8))
    with torch.autocast("cuda", torch.bfloat16):
        update_bn((_normal(_augmented(images[each], size)) for each in chosen), model)


def train(run: dict[str, Any], data: dict[str, Split], until: float) -> dict[str, Any] | None:
    """The record of a run; None if the time ended first."""
    task = TASKS[run["task"]]
    size = 32 if task.data == "cifar10" else 64
    torch.manual_seed(run["seed"])
    num_classes = int(data["train"][1].max()) + 1
    model = task.build(num_classes).cuda().to(memory_format=torch.channels_last).train()
    images, classes = data["train"]
    batch = run["batch"]
    epochs = run.get("epochs", task.epochs)
    schedule = functools.partial(
        lr_factor,
        warmup_epochs=accuracy_methods.WARMUP_EPOCHS,
        milestones=[m * epochs / task.epochs for m in task.milestones],
        decay=task.lr_decay,
    )

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    method = accuracy_methods.build(run["method"], model, loss_fn, task.lr, task.weight_decay, batch, SMALL_BATCH)
    watch = None
    if method.is_watched:
        parts = torch.randperm(len(classes), device=classes.device)
        kept_back, rest = parts.tensor_split([min(accuracy_methods.KEPT_BACK, len(classes) // 10)])
        held_out = images[kept_back], classes[kept_back]
        images, classes = images[rest], classes[rest]
        watch = accuracy_methods.Watch(method, lambda: accuracy(model, held_out, size)["top1"], len(kept_back))
    steps = len(classes) // batch
    began, losses, curve = time.time(), [], []
    for epoch in range(epochs):
        order = torch.randperm(len(classes), device="cuda")
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            inputs, targets = _normal(_augmented(images[chosen], size)), classes[chosen]
            epochs_done = epoch + step / steps
            method.set_lr(schedule(epochs_done), epochs_done, epochs)
            loss = method.train_step(inputs, targets, is_last_of_epoch=step == steps - 1)
        losses.append(loss)
        if time.time() > until:
            return None
        if watch is not None:
            if (epoch + 1) % max(1, epochs // 20) == 0 or not math.isfinite(float(losses[-1])):
                watch.look()
        elif not math.isfinite(float(losses[-1])) or (
            epoch + 1 == epochs // 2 and losses[-1] > 0.999 * math.log(num_classes)
        ):
            break  # diverged, or no better than guessing when half of the training is over
        if (epoch + 1) % max(1, epochs // 10) == 0:
            curve.append(round(accuracy(model, data["test"], size)["top1"], 2))
    test, seen = accuracy(model, data["test"], size), accuracy(model, (images[:10000], classes[:10000]), size)
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        _average_anew(model, images, size, batch)
        test |= {f"recalibrated_{k}": v for k, v in accuracy(model, data["test"], size).items()}
    numbers = {f"{name}_{k}": round(v, 4) for name, part in (("test", test), ("train", seen)) for k, v in part.items()}
    return {
        **run,
        **{k: v if math.isfinite(v) else None for k, v in numbers.items()},
        "curve": curve,
        "epochs": epochs,
        "epochs_done": len(losses),
        "seconds": round(time.time() - began, 1),
        **method.facts(),
    }


# --- many trainings ---------------------------------------------------------------------------------------------------


def key(run: dict[str, Any]) -> str:
    return "-".join(str(run[name]) for name in ("task", "batch", "method", "seed"))


def work(plan: list[dict[str, Any]], folder: Path, claims: Path, until: float) -> None:
    """One process: the next run that nobody has claimed, until there is none or the time is over."""
    faulthandler.dump_traceback_later(max(1.0, until + GRACE_S / 2 - time.time()))  # tells where it hangs
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    data: dict[str, dict[str, Split]] = {}
    out = claims / f"{os.getpid()}.jsonl"
    for run in plan:
        if time.time() + run.pop("expected_s") > until:
            continue  # a shorter one may still fit
        try:
            (claims / key(run)).touch(exist_ok=False)
        except FileExistsError:
            continue
        name = TASKS[run["task"]].data
        if name not in data:
            parts = load(folder, name)
            data[name] = {part: (images.cuda(), classes.cuda()) for part, (images, classes) in parts.items()}
        try:
            record = train(run, data[name], until)
        except Exception as error:  # one method's mistake is not to cost the others their turn
            record = None
            print(key(run), f"{type(error).__name__}: {error}", flush=True)
        if record is not None:
            with out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(key(run), record["test_top1"], record["train_top1"], record["seconds"], flush=True)


def plan(name: str) -> list[dict[str, Any]]:
    """The runs of a plan, most wanted first."""
    return [
        {"task": task, "batch": batch, "method": method, "seed": seed}
        for tasks, methods, seeds in accuracy_methods.PLANS[name]
        for seed in seeds
        for task, batches in tasks.items()
        for batch in batches
        for method in methods
    ]


def expected_s(run: dict[str, Any], records: list[dict[str, Any]]) -> float:
    """How long a run takes by the longest of those in the records that are most like it; 0 if none is."""
    for names in (("task", "batch", "method"), ("task", "batch"), ("task",)):
        alike = [record["seconds"] for record in records if all(record[name] == run[name] for name in names)]
        if alike:
            return max(alike)
    return 0.0


def run_plan(arguments: argparse.Namespace) -> None:
    """Share the plan among processes, then put what they found into one file."""
    until = time.time() + 60 * arguments.minutes
    records = read([arguments.records])
    done = {key(record) for record in records}
    wanted = itertools.chain.from_iterable(map(plan, arguments.plans))
    todo = [{**run, "expected_s": expected_s(run, records)} for run in wanted if key(run) not in done]
    claims = Path(f"/tmp/accuracy-{os.getpid()}")
    claims.mkdir()
    (claims / "todo.json").write_text(json.dumps(todo))
    names = sorted({TASKS[run["task"]].data for run in todo})
    loading = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, "load", str(arguments.data), name]) for name in names
    ]
    for process in loading:
        process.wait()
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "work", str(arguments.data), str(claims), str(until)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "2"},
        )
        for _, gpu in itertools.product(range(arguments.per_gpu), arguments.gpus.split(","))
    ]
    for process in workers:
        try:
            process.wait(max(0.1, until + GRACE_S - time.time()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # neither is to cost what the others found
            process.kill()
    arguments.records.parent.mkdir(parents=True, exist_ok=True)
    with arguments.records.open("a") as file:
        for found in sorted(claims.glob("*.jsonl")):
            file.write(found.read_text())


def main() -> None:
    """Whatever the first word says."""
    parser = argparse.ArgumentParser(description="Test accuracy of large batches by method")
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run")
    running.add_argument("plans", choices=accuracy_methods.PLANS, nargs="+")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--records", type=Path, required=True)
    running.add_argument("--gpus", default="0")
    running.add_argument("--per-gpu", type=int, default=3)
    running.add_argument("--minutes", type=float, default=60)
    loading = verbs.add_parser("load")
    loading.add_argument("data", type=Path)
    loading.add_argument("name")
    working = verbs.add_parser("work")
    working.add_argument("data", type=Path)
    working.add_argument("claims", type=Path)
    working.add_argument("until", type=float)
    arguments = parser.parse_args()
    if arguments.verb == "run":
        run_plan(arguments)
    elif arguments.verb == "load":
        load(arguments.data, arguments.name)
    else:
        todo = json.loads((arguments.claims / "todo.json").read_text())
        work(todo, arguments.data, arguments.claims, arguments.until)


if __name__ == "__main__":
    main()
