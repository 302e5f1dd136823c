"""Building models on the meta device, by their library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_cli.errors import UsageError, did_you_mean
from accel_cli.estimate.own_class import LIBRARY, build_class
from accel_cli.estimate.source import ModelSource, check_library, find_model
from accel_state.errors import missing_library
from accel_state.libraries import is_timm_available, is_transformers_available

if TYPE_CHECKING:
    from torch import nn

INSTALLED: dict[str, Callable[[], bool]] = {
    "timm": is_timm_available,
    "transformers": is_transformers_available,
}


class WrongLibraryError(UsageError, RuntimeError):
    """A model is not of the library that should build it."""


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """Build a model on the meta device: modules and shapes, without values.

    Args:
        model_name: A local folder, or a name on the Hub.
        library_name: `"timm"` or `"transformers"`; detected when None.
        trust_remote_code: Whether code from the model's repository may run.
        access_token: For the Hub.

    Raises:
        UsageError: The model cannot be found or built.
        MissingLibraryError: Its library is not installed.
    """
    return build_on_meta(find_model(model_name, library_name, access_token), trust_remote_code)


def build_on_meta(source: ModelSource, trust_remote_code: bool = False) -> nn.Module:
    """Build a model on the meta device. If its code needs values, only its parameters are on the meta device."""
    import torch

    try:
        with torch.device("meta"):
            return build(source, trust_remote_code)
    except UsageError:
        raise
    except RuntimeError:
        from accel_bigmodel.empty import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return build(source, trust_remote_code)


def build(source: ModelSource, trust_remote_code: bool = False) -> nn.Module:
    """Build a model in float32, on the device of the surrounding contexts.

    Raises:
        UsageError: It cannot be built.
        MissingLibraryError: Its library is not installed.
    """
    if source.library == LIBRARY:
        return build_class(source)
    if source.library is None:
        raise UsageError(
            f"The model {source.name!r} cannot be built, because it has only safetensors files. Estimate its sizes alone, "
            "without --training."
        )
    check_library(source.library)
    if not INSTALLED[source.library]():
        raise missing_library(source.library, "estimate", f"The model {source.name!r}")
    return BUILDERS[source.library](source, trust_remote_code)


def _build_transformers(source: ModelSource, trust_remote_code: bool) -> nn.Module:
    import transformers

    if source.config.get("auto_map") and not trust_remote_code and not _is_native(source.config):
        raise UsageError(
            f"The model {source.name!r} needs code of its repository ({source.config['auto_map']}). Read the code, then add "
            "--trust_remote_code."
        )
    where = str(source.folder or source.name)
    offline = {"local_files_only": True} if source.folder else {}
    try:
        config = transformers.AutoConfig.from_pretrained(
            where, trust_remote_code=trust_remote_code, token=source.token, **offline
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        known = list(transformers.CONFIG_MAPPING)
        kind = source.config.get("model_type")
        hint = did_you_mean(kind, known) if isinstance(kind, str) and kind not in known else ""
        reason = f"it does not know the model_type {kind!r}.{hint}" if kind not in known else _one_line(error)
        raise UsageError(f"transformers {transformers.__version__} cannot read {source.name!r}: {reason}") from error
    for name in ("_attn_implementation", "_experts_implementation"):  # could name code to be downloaded
        if hasattr(config, name):
            setattr(config, name, None)
    model: nn.Module = _transformers_class(source, config, trust_remote_code)(config)
    return model


def _is_native(config: dict[str, Any]) -> bool:
    """True when transformers itself has the model, so that code from its repository is not needed."""
    import transformers

    return config.get("model_type") in transformers.CONFIG_MAPPING


def _transformers_class(source: ModelSource, config: Any, trust_remote_code: bool) -> Callable[[Any], nn.Module]:
    """Find the class to build: the class of the saved model, or the model without a head."""
    import transformers

    names = getattr(config, "architectures", None) or []
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and auto_map:
        autos = [name for name in auto_map if name.startswith("AutoModel")]
        named = [name for name in autos if names and auto_map[name].endswith("." + names[0])]
        auto = getattr(transformers, [*named, *autos, "AutoModel"][0])
        return lambda config: auto.from_config(config, trust_remote_code=True)
    if not names:
        return transformers.AutoModel.from_config
    architecture_class = getattr(transformers, names[0], None)
    if not (isinstance(architecture_class, type) and issubclass(architecture_class, transformers.PreTrainedModel)):
        hint = did_you_mean(names[0], [name for name in dir(transformers) if name[:1].isupper()])
        raise UsageError(
            f"The class {names[0]!r} in the config.json of {source.name!r} is not a model of transformers "
            f"{transformers.__version__}. Upgrade transformers, or correct the name in config.json.{hint}"
        )
    return architecture_class


OF_CREATE_MODEL = frozenset({  # arguments that would load weights, from where a configuration says
    "model_name", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
})  # fmt: skip


def _build_timm(source: ModelSource, trust_remote_code: bool) -> nn.Module:
    import timm

    architecture = source.config.get("architecture")
    if not isinstance(architecture, str) or ":" in architecture:  # which would be looked up elsewhere
        raise WrongLibraryError(
            f"Tried to load `{source.name}` with `timm` but its config.json names no architecture, as those of timm do"
        )
    given = {key: source.config[key] for key in ("num_classes", "global_pool") if source.config.get(key) is not None}
    given |= source.config.get("model_args") or {}
    try:
        return timm.create_model(architecture, **{key: given[key] for key in given if key not in OF_CREATE_MODEL})
    except RuntimeError as error:
        hint = did_you_mean(architecture, timm.list_models())
        raise UsageError(
            f"timm {timm.__version__} cannot build {architecture!r} ({_one_line(error)}).{hint}"
        ) from error


BUILDERS: dict[str, Callable[[ModelSource, bool], Any]] = {
    "timm": _build_timm,
    "transformers": _build_transformers,
}


def add_timm_hub_prefix(model_name: str) -> str:
    """The name under which timm finds a model; one on the Hub has a slash in its name.

    timm's own names, and those with a prefix (`local-dir:...`), are not changed.
    """
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name


def check_has_model(error: Exception) -> str:
    """The library whose error says that it does not have a model.

    Args:
        error: What `create_empty_model` or a library raised.

    Returns:
        `"timm"`, `"transformers"`, or `"unknown"`.
    """
    text = str(error)
    if is_timm_available() and isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if is_transformers_available() and isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
