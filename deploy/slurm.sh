#!/bin/bash
# A labelling campaign inside a Slurm allocation: one Ray node on each of its hosts, all GPUs of each.
#   sbatch --gpus-per-node=8 deploy/slurm.sh campaign.yaml
# A100s and V100s in different partitions are one campaign as a heterogeneous job; what stands below
# counts for its first part only:
#   sbatch --partition=a100 --nodes=2 --gpus-per-node=8 : --partition=v100 --nodes=2 --gpus-per-node=4 \
#     --ntasks-per-node=1 --exclusive --time=24:00:00 deploy/slurm.sh campaign.yaml
# Give --gpus-per-node all GPUs of a host: the others would be idle, as the host is yours alone. Run out of time it is paused, and the next `sbatch` of the same line goes on. TraPPM stands in a
# virtual environment on a file system that all hosts see, and so does the data folder.
#
# On several hosts the label store is PostgreSQL, named by TRAPPM_DATABASE or by the data folder's file
# database_url (and installed with TraPPM's extra `postgresql`); its password is best in ~/.pgpass, since
# Slurm keeps jobs' environments. SQLite's write-ahead log does not work across hosts: with it, take one
# host, and type `trappm` on that one only while the job runs.
#
#SBATCH --job-name=trappm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300

set -euo pipefail

campaign=${1:?"which campaign? sbatch deploy/slurm.sh campaign.yaml"}
venv=${TRAPPM_VENV:-$PWD/.venv}
export TRAPPM_HOME=${TRAPPM_HOME:-$PWD/trappm-home}
export PATH=$venv/bin:$PATH

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0
# Every host measures, the head as well, and running out of memory is an outcome of a measurement. So
# Ray's memory monitor is off on all; the kernel's killer takes Ray's workers before its services.
export RAY_memory_monitor_refresh_ms=0
# Known to this job only, and to nobody who lists processes.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

# Hosts of each part of the job; other jobs have one part.
lists=("$SLURM_JOB_NODELIST")
for part in $(seq 1 $((${SLURM_HET_SIZE:-1} - 1))); do
  list=SLURM_JOB_NODELIST_HET_GROUP_$part
  lists+=("${!list}")
done
lists[0]=${SLURM_JOB_NODELIST_HET_GROUP_0:-${lists[0]}}
hosts=() part_of=()
for part in "${!lists[@]}"; do
  while read -r host; do
    hosts+=("$host") part_of+=("$part")
    read -r has gets < <(scontrol show node --oneliner "$host" | sed -nE \
      's/.*CfgTRES=[^ ]*gres\/gpu=([0-9]+).* AllocTRES=[^ ]*gres\/gpu=([0-9]+).*/\1 \2/p') || continue
    [ "$gets" -ge "$has" ] || echo "slurm.sh: $host has $has GPUs and the job gets $gets;" \
      "give sbatch --gpus-per-node=$has" >&2
  done < <(scontrol show hostnames "${lists[$part]}")
done
database=${TRAPPM_DATABASE:-$(cat "$TRAPPM_HOME/database_url" 2>/dev/null || true)}
if [ "${#hosts[@]}" -gt 1 ] && [[ $database != postgres* ]]; then
  echo "slurm.sh: on ${#hosts[@]} hosts the label store must be PostgreSQL, since SQLite's log does not" \
    "work across hosts: set TRAPPM_DATABASE=postgresql+psycopg://user@host/labels, or take one host" \
    "(sbatch --nodes=1)" >&2
  exit 2
fi
head=${hosts[0]}
port=$((20000 + SLURM_JOB_ID % 20000))

srun ${SLURM_HET_SIZE:+--het-group=0} --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --node-ip-address="$head" --port="$port" --include-dashboard=false --block &
for _ in $(seq 60); do
  ray health-check --address "$head:$port" >/dev/null 2>&1 && break
  sleep 2
done
for part in "${!lists[@]}"; do
  workers=()
  for i in "${!hosts[@]}"; do
    [ "$i" = 0 ] || [ "${part_of[$i]}" != "$part" ] || workers+=("${hosts[$i]}")
  done
  [ "${#workers[@]}" -gt 0 ] || continue
  srun ${SLURM_HET_SIZE:+--het-group="$part"} --nodes="${#workers[@]}" --ntasks="${#workers[@]}" \
    --nodelist="$(IFS=,; echo "${workers[*]}")" --overlap ray start --address="$head:$port" --block &
done

# Slurm's warning, five minutes before the end, pauses the campaign; nothing recorded is lost.
# Where several run with one TRAPPM_HOME none is paused: each ends with its job, and its next job goes on.
warned= status=0
trap 'warned=yes; trappm campaign pause || true' TERM
trappm campaign launch "$campaign" --address "$head:$port" &
launched=$!
wait "$launched" || status=$?
if [ -n "$warned" ]; then # the warning has interrupted that, and a pause is no failure
  wait "$launched" || true
  status=0
fi
kill $(jobs -p) 2>/dev/null || true
wait
exit "$status"
