#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=a100:8
#SBATCH --time=1-12:00:00
#SBATCH --partition=a,b
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --mem=0
#SBATCH --chdir="/home/me/my run"
#SBATCH --output=%x-%j.out

module load cuda
source 'my env/bin/activate'

# the rendezvous is on the first machine
rendezvous_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
rendezvous_port=$((20000 + SLURM_JOB_ID % 10000))

words=(
    --num_machines "$SLURM_NNODES"
    --num_processes 16
    --main_process_ip "$rendezvous_host" --main_process_port "$rendezvous_port"
    --fsdp_version=2
    --mixed_precision=bf16
    --use_fsdp
    train.py --name 'it'"'"'s' '$HOME'
)

# a signal for this shell alone is passed on to the processes, which may save before they end
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch "${words[@]}" &
step=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    status=$?
done
exit "$status"
