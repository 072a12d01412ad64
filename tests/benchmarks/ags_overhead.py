"""What adaptive gradient scaling costs a training step, next to fused SGD in the same process (a CUDA device).

    python -m tests.benchmarks.ags_overhead

Steps of the two alternate in blocks, so that clocks and temperature disturb both alike; ratios are of medians over
blocks. A refresh is timed by itself and spread over the steps of an epoch of `--epoch-samples`.
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

GIB = 2**30
BLOCK = 20


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


class Bench:
    """A model in training with one optimizer."""

    def __init__(self, build: Callable[[int], nn.Module], pixels: int, batch: int, granularity: str | None):
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        self.model = build(1000).cuda().train()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9, fused=True)
        if granularity is not None:
            self.optimizer = TulaOptimizer(
                self.optimizer,
                global_batch=batch,
                small_batch=batch // 8,
                granularity=granularity,  # type: ignore[arg-type]
            )
        self.inputs = torch.randn(batch, 3, pixels, pixels, device="cuda")
        self.targets = torch.randint(1000, (batch,), device="cuda")
        self.loss = nn.CrossEntropyLoss()
        for _ in range(5):
            self.step()
        if granularity is not None:
            self.backward()
            self.refresh()
            self.optimizer.step()
        self.held_gib = (torch.cuda.memory_allocated() - before) / GIB

    def backward(self) -> None:
        self.loss(self.model(self.inputs), self.targets).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def refresh(self) -> None:
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
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times[1:])


def measured(blocks: int, epoch_samples: int) -> Iterator[dict[str, Any]]:
    for name, (build, pixels, batch) in CASES.items():
        plain = Bench(build, pixels, batch, None)
        for granularity in ("element", "channel", "tensor", "global"):
            ags = Bench(build, pixels, batch, granularity)
            pairs = [(plain.block_s(), ags.block_s()) for _ in range(blocks)][1:]
            ratio = statistics.median(b / a for a, b in pairs)
            step_s, refresh_s = statistics.median(a for a, _ in pairs), ags.refresh_s()
            yield {
                "case": name,
                "granularity": granularity,
                "sgd_step_ms": 1000 * step_s,
                "ags_over_sgd": ratio,
                "refresh_ms": 1000 * refresh_s,
                "with_refresh_over_sgd": ratio + refresh_s / (epoch_samples / batch) / step_s,
                "more_memory_gib": ags.held_gib - plain.held_gib,
                "parameters_gib": sum(p.numel() * p.element_size() for p in ags.model.parameters()) / GIB,
            }
            del ags
        del plain
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of 20 steps each, the first is dropped")
    parser.add_argument(
        "--epoch-samples", type=int, default=50_000, help="samples of an epoch, each ends with a refresh"
    )
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for row in measured(options.blocks, options.epoch_samples):
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
