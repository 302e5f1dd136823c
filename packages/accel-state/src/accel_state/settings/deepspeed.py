"""DeepSpeed: the ZeRO stage, offload to CPU or NVMe, and the configuration that `deepspeed.initialize` gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from accel_state.enums import DistributedType, FP8BackendType
from accel_state.errors import missing_library
from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.deepspeed_auto import AUTO, HfDeepSpeedConfig, fill, get_value, leaf_keys
from accel_state.settings.deepspeed_libraries import register_with_transformers, set_leaf_modules
from accel_state.settings.fp8 import OptLevel
from accel_state.settings.option import (
    BOOLEAN,
    TEXT,
    Kind,
    as_integer,
    is_integer,
    is_number,
    one_of,
    option,
    options_of,
    resolve_options,
    words_of,
    wrong_value,
)
from accel_state.settings.plugin import VENDOR_KINDS, Plugin, RunSoFar
from accel_state.warning import warn_user

if TYPE_CHECKING:
    from torch import nn


def _int_or_auto(text: str) -> int | str:
    return AUTO if text.lower() == AUTO else int(text)


def _float_or_auto(text: str) -> float | str:
    return AUTO if text.lower() == AUTO else float(text)


_int_or_auto.__name__, _float_or_auto.__name__ = "int", "float"  # argparse puts these names into its error messages

ACCUMULATION_STEPS = Kind(
    "an integer of at least 1, or 'auto'",
    _int_or_auto,
    lambda value: value == AUTO or (is_integer(value) and value >= 1),
    convert=as_integer,
    metavar="N",
    limits=(1, None),
)
CLIPPING = Kind(
    "a number of at least 0, or 'auto'",
    _float_or_auto,
    lambda value: value == AUTO or (is_number(value) and value >= 0),
    metavar="NORM",
    limits=(0, None),
)
STAGE = Kind(
    "a ZeRO stage from 0 to 3",
    int,
    lambda value: is_integer(value) and 0 <= value <= 3,
    ("0", "1", "2", "3"),
    convert=as_integer,
    closed=True,
    metavar="STAGE",
)
OFFLOAD_DEVICE = one_of("none", "cpu", "nvme", exact=False)
CLASS_NAMES = words_of("class names")
NAMES = Kind(
    "class names, separated by commas",
    str,
    lambda value: isinstance(value, str) or CLASS_NAMES.accepts(value),
    metavar="CLASSES",
)

CONFIG_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""The dotted key of each field in the configuration."""
SET_BY_CONFIG = (*CONFIG_KEYS, "mixed_precision")
"""What the accelerate config must not set when DeepSpeed has a config file of its own."""
ENABLED_SECTION = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16", "no": None}
"""The section of the configuration that each `mixed_precision` switches on."""


@known_as("accelerate.utils.dataclasses.DeepSpeedPlugin")
@guess_arguments
@dataclass
class DeepSpeedPlugin(Plugin):
    """How DeepSpeed trains: by a configuration of its own, or by the fields of this class.

    Fields left None are read from the environment. With `hf_ds_config`, values of the configuration win and its "auto"
    values are filled from the fields.

    Args:
        hf_ds_config (path, `dict`, base64 `str` or `HfDeepSpeedConfig`, *optional*): DeepSpeed's configuration.
        gradient_accumulation_steps (`int` or "auto"): Micro-batches per optimizer step.
        gradient_clipping (`float` or "auto"): Maximum gradient norm for gradient clipping.
        zero_stage (`int`): What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        is_train_batch_min (`bool`): With several loaders, take the smallest batch size rather than the largest.
        offload_optimizer_device, offload_param_device ("none", "cpu" or "nvme"): Where optimizer states and parameters are
            offloaded to.
        offload_optimizer_nvme_path, offload_param_nvme_path (`str`): NVMe folder, for "nvme".
        zero3_init_flag (`bool`): Shard parameters while the model is built; stage 3 only, where it is the default.
        zero3_save_16bit_model (`bool`): Have DeepSpeed's own `save_16bit_model` gather the weights of stage 3.
        transformer_moe_cls_names (`str`): Classes of mixture-of-experts layers, separated by commas.
        enable_msamp (`bool`): Train in FP8 with MS-AMP.
        msamp_opt_level (`"O1"` or `"O2"`): How much MS-AMP keeps in 8 bits.

    Example:
        ```python
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0))
        ```
    """

    _forbids_gathering = False  # no field: it is read from the configuration
    distributed_type: ClassVar[DistributedType] = DistributedType.DEEPSPEED
    works_on: ClassVar[frozenset[str]] = (VENDOR_KINDS | {"cpu"}) - {"neuron"}
    starts_own_group: ClassVar[bool] = True

    hf_ds_config: Any = option(
        None,
        kind=Kind("a DeepSpeed configuration", str, lambda value: True),
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        flag="--deepspeed_config_file",
        help="DeepSpeed's own JSON config file.",
    )
    gradient_accumulation_steps: int | str = option(
        None,
        kind=ACCUMULATION_STEPS,
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flag="--gradient_accumulation_steps",
        help="Gradient accumulation steps, or auto.",
        fallback=AUTO,
        launch_default=None,
    )
    gradient_clipping: float | str = option(
        None,
        kind=CLIPPING,
        env="ACCELERATE_GRADIENT_CLIPPING",
        flag="--gradient_clipping",
        help="Maximum gradient norm for gradient clipping, or auto.",
        fallback=AUTO,
        launch_default=None,
    )
    zero_stage: int = option(
        None,
        kind=STAGE,
        env="ACCELERATE_DEEPSPEED_ZERO_STAGE",
        flag="--zero_stage",
        help="ZeRO stage: 1 shards optimizer states, 2 gradients too, 3 parameters too.",
        fallback=2,
        launch_default=None,
    )
    is_train_batch_min: bool = option(True, kind=BOOLEAN)
    offload_optimizer_device: str = option(
        None,
        kind=OFFLOAD_DEVICE,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        flag="--offload_optimizer_device",
        help="Where optimizer states are offloaded to: none, cpu or nvme.",
        fallback="none",
        launch_default=None,
        as_text=True,
    )
    offload_param_device: str = option(
        None,
        kind=OFFLOAD_DEVICE,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        flag="--offload_param_device",
        help="Where parameters are offloaded to: none, cpu or nvme.",
        fallback="none",
        launch_default=None,
        as_text=True,
    )
    offload_optimizer_nvme_path: str = option(
        None,
        kind=TEXT,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        flag="--offload_optimizer_nvme_path",
        help="NVMe folder for offloaded optimizer states.",
        fallback="none",
        launch_default=None,
    )
    offload_param_nvme_path: str = option(
        None,
        kind=TEXT,
        env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        flag="--offload_param_nvme_path",
        help="NVMe folder for offloaded parameters.",
        fallback="none",
        launch_default=None,
    )
    zero3_init_flag: bool = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        flag="--zero3_init_flag",
        help="Shard parameters while the model is built, with deepspeed.zero.Init (stage 3).",
        as_text=True,
    )
    zero3_save_16bit_model: bool = option(
        None,
        kind=BOOLEAN,
        env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        flag="--zero3_save_16bit_model",
        help="Gather 16-bit weights when a model is saved (stage 3).",
        fallback=False,
        launch_default=None,
        as_text=True,
    )
    transformer_moe_cls_names: str | None = option(
        None,
        kind=NAMES,
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        flag="--deepspeed_moe_layer_cls_names",
        help="Class names of mixture-of-experts layers, separated by commas.",
    )
    enable_msamp: bool = option(None, kind=BOOLEAN)
    msamp_opt_level: OptLevel | None = option(
        None,
        choices=("O1", "O2"),
        env="ACCELERATE_FP8_OPT_LEVEL",
        help="Optimization level of MS-AMP.",
        fallback="O1",
    )
    deepspeed_config: dict[str, Any] = field(init=False, repr=False, compare=False)
    dschf: Any = field(init=False, repr=False, compare=False)
    """Keeps the configuration alive that transformers reads; transformers holds only a weak reference to it."""

    def __post_init__(self) -> None:
        self._selected = False
        self.dschf = None
        resolve_options(self, options_of(self).keys() - {"transformer_moe_cls_names"})
        if self.enable_msamp is None:
            self.enable_msamp = os.environ.get("ACCELERATE_FP8_BACKEND", "").upper() == FP8BackendType.MSAMP.value
        if isinstance(self.hf_ds_config, str) and self.hf_ds_config.lower() == "none":
            self.hf_ds_config = None
        (self._make_config if self.hf_ds_config is None else self._read_config)()
        self.deepspeed_config = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")  # the training script logs, not DeepSpeed
        self._check_offload()
        self._resolve_zero3_init()
        self._add_msamp_section()

    @override
    def check(self) -> None:
        """Raise an error without the library, and warn of offload options that have no effect at this ZeRO stage.

        Raises:
            MissingLibraryError: When DeepSpeed is not installed.
        """
        from accel_state.libraries import is_deepspeed_available

        if not is_deepspeed_available():
            raise missing_library("deepspeed", extra="deepspeed", why="DeepSpeedPlugin")
        if self.get_value("zero_optimization.offload_optimizer.device") == "nvme" and self.zero_stage < 3:
            warn_user(
                f"DeepSpeedPlugin.offload_optimizer_device='nvme' offloads optimizer states to CPU memory with "
                f"zero_stage={self.zero_stage}. Set zero_stage=3 to offload to NVMe, or offload_optimizer_device='cpu'."
            )
        if self.get_value("zero_optimization.offload_param.device") == "cpu" and self.zero_stage < 3:
            warn_user(
                f"DeepSpeedPlugin.offload_param_device='cpu' has no effect with zero_stage={self.zero_stage}. Set "
                "zero_stage=3, or leave it out."
            )

    @override
    def mixed_precision_in_use(self) -> str:
        """The mixed precision that DeepSpeed's configuration enables: "fp16", "bf16" or "no"."""
        config = self.deepspeed_config
        return next((name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled") is True), "no")

    @override
    def attach(self, state: RunSoFar) -> None:
        """Write the run's precision into the configuration."""
        self.set_mixed_precision(state.mixed_precision)

    # ---- resolving the configuration --------------------------------------------------------------------------------

    def _make_config(self) -> None:
        zero: dict[str, Any] = {"stage": self.zero_stage}
        for name in ("optimizer", "param"):
            device, path = getattr(self, f"offload_{name}_device"), getattr(self, f"offload_{name}_nvme_path")
            if device == "nvme" and path == "none":
                key = f"DeepSpeedPlugin.offload_{name}_nvme_path"
                raise wrong_value(key, path, f"a folder, because offload_{name}_device='nvme'")
            zero[f"offload_{name}"] = {"device": device, "nvme_path": path if device == "nvme" else None}
        zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        self.hf_ds_config = HfDeepSpeedConfig(
            {
                "train_batch_size": AUTO,
                "train_micro_batch_size_per_gpu": AUTO,
                "gradient_accumulation_steps": self.gradient_accumulation_steps,
                "zero_optimization": zero,
                "gradient_clipping": self.gradient_clipping,
            }
        )

    def _read_config(self) -> None:
        _check_no_duplicate_options()
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        config = self.hf_ds_config.config
        self._forbids_gathering = get_value(config, CONFIG_KEYS["zero3_save_16bit_model"]) is False
        if not isinstance(config.get("zero_optimization"), dict):
            raise ValueError(
                "The DeepSpeed configuration has no section 'zero_optimization'. Add one, for example "
                '{"zero_optimization": {"stage": 2}}.'
            )
        steps = self.gradient_accumulation_steps
        config.setdefault("gradient_accumulation_steps", 1 if steps == AUTO else steps)
        known = {key: getattr(self, name) for name, key in CONFIG_KEYS.items()}
        for key in known:
            fill(config, key, known, [], must_match=False)
        for name, key in CONFIG_KEYS.items():
            value = get_value(config, key)
            if value is None:
                continue
            kind, label = options_of(self)[name].kind, f"DeepSpeed configuration: {key}"
            if kind.read(label, value) != value:  # a str where DeepSpeed reads an int or a float
                raise wrong_value(label, value, kind.expected)
            setattr(self, name, value)
        self.hf_ds_config.set_stage_and_offload()

    def _check_offload(self) -> None:
        """Raise an error for offload of a state that the ZeRO stage does not shard."""
        devices = {name: self.get_value(f"zero_optimization.offload_{name}.device") for name in ("optimizer", "param")}
        lowest = {("optimizer", "cpu"): 1, ("optimizer", "nvme"): 2, ("param", "nvme"): 3}
        for (name, device), stage in lowest.items():
            if devices[name] == device and self.zero_stage < stage:
                raise wrong_value(
                    "DeepSpeedPlugin.zero_stage",
                    self.zero_stage,
                    f"a stage of at least {stage}, because offload_{name}_device={device!r}",
                )

    def _resolve_zero3_init(self) -> None:
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.zero_stage == 3
        elif self.zero3_init_flag and self.zero_stage != 3:
            warn_user(
                f"DeepSpeedPlugin.zero3_init_flag=True has no effect with zero_stage={self.zero_stage}. Set "
                "zero_stage=3, or leave it out."
            )
            self.zero3_init_flag = False

    def _add_msamp_section(self) -> None:
        if not self.enable_msamp:
            return
        if self.zero_stage == 3:
            raise NotImplementedError(
                "DeepSpeedPlugin(zero_stage=3, enable_msamp=True) is not supported: MS-AMP cannot shard parameters. Set "
                "zero_stage to 0, 1 or 2."
            )
        self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})

    @property
    def may_gather_weights(self) -> bool:
        """Whether the weights of a stage-3 model may be gathered: unless a configuration of the program's own forbids it."""
        return not self._forbids_gathering

    # ---- contract methods: the configuration ------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, as in `zero.Init(config_dict_or_path=accelerator.deepspeed_plugin.config)`."""
        return self.deepspeed_config

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill one "auto" value from `kwargs`, or record a mismatch of a fixed value.

        Args:
            ds_key_long: Dotted key, which is also its name in `kwargs`.
            mismatches: A message is appended for a fixed value that differs.
            must_match: Whether fixed values are compared.
            **kwargs: Known values by dotted key.

        Raises:
            ValueError: When the value is "auto" and `kwargs` does not have it.
        """
        fill(self.deepspeed_config, ds_key_long, kwargs, [] if mismatches is None else mismatches, must_match)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value under a dotted key is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The configuration's value under a dotted key, `default` when there is none."""
        return get_value(self.deepspeed_config, ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill all "auto" values from `kwargs` and compare the fixed ones.

        Args:
            prefix: Dotted key, with a dot at its end, of the section to process; the whole configuration when empty.
            mismatches: A message is appended for each fixed value that differs; without it they are raised.
            config: The section itself, when not the one named by `prefix`.
            must_match: Whether fixed values are compared.
            **kwargs: Known values by dotted key.

        Raises:
            ValueError: When an "auto" value is not in `kwargs`, or fixed values differ.
        """
        section = config
        if section is None:
            section = get_value(self.deepspeed_config, prefix[:-1], {}) if prefix else self.deepspeed_config
        conflicts: list[str] = [] if mismatches is None else mismatches
        for key in list(leaf_keys(section, prefix)):
            self.fill_match(key, conflicts, must_match=must_match, **kwargs)
        if conflicts and mismatches is None:
            raise ValueError(
                "The DeepSpeed configuration does not match the training script:\n- "
                + "\n- ".join(conflicts)
                + "\nCorrect the "
                "configuration, or set these values to 'auto'."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch on the section of the configuration that belongs to a precision.

        Args:
            mixed_precision: "no", "fp16", "bf16" or "fp8" (whose other operations run in bf16).

        Raises:
            ValueError: For another value, or when the configuration enables the other dtype.
        """
        one_of(*ENABLED_SECTION).read("mixed_precision", mixed_precision)
        wanted = ENABLED_SECTION[mixed_precision]
        config = self.deepspeed_config
        other = {"fp16": "bf16", "bf16": "fp16"}.get(wanted or "")
        if other and get_value(config, f"{other}.enabled") is True:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} contradicts {other}.enabled=true in the DeepSpeed configuration. "
                "Change one of them, or set it to 'auto' there."
            )
        if wanted == "fp16":
            config.setdefault("fp16", {"enabled": True, "auto_cast": True})
        for section in ("fp16", "bf16"):
            node = config.setdefault(section, {})
            if node.get("enabled", AUTO) == AUTO:
                node["enabled"] = section == wanted

    # ---- contract methods: DeepSpeed and transformers ---------------------------------------------------------------

    def set_deepspeed_weakref(self) -> None:
        """Register the configuration with transformers, so that `from_pretrained` shards parameters under ZeRO-3.

        Raises:
            MissingLibraryError: When `zero3_init_flag` is set and DeepSpeed or transformers is not installed.
        """
        self.dschf = None  # before another one is made
        self.dschf = register_with_transformers(self.deepspeed_config, sharded=self.zero3_init_flag)

    def is_zero3_init_enabled(self) -> bool:
        """Whether parameters are sharded while a model is built."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Switch sharding while building on or off for a `with` block.

        Raises:
            MissingLibraryError: When it is switched on and transformers or DeepSpeed is not installed.
        """
        before = self.zero3_init_flag
        if before == enable:
            yield
            return
        self._switch_zero3_init(enable)
        try:
            yield
        finally:
            self._switch_zero3_init(before)

    def _switch_zero3_init(self, enable: bool) -> None:
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Mark mixture-of-experts layers as ZeRO-3 leaf modules, whose parameters are all-gathered together.

        Args:
            model: The model; untouched when no classes are named.

        Raises:
            MissingLibraryError: When DeepSpeed is not installed.
            ValueError: When a class does not occur in the model.
        """
        resolve_options(self, ("transformer_moe_cls_names",))
        if self.transformer_moe_cls_names is None:
            return
        names: list[str] = CLASS_NAMES.read(
            "DeepSpeedPlugin.transformer_moe_cls_names", self.transformer_moe_cls_names
        )
        set_leaf_modules(model, names)

    # ---- contract methods: one of several plugins -------------------------------------------------------------------

    @override
    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the plugin in use; called by `AcceleratorState.select_deepspeed_plugin`.

        Raises:
            ValueError: When it is called by other code.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "DeepSpeedPlugin.select() cannot be called directly. Call accelerator.state.select_deepspeed_plugin(name)."
            )
        self.set_deepspeed_weakref()
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    @property
    def selected(self) -> bool:
        """Whether this is the plugin in use."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            f"DeepSpeedPlugin.selected={value!r} cannot be set. Call accelerator.state.select_deepspeed_plugin(name)."
        )


def _check_no_duplicate_options() -> None:
    """Raise an error for an accelerate config that sets what DeepSpeed's own config file sets.

    Raises:
        ValueError: Naming the fields.
    """
    given = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    duplicates = [name for name in given if name in SET_BY_CONFIG]
    if duplicates:
        raise ValueError(
            f"{', '.join(duplicates)} of the accelerate config would be ignored, because DeepSpeed has a "
            "config file of its own. Move them there, and remove them from the accelerate config."
        )
