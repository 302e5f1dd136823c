"""Building a model on the meta device, without memory for its weights, or directly on another device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from accel_state.devices import resolve_device
from accel_state.environment import parse_flag_from_env

META = torch.device("meta")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A context in which models are built on the meta device, without memory for their parameters.

    Args:
        include_buffers (`bool`, *optional*): Whether buffers are on the meta device too; when None, as
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
    """A context in which the parameters of models are put on a device as soon as they are created.

    It applies only to models that this thread builds. Tied parameters stay tied.

    Args:
        device (`torch.device`): The target device.
        include_buffers (`bool`, *optional*): Put buffers, and other tensors that are created meanwhile, there too; when
            None, as `ACCELERATE_INIT_INCLUDE_BUFFERS` says, else no.
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    device = resolve_device(device)
    with ExitStack() as stack:
        if include_buffers:
            stack.enter_context(device)
        stack.enter_context(_REGISTRATION.moving_to(device, include_buffers))
        yield


class _Here(threading.local):
    """Where this thread puts what modules register: a device, and whether buffers go there too."""

    target: tuple[torch.device, bool] | None = None


class _Registration:
    """Puts what modules register on a device, through torch's own hooks, while a context is open in the same thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_hooked = False
        self._here = _Here()

    @contextmanager
    def moving_to(self, device: torch.device, include_buffers: bool) -> Iterator[None]:
        """Put what this thread registers on `device`."""
        self._hook_once()
        before = self._here.target
        self._here.target = device, include_buffers
        try:
            yield
        finally:
            self._here.target = before

    def _hook_once(self) -> None:
        # The hooks stay: removing them would change torch's table while other threads, which build models, read it.
        with self._lock:
            if not self._is_hooked:
                register_module_parameter_registration_hook(self._parameter)
                register_module_buffer_registration_hook(self._buffer)
                self._is_hooked = True

    def _parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        target = self._here.target
        if target is None:
            return None
        device = target[0]
        if parameter.device == device:  # a shared one has been moved
            return None
        if device is META and type(parameter) is nn.Parameter and not parameter.__dict__:  # nearly all: in two calls
            values = torch.empty_like(parameter, device=META)
            return torch.Tensor._make_subclass(nn.Parameter, values, parameter.requires_grad)
        return on_device(parameter, device)

    def _buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> Any:
        target = self._here.target
        return buffer.to(target[0]) if target is not None and target[1] and buffer is not None else None


_REGISTRATION = _Registration()


def on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same class, with the same attributes, on a device."""
    parameter_class: Any = type(parameter)
    attributes = dict(parameter.__dict__)
    moved = parameter_class(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    moved.__dict__.update(attributes)
    return moved
