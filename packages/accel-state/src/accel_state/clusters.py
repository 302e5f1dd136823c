"""How the processes of a run are announced to each of them: torchrun, MPI launchers, SLURM."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500  # torch's own
SLURM_FIRST_PORT = 15000
SLURM_NUM_PORTS = 10000


@dataclass(frozen=True, slots=True)
class ClusterPlace:
    """One process's place among the processes of its run."""

    cluster: str
    """Who announced it: the name of a `ClusterRow`, or of the device kind whose runtime counts its own processes."""
    rank: int
    world_size: int
    local_rank: int
    """Counted among the processes of this machine."""
    local_world_size: int
    master_addr: str | None = None
    """Where the process of rank 0 listens; None when nobody said."""
    master_port: int | None = None

    def torch_variables(self) -> dict[str, str]:
        """This place in the words of torchrun, which libraries beside torch read as well."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """The variables by which one launcher announces places.

    A variable listed first is preferred. Without `rank` and `world_size` the launcher is not the one in charge.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    counts_alone: bool = False
    """Whether one single process is a run of this launcher too, rather than a program it happens to contain."""
    find_port: Callable[[Mapping[str, str]], int] = lambda environ: DEFAULT_PORT
    collective_backend: str | None = None
    """The backend that this launcher prepares for CPU processes, used where torch was built with it."""


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port that steps of different jobs on one machine are unlikely to share, the same on all ranks of a step."""
    job = _find_number(environ, ("SLURM_JOB_ID", "SLURM_JOBID")) or 0
    step = _find_number(environ, ("SLURM_STEP_ID", "SLURM_STEPID")) or 0
    return SLURM_FIRST_PORT + (job + step) % SLURM_NUM_PORTS


CLUSTERS: tuple[ClusterRow, ...] = (
    ClusterRow(
        "torchrun",
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        counts_alone=True,
    ),
    ClusterRow(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        collective_backend="mpi",
    ),
    ClusterRow(
        "MVAPICH",
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        collective_backend="mpi",
    ),
    # Before SLURM: inside an allocation mpirun starts one SLURM task per machine and the ranks below it.
    ClusterRow(
        "PMI",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "SLURM_LOCALID"),
        local_world_size=("MPI_LOCALNRANKS",),
        collective_backend="mpi",
    ),
    # The variables of a step, which only srun sets. Those of the job are also there in the batch script itself, where
    # nobody else would ever come to a rendezvous.
    ClusterRow(
        "SLURM",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        local_world_size=(),
        find_port=_slurm_port,
    ),
)


def detect_cluster(environ: Mapping[str, str]) -> ClusterPlace | None:
    """Find this process's place in the variables of the first launcher of the table that announced one.

    Args:
        environ: The environment, usually `os.environ`.

    Returns:
        The place, or None for a process that stands alone.

    Raises:
        ValueError: When the variables contradict one another or hold no number.
    """
    for row in CLUSTERS:
        rank = _find_number(environ, row.rank)
        world_size = _find_number(environ, row.world_size)
        if rank is None or world_size is None or (world_size == 1 and not row.counts_alone):
            continue
        return _place(row, rank, world_size, environ)
    return None


def cluster_row(name: str) -> ClusterRow | None:
    """The row called `name`; None when the place came from elsewhere."""
    return next((row for row in CLUSTERS if row.name == name), None)


def _place(row: ClusterRow, rank: int, world_size: int, environ: Mapping[str, str]) -> ClusterPlace:
    if rank >= world_size:
        raise ValueError(
            f"{row.name} announced rank {rank} of {world_size} processes ({row.rank[0]}, {row.world_size[0]}): ranks go "
            "from 0 to one less than the number of processes. Start all of them with one launcher, or unset both."
        )
    # A launcher that does not speak of machines means one.
    local_rank = _find_number(environ, row.local_rank)
    local_world_size = _find_number(environ, row.local_world_size) or _slurm_tasks_here(environ)
    if local_rank is None:
        local_rank = rank
    if local_world_size is None:
        local_world_size = world_size if local_rank == rank else local_rank + 1
    port = _find_number(environ, ("MASTER_PORT",))
    return ClusterPlace(
        cluster=row.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR") or _find_master(row, local_world_size == world_size, environ),
        master_port=row.find_port(environ) if port is None else port,
    )


def _find_master(row: ClusterRow, one_machine: bool, environ: Mapping[str, str]) -> str | None:
    if row.counts_alone:
        return None  # torchrun always says; variables set by hand must say it as well
    if one_machine:
        return "127.0.0.1"
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    return first_host(hosts) if hosts else None


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `"gpu[007-010,12],login"` gives `"gpu007"`."""
    first = re.split(r",(?![^\[]*\])", nodelist, maxsplit=1)[0]  # commas inside brackets separate numbers, not hosts
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first).strip()


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """How many tasks of the step run on this machine: `"2(x3),1"` lists the machines in their order."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    machine = _find_number(environ, ("SLURM_NODEID",))
    if not tasks or machine is None:
        return None
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        machine -= int(times or 1)
        if machine < 0:
            return int(count)
    return None


def _find_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of several variables that is set, as a number; negative ones count as unset."""
    for name in names:
        text = environ.get(name)
        if text is None or text == "":
            continue
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"Environment variable {name} is {text!r}: set an integer, or unset it.") from None
        if number >= 0:
            return number
    return None
