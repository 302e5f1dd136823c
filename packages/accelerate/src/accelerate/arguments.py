"""Resolving the arguments of `Accelerator`, together with the environment that `accelerate launch` sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_state.enums import RNGType
from accel_state.environment import parse_flag_from_env
from accel_state.settings.accumulation import GradientAccumulationPlugin
from accel_state.settings.compile import TorchDynamoPlugin
from accel_state.settings.data import DataLoaderConfiguration
from accel_state.settings.handlers import Handlers, KwargsHandler
from accel_state.settings.option import at_least
from accel_state.settings.project import ProjectConfiguration
from accel_state.warning import warn_user

if TYPE_CHECKING:
    pass


class NotGiven:
    """The type of the default of an argument for which None is a value, too."""

    def __repr__(self) -> str:
        return "not given"


NOT_GIVEN = NotGiven()

PLUGINS = {
    # argument: (environment variable that enables it, where its class is)
    "deepspeed_plugin": ("ACCELERATE_USE_DEEPSPEED", "accel_state.settings.deepspeed:DeepSpeedPlugin"),
    "fsdp_plugin": ("ACCELERATE_USE_FSDP", "accel_state.settings.fsdp:FullyShardedDataParallelPlugin"),
    "megatron_lm_plugin": ("ACCELERATE_USE_MEGATRON_LM", "accel_state.settings.megatron:MegatronLMPlugin"),
    "torch_tp_plugin": (None, "accel_state.settings.parallelism:TorchTensorParallelPlugin"),
    "parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "accel_state.mesh:ParallelismConfig"),
}


def resolve_plugins(given: dict[str, Any]) -> dict[str, Any]:
    """The plugins of a run: those that are passed, and those that the environment enables.

    Args:
        given: Values by argument name, None where none was passed.

    Raises:
        TypeError: For a value of another class.
        NotImplementedError: For plugins that this release does not have.
    """
    resolved = dict(given)
    for argument, (variable, where) in PLUGINS.items():
        value = given.get(argument)
        is_enabled = variable is not None and parse_flag_from_env(variable)
        if value is None and not is_enabled:
            continue
        plugin_class = _plugin_class(where, argument if value is not None else f"{variable}=true")
        resolved[argument] = plugin_class() if value is None else _checked_plugin(argument, value, plugin_class)
    tensor_parallel = resolved.get("torch_tp_plugin")
    if tensor_parallel is not None and resolved.get("parallelism_config") is None and tensor_parallel.tp_size > 1:
        config_class = _plugin_class(PLUGINS["parallelism_config"][1], "torch_tp_plugin")
        resolved["parallelism_config"] = config_class(tp_size=tensor_parallel.tp_size)
    return resolved


def _checked_plugin(argument: str, value: Any, plugin_class: type) -> Any:
    """One plugin, or for DeepSpeed several by name."""
    if argument != "deepspeed_plugin" or not isinstance(value, dict) or not value:
        return _checked(argument, value, plugin_class)
    return {name: _checked(f"deepspeed_plugins[{name!r}]", plugin, plugin_class) for name, plugin in value.items()}


def _plugin_class(where: str, asked_by: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise NotImplementedError(
            f"{asked_by} needs {name}, which is not part of this release. Leave it out."
        ) from None


def resolve_handlers(given: Iterable[KwargsHandler] | KwargsHandler | None) -> Handlers:
    """The handlers sorted by their class; a single one need not be in a list.

    `ACCELERATE_FINITE_GRADIENTS` stands for a `FiniteGradientsKwargs` that was not passed.
    """
    handlers = Handlers.sort([given] if isinstance(given, KwargsHandler) else given)
    if handlers.finite_gradients is None and os.environ.get("ACCELERATE_FINITE_GRADIENTS", "none").lower() not in (
        "",
        "none",
    ):
        from accel_state.settings.finite_gradients import FiniteGradientsKwargs  # only programs that ask load it

        handlers.finite_gradients = FiniteGradientsKwargs()
    return handlers


def resolve_accumulation(num_steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """How gradients accumulate. `ACCELERATE_GRADIENT_ACCUMULATION_STEPS` overrides the number, but not a plugin.

    Raises:
        ValueError: Number and plugin are both passed, or the number is below 1.
    """
    if plugin is not None:
        _checked("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
        if num_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={num_steps!r} and gradient_accumulation_plugin={plugin!r} are both given. "
                "Pass only the plugin, with num_steps in it."
            )
        return plugin if plugin.num_steps is not None else replace(plugin, num_steps=1)
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if os.environ.get(variable, "auto") == "auto":
        return GradientAccumulationPlugin(num_steps=check_num_steps("gradient_accumulation_steps", num_steps))
    return GradientAccumulationPlugin(num_steps=check_num_steps(variable, os.environ[variable]))


def check_num_steps(key: str, value: Any) -> int:
    """The number of micro-batches in an accumulation window, from an `int` or `str`.

    Raises:
        ValueError: It is below 1 or not an integer.
    """
    return int(at_least(1).read(key, value))


def resolve_loader_settings(
    config: DataLoaderConfiguration | None, split_batches: bool | NotGiven
) -> DataLoaderConfiguration:
    """How data loaders shard their data; `split_batches` as an argument of its own has no effect, as in 1.15."""
    settings = (
        DataLoaderConfiguration() if config is None else _checked("dataloader_config", config, DataLoaderConfiguration)
    )
    if isinstance(split_batches, bool) and split_batches is not settings.split_batches:
        warn_user(
            f"Accelerator(split_batches={split_batches!r}) has no effect, as in accelerate 1.15. To split batches, pass "
            "dataloader_config=DataLoaderConfiguration(split_batches=True).",
            FutureWarning,
        )
    return settings


def resolve_dynamo(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """How models are compiled.

    Raises:
        ValueError: A backend and a plugin are both passed, or there is no such backend.
    """
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if backend is not None:
        raise ValueError(
            f"dynamo_backend={backend!r} and dynamo_plugin={plugin!r} are both given. Pass only the plugin, with the "
            "backend in it."
        )
    return _checked("dynamo_plugin", plugin, TorchDynamoPlugin)


def resolve_project(
    project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """The folders of checkpoints and logs; `project_dir` is used where the configuration has none."""
    if config is None:
        return ProjectConfiguration(project_dir=project_dir)
    _checked("project_config", config, ProjectConfiguration)
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    elif project_dir is not None and os.fspath(project_dir) != os.fspath(config.project_dir or ""):
        warn_user(
            f"project_dir={project_dir!r} has no effect, because project_config.project_dir is {config.project_dir!r}. "
            "Pass the folder once."
        )
    return config


def resolve_rng_types(given: Sequence[str | RNGType] | None) -> list[str | RNGType]:
    """The random generators that prepared data loaders synchronise; by default only the sampler's.

    Raises:
        ValueError: For a name that is not a generator.
    """
    if given is None:
        return ["generator"]
    if isinstance(given, (str, RNGType)):
        given = [given]
    for entry in given:
        if entry not in RNGType:
            raise ValueError(
                f"rng_types={list(given)!r} is not valid: {entry!r} is not one of "
                f"{', '.join(map(repr, RNGType.list()))}."
            )
    return list(given)


def _checked(argument: str, value: Any, expected_type: type) -> Any:
    if not isinstance(value, expected_type):
        raise TypeError(
            f"{argument}={value!r} is of type {type(value).__name__}. Pass an object of {expected_type.__name__}."
        )
    return value
