"""How the axes of a parallelism mesh are used: tensor, context, sequence and pipeline parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.option import BOOLEAN, FUNCTION, Kind, at_least, one_of, option, resolve_options, wrong_value
from accel_state.settings.plugin import VENDOR_KINDS, Plugin
from accel_state.warning import warn_user

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
    "'kernels-community/flash-attn2' (attention that needs the full mask, such as 'eager', cannot be sharded)",
    _parse_attention,
    lambda value: isinstance(value, str),
    ATTENTION_CHOICES,
    metavar="NAME",
)
SPLIT_POINTS = Kind(
    "'auto', or the names of the modules at which the second and every further stage begin",
    lambda text: "auto" if text.lower() == "auto" else [word.strip() for word in text.split(",") if word.strip()],
    lambda value: (
        value == "auto"
        or (isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(name, str) for name in value))
    ),
)
LENGTH = Kind(
    "an integer of at least 0, or none",
    lambda text: None if text.lower() in EMPTY_WORDS else int(text),
    lambda value: value is None or at_least(0).accepts(value),
    metavar="N",
    limits=(1, None),
)


@known_as("accelerate.utils.dataclasses.TorchTensorParallelPlugin")
@guess_arguments
@dataclass
class TorchTensorParallelPlugin(Plugin):
    """Tensor parallelism over all ranks, for models that are already tensor-parallel.

    Args:
        tp_size (`int`): The number of ranks over which each layer is sharded.
        torch_device_mesh (`torch.distributed.DeviceMesh`, *optional*): The mesh with an axis named "tp".
    """

    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS | {"cpu"}

    tp_size: int = option(1, kind=at_least(1), help="How many processes share each layer.")
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        resolve_options(self)


@known_as("accelerate.utils.dataclasses.TorchTensorParallelConfig")
@guess_arguments
@dataclass
class TorchTensorParallelConfig:
    """How layers are sharded over the "tp" axis.

    Args:
        enable_async_tp (`bool`): Overlap collectives with compute; not available yet.
        plan (`dict`, *optional*): How layers are sharded, by module name: `{"layers.*.mlp.up": "colwise", ...}`. The
            model's own plan is used when it is left out.
        expert_parallel (`bool`): Distribute experts over the ranks instead of sharding each of them (expert parallelism), for
            mixture-of-experts models of transformers.
    """

    enable_async_tp: bool = option(False, kind=BOOLEAN)
    plan: dict[str, Any] | None = None
    expert_parallel: bool = option(False, kind=BOOLEAN)

    def __post_init__(self) -> None:
        resolve_options(self)
        if self.enable_async_tp:
            warn_user("TorchTensorParallelConfig.enable_async_tp=True has no effect yet: leave it out.")


@known_as("accelerate.utils.dataclasses.TorchContextParallelConfig")
@guess_arguments
@dataclass
class TorchContextParallelConfig:
    """How sequences are sharded over the "cp" axis.

    Args:
        cp_comm_strategy (`"allgather"` or `"alltoall"`): The collective that communicates keys and values.
        cp_load_balance (`bool`): Give every rank an early and a late chunk of each sequence, so that all have the
            same work under a causal mask. Attention without causal mask needs False.
    """

    cp_comm_strategy: str | None = option(
        None,
        kind=one_of("allgather", "alltoall", exact=False),
        env="PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        flag="--parallelism_config_cp_comm_strategy",
        help="Collective of context-parallel ranks for keys and values: allgather or alltoall.",
        fallback="allgather",
        as_text=True,
    )
    cp_load_balance: bool = option(True, kind=BOOLEAN)

    def __post_init__(self) -> None:
        resolve_options(self)


@known_as("accelerate.utils.dataclasses.DeepSpeedSequenceParallelConfig")
@guess_arguments
@dataclass
class DeepSpeedSequenceParallelConfig:
    """How sequences are sharded over the "sp" axis by DeepSpeed.

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
        help="Sequence length in tokens, where it does not vary.",
        as_text=True,
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
        launch_default="sdpa",
        as_text=True,
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


PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")


@guess_arguments
@dataclass
class PipelineParallelConfig:
    """How a model is split into stages over the "pp" axis, and the schedule of its micro-batches.

    Args:
        schedule (`"gpipe"`, `"1f1b"` or `"interleaved1f1b"`): `"gpipe"` runs all forward passes, then all backward passes, and
            works with any training loop. The others start the backward pass of a micro-batch right after its forward pass,
            which needs less memory; for them the model itself must return the loss.
        num_microbatches (`int`, *optional*): The number of micro-batches of a batch; the number of stages when
            None.
        split_points (`"auto"` or list of `str`): Names of the modules at which the second and every further stage
            begin, for instance `["transformer.h.2"]`; `"auto"` gives all stages about as many bytes of parameters.
        stages_per_rank (`int`, *optional*): The number of stages of each rank; 2 for `"interleaved1f1b"`, which
            needs at least that many, and 1 for the others when None.
        broadcast_outputs (`bool`, *optional*): Whether every rank gets all outputs of the last stage, rather than
            only the loss; when None, if there is no loss among them, or no gradients are computed.
        loss_weight (`Callable`, *optional*): Maps the arguments of a micro-batch, as a dictionary, to the weight of its loss,
            for instance its number of tokens. All micro-batches have the same weight when None.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved1f1b"] = option(
        None,
        choices=PIPELINE_SCHEDULES,
        env="PARALLELISM_CONFIG_PP_SCHEDULE",
        flag="--parallelism_config_pp_schedule",
        help="Pipeline schedule.",
        fallback="gpipe",
        launch_default=None,
    )
    num_microbatches: int | None = option(
        None,
        kind=at_least(1),
        env="PARALLELISM_CONFIG_PP_NUM_MICROBATCHES",
        flag="--parallelism_config_pp_num_microbatches",
        help="Micro-batches per batch.",
    )
    split_points: Any = option(
        None,
        kind=SPLIT_POINTS,
        env="PARALLELISM_CONFIG_PP_SPLIT_POINTS",
        flag="--parallelism_config_pp_split_points",
        help="Modules at which pipeline stages begin, separated by commas, or auto.",
        fallback="auto",
        launch_default=None,
        as_text=True,
    )
    stages_per_rank: int | None = option(None, kind=at_least(1), help="How many stages each process holds.")
    broadcast_outputs: bool | None = option(None, kind=BOOLEAN)
    loss_weight: Any = option(None, kind=FUNCTION)

    def __post_init__(self) -> None:
        resolve_options(self)
        interleaved = self.schedule == "interleaved1f1b"
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if interleaved else 1
        if interleaved is not (self.stages_per_rank > 1):
            raise ValueError(
                f"PipelineParallelConfig(schedule={self.schedule!r}, stages_per_rank={self.stages_per_rank}): "
                "'interleaved1f1b' needs at least 2 stages per rank, 'gpipe' and '1f1b' have exactly 1."
            )
