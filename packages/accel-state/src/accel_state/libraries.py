"""Which optional libraries are installed, and in which version, found out without importing them."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from accel_state.constants import STR_OPERATION_TO_FUNC
from accel_state.environment import parse_flag_from_env
from accel_state.errors import missing_library

if TYPE_CHECKING:
    from packaging.version import Version

    torch_version: Version

P = ParamSpec("P")
R = TypeVar("R")

USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", default=True)


# ---- versions -------------------------------------------------------------------------------------------------------


@functools.cache
def parse_version(text: str) -> Version:
    """A version that compares as versions do (`"2.10" > "2.9"`)."""
    from packaging.version import Version

    return Version(text)


@functools.cache
def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare a version with a required one.

    The local version label, such as `+cu130`, is ignored: `2.13.0+cu130` equals `2.13.0`.

    Args:
        library_or_version: Name of an installed distribution, or a version.
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        requirement_version: The version to compare with.

    Raises:
        ValueError: For another operation.
        importlib.metadata.PackageNotFoundError: When the library is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation={operation!r} is unknown: use one of {', '.join(STR_OPERATION_TO_FUNC)}.")
    if isinstance(library_or_version, str):
        version = installed_version(library_or_version)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(library_or_version)
    else:
        version = str(library_or_version)
    return STR_OPERATION_TO_FUNC[operation](
        parse_version(parse_version(version).public), parse_version(requirement_version)
    )


@functools.cache
def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch with `version`; `is_torch_version(">=", "2.13")`."""
    return compare_versions("torch", operation, version)


def __getattr__(name: str) -> Any:
    if name == "torch_version":  # computed on demand, because it imports `packaging`
        value = globals()[name] = parse_version(importlib.metadata.version("torch"))
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- libraries that are simply installed or not ---------------------------------------------------------------------


@functools.cache
def _is_found(module: str, distributions: tuple[str, ...]) -> bool:
    # A folder of that name in the working directory (`wandb/` is a common one) looks like a package, so the
    # installation record is asked too.
    return find_spec(module) is not None and any(installed_version(name) for name in distributions)


def is_installed(module: str, *distributions: str) -> bool:
    """True when the top-level `module` can be imported, or has been.

    Args:
        module: Name in import statements.
        distributions: Names under which an installer knows it, when they differ from `module`; one is enough.
    """
    if module in sys.modules:
        return sys.modules[module] is not None
    return _is_found(module, distributions or (module,))


def _library(module: str, *distributions: str, at_least: str | None = None) -> Callable[[], bool]:
    """Make the function that tells whether a library is installed, in version `at_least` where given."""

    def is_available() -> bool:
        if not is_installed(module, *distributions):
            return False
        if at_least is None:
            return True
        versions = [version for name in distributions or (module,) if (version := installed_version(name))]
        return bool(versions) and compare_versions(parse_version(versions[0]), ">=", at_least)

    is_available.__name__ = is_available.__qualname__ = f"is_{module}_available"
    wanted = f"{module} {at_least} or later" if at_least else module
    is_available.__doc__ = f"True when {wanted} is installed."
    return is_available


is_aim_available = _library("aim")
is_amdsmi_available = _library("amdsmi")
is_boto3_available = _library("boto3")
is_clearml_available = _library("clearml")
is_comet_ml_available = _library("comet_ml")
is_datasets_available = _library("datasets")
is_deepspeed_available = _library("deepspeed")
is_dvclive_available = _library("dvclive")
is_import_timer_available = _library("import_timer")
is_ipex_available = _library(
    "intel_extension_for_pytorch", "intel-extension-for-pytorch", "intel_extension_for_pytorch"
)
is_lomo_available = _library("lomo_optim")
is_matplotlib_available = _library("matplotlib")
is_mlflow_available = _library("mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _library("msamp", "msamp", "ms-amp")
is_pandas_available = _library("pandas")
is_peft_available = _library("peft")
is_pynvml_available = _library("pynvml", "nvidia-ml-py", "pynvml")
is_pytest_available = _library("pytest")
is_sagemaker_available = _library("sagemaker")
is_schedulefree_available = _library("schedulefree")
is_swanlab_available = _library("swanlab")
is_timm_available = _library("timm")
is_torchao_available = _library("torchao", at_least="0.6.1")
is_torchdata_available = _library("torchdata")
is_torchdata_stateful_dataloader_available = _library("torchdata", at_least="0.8.0")
is_torchvision_available = _library("torchvision")
is_tqdm_available = _library("tqdm")
is_trackio_available = _library("trackio")
is_transformers_available = _library("transformers")
is_triton_available = _library("triton", "triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
is_wandb_available = _library("wandb")
is_8bit_bnb_available = _library("bitsandbytes", at_least="0.37.2")
is_4bit_bnb_available = _library("bitsandbytes", at_least="0.39.0")
is_bitsandbytes_multi_backend_available = _library("bitsandbytes", at_least="0.46.0")


# ---- libraries with further conditions ------------------------------------------------------------------------------


def is_bnb_available(min_version: str | None = None) -> bool:
    """True when bitsandbytes is installed, in `min_version` or later where given."""
    return _library("bitsandbytes", at_least=min_version)()


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """True when NumPy `min_version` or later is installed."""
    return _library("numpy", at_least=min_version)()


def is_rich_available() -> bool:
    """True when rich is installed and `ACCELERATE_ENABLE_RICH` asks for it."""
    return is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_tensorboard_available() -> bool:
    """True when TensorBoard or tensorboardX is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_transformer_engine_available() -> bool:
    """True when Transformer Engine is installed, NVIDIA's or (on Gaudi) Intel's."""
    return is_installed("transformer_engine") or is_installed("intel_transformer_engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """True when Transformer Engine is installed and the device computes in block-scaled 8-bit floats (imports it)."""
    if not is_installed("transformer_engine"):
        return False
    from transformer_engine.pytorch.fp8 import check_mxfp8_support

    return bool(check_mxfp8_support()[0])


def is_megatron_lm_available() -> bool:
    """True when `ACCELERATE_USE_MEGATRON_LM` asks for Megatron-LM and megatron-core is installed."""
    if not parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        return False
    spec = find_spec("megatron")
    folders = spec.submodule_search_locations if spec else None
    return any(os.path.isdir(os.path.join(folder, "core")) for folder in folders or ())


def is_pippy_available() -> bool:
    """True when pipeline-parallel inference works: always, with the supported versions of torch."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """True when torch supports `weights_only=True`: always, with the supported versions."""
    return is_torch_version(">=", "2.4.0")


def is_torch_distributed_available() -> bool:
    """True when this torch was built with its distributed package."""
    import torch

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """True when this torch can run collectives between Intel GPUs."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """True when torch_xla is installed and `USE_TORCH_XLA` does not forbid it.

    Args:
        check_is_tpu: Require that its device is a TPU.
        check_is_gpu: Require that its device is a GPU.

    Raises:
        ValueError: When both are True.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu are both True: one device is either, so set one of them.")
    if not (USE_TORCH_XLA and is_installed("torch_xla")):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    hardware = importlib.import_module("torch_xla.runtime").device_type()
    return hardware in (("TPU",) if check_is_tpu else ("GPU", "CUDA"))


def is_fp8_available() -> bool:
    """True when one of the libraries for 8-bit float training is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


# ---- decorators for functions that need a library -------------------------------------------------------------------


def _required(is_available: Callable[[], bool], name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(func: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_available():
                raise missing_library(name, why=f"{func.__qualname__}()")
            return func(*args, **kwargs)

        return wrapper

    return decorate


def deepspeed_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call raises `MissingLibraryError` when DeepSpeed is not installed."""
    return _required(is_deepspeed_available, "deepspeed")(func)


def torchao_required(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call raises `MissingLibraryError` when torchao 0.6.1 or later is not installed."""
    return _required(is_torchao_available, "torchao")(func)
