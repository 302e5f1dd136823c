"""`AcceleratorState`: rank and device of the process, mixed precision, plugins and the training engine of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.enums import DistributedType, DynamoBackend, PrecisionType
from accel_state.environment import parse_choice_from_env, parse_flag_from_env
from accel_state.errors import missing_library
from accel_state.guessing import closest
from accel_state.kernel import check_os_kernel
from accel_state.libraries import is_fp8_available
from accel_state.processes import PartialState, ProcessPlace, kind_of
from accel_state.public_names import known_as
from accel_state.shared import SharedDict, fact
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig
    from accel_state.settings.compile import TorchDynamoPlugin
    from accel_state.settings.plugin import Plugin

PLUGINS = ("deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")
"""The attributes that hold plugins."""
PRECISIONS = "accelerate.precisions"
"""The entry points by which other packages bring further values of `mixed_precision`."""


@known_as("accelerate.state.AcceleratorState")
class AcceleratorState(ProcessPlace):
    """Everything of `PartialState`, and the mixed precision, the plugins and the training engine of this run.

    All instances share one state. The first one, usually created by an `Accelerator`, sets everything; a later one may
    be given the same values, but not others.

    Args:
        mixed_precision (`str`, *optional*): "no", "fp16", "bf16" or "fp8"; `ACCELERATE_MIXED_PRECISION` when None.
        cpu (`bool`): Compute on the CPU even where there is an accelerator.
        dynamo_plugin (`TorchDynamoPlugin`, *optional*): How models are compiled.
        deepspeed_plugin (`DeepSpeedPlugin`, or `dict` of them, *optional*): Train with DeepSpeed; of several plugins
            the first is in use until another is selected.
        fsdp_plugin (`FullyShardedDataParallelPlugin`, *optional*): Train with sharded parameters.
        torch_tp_plugin (`TorchTensorParallelPlugin`, *optional*): Train a model that is already tensor-parallel.
        megatron_lm_plugin (`MegatronLMPlugin`, *optional*): Train with Megatron-LM.
        parallelism_config (`ParallelismConfig`, *optional*): The sizes of each kind of parallelism.
        kwargs: For `PartialState`, when it is not initialized yet.

    Raises:
        ValueError: For settings that do not exist, that the device does not support, that exclude one another, or that
            contradict those of the first instance.
    """

    _shared_state: ClassVar[Any] = SharedDict()

    distributed_type: DistributedType = fact("The training engine a plugin stands for, else as in `PartialState`.")
    dynamo_plugin: TorchDynamoPlugin = fact("How models are compiled.")
    deepspeed_plugins: Any = fact("The settings of DeepSpeed, or several by name, as given.")
    fsdp_plugin: Any = fact("The settings of FSDP, where it is in use.")
    megatron_lm_plugin: Any = fact("The settings of Megatron-LM, where it is in use.")
    torch_tp_plugin: Any = fact("The settings of a model that is already tensor-parallel, where there are any.")
    parallelism_config: ParallelismConfig | None = fact("The sizes of each kind of parallelism.")
    device_mesh: DeviceMesh | None = fact("The device mesh, where there is a parallelism config.")
    downcast_bfloat: bool = fact("On XLA: whether both float and double become bfloat16.")
    _mixed_precision: str = fact("The precision that was asked for.")

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        _emulates_fp8: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        plugins = {
            "deepspeed_plugin": deepspeed_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "fsdp_plugin": fsdp_plugin,
            "torch_tp_plugin": torch_tp_plugin,
        }
        wanted = None if mixed_precision is None else _read_precision("mixed_precision", mixed_precision)
        if self.initialized:
            if not PartialState._shared_state:  # it was reset alone
                PartialState(cpu, **kwargs)
            self._check_same(wanted, cpu, plugins, dynamo_plugin, parallelism_config)
            return
        if not _from_accelerator:
            raise ValueError(
                "AcceleratorState is not initialized: create an `Accelerator()` first, which sets precision and plugins. "
                "If only the rank and the device are needed, use `PartialState()`."
            )
        precision = wanted or _read_precision(
            "ACCELERATE_MIXED_PRECISION", parse_choice_from_env("ACCELERATE_MIXED_PRECISION")
        )
        if precision == "fp8" and not is_fp8_available():
            raise missing_library("torchao", why="mixed_precision='fp8'")
        for given in plugins.values():
            for plugin in _each(given):
                plugin.check()
        process_state = PartialState(cpu, **kwargs)
        if cpu and not (process_state._cpu or process_state.device.type == "cpu"):
            raise ValueError(
                f"cpu=True, but this process already uses the device {str(process_state.device)!r}: pass cpu=True where the first "
                "PartialState or Accelerator is created, or set ACCELERATE_USE_CPU=true."
            )
        if process_state.is_local_main_process:
            check_os_kernel()
        self.__dict__.update(process_state.__dict__)
        self._mixed_precision = precision if _emulates_fp8 else self._supported(precision)
        if self._mixed_precision != precision:
            self._warn_of_other_precision(precision)
        try:
            self._settle(plugins, dynamo_plugin, parallelism_config)
        except BaseException:
            self._shared_state.clear()
            raise

    # ---- initialization, once -----------------------------------------------------------------------------------

    def _settle(
        self,
        plugins: Mapping[str, Any],
        dynamo_plugin: TorchDynamoPlugin | None,
        parallelism_config: ParallelismConfig | None,
    ) -> None:
        from accel_state.settings.compile import TorchDynamoPlugin

        self.dynamo_plugin = TorchDynamoPlugin() if dynamo_plugin is None else dynamo_plugin
        self.deepspeed_plugins = plugins["deepspeed_plugin"]
        self.fsdp_plugin = plugins["fsdp_plugin"]
        self.megatron_lm_plugin = plugins["megatron_lm_plugin"]
        self.torch_tp_plugin = plugins["torch_tp_plugin"]
        self.parallelism_config = parallelism_config
        self.device_mesh = None
        self.downcast_bfloat = False
        self._attach_plugins(plugins)
        if parallelism_config is not None:
            parallelism_config.choose_backend(has_deepspeed=self.deepspeed_plugins is not None)
            self._check_parallelism(parallelism_config)
            self.device_mesh = parallelism_config.get_device_mesh(self.device.type)
        downcast_variable = kind_of(self.device).downcast_variable
        if downcast_variable is not None and self._mixed_precision == "bf16":
            self.downcast_bfloat = parse_flag_from_env("ACCELERATE_DOWNCAST_BF16")
            if self.downcast_bfloat:  # otherwise autocast computes in it, and parameters stay float32
                os.environ[downcast_variable] = "1"
        if self.device.type == "cuda" and self._mixed_precision == "no" and self._compiles:
            import torch

            torch.backends.cuda.matmul.allow_tf32 = True  # as torch.compile recommends for float32

    def _supported(self, precision: str) -> str:
        """That precision, or the one that the device's row of the table has instead."""
        kind = kind_of(self.device)
        return kind.instead_of_fp8 if precision == "fp8" and not kind.supports_fp8() else precision

    def _warn_of_other_precision(self, asked: str) -> None:
        warn_user(
            f"{str(self.device)!r} does not compute in 8-bit floats (NVIDIA GPUs do from compute capability 8.9 on, Gaudi "
            f"from its second generation on): mixed_precision={self._mixed_precision!r} is used instead of {asked!r}. "
            "Pass AORecipeKwargs(config=Float8LinearConfig(emulate=True)) to emulate 8-bit floats, which is slow."
        )

    def _attach_plugins(self, plugins: Mapping[str, Any]) -> None:
        """Set the distributed type from the plugins' class facts, and attach each plugin to this state."""
        engines = _engine_plugins(plugins)
        if len(engines) > 1:
            raise ValueError(f"{' and '.join(engines)} are different training engines: pass one of them.")
        for argument, given in plugins.items():
            for plugin in _each(given):
                kind = kind_of(self.device).name
                if kind not in plugin.works_on:
                    raise ValueError(
                        f"{argument}={type(plugin).__name__} cannot train on {kind!r}: it works on "
                        f"{', '.join(sorted(plugin.works_on))}."
                    )
        for argument, plugin in engines.items():
            if kind_of(self.device).name in plugin.left_to_device:
                continue
            if self.backend is None and not plugin.starts_own_group:
                warn_user(
                    f"{argument} has no effect: it needs several processes, and this run has one. "
                    "Start the script with `accelerate launch` or torchrun."
                )
                continue
            assert plugin.distributed_type is not None
            self.distributed_type = plugin.distributed_type
            self.main_process = PartialState().main_process = plugin.main_process
        for given in plugins.values():
            for plugin in _each(given):
                plugin.attach(self)
        for given in plugins.values():
            for plugin in _each(given)[:1]:
                plugin.select(_from_accelerator_state=True)

    def _check_parallelism(self, config: ParallelismConfig) -> None:
        kind_of(self.device).check_mesh_dims(config.active_mesh_dims)
        config.check_world_size(self.num_processes)
        if self.plugin is not None:
            self.plugin.check_mesh(config)

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        """Raise an error for settings that contradict those of an initialized state; subclasses elsewhere call this."""
        if self.initialized:
            self._check_same(mixed_precision, bool(cpu), {}, None, None)

    def _check_same(
        self,
        precision: str | None,
        cpu: bool,
        plugins: Mapping[str, Any],
        dynamo_plugin: TorchDynamoPlugin | None,
        parallelism_config: ParallelismConfig | None,
    ) -> None:
        """Raise an error for settings that contradict those of the first instance; None agrees with any value."""
        pairs: list[tuple[str, Any, Any]] = []
        if precision is not None:
            settled = self._mixed_precision  # perhaps the one that is used instead of the same wish
            pairs.append(
                ("mixed_precision", precision if precision == settled else self._supported(precision), settled)
            )
        if cpu:
            pairs.append(("cpu", True, self._cpu or self.device.type == "cpu"))
        if dynamo_plugin is not None and dynamo_plugin.backend != DynamoBackend.NO:
            pairs.append(("dynamo_backend", str(dynamo_plugin.backend), str(self.dynamo_plugin.backend)))
        if parallelism_config is not None:
            pairs.append(("parallelism_config", parallelism_config, self.parallelism_config))
        for argument in _engine_plugins(plugins):
            held = self.deepspeed_plugins if argument == "deepspeed_plugin" else getattr(self, argument)
            pairs.append((argument, True, held is not None))
        for name, wanted, settled in pairs:
            if wanted != settled:
                raise ValueError(
                    f"{name}={wanted!r} contradicts {name}={settled!r}, which the first Accelerator of this process "
                    "set. All Accelerators share one state: create them with the same settings, or leave this one out."
                )

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True once an instance has been created (and not been reset since)."""
        return "_mixed_precision" in self._shared_state

    @property
    def mixed_precision(self) -> str:
        """The mixed precision of the run: that of the plugin in use, if it sets one, or else the one that was asked for."""
        own = None if self.plugin is None else self.plugin.mixed_precision_in_use()
        return self._mixed_precision if own is None else own

    @property
    def plugin(self) -> Plugin | None:
        """The plugin in use that chose the training engine; None where none did."""
        plugins = (plugin for name in PLUGINS for plugin in _each(self.__dict__.get(name)) if plugin.selected)
        return next((plugin for plugin in plugins if plugin.distributed_type == self.distributed_type), None)

    @property
    def engine_name(self) -> str:
        """The training engine's name in the table of engines, or among the entry points of other packages."""
        own = None if self.plugin is None else self.plugin.engine
        return os.environ.get("ACCELERATE_ENGINE") or own or self.distributed_type.value

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by `fully_shard`."""
        return self.distributed_type == DistributedType.FSDP and self.fsdp_plugin.fsdp_version == 2

    @property
    def _compiles(self) -> bool:
        return self.dynamo_plugin.backend != DynamoBackend.NO

    # ---- DeepSpeed plugins --------------------------------------------------------------------------------------

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use; None without DeepSpeed."""
        return next((plugin for plugin in _each(self.deepspeed_plugins) if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed plugin of that name.

        Raises:
            ValueError: When there is none.
        """
        named = self.deepspeed_plugins if isinstance(self.deepspeed_plugins, dict) else {}
        if name not in named:
            raise ValueError(
                f"There is no DeepSpeed plugin named {name!r}: "
                + (
                    f"choose from {', '.join(map(repr, named))}."
                    if named
                    else "pass deepspeed_plugins={name: plugin}."
                )
            )
        return named[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Use the DeepSpeed plugin of that name from now on.

        Raises:
            ValueError: When there is none.
        """
        chosen = self.get_deepspeed_plugin(name)  # type: ignore[arg-type] # None is refused like any unknown name
        for plugin in _each(self.deepspeed_plugins):
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    # ---- the end ------------------------------------------------------------------------------------------------

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Clear the shared state, so that the next instance is initialized again.

        Args:
            reset_partial_state: Clear `PartialState` too.
        """
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        text = f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"
        if self.distributed_type == DistributedType.DEEPSPEED and self.deepspeed_plugin is not None:
            text += f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        return text


def _read_precision(name: str, given: str | PrecisionType) -> str:
    value = str(given).lower()
    if value in PrecisionType or entry_points(group=PRECISIONS, name=value):
        return value
    known = [*PrecisionType.list(), *sorted(entry_points(group=PRECISIONS).names)]
    guess = closest(value, known)
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise ValueError(f"{name}={given!r} is not a mixed precision: use one of {', '.join(known)}.{hint}")


def _each(given: Any) -> list[Any]:
    """The plugins of one argument: none, one, or those of a dictionary."""
    if given is None:
        return []
    if not isinstance(given, dict):
        return [given]
    if not given:
        raise ValueError("deepspeed_plugin={} is empty: pass at least one plugin, or leave it out.")
    return list(given.values())


def _engine_plugins(plugins: Mapping[str, Any]) -> dict[str, Plugin]:
    """The arguments that choose a training engine, each with its plugin."""
    first = {argument: _each(given)[0] for argument, given in plugins.items() if given is not None}
    return {argument: plugin for argument, plugin in first.items() if plugin.distributed_type is not None}
