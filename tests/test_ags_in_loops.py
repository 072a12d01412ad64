"""Adaptive gradient scaling as an optimizer in anybody's loop: parameters, precision, state, hooks, cost."""

import copy
import functools
import io
import math
import pickle

import pytest
import torch
from scaled_nets import BATCH, SCALES, data, sgd, small_net, train, tula, with_gradients
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tula_hpc.optim.ags import TulaOptimizer

torch.set_num_threads(1)


def test_frozen_unused_and_tied_parameters():
    """Parameters without gradient are skipped, and a weight that is used twice is scaled once."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
            self.outer.weight = self.inner.weight
            self.outer.bias.requires_grad_(False)

        def forward(self, inputs):
            return self.outer(self.inner(inputs))

    model = Tied()
    optimizer = tula(model, gate="off")
    train(model, optimizer, 1, refresh_every=1)
    assert set(optimizer.state_dict()["ags"]["scales"]) == {0, 1}  # inner.weight and inner.bias
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 1)
    assert torch.equal(before["unused.weight"], model.unused.weight)
    assert torch.equal(before["outer.bias"], model.outer.bias)
    assert not torch.equal(before["inner.weight"], model.inner.weight)


def test_a_parameter_given_twice_is_scaled_once():
    """Listing a tied weight twice, which torch only warns of, does not square its scale."""
    weight = nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        inner = SGD([weight, weight], lr=1.0)
    optimizer = TulaOptimizer(inner, global_batch=4, static_scale=3.0, gate="off")
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.grad.item() == 3.0


@pytest.mark.parametrize("build", [TulaOptimizer, TulaOptimizer.paper])
def test_channels_last_weights_keep_their_strides(build):
    """Gradients and scales have the memory layout of the weights, so that no step is slowed down."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(
        memory_format=torch.channels_last
    )
    optimizer = build(sgd(model.parameters()), global_batch=BATCH, small_batch=4)
    inputs = torch.randn(BATCH, 3, 8, 8).to(memory_format=torch.channels_last)
    targets = torch.randint(4, (BATCH,))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
    weight = model[0].weight
    strides = weight.stride()
    assert strides == (27, 1, 9, 3)
    assert weight.grad.stride() == strides
    assert optimizer.state_dict()["ags"]["scales"][0].stride() == strides


# Being an optimizer


@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}, {"gate": "lagged"}, {"static_scale": 2.0}])
def test_a_step_never_waits_for_the_device(options, monkeypatch):
    """No value is read on the host during a step, whichever the gate and the granularity."""
    model = small_net()
    optimizer = tula(model, **options)
    train(model, optimizer, 2, refresh_every=1)

    def forbidden(name, *args, **kwargs):
        raise AssertionError(f"Tensor.{name} waits for the device")

    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with monkeypatch.context() as patch:
        for name in ("item", "__bool__", "__float__", "__int__", "__index__", "cpu", "tolist", "numpy"):
            patch.setattr(torch.Tensor, name, functools.partial(forbidden, name))
        optimizer.step()


class CountOperators(TorchDispatchMode):
    """Counts the calls that launch kernels: whatever is no view, no allocation and no mark of a profiler."""

    NONE = ("view", "as_strided", "unbind", "split", "select", "slice", "detach", "empty", "record", "alias", "expand")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1]
        if not name.lstrip("_").startswith(self.NONE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"gate": "off"}, 1),
        ({"gate": "off", "granularity": "tensor"}, 1),
        ({"gate": "off", "granularity": "global"}, 2),
        ({}, 11),
        ({"granularity": "tensor"}, 11),
        ({"granularity": "global"}, 11),
    ],
)
def test_a_step_costs_a_handful_of_operators(options, most):
    """Whatever the number of tensors, and no norm is taken where no gate asks for it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(20)], nn.Linear(6, 3))
    optimizer = TulaOptimizer(SGD(model.parameters(), lr=0.1, fused=True), global_batch=16, small_batch=4, **options)
    train(model, optimizer, 2, refresh_every=1)
    counts = []
    for one in (optimizer.optimizer, optimizer):
        with CountOperators() as counted:
            one.step()
        counts.append(counted.names)
    assert len(counts[1]) - len(counts[0]) <= most, counts[1]


def test_a_compiled_model_is_refreshed():
    """The sub-batch runs through the module inside `torch.compile`'s wrapper, without compiling it again."""
    model = torch.compile(small_net(), backend="eager")
    optimizer = tula(model, gate="off")
    train(model, optimizer, 2, refresh_every=1)
    assert optimizer.statistics()["mean_scale"] > 1
    plain = small_net()
    train(plain, other := tula(plain, gate="off"), 2, refresh_every=1)
    assert other.statistics()["mean_scale"] == pytest.approx(optimizer.statistics()["mean_scale"])


@pytest.mark.parametrize("gate", ["current", "lagged", "off"])
def test_a_compiled_training_step_is_scaled_as_a_plain_one_is(gate):
    """Forward, backward, refresh and step inside one compiled function: what is counted and held is not lost."""

    def trained(compiled):
        torch.compiler.reset()
        model = small_net()
        optimizer = tula(model, gate=gate, refresh_every=2)

        def one_step(inputs, targets):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            if optimizer.refresh_due:
                optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

        call = torch.compile(one_step, backend="eager") if compiled else one_step
        for step in range(5):
            call(*data(step))
        return nn.utils.parameters_to_vector(model.parameters()), optimizer.statistics()

    (weights, found), (expected, told) = trained(True), trained(False)
    assert found == pytest.approx(told)
    assert found["scaled_fraction"] > 0
    torch.testing.assert_close(weights, expected)


def test_reentrant_checkpoints_are_refused():
    """Where no trainable parameter lies before one, torch does not say that it hides what is inside."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
            self.reentrant = True

        def forward(self, inputs):
            inputs = inputs.detach().requires_grad_()
            return self.head(checkpoint(self.body, inputs, use_reentrant=self.reentrant))

    model = Net()
    optimizer = tula(model)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(ValueError, match="use_reentrant=False"):
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    model.reentrant = False
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] != 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("granularity", list(SCALES))
def test_other_precisions_are_scaled(dtype, granularity):
    """Scales stay fp32, gradients keep their precision."""
    model = small_net().to(dtype)
    optimizer = tula(model, gate="off", granularity=granularity)
    inputs, targets = data()
    for _ in range(2):
        nn.functional.cross_entropy(model(inputs.to(dtype)), targets).backward()
        optimizer.refresh(model, nn.functional.cross_entropy, inputs.to(dtype), targets)
        optimizer.step()
    assert all(p.grad.dtype == dtype for p in model.parameters())
    assert optimizer.statistics()["scaled_fraction"] == 0.5


def test_variability_can_be_kept_and_read_later():
    """The tensor handed out is not overwritten by later steps."""
    optimizer, step = with_gradients([0.0], static_scale=2.0)
    assert optimizer.variability is None
    kept = []
    for square in (4.0, 5.0, 7.5):
        step([math.sqrt(square)])
        kept.append(optimizer.variability)
    assert torch.stack(kept).tolist() == pytest.approx([math.inf, 0.25, 0.5])


@pytest.mark.parametrize("options", [{"gate": "off"}, {"gate": "off", "static_scale": 2.0}, {}])
def test_statistics_are_finite(options):
    """What is not known, or infinite as after the first step, is left out of a log."""
    model = small_net()
    optimizer = tula(model, **options)
    for _ in range(3):
        assert all(math.isfinite(value) for value in optimizer.statistics().values())
        train(model, optimizer, 1, refresh_every=1)
    assert ("norm" in optimizer.statistics()) == (not options)


FRESH = {"gate": "off", "scale_smoothing": 0.9, "refresh_every": 3, "s_min": 1.0}


@pytest.mark.parametrize(
    "options",
    [{}, *({"granularity": name} for name in list(SCALES)[1:]), *({"granularity": name, **FRESH} for name in SCALES)],
)
def test_save_reload_replay_gives_the_same_weights(options):
    """Training goes on after a restart as if there had been none, read back without unpickling code."""
    model = small_net()
    optimizer = tula(model, **options)
    train(model, optimizer, 5, refresh_every=3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, 5, first=5, refresh_every=3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = small_net(seed=1)
    model.load_state_dict(saved["model"])
    fresh = tula(model, **options)
    fresh.load_state_dict(saved["optimizer"])
    for a, b in zip(train(model, fresh, 5, first=5, refresh_every=3), expected, strict=True):
        assert torch.equal(a, b)
    assert fresh.statistics() == optimizer.statistics()
    assert fresh.refresh_due == optimizer.refresh_due
    assert 0 < fresh.statistics()["scaled_fraction"] < 1


def test_an_only_refresh_is_not_due_again_after_a_restart():
    """Where `first_refresh` is given alone; a checkpoint of before it asks for it still."""
    model = small_net()
    optimizer, fresh = (tula(model, first_refresh=1) for _ in range(2))
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1, refresh_every=1)
    fresh.load_state_dict(optimizer.state_dict())
    assert not fresh.refresh_due
    fresh.load_state_dict(before)
    assert fresh.refresh_due


@pytest.mark.parametrize("change", [{"global_batch": 32}, {"small_batch": 2}, {"granularity": "tensor"}])
def test_a_state_of_another_geometry_drops_norm_and_scale(change):
    """A relaunch at another batch starts with scale 1, yet keeps the momentum and the count of steps."""
    model = small_net()
    optimizer = tula(model)
    train(model, optimizer, 3, refresh_every=1)
    other = tula(model, **change)
    other.load_state_dict(optimizer.state_dict())
    assert set(other.statistics()) == {"mean_scale", "scaled_fraction"}
    assert other.statistics()["mean_scale"] == 1.0
    assert other.state_dict()["ags"]["steps"] == 3
    momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
    torch.testing.assert_close([s["momentum_buffer"] for s in other.state.values()], momentum, rtol=0, atol=0)


@pytest.mark.parametrize("saved_by", ["plain", "wrapped"])
@pytest.mark.filterwarnings("ignore:This is the state of a plain optimizer")
def test_what_is_left_unscaled_is_not_the_states_to_say(saved_by):
    """A group with ags=False stays so when a state is loaded that knows of none, and scales of it are given up."""

    def build(unscaled):
        model = small_net()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        if unscaled:
            groups[1]["ags"] = False
        return model, TulaOptimizer(SGD(groups, lr=0.1), global_batch=BATCH, small_batch=4, gate="off")

    model, before = build(unscaled=False)
    train(model, before, 2, refresh_every=1)
    model, optimizer = build(unscaled=True)
    optimizer.load_state_dict(before.optimizer.state_dict() if saved_by == "plain" else before.state_dict())
    assert [group.get("ags", True) for group in optimizer.param_groups] == [True, False]
    assert optimizer.mean_scale == 1.0


def test_resuming_before_the_first_refresh_keeps_its_time():
    """Also where nothing was done yet, and where it lies further away than the usual distance."""
    model = small_net()
    optimizer = tula(model, refresh_every=2, first_refresh=6)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 5)
    resumed = tula(model, refresh_every=2, first_refresh=6)
    resumed.load_state_dict(optimizer.state_dict())
    assert not resumed.refresh_due
    train(model, resumed, 1)
    assert resumed.refresh_due


def test_an_only_refresh_is_due_again_for_another_batch():
    """What it measured was dropped with the old one."""
    model = small_net()
    optimizer = tula(model, first_refresh=0)
    train(model, optimizer, 1, refresh_every=1)
    assert not optimizer.refresh_due
    optimizer.set_batch(2 * BATCH)
    assert optimizer.refresh_due


def test_a_parameter_put_in_the_place_of_another_is_scaled():
    """As in training that adds and removes points of a scene: the group's list stays, and what it holds changes."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = TulaOptimizer(SGD([weight], lr=1.0), global_batch=4, static_scale=3.0, gate="off")
    weight.grad = torch.ones(2)
    optimizer.step()
    other = nn.Parameter(torch.zeros(2))
    optimizer.param_groups[0]["params"][0] = other
    other.grad = torch.ones(2)
    optimizer.step()
    assert other.tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("granularity", ["element", "channel", "tensor", "global"])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(granularity, default):
    """Scales are fp32 whatever new tensors are."""
    before = torch.get_default_dtype()
    model = small_net()
    optimizer = tula(model, granularity=granularity, gate="off")
    torch.set_default_dtype(default)
    try:
        inputs, targets = data()
        inputs = inputs.float()
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
            optimizer.step()
        scales = optimizer.state_dict()["ags"]["scales"].values()
    finally:
        torch.set_default_dtype(before)
    assert {scale.dtype for scale in scales} == {torch.float32}


def test_sparse_gradients_of_a_later_group_are_refused():
    """Gradients are looked at again when there are more of them."""
    model, table = small_net(), nn.Embedding(4, 3, sparse=True)
    optimizer = tula(model)
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": table.parameters()})
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradient"):
        optimizer.step()


def test_parameters_in_the_place_of_an_optimizer_are_told():
    with pytest.raises(TypeError, match="wraps an optimizer"):
        TulaOptimizer(small_net().parameters(), global_batch=8, small_batch=4)


def test_a_plain_state_loads_with_a_warning():
    """A checkpoint of the inner optimizer alone can be continued with AGS."""
    model = small_net()
    plain = sgd(model.parameters())
    train(model, plain, 2)
    optimizer = tula(model)
    with pytest.warns(UserWarning, match="state of a plain optimizer"):
        optimizer.load_state_dict(plain.state_dict())
    momentum = [s["momentum_buffer"] for s in plain.state.values()]
    torch.testing.assert_close([s["momentum_buffer"] for s in optimizer.state.values()], momentum, rtol=0, atol=0)
    with pytest.raises(ValueError, match="got the keys \\['model'\\]"):
        optimizer.load_state_dict({"model": {}})


def test_a_scheduler_on_the_wrapper_reaches_the_inner_optimizer():
    """Also after load_state_dict, which gives the inner optimizer new parameter groups."""
    model = small_net()
    optimizer = tula(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3], gamma=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 3, scheduler=scheduler)
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("granularity", list(SCALES))
def test_copies_go_on_alike(granularity):
    """A deep copy and a pickled copy of model and optimizer train as the original does, with scheduler and hooks."""
    model = small_net()
    optimizer = tula(model, granularity=granularity, gate="off")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    optimizer.register_step_pre_hook(lambda *args: None)
    train(model, optimizer, 4, refresh_every=2, scheduler=scheduler)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = train(model, optimizer, 3, first=4, refresh_every=2)[-1]
    for other_model, other in copies:
        assert other.param_groups[0]["params"][0] is next(other_model.parameters())
        assert torch.equal(train(other_model, other, 3, first=4, refresh_every=2)[-1], expected)


def test_hooks_run_once():
    """Step and state hooks registered on the wrapper run, with the wrapper as their argument."""
    model = small_net()
    optimizer = tula(model)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o)))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(("state", o)))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("loaded", o)))
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert seen == [(name, optimizer) for name in ("pre", "post", "state", "loaded")]


def test_a_closure_is_evaluated_once_and_its_gradient_scaled():
    """`step(closure)` returns the loss and scales the gradient that the closure left."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = TulaOptimizer(SGD([weight], lr=1.0), global_batch=4, static_scale=3.0, gate="off")
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (2 * weight).sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert weight.item() == 1.0 - 3 * 2


def test_grad_scaler_unscales_first_and_skips_overflows():
    """Under GradScaler the steps are the plain ones bit for bit, and an overflow leaves no mark on AGS."""
    model, scaled_model = small_net(), small_net()
    optimizer, scaled = tula(model), tula(scaled_model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        inputs, targets = data(step)
        scaled.zero_grad()
        scaler.scale(nn.functional.cross_entropy(scaled_model(inputs), targets)).backward()
        scaler.unscale_(scaled)
        scaled.refresh(scaled_model, nn.functional.cross_entropy, inputs, targets)
        scaler.step(scaled)
        scaler.update()
    train(model, optimizer, 4, refresh_every=1)
    assert torch.equal(model[0].weight, scaled_model[0].weight)

    held = scaled.statistics()
    assert held["mean_scale"] > 1
    inputs, targets = data(4)
    scaler.scale(nn.functional.cross_entropy(scaled_model(inputs), targets) * math.inf).backward()
    scaler.unscale_(scaled)
    scaled.refresh(scaled_model, nn.functional.cross_entropy, inputs, targets)
    scaler.step(scaled)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert scaled.statistics() == held
    assert torch.equal(model[0].weight, scaled_model[0].weight)


def test_a_refresh_whose_step_is_skipped_is_due_again():
    """An overflow, as GradScaler's first steps have them, does not cost a whole period without new scales."""
    model = small_net()
    optimizer = tula(model, refresh_every=3)
    scaler = torch.amp.GradScaler("cpu")
    refreshed = []
    for batch in range(7):
        inputs, targets = data(batch)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets) * (math.inf if batch < 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        if optimizer.refresh_due:
            refreshed.append(batch)
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        scaler.step(optimizer)
        scaler.update()
    assert refreshed == [0, 1, 2, 5]


def test_a_fused_inner_optimizer_does_not_take_over_unscaling():
    """GradScaler must hand AGS true gradients, so the wrapper hides the inner optimizer's own unscaling."""
    inner = SGD(small_net().parameters(), lr=0.1, fused=True)
    assert inner._step_supports_amp_scaling
    assert not hasattr(TulaOptimizer(inner, global_batch=16, small_batch=4), "_step_supports_amp_scaling")


def test_added_groups_are_trained_and_later_scaled():
    """A group added on the way belongs to the inner optimizer and joins at the next refresh."""
    model = small_net()
    optimizer = TulaOptimizer(SGD(model[0].parameters(), lr=0.1), global_batch=BATCH, small_batch=4)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer, 1, refresh_every=1)
    assert len(optimizer.optimizer.param_groups) == 2
    assert set(optimizer.state_dict()["ags"]["scales"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("granularity", list(SCALES))
def test_a_group_added_after_a_refresh_is_not_scaled_before_the_next(granularity, fused):
    """Whatever the granularity, and whether the inner optimizer's kernel multiplies or we do."""
    model = small_net()
    inner = SGD(model[0].parameters(), lr=0.1, fused=fused)
    optimizer = TulaOptimizer(inner, global_batch=BATCH, small_batch=4, granularity=granularity, gate="off")
    train(model, optimizer, 1, refresh_every=1)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    nn.functional.cross_entropy(model(data()[0]), data()[1]).backward()
    steps = [layer.weight.detach() - 0.1 * layer.weight.grad for layer in (model[0], model[2])]
    optimizer.step()
    assert not torch.allclose(model[0].weight, steps[0])
    torch.testing.assert_close(model[2].weight, steps[1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, lambda sizes: 4 * sum(sizes)),
        ({"scale_smoothing": 0.9}, lambda sizes: 3 * 4 * sum(sizes)),
        ({"granularity": "tensor"}, lambda sizes: 8 * sum(sizes) + 2 * 4 * len(sizes)),
        ({"granularity": "global"}, lambda sizes: 4),
    ],
)
def test_memory_is_as_documented(options, expected):
    """Element-wise scales take 4 bytes per element, averages twice as much again; tensor-wise scales are written out
    for small tensors; two scalars come on top."""
    model = small_net()
    optimizer = tula(model, **options)
    assert optimizer.state_bytes() == 0
    train(model, optimizer, 1, refresh_every=1)
    assert optimizer.state_bytes() == expected([p.numel() for p in model.parameters()]) + 8


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0, but must be at least 1"),
        ({"small_batch": None}, "small_batch is missing"),
        ({"delta_threshold": 0.0}, "delta_threshold is 0.0, but must exceed 0"),
        ({"granularity": "layer"}, "granularity is 'layer'; choose one of element, channel, tensor, global"),
        ({"gate": "on"}, "gate is 'on'; choose one of current, lagged, off"),
        ({"s_min": 2.0}, "s_min is 2.0, but must lie in"),
        ({"eps": 0.0, "refresh_samples": 0}, "refresh_samples is 0.* eps is 0.0"),
        ({"static_scale": -1.0}, "static_scale is -1.0"),
        ({"printed_ratio": True, "granularity": "tensor"}, "printed_ratio needs"),
        ({"scale_smoothing": 1.0}, "scale_smoothing is 1.0, but must lie in"),
        ({"delta_smoothing": -0.1}, "delta_smoothing is -0.1, but must lie in"),
        ({"exponent": 0.0, "s_max": 0.5}, "exponent is 0.0.* s_max is 0.5"),
        ({"refresh_every": 0}, "refresh_every is 0"),
        (
            {"reference": "local"},
            "there is one rank only .*use 'microbatch'.*needs tensor or global.*global_batch / ranks",
        ),
    ],
)
def test_bad_settings_are_named(options, message):
    """Each refusal names the argument, its value and the limit; several come at once."""
    with pytest.raises(ValueError, match=message):
        tula(small_net(), **options)


def test_adam_is_warned_of():
    """Adam divides the scale out again, which is said once, at the caller's line."""
    with pytest.warns(UserWarning, match="Adam is not known as an SGD") as caught:
        TulaOptimizer(torch.optim.Adam(small_net().parameters()), global_batch=16, small_batch=4)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_what_cannot_be_scaled_is_refused():
    """LBFGS, sparse and complex gradients, several devices, sharded parameters and steps that are differentiated
    through are refused, with the way out."""
    with pytest.raises(ValueError, match="LBFGS"):
        TulaOptimizer(torch.optim.LBFGS(small_net().parameters()), global_batch=16, small_batch=4)
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = TulaOptimizer(SGD(embedding.parameters(), lr=0.1), global_batch=16, small_batch=4)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()
    embedding.weight.grad = torch.zeros(4, 2)
    optimizer.step()
    embedding.weight.grad = None
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):  # also in the place of a dense one
        optimizer.step()
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="differentiable=True"):
        TulaOptimizer(SGD([weight], lr=0.1, differentiable=True), global_batch=16, small_batch=4)
    complex_weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    complex_weight.grad = torch.ones_like(complex_weight)
    with pytest.raises(ValueError, match="view_as_real"):
        TulaOptimizer(SGD([complex_weight], lr=0.1), global_batch=16, small_batch=4).step()
    spread = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    for p in spread:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="gradients on cpu, meta, but handles one device"):
        TulaOptimizer(SGD(spread, lr=0.1), global_batch=16, small_batch=4).step()
    sharded = nn.Parameter(torch.zeros(2))
    sharded._fsdp_flattened = True
    with pytest.raises(ValueError, match="sharded parameter of shape \\(2,\\)"):
        TulaOptimizer(SGD([sharded], lr=0.1), global_batch=16, small_batch=4)


@pytest.mark.parametrize("beside", [torch.ones(1, 6), torch.tensor(2.0)], ids=["one row", "a number"])
def test_tensors_without_a_sample_dimension_are_told(beside):
    """Instead of torch's word on an index."""
    model = small_net()
    optimizer = tula(model)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(TypeError, match=r"tensor of shape \((1, 6)?\), whose first dimension is not that"):
        optimizer.refresh(model, nn.functional.cross_entropy, (inputs, beside), targets)


def test_averages_that_begin_anew_are_told():
    """They belong to the parameters that had gradients; a layer that is frozen in mid-training changes these."""
    model = small_net()
    optimizer = tula(model, gate="off", scale_smoothing=0.9)
    train(model, optimizer, 2, refresh_every=1)
    next(model.parameters()).requires_grad_(False)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="begins its averages anew"):
        train(model, optimizer, 1, refresh_every=1)


def test_a_dropped_scale_is_measured_soon():
    """After a change of the batch, and in a run that goes on with another, not at the end of the turn."""
    model = small_net()
    optimizer = tula(model, refresh_every=100)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    optimizer.step()
    assert not optimizer.refresh_due
    state = optimizer.state_dict()
    other = tula(model, refresh_every=100, global_batch=2 * BATCH)
    other.load_state_dict(state)
    assert other.refresh_due
    optimizer.set_batch(2 * BATCH)
    assert optimizer.refresh_due
