"""`AcceleratorState`: the process's place, and how training was asked to run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.enums import DistributedType, FP8BackendType, PrecisionType
from accel_state.environment import parse_choice_from_env, parse_flag_from_env
from accel_state.processes import PartialState, ProcessPlace
from accel_state.shared import SharedDict

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig
    from accel_state.settings.compile import TorchDynamoPlugin

PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")  # in the order of precedence
CHANGE_NOTHING = (None, "no")


class AcceleratorState(ProcessPlace):
    """Everything of `PartialState`, and the number format and plugins of the run.

    All instances share one state. The first one settles everything; a later one may repeat what was settled, but not
    contradict it.

    Args:
        mixed_precision (`str`, *optional*): "no", "fp16", "bf16" or "fp8"; `ACCELERATE_MIXED_PRECISION` when None.
        cpu (`bool`): Compute on the CPU even where there is an accelerator.
        dynamo_plugin (`TorchDynamoPlugin`, *optional*): How models are compiled.
        deepspeed_plugin (`DeepSpeedPlugin` or `dict` of them, *optional*): Train with DeepSpeed.
        fsdp_plugin (`FullyShardedDataParallelPlugin`, *optional*): Train with sharded parameters.
        torch_tp_plugin (`TorchTensorParallelPlugin`, *optional*): Train with split layers.
        megatron_lm_plugin (`MegatronLMPlugin`, *optional*): Train with Megatron-LM.
        parallelism_config (`ParallelismConfig`, *optional*): How processes divide data, layers and sequences.
        kwargs: For `PartialState`, when this instance is the one that makes it.

    Attributes:
        device_mesh (`DeviceMesh`, *optional*): The processes as a grid, when there is a parallelism config.
        dynamo_plugin (`TorchDynamoPlugin`): How models are compiled.
        deepspeed_plugins (`dict`, *optional*): DeepSpeed set-ups by name.
        use_ipex (`bool`): Always False; Intel's extension is part of torch now.

    Raises:
        ValueError: For a number format that does not exist or that the device lacks, a plugin that cannot train on
            the device, and for what contradicts the settings of the first instance.
    """

    _shared_state: ClassVar[Any] = SharedDict()
    _known_attrs: ClassVar[list[str]] = [
        *PartialState._known_attrs, "deepspeed_plugins", "device_mesh", "dynamo_plugin", "fsdp_plugin",
        "megatron_lm_plugin", "parallelism_config", "torch_tp_plugin", "use_ipex", "_plugins",
    ]  # fmt: skip

    _mixed_precision: str
    dynamo_plugin: TorchDynamoPlugin
    deepspeed_plugins: dict[str, Any] | None
    fsdp_plugin: Any
    megatron_lm_plugin: Any
    torch_tp_plugin: Any
    parallelism_config: ParallelismConfig | None
    device_mesh: DeviceMesh | None
    use_ipex: bool

    def __init__(
        self,
        mixed_precision: str | PrecisionType | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        if self.initialized:
            self._check_repeated(mixed_precision, cpu)
            return
        plugins = {
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "torch_tp_plugin": torch_tp_plugin,
        }
        precision = _read_precision(mixed_precision)
        place = PartialState(cpu, **kwargs)
        _check_cpu(place, cpu)
        try:
            self.__dict__.update(place._shared_state)
            self._mixed_precision = precision
            self._settle(plugins, parallelism_config, dynamo_plugin)
        except BaseException:
            self._shared_state.clear()
            raise

    def _settle(
        self, plugins: Mapping[str, Any], parallelism: ParallelismConfig | None, dynamo: TorchDynamoPlugin | None
    ) -> None:
        """Take over the plugins: each says by its class facts what it makes of the run."""
        from accel_state.settings.compile import TorchDynamoPlugin

        self.use_ipex = False
        self.dynamo_plugin = TorchDynamoPlugin() if dynamo is None else dynamo
        self.deepspeed_plugins = None
        self.fsdp_plugin = self.megatron_lm_plugin = self.torch_tp_plugin = None
        self.parallelism_config = parallelism
        self.device_mesh = None
        if parallelism is not None:
            self.device_mesh = parallelism.get_device_mesh(self.device.type)
        for argument in PLUGINS:
            if plugins[argument] is not None:
                self._take(argument, plugins[argument])
        if self._mixed_precision == "fp8":
            _check_fp8()
        if self.dynamo_plugin.backend.value != "NO" and self._mixed_precision == "no" and self.device.type == "cuda":
            import torch

            torch.backends.cuda.matmul.allow_tf32 = True

    def _take(self, argument: str, given: Any) -> None:
        named = _by_name(argument, given)
        first = next(iter(named.values()))
        kind = self.device.type
        if kind not in first.works_on:
            raise ValueError(
                f"{argument}={first!r} cannot train on {kind!r} devices: it works on {', '.join(sorted(first.works_on))}."
            )
        if argument == "deepspeed_plugin":
            self.deepspeed_plugins = named
        else:
            setattr(self, argument, first)
        if first.distributed_type is not None and (
            self.num_processes > 1 or argument != "fsdp_plugin" or self.backend
        ):
            self.distributed_type = first.distributed_type
            self.main_process = first.main_process
        for plugin in named.values():
            plugin.attach(self)

    def _check_repeated(self, mixed_precision: str | PrecisionType | None, cpu: bool) -> None:
        """Compare the arguments of a later instance with what the first settled."""
        remedy = (
            "All accelerators of a process share one state: create them with the same settings, or call "
            "`AcceleratorState._reset_state()` in between."
        )
        wanted = getattr(mixed_precision, "value", mixed_precision)
        if wanted is not None and wanted != self._mixed_precision:
            raise ValueError(
                f"mixed_precision={wanted!r} was asked for, but AcceleratorState already has "
                f"mixed_precision={self._mixed_precision!r}. {remedy}"
            )
        if cpu and self.device.type != "cpu":
            raise ValueError(
                f"cpu={cpu!r} was asked for, but AcceleratorState already computes on {str(self.device)!r}. {remedy}"
            )

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True once an instance has been made (and not been reset since)."""
        return self._shared_state != PartialState._shared_state and "_mixed_precision" in self._shared_state

    @property
    def mixed_precision(self) -> str:
        """The number format of the run; under DeepSpeed, what its configuration says."""
        plugin = self.deepspeed_plugin if self.deepspeed_plugins else None
        config = getattr(plugin, "deepspeed_config", None) or {}
        for name in ("fp16", "bf16"):
            if config.get(name, {}).get("enabled", False) is True:
                return name
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by `fully_shard`."""
        return self.fsdp_plugin is not None and self.fsdp_plugin.fsdp_version == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed set-up in use; None without DeepSpeed."""
        for plugin in (self.deepspeed_plugins or {}).values():
            if plugin.selected:
                return plugin
        return None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed set-up of that name.

        Raises:
            ValueError: When there is none.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ValueError(
                f"There is no DeepSpeed plugin {name!r}: choose from {', '.join(map(repr, plugins)) or 'none'}."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed set-up of that name the one in use.

        Raises:
            ValueError: When there is none.
        """
        chosen = self.get_deepspeed_plugin(name or "")
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    # ---- the end ------------------------------------------------------------------------------------------------

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """End a process group, on all its processes together; the default one, and with it all, when None."""
        PartialState().destroy_process_group(group)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forget everything, so that the next instance starts anew.

        Args:
            reset_partial_state: Forget the process's place too.
        """
        cls._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        lines = super().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"
        if self.distributed_type == DistributedType.DEEPSPEED and self.deepspeed_plugin is not None:
            lines += f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        return lines


def _read_precision(mixed_precision: str | PrecisionType | None) -> str:
    name, given = "mixed_precision", getattr(mixed_precision, "value", mixed_precision)
    if given is None:
        name, given = "ACCELERATE_MIXED_PRECISION", parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    value = str(given).lower()
    if value not in PrecisionType:
        raise ValueError(f"{name}={given!r} is unknown: choose from {', '.join(PrecisionType.list())}.")
    return value


def _check_cpu(place: PartialState, cpu: bool) -> None:
    if cpu and place.device.type != "cpu" and "ACCELERATE_TORCH_DEVICE" not in os.environ:
        raise ValueError(
            f"cpu={cpu!r} was asked for, but PartialState already computes on {str(place.device)!r}: pass cpu=True where "
            "it is made first."
        )


def _by_name(argument: str, given: Any) -> dict[str, Any]:
    """The plugins by name; a single one is the "default", the first of several is selected."""
    if not isinstance(given, dict):
        named = {"default": given}
    elif given:
        named = given
    else:
        raise ValueError(f"{argument}={given!r} holds no plugin: leave it out, or name one.")
    for index, plugin in enumerate(named.values()):
        if argument == "deepspeed_plugin" and index == 0:
            plugin.select(_from_accelerator_state=True)
    return named


def _check_fp8() -> None:
    from accel_state.libraries import is_fp8_available

    if not is_fp8_available():
        raise ValueError(
            f"mixed_precision='fp8' needs a library that computes in 8-bit floats ({', '.join(_fp8_libraries())}), and "
            "none is installed. Install one, or choose 'bf16'."
        )


def _fp8_libraries() -> Iterator[str]:
    yield from (backend.value.lower() for backend in FP8BackendType if backend.value != "NO")
