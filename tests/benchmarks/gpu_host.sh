#!/bin/bash
# A throw-away Slurm on one bare GPU host (root; nothing to be installed from a registry; no systemd, no accounting).
#   usage:  . tests/benchmarks/gpu_host.sh [RATE=10gbit] [HOSTS_A_GPU=1] [DEBS=.slurmdebs]
# Sourced, so that the shell then talks to it. Each "host" is a network namespace behind a link of RATE, with one GPU:
# one host a GPU for times, several where only accuracies matter; as many hosts as there are GPUs, each with its own, have
# a switch of their own, which jobs of several nodes ask for with --switches=1. DEBS holds packages of Debian 12:
#   apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0 \
#     liblz4-1 libjson-c5 libhttp-parser2.9 libjwt0 libyaml-0-2 libnuma1 libdbus-1-3 libbpf1 libltdl7 iproute2 \
#     libelf1 libmnl0 libxtables12 libtirpc3 libcap2-bin
rate=${1:-10gbit} hosts_a_gpu=${2:-1} debs=${3:-.slurmdebs}
libraries=/tmp/slurm-libraries unpacked=/tmp/slurm-unpacked folder=/tmp/slurm-host cgroups=/tmp/slurm-cgroups
for pid_file in "$folder"/*.pid; do [ -f "$pid_file" ] && kill "$(cat "$pid_file")" 2>/dev/null && sleep 1; done
rm -rf "$folder"
mkdir -p "$unpacked" "$libraries" "$folder"/{state,spool,log}

# Programs go where Slurm was built to look for them; libraries only if the host has none of that name.
for deb in "$debs"/*.deb; do dpkg -x "$deb" "$unpacked"; done
for package in slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge; do dpkg -x "$debs/${package}_"*.deb /; done
for daemon in slurmd slurmctld slurmstepd; do [ -e /usr/sbin/$daemon ] || ln -s "/usr/sbin/$daemon-wlm" /usr/sbin/$daemon; done
command -v ip >/dev/null || cp "$unpacked/bin/ip" "$unpacked/sbin/tc" /usr/local/bin/
ldd /usr/sbin/{slurmd,slurmctld,munged} /usr/bin/srun /usr/local/bin/{ip,tc} \
  /usr/lib/x86_64-linux-gnu/slurm-wlm/*.so 2>/dev/null | awk '/not found/ { print $1 }' | sort -u |
  while read -r name; do
    found=$(find "$unpacked" -name "$name*" | head -n 1)
    [ -n "$found" ] && cp -L "$found" "$libraries/$name"
  done
export LD_LIBRARY_PATH=$libraries SLURM_CONF=$folder/slurm.conf NCCL_SOCKET_IFNAME=eth0

mkdir -p /etc/munge /run/munge /var/log/munge /var/lib/munge
[ -f /etc/munge/munge.key ] || (umask 377 && head -c 1024 /dev/urandom >/etc/munge/munge.key)
chown -R root /etc/munge /run/munge /var/log/munge /var/lib/munge
chmod 700 /etc/munge /var/log/munge
chmod 755 /run/munge
munge -n >/dev/null 2>&1 || { /usr/sbin/munged --force && sleep 1; }

if ! mountpoint -q "$cgroups"; then
  mkdir -p "$cgroups" && mount -t tmpfs none "$cgroups"
  for controller in freezer devices cpuacct; do
    mkdir -p "$cgroups/$controller" && mount -t cgroup -o $controller none "$cgroups/$controller"
  done
fi
printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=%s\n' "$cgroups" >"$folder/cgroup.conf"

num_gpus=$(nvidia-smi -L | wc -l)
num_hosts=$((num_gpus * hosts_a_gpu))
ip link show br0 >/dev/null 2>&1 || { ip link add br0 type bridge && ip addr add 10.77.0.254/24 dev br0 && ip link set br0 up; }
cat >"$SLURM_CONF" <<CONF
ClusterName=gpuhost
SlurmctldHost=$(hostname)(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
TaskProlog=$folder/task-prolog.sh
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
CONF
# Hosts share the machine's processors; the count is that of all of them, which OMP_NUM_THREADS does not lower.
for i in $(seq 1 "$num_hosts"); do
  if [ ! -e "/run/netns/n$i" ]; then
    ip netns add "n$i"
    ip link add "v$i" type veth peer name eth0 netns "n$i"
    ip link set "v$i" master br0 up
    ip -n "n$i" addr add "10.77.0.$i/24" dev eth0
    ip -n "n$i" link set eth0 up
    ip -n "n$i" link set lo up
    echo "10.77.0.$i n$i" >>/etc/hosts
  fi
  tc qdisc replace dev "v$i" root tbf rate "$rate" burst 4m latency 50ms
  nsenter --net="/run/netns/n$i" tc qdisc replace dev eth0 root tbf rate "$rate" burst 4m latency 50ms
  cpus=$(($(nproc --all) / hosts_a_gpu))
  echo "NodeName=n$i NodeAddr=10.77.0.$i Port=17000 CPUs=$cpus RealMemory=4000 Gres=gpu:1 State=UNKNOWN" >>"$SLURM_CONF"
  echo "NodeName=n$i Name=gpu File=/dev/nvidia$(((i - 1) % num_gpus))" >>"$folder/gres.conf"
done
for i in $(seq "$hosts_a_gpu"); do
  echo "SwitchName=s$i Nodes=n[$(((i - 1) * num_gpus + 1))-$((i * num_gpus))]" >>"$folder/topology.conf"
done
echo "SwitchName=top Switches=s[1-$hosts_a_gpu]" >>"$folder/topology.conf"
echo "PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP" >>"$SLURM_CONF"
# Without cgroups for devices Slurm hands every task the first GPU, and all ranks would share one.
cat >"$folder/task-prolog.sh" <<PROLOG
#!/bin/sh
echo export CUDA_VISIBLE_DEVICES=\$(( (\${SLURMD_NODENAME#n} - 1) % $num_gpus ))
PROLOG
chmod +x "$folder/task-prolog.sh"

slurmctld
for i in $(seq 1 "$num_hosts"); do
  mkdir -p "$folder/spool/n$i"
  nsenter --net="/run/netns/n$i" unshare --uts sh -c "hostname n$i; exec slurmd -N n$i"
done
until [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = "$num_hosts" ]; do
  [ $((waited = ${waited:-0} + 1)) -gt 60 ] && { echo "Slurm does not come up: see $folder/log" >&2; break; }
  sleep 0.5
done
sinfo -N
