"""Arguments of DistributedDataParallel, and its communication hooks, which compress gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from typing_extensions import override

from accel_state.enums import DDPCommunicationHookType
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.handler import KwargsHandler
from accel_state.settings.option import (
    BOOLEAN,
    INTEGER,
    MAPPING,
    Kind,
    above,
    member_of,
    option,
    resolve_options,
    wrong_value,
)
from accel_state.warning import warn_user

HOOKS_PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"


@dataclass(frozen=True, slots=True)
class CommunicationHook:
    """Module and name of a communication hook of torch."""

    module: str
    function: str
    keeps_state: bool = False
    """Whether it works on a `PowerSGDState`, which `comm_state_option` describes."""

    def load(self) -> Callable[..., Any]:
        """Import the hook's function from torch."""
        function: Callable[..., Any] = getattr(import_module(f"{HOOKS_PACKAGE}.{self.module}"), self.function)
        return function


HOOKS = {
    DDPCommunicationHookType.FP16: CommunicationHook("default_hooks", "fp16_compress_hook"),
    DDPCommunicationHookType.BF16: CommunicationHook("default_hooks", "bf16_compress_hook"),
    DDPCommunicationHookType.POWER_SGD: CommunicationHook("powerSGD_hook", "powerSGD_hook", keeps_state=True),
    DDPCommunicationHookType.BATCHED_POWER_SGD: CommunicationHook(
        "powerSGD_hook", "batched_powerSGD_hook", keeps_state=True
    ),
}
WRAPPERS = {
    DDPCommunicationHookType.FP16: CommunicationHook("default_hooks", "fp16_compress_wrapper"),
    DDPCommunicationHookType.BF16: CommunicationHook("default_hooks", "bf16_compress_wrapper"),
}
HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")
WRAPPER_CHOICES = tuple(str(hook) for hook in (DDPCommunicationHookType.NO, *WRAPPERS))
WRAPPER = Kind(
    f"one of {', '.join(map(repr, WRAPPER_CHOICES))}",
    member_of(DDPCommunicationHookType).parse,
    lambda value: value is DDPCommunicationHookType.NO or value in WRAPPERS,
    WRAPPER_CHOICES,
)


@known_as("accelerate.utils.dataclasses.DistributedDataParallelKwargs")
@guess_arguments
@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How `torch.nn.parallel.DistributedDataParallel` is built.

    Args:
        dim (`int`): Dimension along which inputs are batched.
        broadcast_buffers (`bool`): Whether buffers are copied from rank 0 at every forward.
        bucket_cap_mb (`int`): Size of a gradient bucket, in MiB.
        find_unused_parameters (`bool`): Find parameters without a gradient in every backward pass.
        check_reduction (`bool`): Has no effect in current torch.
        gradient_as_bucket_view (`bool`): Make gradients views of the buckets, which saves memory.
        static_graph (`bool`): Declare that the autograd graph never changes.
        comm_hook (`DDPCommunicationHookType` or `str`): How gradients are compressed for the all-reduce.
        comm_wrapper (`DDPCommunicationHookType` or `str`): A 16-bit dtype to which the hook's own communication is cast.
        comm_state_option (`dict`): Arguments of torch's `PowerSGDState`, for the PowerSGD hooks.

    Example:
        ```python
        ddp = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2})
        accelerator = Accelerator(kwargs_handlers=[ddp])
        ```
    """

    slot = "ddp"

    dim: int = option(0, kind=INTEGER)
    broadcast_buffers: bool = option(True, kind=BOOLEAN)
    bucket_cap_mb: int = option(25, kind=above(0))
    find_unused_parameters: bool = option(False, kind=BOOLEAN)
    check_reduction: bool = option(False, kind=BOOLEAN)
    gradient_as_bucket_view: bool = option(False, kind=BOOLEAN)
    static_graph: bool = option(False, kind=BOOLEAN)
    comm_hook: DDPCommunicationHookType = option(DDPCommunicationHookType.NO, kind=member_of(DDPCommunicationHookType))
    comm_wrapper: Literal[
        DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16
    ] = option(DDPCommunicationHookType.NO, kind=WRAPPER)
    comm_state_option: dict[str, Any] = option(kind=MAPPING, factory=dict)

    def __post_init__(self) -> None:
        resolve_options(self)
        hook = HOOKS.get(self.comm_hook)
        if self.comm_state_option and not (hook and hook.keeps_state):
            self._warn_unused("comm_state_option", "power_sgd or batched_power_sgd")
        if self.comm_wrapper is not DDPCommunicationHookType.NO and hook is None:
            self._warn_unused("comm_wrapper", "a compressing hook")

    def _warn_unused(self, name: str, wanted: str) -> None:
        warn_user(
            f"DistributedDataParallelKwargs.{name}={getattr(self, name)!r} has no effect with "
            f"comm_hook={self.comm_hook.value!r}: choose {wanted}, or leave it out."
        )

    @override
    def to_dict(self, ignore_keys: Iterable[str] = HOOK_FIELDS) -> dict[str, Any]:
        """The values by field name, without the fields that torch's constructor does not know."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the chosen communication hook with a DistributedDataParallel model.

        Args:
            model (`torch.nn.parallel.DistributedDataParallel`): Changed in place; untouched without a hook.

        Raises:
            ValueError: When `comm_state_option` holds a name that torch's `PowerSGDState` does not know.
        """
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        row = HOOKS[self.comm_hook]
        state = self._power_sgd_state() if row.keeps_state else None
        hook = row.load()
        if self.comm_wrapper in WRAPPERS:
            hook = WRAPPERS[self.comm_wrapper].load()(hook)
        model.register_comm_hook(state=state, hook=hook)

    def _power_sgd_state(self) -> Any:
        state_class = import_module(f"{HOOKS_PACKAGE}.powerSGD_hook").PowerSGDState
        known = [name for name in inspect.signature(state_class).parameters if name != "process_group"]
        for name in self.comm_state_option:
            if name not in known:
                key = "DistributedDataParallelKwargs.comm_state_option key"
                raise wrong_value(key, name, f"one of {', '.join(map(repr, known))}", known)
        return state_class(process_group=None, **self.comm_state_option)
