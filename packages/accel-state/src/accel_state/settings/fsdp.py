"""Fully sharded data parallelism: parameters, gradients and optimizer states are sharded over the ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from accel_state.enums import DistributedType
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.fsdp_torch import (
    FSDP_VERSIONS,
    WRAP_POLICY,
    FSDPVersion1,
    FSDPVersion2,
    enum_kind,
    get_module_class_from_name,
    is_policy,
    make_state_dict_configs,
    materialize,
)
from accel_state.settings.option import (
    BOOLEAN,
    FUNCTION,
    Kind,
    at_least,
    option,
    resolve_options,
    words_of,
    wrong_value,
)
from accel_state.settings.plugin import VENDOR_KINDS, MeshSizes, Plugin, RunSoFar
from accel_state.warning import warn_user

if TYPE_CHECKING:
    import torch
    import torch.distributed.fsdp as torch_fsdp


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
FREEING_STRATEGIES = frozenset({"FULL_SHARD", "HYBRID_SHARD"})
"""Strategies that free gathered parameters after forward, which FSDP2 calls `reshard_after_forward=True`."""
RAM_EFFICIENT_VARIABLE = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # transformers reads it while it loads a model

STRATEGY = enum_kind("ShardingStrategy", *STRATEGIES)
PREFETCH = enum_kind("BackwardPrefetch", "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", none_name="NO_PREFETCH")
STATE_DICT_TYPE = enum_kind("StateDictType", "FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
VERSION = Kind(
    "1 or 2",
    int,
    lambda value: not isinstance(value, bool) and value in FSDP_VERSIONS,
    ("1", "2"),
    closed=True,
    exact=True,
)
OFFLOAD = Kind(
    "true, false or an offload policy of torch",
    BOOLEAN.parse,
    lambda value: True,
    BOOLEAN.choices,
    closed=True,
    metavar="BOOL",
)
RESHARDING = Kind(
    "true, false or a sharding strategy",
    str,
    lambda value: True,
    (*BOOLEAN.choices, *STRATEGIES),
    closed=True,
    metavar="CHOICE",
    canonical=str.lower,
)
ANYTHING = Kind("anything", str, lambda value: True)

BOTH_VERSIONS = (
    "fsdp_version",
    "auto_wrap_policy",
    "cpu_offload",
    "ignored_modules",
    "limit_all_gathers",
    "param_init_fn",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
)
VERSION_1_ONLY = (
    "sharding_strategy",
    "backward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
)


@known_as("accelerate.utils.dataclasses.FullyShardedDataParallelPlugin")
@guess_arguments
@dataclass
class FullyShardedDataParallelPlugin(Plugin):
    """How a model is sharded, by `FullyShardedDataParallel` (version 1) or `fully_shard` (version 2).

    Every field left None is read from its `FSDP_*` environment variable. A str is converted to torch's object.

    Args:
        fsdp_version (`int`): 1 or 2.
        sharding_strategy (`str` or `ShardingStrategy`): What is sharded; version 1 only.
        reshard_after_forward (`bool`, or as `sharding_strategy`): Whether parameters are resharded after the forward
            pass. Version 1 takes the name of a strategy here too.
        backward_prefetch (`str` or `BackwardPrefetch`, *optional*): When the backward pass prefetches (all-gathers) the
            next parameters; version 1 only.
        mixed_precision_policy (`str`, `torch.dtype`, `dict` or torch's policy, *optional*): The dtypes of parameters
            and reductions; set from `mixed_precision` of the run when left out.
        auto_wrap_policy (`str` or function, *optional*): Which modules are FSDP units of their own.
        cpu_offload (`bool` or torch's offload policy): Offload parameters and gradients to CPU memory while they are not
            in use.
        ignored_modules (modules, or `str`): Modules that are not sharded; a str is a regular expression for names.
        state_dict_type (`str` or `StateDictType`): The type of state dicts.
        state_dict_config, optim_state_dict_config: Torch's configs of that type; created when left out. Configs that
            differ from these have no effect: full states are gathered into CPU memory of rank 0.
        limit_all_gathers (`bool`): Limit the memory of gathered parameters; version 1 only.
        use_orig_params (`bool`): `model.parameters()` and the optimizer have the original parameters, not the flat
            ones; version 1 only, version 2 always has the original ones.
        param_init_fn (function, *optional*): Materializes modules on the meta device; version 1 only.
        sync_module_states (`bool`): Broadcast the module states of rank 0; version 1 only.
        forward_prefetch (`bool`): Prefetch (all-gather) the next parameters in the forward pass too; version 1 only.
        activation_checkpointing (`bool`): Recompute activations in the backward pass instead of keeping them.
        activation_checkpointing_offload (`bool`): Offload checkpointed activations to CPU memory; version 2 only.
        cpu_ram_efficient_loading (`bool`): Load pretrained weights on rank 0 only.
        transformer_cls_names_to_wrap (list of `str`): Classes of blocks for "TRANSFORMER_BASED_WRAP"; the model's
            `_no_split_modules` when left out.
        min_num_params (`int`): Number of parameters from which on a module is an FSDP unit, for "SIZE_BASED_WRAP".

    Example:
        ```python
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator = Accelerator(fsdp_plugin=plugin)
        ```
    """

    distributed_type: ClassVar[DistributedType] = DistributedType.FSDP
    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS | {"cpu", "xla"}
    left_to_device: ClassVar[frozenset[str]] = frozenset({"xla"})

    fsdp_version: Literal[1, 2] = option(
        None,
        kind=VERSION,
        env="FSDP_VERSION",
        flag="--fsdp_version",
        help="FSDP version: 1 is FullyShardedDataParallel, 2 is fully_shard.",
        fallback=1,
        as_text=True,
    )
    sharding_strategy: str | torch_fsdp.ShardingStrategy = option(
        None,
        kind=STRATEGY,
        env="FSDP_SHARDING_STRATEGY",
        flag="--fsdp_sharding_strategy",
        help="Sharding strategy of FSDP 1.",
        fallback="FULL_SHARD",
        as_text=True,
    )
    reshard_after_forward: str | torch_fsdp.ShardingStrategy | bool = option(
        None,
        kind=RESHARDING,
        env="FSDP_RESHARD_AFTER_FORWARD",
        flag="--fsdp_reshard_after_forward",
        help="Reshard parameters after the forward pass: true or false (FSDP 2), or a sharding strategy (FSDP 1).",
        launch_default=True,
        as_text=True,
    )
    backward_prefetch: str | torch_fsdp.BackwardPrefetch | None = option(
        None,
        kind=PREFETCH,
        env="FSDP_BACKWARD_PREFETCH",
        flag="--fsdp_backward_prefetch_policy --fsdp_backward_prefetch",
        help="When the backward pass prefetches the next parameters (FSDP 1).",
        as_text=True,
    )
    mixed_precision_policy: (
        dict[str, Any] | str | torch_fsdp.MixedPrecision | torch_fsdp.MixedPrecisionPolicy | None
    ) = None
    auto_wrap_policy: Callable[..., Any] | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = (
        option(
            None,
            kind=WRAP_POLICY,
            env="FSDP_AUTO_WRAP_POLICY",
            flag="--fsdp_auto_wrap_policy",
            help="Which modules are sharded as units of their own.",
            fallback="NO_WRAP",
            launch_default=None,
            as_text=True,
        )
    )
    cpu_offload: bool | torch_fsdp.CPUOffload | torch_fsdp.OffloadPolicy = option(
        None,
        kind=OFFLOAD,
        env="FSDP_OFFLOAD_PARAMS",
        flag="--fsdp_offload_params",
        help="Offload parameters and gradients to CPU memory.",
        fallback=False,
        as_text=True,
    )
    ignored_modules: Iterable[torch.nn.Module] | str | None = option(
        None,
        kind=ANYTHING,
        env="FSDP_IGNORED_MODULES",
        help="Modules that are not sharded: names or a regular expression.",
        key="fsdp_ignored_modules",
    )
    state_dict_type: str | torch_fsdp.StateDictType = option(
        None,
        kind=STATE_DICT_TYPE,
        env="FSDP_STATE_DICT_TYPE",
        flag="--fsdp_state_dict_type",
        help="Type of state dicts: full, sharded or (FSDP 1) local.",
        as_text=True,
    )
    state_dict_config: torch_fsdp.FullStateDictConfig | torch_fsdp.ShardedStateDictConfig | None = None
    optim_state_dict_config: torch_fsdp.FullOptimStateDictConfig | torch_fsdp.ShardedOptimStateDictConfig | None = None
    limit_all_gathers: bool = option(True, kind=BOOLEAN)
    use_orig_params: bool | None = option(
        None,
        kind=BOOLEAN,
        env="FSDP_USE_ORIG_PARAMS",
        flag="--fsdp_use_orig_params",
        help="Let the optimizer have the original parameters, not flat ones (FSDP 1).",
        fallback=False,
        launch_default=True,
        as_text=True,
    )
    param_init_fn: Callable[[torch.nn.Module], None] | None = option(None, kind=FUNCTION)
    sync_module_states: bool | None = option(
        None,
        kind=BOOLEAN,
        env="FSDP_SYNC_MODULE_STATES",
        flag="--fsdp_sync_module_states",
        help="Broadcast the module states of rank 0 to all ranks (FSDP 1).",
        fallback=False,
        launch_default=True,
        as_text=True,
    )
    forward_prefetch: bool = option(
        None,
        kind=BOOLEAN,
        env="FSDP_FORWARD_PREFETCH",
        flag="--fsdp_forward_prefetch",
        help="Prefetch the next parameters during the forward pass (FSDP 1).",
        fallback=False,
        as_text=True,
    )
    activation_checkpointing: bool = option(
        None,
        kind=BOOLEAN,
        env="FSDP_ACTIVATION_CHECKPOINTING",
        flag="--fsdp_activation_checkpointing",
        help="Activation checkpointing: recompute activations in the backward pass.",
        fallback=False,
        as_text=True,
    )
    activation_checkpointing_offload: bool = option(
        None,
        kind=BOOLEAN,
        env="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        flag="--fsdp_activation_checkpointing_offload",
        help="Offload checkpointed activations to CPU memory (FSDP 2).",
        fallback=False,
        as_text=True,
    )
    cpu_ram_efficient_loading: bool = option(
        None,
        kind=BOOLEAN,
        env=RAM_EFFICIENT_VARIABLE,
        flag="--fsdp_cpu_ram_efficient_loading",
        help="Load pretrained weights on rank 0 only.",
        fallback=False,
        launch_default=True,
        as_text=True,
    )
    transformer_cls_names_to_wrap: list[str] | None = option(
        None,
        kind=words_of("class names"),
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        flag="--fsdp_transformer_layer_cls_to_wrap",
        help="Class names of the blocks to wrap, separated by commas.",
        as_text=True,
    )
    min_num_params: int | None = option(
        None,
        kind=at_least(0),
        env="FSDP_MIN_NUM_PARAMS",
        flag="--fsdp_min_num_params",
        help="Smallest number of parameters of a wrapped module (SIZE_BASED_WRAP).",
        fallback=0,
        launch_default=100_000_000,
    )

    def __post_init__(self) -> None:
        self._made_configs: set[str] = set()
        self.precision_from_run = False  # whether mixed_precision_policy follows the run's mixed_precision
        given = {name for name in (*VERSION_1_ONLY, "reshard_after_forward") if getattr(self, name) is not None}
        ram_efficient_given = self.cpu_ram_efficient_loading is not None
        if self.ignored_modules is not None and not isinstance(self.ignored_modules, str):
            self.ignored_modules = list(self.ignored_modules)  # an iterator would be empty for the second model
        resolve_options(self, BOTH_VERSIONS)
        (self._resolve_version_1 if self.fsdp_version == 1 else self._resolve_version_2)(given)
        self._resolve_wrapping()
        self._check_activation_checkpointing()
        if self.mixed_precision_policy is not None:
            self._resolve_mixed_precision()
        self.set_cpu_offload()
        self.set_state_dict_type()
        if ram_efficient_given:
            os.environ[RAM_EFFICIENT_VARIABLE] = str(self.cpu_ram_efficient_loading)

    @property
    @override
    def engine(self) -> str | None:
        """The name of the engine for version 2, which has one of its own; None for version 1."""
        return "FSDP2" if self.fsdp_version == 2 and self.distributed_type == DistributedType.FSDP else None

    @override
    def check_mesh(self, config: MeshSizes) -> None:
        """Raise an error for context parallelism with version 1.

        Raises:
            ValueError: Naming the size.
        """
        if config.cp_enabled and self.fsdp_version != 2:
            raise ValueError(
                f"cp_size={config.cp_size} cannot be combined with FSDP version 1, which supports no other mesh dimension. "
                "Pass FullyShardedDataParallelPlugin(fsdp_version=2), or no FSDP plugin to replicate the parameters."
            )

    @override
    def attach(self, state: RunSoFar) -> None:
        """Set the mixed precision of the run, and do not offload state dicts when the device is the CPU."""
        if state.mixed_precision != "no":
            self.precision_from_run = self.mixed_precision_policy is None
            self.set_mixed_precision(state.mixed_precision)
        if state.device.type == "cpu":  # torch returns wrong optimizer states when it "offloads" from the CPU
            for name in self._made_configs:
                getattr(self, name).offload_to_cpu = False

    # ---- resolving the fields ---------------------------------------------------------------------------------------

    @property
    def _version(self) -> FSDPVersion1 | FSDPVersion2:
        return FSDP_VERSIONS[self.fsdp_version]

    def _key(self, name: str) -> str:
        return f"FullyShardedDataParallelPlugin.{name}"

    def _resolve_version_1(self, given: set[str]) -> None:
        named = self.reshard_after_forward
        if named is None and "FSDP_SHARDING_STRATEGY" not in os.environ:
            name = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").upper()
            named = name if name in STRATEGIES else None  # the launcher sets it to "true" when no value was given
        if named is not None:
            named = STRATEGY.read(self._key("reshard_after_forward"), named)
            if "sharding_strategy" not in given:
                self.sharding_strategy = named
        if "reshard_after_forward" in given:
            self.reshard_after_forward = named
        resolve_options(self, VERSION_1_ONLY)
        if self.backward_prefetch == "NO_PREFETCH":
            self.backward_prefetch = None
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            if "sync_module_states" in given:
                self._warn(
                    "sync_module_states=False cannot be combined with cpu_ram_efficient_loading=True. It is set to True"
                )
            self.sync_module_states = True
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = materialize

    def _resolve_version_2(self, given: set[str]) -> None:
        if self.forward_prefetch:
            raise wrong_value(self._key("forward_prefetch"), True, "None with fsdp_version=2, or fsdp_version=1")
        if "sharding_strategy" in given and "reshard_after_forward" not in given:
            strategy = STRATEGY.read(self._key("sharding_strategy"), self.sharding_strategy)
            self.reshard_after_forward = strategy.name in FREEING_STRATEGIES
        for name in sorted(given & set(VERSION_1_ONLY)):
            advice = "Use reshard_after_forward" if name == "sharding_strategy" else "Leave it out"
            self._warn(f"{name}={getattr(self, name)!r} has no effect with fsdp_version=2. {advice}")
        for name in VERSION_1_ONLY:
            setattr(self, name, None)
        key = self._key("reshard_after_forward") if self.reshard_after_forward is not None else None
        wanted = self.reshard_after_forward if key else os.environ.get("FSDP_RESHARD_AFTER_FORWARD", True)
        self.reshard_after_forward = BOOLEAN.read(key or "FSDP_RESHARD_AFTER_FORWARD", wanted)

    def _warn(self, text: str) -> None:
        warn_user(f"FullyShardedDataParallelPlugin: {text}.")

    def _resolve_wrapping(self) -> None:
        if is_policy(self.auto_wrap_policy, "SIZE_BASED_WRAP"):
            resolve_options(self, ("min_num_params",))
        if is_policy(self.auto_wrap_policy, "TRANSFORMER_BASED_WRAP") or self.transformer_cls_names_to_wrap:
            resolve_options(self, ("transformer_cls_names_to_wrap",))

    def _check_activation_checkpointing(self) -> None:
        if not self.activation_checkpointing_offload:
            return
        key = self._key("activation_checkpointing_offload")
        if not self.activation_checkpointing:
            raise wrong_value(key, True, "it together with activation_checkpointing=True")
        if self.fsdp_version != 2:
            raise wrong_value(key, True, "it together with fsdp_version=2")

    def _resolve_mixed_precision(self) -> None:
        import torch

        if isinstance(self.mixed_precision_policy, (str, dict, torch.dtype)):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.validate_mixed_precision_policy()

    # ---- contract methods -------------------------------------------------------------------------------------------

    def set_state_dict_type(self, state_dict_type: str | torch_fsdp.StateDictType | None = None) -> None:
        """Choose the type of state dicts and create torch's configs for it.

        Args:
            state_dict_type: A name or a member of torch's `StateDictType`. When None, the field's value, the environment
                variable or the version's default.

        Raises:
            ValueError: For an unknown type, or one that the version does not support.
        """
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        resolve_options(self, ("state_dict_type",))
        if self.state_dict_type is None:
            self.state_dict_type = STATE_DICT_TYPE.parse(self._version.default_state_dict_type)
        name: str = self.state_dict_type.name  # type: ignore[union-attr]
        allowed = self._version.state_dict_types
        if name not in allowed:
            expected = f"{' or '.join(map(repr, allowed))} with fsdp_version={self.fsdp_version}"
            raise wrong_value(self._key("state_dict_type"), name, expected)
        config_names = ("state_dict_config", "optim_state_dict_config")
        for config_name, config in zip(config_names, make_state_dict_configs(name), strict=True):
            if getattr(self, config_name) is None or config_name in self._made_configs:
                setattr(self, config_name, config)
                (self._made_configs.discard if config is None else self._made_configs.add)(config_name)
            else:
                self._warn_of_unused(config_name, config)

    def _warn_of_unused(self, name: str, made: Any) -> None:
        """Warn that a config of torch is not used, unless it equals the one that is."""
        given = getattr(self, name)
        if made is None or replace(given, offload_to_cpu=made.offload_to_cpu) != made:
            warn_user(
                f"{self._key(name)}={given!r} is not used: full states are gathered into CPU memory of rank 0, and "
                "sharded states are written by all ranks. Leave it out."
            )

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Set the wrapping policy for a model: find its block classes, or apply `min_num_params`.

        Args:
            model: The model that will be sharded.

        Raises:
            ValueError: When a class to wrap does not occur in the model.
        """
        policy: Any = self.auto_wrap_policy
        if is_policy(policy, "TRANSFORMER_BASED_WRAP"):
            classes = self._find_block_classes(model)
            self.auto_wrap_policy = functools.partial(policy, transformer_layer_cls=classes)
        elif is_policy(policy, "SIZE_BASED_WRAP"):
            size = self.min_num_params or 0
            self.auto_wrap_policy = functools.partial(policy, min_num_params=size) if size > 0 else None

    def _find_block_classes(self, model: torch.nn.Module) -> set[type[torch.nn.Module]]:
        names = self.transformer_cls_names_to_wrap
        if names is None:
            names = list(getattr(model, "_no_split_modules", None) or ())
        if not names:
            warn_user(
                f"TRANSFORMER_BASED_WRAP found no block classes: {type(model).__name__} has no _no_split_modules, so it "
                "is wrapped as a single FSDP unit. Name the classes in transformer_cls_names_to_wrap."
            )
        classes = {name: get_module_class_from_name(model, name) for name in names}
        for name, block_class in classes.items():
            if block_class is None:
                present = sorted({type(module).__name__ for module in model.modules()})
                key = self._key("transformer_cls_names_to_wrap")
                raise wrong_value(key, name, f"classes of modules in {type(model).__name__}", present)
        return {block_class for block_class in classes.values() if block_class is not None}

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Create torch's mixed-precision policy, unless there is one.

        Args:
            mixed_precision: "fp16", "bf16", "fp8" or "fp32", a `torch.dtype`, or a dictionary from the policy's
                dtype names to these.
            buffer_autocast: Keep buffers in float32 (version 1).
            override: Replace an existing policy.

        Raises:
            ValueError: For an unknown dtype.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = self._version.make_policy(
                mixed_precision, self._key("mixed_precision_policy"), float32_buffers=buffer_autocast
            )

    def validate_mixed_precision_policy(self) -> None:
        """Raise an error for a policy object of the other FSDP version.

        Raises:
            ValueError: Naming the class that is needed.
        """
        self._check_class("mixed_precision_policy", self._version.policy_class)

    def set_cpu_offload(self) -> None:
        """Convert a bool to torch's offload policy.

        Raises:
            ValueError: When the field holds anything else.
        """
        if isinstance(self.cpu_offload, bool):
            self.cpu_offload = self._version.make_offload(self.cpu_offload)
        self.validate_cpu_offload()

    def validate_cpu_offload(self) -> None:
        """Raise an error for an offload policy of the other FSDP version.

        Raises:
            ValueError: Naming the class that is needed.
        """
        self._check_class("cpu_offload", self._version.offload_class)

    def _check_class(self, name: str, class_name: str) -> None:
        value = getattr(self, name)
        if not self._version.is_own(value, class_name):
            expected = f"a torch.distributed.fsdp.{class_name} with fsdp_version={self.fsdp_version}"
            raise wrong_value(self._key(name), value, expected)
