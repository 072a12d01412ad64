"""The command line as a user meets it: real processes on this machine, no Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

from tula_hpc.config import Settings
from tula_hpc.control.journal import Journal
from tula_hpc.control.lease import controlling
from tula_hpc.control.verdicts import Verdict
from tula_hpc.ranks.workloads import download_dataset
from tula_hpc.runs import RunFolder, read_json

ROOT = Path(__file__).parents[1]


@pytest.fixture
def smallest(tiny_overrides: list[str]) -> list[str]:
    """Overrides of a run with a single candidate."""
    one = ["grid.max_nodes=1", "grid.max_batch_per_rank=32", "grid.min_batch_per_rank=32", "training.epochs=1"]
    return [*tiny_overrides, *one]


def tula(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tula_hpc", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)


def finished_run(answer: subprocess.CompletedProcess[str]) -> RunFolder:
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    last = answer.stdout.strip().splitlines()[-1]
    assert last.startswith("run folder: ")
    return RunFolder(Path(last.removeprefix("run folder: ")))


def test_the_quickstart_reaches_its_accuracy_and_is_not_repeated(tmp_path: Path):
    """`python -m tula_hpc` alone measures, chooses, trains to at least 97 % and reports; again, it only shows that."""
    answer = tula(tmp_path)
    run = finished_run(answer)
    assert read_json(run.train_result)["test_top1"] >= 97
    assert {p["num_nodes"] for p in read_json(run.fit)["points"]} == {1, 2}
    assert len(read_json(run.fit)["points"]) == 8
    assert run.report.exists()
    assert {p.suffix for p in run.plots.iterdir()} == {".png"}
    assert len(list(run.plots.iterdir())) >= 6
    for words in ("candidates", "<- chosen", "chosen by knee", "predicted"):
        assert words in answer.stdout
    events = sorted(run.journal.iterdir())
    assert finished_run(tula(tmp_path)) == run
    assert sorted(run.journal.iterdir()) == events


def test_measurements_serve_another_objective(tmp_path: Path, smallest: list[str]):
    """Asking for another objective takes over what was measured and submits no profiling job."""
    first = finished_run(tula(tmp_path, *smallest))
    answer = tula(tmp_path, *smallest, "objective=cost")
    second = finished_run(answer)
    assert second != first
    assert "1 measurement taken over" in answer.stdout
    assert not any("profile on" in line for line in answer.stdout.splitlines())


def test_a_run_ends_with_its_choice_and_goes_on_when_asked(tmp_path: Path, smallest: list[str]):
    """until=choice leaves a choice and a report and no training; the same command without it trains at that choice."""
    answer = tula(tmp_path, *smallest, "until=choice")
    run = finished_run(answer)
    assert "not trained, as until=choice asks" in answer.stdout
    assert run.selection.exists()
    assert not run.train.exists()
    assert "This run is not finished" not in run.report.read_text()
    again = tula(tmp_path, *smallest, "until=choice")
    assert finished_run(again) == run
    assert "not trained, as until=choice asks" in again.stdout
    answer = tula(tmp_path, *smallest)
    assert finished_run(answer) == run
    assert run.train_result.exists()
    assert not any("profile on" in line for line in answer.stdout.splitlines())


def test_adaptive_search_measures_less_and_says_why_it_ended(tmp_path: Path, tiny_overrides: list[str]):
    """With search=adaptive the loop keeps the budget, goes on to a choice, and records what ended the search."""
    budget = ["search.max_points=4", "search.verify_choice=false"]  # the choice may be a fifth, and is then measured
    arguments = [*tiny_overrides, "search=adaptive", *budget, "search.tolerance=1e-6"]
    answer = tula(tmp_path, *arguments)
    run = finished_run(answer)
    fit = read_json(run.fit)
    assert 3 <= len(fit["points"]) <= 4
    assert fit["search"]["ended_by"] in ("max_points", "tolerance")
    assert f"the search is done: {fit['search']['why']}" in answer.stdout
    assert "Search ended" in run.report.read_text(encoding="utf-8")


def test_status_and_report_speak_of_a_run(tmp_path: Path, smallest: list[str]):
    """A finished run can be asked for and its report written again, by the beginning of its name."""
    run = finished_run(tula(tmp_path, *smallest))
    status = tula(tmp_path, "status", run.path.name[:12])
    assert status.returncode == 0
    for words in ("profile/n001-b00032 attempt 1", "success", "trained: yes", str(run.path)):
        assert words in status.stdout
    run.report.unlink()
    assert tula(tmp_path, "report", str(run.path)).returncode == 0
    assert run.report.exists()


def test_a_sweep_runs_every_value_and_survives_a_failing_one(tmp_path: Path, smallest: list[str]):
    """Multirun makes one run a value; one that fails does not end the others."""
    (tmp_path / "mine.py").write_text("def net(**_):\n    raise ValueError('my own bug')\n")
    nets = "workload.model._target_=tula_hpc.ranks.workloads.small_cnn,mine.net,tula_hpc.ranks.workloads.small_cnn"
    answer = tula(tmp_path, *smallest, "-m", nets)
    assert answer.returncode == 1
    assert answer.stdout.count("run folder: ") == 2
    assert "my own bug" in answer.stderr


def test_a_mistake_in_one_run_of_a_sweep_is_told_before_the_first_begins(tmp_path: Path, smallest: list[str]):
    """As for one run: nothing is submitted, and the code is that of a wrong command."""
    answer = tula(tmp_path, *smallest, "-m", "training.lr=0.1,-1")
    assert answer.returncode == 2
    assert "training.lr is -1" in answer.stderr
    assert not (tmp_path / "runs").exists()


def test_a_finished_sweep_is_shown_whatever_could_go_wrong_now(tmp_path: Path, smallest: list[str]):
    """As one finished run is: nothing is to be done for it."""
    sweep = [*smallest, "until=choice", "-m", "training.lr=0.1,0.2"]
    assert tula(tmp_path, *sweep).returncode == 0
    again = tula(tmp_path, *sweep, "cluster.poll_interval_s=-1")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("run folder: ") == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [("os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11 (SIGSEGV)"), ("os._exit(7)", "with exit code 7")],
    ids=["signal", "exit"],
)
def test_a_process_that_ends_without_a_word_is_told_by_its_end(
    tmp_path: Path, smallest: list[str], body: str, words: str
):
    """Such as a crash in compiled code: what the system knows of it stands with the error and in the log."""
    (tmp_path / "mine.py").write_text(f"import os, signal\n\n\ndef net(**_):\n    {body}\n")
    answer = tula(tmp_path, *smallest, "workload.model._target_=mine.net")
    assert answer.returncode == 1
    assert words in answer.stderr
    (log,) = tmp_path.glob("runs/*/profile/*/attempt-1/rank-0000.log")
    assert words in log.read_text()


def test_what_is_deleted_of_a_finished_run_is_made_again(tmp_path: Path, smallest: list[str]):
    """Settings, plan and choice, without a measurement or a training."""
    run = finished_run(tula(tmp_path, *smallest))
    attempts = len(Journal(run.journal).state().attempts)
    for path in (run.selection, run.plan, run.config):
        path.unlink()
        again = tula(tmp_path, *smallest)
        assert finished_run(again).path == run.path
        assert path.exists()
        assert "trained 1 epochs" in again.stdout
    assert len(Journal(run.journal).state().attempts) == attempts


def test_a_run_whose_settings_were_edited_goes_on_nowhere(tmp_path: Path, smallest: list[str]):
    """What its folder holds are results of the settings it was begun with; the command writes those anew."""
    assert tula(tmp_path, *smallest, "until=choice").returncode == 0
    (config,) = tmp_path.glob("runs/*/config.yaml")
    whole = config.read_text()
    for spoilt in (whole.replace("lr: 0.05", "lr: 0.0001"), whole[: len(whole) // 2]):
        assert spoilt != whole
        config.write_text(spoilt)
        (config.parent / "untrained").unlink(missing_ok=True)
        answer = tula(tmp_path, "attach", config.parent.name)
        assert answer.returncode == 1
        assert "config.yaml is not whole, or was edited; delete it and give the command" in answer.stderr
    config.unlink()
    assert tula(tmp_path, *smallest, "until=choice").returncode == 0
    assert config.read_text() == whole


def running_ranks(folder: Path) -> list[str]:
    """Command lines of processes that work on a run below `folder`."""
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line and "tula_hpc.ranks.job" in line]


def test_a_killed_command_takes_its_ranks_along_and_goes_on(tmp_path: Path, smallest: list[str]):
    """After kill -9 in the training no process is left, and the same command ends it with one line an epoch."""
    arguments = [*smallest, "training.epochs=100", f"run_root={tmp_path}/runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tula_hpc", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: list(tmp_path.glob("runs/*/train/metrics.jsonl")))
        process.kill()
    wait_until(lambda: not running_ranks(tmp_path))
    run = finished_run(tula(tmp_path, *arguments))
    assert [line["epoch"] for line in run.read_metrics()] == list(range(1, 101))
    assert [a.verdict for a in Journal(run.journal).state().of("train")] == [Verdict.incomplete, Verdict.success]


def test_scaling_that_does_nothing_is_told(tmp_path: Path, smallest: list[str]):
    """Where the chosen batch is not larger than the one the rate was tuned for, the user reads that AGS is idle."""
    answer = tula(tmp_path, *smallest, "method=ags_measured", "method.small_batch=32")
    finished_run(answer)
    assert "adaptive gradient scaling has nothing to do at a global batch of 32" in answer.stdout


def test_a_model_that_fails_is_shown_with_its_own_error(tmp_path: Path, smallest: list[str]):
    """A bug in the user's model ends the run with that error and the way to its logs, without our traceback."""
    (tmp_path / "mine.py").write_text("def net(**_):\n    raise ValueError('my own bug')\n")
    answer = tula(tmp_path, *smallest, "workload.model._target_=mine.net")
    assert answer.returncode == 1
    assert "ValueError: my own bug" in answer.stderr
    assert "profile" in answer.stderr
    assert "Traceback" not in answer.stderr


UNUSED = """
import torch
from tula_hpc.ranks.workloads import small_cnn


class TwoHeads(torch.nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.net = small_cnn(1, 8, 10, 4)
        self.other = torch.nn.Linear(10, 2)

    def forward(self, images):
        return self.net(images)
"""


def test_a_model_with_unused_parameters_is_told_the_setting(tmp_path: Path, smallest: list[str]):
    """Without it several ranks fail: told by name, also where the choice is made among what is left; with it they do
    not."""
    (tmp_path / "heads.py").write_text(UNUSED)
    arguments = [*smallest, "grid.max_nodes=2", "workload.model._target_=heads.TwoHeads", "until=choice"]
    answer = tula(tmp_path, *arguments)
    run = finished_run(answer)
    assert "workload.find_unused_parameters=true" in answer.stdout
    assert "Left out, because profiling them failed: 1 candidate (n002-b00032)." in read_json(run.selection)["reason"]
    run = finished_run(tula(tmp_path, *arguments, "workload.find_unused_parameters=true"))
    assert {point["num_nodes"] for point in read_json(run.fit)["points"]} == {1, 2}


def test_samples_that_are_no_pairs_are_told(tmp_path: Path, smallest: list[str]):
    """As those of data sets whose samples are dicts."""
    (tmp_path / "samples.py").write_text(
        "import torch\n\n\ndef samples(**_):\n"
        "    return [{'image': torch.zeros(1, 8, 8), 'label': 1} for _ in range(256)]\n"
    )
    answer = tula(tmp_path, *smallest, "workload.dataset._target_=samples.samples")
    assert answer.returncode == 1
    assert "workload.dataset gave a dict with image, label for a sample" in answer.stderr


def test_commands_work_in_a_folder_that_is_gone(tmp_path: Path, smallest: list[str]):
    """Where they do not need it; else they say so."""
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os; os.rmdir({str(gone)!r}); import runpy; runpy.run_module('tula_hpc', run_name='__main__')"

    def tula_from_nowhere(*arguments: str) -> subprocess.CompletedProcess[str]:
        gone.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, cwd=gone, env=environment, capture_output=True, text=True, check=False)

    assert "how many nodes" in tula_from_nowhere("--help").stdout
    answer = tula_from_nowhere("list")
    assert answer.returncode == 1
    assert "the folder you are in: No such file or directory" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_two_controllers_do_not_share_a_run(tmp_path: Path, smallest: list[str]):
    """A second command on a run that is being worked on leaves and says who works on it."""
    run = finished_run(tula(tmp_path, *smallest))
    run.report.unlink()
    with controlling(run):
        answer = tula(tmp_path, *smallest)
    assert answer.returncode == 3
    assert f"another tula_hpc already works on {run.path}: process {os.getpid()}" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stat"], "there are plan, list, status"),
        (["status"], "status RUN"),
        (["status", "nothing"], "is not a run folder"),
        (["settings", "grit"], "no setting begins with"),
        (["grid.max_node=3"], "did you mean grid.max_nodes"),
        (["--config-dir", "nowhere"], "not a folder"),
        (["training.epochs=1", "--config-dir"], "not a folder"),
        (["training.epochs=1", "plan"], "'plan' is not key=value; a command, such as plan, stands first"),
    ],
)
def test_a_wrong_command_is_answered_in_one_message(tmp_path: Path, arguments: list[str], words: str):
    """Users' mistakes end with a sentence and no traceback, and leave nothing behind."""
    answer = tula(tmp_path, *arguments)
    assert answer.returncode in (1, 2)
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_asked_for_help_gives_it(tmp_path: Path):
    """Behind a command as well as alone."""
    assert tula(tmp_path, "attach", "--help").stdout == tula(tmp_path, "--help").stdout


def test_help_shows_every_command_and_every_choice(tmp_path: Path):
    """--help names the commands, the groups and the experiments; `settings` the keys with their meaning."""
    shown = tula(tmp_path, "--help").stdout
    for words in (
        "plan",
        "status RUN",
        "attach RUN",
        "logs RUN",
        "cancel RUN",
        "list",
        "report RUN",
        "settings",
        "controller",
        "resnet50_imagenet",
        "--config-dir",
        "pricing",
        "lrs_sqrt     learning rate with the square root of the batch",
    ):
        assert words in shown
    assert "grid.min_global_batch = 32   Smallest batch over all ranks" in tula(tmp_path, "settings", "grid").stdout


def test_plan_without_slurm_submits_nothing(tmp_path: Path, smallest: list[str]):
    """The plan of a local run names candidates, node-hours and cost, and leaves no trace."""
    answer = tula(tmp_path, "plan", *smallest)
    assert answer.returncode == 0
    for words in (
        "1 candidates",
        "node-hours",
        "$",
        "full (this plan): 1 point",
        "adaptive: 1 point",
        "nothing was submitted",
    ):
        assert words in answer.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("experiment", "size", "largest"),  # the two with half a GB of gradients have one candidate
    [
        ("resnet50_imagenet", 32, 4),
        ("vgg11_cifar100", 32, 2),
        ("alexnet_caltech101", 64, 2),
        ("mobilenetv3_caltech256", 32, 4),
    ],
)
def test_each_experiment_of_the_paper_completes_the_loop(tmp_path: Path, experiment: str, size: int, largest: int):
    """With synthetic data of a small size every experiment goes from profiling to a report."""
    run = finished_run(
        tula(
            tmp_path,
            f"+experiment={experiment}",
            "cluster=local",
            "data=synthetic",
            f"workload.input_shape=[3,{size},{size}]",
            "data.train_samples=16",
            "data.test_samples=10",
            "grid={min_nodes: 2, max_nodes: 2, min_global_batch: 4, min_batch_per_rank: 2}",
            f"grid.max_batch_per_rank={largest}",
            "search={warmup_steps: 1, timed_steps: 3, compute_steps: 3}",
            "training.epochs=1",
            "method.small_batch=4",
        )
    )
    assert read_json(run.selection)["global_batch"] == read_json(run.train_result)["global_batch"]
    assert run.report.exists()


def readme_block(start: str) -> str:
    """The code block of the README whose first line begins with `start`."""
    blocks = re.findall(
        r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (block,) = [b for b in blocks if b.startswith(start)]
    return block


def test_bring_your_own_as_the_readme_says(tmp_path: Path):
    """The README's example of a model, data set and loss of one's own works as printed."""
    (tmp_path / "mine.py").write_text(readme_block("# mine.py"))
    for name, start in (("workload", "# conf/workload/spirals.yaml"), ("experiment", "# @package _global_")):
        (tmp_path / "conf" / name).mkdir(parents=True)
        (tmp_path / "conf" / name / "spirals.yaml").write_text(readme_block(start))
    command = readme_block("python -m tula_hpc --config-dir conf +experiment=spirals").split()[3:]
    run = finished_run(tula(tmp_path, *command, "cluster=local"))
    assert read_json(run.train_result)["test_top1"] > 80


def test_data_that_is_missing_is_not_looked_for_in_a_job(tmp_path: Path):
    """Missing data is told before anything is submitted, with the three ways out."""
    answer = tula(tmp_path, "+experiment=vgg11_cifar100", "cluster=local", "data.root=/nowhere")
    assert answer.returncode == 2
    for words in ("/nowhere", "data.root", "data.download=true", "data=synthetic"):
        assert words in answer.stderr


DOWNLOADING = """
import torch


def squares(root, train, download=False):
    file = root / "squares.txt"
    if download:
        file.write_text("300")
    numbers = torch.arange(float(file.read_text())).unsqueeze(1)
    return torch.utils.data.TensorDataset(numbers / 300, (numbers[:, 0] > 150).long())


def net():
    return torch.nn.Linear(1, 2)
"""


def test_a_missing_data_set_is_fetched_only_on_request(tmp_path: Path, smallest: list[str]):
    """data.download=true fetches on this machine before anything is submitted; without it the run is refused."""
    (tmp_path / "mine.py").write_text(DOWNLOADING)
    (tmp_path / "conf" / "workload").mkdir(parents=True)
    (tmp_path / "conf" / "workload" / "squares.yaml").write_text(
        "name: squares\nmodel: {_target_: mine.net}\ndataset: {_target_: mine.squares}\n"
        "train_samples: 300\ntest_samples: 300\ndata_files: [squares.txt]\n"
    )
    arguments = ["--config-dir", "conf", *smallest, "workload=squares", "data.root=sets"]
    refused = tula(tmp_path, *arguments)
    assert refused.returncode == 2
    assert "data.download=true" in refused.stderr
    assert not (tmp_path / "sets").exists()
    finished_run(tula(tmp_path, *arguments, "data.download=true"))
    assert (tmp_path / "sets" / "squares.txt").exists()


FETCHING = """
import torch


def archived(root, train, download=False):
    (root / "set").mkdir()
    (root / "set" / "part").write_text((root / "archive").read_text())
    return torch.utils.data.TensorDataset(torch.zeros(1))


def interrupted(root, train, download=False):
    (root / "set").mkdir()
    raise KeyboardInterrupt
"""


def test_a_data_set_is_there_whole_or_not_at_all(
    tmp_path: Path, tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
):
    """An interrupted fetch leaves nothing; one that uses an archive leaves what is in it, also where another run has
    fetched it meanwhile."""
    (tmp_path / "fetching_sets.py").write_text(FETCHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    root = tmp_path / "sets"
    settings = tiny_settings(f"data.root={root}")
    settings.workload.dataset = {"_target_": "fetching_sets.interrupted"}
    with pytest.raises(KeyboardInterrupt):
        download_dataset(settings)
    assert list(root.iterdir()) == []
    settings.workload.dataset = {"_target_": "fetching_sets.archived"}
    (root / "archive").write_text("from the archive")
    for _ in range(2):
        download_dataset(settings)
        assert sorted(path.name for path in root.iterdir()) == ["archive", "set"]
        assert (root / "set" / "part").read_text() == "from the archive"


def test_the_wheel_holds_the_configuration(tmp_path: Path, tiny_settings: Callable[..., Settings]):
    """What `pip install` brings without the repository has conf/ inside and composes from there."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--retries", "10", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=900)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    for file in (ROOT / "conf").rglob("*.yaml"):
        assert f"tula_hpc/{file.relative_to(ROOT)}" in names
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = (
        "from tula_hpc.config import conf_dir; from tula_hpc.composition import compose; "
        "print(conf_dir(), compose(['+experiment=quickstart']).name)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == [str(tmp_path / "site" / "tula_hpc" / "conf"), "quickstart"], answer.stderr
