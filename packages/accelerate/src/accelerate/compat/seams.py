"""Every name that other libraries monkeypatch, and how our code calls their replacement.

A seam is a promise: the name is kept, it is looked up at every call, and it is called with the arguments with which
accelerate 1.15 calls it. Packages below the umbrella do not import this module: they offer a registration
(`accel_bigmodel.replaceable`), which the module with the seam fills.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from accel_state.warning import warn_user


class Seam(NamedTuple):
    """One name that may be replaced from outside.

    Attributes:
        owner: The module, or the class in a module, on which it is set: `"accelerate.hooks:AlignDevicesHook"`.
        name: The attribute.
        replaced_by: Who replaces it, and what for.
    """

    owner: str
    name: str
    replaced_by: str


SEAMS = (
    # functions, looked up in their module: through `late_bound`, `replacement` or a registration
    Seam(
        "accelerate.accelerator", "fsdp2_prepare_model", "axolotl shards models itself; unsloth corrects dtypes before"
    ),
    Seam("accelerate.accelerator", "convert_model_to_fp8_ao", "axolotl, which leaves routers of experts as they are"),
    Seam("accelerate.big_modeling", "check_device_map", "transformers, for models with modules that are not placed"),
    Seam("accelerate.commands.env", "which", "tests that pretend programs are installed"),
    Seam("accelerate.commands.to_fsdp2", "load_config", "tests that convert a config without a file"),
    Seam("accelerate.utils.launch", "which", "tests that pretend there is an mpirun"),
    # methods: our code calls them on the object, so that whatever class attribute there is runs
    Seam("accelerate:Accelerator", "_prepare_cp", "transformers' trainers, under context parallelism"),
    Seam("accelerate:Accelerator", "_prepare_fsdp2", "ms-swift, before models are sharded"),
    Seam("accelerate:Accelerator", "backward", "unsloth"),
    Seam("accelerate:Accelerator", "clip_grad_norm_", "unsloth"),
    Seam("accelerate:Accelerator", "distributed_type", "unsloth, which trains as if in one process"),
    Seam("accelerate:Accelerator", "prepare_data_loader", "unsloth_zoo"),
    Seam("accelerate:Accelerator", "prepare_model", "unsloth"),
    Seam(
        "accelerate:Accelerator", "verify_device_map", "ms-swift, whose models of several devices are trained by DDP"
    ),
    Seam(
        "accelerate.hooks:AlignDevicesHook", "init_hook", "compressed-tensors, for weights that are in place already"
    ),
    Seam(
        "accelerate.parallelism_config:ParallelismConfig",
        "_validate_accelerator",
        "axolotl, which adds an axis for experts: it also replaces `_get_mesh`, `total_size` and names of axes",
    ),
    Seam("accelerate.state:PartialState", "_prepare_backend", "unsloth, which trains as if in one process"),
    # not ours: called with the keywords with which 1.15 calls it (`device_ids` and `output_device` are always given)
    Seam("torch.nn.parallel:DistributedDataParallel", "__init__", "ms-swift"),
)
UNCALLED = (
    Seam("accelerate.utils.fsdp_utils", "fsdp2_load_full_state_dict", "axolotl, for quantized weights"),
    Seam("accelerate.accelerator", "fsdp2_switch_optimizer_parameters", "libraries that shard optimizers themselves"),
)
"""Names of `accelerate.compat.fsdp` that the engine of FSDP 2 has no use for: it loads and rebinds in another way."""
_FUNCTIONS = {(seam.owner, seam.name) for seam in SEAMS if ":" not in seam.owner}


def late_bound(module: str, name: str) -> Callable[..., Any]:
    """A function that calls whatever a seam holds at the time of the call.

    Args:
        module: The module in which others replace the function.
        name: Its name there.

    Raises:
        KeyError: When `SEAMS` does not list it.
    """
    _check_listed(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def replacement(module: str, name: str) -> Callable[..., Any] | None:
    """The object that a library has set in a module that does not define the name itself; None if none has.

    A library that puts back what it found has set none.

    Args:
        module: A module whose `__getattr__` is a `legacy_getattr`.
        name: The name there.

    Raises:
        KeyError: When `SEAMS` does not list it.
    """
    _check_listed(module, name)
    names = vars(sys.modules[module])
    override: Callable[..., Any] | None = names.get(name)
    return None if override is None or override is names["__getattr__"](name) else override


def warn_of_uncalled() -> None:
    """Warn of each function that a library has replaced and that nothing here calls."""
    for seam in UNCALLED:
        module = sys.modules.get(seam.owner)  # which nobody has replaced anything in, if it was not imported
        present = None if module is None else vars(module).get(seam.name)
        if present is not None and present is not getattr(import_module("accelerate.compat.fsdp"), seam.name):
            warn_user(
                f"{seam.owner}.{seam.name} was replaced by {present.__module__}.{present.__qualname__}, which is not called: FSDP 2 loads "
                f"weights and rebinds optimizers in another way here. To shard a model by functions of your own, replace "
                "accelerate.accelerator.fsdp2_prepare_model."
            )


def _check_listed(module: str, name: str) -> None:
    if (module, name) not in _FUNCTIONS:
        raise KeyError(f"{module}.{name} is not a seam. List it in accelerate.compat.seams.SEAMS.")


# ---- members of `Accelerator` that a subclass overrides, or a library replaces ---------------------------------------

NAMES = ("_prepare_deepspeed", "gather", "get_state_dict", "no_sync", "num_processes", "process_index")
"""As in accelerate 1.15, `accumulate` calls `no_sync`, `gather_for_metrics` calls `gather`, `save_model` calls `get_state_dict`, `prepare`
calls `_prepare_deepspeed` under DeepSpeed, and loaders are sharded by the last two. Where nothing is overridden, shorter ways are taken.
"""
Class = TypeVar("Class", bound=type)

OWN: dict[str, Any] = {}
"""What this library has under each of `NAMES`."""


def remember_own(owner: Class) -> Class:
    """Class decorator: what is under `NAMES` now is not overridden."""
    OWN.update({name: getattr(owner, name) for name in NAMES})
    return owner


def is_overridden(accelerator: Any, name: str) -> bool:
    """Whether the accelerator's class has anything else than this library's under a name.

    Args:
        accelerator: An `Accelerator`.
        name: One of `NAMES`.
    """
    return getattr(type(accelerator), name) is not OWN[name]
