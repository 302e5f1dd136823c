"""Rank and world size from the environment variables of launchers, and the nodes of a job from those of schedulers.

Launchers (torchrun, MPI launchers, `srun`) start a command once for each process; Kubeflow, SkyPilot and dstack once on each node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

DEFAULT_PORT = 29500  # torch's own
SLURM_FIRST_PORT = 15000
SLURM_NUM_PORTS = 10000


class ClusterPlace(NamedTuple):
    """Rank, world size and rendezvous address of one process."""

    cluster: str
    """Where they come from: the name of a `ClusterRow`, or of a device kind whose runtime sets the ranks."""
    rank: int
    world_size: int
    local_rank: int
    """Counted among the processes of this machine."""
    local_world_size: int
    master_addr: str | None = None
    """The address at which rank 0 listens; None when it is not known."""
    master_port: int | None = None

    def torch_variables(self) -> dict[str, str]:
        """The environment variables of torchrun, which other libraries read too."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


class ClusterRow(NamedTuple):
    """The environment variables in which one launcher passes ranks.

    A variable listed first is preferred. Without values for `rank` and `world_size`, the launcher did not start the process.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    counts_alone: bool = False
    """Whether a world size of 1 counts as a run of this launcher, rather than as a program inside one of its jobs."""
    find_port: Callable[[Mapping[str, str]], int] = lambda environ: DEFAULT_PORT
    collective_backend: str | None = None
    """The backend that this launcher prepares for CPU processes, used where torch was built with it."""

    def half_given(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """A variable that says that there are other processes, and the one that is missing beside it; None without such a pair.

        Rank 0 without a world size is a process alone, as in a batch script of SLURM; not where people set the variables themselves.
        """
        rank, world_size = _find_number(environ, self.rank), _find_number(environ, self.world_size)
        if rank is None and (world_size or 1) > 1:
            return self.world_size[0], self.rank[0]
        if world_size is None and rank is not None and (rank > 0 or self.counts_alone):
            return self.rank[0], self.world_size[0]
        own_local_rank = self.local_rank[:1]  # others are those of another launcher
        if rank is None and world_size is None and (_find_number(environ, own_local_rank) or 0) > 0:
            return own_local_rank[0], self.rank[0]
        return None


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port that is the same on all ranks of a step, and most likely another one for other jobs on the machine."""
    job = _find_number(environ, ("SLURM_JOB_ID", "SLURM_JOBID")) or 0
    step = _find_number(environ, ("SLURM_STEP_ID", "SLURM_STEPID")) or 0
    return SLURM_FIRST_PORT + (job + step) % SLURM_NUM_PORTS


CLUSTERS: tuple[ClusterRow, ...] = (
    ClusterRow(
        "torchrun",
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # the second is DeepSpeed's
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
    # no other process would ever join a rendezvous.
    ClusterRow(
        "SLURM",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        local_world_size=(),
        find_port=_slurm_port,
    ),
)


class NodePlace(NamedTuple):
    """The nodes of a job, and which of them this is: its command runs once on each."""

    cluster: str
    """The name of a `NodeRow`, or SLURM."""
    num_nodes: int
    node_rank: int
    master_addr: str | None = None
    """The address of node 0."""
    master_port: int = DEFAULT_PORT
    processes_per_node: int | None = None
    """None where the job leaves it open."""


class NodeRow(NamedTuple):
    """The environment variables in which one scheduler passes the nodes of a job. Without `num_nodes`, it did not start this one."""

    name: str
    num_nodes: str
    node_rank: str
    processes_per_node: str
    master_addr: str | None = None
    addresses: str | None = None
    """Of all nodes, one a line; that of node 0 comes first."""
    master_port: str | None = None

    @property
    def variables(self) -> str:
        """The variables, for messages."""
        names = (self.num_nodes, self.node_rank, self.master_addr or self.addresses, self.processes_per_node)
        return ", ".join(name for name in names if name)

    def half_given(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """As that of a `ClusterRow`: a variable that says that there are other nodes, and the one that is missing."""
        if environ.get(self.num_nodes):
            return None  # `_node_place` looks at those
        if (_find_number(environ, (self.node_rank,)) or 0) > 0:
            return self.node_rank, self.num_nodes
        if self.addresses and len(environ.get(self.addresses, "").split()) > 1:
            return self.addresses, self.num_nodes
        if self.master_addr and environ.get(self.master_addr):
            return self.master_addr, self.num_nodes
        return None


NODE_CLUSTERS: tuple[NodeRow, ...] = (
    NodeRow(
        "Kubeflow",
        num_nodes="PET_NNODES",
        node_rank="PET_NODE_RANK",
        processes_per_node="PET_NPROC_PER_NODE",
        master_addr="PET_MASTER_ADDR",
        master_port="PET_MASTER_PORT",
    ),
    NodeRow(
        "SkyPilot",
        num_nodes="SKYPILOT_NUM_NODES",
        node_rank="SKYPILOT_NODE_RANK",
        processes_per_node="SKYPILOT_NUM_GPUS_PER_NODE",
        addresses="SKYPILOT_NODE_IPS",
    ),
    NodeRow(
        "dstack",
        num_nodes="DSTACK_NODES_NUM",
        node_rank="DSTACK_NODE_RANK",
        processes_per_node="DSTACK_GPUS_PER_NODE",
        master_addr="DSTACK_MASTER_NODE_IP",
        addresses="DSTACK_NODES_IPS",
    ),
)


def detect_nodes(environ: Mapping[str, str]) -> NodePlace | None:
    """Find the nodes of the job in which this command runs, once on each of them.

    Args:
        environ: The environment, usually `os.environ`.

    Returns:
        The nodes, or None where no scheduler of the tables has started this, or SLURM several times on one node.

    Raises:
        ValueError: When the variables contradict one another or do not hold integers.
    """
    for row in NODE_CLUSTERS:
        if environ.get(row.num_nodes):
            return _node_place(row, environ)
    place = detect_cluster(environ)
    if place is None or place.cluster != "SLURM" or _most_tasks_per_node(environ) != 1:
        return None
    port = place.master_port or DEFAULT_PORT
    return NodePlace("SLURM", place.world_size, place.rank, place.master_addr, port)


def _node_place(row: NodeRow, environ: Mapping[str, str]) -> NodePlace:
    if ":" in environ[row.num_nodes]:
        raise ValueError(
            f"{row.num_nodes}={environ[row.num_nodes]} leaves the number of nodes open, and the world size of a run here is fixed: "
            "set one number."
        )
    num_nodes = _find_number(environ, (row.num_nodes,)) or 1
    node_rank = _find_number(environ, (row.node_rank,))
    if node_rank is None and num_nodes > 1:
        raise ValueError(f"{row.num_nodes}={num_nodes} is set, and {row.node_rank} is not: set both, or neither.")
    if (node_rank or 0) >= num_nodes:
        raise ValueError(f"{row.node_rank}={node_rank} is not the rank of one of {num_nodes} nodes ({row.num_nodes}).")
    count = environ.get(row.processes_per_node, "")
    return NodePlace(
        cluster=row.name,
        num_nodes=num_nodes,
        node_rank=node_rank or 0,
        master_addr=_address_of_node_0(row, num_nodes, environ),
        master_port=_find_number(environ, (row.master_port or "MASTER_PORT",)) or DEFAULT_PORT,
        processes_per_node=int(count) if count.isdigit() and int(count) > 0 else None,
    )


def _address_of_node_0(row: NodeRow, num_nodes: int, environ: Mapping[str, str]) -> str | None:
    addresses = environ.get(row.addresses or "", "").split()
    if addresses and len(addresses) != num_nodes:
        raise ValueError(
            f"{row.addresses} has {len(addresses)} addresses for {num_nodes} nodes ({row.num_nodes}): {', '.join(addresses)}."
        )
    return environ.get(row.master_addr or "") or next(iter(addresses), None) or environ.get("MASTER_ADDR")


def detect_cluster(environ: Mapping[str, str]) -> ClusterPlace | None:
    """Find rank and world size of this process in the variables of the first launcher of the table that has set them.

    Args:
        environ: The environment, usually `os.environ`.

    Returns:
        Rank and world size, or None for a process that no launcher started.

    Raises:
        ValueError: When the variables contradict one another or do not hold integers.
    """
    for row in CLUSTERS:
        rank = _find_number(environ, row.rank)
        world_size = _find_number(environ, row.world_size)
        if rank is None or world_size is None or (world_size == 1 and not row.counts_alone):
            continue
        return _rank_info(row, rank, world_size, environ)
    return _single_process_of_node(environ)


def check_alone(environ: Mapping[str, str]) -> None:
    """Check that this process, for which `detect_cluster` found no place, is not one of several of which others know.

    Args:
        environ: The environment, usually `os.environ`.

    Raises:
        ValueError: Variables of a row of the tables say so, and the one that says which one it is is missing.
    """
    rows: tuple[ClusterRow | NodeRow, ...] = (*CLUSTERS, *NODE_CLUSTERS)
    for row in rows:
        if (pair := row.half_given(environ)) is not None:
            name, missing = pair
            raise ValueError(
                f"{name}={environ[name]!r} is set, and {missing} is not: this process would train apart from the others. Set both, or "
                f"unset {name} for a run of its own."
            )
    for nodes in NODE_CLUSTERS:
        if (_find_number(environ, (nodes.num_nodes,)) or 1) > 1:
            raise ValueError(
                f"{nodes.num_nodes} is {environ[nodes.num_nodes]}, and {nodes.processes_per_node} is not 1: one process on each node would "
                f"train apart from the others. Start it with `accelerate launch`, set {nodes.processes_per_node} to 1, or unset "
                f"{nodes.num_nodes} for a run of its own."
            )


def _single_process_of_node(environ: Mapping[str, str]) -> ClusterPlace | None:
    """The place of a process that a scheduler started as the only one of its node; None for all others."""
    row = next((row for row in NODE_CLUSTERS if environ.get(row.num_nodes)), None)
    nodes = None if row is None else _node_place(row, environ)
    if nodes is None or nodes.num_nodes == 1 or nodes.processes_per_node != 1:
        return None
    return ClusterPlace(nodes.cluster, nodes.node_rank, nodes.num_nodes, 0, 1, nodes.master_addr, nodes.master_port)


def cluster_row(name: str) -> ClusterRow | None:
    """The row called `name`; None if there is no such row."""
    return next((row for row in CLUSTERS if row.name == name), None)


def _rank_info(row: ClusterRow, rank: int, world_size: int, environ: Mapping[str, str]) -> ClusterPlace:
    if rank >= world_size:
        raise ValueError(
            f"{row.name} set rank {rank} for world size {world_size} ({row.rank[0]}, {row.world_size[0]}): ranks go "
            "from 0 to the world size minus 1. Start all processes with one launcher, or unset both variables."
        )
    # Without variables of local ranks, all processes are on one machine.
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
        return None  # torchrun always sets MASTER_ADDR; whoever sets the variables by hand must set it too
    if one_machine:
        return "127.0.0.1"
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    return first_host(hosts) if hosts else None


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `"gpu[007-010,12],login"` gives `"gpu007"`."""
    first = re.split(r",(?![^\[]*\])", nodelist, maxsplit=1)[0]  # commas inside brackets separate numbers, not hosts
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first).strip()


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """The number of tasks of the step on this machine: `"2(x3),1"` lists the machines in their order."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    machine = _find_number(environ, ("SLURM_NODEID",))
    if not tasks or machine is None:
        return None
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        machine -= int(times or 1)
        if machine < 0:
            return int(count)
    return None


def _most_tasks_per_node(environ: Mapping[str, str]) -> int:
    """The largest number of tasks that the step has on one node."""
    tasks = re.findall(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(map(int, tasks), default=0)


def _find_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of several variables that is set, as an int; negative ones count as unset."""
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
