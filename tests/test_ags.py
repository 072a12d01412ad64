"""Adaptive gradient scaling: what it computes, when it acts, and that it is a well-behaved optimizer."""

import copy
import datetime
import functools
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from tula_hpc.optim import gradients, reference, scales
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.groups import scaled_and_unscaled

torch.set_num_threads(1)

BATCH = 16
SCALES = {"element": (3, 4), "channel": (3, 1), "tensor": (), "global": ()}


def sgd(parameters, lr=0.1):
    return SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def noisy_net():
    """BatchNorm has buffers, Dropout draws random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def data(step=0, batch=BATCH):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(batch, 6, generator=generator), torch.randint(3, (batch,), generator=generator)


def train(model, optimizer, steps, first=0, refresh_every=0, scheduler=None):
    """Plain training; returns the weights after each step."""
    history = []
    for step in range(first, first + steps):
        inputs, targets = data(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if refresh_every and step % refresh_every == 0:
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        history.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return history


def tula(model, **options):
    return TulaOptimizer(sgd(model.parameters()), **({"global_batch": BATCH, "small_batch": 4} | options))


def with_gradients(values, **options):
    """An optimizer (learning rate 1) on one weight vector, and a function that steps with a given gradient and
    returns what the step multiplied it by."""
    weight = nn.Parameter(torch.zeros(len(values)))
    optimizer = TulaOptimizer(SGD([weight], lr=1.0), **({"global_batch": 4, "small_batch": 2} | options))

    def step(gradient):
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        return ((before - weight.detach()) / torch.tensor(gradient)).tolist()

    return optimizer, step


class Mean(nn.Module):
    """Loss = mean over samples of w . x, so that the gradient is the mean of the samples."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, inputs):
        return inputs @ self.weight


def mean_loss(outputs, targets):
    return outputs.mean()


def refreshed_scale(columns, **options):
    """The scale measured with B = 4, b = 2, for one weight per column; a column is (value of the samples in the
    sub-batch, value of the others), so that g_small is the first and g_large the mean of both."""
    chosen = reference.random_subset(4, 2, seed=1)
    inputs = torch.tensor([[other for _, other in columns]] * 4)
    inputs[chosen] = torch.tensor([value for value, _ in columns])
    model = Mean(len(columns))
    build = TulaOptimizer.paper if options.pop("paper", False) else TulaOptimizer
    optimizer = build(SGD(model.parameters(), lr=1.0), global_batch=4, small_batch=2, **options)
    mean_loss(model(inputs), None).backward()
    optimizer.refresh(model, mean_loss, inputs, torch.zeros(4))
    optimizer.step()
    return optimizer.state_dict()["ags"]["scales"][0]


# The formulas


def test_variability_is_the_relative_change_of_the_squared_norm():
    """Eq. (5) on |G|² = 4 and then 5 is 0.25, whatever the direction of the gradient."""
    first, second = gradients.squared_norm([torch.tensor([2.0])]), gradients.squared_norm([torch.tensor([1.0, -2.0])])
    assert gradients.gradient_variability(second, first).item() == pytest.approx(0.25)


def test_variability_after_a_zero_gradient_is_below_no_threshold():
    """Nothing can be said relative to a vanished gradient, so that the step counts as sensitive."""
    for now in (0.0, 1.0):
        assert not gradients.gradient_variability(torch.tensor(now), torch.tensor(0.0)) < 1e30


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_squared_norm_is_fp32_for_every_precision(dtype):
    """The norm of all gradients taken as one vector neither overflows in fp16 nor refuses fp64."""
    found = gradients.squared_norm([torch.full((2, 2), 300.0, dtype=dtype), torch.tensor([400.0], dtype=dtype)])
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(4 * 300.0**2 + 400.0**2)


def measured(small, large, granularity, exponent=1.0):
    squares = [scales.squared_magnitudes(found, granularity) for found in (small, large)]
    return scales.scales_of(*squares, eps=1e-8, exponent=exponent, s_min=0.1, s_max=10.0)


@pytest.mark.parametrize("granularity", list(SCALES))
def test_scales_of_each_granularity(granularity):
    """Element, channel, tensor and global divide the root of the sum of squares over ever more elements."""
    small = [torch.tensor([[2.0, 1.0], [3.0, 0.0]]), torch.tensor(6.0)]
    large = [torch.tensor([[1.0, 2.0], [1.0, 1.0]]), torch.tensor(2.0)]
    expected = {
        "element": [torch.tensor([[2.0, 0.5], [3.0, 0.1]]), torch.tensor(3.0)],
        "channel": [torch.tensor([1.0, math.sqrt(9 / 2), 3.0])],
        "tensor": [torch.tensor([math.sqrt(14 / 7), 3.0])],
        "global": [torch.tensor([math.sqrt(50 / 11)])],
    }
    torch.testing.assert_close(measured(small, large, granularity), expected[granularity])


def test_an_exponent_is_applied_before_the_bounds():
    """Exponent 2 gives the ratio of squared norms: AdaScale's gain of the tensor."""
    found = measured(
        [torch.tensor([3.0, 4.0]), torch.tensor(9.0)], [torch.tensor([3.0, 0.0]), torch.ones(())], "tensor", 2
    )
    torch.testing.assert_close(found, [torch.tensor([25 / 9, 10.0])])


def test_several_sub_batches_are_averaged_as_root_mean_square():
    """Two sub-batches whose gradients are 3 and -4, where the whole batch has 1, give the scale sqrt((9 + 16) / 2)."""
    model = Mean(1)
    optimizer = TulaOptimizer(
        SGD(model.parameters(), lr=1.0), global_batch=400, small_batch=2, gate="off", refresh_samples=2
    )
    inputs = torch.full((400, 1), 1.0)
    for seed, value in ((1, 3.0), (2, -4.0)):
        inputs[reference.random_subset(400, 2, seed=seed)] = value
    model.weight.grad = torch.ones(1)
    optimizer.refresh(model, mean_loss, inputs, inputs)
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] == pytest.approx(math.sqrt(12.5))


def test_element_scale_by_hand():
    """|g_small| / |g_large| per element: within the bounds as it is, else sqrt(B/b) or its inverse; 1 for 0 / 0."""
    columns = [(1.0, 1.0), (1.2, 0.8), (-1.2, -0.8), (3.0, -2.0), (0.1, 1.9), (0.0, 0.0)]
    expected = [1.0, 1.2, 1.2, math.sqrt(2), 1 / math.sqrt(2), 1.0]
    torch.testing.assert_close(refreshed_scale(columns), torch.tensor(expected))


def test_floor_can_be_chosen():
    """`s_min` replaces the default floor."""
    torch.testing.assert_close(refreshed_scale([(0.1, 1.9), (0.6, 1.4)], s_min=0.5), torch.tensor([0.5, 0.6]))


def test_paper_preset_has_no_floor():
    """As printed, the scale of a weight with a vanishing small-batch gradient is 0, also where both vanish."""
    columns = [(1.2, 0.8), (3.0, -2.0), (0.1, 1.9), (0.0, 2.0), (0.0, 0.0)]
    expected = [1.2, math.sqrt(2), 0.1, 0.0, 0.0]
    torch.testing.assert_close(refreshed_scale(columns, paper=True), torch.tensor(expected))
    with pytest.raises(TypeError, match="granularity"):
        TulaOptimizer.paper(sgd(small_net().parameters()), global_batch=16, small_batch=4, granularity="tensor")


def test_printed_ratio_keeps_nan_out_of_the_weights():
    """At the pole g_large = -eps of the printed formula the scale is 1 or s_max, never NaN."""
    pole = torch.tensor([-1e-8, -1e-8])
    found = scales.printed_ratio(torch.tensor([0.0, 1.0]), pole, eps=1e-8, s_max=4.0)
    assert found.tolist() == [1.0, 4.0]


# When the scale acts


def test_static_scaling_and_gate_by_hand():
    """Eq. (8) with s = 2: |G|² = 4, 5, 7.5, 7 give Δ = inf, 0.25, 0.5, 0.067, so that steps 2 and 4 are doubled."""
    optimizer, step = with_gradients([0.0], static_scale=2.0, small_batch=None)
    factors = [step([math.sqrt(square)]) for square in (4.0, 5.0, 7.5, 7.0)]
    assert factors == [pytest.approx([f]) for f in (1.0, 2.0, 1.0, 2.0)]
    found = optimizer.statistics()
    assert found["scaled_fraction"] == 0.5
    assert found["mean_scale"] == 2.0
    assert found["gradient_variability"] == pytest.approx(0.5 / 7.5, rel=1e-4)
    assert found["norm"] == pytest.approx(math.sqrt(7.0))


def test_lagged_gate_asks_the_last_step():
    """The lagged gate opens one step later than the printed one, and closes one step later."""
    _, step = with_gradients([0.0], static_scale=2.0, gate="lagged")
    factors = [step([math.sqrt(square)]) for square in (4.0, 5.0, 7.5, 7.0, 7.0)]
    assert factors == [pytest.approx([f]) for f in (1.0, 1.0, 2.0, 1.0, 2.0)]


def test_gate_off_always_scales():
    """Without gate even the first step is scaled."""
    _, step = with_gradients([0.0], static_scale=2.0, gate="off")
    assert [step([g]) for g in (1.0, 100.0)] == [[2.0], [2.0]]


def test_a_threshold_moves_the_gate():
    """A larger δ calls more steps calm."""
    _, step = with_gradients([0.0], static_scale=2.0, delta_threshold=0.6)
    assert [step([math.sqrt(square)]) for square in (4.0, 5.0, 7.5)][2] == pytest.approx([2.0])


def test_a_nonfinite_gradient_is_forgotten():
    """A step with an infinite gradient is not scaled, and the next is compared with the last finite norm."""
    optimizer, step = with_gradients([0.0, 0.0], static_scale=2.0)
    step([1.0, 1.0])
    step([math.inf, 1.0])
    assert optimizer.statistics()["norm"] == pytest.approx(math.sqrt(2))
    optimizer.optimizer.param_groups[0]["params"][0].data.zero_()
    assert step([1.0, 1.0]) == [2.0, 2.0]


def test_an_observed_norm_replaces_our_own():
    """The norm before clipping decides, once, not that of the clipped gradient at hand."""
    optimizer, step = with_gradients([0.0], static_scale=2.0)
    step([1.0])
    optimizer.observe_norm(torch.tensor(10.0))
    assert step([1.0]) == [1.0]
    assert optimizer.statistics()["gradient_variability"] == pytest.approx(99.0)
    assert step([1.0]) == [1.0]
    assert step([1.0]) == [2.0]


@pytest.mark.parametrize("granularity", list(SCALES))
def test_the_scale_acts_from_the_next_step_on(granularity):
    """The step that a scale was measured at is the plain one, bit for bit; the same gradient later is scaled."""
    plain, scaled = small_net(), small_net()
    plain_optimizer, optimizer = sgd(plain.parameters()), tula(scaled, gate="off", granularity=granularity)
    assert torch.equal(train(plain, plain_optimizer, 1)[0], train(scaled, optimizer, 1, refresh_every=1)[0])
    assert not torch.equal(train(plain, plain_optimizer, 1)[0], train(scaled, optimizer, 1)[0])
    assert optimizer.statistics()["scaled_fraction"] == 0.5


@pytest.mark.parametrize("granularity", list(SCALES))
def test_scaled_gradients_are_gradients_times_scale(granularity):
    """After a refresh `.grad` is multiplied by the stored scale, element by element."""
    model = small_net()
    optimizer = tula(model, gate="off", granularity=granularity)
    train(model, optimizer, 1, refresh_every=1)
    scales = optimizer.state_dict()["ags"]["scales"]
    inputs, targets = data(7)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    expected = [p.grad * scales[i] for i, p in enumerate(model.parameters())]
    optimizer.step()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{"static_scale": 1.0}, {}])
def test_scale_one_equals_the_plain_optimizer(options):
    """With scale 1, and before the first refresh, training is that of the inner optimizer bit for bit."""
    plain, wrapped = small_net(), small_net()
    for a, b in zip(train(plain, sgd(plain.parameters()), 6), train(wrapped, tula(wrapped, **options), 6), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options", [{"granularity": "global"}, {"static_scale": 1.5}, {"static_scale": 1.5, "gate": "off"}]
)
def test_a_fused_inner_optimizer_scales_by_itself(options):
    """One scale for all is handed to the fused kernel, which gives the weights of a plain multiplication."""
    history = []
    for fused in (False, True):
        model = small_net()
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        optimizer = TulaOptimizer(inner, **({"global_batch": BATCH, "small_batch": 4} | options))
        history.append(train(model, optimizer, 6, refresh_every=3))
        assert not hasattr(inner, "grad_scale")
    for a, b in zip(*history, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert optimizer.statistics()["scaled_fraction"] > 0


def test_excluded_groups_are_never_scaled():
    """Parameters of a group with ags=False move as without AGS, the others do not."""

    def run(wrap):
        model = small_net()
        layers = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "ags": False}]
        optimizer = SGD(layers, lr=0.1)
        if wrap:
            optimizer = TulaOptimizer(optimizer, global_batch=BATCH, static_scale=3.0, gate="off")
        train(model, optimizer, 1)
        return model

    plain, scaled = run(False), run(True)
    assert torch.equal(plain[2].weight, scaled[2].weight)
    assert not torch.equal(plain[0].weight, scaled[0].weight)


def test_parameters_are_kept_out_by_name_or_kind():
    """Patterns of names and classes of modules go into a group with ags=False, frozen parameters into none."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Linear(3, 3).requires_grad_(False))
    scaled, unscaled = scaled_and_unscaled(model, ["*.bias", nn.BatchNorm1d])
    assert [p.shape for p in scaled["params"]] == [(8, 6), (3, 8)]
    assert len(unscaled["params"]) == 4
    assert unscaled["ags"] is False
    with pytest.raises(ValueError, match="fits no parameter"):
        scaled_and_unscaled(model, ["norm*"])


def test_tied_weights_are_kept_out_by_any_of_their_names():
    """A weight that is embedding and head is trained once, and a pattern of either name keeps it unscaled."""
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embed"].weight
    for pattern in ("embed*", "head.weight"):
        scaled, unscaled = scaled_and_unscaled(model, [pattern])
        assert [p.shape for p in unscaled["params"]] == [(5, 3)]
        assert [p.shape for p in scaled["params"]] == [(5,)]


def test_variability_sees_all_parameters():
    """Also the gradients of groups that are not scaled decide whether a step is calm."""
    scaled, excluded = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [scaled]}, {"params": [excluded], "ags": False}]
    optimizer = TulaOptimizer(SGD(groups, lr=1.0), global_batch=4, static_scale=2.0)
    for norm in (1.0, 3.0):
        scaled.grad, excluded.grad = torch.tensor([0.1]), torch.tensor([norm])
        optimizer.step()
    assert optimizer.statistics()["gradient_variability"] == pytest.approx((9.01 - 1.01) / 1.01)
    assert scaled.item() == pytest.approx(-0.2)


def test_set_batch_drops_norm_and_scale():
    """Both depend on B: after a change the next step counts as the first; the same B again changes nothing."""
    model = small_net()
    optimizer = tula(model, gate="off")
    train(model, optimizer, 2, refresh_every=1)
    held = optimizer.statistics()
    optimizer.set_batch(BATCH)
    assert optimizer.statistics() == held
    optimizer.set_batch(2 * BATCH)
    assert optimizer.statistics() == {"mean_scale": 1.0, "scaled_fraction": held["scaled_fraction"]}
    assert optimizer.state_bytes() == 0


def test_a_batch_no_larger_than_small_batch_switches_ags_off():
    """There is nothing to correct then: one warning, and the inner optimizer's steps."""
    plain, wrapped = small_net(), small_net()
    with pytest.warns(UserWarning, match="AGS is inactive: global_batch 4") as caught:
        optimizer = tula(wrapped, global_batch=4)
    assert caught[0].filename == __file__
    history = train(wrapped, optimizer, 3, refresh_every=1)
    assert torch.equal(history[-1], train(plain, sgd(plain.parameters()), 3)[-1])


# Averages, intervals, exponents


def refreshed_with(optimizer, model, small, large):
    """The mean scale after a refresh that sees the sub-batch's gradient `small` and the step's gradient `large`."""
    inputs = torch.full((400, 1), large)
    inputs[reference.random_subset(400, 2, seed=optimizer.state_dict()["ags"]["draws"] + 1)] = small
    model.weight.grad = torch.full((1,), large)
    optimizer.refresh(model, mean_loss, inputs, inputs)
    optimizer.step()
    return optimizer.statistics()["mean_scale"]


@pytest.mark.parametrize("granularity", list(SCALES))
def test_averages_over_refreshes_weigh_the_past(granularity):
    """Squares 9 : 1 and then 25 : 4, the past weighing 0.75, give (0.75 x 9 + 25) / (0.75 x 1 + 4) in the end."""
    model = Mean(1)
    options = {"granularity": granularity, "gate": "off", "scale_smoothing": 0.75}
    optimizer = TulaOptimizer(SGD(model.parameters(), lr=1.0), global_batch=400, small_batch=2, **options)
    assert refreshed_with(optimizer, model, 3.0, 1.0) == pytest.approx(3.0)
    expected = math.sqrt((0.75 * 9 + 25) / (0.75 * 1 + 4))
    assert refreshed_with(optimizer, model, 5.0, 2.0) == pytest.approx(expected)
    assert refreshed_with(optimizer, model, math.inf, 2.0) == pytest.approx(expected)  # an overflow changes nothing


def test_the_exponent_moves_the_cap():
    """A squared ratio may reach B / b, a chosen cap replaces it."""
    for options, expected in (({}, 200.0), ({"s_max": 7.0}, 7.0)):
        model = Mean(1)
        optimizer = TulaOptimizer(
            SGD(model.parameters(), lr=1.0), global_batch=400, small_batch=2, exponent=2, **options
        )
        assert refreshed_with(optimizer, model, 100.0, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"refresh_every": 3}, [0, 3, 6]),
        ({"refresh_every": 3, "first_refresh": 2}, [2, 5]),
        ({"first_refresh": 2}, [2]),
        ({}, []),
        ({"refresh_every": 3, "static_scale": 2.0}, []),
    ],
)
def test_a_refresh_is_due_every_so_many_steps(options, expected):
    """`refresh_due` asks at the first step, or at `first_refresh`, and then every `refresh_every` steps."""
    model = small_net()
    optimizer = tula(model, **options)
    seen = []
    for step in range(8):
        inputs, targets = data(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if optimizer.refresh_due:
            seen.append(step)
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
    assert seen == expected


@pytest.mark.filterwarnings("ignore:AGS keeps its scale")
def test_a_due_refresh_waits_for_a_full_batch():
    """A batch too short for a sub-batch postpones the refresh."""
    model = small_net()
    optimizer = tula(model, refresh_every=5)
    for batch, due_after in ((4, True), (BATCH, False)):
        inputs, targets = data(batch=batch)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
        assert optimizer.refresh_due == due_after


def test_smoothed_variability_by_hand():
    """With weight 0.5 the average of |G|² = 4, 6, 11 is 4, 5, 8, so that Δ = 0.25 is calm and 0.6 sensitive."""
    optimizer, step = with_gradients([0.0], static_scale=2.0, delta_smoothing=0.5)
    assert [step([math.sqrt(square)]) for square in (4.0, 6.0)] == [[1.0], pytest.approx([2.0])]
    assert optimizer.statistics()["gradient_variability"] == pytest.approx(0.25)
    assert step([math.sqrt(11.0)]) == pytest.approx([1.0])
    assert optimizer.statistics()["gradient_variability"] == pytest.approx(0.6)
    assert optimizer.statistics()["norm"] == pytest.approx(math.sqrt(8.0))


# Gradients of a small batch that exist anyway


@pytest.mark.parametrize("granularity", list(SCALES))
def test_a_microbatch_is_a_free_reference(granularity):
    """The first of two micro-batches gives the scale that a sub-batch of its samples would give."""
    inputs, targets = data()
    loss = nn.functional.cross_entropy
    model = small_net()
    options = {"granularity": granularity, "reference": "microbatch", "small_batch": BATCH // 2, "s_min": 0.0}
    optimizer = tula(model, **options)
    for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        (loss(model(inputs[half]), targets[half]) / 2).backward()
        if half.start == 0:
            first = [2 * p.grad for p in model.parameters()]
            optimizer.observe_microbatch(2)
    whole = [p.grad.clone() for p in model.parameters()]
    optimizer.refresh()
    optimizer.step()
    squares = [scales.squared_magnitudes(found, granularity) for found in (first, whole)]
    expected = scales.scales_of(*squares, eps=1e-8, exponent=1, s_min=0.0, s_max=math.sqrt(2))
    found = optimizer.state_dict()["ags"]["scales"]
    mine = list(found.values()) if granularity == "element" else [torch.cat([s.reshape(-1) for s in found.values()])]
    if granularity == "global":
        mine = [mine[0][:1]]
    torch.testing.assert_close(mine, expected)


def test_a_refresh_without_a_noted_microbatch_keeps_the_scale():
    """It is said once, with the call that is missing, and so is a call for another reference."""
    model = small_net()
    optimizer = tula(model, reference="microbatch")
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.warns(UserWarning, match="observe_microbatch"):
        optimizer.refresh()
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] == 1.0
    with pytest.raises(ValueError, match="reference 'microbatch'; make it with 'local'"):
        optimizer.watch(None)
    with pytest.raises(ValueError, match="reference 'subbatch'; make it with 'microbatch'"):
        tula(model).observe_microbatch(2)
    with pytest.raises(TypeError, match="needs model, loss_fn"):
        tula(model).refresh()


# The refresh


def test_refresh_leaves_no_trace():
    """Buffers, gradients, training mode and the random stream are the same after a refresh as before."""
    model = noisy_net()
    optimizer = tula(model)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    before = copy.deepcopy((dict(model.named_buffers()), [p.grad for p in model.parameters()], torch.get_rng_state()))
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    after = (dict(model.named_buffers()), [p.grad for p in model.parameters()], torch.get_rng_state())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert model.training


def test_refresh_takes_nested_inputs():
    """Batches may be tensors in tuples, lists and dictionaries."""

    class Nested(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs["x"][0])

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets[0])

    model = Nested(6, 3)
    optimizer = tula(model)
    inputs, targets = data()
    loss(model({"x": (inputs,)}), [targets]).backward()
    optimizer.refresh(model, loss, {"x": (inputs,)}, [targets])
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] > 1.0


def test_a_batch_too_small_for_a_sub_batch_keeps_the_scale():
    """The short last batch of an epoch is skipped with one warning, at the caller's line."""
    model = small_net()
    optimizer = tula(model)
    inputs, targets = data(batch=4)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.warns(UserWarning, match="keeps its scale: 4 samples are no proper part") as caught:
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    assert caught[0].filename == __file__
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)  # a second warning would be an error
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] == 1.0


def test_an_overflow_keeps_the_scale():
    """A refresh that meets an infinite gradient changes nothing."""
    model = small_net()
    optimizer = tula(model, gate="off")
    train(model, optimizer, 1, refresh_every=1)
    held = optimizer.statistics()["mean_scale"]
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    model[0].bias.grad[0] = math.inf
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    model[0].bias.grad.zero_()
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] == held > 1.0


def test_a_loss_scale_cancels():
    """Scaling the sub-batch loss against underflow does not change the measured scale."""
    found = []
    for loss_scale in (1.0, 1024.0):
        model = small_net()
        optimizer = tula(model)
        inputs, targets = data()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets, loss_scale=loss_scale)
        optimizer.step()
        found.append(optimizer.statistics()["mean_scale"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] > 1.0


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


def test_copies_go_on_alike():
    """A deep copy and a pickled copy of model and optimizer train as the original does, with scheduler and hooks."""
    model = small_net()
    optimizer = tula(model)
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
    """LBFGS, sparse gradients, several devices and sharded parameters are refused, with the way out."""
    with pytest.raises(ValueError, match="LBFGS"):
        TulaOptimizer(torch.optim.LBFGS(small_net().parameters()), global_batch=16, small_batch=4)
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = TulaOptimizer(SGD(embedding.parameters(), lr=0.1), global_batch=16, small_batch=4)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()
    spread = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    for p in spread:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="gradients on cpu, meta, but handles one device"):
        TulaOptimizer(SGD(spread, lr=0.1), global_batch=16, small_batch=4).step()
    sharded = nn.Parameter(torch.zeros(2))
    sharded._fsdp_flattened = True
    with pytest.raises(ValueError, match="sharded parameter of shape \\(2,\\)"):
        TulaOptimizer(SGD([sharded], lr=0.1), global_batch=16, small_batch=4)


# Two processes


def two_ranks(rank, folder):
    """What each of two processes does; writes its findings to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=300),  # a hang is a failure
    )
    found = {}

    model = nn.parallel.DistributedDataParallel(noisy_net())
    optimizer = TulaOptimizer(sgd(model.parameters()), global_batch=2 * BATCH, small_batch=8, gate="off")
    torch.manual_seed(rank)
    for step in range(6):
        inputs, targets = data(10 * step + rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
    found["weights"] = nn.utils.parameters_to_vector(model.parameters()).detach()
    found["scales"] = optimizer.state_dict()["ags"]["scales"]

    # Rank 1 has too few samples for its share of the sub-batch.
    inputs, targets = data(0, batch=BATCH if rank == 0 else 4)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    if rank == 0:
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    else:
        with pytest.warns(UserWarning, match="keeps its scale"):
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    optimizer.step()
    found["scales_after_short_batch"] = optimizer.state_dict()["ags"]["scales"]

    mean = nn.parallel.DistributedDataParallel(Mean(6))
    optimizer = TulaOptimizer(SGD(mean.parameters(), lr=1.0), global_batch=2 * BATCH, small_batch=8)
    inputs = data(rank)[0] + 0.5
    mean_loss(mean(inputs), None).backward()
    optimizer.refresh(mean, mean_loss, inputs, inputs)
    optimizer.step()
    found["mean_scale"] = optimizer.state_dict()["ags"]["scales"][0]

    watched = nn.parallel.DistributedDataParallel(noisy_net())
    optimizer = TulaOptimizer(
        sgd(watched.parameters()), global_batch=2 * BATCH, granularity="tensor", reference="local", refresh_every=2
    )
    optimizer.watch(watched)
    torch.manual_seed(rank)
    for step in range(4):
        inputs, targets = data(10 * step + rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(watched(inputs), targets).backward()
        if optimizer.refresh_due:
            optimizer.refresh()
        optimizer.step()
    found["watched_weights"] = nn.utils.parameters_to_vector(watched.parameters()).detach()
    linear = nn.parallel.DistributedDataParallel(Mean(6))
    optimizer = TulaOptimizer(
        SGD(linear.parameters(), lr=1.0), global_batch=2 * BATCH, granularity="tensor", reference="local"
    )
    optimizer.watch(linear)
    inputs = data(rank)[0] + 0.5
    mean_loss(linear(inputs), None).backward()
    optimizer.refresh()
    optimizer.step()
    found["local_scale"] = optimizer.state_dict()["ags"]["scales"][0]

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    try:
        TulaOptimizer(SGD([sharded], lr=0.1), global_batch=16, small_batch=4)
    except ValueError as error:
        found["refusal"] = str(error)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(two_ranks, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_replicas_stay_identical(both_ranks):
    """Under DDP a refresh at every step neither hangs nor lets the replicas drift by a single bit."""
    first, second = both_ranks
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["scales"], second["scales"], rtol=0, atol=0)


def test_one_rank_without_a_sub_batch_voids_the_refresh(both_ranks):
    """If one rank's batch is too short nobody waits for it, and all keep their scale."""
    for found in both_ranks:
        torch.testing.assert_close(found["scales_after_short_batch"], found["scales"], rtol=0, atol=0)


def test_ranks_measure_the_gradient_of_their_joint_sub_batch(both_ranks):
    """Two ranks with 4 samples each measure what one process measures with those 8 samples."""
    chosen = reference.random_subset(BATCH, 4, seed=1)
    shards = [data(rank)[0] + 0.5 for rank in range(2)]
    small, large = torch.cat([shard[chosen] for shard in shards]).mean(0), torch.cat(shards).mean(0)
    expected = (small / large).abs().clamp(0.5, 2.0)
    assert expected.unique().numel() > 2
    for found in both_ranks:
        torch.testing.assert_close(found["mean_scale"], expected, rtol=1e-5, atol=1e-6)


def test_local_gradients_are_a_free_reference(both_ranks):
    """DDP's gradients before averaging give sqrt(mean |g_rank|² / |g|²), and the replicas stay identical."""
    first, second = both_ranks
    assert torch.equal(first["watched_weights"], second["watched_weights"])
    grads = [(data(rank)[0] + 0.5).mean(0) for rank in range(2)]
    local = sum(g.square().sum() for g in grads) / 2
    expected = (local / (sum(grads) / 2).square().sum()).sqrt().clamp(max=math.sqrt(2))
    assert expected < math.sqrt(2)
    for found in both_ranks:
        torch.testing.assert_close(found["local_scale"], expected)


def test_distributed_tensors_are_refused(both_ranks):
    """Sharded parameters as FSDP2 makes them are recognised."""
    assert all("sharded parameter of shape (4,)" in found["refusal"] for found in both_ranks)
