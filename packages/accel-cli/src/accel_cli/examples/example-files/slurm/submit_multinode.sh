#!/bin/bash
# All GPUs of several machines: sbatch submit_multinode.sh cv_example.py --epochs 3
# One task on each machine runs the launcher there. `accelerate slurm` writes such a script from options, with requeueing.
#SBATCH --job-name=accelerate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=02:00:00

set -euo pipefail
# activate your environment here, for instance: source .venv/bin/activate

gpus=${SLURM_GPUS_ON_NODE:-4}
main_ip=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

# SLURM_NODEID differs from task to task, so the inner shell reads it
srun bash -c 'accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch \
    --num_machines "$SLURM_NNODES" \
    --num_processes $((SLURM_NNODES * gpus)) \
    --main_process_ip "$main_ip" \
    --main_process_port 29500 \
    --rdzv_backend static \
    "$@"
