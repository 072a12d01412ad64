#!/bin/bash
# Results of the paper at --scale small on one bare GPU host (root), in parts: a later part goes on with RUNS.
#   tests/benchmarks/paper_small.sh times|accuracies DATA RUNS MINUTES RESULT...
# DATA holds cifar10-images.tar.xz and caltech101-80px.tar.xz; RUNS is a .tgz of run folders without checkpoints, made or
# replaced. "times" gives each GPU to one host; "accuracies" lets eight hosts share it, so nothing there is a time.
set -u
kind=$1 data=$(realpath "$2") runs=$(realpath -m "$3") ends=$(($(date +%s) + 60 * ${4%.*}))
shift 4
results=("$@") here=$PWD work=/tmp/paper-small
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 NCCL_ALGO=Ring NCCL_NVLS_ENABLE=0
mkdir -p "$work/data" && cd "$work" || exit
[ -f "$runs" ] && [ ! -d runs ] && tar xzf "$runs"

if [ "$kind" = accuracies ] && [ ! -d data/caltech101 ]; then
  tar xJf "$data/caltech101-80px.tar.xz" -C data &
  python3 - "$data" <<'PYTHON'
import sys
from pathlib import Path

import torch

from tests.benchmarks.accuracy import load

folder = Path("data/cifar-10-batches-bin")  # the official binary version: a byte for the class, then the planes
folder.mkdir()
for part, (images, classes) in load(Path(sys.argv[1]), "cifar10").items():
    records = torch.cat([classes.to(torch.uint8)[:, None], images.flatten(1)], 1)
    pieces = records.chunk(5) if part == "train" else (records,)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
    for name, piece in zip(names, pieces, strict=True):
        (folder / name).write_bytes(piece.numpy().tobytes())
PYTHON
  wait
fi

hosts_a_gpu=1 at_once=4
settings=(cluster=slurm cluster.gpus_per_node=1 cluster.poll_interval_s=2 cluster.network_interface=eth0 "data.root=$work/data")
settings+=(cluster.resubmit_cancelled=true)  # those that the `scancel` below ended in the part before
if [ "$kind" = times ]; then
  settings+=(grid.max_nodes=2 profiling=packed)
else
  hosts_a_gpu=8 at_once=16
  settings+=(+cluster.sbatch.switches=1@60)
  # Hosts that share a GPU then compute on it at the same time, not in turns; without MPS it only takes longer.
  command -v nvidia-cuda-mps-control >/dev/null && setsid nvidia-cuda-mps-control -d
fi
# shellcheck source=tests/benchmarks/gpu_host.sh
. "$here/tests/benchmarks/gpu_host.sh" 10gbit $hosts_a_gpu "$here/.slurmdebs"
for result in "${results[@]}"; do
  left=$((ends - $(date +%s)))
  [ $left -gt 20 ] || break
  timeout --signal=INT --kill-after=20 $left \
    python3 -m tula_hpc paper "$result" --scale small --at-once $at_once "${settings[@]}" 2>&1 | tail -n 25
done
scancel --user root
[ -f /tmp/nvidia-mps/nvidia-cuda-mps-control.pid ] && echo quit | nvidia-cuda-mps-control
mkdir -p "$(dirname "$runs")"
tar czf "$runs" --exclude='checkpoint*' --exclude='*.pkl' runs
