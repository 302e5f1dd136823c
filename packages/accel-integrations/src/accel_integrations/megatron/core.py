"""megatron-core: importing it, and running it on the CPU, which it does not know."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accel_state.errors import missing_library


def check_installed() -> None:
    """Check that megatron-core is installed, without importing it, which takes seconds.

    Raises:
        MissingLibraryError: It is not.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise missing_library("megatron-core", why="MegatronLMPlugin")


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which warnings that are megatron-core's business are not shown.

    Its own are about its defaults and about GPUs, torch's about collectives that it calls by their old names.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
        yield


@cache
def load(module: str) -> Any:
    """Import a module of megatron-core once, whose remarks about other libraries that are absent are not shown.

    Args:
        module: Its name below `megatron.core`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"megatron.core.{module}")


CPU = torch.device("cpu")


class _CudaMeansCPU(TorchFunctionMode):
    """Tensors that are created on "cuda" are created on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if kwargs and kwargs.get("pin_memory"):  # on its way to "cuda"
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """A context in which megatron-core may run on a device: without effect except on the CPU."""
    return on_cpu() if device.type == "cpu" else nullcontext()


@contextmanager
def on_cpu() -> Iterator[None]:
    """A context in which megatron-core runs on the CPU."""
    random = load("tensor_parallel.random")
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "current_stream", lambda *_: None),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (random, "_get_cuda_rng_state", lambda *_, **__: None),
        (random, "_set_cuda_rng_state", lambda *_, **__: None),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, instead in replaced:
        setattr(owner, name, instead)
    try:
        with _CudaMeansCPU(), quiet():
            yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def define_router_gemm() -> None:
    """Say that there is no matrix product of Transformer Engine, where it is not installed.

    Routers of experts ask for it by a name that megatron-core 0.16.1 binds only where the import succeeds.
    """
    module = load("transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
