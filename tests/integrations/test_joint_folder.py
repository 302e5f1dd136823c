"""Sharded models are written by all ranks together, into the files that one process would write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel.weights.write import write_model_folder
from accel_ops.files.byte_ranges import chunk_runs
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig, TorchTensorParallelConfig
from tests.support.ranks import ranks
from tests.support.tiny_transformer import TP_PLAN, make_model


class Odd(nn.Module):
    """Sizes that no number of ranks divides, several dtypes, a buffer, and a parameter with less rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 7)
        self.narrow = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("steps", torch.arange(3))


def settings(kind: str) -> dict[str, Any]:
    sizes = {
        "fsdp2": {},
        "tp": {"tp_size": 2},
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "ddp+tp": {"dp_replicate_size": 2, "tp_size": 2},
    }[kind]
    handler = TorchTensorParallelConfig(plan=TP_PLAN) if "tp_size" in sizes else None
    made: dict[str, Any] = {"parallelism_config": ParallelismConfig(**sizes, tp_handler=handler) if sizes else None}
    if kind in ("fsdp2", "hsdp"):
        made["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def no_gathering(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a full tensor was gathered")


def same_as_one_process(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from torch.distributed.tensor import DTensor

    accelerator = Accelerator(cpu=True, **settings(kind))
    for name, make in (("transformer", lambda: make_model(tied=True)), ("odd", Odd)):
        if name == "odd" and "tp" in kind:
            continue
        for size in ("10GB", "4KB"):
            write_model_folder(make().state_dict(), tmp_path / f"alone{rank}", size)
            model = accelerator.prepare(make())
            with monkeypatch.context() as patch:
                patch.setattr(DTensor, "full_tensor", no_gathering)
                accelerator.save_model(model, tmp_path / "joint", max_shard_size=size)
            accelerator.wait_for_everyone()
            assert contents(tmp_path / "joint") == contents(tmp_path / f"alone{rank}")
            accelerator.wait_for_everyone()
            accelerator.free_memory()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
@ranks(2)
def test_files_are_those_of_one_process(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    same_as_one_process(rank, tmp_path, monkeypatch, kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hsdp", "ddp+tp"])
@ranks(4)
def test_replicas_write_once(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    same_as_one_process(rank, tmp_path, monkeypatch, kind)


@ranks(2)
def test_a_disk_that_is_full_for_one_rank_leaves_the_old_folder(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True, **settings("fsdp2"))
    model = accelerator.prepare(make_model())
    accelerator.save_model(model, tmp_path / "joint")
    before = contents(tmp_path / "joint")

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with monkeypatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "pwrite", full)
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            accelerator.save_model(model, tmp_path / "joint")
    accelerator.wait_for_everyone()
    assert contents(tmp_path / "joint") == before
    assert os.listdir(tmp_path) == ["joint"]


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "num_runs"),
    [
        ((4, 3), (1, 0), (2, 3), 1),
        ((4, 3), (0, 1), (4, 2), 4),
        ((4, 3, 2), (1, 1, 0), (2, 2, 2), 2),
        ((4, 3, 2), (0, 0, 1), (4, 3, 1), 12),
        ((5,), (2,), (3,), 1),
        ((), (), (), 1),
        ((4, 3), (4, 0), (0, 3), 0),
    ],
)
def test_runs_of_a_chunk(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], num_runs: int
) -> None:
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    chunk = full[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))].flatten()
    runs = list(chunk_runs(shape, offsets, sizes))
    assert len(runs) == num_runs
    for place, begin, count in runs:
        assert torch.equal(full.flatten()[place : place + count], chunk[begin : begin + count])
    assert sum(count for *_, count in runs) == len(chunk)
