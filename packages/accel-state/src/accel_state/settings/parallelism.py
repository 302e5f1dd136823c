"""How the axes of a parallelism mesh are used: tensor, context and sequence parallelism."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from accel_state.settings.option import BOOLEAN, Kind, at_least, option, resolve_options, wrong_value
from accel_state.settings.plugin import VENDOR_KINDS, Plugin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ATTENTION_CHOICES = ("flash_attention_2", "flash_attention_3", "sdpa")
HUB_ATTENTION = re.compile(r".+/.*flash-attn.*")
EMPTY_WORDS = frozenset({"", "none"})


def _parse_attention(name: str) -> str:
    if name not in ATTENTION_CHOICES and not HUB_ATTENTION.fullmatch(name):
        raise ValueError(name)
    return name


ATTENTION = Kind(
    f"one of {', '.join(map(repr, ATTENTION_CHOICES))} or a flash attention kernel of the hub, for example "
    "'kernels-community/flash-attn2' (attention that needs the whole mask, as 'eager', cannot be split)",
    _parse_attention,
    lambda value: isinstance(value, str),
    ATTENTION_CHOICES,
)
LENGTH = Kind(
    "a whole number of at least 0, or none",
    lambda text: None if text.lower() in EMPTY_WORDS else int(text),
    lambda value: value is None or at_least(0).accepts(value),
)


@dataclass
class TorchTensorParallelPlugin(Plugin):
    """Tensor parallelism over the whole run, for models that are split already.

    Args:
        tp_size (`int`): How many processes share each layer.
        torch_device_mesh (`torch.distributed.DeviceMesh`, *optional*): The mesh with an axis named "tp".
    """

    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS | {"cpu"}

    tp_size: int = option(1, kind=at_least(1), help="How many processes share each layer.")
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        resolve_options(self)


@dataclass
class TorchTensorParallelConfig:
    """How layers are split over the "tp" axis.

    Args:
        enable_async_tp (`bool`): Overlap the exchange with computation; not available yet.
    """

    enable_async_tp: bool = option(False, kind=BOOLEAN)

    def __post_init__(self) -> None:
        resolve_options(self)
        if self.enable_async_tp:
            warnings.warn(
                "TorchTensorParallelConfig.enable_async_tp=True has no effect yet: leave it out.", stacklevel=3
            )


@dataclass
class TorchContextParallelConfig:
    """How sequences are split over the "cp" axis.

    Args:
        cp_comm_strategy (`"allgather"` or `"alltoall"`): How keys and values travel between the processes.
    """

    cp_comm_strategy: str | None = option(
        None,
        choices=("allgather", "alltoall"),
        env="PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        flag="--parallelism_config_cp_comm_strategy",
        help="How keys and values travel between the processes of context parallelism.",
        fallback="allgather",
    )

    def __post_init__(self) -> None:
        resolve_options(self)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How sequences are split over the "sp" axis by DeepSpeed.

    Args:
        sp_seq_length (`int`, *optional*): Length of every sequence, in tokens; needed when it does not vary.
        sp_seq_length_is_variable (`bool`): Whether lengths differ between batches.
        sp_attn_implementation (`str`, *optional*): The model's attention, `"flash_attention_2"`,
            `"flash_attention_3"`, `"sdpa"` or a flash attention kernel of the hub.
    """

    sp_seq_length: int | None = option(
        None,
        kind=LENGTH,
        env="PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        flag="--parallelism_config_sp_seq_length",
        help="Length of every sequence in tokens, when it does not vary.",
    )
    sp_seq_length_is_variable: bool | None = option(
        None,
        kind=BOOLEAN,
        env="PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        flag="--parallelism_config_sp_seq_length_is_variable",
        help="Whether sequence lengths differ between batches.",
        fallback=True,
    )
    sp_attn_implementation: str | None = option(
        None,
        kind=ATTENTION,
        env="PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        flag="--parallelism_config_sp_attn_implementation",
        help="Attention implementation of the model.",
    )

    def __post_init__(self) -> None:
        resolve_options(self, ("sp_seq_length_is_variable", "sp_attn_implementation"))
        if self.sp_seq_length_is_variable and self.sp_seq_length is None:
            return  # then the variable has no meaning
        resolve_options(self, ("sp_seq_length",))
        if self.sp_seq_length is None:
            raise wrong_value(
                "DeepSpeedSequenceParallelConfig.sp_seq_length",
                None,
                "the length in tokens (or PARALLELISM_CONFIG_SP_SEQ_LENGTH), because sp_seq_length_is_variable=False",
            )
