#!/bin/bash
# FSDP2 over all GPUs of several machines: sbatch submit_multinode_fsdp.sh train.py --epochs 3
# Parameters, gradients and optimizer states are sharded over all processes, block by block of the transformer.
#SBATCH --job-name=accelerate-fsdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00

set -euo pipefail
# activate your environment here, for instance: source .venv/bin/activate

gpus=${SLURM_GPUS_ON_NODE:-8}
main_ip=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

# SLURM_NODEID differs from task to task, so the inner shell reads it
srun bash -c 'accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch \
    --num_machines "$SLURM_NNODES" \
    --num_processes $((SLURM_NNODES * gpus)) \
    --main_process_ip "$main_ip" \
    --main_process_port 29500 \
    --rdzv_backend static \
    --mixed_precision bf16 \
    --use_fsdp \
    --fsdp_version 2 \
    --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
    --fsdp_state_dict_type SHARDED_STATE_DICT \
    "$@"
