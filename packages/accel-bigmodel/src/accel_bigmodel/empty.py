"""Building a model without the memory of its weights, or directly on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from accel_state.environment import parse_flag_from_env

META = torch.device("meta")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which models are built without memory for their parameters (on torch's meta device).

    Args:
        include_buffers (`bool`, *optional*): Whether buffers have none either; when None, as
            `ACCELERATE_INIT_INCLUDE_BUFFERS` says, else no.

    Example:
        ```python
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(1000)])
        ```
    """
    with init_on_device(META, include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """A block in which the parameters of models are put on a device as soon as they are made.

    Only models built by this thread are concerned. A parameter that several modules share stays one.

    Args:
        device (`torch.device`): Where to.
        include_buffers (`bool`, *optional*): Put buffers, and what other tensors are made meanwhile, there too; when
            None, as `ACCELERATE_INIT_INCLUDE_BUFFERS` says, else no.
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    device = torch.device(device)
    with ExitStack() as stack:
        if include_buffers:
            stack.enter_context(device)
        stack.enter_context(_REGISTRATION.moving_to(device, include_buffers))
        yield


class _Registration:
    """Stands in for `nn.Module.register_parameter` and `register_buffer` while a block is open in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._here = threading.local()
        self._plain: tuple[Callable[..., None], Callable[..., None]]

    @contextmanager
    def moving_to(self, device: torch.device, include_buffers: bool) -> Iterator[None]:
        """Let what this thread registers be put on `device`."""
        before = getattr(self._here, "target", None)
        self._here.target = device, include_buffers
        self._open()
        try:
            yield
        finally:
            self._close()
            self._here.target = before

    def _open(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open > 1:
                return
            self._plain = nn.Module.register_parameter, nn.Module.register_buffer
            nn.Module.register_parameter = self._parameter()  # type: ignore[method-assign]
            nn.Module.register_buffer = self._buffer()  # type: ignore[method-assign]

    def _close(self) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                nn.Module.register_parameter, nn.Module.register_buffer = self._plain  # type: ignore[method-assign]

    def _parameter(self) -> Any:
        plain, here = self._plain[0], self._here

        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            plain(module, name, param)
            target = getattr(here, "target", None)
            if target is not None and param is not None and param.device != target[0]:  # a shared one has been moved
                module._parameters[name] = on_device(param, target[0])

        return register_parameter

    def _buffer(self) -> Any:
        plain, here = self._plain[1], self._here

        def register_buffer(
            module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
        ) -> None:
            target = getattr(here, "target", None)
            if target is not None and target[1] and tensor is not None:
                tensor = tensor.to(target[0])
            plain(module, name, tensor, persistent=persistent)

        return register_buffer


_REGISTRATION = _Registration()


def on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same class, with the same attributes, elsewhere."""
    made: Any = type(parameter)
    attributes = dict(parameter.__dict__)
    moved = made(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    moved.__dict__.update(attributes)
    return moved
