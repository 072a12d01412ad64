"""Adaptive gradient scaling on two ranks: the same scales, the same weights."""

import datetime
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from scaled_nets import BATCH, Mean, data, mean_loss, noisy_net, sgd
from torch import nn
from torch.optim import SGD

from tula_hpc.optim import reference
from tula_hpc.optim.ags import TulaOptimizer

torch.set_num_threads(1)


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
    optimizer.refresh_every, optimizer._next_refresh, due = 2, optimizer._steps, []
    for batch in (4, BATCH):  # too short on both, and full
        optimizer.zero_grad()
        inputs, targets = data(0, batch=batch)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.refresh(model, nn.functional.cross_entropy, inputs, targets)
        optimizer.step()
        due.append(optimizer.refresh_due)
    found["due"] = due

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

    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    in_group = nn.parallel.DistributedDataParallel(Mean(6), process_group=alone)
    optimizer = TulaOptimizer(
        SGD(in_group.parameters(), lr=1.0), global_batch=BATCH, reference="local", granularity="tensor"
    )
    optimizer.watch(in_group)
    mean_loss(in_group(torch.full((BATCH, 6), rank + 1.0)), None).backward()
    found["gradient_in_a_group"] = in_group.module.weight.grad

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


def test_a_short_batch_postpones_a_refresh_on_all_ranks(both_ranks):
    """It is due until a step follows one that measured, as on one rank."""
    assert [found["due"] for found in both_ranks] == [[True, False]] * 2


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


def test_a_watched_model_averages_over_its_own_group(both_ranks):
    first, second = both_ranks
    assert first["gradient_in_a_group"].tolist() == [1.0] * 6
    assert second["gradient_in_a_group"].tolist() == [2.0] * 6


def test_distributed_tensors_are_refused(both_ranks):
    """Sharded parameters as FSDP2 makes them are recognised."""
    assert all("sharded parameter of shape (4,)" in found["refusal"] for found in both_ranks)
