"""The bundled image data sets from files as they lie on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from tula_hpc.ranks.workloads import cifar10


def test_cifar10_is_read_from_its_binary_version(tmp_path: Path):
    """A label byte and three planes of 32x32 bytes each: in order, normalised, and moved only in training."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(256, (6, 3073), dtype=torch.uint8, generator=generator)
    rows[:, 0] = torch.arange(6)
    for number, name in enumerate([f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]):
        (folder / name).write_bytes(bytes(rows[number].tolist()))
    train, test = cifar10(tmp_path, train=True), cifar10(tmp_path, train=False)
    assert [label for _, label in train] == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    image, label = test[0]
    assert label == 5
    red = (rows[5, 1:1025].reshape(32, 32).float() / 255 - 0.491) / 0.247
    torch.testing.assert_close(image[0], red)
    assert train[0][0].shape == (3, 32, 32)
    assert len({float(train[0][0].sum()) for _ in range(8)}) > 1
