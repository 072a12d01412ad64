from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tula_hpc import imports
from tula_hpc.checks import check
from tula_hpc.composition import compose, describe_settings, run_root_in
from tula_hpc.config import (
    DataKind,
    NodeType,
    Settings,
    conf_dir,
    from_plain,
    to_plain,
)
from tula_hpc.errors import ConfigError
from tula_hpc.signatures import measurement_signature, signature

EXPERIMENTS = sorted(p.stem for p in (conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_passes_its_check(name: str):
    """Every experiment in conf/ is valid as it stands, apart from the data being there."""
    settings = compose([f"+experiment={name}", "data=synthetic"])
    assert check(settings) == []
    assert settings.name == name


@pytest.mark.parametrize(
    ("name", "lr", "weight_decay", "milestones", "decay"),
    [
        ("resnet50_imagenet", 0.05, 5e-4, [100, 150, 200], 0.1),
        ("vgg11_cifar100", 0.01, 5e-4, [50, 75, 100], 0.2),
        ("alexnet_caltech101", 0.01, 5e-4, [25, 50, 75], 0.1),
        ("mobilenetv3_caltech256", 0.01, 1e-4, [40, 80], 0.1),
    ],
)
def test_the_papers_experiments_have_its_hyper_parameters(
    name: str, lr: float, weight_decay: float, milestones: list[int], decay: float
):
    """The four experiments of the paper use section IV-B's optimiser, schedule and search space."""
    s = compose([f"+experiment={name}"])
    assert (s.training.lr, s.training.weight_decay, s.training.milestones, s.training.lr_decay) == (
        lr,
        weight_decay,
        milestones,
        decay,
    )
    assert (s.training.momentum, s.training.warmup_epochs, s.method.delta_threshold) == (0.9, 5.0, 0.5)
    assert (s.grid.min_nodes, s.grid.max_nodes, s.grid.min_global_batch) == (2, 16, 32)


def test_all_problems_are_reported_at_once():
    """A user with four mistakes reads about four mistakes."""
    with pytest.raises(ConfigError) as caught:
        compose(
            ["+experiment=quickstart", "grid.max_node=2", "objective=foo", "search.timed_steps=x", "training.lr=-1"]
        )
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("objective=fastest", "known are cost, knee, time, time_to_result"),
        ("+experiment=resnet", "resnet50_imagenet"),
        ("grid.max_node=2", "did you mean grid.max_nodes"),
        ("training.precision=fp8", "expected one of [fp32, tf32, bf16]"),
        ("search.timed_steps=many", "could not be converted to Integer"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(override: str, answer: str):
    """Whatever is misspelt, the message says what would have been right."""
    extra = [] if override.startswith("+experiment") else ["+experiment=quickstart"]
    with pytest.raises(ConfigError) as caught:
        compose([*extra, override])
    assert answer in str(caught.value)
    assert override in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("experiment/e.yaml", "# @package _global_\nname: e\ntraining: {epoch: 3}\n", "did you mean training.epochs"),
        ("experiment/e.yaml", "defaults:\n  - override /workload: digits_cnn\nname: e\n", "# @package _global_"),
        ("cluster/e.yaml", "partitions: x\n", "did you mean cluster.partition"),
        ("cluster/e.yaml", "name: {\n", "line 2"),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_is_found_in_that_file(tmp_path: Path, file: str, text: str, words: str):
    """A typo in a user's YAML names the file and the right key, and nothing else is blamed."""
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    choice = "+experiment=e" if file.startswith("experiment") else "cluster=e"
    base = [] if choice.startswith("+") else ["+experiment=quickstart"]
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), *base, choice])
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]
    assert "e.yaml" in caught.value.problems[0]


@pytest.mark.parametrize("override", ["+training.epoch=3", "++grid.max_node=9", "+foo=1"])
def test_settings_that_do_not_exist_cannot_be_added(override: str):
    """`+key=value` does not smuggle in a setting that nothing reads."""
    with pytest.raises(ConfigError, match="did you mean"):
        compose(["+experiment=quickstart", override])


@pytest.mark.parametrize(
    ("override", "quoted"),
    [
        ("run_root=~/xx", """'run_root="~/xx"'"""),
        ("data.root=/tmp/größe", """'data.root="/tmp/größe"'"""),
        ("run_root=/tmp/a=b", """'run_root="/tmp/a=b"'"""),
        ("pricing.billing_weights=CPU=1.0,Mem=0.25G", """'pricing.billing_weights="CPU=1.0,Mem=0.25G"'"""),
        ("cluster.srun_args=[--container-image=a]", "between quotes of its own"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_shown_in_quotes(override: str, quoted: str):
    """As a shell takes it; what is shown is taken, and other mistakes are told beside it."""
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=quickstart", override, "training.lr=much"])
    first, second = caught.value.problems[:2]
    assert first.startswith(f"{override}: ")
    assert quoted in first
    assert "training.lr" in second
    if quoted.startswith("'"):
        key, _, value = override.partition("=")
        settings: Any = compose(["+experiment=quickstart", *shlex.split(quoted)])
        for part in key.split("."):
            settings = getattr(settings, part)
        assert settings == value


@pytest.mark.parametrize("given", ["a b/ü", "'a b/ü'", '"a b/ü"'])
def test_verbs_take_a_run_root_as_hydra_does(given: str):
    assert run_root_in(["RUN", f"run_root={given}"]) == (["RUN"], "a b/ü")


def test_a_shells_variable_survives_what_ranks_are_sent(tiny_settings: Callable[..., Settings]):
    r"""`\${HOME}` is Hydra's way to say `${HOME}`; ranks and `attach` read it as it was composed."""
    settings = tiny_settings(r"cluster.setup=['export A=\${HOME}/bin', 'echo $A']")
    assert settings.cluster.setup[0] == "export A=${HOME}/bin"
    assert from_plain(to_plain(settings)) == settings


def test_free_keys_can_be_added():
    """sbatch's options are the site's own, and are not in the schema."""
    assert compose(["+experiment=quickstart", "+cluster.sbatch.exclusive=true"]).cluster.sbatch == {"exclusive": True}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr=0", ["training.lr is 0", "greater than 0"]),
        ("method.scale_floor=-1", ["method.scale_floor is -1", "0 or greater"]),
        ("grid.min_nodes=8", ["grid.min_nodes is 8", "grid.max_nodes=2"]),
        ("search.memory_fraction=1.5", ["search.memory_fraction is 1.5", "(0, 1]"]),
        ("name=a/b", ["name is 'a/b'", "'/'"]),
        ("cluster.kind=slurm name=%j", ["/%j'", "puts something else for %j"]),
        ("training.seed=-1", ["training.seed is -1", "[0, 2^63)"]),
        ("search.max_seconds=1000", ["cluster.profile_time_limit_min is 15", "search.max_seconds=1000"]),
        ("cluster.hang_timeout_min=0.1", ["cluster.hang_timeout_min is 0.1", "search.max_seconds"]),
        ("+cluster.sbatch.job-name=mine", ["cluster.sbatch has the key 'job-name'", "found again"]),
        ("+cluster.sbatch.mem=1G", ["'mem'", "set cluster.memory_gib"]),
        ("training.lr=inf", ["training.lr is inf", "finite"]),
        ("method.scale_floor=2", ["method.scale_floor is 2", "at most 1"]),
        ("method.scale_cap=0.5", ["method.scale_cap is 0.5", "at least 1"]),
        ("method.scale_smoothing=1", ["method.scale_smoothing is 1", "[0, 1)"]),
        ("method.refresh_steps=0", ["method.refresh_steps is 0", "greater than 0"]),
        ("training.milestones=[-1]", ["training.milestones", "rising"]),
        ("workload.input_shape=[0]", ["workload.input_shape is [0]"]),
        ("run_root=", ["run_root is ''"]),
        ("training.milestones=[9,3]", ["training.milestones", "rising"]),
        ("grid.min_global_batch=250", ["the grid is empty", "grid.min_global_batch=250", "widen"]),
        ("workload.model._target_=torchvision.modles.resnet18", ["workload.model._target_", "'modles'", "models"]),
        ("workload.model._target_=nowhere.net", ["no module 'nowhere'"]),
        ("workload.data_files=[absent]", ["data.root", "absent", "data.download=true", "data=synthetic"]),
        ("pricing.price_per_node_hour=0", ["pricing.price_per_node_hour is 0"]),
        ("objective.deadline_h=0", ["objective.deadline_h is 0", "greater than 0"]),
        ("objective.budget=-3", ["objective.budget is -3"]),
        ("grid.min_nodes=2 objective.max_nodes=1", ["grid.min_nodes is 2", "objective.max_nodes=1", "raise"]),
        ("pricing=spot pricing.interruptions_per_node_hour=0", ["pricing.interruptions_per_node_hour is 0"]),
        ("pricing=spot pricing.checkpoint_interval_min=0", ["pricing.checkpoint_interval_min is 0"]),
        ("pricing=spot pricing.restart_min=-1", ["pricing.restart_min is -1", "0 or greater"]),
        ("pricing=service_units cluster=local", ["pricing.billing_weights is null", "no partition to ask", "CPU=1.0"]),
        ("pricing=service_units pricing.billing_weights='Mem=1'", ["pricing.billing_weights is 'Mem=1'", "Mem=1G"]),
        ("pricing=service_units pricing.billing_weights='CPU=0'", ["charge nothing", "must be positive"]),
        ("+objective.queue_wait_min={four: 5}", ["objective.queue_wait_min", "'four'", "numbers of nodes"]),
        ("+objective.queue_wait_min={4: -1}", ["objective.queue_wait_min.4 is -1", "0 or greater"]),
        ("+objective.queue_wait_min.4=soon", ["objective.queue_wait_min.4 is 'soon'", "minutes"]),
        ("method.scale_cap=inf", ["method.scale_cap is inf", "finite", "null"]),
        ("method.scale_cap=nan", ["method.scale_cap is nan"]),
        ("training.lr=nan", ["training.lr is nan"]),
        ("+workload.model.clip=inf", ["workload.model.clip is inf", "finite"]),
        ("training.momentum=1.5", ["training.momentum is 1.5", "below 1"]),
    ],
)
def test_each_rule_names_key_value_limit_and_way_out(
    tiny_settings: Callable[..., Settings], override: str, words: list[str]
):
    """A broken rule is told in one sentence that holds what is needed to mend it."""
    (problem,) = check(tiny_settings(*re.split(r" (?=\w+[.=])", override)))
    for word in words:
        assert word in problem


def test_more_cores_for_a_rank_than_there_are_is_refused(tiny_settings: Callable[..., Settings]):
    """On this machine; another may have them."""
    (problem,) = check(tiny_settings("cluster=local", "cluster.cpus_per_rank=4000"))
    assert re.fullmatch(r"cluster.cpus_per_rank is 4000 and this machine has \d+ cores; lower it", problem)
    assert check(tiny_settings("cluster=slurm", "cluster.cpus_per_rank=4000")) == []


def test_more_local_gpus_than_there_are_is_refused(tiny_settings: Callable[..., Settings]):
    """A grid that needs more GPUs than this machine has is not started."""
    (problem,) = check(
        tiny_settings("cluster.gpus_per_node=64", "grid.max_global_batch=null", "grid.min_batch_per_rank=1")
    )
    assert "cluster.gpus_per_node=64: that needs 128 GPUs" in problem


def test_check_changes_nothing(tiny_settings: Callable[..., Settings]):
    """Checking only complains."""
    settings = tiny_settings("training.lr=-1")
    before = to_plain(settings)
    check(settings)
    assert to_plain(settings) == before


def test_settings_survive_the_run_folder(tiny_settings: Callable[..., Settings]):
    """What is written as plain values reads back as the same settings."""
    settings = tiny_settings("data=synthetic", "method.granularity=model")
    assert from_plain(to_plain(settings)) == settings
    assert settings.data.kind is DataKind.synthetic


def test_queue_waits_may_be_given_in_either_form(tiny_settings: Callable[..., Settings]):
    """A table of waits and one wait at a time are the same settings, in memory and in the run folder."""
    table = tiny_settings("objective=time_to_result", "+objective.queue_wait_min={4: 120}")
    single = tiny_settings("objective=time_to_result", "+objective.queue_wait_min.4=120")
    assert check(table) == check(single) == []
    assert signature(table) == signature(single) == signature(from_plain(to_plain(table)))


def test_the_signature_ignores_what_does_not_change_the_result(tiny_settings: Callable[..., Settings]):
    """Time limits, polling and the account leave the run folder the same; the learning rate does not."""
    base = signature(tiny_settings())
    assert signature(tiny_settings("cluster.profile_time_limit_min=3", "cluster.account=a", "run_root=x")) == base
    assert signature(tiny_settings("profiling=packed")) == base
    assert signature(tiny_settings("training.lr=0.02")) != base


def test_changed_code_of_ones_own_is_another_run(
    tiny_settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Editing the file of a model makes a new run and new measurements; installed code does not count."""
    monkeypatch.syspath_prepend(tmp_path)
    settings = tiny_settings("workload.model._target_=mycode.net")
    signatures = set()
    for text in ("def net(): ...\n", "def net(): return 1\n"):
        (tmp_path / "mycode.py").write_text(text)
        signatures.add((signature(settings), measurement_signature(settings)))
    assert len({run for run, _ in signatures}) == len({measured for _, measured in signatures}) == 2
    monkeypatch.setattr(imports.sys, "prefix", str(tmp_path))  # a project inside its virtual environment
    assert imports.own_source("mycode.net") == tmp_path / "mycode.py"
    assert imports.own_source("json.dumps") is None
    assert imports.own_source("torchvision.models.resnet18") is None
    assert imports.own_source("tula_hpc.ranks.workloads.digits") is None


def test_measurements_are_shared_between_objectives(tiny_settings: Callable[..., Settings]):
    """Objective, prices, epochs and grid do not change what a step takes; the model does."""
    base = measurement_signature(tiny_settings())
    same = tiny_settings(
        "objective=cost", "pricing=memory", "training.epochs=9", "grid.max_nodes=1", "data.train_samples=200"
    )
    assert measurement_signature(same) == base
    assert measurement_signature(tiny_settings("workload.model.width=8")) != base


def test_every_setting_says_what_it_means_unless_its_name_does():
    """The list of settings covers every field of the schema, and of a type of node."""
    lines = describe_settings()
    fields = sum(
        len(dataclasses.fields(getattr(Settings(), f.name)))
        if dataclasses.is_dataclass(getattr(Settings(), f.name))
        else 1
        for f in dataclasses.fields(Settings)
    )
    assert len(lines) == fields + len(dataclasses.fields(NodeType))
    assert any(line.startswith("cluster.node_types.NAME.max_nodes = None   Most nodes of this type") for line in lines)
    assert any(line.startswith("grid.max_batch_per_rank = 1024   Largest batch") for line in lines)


def test_a_site_folder_of_ones_own_adds_choices(tmp_path: Path):
    """--config-dir adds a user's cluster file beside the shipped ones."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mysite.yaml").write_text("kind: slurm\npartition: fast\n")
    settings = compose(["--config-dir", str(tmp_path), "+experiment=fashion_mnist", "cluster=mysite"])
    assert settings.cluster.partition == "fast"


@pytest.mark.parametrize(
    "target", ["torchvision.models.resnet50", "torch.nn.CrossEntropyLoss", "json.dumps", "math.sqrt"]
)
def test_importable_targets_raise_no_objection(target: str):
    """A path that can be imported is not complained about, and resolves."""
    assert imports.why_not_importable(target) is None
    assert callable(imports.resolve(target))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere.net", "no module 'nowhere'"),
        ("tula_hpc.ranks.workloads.small_cn", "it has small_cnn"),
        ("json.decoder", "a module, not a callable"),
        ("resnet50", "not an import path"),
        ("os.system('x')", "not an import path"),
    ],
)
def test_targets_that_cannot_be_imported_are_found_without_importing(target: str, reason: str):
    """A misspelt import path is told before any job waits for it."""
    assert reason in (imports.why_not_importable(target) or "")


@pytest.mark.parametrize(
    "text", ["def net(): ...\n".encode("utf-8-sig"), "# coding: latin-1\ndef net(): 'ü'\n".encode("latin-1")]
)
def test_a_file_is_read_as_python_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes):
    """Editors put a mark before UTF-8, and a file may name another coding."""
    (tmp_path / "marked.py").write_bytes(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert imports.why_not_importable("marked.net") is None


def test_a_module_that_fails_inside_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An import error inside a user's module is shown as it is."""
    (tmp_path / "brokenmodule.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        imports.resolve("brokenmodule.net")
