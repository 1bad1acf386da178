#!/usr/bin/env bash
# Trains a run as a Slurm job of its own, from an `ablate run` on a node without GPUs:
#   command: [bash, slurm.sh, job.sh, --seed, "{seed}", …]
#   metrics: {preset: megatron, file: "{run_dir}/slurm.log"}
# `sbatch --wait` leaves its job behind when it is ended. Here the job's name is of the run's folder: by it the
# job is cancelled with its attempt, or by the next one, and waits for the end of any other of its name.
name="ablate-$(cksum <<< "$ABLATE_RUN_DIR" | tr ' ' -)"
trap 'scancel --name="$name"' EXIT
trap exit TERM
scancel --name="$name"
sbatch --wait --job-name="$name" --dependency=singleton --open-mode=append --output="$ABLATE_RUN_DIR/slurm.log" "$@" &
wait $!
