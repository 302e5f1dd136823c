"""What lets megatron-core, which knows CUDA only, run on the CPU; nothing of it is used where there is CUDA.

megatron-core allocates on "cuda" by name in a few places and asks `torch.cuda` for its current device. Within `on_cpu()`
these mean the CPU. Everything is undone when the block ends, so programs never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accel_integrations.engines.megatron.library import load, quiet

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
    """A context in which megatron-core may run on a device: without effect but for the CPU."""
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
