"""Conversion of the FSDP options to torch's FSDP objects; torch is imported when a value is converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_state.settings.option import Kind, is_integer, listing, wrong_value

if TYPE_CHECKING:
    import torch
    from torch import nn

DTYPES = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""The dtype of parameters for each mixed precision; FP8 libraries convert from bfloat16 themselves."""
WRAP_POLICIES = {
    "TRANSFORMER_BASED_WRAP": "transformer_auto_wrap_policy",
    "SIZE_BASED_WRAP": "size_based_auto_wrap_policy",
    "NO_WRAP": None,
}
STATE_DICT_CONFIGS: dict[str, tuple[str, str, dict[str, bool]] | None] = {
    "FULL_STATE_DICT": (
        "FullStateDictConfig",
        "FullOptimStateDictConfig",
        {"offload_to_cpu": True, "rank0_only": True},
    ),
    "LOCAL_STATE_DICT": None,
    "SHARDED_STATE_DICT": ("ShardedStateDictConfig", "ShardedOptimStateDictConfig", {"offload_to_cpu": True}),
}


def enum_kind(enum_name: str, *choices: str, none_name: str | None = None) -> Kind:
    """Members of an enum of `torch.distributed.fsdp`, their names in any case, or their int values.

    Args:
        enum_name: For example "ShardingStrategy".
        choices: The names.
        none_name: One of the names that stands for None.
    """

    def enum() -> Any:
        import torch.distributed.fsdp as fsdp

        return getattr(fsdp, enum_name)

    def parse(text: str) -> Any:
        name = text.upper()
        if name == none_name:
            return None
        for member in enum():
            if name in (member.name.lstrip("_"), str(member.value)):
                return member
        raise ValueError(text)

    def accepts(value: Any) -> bool:
        return value is None or isinstance(value, enum())

    def convert(value: Any) -> Any:
        return parse(str(value)) if is_integer(value) else value

    expected = f"one of {listing(choices)}, or a torch.distributed.fsdp.{enum_name}"
    return Kind(expected, parse, accepts, choices, convert, closed=True, metavar="NAME")


def _parse_wrap_policy(text: str) -> Callable[..., Any] | None:
    if text.upper() not in WRAP_POLICIES:
        raise ValueError(text)
    name = WRAP_POLICIES[text.upper()]
    if name is None:
        return None
    import torch.distributed.fsdp.wrap as wrap

    policy: Callable[..., Any] = getattr(wrap, name)
    return policy


def _is_wrap_policy(value: Any) -> bool:
    from torch.distributed.fsdp.wrap import CustomPolicy

    return value is None or callable(value) or isinstance(value, CustomPolicy)


WRAP_POLICY = Kind(
    f"one of {listing(WRAP_POLICIES)}, or a function that takes module, recurse and nonwrapped_numel",
    _parse_wrap_policy,
    _is_wrap_policy,
    tuple(WRAP_POLICIES),
    closed=True,
    metavar="POLICY",
)


def is_policy(policy: Any, name: str) -> bool:
    """Whether `policy` is the function of `torch.distributed.fsdp.wrap` that `name` stands for."""
    return policy is not None and policy is _parse_wrap_policy(name)


def dtype_of(value: Any, key: str) -> torch.dtype:
    """A torch dtype, given as itself or as one of `DTYPES`.

    Raises:
        ValueError: For anything else.
    """
    import torch

    if isinstance(value, torch.dtype):
        return value
    if value not in DTYPES:
        raise wrong_value(key, value, f"one of {listing(DTYPES)}, or a torch.dtype", DTYPES)
    dtype: torch.dtype = getattr(torch, DTYPES[value])
    return dtype


@dataclass(frozen=True, slots=True)
class FSDPVersion:
    """What differs between torch's two implementations of FSDP."""

    policy_class: str
    third_dtype: str
    """The policy's dtype besides those of parameters and reductions."""
    offload_class: str
    default_state_dict_type: str
    state_dict_types: tuple[str, ...]

    def make_policy(self, wanted: Any, key: str, *, float32_buffers: bool = False) -> Any:
        """Torch's mixed-precision policy.

        Args:
            wanted: One of `DTYPES`, a `torch.dtype`, or a mapping from the policy's dtype names to these.
            key: Name of the option in error messages.
            float32_buffers: Keep buffers in float32, where the policy has a `buffer_dtype`.

        Raises:
            ValueError: For an unknown dtype or key.
        """
        import torch
        import torch.distributed.fsdp as fsdp

        names = ("param_dtype", "reduce_dtype", self.third_dtype)
        if isinstance(wanted, Mapping):
            for name in wanted:
                if name not in names:
                    raise wrong_value(f"{key} key", name, f"one of {listing(names)}", names)
            dtypes = {name: dtype_of(value, f"{key}[{name!r}]") for name, value in wanted.items()}
        else:
            dtypes = dict.fromkeys(names, dtype_of(wanted, key))
        if float32_buffers and self.third_dtype == "buffer_dtype":
            dtypes["buffer_dtype"] = torch.float32
        return getattr(fsdp, self.policy_class)(**dtypes)

    def is_own(self, value: Any, class_name: str) -> bool:
        """Whether `value` is an object of a class of `torch.distributed.fsdp`."""
        import torch.distributed.fsdp as fsdp

        return isinstance(value, getattr(fsdp, class_name))


class FSDPVersion1(FSDPVersion):
    """`FullyShardedDataParallel`, a wrapper around the model."""

    __slots__ = ()

    def make_offload(self, offload: bool) -> Any:
        """Torch's object for offload of parameters to CPU memory, or for no offload."""
        from torch.distributed.fsdp import CPUOffload

        return CPUOffload(offload_params=offload)


class FSDPVersion2(FSDPVersion):
    """`fully_shard`, which changes the model in place."""

    __slots__ = ()

    def make_offload(self, offload: bool) -> Any:
        """Torch's policy for offload to CPU memory, or for no offload; memory is pinned only where there is an accelerator."""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if offload else OffloadPolicy()


FSDP_VERSIONS: dict[int, FSDPVersion1 | FSDPVersion2] = {
    1: FSDPVersion1("MixedPrecision", "buffer_dtype", "CPUOffload", "FULL_STATE_DICT", tuple(STATE_DICT_CONFIGS)),
    2: FSDPVersion2(
        "MixedPrecisionPolicy",
        "output_dtype",
        "OffloadPolicy",
        "SHARDED_STATE_DICT",
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    ),
}


def make_state_dict_configs(type_name: str) -> tuple[Any, Any]:
    """Torch's configs for model and optimizer state dicts of a state-dict type; None where torch needs none."""
    import torch.distributed.fsdp as fsdp

    row = STATE_DICT_CONFIGS[type_name]
    if row is None:
        return None, None
    model_class, optimizer_class, arguments = row
    return getattr(fsdp, model_class)(**arguments), getattr(fsdp, optimizer_class)(**arguments)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class called `name` among the modules of a model.

    Args:
        module: The model.
        name: Name of a class, without its module.

    Returns:
        The class of the first such module, None when there is none.
    """
    return next((type(child) for child in module.modules() if type(child).__name__ == name), None)


def materialize(module: nn.Module) -> None:
    """Allocate a module's own parameters and buffers on this process's device, uninitialized: rank 0 broadcasts the values."""
    from accel_state.devices import default_device

    module.to_empty(device=default_device(), recurse=False)
