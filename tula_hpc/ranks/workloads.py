"""Build model, data and loss from their import paths; and the bundled ones.

A data set of your own is a callable `f(root, train, **arguments)` that returns a map-style torch data set of
(input, target); see `ranks.batches` for what these may be, and "Bring your own model" in the README.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from tula_hpc import imports
from tula_hpc.config import DataKind, Settings, from_plain
from tula_hpc.errors import TulaError
from tula_hpc.ranks.synthetic import SyntheticImages, SyntheticTokens


class SizedDataset(Dataset[Any]):
    """What torch's type lacks: a map-style data set knows its length."""

    def __len__(self) -> int:
        raise NotImplementedError


def call(node: dict[str, Any], **more: Any) -> Any:
    """Call the `_target_` of a configuration node with its other keys as arguments."""
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    return imports.resolve(node["_target_"])(**arguments, **more)


def build_model(settings: Settings) -> torch.nn.Module:
    """The model, the same on every rank: its random weights follow `training.seed`.

    Raises:
        TulaError: If it is no module, or has nothing to train.
    """
    torch.manual_seed(settings.training.seed)
    model = call(settings.workload.model)
    name = settings.workload.model["_target_"]
    if not isinstance(model, torch.nn.Module):
        raise TulaError(f"workload.model, {name}, gives a {type(model).__name__}; let it give a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TulaError(f"workload.model, {name}, gives a model without a parameter that requires gradients")
    return model


def build_loss(settings: Settings, device: torch.device) -> Any:
    """The loss; class weights and the like move to the device with it."""
    loss = call(settings.workload.loss)
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss


def build_dataset(settings: Settings, train: bool) -> SizedDataset:
    """The training or test set, cut to `data.train_samples` or `data.test_samples`.

    Raises:
        TulaError: If it is no map-style data set, or holds fewer samples than the configuration says.
    """
    wanted = settings.train_samples if train else settings.test_samples
    workload = settings.workload
    if settings.data.kind is DataKind.synthetic:
        if workload.vocabulary and workload.sequence_length:
            tokens = SyntheticTokens(wanted, workload.sequence_length, workload.vocabulary, seed=int(not train))
            return cast(SizedDataset, tokens)
        images = SyntheticImages(wanted, workload.input_shape, workload.num_classes, seed=int(not train))
        return cast(SizedDataset, images)
    dataset = call(workload.dataset, root=Path(settings.data.root).expanduser(), train=train)
    part = "train_samples" if train else "test_samples"
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        name = workload.dataset["_target_"]
        raise TulaError(
            f"workload.dataset, {name}, gives a {type(dataset).__name__}; let it give a data set with __len__ and "
            "__getitem__"
        )
    if len(dataset) < wanted:
        way_out = f"set workload.{part}={len(dataset)}" if len(dataset) else "look at data.root and workload.dataset"
        raise TulaError(f"workload.{part} is {wanted} and the data set holds {len(dataset)}; {way_out}")
    if len(dataset) == wanted:
        return cast(SizedDataset, dataset)
    # a fixed draw, not the first ones: many data sets are sorted by class
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    return cast(SizedDataset, Subset(dataset, order[:wanted].tolist()))


def fixed_batch(dataset: SizedDataset, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of some samples, the same ones (and equally augmented) whenever and wherever it is called."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        chosen = torch.randperm(len(dataset))[:num_samples].tolist()
        inputs, targets = default_collate([dataset[i] for i in chosen])
    return inputs, targets


def small_cnn(in_channels: int, image_size: int, num_classes: int, width: int) -> torch.nn.Module:
    """Three strided convolutions and two linear layers, for small grey images."""
    layers: list[torch.nn.Module] = []
    channels, size = in_channels, image_size
    for out_channels, stride in ((width, 1), (2 * width, 2), (2 * width, 2)):
        layers += [
            torch.nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False),
            torch.nn.BatchNorm2d(out_channels),
            torch.nn.ReLU(),
        ]
        channels, size = out_channels, math.ceil(size / stride)
    features = channels * size * size
    head = [torch.nn.Flatten(), torch.nn.Linear(features, 4 * width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, *head, torch.nn.Linear(4 * width, num_classes))


def resnet18_32px(num_classes: int) -> torch.nn.Module:
    """ResNet18 whose first layer fits images of 32 pixels: 3x3, no stride, no pooling."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=num_classes)
    model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    return model


def digits(root: Path, train: bool) -> Dataset:
    """The 1,797 digits of 8x8 pixels in scikit-learn's wheel; every fifth is a test digit.

    Its file is read without importing scikit-learn, which takes as long as importing torch.
    """
    wheel = importlib.metadata.distribution("scikit-learn")
    with gzip.open(str(wheel.locate_file("sklearn/datasets/data/digits.csv.gz")), "rt") as lines:
        rows = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    chosen = (torch.arange(len(rows)) % 5 != 0) if train else (torch.arange(len(rows)) % 5 == 0)
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()
    return TensorDataset(images[chosen], labels[chosen])


def markov_tokens(root: Path, train: bool, samples: int, sequence_length: int, vocabulary: int) -> Dataset:
    """Token sequences of a fixed law of succession, and an eighth as many for the test; nothing is read from `root`."""
    return SyntheticTokens(samples if train else samples // 8, sequence_length, vocabulary, seed=int(not train))


def _read_idx(folder: Path, name: str) -> torch.Tensor:
    """A tensor from a file in the MNIST family's IDX format, plain or gzipped; bytes, shape as in its header."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    raw = plain.read_bytes() if plain.exists() else gzip.decompress(zipped.read_bytes())
    dimensions = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape)


def fashion_mnist(root: Path, train: bool, download: bool = False) -> Dataset:
    """60,000 and 10,000 grey images of 28x28 pixels, from torchvision's folder or that of Debian's package."""
    if download:
        from torchvision.datasets import FashionMNIST

        FashionMNIST(root, download=True)
    folder = root / "FashionMNIST" / "raw"
    folder = folder if folder.is_dir() else root
    prefix = "train" if train else "t10k"
    images = _read_idx(folder, f"{prefix}-images-idx3-ubyte").unsqueeze(1).float().div_(255).sub_(0.286).div_(0.353)
    return TensorDataset(images, _read_idx(folder, f"{prefix}-labels-idx1-ubyte").long())


_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _photo_transform(train: bool, image_size: int) -> Any:
    from torchvision import transforms

    crop = (
        [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
        if train
        else [transforms.Resize(round(image_size / 0.875)), transforms.CenterCrop(image_size)]
    )
    return transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(_IMAGENET_MEAN, _IMAGENET_STD)])


def cifar100(root: Path, train: bool, download: bool = False) -> Dataset:
    """CIFAR-100 with the usual padded crops and flips."""
    from torchvision import datasets, transforms

    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if train else []
    normalize = transforms.Normalize((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
    transform = transforms.Compose([*augment, transforms.ToTensor(), normalize])
    return datasets.CIFAR100(root, train=train, transform=transform, download=download)


class Cifar10(SizedDataset):
    """Images of 32x32 pixels, held as bytes; for training shifted by up to four pixels and mirrored, at random.

    The random numbers are torch's own, one an image, as torchvision's transforms take them.
    """

    def __init__(self, images: torch.Tensor, labels: list[int], train: bool):
        """`images`: uint8, (samples, 3, 32, 32)."""
        self._images = images
        self._labels = labels
        self._train = train
        self._mean = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1)
        self._std = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index]
        if self._train:
            place, mirrored = divmod(int(torch.randint(9 * 9 * 2, ())), 2)
            top, left = divmod(place, 9)
            image = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            image = image.flip(2) if mirrored else image
        return image.float().sub_(self._mean).div_(self._std), self._labels[index]


def cifar10(root: Path, train: bool, download: bool = False) -> Dataset:
    """CIFAR-10 with the usual padded crops and flips, from the official binary version or torchvision's folder.

    Raises:
        TulaError: If a file of the binary version is not whole.
    """
    folder = root / "cifar-10-batches-bin"
    if not folder.is_dir():
        from torchvision.datasets import CIFAR10

        found = CIFAR10(root, train=train, download=download)
        return Cifar10(torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous(), found.targets, train)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    # of each record: the label, then the planes of red, green and blue
    records = torch.cat([_read_records(folder / name, 1 + 3 * 32 * 32) for name in names])
    return Cifar10(records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].tolist(), train)


def _read_records(path: Path, record_bytes: int) -> torch.Tensor:
    """A file of records of equal length, as uint8, (records, bytes)."""
    raw = path.read_bytes()
    if not raw or len(raw) % record_bytes:
        raise TulaError(f"{path} has {len(raw)} bytes, not a multiple of {record_bytes}; fetch it again")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, record_bytes)


def imagenet(root: Path, train: bool, image_size: int) -> Dataset:
    """ImageNet as folders of classes below `imagenet/train` and `imagenet/val`."""
    from torchvision.datasets import ImageFolder

    return ImageFolder(root / "imagenet" / ("train" if train else "val"), _photo_transform(train, image_size))


def _every_fifth(dataset: Any, train: bool) -> Dataset:
    """Split a data set that is sorted by class and has no official split: every fifth image is a test image."""
    return Subset(dataset, [i for i in range(len(dataset)) if (i % 5 != 0) == train])


class _InColour:
    """Grey photographs among coloured ones get three equal channels."""

    def __call__(self, image: Any) -> Any:
        return image.convert("RGB")


def _in_colour(train: bool, image_size: int) -> Any:
    from torchvision import transforms

    return transforms.Compose([_InColour(), _photo_transform(train, image_size)])


def caltech101(root: Path, train: bool, image_size: int, download: bool = False) -> Dataset:
    """CalTech101 without its background class."""
    from torchvision.datasets import Caltech101

    return _every_fifth(Caltech101(root, transform=_in_colour(train, image_size), download=download), train)


def caltech256(root: Path, train: bool, image_size: int, download: bool = False) -> Dataset:
    from torchvision.datasets import Caltech256

    return _every_fifth(Caltech256(root, transform=_in_colour(train, image_size), download=download), train)


def download_dataset(settings: Settings) -> None:
    """Fetch the data set below `data.root`; runs in a process of its own on the machine of the user.

    It is fetched aside and then moved there, so that neither an interrupted fetch nor one at the same time, by another
    run that needs it, leaves half of it. Files that lie in `data.root` already, such as its archive, are used.

    Raises:
        TulaError: If the data set's callable takes no `download`.
    """
    import inspect

    target = settings.workload.dataset["_target_"]
    if "download" not in inspect.signature(imports.resolve(target)).parameters:
        raise TulaError(f"data.download=true, but {target} cannot download; put the data below data.root yourself")
    root = Path(settings.data.root).expanduser().absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".fetching-") as aside:
        for file in filter(Path.is_file, root.iterdir()):
            (Path(aside) / file.name).symlink_to(file)
        call(settings.workload.dataset, root=Path(aside), train=True, download=True)
        for fetched in Path(aside).iterdir():
            if not fetched.is_symlink():
                _move(fetched, root / fetched.name)


def _move(source: Path, target: Path) -> None:
    """Rename a file or a folder, and what is in it where that folder is there already."""
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        for part in source.iterdir():
            _move(part, target / part.name)


if __name__ == "__main__":
    import json

    download_dataset(from_plain(json.load(sys.stdin)))
