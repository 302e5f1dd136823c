#!/bin/bash
# All GPUs of one machine: sbatch submit_multigpu.sh cv_example.py --epochs 3
#SBATCH --job-name=accelerate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=02:00:00

set -euo pipefail
# activate your environment here, for instance: source .venv/bin/activate

accelerate launch --num_machines 1 --num_processes "${SLURM_GPUS_ON_NODE:-4}" "$@"
