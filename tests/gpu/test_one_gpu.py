"""One real GPU: collectives, engines, precisions, quantization, deletion and waits; skipped without one."""

from __future__ import annotations

import multiprocessing
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu import scenarios

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
    "aten::item",
)


def test_collectives_by_nccl() -> None:
    scenarios.collectives_of_one_rank("cuda")


@pytest.mark.parametrize("engine", scenarios.ENGINES)
def test_states_are_saved_and_loaded(engine: str, tmp_path: Path) -> None:
    scenarios.saves_and_loads("cuda", engine, tmp_path)


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 2e-4), ("bf16", 0.08), ("fp16", 0.03)])
def test_losses_are_those_of_the_cpu(precision: str, tolerance: float) -> None:
    assert scenarios.losses_in("cuda", precision) == pytest.approx(scenarios.losses_in("cpu", "no"), abs=tolerance)


def test_two_processes_share_a_gpu(tmp_path: Path) -> None:
    check_shared_device("cuda", tmp_path)


def check_shared_device(device: str, folder: Path) -> None:
    """Two processes compute on one device."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    store = str(folder / "store")
    processes = [
        context.Process(target=scenarios.ranks_that_share_a_gpu, args=(rank, 2, device, store, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    actual = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    for _, gathered, total, padded, losses in actual:
        assert (gathered, total, padded) == ([0.0, 0.0, 1.0, 1.0], [1.0, 1.0], [2])
        assert losses[-1] < losses[0]


def test_a_model_is_deleted_while_its_weights_are_copied() -> None:
    scenarios.deleted_while_copying("cuda")


@pytest.mark.parametrize("engine", ["single", "fsdp2"])
def test_states_are_saved_in_the_background(engine: str, tmp_path: Path) -> None:
    scenarios.saves_in_the_background("cuda", engine, tmp_path)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.filterwarnings("ignore")  # of DeepSpeed
def test_zero_3_with_offload(tmp_path: Path) -> None:
    scenarios.in_own_process(scenarios.zero3_with_offload, "cuda", tmp_path)


@pytest.mark.parametrize("form", scenarios.FORMS)
def test_an_epoch_never_waits_for_the_device(form: str) -> None:
    if form == "BatchEncodings":
        pytest.importorskip("transformers")
    scenarios.epochs_without_waiting("cuda", form)


def test_gather_does_not_wait_for_the_device() -> None:
    calls = scenarios.calls_while_gathering("cuda")
    assert any("nccl" in name.lower() or "allgather" in name.replace("_", "") for name in calls), "no gather is seen"
    assert not [name for name in calls if name in WAITS]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; see tests/cuda_shapes for pretended ones")
def test_helper_threads_take_no_memory_on_gpu_0() -> None:
    free = torch.cuda.mem_get_info(0)[0]
    scenarios.deleted_while_copying("cuda:1")
    assert free - torch.cuda.mem_get_info(0)[0] < 64 << 20


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8 kernels"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torchao, about torch
def test_fp8_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    from accelerate.utils import AORecipeKwargs

    accelerator = scenarios.accelerator_for("cuda", mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    losses = scenarios.train(accelerator, scenarios.prepare(accelerator), 10)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("device_map", [None, {"": 0}, "auto"], ids=str)
def test_8_bit_models_go_where_their_map_says(device_map: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from accelerate import init_empty_weights
    from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model

    whole = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model = load_and_quantize_model(
        empty, BnbQuantizationConfig(load_in_8bit=True), weights_location=str(tmp_path), device_map=device_map
    )
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.allclose(model(x.cuda().half()).float().cpu(), whole(x), atol=0.1)
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_a_batch_size_is_found_where_memory_is_limited() -> None:
    assert scenarios.batch_sizes_until_one_fits("cuda") == [64, 57, 51, 45]


@pytest.mark.skipif(
    "TESTS_FILL_GPU" not in os.environ,
    reason="fills the GPU, which fails whatever runs beside it: TESTS_FILL_GPU=1, as tools/gpu_check.sh sets it",
)
def test_a_batch_size_is_found_where_the_gpu_is_full() -> None:
    assert scenarios.batch_sizes_until_one_fits("cuda", whole_gpu=True) == [64, 57, 51, 45]
