"""A SLURM cluster on one machine: a controller, and nodes with host names of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_ports

PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "unshare")
LOOK_SECONDS = 0.1

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=5
PartitionName=high Nodes=ALL PriorityTier=2
"""


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATHS) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "needs root, for host names of the nodes' own"


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Attributes:
        environ: The environment in which its commands find it.
    """

    environ: dict[str, str]

    def run(self, *command: str, seconds: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command that talks to the cluster, such as `srun`."""
        return subprocess.run(
            command, env={**self.environ, **variables}, capture_output=True, text=True, timeout=seconds, check=False
        )

    def submit(self, *words: str) -> str:
        """Submit a job with `accelerate slurm`, and return its number."""
        done = self.run("accelerate", "slurm", "--submit", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def about(self, job: str) -> dict[str, str]:
        """What SLURM says of a job, by its words."""
        said = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in said if "=" in word)

    def state(self, job: str) -> str:
        """The state of a job, such as RUNNING."""
        return self.about(job).get("JobState", "")


@contextmanager
def slurm(num_nodes: int = 2, cpus: int = 2) -> Iterator[Slurm]:
    """Start a cluster; all of its processes end with the context."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as running:
        folder = Path(name)
        host = socket.gethostname().partition(".")[0]
        names = [f"n{number}" for number in range(1, num_nodes + 1)]
        port, *ports = free_ports(num_nodes + 1)
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.{index} Port={ports[index - 2]} CPUs={cpus} RealMemory=4000"
            for index, node in enumerate(names, start=2)
        )
        (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, port=port, folder=folder, nodes=nodes))
        (folder / "state").mkdir()
        addresses = "".join(f"127.0.0.{index} {node}\n" for index, node in enumerate(names, start=2))
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host}\n{addresses}")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        environ = {
            "PATH": PATHS, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1", "HF_HOME": name,
            "LC_ALL": "C.UTF-8",
        }  # fmt: skip
        munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        _start(
            running, environ, folder, ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge]
        )
        wait_for((folder / "munge.socket").exists)
        _start(running, environ, folder, ["slurmctld", "-D", "-c"])
        for node in names:
            inside = f"hostname {node} && mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            _start(running, environ, folder, ["unshare", "--mount", "--uts", "sh", "-c", inside])
        cluster = Slurm(environ)
        wait_for(lambda: cluster.run("sinfo", "-h", "-p", "low", "-o", "%T").stdout.split() == ["idle"])
        yield cluster
        cluster.run("scancel", "--full", "--user=root")


def _start(running: ExitStack, environ: dict[str, str], folder: Path, command: Sequence[str]) -> None:
    log = running.enter_context(open(folder / "output.log", "a"))  # noqa: SIM115 - closed with the cluster
    process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    running.callback(process.wait)
    running.callback(process.terminate)


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(LOOK_SECONDS)
