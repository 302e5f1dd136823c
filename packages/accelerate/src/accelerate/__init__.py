"""Change five lines of a PyTorch training loop, and train on any hardware, at any scale."""

import os
from importlib import import_module
from typing import Any

import accel_ops  # noqa: F401 # watches the ranks of a PartialState, too
from accel_state.lazy import lazy_exports
from accel_state.public_names import use_public_names

__version__ = "1.16.0"

EXPORTS = {
    "accelerate.accelerator": "Accelerator",
    "accelerate.inference": "prepare_pippy",
    "accel_bigmodel.weights.load": "load_checkpoint_in_model",
    "accel_bigmodel.device_map.plan": "infer_auto_device_map",
    "accel_bigmodel.dispatch": "cpu_offload disk_offload dispatch_model load_checkpoint_and_dispatch",
    "accel_bigmodel.empty": "init_empty_weights init_on_device",
    "accel_bigmodel.hooks.attach": "materialize_meta_tensors",
    "accel_bigmodel.hooks.user_offload": "cpu_offload_with_hook",
    "accel_data.skipping": "skip_first_batches",
    "accel_cli.notebook": "debug_launcher notebook_launcher",
    "accel_ops.memory": "find_executable_batch_size",
    "accel_ops.random": "synchronize_rng_states",
    "accel_state.enums": "DDPCommunicationHookType DistributedType",
    "accel_state.libraries": "is_rich_available",
    "accel_state.mesh": "ParallelismConfig",
    "accel_state.processes": "PartialState",
    "accel_state.settings.data": "DataLoaderConfiguration",
    "accel_state.settings.ddp": "DistributedDataParallelKwargs",
    "accel_state.settings.deepspeed": "DeepSpeedPlugin",
    "accel_state.settings.fsdp": "FullyShardedDataParallelPlugin",
    "accel_state.settings.handlers": "AutocastKwargs GradScalerKwargs InitProcessGroupKwargs",
    "accel_state.settings.profile": "ProfileKwargs",
}
SUBMODULES = (
    "accelerator", "big_modeling", "checkpointing", "data_loader", "hooks", "launchers", "local_sgd", "logging", "memory_utils", "optimizer",
    "parallelism_config", "scheduler", "state", "tracking", "utils",
)  # fmt: skip

use_public_names()  # from here on, pickles name classes as accelerate 1.15 does
_export, __dir__, __all__ = lazy_exports(__name__, EXPORTS)
if os.environ.get("ACCELERATE_ENABLE_RICH") and _export("is_rich_available")():
    import_module("accelerate.utils.rich")


def __getattr__(name: str) -> Any:
    if name in SUBMODULES:  # `import accelerate` is enough to write `accelerate.utils.gather`
        return import_module(f"{__name__}.{name}")
    return _export(name)
