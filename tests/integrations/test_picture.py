"""The mesh as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_integrations.parallel.picture import Holding, draw_mesh, groups_along
from accel_state.mesh import ParallelismConfig
from accel_state.mesh_axes import MESH_AXES
from accel_state.settings.parallelism import TorchTensorParallelConfig
from accelerate import Accelerator
from tests.support.ranks import ranks
from tests.support.tiny_transformer import TP_PLAN, make_model

TWO_BY_TWO = """\
4 processes: dp_shard 2 x tp 2

            tp
dp_shard      0  1
       0  |   0  1   batch 0
       1  |   2  3   batch 1

dp_shard  data parallel, sharded parameters: 0 2 | 1 3
tp        tensor parallel, sharded layers: 0 1 | 2 3

rank      parameters  optimizer state
 0-3  12.0 KiB (25%)         24.0 KiB
The model has 48.0 KiB of parameters."""

ONE_AXIS = """\
3 processes: dp_replicate 3

  dp_replicate
    0  1  2
    0  1  2

dp_replicate  data parallel replicas: 0-2"""

ALONE = """\
One process, no parallelism.

rank     parameters  optimizer state
   0  1000 B (100%)              0 B
The model has 1000 B of parameters."""


def test_a_grid_one_axis_and_one_process() -> None:
    assert draw_mesh({"dp_shard": 2, "tp": 2}, [Holding(12288, 24576, 49152)] * 4) == TWO_BY_TWO
    assert draw_mesh({"pp": 1, "dp_replicate": 3, "tp": 1}) == ONE_AXIS
    assert draw_mesh({"dp_replicate": 1}, [Holding(1000, 0, 1000)]) == ALONE


def test_stages_add_up_to_the_model() -> None:
    text = draw_mesh({"pp": 2, "tp": 2}, [Holding(512, 0, 1024)] * 2 + [Holding(1024, 0, 2048)] * 2)
    assert "0-1    512 B (17%)" in text
    assert "2-3  1.0 KiB (33%)" in text
    assert text.endswith("The model has 3.0 KiB of parameters.")


def test_64_processes_fit_a_screen() -> None:
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "tp": 4}
    lines = draw_mesh(sizes, [Holding(index, 0, 64) for index in range(64)]).splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) < 115
    assert lines[-2:] == ["and 48 more lines", "The model has 128 B of parameters."]
    wide = draw_mesh({"dp_shard": 64}).splitlines()
    assert max(map(len, wide)) < 100


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=len(MESH_AXES), max_size=len(MESH_AXES)))
def test_groups_and_batches_are_those_of_the_configuration(counts: list[int]) -> None:
    sizes = dict(zip(MESH_AXES, counts, strict=True))
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        sizes["sp"] = 1
    config = ParallelismConfig(sp_backend="torch", **{f"{axis}_size": size for axis, size in sizes.items()})
    world = config.total_size
    for axis in sizes:
        groups = groups_along(sizes, axis)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        if axis in ("tp", "cp", "sp", "pp"):
            for group in groups:
                assert len({config.data_shard(rank, world).index for rank in group}) == 1


@ranks(2)
def test_an_accelerator_shows_its_mesh(rank: int) -> None:
    import contextlib
    import io

    handler = TorchTensorParallelConfig(plan=TP_PLAN)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    accelerator.prepare(make_model())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print_parallelism()
    lines = printed.getvalue().splitlines()
    assert lines[:1] == (["2 processes: tp 2"] if rank == 0 else [])
    if rank == 0:
        full = sum(parameter.nbytes for parameter in make_model().parameters())
        assert lines[-1] == f"The model has {full / 1024:.1f} KiB of parameters."
        assert lines[-2].startswith(" 0-1")
        assert "(5" in lines[-2]  # norms and positions are not sharded


def test_without_a_mesh_processes_are_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    Accelerator(cpu=True).print_parallelism()
    assert capsys.readouterr().out.startswith("One process")
