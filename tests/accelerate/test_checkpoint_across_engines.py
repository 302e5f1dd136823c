"""A training state goes on under another engine, and what cannot says so before anything changes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_integrations.training_state.formats.flat_layout import divided_pieces, joined_pieces
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import DummyOptim, DummyScheduler
from tests.support.changed_engines import ENGINES, cells, mark_of, try_cells
from tests.support.leaks import reset_state
from tests.support.ranks import ranks

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
LOCAL = {"fsdp_version": 1, "state_dict_type": "LOCAL_STATE_DICT", "use_orig_params": True}
MICRO_BATCH = {"train_micro_batch_size_per_gpu": 2}

OF_TORCH = (
    "single>fsdp1-flat-sharded",  # numbered states, tied weights, and parameters that are joined into flat ones
    "single>pp",
    "ddp>single",
    "fsdp2-sharded>single",
    "fsdp2-sharded>pp",
    "fsdp2-full>tp",
    "fsdp1-flat-full>fsdp2-sharded",
    "fsdp1-sharded>ddp",
    "tp>fsdp1-full",
    "pp>fsdp2-full",
)
FROM_DEEPSPEED = ("zero0>tp", "zero1>ddp", "zero2>single", "zero2>fsdp2-sharded", "zero3>pp", "zero3>fsdp1-sharded")
INTO_DEEPSPEED = ("single>zero2", "fsdp2-sharded>zero3", "pp>zero0", "tp>zero1", "fsdp1-full>zero2")
OF_DEEPSPEED = ("zero2>zero3", "zero3>zero1", "zero0>zero2", "zero2@1>zero2", "zero3>zero2@1")
ON_FOUR_RANKS = ("hsdp>single", "zero2>fsdp2+pp", "fsdp2+tp>pp", "ddp+pp>hsdp", "single>fsdp2+tp")
"""Parts of the matrix of `tests.support.changed_engines`."""


def differences(folder: Path, names: tuple[str, ...]) -> dict[str, list[str]]:
    tried = [(saver, loader, number) for saver, loader, number in cells() if f"{saver}>{loader}" in names]
    assert len(tried) == len(names)
    actual = try_cells(folder, tried, timeout=300)
    return {cell: texts for cell, texts in actual.items() if mark_of(texts) != "="}


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_TORCH, id="torch"),
        pytest.param(FROM_DEEPSPEED, id="from-deepspeed", marks=needs_deepspeed),
        pytest.param(INTO_DEEPSPEED, id="into-deepspeed", marks=needs_deepspeed),
        pytest.param(OF_DEEPSPEED, id="deepspeed", marks=needs_deepspeed),
        pytest.param(ON_FOUR_RANKS, id="four-ranks", marks=needs_deepspeed),
    ],
)
def test_a_run_goes_on_under_another_engine(names: tuple[str, ...], tmp_path: Path) -> None:
    assert differences(tmp_path, names) == {}


def test_every_engine_of_the_matrix_has_a_group_count_in_common_with_all_others() -> None:
    assert len(cells()) == len(ENGINES) ** 2


# ---- flat buffers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[(3, 5), (1,), (4, 2, 2)], [(2,)], [(7, 1), ()]])
def test_flat_buffers_hold_every_value_once(num_ranks: int, sizes: list[tuple[int, ...]]) -> None:
    shapes = {f"p{index}": size for index, size in enumerate(sizes)}
    values = {name: torch.rand(torch.Size(shape).numel()) for name, shape in shapes.items()}
    paddings = [index % 2 * 3 for index in range(len(sizes))]
    padded = [
        torch.cat([value, torch.zeros(padding)]) for value, padding in zip(values.values(), paddings, strict=True)
    ]
    joined = torch.cat(padded)
    length = -(-len(joined) // num_ranks)
    buffers = [joined[rank * length : (rank + 1) * length] for rank in range(num_ranks)]  # the last ones are shorter
    layouts = [(list(joined_pieces(shapes, [len(one) for one in buffers], paddings)), buffers)]

    shares = {name: -(-len(value) // num_ranks) for name, value in values.items()}
    divided = [
        torch.cat(
            [
                nn.functional.pad(value, (0, shares[name] * num_ranks - len(value))).view(num_ranks, -1)[rank]
                for name, value in values.items()
            ]
        )
        for rank in range(num_ranks)
    ]
    layouts.append((list(divided_pieces(shapes, num_ranks)), divided))
    for pieces, held in layouts:
        actual = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
        for piece in pieces:
            target = actual[piece.name][piece.begin : piece.begin + piece.count]
            assert target.isnan().all()
            target.copy_(held[piece.rank][piece.position : piece.position + piece.count])
        for name, value in values.items():
            assert torch.equal(actual[name], value)


# ---- models with more than trained parameters -----------------------------------------------------------------------


class Partly(nn.Module):
    """Frozen parameters, buffers, a parameter without gradient, and a size that no number of ranks divides."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(4, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5) if dtype is torch.float32 else nn.LayerNorm(5)
        self.inner = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(self.frozen(inputs))) * self.scale


@contextmanager
def run_of(
    seed: int, plugin: Any = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> Iterator[tuple[Accelerator, Any, Any]]:
    warnings.simplefilter("ignore")
    plugins = {"fsdp_plugin": plugin} if isinstance(plugin, FullyShardedDataParallelPlugin) else {}
    plugins |= {"deepspeed_plugin": plugin} if isinstance(plugin, DeepSpeedPlugin) else {}
    accelerator = Accelerator(cpu=True, **plugins, **settings)
    model = Partly(seed, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)  # with frozen parameters among them
    yield accelerator, *accelerator.prepare(model, optimizer)
    accelerator.free_memory()
    reset_state()


def steps(accelerator: Accelerator, model: Any, optimizer: Any, count: int = 2) -> list[float]:
    losses = []
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(count):
        loss = model(inputs.to(next(iter(model.parameters())).dtype)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def zero(stage: int, **sections: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, **MICRO_BATCH, **sections}
    )


@pytest.mark.takes_turns
@needs_deepspeed
@ranks(2, timeout=300.0)
def test_frozen_parameters_and_buffers_come_along(rank: int, world: int, tmp_path: Path) -> None:
    losses = {}
    for stage in (2, 3):
        with run_of(0, zero(stage)) as (accelerator, *run):
            steps(accelerator, *run)
            accelerator.save_state(tmp_path / f"zero{stage}")
            losses[f"zero{stage}"] = steps(accelerator, *run)
    with run_of(0) as (accelerator, *run):
        steps(accelerator, *run)
        accelerator.save_state(tmp_path / "ddp")
        losses["ddp"] = steps(accelerator, *run)
    for loader, sources in (("zero2", ("zero3", "ddp")), ("zero3", ("zero2", "ddp")), ("ddp", ("zero2", "zero3"))):
        for source in sources:
            with run_of(1, None if loader == "ddp" else zero(int(loader[-1]))) as (accelerator, *run):
                accelerator.load_state(tmp_path / source)
                assert steps(accelerator, *run) == pytest.approx(losses[source], rel=1e-5), (source, loader)


@needs_deepspeed
@ranks(2, timeout=300.0)
def test_float32_weights_of_a_bf16_run_come_along(rank: int, world: int, tmp_path: Path) -> None:
    bf16 = {"bf16": {"enabled": True}}
    with run_of(0, zero(2, **bf16), torch.bfloat16, mixed_precision="bf16") as (accelerator, *run):
        steps(accelerator, *run)
        accelerator.save_state(tmp_path / "bf16")
        expected = [value.clone() for value in run[1].optimizer.single_partition_of_fp32_groups]
        following = steps(accelerator, *run)
    with run_of(1, None, torch.bfloat16) as (accelerator, *run):
        accelerator.load_state(tmp_path / "bf16")
        values = torch.cat([one.detach().flatten() for one in run[0].parameters() if one.requires_grad])
        accelerator.save_state(tmp_path / "float32")
    halves = accelerator.gather(expected[0])
    assert torch.equal(values, halves[: len(values)])
    with run_of(2, zero(3, **bf16), torch.bfloat16, mixed_precision="bf16") as (accelerator, *run):
        accelerator.load_state(tmp_path / "float32")
        assert steps(accelerator, *run) == pytest.approx(following, rel=1e-2)


# ---- what does not load ---------------------------------------------------------------------------------------------


@needs_deepspeed
@ranks(2, timeout=300.0)
def test_what_does_not_load_says_so_and_changes_nothing(rank: int, world: int, tmp_path: Path) -> None:
    def refused(accelerator: Accelerator, model: Any, folder: Path, message: str) -> None:
        def bits() -> list[torch.Tensor]:  # padding may be NaN
            values = [getattr(one, "ds_tensor", one).detach() for one in model.parameters()]
            return [value.reshape(-1).clone().view(torch.uint8) for value in values]

        before = bits()
        with pytest.raises((ValueError, RuntimeError), match=message):  # of this rank, or another
            accelerator.load_state(folder)
        assert all(map(torch.equal, before, bits()))

    with run_of(0, zero(2)) as (accelerator, *run):
        steps(accelerator, *run)
        accelerator.save_state(tmp_path / "zero2")
    with run_of(0) as (accelerator, *run):
        steps(accelerator, *run)
        run[1].optimizer.state[run[0].module.scale]["step"] += 1
        accelerator.save_state(tmp_path / "uneven")
    with run_of(0, FullyShardedDataParallelPlugin(**LOCAL)) as (
        accelerator,
        *_,
    ):
        accelerator.save_state(tmp_path / "local")
    if rank == 0:
        shutil.copytree(tmp_path / "zero2", tmp_path / "lacking")
        (tmp_path / "lacking" / "manifest.json").unlink()  # or it would say so
        (tmp_path / "lacking" / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()

    with run_of(1, zero(3)) as (accelerator, model, _):
        refused(accelerator, model, tmp_path / "uneven", "different values of 'step' for .*'scale'.*another engine")
        refused(accelerator, model, tmp_path / "local", "saved as LOCAL_STATE_DICT, which only FSDP on as many ranks")
        refused(accelerator, model, tmp_path / "lacking", "lacks files: it was saved by 2 ranks, but has .* of 1 ")
    with run_of(1) as (accelerator, model, _):
        refused(accelerator, model, tmp_path / "lacking", "lacks files: it was saved by 2 ranks, but has .* of 1 ")
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accelerator._optimizers[0].optimizer = sgd
        refused(accelerator, model, tmp_path / "zero2", "the optimizer of this run is SGD, which needs 'momentum'")

    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}}}
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=zero(2, **warm, **adam))
    described = DummyOptim((plain := Partly(1)).parameters(), lr=0.1)
    model, *_ = accelerator.prepare(plain, described, DummyScheduler(described))
    refused(accelerator, model, tmp_path / "uneven", "holds no state of WarmupLR, which DeepSpeed steps in this run")
    accelerator.free_memory()
