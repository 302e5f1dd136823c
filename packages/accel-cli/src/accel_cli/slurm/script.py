"""The text of a batch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from accel_cli.slurm.job import Job

# ports below 32768 are not used for outgoing connections; jobs on one machine have different ones
FIRST_PORT = 20000
NUM_PORTS = 10000

RESTARTS = "SLURM_RESTART_COUNT"

# srun does not inherit --cpus-per-task of sbatch
SRUN = 'srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1'

# the rank of the machine is known in the task only
TASK = """'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch "${words[@]}" """.strip()

SAVED = 175  # of a task that was signalled, and whose processes have saved and ended with 75

# srun ends the other tasks when one ends with a status other than 0
PATIENT_TASK = f"""
'trap asked=yes TERM
    accelerate launch --machine_rank "$SLURM_NODEID" "$@"
    status=$?
    # after a signal all save, and end with 75: the other machines end by themselves within this time
    [ "$status" -ne 75 ] || {{ sleep 10; [ -z "${{asked:-}}" ] || status={SAVED}; }}
    exit "$status"' launch "${{words[@]}}"
""".strip()

SIGNALS = """
# a signal for this shell alone is passed on to the processes, which may save before they end
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
""".strip()

REQUEUE = f"""
# before the time limit, SLURM signals this shell; the job is then ended and requeued
trap 'gives_way=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# on preemption, SLURM signals the processes, which then end
was_preempted() {{
    scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'
}}

# somebody has signalled the processes, which have saved, and has not cancelled the job
has_saved() {{
    [ "$status" -eq {SAVED} ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING'
}}
""".strip()

# a signal ends a wait, but not the step
WAIT = """
step=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    status=$?
done
""".strip()

REQUEUE_OR_NOT = f"""
if [ "$status" -ne 0 ] && {{ [ -n "${{gives_way:-}}" ] || was_preempted || has_saved; }}; then
    echo "job $SLURM_JOB_ID is requeued after ${{{RESTARTS}:-0}} restarts" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
[ "$status" -ne {SAVED} ] || status=75
""".strip()


def batch_script(job: Job) -> str:
    """Write the batch script of a job.

    Args:
        job: The job.

    Returns:
        A script for bash, with the options of sbatch at its head.
    """
    parts = [
        "#!/bin/bash\n" + "\n".join(f"#SBATCH {line}" for line in _head(job)),
        *(["\n".join(job.setup)] if job.setup else []),
        *_meeting(job),
        "\n".join(_words(job)),
        *([_resume(job)] if job.resume_words else []),
        SIGNALS,
        *([REQUEUE] if job.requeue else []),
        _start(job),
    ]
    return "\n\n".join(parts) + "\n"


def sbatch_quoted(text: str) -> str:
    """Quote a value for an #SBATCH line, whose rules differ from those of a shell."""
    if re.fullmatch(r"[A-Za-z0-9_.,:=@%+/~-]*", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _head(job: Job) -> Iterator[str]:
    yield f"--job-name={sbatch_quoted(job.name)}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={job.cpus_per_task}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    yield from job.options
    yield f"--chdir={sbatch_quoted(job.folder)}"
    yield "--output=%x-%j.out"
    if job.requeue is False:
        yield "--no-requeue"
    if job.requeue:
        yield "--requeue"
        yield "--open-mode=append"
        yield f"--signal=B:USR1@{job.grace_seconds}"


def _meeting(job: Job) -> Iterator[str]:
    """Set the address and the port of the rendezvous."""
    if job.nodes == 1:
        return
    port = str(job.port or f"$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))")
    yield (
        "# the rendezvous is on the first machine\n"
        'rendezvous_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"rendezvous_port={port}"
    )


def _words(job: Job) -> Iterator[str]:
    """Yield the arguments of `accelerate launch`, one or a pair on each line."""
    yield "words=("
    yield '    --num_machines "$SLURM_NNODES"'
    yield f"    --num_processes {job.num_processes}"
    if job.nodes > 1:
        yield '    --main_process_ip "$rendezvous_host" --main_process_port "$rendezvous_port"'
    else:
        yield f"    --main_process_port {job.port or 0}"
    flags = list(job.launch_words)
    if flags[:1] == ["--config_file"]:
        yield f"    {shlex.join(flags[:2])}"
        flags = flags[2:]
    yield from (f"    {shlex.quote(flag)}" for flag in flags)
    yield f"    {shlex.join(job.script_words)}"
    yield ")"


def _resume(job: Job) -> str:
    return (
        "# SLURM counts how often it has requeued the job\n"
        f'if [ "${{{RESTARTS}:-0}}" -gt 0 ]; then\n'
        f"    words+=({shlex.join(job.resume_words)})\n"
        "fi"
    )


def _start(job: Job) -> str:
    # bash handles signals only while it waits for a background process
    task = PATIENT_TASK if job.requeue else TASK
    lines = [f"{SRUN} \\\n    bash -c {task} &", WAIT, *([REQUEUE_OR_NOT] if job.requeue else []), 'exit "$status"']
    return "\n".join(lines)
