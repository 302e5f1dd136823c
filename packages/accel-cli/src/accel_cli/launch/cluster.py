"""Launches inside a cluster's job: its nodes and ranks are defaults, and nothing trains alone without being told to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accel_cli.errors import UsageError
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_state.clusters import ClusterPlace, NodePlace, check_alone, cluster_row, detect_cluster, detect_nodes

GIVEN = ("flag", "file", "environment")
WORKER_VARIABLES = ("LOCAL_RANK", "GROUP_RANK")
"""Of processes that torch's agent started. A launch inside one has nothing to do with the other ranks."""


def take_cluster(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    """Set number and rank of the machines, and the address of machine 0, from the variables of a scheduler or launcher.

    Args:
        settings: The settings by flags, config file and environment variables, which take precedence.
        environ: The environment variables.

    Returns:
        The settings. `started_by` names the launcher if it started this command once for each process.

    Raises:
        ValueError: When flags or file contradict the job, so that parts of it would train separate worlds.
    """
    if settings.sagemaker or settings.tpu or settings.deepspeed_hostfile or settings.launcher:
        return settings  # which start the processes on all machines themselves
    try:
        place, nodes = detect_cluster(environ), detect_nodes(environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if settings.mpirun_hostfile and (place is None or not _is_by_mpi(place)):
        return settings
    if nodes is not None:
        return _on_each_node(settings, nodes)
    if place is None:
        return _without_a_place(settings, environ)
    if place.world_size == 1:
        return settings.with_notes(*_unused_nodes(settings, environ))
    if place.cluster == "torchrun":
        _check_not_alone(settings, place, environ)
        return settings.with_changes(is_apart=True)
    return _for_each_process(settings, place)


def _without_a_place(settings: LaunchSettings, environ: Mapping[str, str]) -> LaunchSettings:
    """This command is no part of a job, or of one whose variables are incomplete."""
    try:
        check_alone(environ)
    except ValueError as error:
        if not _says_who_it_is(settings):
            raise UsageError(str(error)) from error
        settings = settings.with_changes(is_apart=True)
    return settings.with_notes(*_unused_nodes(settings, environ))


def _on_each_node(settings: LaunchSettings, nodes: NodePlace) -> LaunchSettings:
    """This command runs once on each node."""
    if (
        settings.rdzv_backend != ROWS["rdzv_backend"].default
    ):  # then no rank is needed, and scripts give 0 on all nodes
        settings = settings.with_changes(machine_rank=nodes.node_rank)
    contradictions = list(_contradictions(settings, nodes))
    if contradictions:
        raise UsageError(
            f"{nodes.cluster} runs this command on {nodes.num_nodes} nodes, of which this is {nodes.node_rank}, but "
            f"{' and '.join(contradictions)}: the nodes would train apart. Leave this out, or give --num_machines {nodes.num_nodes} "
            f"--machine_rank {nodes.node_rank} here."
        )
    count = settings.num_processes
    if count is not None and count % nodes.num_nodes:
        raise UsageError(
            f"{nodes.cluster} runs this command on {nodes.num_nodes} nodes, and num_processes is {count}, which does not divide into "
            "as many: it is the number of processes on all nodes together."
        )
    values: dict[str, object] = {"num_machines": nodes.num_nodes, "machine_rank": nodes.node_rank}
    if nodes.num_nodes > 1:
        values |= {"main_process_port": nodes.master_port}
        values |= {"main_process_ip": nodes.master_addr} if nodes.master_addr else {}
    if nodes.processes_per_node is not None:
        values["num_processes"] = nodes.processes_per_node * nodes.num_nodes
    return settings.with_changes(cluster=nodes.cluster).with_values(values, "cluster")


def _says_who_it_is(settings: LaunchSettings) -> bool:
    """Whether flags or file say how many machines there are, and which this one is."""
    told = {name for name in ("num_machines", "machine_rank") if settings.sources.get(name) in GIVEN}
    return len(told) == 2 or ("num_machines" in told and settings.num_machines == 1)


def _contradictions(settings: LaunchSettings, nodes: NodePlace) -> Iterator[str]:
    """Number and rank of machines that were given, and are not those of the job."""
    for name, value in (("num_machines", nodes.num_nodes), ("machine_rank", nodes.node_rank)):
        source, given = settings.sources.get(name), getattr(settings, name)
        if source in GIVEN and given != value:
            yield f"--{name} is {given}" if source == "flag" else f"{settings.settings_file} has {name}: {given}"


def _for_each_process(settings: LaunchSettings, place: ClusterPlace) -> LaunchSettings:
    """A launcher started this command once for each process, and each runs the script, unless it counts them as machines."""
    if settings.num_machines == place.world_size:
        return settings
    count = settings.num_processes
    if count not in (None, place.world_size):
        raise UsageError(
            f"{place.cluster} started this command {place.world_size} times, and num_processes is {count}: that would be "
            f"{place.world_size} separate runs. Start it once on each machine with --num_machines and --machine_rank (under SLURM: srun "
            "--ntasks-per-node=1), or leave num_processes out, and each of them is one process of a single run."
        )
    settings = settings.with_changes(cluster=place.cluster, started_by=place.cluster)
    return settings.with_values({"num_processes": place.world_size}, "cluster")


def _is_by_mpi(place: ClusterPlace) -> bool:
    row = cluster_row(place.cluster)
    return row is not None and row.collective_backend == "mpi"


def _check_not_alone(settings: LaunchSettings, place: ClusterPlace, environ: Mapping[str, str]) -> None:
    """Refuse where RANK and WORLD_SIZE describe other pods or machines, and no flag says what this one is."""
    own_run = settings.sources.get("num_machines") == "flag" or (settings.num_machines or 1) > 1
    if own_run or any(name in environ for name in WORKER_VARIABLES):
        return
    raise UsageError(
        f"RANK is {place.rank} and WORLD_SIZE {place.world_size}, but no flag says how many machines there are: this would train "
        "apart from the others. Give --num_machines, --machine_rank and --main_process_ip; or start `python` in place of `accelerate "
        "launch`, once for each rank; or give --num_machines 1 for a run of its own."
    )


def _unused_nodes(settings: LaunchSettings, environ: Mapping[str, str]) -> Iterator[str]:
    """A note for a batch script without `srun`, which runs on the first node of its job alone."""
    count = environ.get("SLURM_JOB_NUM_NODES", "")
    if count.isdigit() and int(count) > 1 and "SLURM_STEP_ID" not in environ and (settings.num_machines or 1) == 1:
        yield (
            f"this SLURM job has {count} nodes, and the run uses this one alone. To use all, write `srun --ntasks-per-node=1 accelerate "
            "launch ...`; `accelerate slurm` writes such a script."
        )


__all__ = ["take_cluster"]
