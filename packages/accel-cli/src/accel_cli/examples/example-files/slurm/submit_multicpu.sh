#!/bin/bash
# Two processes on the CPUs of one machine: sbatch submit_multicpu.sh cv_example.py --epochs 3
#SBATCH --job-name=accelerate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=02:00:00

set -euo pipefail
# activate your environment here, for instance: source .venv/bin/activate

processes=2
threads=$((${SLURM_CPUS_PER_TASK:-16} / processes))
accelerate launch --cpu --num_machines 1 --num_processes $processes --num_cpu_threads_per_process $threads "$@"
