"""Decorators that skip a test, with a reason, where it cannot run; for functions and classes of unittest and pytest."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from accel_state import hardware, libraries
from accel_state.devices import detect_device_kind
from accel_state.environment import parse_flag_from_env

Test = TypeVar("Test")
Decorator = Callable[[Test], Test]
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """The kind of device here, how many there are, and a function for the bytes that are allocated on the current one."""
    kind = detect_device_kind()
    module: Any = kind.module()
    names = ("memory_allocated", "current_allocated_memory")
    allocated = next((getattr(module, name) for name in names if hasattr(module, name)), lambda: 0)
    return kind.name, kind.device_count() if kind.name != "cpu" else 1, allocated


torch_device, device_count, memory_allocated_func = get_backend()


def _needs(what: str, is_there: Callable[[], Any]) -> Decorator[Any]:
    """A decorator that skips a test unless something is there."""

    def require(test_case: Test) -> Test:
        decorated: Test = unittest.skipUnless(is_there(), f"needs {what}")(test_case)  # type: ignore[type-var]
        return decorated

    return require


def _library(name: str) -> Decorator[Any]:
    question = f"is_{name}_available"
    return _needs(name, getattr(libraries if hasattr(libraries, question) else hardware, question))


def _devices(what: str, *kinds: str, count: Callable[[int], bool] = lambda count: count > 0) -> Decorator[Any]:
    """A decorator that skips a test unless the machine has devices of one of some kinds, and as many as that."""
    return _needs(what, lambda: torch_device in kinds and count(device_count))


def _is_one(count: int) -> bool:
    return count == 1


def _are_several(count: int) -> bool:
    return count > 1


def skip(test_case: Test) -> Test:
    """Skip a test always."""
    skipped: Test = unittest.skip("is always skipped")(test_case)  # type: ignore[type-var]
    return skipped


slow = _needs("RUN_SLOW=1", lambda: parse_flag_from_env("RUN_SLOW"))

require_cpu = _devices("a machine with a CPU only", "cpu")
require_cuda = _devices("a CUDA device", "cuda")
require_xpu = _devices("an XPU", "xpu")
require_npu = _devices("an NPU", "npu")
require_mlu = _devices("an MLU", "mlu")
require_musa = _devices("a MUSA device", "musa")
require_sdaa = _devices("an SDAA device", "sdaa")
require_mps = _devices("an MPS device", "mps")
require_neuron = _devices("a Neuron device", "neuron")
require_cuda_or_xpu = _devices("a CUDA device or an XPU", "cuda", "xpu")
require_cuda_or_hpu = _devices("a CUDA device or an HPU", "cuda", "hpu")
require_non_cpu = _needs("an accelerator", lambda: torch_device != "cpu")
require_non_xpu = _needs("a machine without XPU", lambda: torch_device != "xpu")
require_non_hpu = _needs("a machine without HPU", lambda: torch_device != "hpu")
require_tpu = _needs("a TPU", partial(libraries.is_torch_xla_available, check_is_tpu=True))
require_non_torch_xla = _needs("an environment without torch_xla", lambda: not libraries.is_torch_xla_available())

require_single_device = _needs("one accelerator", lambda: torch_device != "cpu" and device_count == 1)
require_single_gpu = _devices("one CUDA device", "cuda", count=_is_one)
require_single_xpu = _devices("one XPU", "xpu", count=_is_one)
require_multi_device = _needs("several accelerators", lambda: device_count > 1)
require_multi_gpu = _devices("several CUDA devices", "cuda", count=_are_several)
require_multi_xpu = _devices("several XPUs", "xpu", count=_are_several)
require_multi_gpu_or_xpu = _devices("several CUDA devices or XPUs", "cuda", "xpu", count=_are_several)

require_fp16 = _library("fp16")
require_fp8 = _library("fp8")
require_aim = _library("aim")
require_bnb = _library("bnb")
require_clearml = _library("clearml")
require_comet_ml = _library("comet_ml")
require_datasets = _library("datasets")
require_deepspeed = _library("deepspeed")
require_dvclive = _library("dvclive")
require_import_timer = _library("import_timer")
require_matplotlib = _library("matplotlib")
require_mlflow = _library("mlflow")
require_pandas = _library("pandas")
require_peft = _library("peft")
require_pippy = _library("pippy")
require_schedulefree = _library("schedulefree")
require_swanlab = _library("swanlab")
require_tensorboard = _library("tensorboard")
require_timm = _library("timm")
require_torchao = _library("torchao")
require_torchdata_stateful_dataloader = _library("torchdata_stateful_dataloader")
require_torchvision = _library("torchvision")
require_trackio = _library("trackio")
require_transformer_engine = _library("transformer_engine")
require_transformer_engine_mxfp8 = _library("transformer_engine_mxfp8")
require_transformers = _library("transformers")
require_triton = _library("triton")
require_wandb = _library("wandb")
require_huggingface_suite = _needs(
    "transformers and datasets", lambda: libraries.is_transformers_available() and libraries.is_datasets_available()
)
require_trackers = _needs(
    f"one of {', '.join(TRACKERS)}", lambda: any(getattr(libraries, f"is_{name}_available")() for name in TRACKERS)
)
require_fsdp2 = _needs("torch 2.5 or later", lambda: libraries.is_torch_version(">=", "2.5.0"))
require_tp = _needs(
    "torch 2.3 or later and transformers",
    lambda: libraries.is_torch_version(">=", "2.3.0") and libraries.is_transformers_available(),
)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test with an older torch; without a test, a decorator for one.

    Args:
        test_case: The test.
        version: The lowest version.
    """
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    return _needs(f"torch {version} or later", lambda: libraries.is_torch_version(">=", str(version)))(test_case)


def run_first(test_case: Test) -> Test:
    """Ask the plugin pytest-order, where it is used, to run a test before others."""
    import pytest

    ordered: Any = pytest.mark.order(1)(test_case)
    first: Test = ordered
    return first


def pytest_xdist_worker_id() -> int:
    """The number of this worker of pytest-xdist; 0 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """A port for the process group of a test, another one for each worker of pytest-xdist."""
    return 29500 + pytest_xdist_worker_id()


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether a tensor is identical on all processes.

    Args:
        tensor: The tensor of this process, of the same shape on all.
    """
    from accel_ops.collectives.tensors import gather
    from accel_state.processes import PartialState

    state = PartialState()
    tensors = gather(tensor[None].clone().to(state.device)).cpu()
    return all(torch.equal(each, tensors[0]) for each in tensors)
