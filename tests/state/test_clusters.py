"""Places as the launchers announce them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.clusters import (
    CLUSTERS,
    NODE_CLUSTERS,
    ClusterPlace,
    ClusterRow,
    NodeRow,
    check_alone,
    cluster_row,
    detect_cluster,
    first_host,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head", "MASTER_PORT": "1234",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "4012345", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],extra",
}  # fmt: skip


def test_torchrun_and_its_words() -> None:
    place = detect_cluster(TORCHRUN)
    assert place == ClusterPlace("torchrun", 3, 4, 1, 2, "head", 1234)
    assert place.torch_variables() == TORCHRUN
    assert "MASTER_ADDR" not in ClusterPlace("PMI", 0, 2, 0, 1).torch_variables()


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        (
            "Open MPI",
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("MVAPICH", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PMI", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
    ],
)
def test_mpi_launchers(name: str, variables: str) -> None:
    rank, world_size, local_rank, local_world_size = variables.split()
    one_machine = {rank: "1", world_size: "2", local_rank: "1", local_world_size: "2"}
    assert detect_cluster(one_machine) == ClusterPlace(name, 1, 2, 1, 2, "127.0.0.1", 29500)
    two_machines = {rank: "3", world_size: "4", local_rank: "1", local_world_size: "2", "MASTER_PORT": "77"}
    assert detect_cluster(two_machines) == ClusterPlace(name, 3, 4, 1, 2, None, 77)
    assert detect_cluster(two_machines | {"MASTER_ADDR": "head"}).master_addr == "head"  # type: ignore[union-attr]
    assert detect_cluster({rank: "0", world_size: "1"}) is None


def test_slurm() -> None:
    assert detect_cluster(SLURM) == ClusterPlace("SLURM", 5, 7, 1, 2, "gpu007", 15000 + 2347)
    last = SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
    assert detect_cluster(last).local_world_size == 1  # type: ignore[union-attr]


def test_a_batch_script_is_not_a_step() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu[1-4]"}
    assert detect_cluster(script) is None
    assert detect_cluster(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun_and_mpirun_inside_a_step_come_before_the_step() -> None:
    assert detect_cluster(SLURM | TORCHRUN).cluster == "torchrun"  # type: ignore[union-attr]
    place = detect_cluster(SLURM | {"PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"})
    assert place == ClusterPlace("PMI", 9, 16, 3, 8, "gpu007", 29500)


def test_ranks_set_by_hand_or_by_deepspeed_may_leave_machines_out() -> None:
    assert detect_cluster({"RANK": "1", "WORLD_SIZE": "2"}) == ClusterPlace("torchrun", 1, 2, 1, 2, None, 29500)
    assert detect_cluster({"RANK": "0", "WORLD_SIZE": "1"}) == ClusterPlace("torchrun", 0, 1, 0, 1, None, 29500)
    assert detect_cluster({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}).local_world_size == 2  # type: ignore[union-attr]
    of_deepspeed = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "MASTER_ADDR": "a"}
    assert detect_cluster(of_deepspeed).local_world_size == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": "head", "MASTER_PORT": "1"},  # exported by a batch script for its steps
        {"LOCAL_RANK": "0"},
        {"OMPI_MCA_btl": "tcp", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # the shell of an allocation
        {"PET_NPROC_PER_NODE": "4"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "head"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},  # before it set the number of nodes
    ],
)
def test_a_process_alone(environ: dict[str, str]) -> None:
    assert detect_cluster(environ) is None
    check_alone(environ)


def all_but_one(row: ClusterRow | NodeRow) -> list[tuple[dict[str, str], str]]:
    """Sets of variables of the second of two processes or nodes, and the one that is missing in each."""
    if isinstance(row, ClusterRow):
        whole = {row.rank[0]: "1", row.world_size[0]: "2"}
    else:
        address = {row.master_addr: "head"} if row.master_addr else {str(row.addresses): "10.0.0.1\n10.0.0.2"}
        whole = {row.node_rank: "1", row.num_nodes: "2", row.processes_per_node: "1", **address}
    needed = [row.num_nodes, row.processes_per_node] if isinstance(row, NodeRow) else list(whole)
    sets = [({name: value for name, value in whole.items() if name != missing}, missing) for missing in needed]
    if isinstance(row, NodeRow):
        return [*sets, (address, row.num_nodes)]  # of node 0, whose rank may be left out
    return [*sets, ({row.local_rank[0]: "1"}, row.rank[0])]


ROWS: tuple[ClusterRow | NodeRow, ...] = (*CLUSTERS, *NODE_CLUSTERS)


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        *(pair for row in ROWS for pair in all_but_one(row)),
        ({"RANK": "0", "MASTER_ADDR": "head"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK"),
    ],
)
def test_a_half_given_set_of_variables_is_refused(environ: dict[str, str], missing: str) -> None:
    assert detect_cluster(environ) is None
    with pytest.raises(ValueError, match=rf"and {missing} is not(: this| 1: one)"):
        check_alone(environ)


def test_a_launcher_that_gave_all_excuses_what_another_left_out() -> None:
    step = {"RANK": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
    assert detect_cluster(step) == ClusterPlace("SLURM", 1, 2, 1, 2, "127.0.0.1", 15000)


def test_nonsense_is_refused_and_rows_are_found_by_name() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE is 'two'"):
        detect_cluster({"RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(ValueError, match="torchrun set rank 2 for world size 2"):
        detect_cluster({"RANK": "2", "WORLD_SIZE": "2"})
    assert [cluster_row(row.name) for row in CLUSTERS] == list(CLUSTERS)
    assert cluster_row("xla") is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("node[007-010,12],login", "node007"),
        ("node[3,5-7]", "node3"),
        ("rack[1-2]-node[05,07]", "rack1-node05"),
        ("a-b-[10-12].cluster.org,c", "a-b-10.cluster.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_machine_finds_its_number_of_tasks(counts: list[int]) -> None:
    listed = ",".join(map(str, counts))
    world_size = sum(counts) + 1  # never one machine alone
    for machine, count in enumerate(counts):
        variables = SLURM | {"SLURM_NODEID": str(machine), "SLURM_STEP_TASKS_PER_NODE": listed}
        place = detect_cluster(variables | {"SLURM_STEP_NUM_TASKS": str(world_size), "SLURM_PROCID": "0"})
        assert place is not None
        assert place.local_world_size == count
