"""Adaptive gradient scaling: what it computes, when it acts, and how scales are measured."""

import copy
import math
from collections import UserDict, namedtuple

import pytest
import torch
from scaled_nets import BATCH, SCALES, Mean, data, mean_loss, noisy_net, sgd, small_net, train, tula, with_gradients
from torch import nn
from torch.optim import SGD

from tula_hpc.optim import gradients, reference, scales
from tula_hpc.optim.ags import TulaOptimizer
from tula_hpc.optim.groups import scaled_and_unscaled

torch.set_num_threads(1)


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


@pytest.mark.parametrize(
    ("granularity", "excess"),
    [
        ("element", [torch.tensor([1.0, 3.0]), torch.zeros(0, 5)]),
        ("channel", [torch.tensor([1.0, 3.0])]),
        ("tensor", [torch.tensor([2.0, 7.0])]),
    ],
)
def test_a_tensor_without_elements_does_not_count_in_the_mean_scale(granularity, excess):
    """Nor does it make the mean NaN, which a log leaves out."""
    held = scales.Scales([torch.zeros(2), torch.zeros(0, 5)], granularity, excess)
    assert float(held.mean()) == 3.0


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


def test_a_shared_module_is_kept_out_by_any_of_its_names():
    """Its second name fits as well, and the error counts it once."""
    table = nn.Embedding(5, 3)
    model = nn.ModuleDict({"source": table, "target": table, "head": nn.Linear(3, 5)})
    scaled, unscaled = scaled_and_unscaled(model, ["target*"])
    assert unscaled["params"] == [table.weight]
    assert len(scaled["params"]) == 2
    with pytest.raises(ValueError, match=r"It trains 3: source\.weight, target\.weight"):
        scaled_and_unscaled(model, ["embed*"])


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
        optimizer = TulaOptimizer(sgd(wrapped.parameters()), global_batch=4, small_batch=4)
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


def test_refresh_leaves_no_trace_in_what_is_computed_again():
    """With activation checkpointing the backward pass of the refresh goes through the module once more."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = noisy_net()

        def forward(self, inputs):
            return torch.utils.checkpoint.checkpoint(self.net, inputs, use_reentrant=False)

    model = Checkpointed()
    optimizer = tula(model)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    before = copy.deepcopy(dict(model.named_buffers()))
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_a_refresh_needs_no_targets_where_the_loss_has_none():
    """As an autoencoder's; nor does it need every entry of a batch."""
    model = Mean(6)
    optimizer = tula(model)
    inputs = data()[0] + 0.5
    mean_loss(model(inputs), None).backward()
    optimizer.refresh(model, mean_loss, inputs)
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] != 1.0


def test_batches_of_other_mappings_are_taken_and_of_other_things_refused():
    """A UserDict, as tokenizers return, keeps its type; text is named."""
    batch = UserDict({"mask": None, "ids": torch.arange(4)})
    taken = reference.take(batch, torch.tensor([2]))
    assert type(taken) is UserDict
    assert taken["ids"].tolist() == [2]
    assert reference.batch_size(batch) == 4
    for ask in (reference.batch_size, lambda batch: reference.take(batch, torch.tensor([0]))):
        with pytest.raises(TypeError, match="holds a str"):
            ask("a caption")
    captions = {"captions": ["a", "b", "c"], "ids": torch.arange(3)}
    assert reference.take(captions, torch.tensor([2, 0]))["captions"] == ["c", "a"]


def test_a_refresh_without_gradients_says_so():
    """After `zero_grad` there is nothing to compare with."""
    model = small_net()
    with pytest.warns(UserWarning, match="before zero_grad"):
        tula(model).refresh(model, nn.functional.cross_entropy, *data())


def test_a_frozen_layer_that_keeps_a_gradient_is_not_measured():
    """As `zero_grad(set_to_none=False)` leaves one."""
    model = small_net()
    optimizer = tula(model)
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    model[0].requires_grad_(False)
    optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    optimizer.step()
    assert set(optimizer.state_dict()["ags"]["scales"]) == {2, 3}


def test_a_short_batch_keeps_the_scale_also_of_what_it_does_not_use():
    """Whether the scale of other parameters is given up is decided where a new one was measured."""
    model = small_net()
    optimizer = tula(model, gate="off")
    train(model, optimizer, 2, refresh_every=1)
    held = optimizer.statistics()["mean_scale"]
    inputs, targets = data(batch=4)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    model[0].weight.grad = None
    with pytest.warns(UserWarning, match="keeps its scale"):
        optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
    optimizer.step()
    assert optimizer.statistics()["mean_scale"] == held != 1.0


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


def test_samples_of_a_named_tuple_are_one_again():
    """Its constructor takes the tensors one by one, unlike a tuple's."""
    batch = namedtuple("Batch", "images masks")(torch.arange(4), torch.arange(4) > 1)
    taken = reference.take(batch, torch.tensor([2]))
    assert type(taken) is type(batch)
    assert taken.images.tolist() == [2]
    assert taken.masks.tolist() == [True]


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
