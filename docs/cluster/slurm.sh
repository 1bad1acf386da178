#!/bin/bash
# A Ray cluster inside a Slurm allocation, and a study on it:  sbatch slurm.sh my-study.yaml
# Fill in: partition, GPUs a node, the environment to activate, the shared storage.
#SBATCH --job-name=ablate
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
# Slurm sends this before it ends or preempts the job: runs end with a checkpoint, and the job is put back.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail
STUDY=${1:?usage: sbatch slurm.sh STUDY.yaml}
STORAGE=${ABLATE_STORAGE:-/shared/ablate}
PORT=6379
# source /path/to/venv/bin/activate

# The cluster asks for a token of this job alone, in a file that only its user can read.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/token-$SLURM_JOB_ID"
(umask 077; mkdir -p "$HOME/.ray"; openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")

# Ray opens its temporary folder to everybody, and who writes there runs code as this user: on each node it
# lies in a folder that only this user can open.
export PRIVATE=/tmp/ablate-$SLURM_JOB_ID
start_ray() {
  srun --nodes=1 --ntasks=1 -w "$1" bash -c 'mkdir -m 700 "$PRIVATE" && exec ray start "$@" --block' ray "${@:2}"
}

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}

start_ray "$HEAD" --head --node-ip-address="$HEAD" --port=$PORT --temp-dir="$PRIVATE/r" &
sleep 20
for NODE in "${NODES[@]:1}"; do
  start_ray "$NODE" --address="$HEAD:$PORT" --temp-dir="$PRIVATE/r" &
done
sleep 20

ablate run "$STUDY" --address "$HEAD:$PORT" --storage "$STORAGE" &
DRIVER=$!
trap 'kill -TERM $DRIVER; wait $DRIVER; scontrol requeue "$SLURM_JOB_ID"' TERM
wait $DRIVER
