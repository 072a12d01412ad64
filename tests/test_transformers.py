"""The vision transformer and the language model learn; the length of a sequence is in memory and signature."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_cli import finished_run, tula

from tula_hpc.candidates import Candidate
from tula_hpc.composition import compose, sweep
from tula_hpc.config import Settings
from tula_hpc.control.controller import Controller
from tula_hpc.control.local import LocalScheduler
from tula_hpc.display import Display
from tula_hpc.ranks import workloads
from tula_hpc.ranks.launch import Rank
from tula_hpc.ranks.signs import EarlyWarning, Heartbeat
from tula_hpc.ranks.synthetic import SUCCESSORS, SyntheticTokens
from tula_hpc.ranks.training import train
from tula_hpc.ranks.transformers import LanguageModel, VisionTransformer
from tula_hpc.runs import RunFolder, read_json
from tula_hpc.signatures import measurement_signature, signature

ALONE, CPU = Rank(0, 1, 0, "test", "test"), torch.device("cpu")
SMALL_LM = ["+experiment=lm_small", "workload.train_samples=512", "workload.test_samples=64", "workload.vocabulary=16"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small_lm() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(vocabulary=11, sequence_length=8, depth=2, width=16, heads=2)


def test_no_token_sees_the_ones_after_it():
    """Changing a token leaves the logits before it as they are, and changes its own; shorter sequences work as well."""
    model, tokens = small_lm(), torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 11, 8)
    torch.testing.assert_close(before[..., :5], after[..., :5])
    assert not torch.allclose(before[..., 5], after[..., 5])
    torch.testing.assert_close(model(tokens[:, :4]), before[..., :4])


def test_a_vision_transformer_sees_all_of_an_image():
    model = VisionTransformer(in_channels=3, image_size=8, patch_size=4, num_classes=5, depth=1, width=8, heads=2)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    model(images).sum().backward()
    assert images.grad is not None
    assert (images.grad.abs().sum((1,)) > 0).all()


@pytest.mark.parametrize(
    ("sizes", "words"), [((8, 3, 8, 2), "8, which patches of 3"), ((8, 4, 9, 2), "9, which 2 heads")]
)
def test_sizes_that_do_not_fit_together_are_refused(sizes: tuple[int, ...], words: str):
    image_size, patch_size, width, heads = sizes
    with pytest.raises(ValueError, match=words):
        VisionTransformer(1, image_size, patch_size, num_classes=5, depth=1, width=width, heads=heads)


def test_tokens_follow_a_law_that_training_and_test_share():
    """The same at every start; each token has its few followers with their frequencies, in both sets alike."""
    sets = [SyntheticTokens(2000, 32, 20, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(sets[0][7][0], sets[1][7][0])
    assert not torch.equal(sets[0][7][0], sets[2][7][0])
    counts = []
    for data in (sets[0], sets[2]):
        pairs = torch.stack([torch.stack(data[i]).flatten(1) for i in range(len(data))])
        now, then = pairs[:, 0].flatten(), pairs[:, 1].flatten()
        assert torch.equal(pairs[0, 0, 1:], pairs[0, 1, :-1])  # the target is the next token
        counts.append(torch.bincount(20 * now + then, minlength=400).view(20, 20) / torch.bincount(now).view(20, 1))
    torch.testing.assert_close(counts[0], counts[1], atol=0.05, rtol=0)
    assert ((counts[0] > 0).sum(1) <= len(SUCCESSORS)).all()
    assert counts[0].max(1).values.mean() == pytest.approx(SUCCESSORS[0], abs=0.05)


@pytest.mark.parametrize("data", ["real", "synthetic"])
def test_the_language_model_learns_the_law(tmp_path: Path, data: str):
    """From one in sixteen to what the best model reaches, counted over tokens; all other followers are in the top 5."""
    settings = compose([*SMALL_LM, f"data={data}", "training.epochs=3", "training.milestones=[]", "training.lr=0.01"])
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 32), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    last = run.read_metrics()[-1]
    assert 50 < last["test_top1"] <= 100 * max(SUCCESSORS) + 8
    assert last["test_top5"] > 95
    assert last["test_top1"] * 64 * 32 / 100 == pytest.approx(round(last["test_top1"] * 64 * 32 / 100), abs=1e-6)


def test_the_vision_transformer_learns_the_digits(tmp_path: Path):
    """The experiment with fewer epochs, at four times the batch that its rate was tuned for."""
    settings = compose(["+experiment=vit_digits", "training.epochs=10", "training.milestones=[]"])
    run = RunFolder(tmp_path / "run")
    train(settings, Candidate(1, 128), ALONE, run, CPU, EarlyWarning(), Heartbeat(None))
    assert run.read_metrics()[-1]["test_top1"] > 60


def test_the_sequence_length_is_swept_in_one_place():
    """Each length is a run of its own with measurements of its own; model and data follow."""
    runs = [compose(run) for run in sweep([*SMALL_LM, "-m", "workload.sequence_length=16,64"])]
    assert [s.workload.sequence_length for s in runs] == [16, 64]
    assert len({measurement_signature(s) for s in runs}) == len({signature(s) for s in runs}) == 2
    for settings in runs:
        tokens, targets = workloads.build_dataset(settings, train=True)[0]
        assert tokens.shape == targets.shape == (settings.workload.sequence_length,)
        assert workloads.build_model(settings)(tokens.unsqueeze(0)).shape[2] == settings.workload.sequence_length


def profiled(settings: Settings, folder: Path) -> tuple[dict[str, float], float]:
    """The measured point of the largest batch, and what the fitted memory model says of it, GiB."""
    run = RunFolder(folder)
    controller = Controller(settings, run, LocalScheduler(settings), Display(Console(file=io.StringIO())), [])
    controller.write_down_the_run()
    controller._fit(controller._profile())
    fit = read_json(run.fit)
    largest = max(fit["points"], key=lambda point: point["batch_per_rank"])
    line = fit["memory"]["total"]
    return largest, line["intercept_gib"] + line["slope_gib"] * largest["batch_per_rank"]


def test_longer_sequences_take_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four times the tokens: four times the bytes of a batch, more activations, and more memory predicted."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    grid = "grid={min_nodes: 1, max_nodes: 1, min_global_batch: 16, min_batch_per_rank: 16, max_batch_per_rank: 64}"
    quick = "search={mode: partial, warmup_steps: 1, timed_steps: 3, compute_steps: 3}"
    short, long = (
        profiled(compose([*SMALL_LM, "cluster=local", grid, quick, f"workload.sequence_length={n}"]), tmp_path / f"{n}")
        for n in (64, 256)
    )
    assert long[0]["batch_gib"] == pytest.approx(4 * short[0]["batch_gib"])
    # a process takes some 0.2 GiB for its libraries, which counts here
    assert long[0]["activation_gib"] > short[0]["activation_gib"] + 0.05
    assert long[1] > short[1] + 0.05


def test_the_language_model_completes_the_loop(tmp_path: Path):
    """From profiling to a report, on this machine: the choice is trained with AdamW and its scaled rate."""
    run = finished_run(
        tula(
            tmp_path, *SMALL_LM, "cluster=local", "workload.sequence_length=16", "search=partial", "training.epochs=2",
            "training.milestones=[]", "search={warmup_steps: 1, timed_steps: 3, compute_steps: 3}",
            "grid={min_nodes: 1, max_nodes: 2, min_batch_per_rank: 32, max_batch_per_rank: 64}",
        )
    )  # fmt: skip
    selection, result = read_json(run.selection), read_json(run.train_result)
    assert result["base_lr"] == pytest.approx(0.003 * (selection["global_batch"] / 32) ** 0.5)
    assert result["test_top1"] > 100 / 16
    assert "AdamW, learning rate 0.003 for batch 32" in run.report.read_text(encoding="utf-8").replace("<wbr>", "")
