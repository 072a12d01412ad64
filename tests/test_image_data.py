"""CIFAR-10 from its official binary files: read right, augmented in training only, and reproducibly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tula_hpc.errors import TulaError
from tula_hpc.ranks.workloads import cifar10, resnet18_32px


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five training files of four images and one of three, as the official archive holds them."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, count in [*((f"data_batch_{i}", 4) for i in range(1, 6)), ("test_batch", 3)]:
        records = torch.randint(256, (count, 3073), generator=generator, dtype=torch.uint8)
        records[:, 0] = torch.arange(count) + 2
        (folder / f"{name}.bin").write_bytes(records.numpy().tobytes())
    return tmp_path


def test_labels_and_planes_of_colour_come_from_their_places(root: Path):
    """A test image is the file's bytes, red plane first and row by row, moved to mean 0 and deviation 1."""
    raw = (root / "cifar-10-batches-bin" / "test_batch.bin").read_bytes()
    test_set = cifar10(root, train=False)
    assert len(test_set) == 3  # type: ignore[arg-type]
    image, label = test_set[1]
    assert (image.shape, image.dtype, label) == ((3, 32, 32), torch.float32, 3)
    blue_at_row_5_column_7 = raw[3073 + 1 + 2 * 1024 + 5 * 32 + 7]
    assert float(image[2, 5, 7]) == pytest.approx((blue_at_row_5_column_7 - 113.9) / 66.7, rel=1e-5)


def test_training_images_are_shifted_and_mirrored_at_random(root: Path):
    """Each is the padded original at one of 9 x 9 places, mirrored or not; the same again from the same seed."""
    raw = (root / "cifar-10-batches-bin" / "data_batch_1.bin").read_bytes()
    original = torch.frombuffer(bytearray(raw[1:3073]), dtype=torch.uint8).view(3, 32, 32)
    mean, std = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1), torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)
    train_set = cifar10(root, train=True)
    assert len(train_set) == 20  # type: ignore[arg-type]
    padded = torch.nn.functional.pad(original, (4, 4, 4, 4))
    crops = {(t, left): padded[:, t : t + 32, left : left + 32] for t in range(9) for left in range(9)}
    places = {crop.numpy().tobytes(): (*place, False) for place, crop in crops.items()}
    places |= {crop.flip(2).numpy().tobytes(): (*place, True) for place, crop in crops.items()}

    def drawn() -> list[tuple[int, int, bool]]:
        torch.manual_seed(3)
        images = [train_set[0][0] for _ in range(300)]
        return [places[(image * std + mean).round().to(torch.uint8).numpy().tobytes()] for image in images]

    first = drawn()
    assert {top for top, _, _ in first} == {left for _, left, _ in first} == set(range(9))
    assert {mirrored for *_, mirrored in first} == {False, True}
    assert drawn() == first


def test_a_torn_file_is_named(root: Path):
    """The message names the file and what is wrong with it."""
    torn = root / "cifar-10-batches-bin" / "data_batch_3.bin"
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(TulaError, match=r"data_batch_3.bin has 12291 bytes, not a multiple of 3073"):
        cifar10(root, train=True)


def test_the_small_resnet_keeps_the_pixels_of_its_input():
    """An image of 32 pixels reaches the last stage as 4 x 4, where the usual stem leaves 1 x 1."""
    model = resnet18_32px(10).eval()
    seen = []
    model.layer4.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.shape))
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert seen == [(1, 512, 4, 4)]
