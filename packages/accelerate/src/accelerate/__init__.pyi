"""Run PyTorch training on any hardware, at any scale, without changing the program."""

from accel_bigmodel.device_map.plan import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.dispatch import cpu_offload as cpu_offload
from accel_bigmodel.dispatch import disk_offload as disk_offload
from accel_bigmodel.dispatch import dispatch_model as dispatch_model
from accel_bigmodel.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from accel_bigmodel.empty import init_empty_weights as init_empty_weights
from accel_bigmodel.empty import init_on_device as init_on_device
from accel_bigmodel.hooks.user_offload import cpu_offload_with_hook as cpu_offload_with_hook
from accel_bigmodel.weights.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_cli.notebook import debug_launcher as debug_launcher
from accel_cli.notebook import notebook_launcher as notebook_launcher
from accel_data.skipping import skip_first_batches as skip_first_batches
from accel_ops.memory import find_executable_batch_size as find_executable_batch_size
from accel_ops.random import synchronize_rng_states as synchronize_rng_states
from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel_state.enums import DistributedType as DistributedType
from accel_state.libraries import is_rich_available as is_rich_available
from accel_state.mesh import ParallelismConfig as ParallelismConfig
from accel_state.processes import PartialState as PartialState
from accel_state.settings.data import DataLoaderConfiguration as DataLoaderConfiguration
from accel_state.settings.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_state.settings.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_state.settings.handlers import AutocastKwargs as AutocastKwargs
from accel_state.settings.handlers import GradScalerKwargs as GradScalerKwargs
from accel_state.settings.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.settings.profile import ProfileKwargs as ProfileKwargs
from accelerate import accelerator as accelerator
from accelerate import big_modeling as big_modeling
from accelerate import checkpointing as checkpointing
from accelerate import data_loader as data_loader
from accelerate import hooks as hooks
from accelerate import launchers as launchers
from accelerate import local_sgd as local_sgd
from accelerate import logging as logging
from accelerate import memory_utils as memory_utils
from accelerate import optimizer as optimizer
from accelerate import parallelism_config as parallelism_config
from accelerate import scheduler as scheduler
from accelerate import state as state
from accelerate import tracking as tracking
from accelerate import utils as utils
from accelerate.accelerator import Accelerator as Accelerator
from accelerate.inference import prepare_pippy as prepare_pippy

__version__: str
