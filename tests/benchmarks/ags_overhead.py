"""What adaptive gradient scaling costs a training step, next to fused SGD in the same process (a CUDA device).

    python -m tests.benchmarks.ags_overhead

Steps of the two alternate in blocks, so that clocks and temperature disturb both alike; ratios are of medians over
blocks. A refresh is timed by itself and spread over the steps between two of them: those of an epoch of
`--epoch-samples`, or 4 for the fresh scales. fairscale's AdaScale stands beside it where it is installed and runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.bounded import BoundedOptimizer

GIB = 2**30
BLOCK = 10


def vgg11(num_classes: int) -> nn.Module:
    """VGG11 with BatchNorm for images of 32 pixels: its convolutions and one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, int(width), 3, padding=1), nn.BatchNorm2d(int(width)), nn.ReLU(inplace=True)]
        channels = int(width)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, num_classes))


def resnet50(num_classes: int) -> nn.Module:
    from torchvision import models

    return models.resnet50(num_classes=num_classes)


CASES: dict[str, tuple[Callable[[int], nn.Module], int, int]] = {
    "resnet50, 224 px, b=64": (resnet50, 224, 64),
    "vgg11, 32 px, b=128": (vgg11, 32, 128),
}


Wrap = Callable[[nn.Module, torch.optim.Optimizer, int], Any]
"""Makes of a model, its SGD and the batch the optimizer to measure."""


def ags(**options: Any) -> Wrap:
    return lambda model, sgd, batch: TulaOptimizer(sgd, global_batch=batch, small_batch=batch // 8, **options)


def fairscale_adascale(model: nn.Module, sgd: torch.optim.Optimizer, batch: int) -> Any:
    from fairscale.optim import AdaScale  # type: ignore[import-not-found]

    return AdaScale(sgd, world_size=1, num_gradients_to_accumulate=ADASCALE_MICROBATCHES)


ADASCALE_MICROBATCHES = 2
"""On one device AdaScale compares micro-batches: it and its SGD take one step in two backward passes."""
FRESH: dict[str, Any] = {"gate": "off", "scale_smoothing": 0.9, "refresh_every": 4, "s_min": 1.0}
VARIANTS: dict[str, Wrap] = {
    "bounded (method=ags)": lambda _, sgd, batch: BoundedOptimizer(sgd, global_batch=batch, small_batch=batch // 8),
    **{name: ags(granularity=name) for name in ("element", "channel", "tensor", "global")},
    "fresh tensor": ags(granularity="tensor", **FRESH),
    "fresh global": ags(granularity="global", **FRESH),
    "fresh element": ags(granularity="element", **FRESH),
}


class Bench:
    """A model in training with one optimizer; plain SGD if `wrap` is None."""

    def __init__(
        self, build: Callable[[int], nn.Module], pixels: int, batch: int, wrap: Wrap | None, microbatches: int = 1
    ):
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        self.model = build(1000).cuda().train()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)
        if wrap is not None:
            self.optimizer = wrap(self.model, self.optimizer, batch)
        self.inputs = torch.randn(batch, 3, pixels, pixels, device="cuda")
        self.targets = torch.randint(1000, (batch,), device="cuda")
        self.loss = nn.CrossEntropyLoss()
        self.microbatches = microbatches
        for _ in range(5):
            self.step()
        self.backward()
        self.refresh()
        self.update()
        self.held_gib = (torch.cuda.memory_allocated() - before) / GIB

    def backward(self) -> None:
        for _ in range(self.microbatches):
            self.loss(self.model(self.inputs), self.targets).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.update()

    def refresh(self) -> None:
        if isinstance(self.optimizer, TulaOptimizer):
            self.optimizer.refresh(self.model, self.loss, self.inputs, self.targets)

    def block_s(self) -> float:
        """Seconds of a step, mean over a block."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BLOCK):
            self.step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / BLOCK

    def refresh_s(self) -> float:
        times = []
        for _ in range(6):
            self.backward()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.refresh()
            end.record()
            self.update()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times[1:])


def pairs_of(plain: Bench, other: Bench, seconds: float) -> list[tuple[float, float]]:
    """Step times of the two, s, in alternating blocks for about so long; the first pair is dropped."""
    pairs = [(plain.block_s(), other.block_s())]
    more = max(3, round(seconds / sum(pairs[0]) / BLOCK))
    return [(plain.block_s(), other.block_s()) for _ in range(more)]


def measured(seconds: float, epoch_samples: int) -> Iterator[dict[str, Any]]:
    for name, (build, pixels, batch) in CASES.items():
        plain = Bench(build, pixels, batch, None)
        for variant, wrap in VARIANTS.items():
            other = Bench(build, pixels, batch, wrap)
            pairs = pairs_of(plain, other, seconds)
            step_s, ratio = statistics.median(a for a, _ in pairs), statistics.median(b / a for a, b in pairs)
            refresh_s = other.refresh_s()
            steps = getattr(other.optimizer, "refresh_every", None) or epoch_samples / batch
            yield {
                "case": name,
                "variant": variant,
                "sgd_step_ms": 1000 * step_s,
                "over_sgd": ratio,
                "refresh_ms": 1000 * refresh_s,
                "with_refresh_over_sgd": ratio + refresh_s / steps / step_s,
                "more_memory_gib": other.held_gib - plain.held_gib,
                "parameters_gib": sum(p.numel() * p.element_size() for p in other.model.parameters()) / GIB,
            }
            del other
        del plain
        torch.cuda.empty_cache()
        yield {"case": name, "variant": "fairscale AdaScale", **adascale(build, pixels, batch, seconds)}
        yield {
            "case": name,
            "variant": "AdaptDL statistics",
            "skipped": "not measured: nothing here drives AdaptDL's loop",
        }
        torch.cuda.empty_cache()


def adascale(build: Callable[[int], nn.Module], pixels: int, batch: int, seconds: float) -> dict[str, Any]:
    """What fairscale's AdaScale costs, against SGD with as many micro-batches; says why if it does not run."""
    try:
        plain = Bench(build, pixels, batch, None, ADASCALE_MICROBATCHES)
        other = Bench(build, pixels, batch, fairscale_adascale, ADASCALE_MICROBATCHES)
        pairs = pairs_of(plain, other, seconds)
    except Exception as error:  # not installed, or not fit for this torch: nothing of ours
        return {"skipped": f"{type(error).__name__}: {error}"}
    return {
        "sgd_step_ms": 1000 * statistics.median(a for a, _ in pairs),
        "over_sgd": statistics.median(b / a for a, b in pairs),
        "microbatches": ADASCALE_MICROBATCHES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for the blocks of each row")
    parser.add_argument(
        "--epoch-samples", type=int, default=50_000, help="samples of an epoch, each ends with a refresh"
    )
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for row in measured(options.seconds, options.epoch_samples):
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
