#!/bin/bash
#SBATCH --job-name=again
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=30
#SBATCH --chdir="/home/me/my run"
#SBATCH --output=%x-%j.out
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60

words=(
    --num_machines "$SLURM_NNODES"
    --num_processes 4
    --main_process_port 0
    --cpu
    --module
    train --epochs 3
)

# SLURM counts how often it has requeued the job
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    words+=(--resume 'the latest')
fi

# a signal for this shell alone is passed on to the processes, which may save before they end
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

# before the time limit, SLURM signals this shell; the job is then ended and requeued
trap 'gives_way=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# on preemption, SLURM signals the processes, which then end
was_preempted() {
    scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'
}

# somebody has signalled the processes, which have saved, and has not cancelled the job
has_saved() {
    [ "$status" -eq 175 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING'
}

srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'trap asked=yes TERM
    accelerate launch --machine_rank "$SLURM_NODEID" "$@"
    status=$?
    # after a signal all save, and end with 75: the other machines end by themselves within this time
    [ "$status" -ne 75 ] || { sleep 10; [ -z "${asked:-}" ] || status=175; }
    exit "$status"' launch "${words[@]}" &
step=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    status=$?
done
if [ "$status" -ne 0 ] && { [ -n "${gives_way:-}" ] || was_preempted || has_saved; }; then
    echo "job $SLURM_JOB_ID is requeued after ${SLURM_RESTART_COUNT:-0} restarts" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
[ "$status" -ne 175 ] || status=75
exit "$status"
