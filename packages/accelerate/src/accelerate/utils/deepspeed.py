"""Compatibility path for DeepSpeed's configuration and of what stands for its optimizer."""

from accel_integrations.deepspeed_dummies import DummyOptim as DummyOptim
from accel_integrations.deepspeed_dummies import DummyScheduler as DummyScheduler
from accel_integrations.engines.deepspeed.prepare_arguments import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accel_integrations.engines.deepspeed.startup import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accel_integrations.engines.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel_integrations.engines.deepspeed.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from accel_integrations.engines.deepspeed.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from accel_state.settings.deepspeed_auto import HfDeepSpeedConfig as HfDeepSpeedConfig
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
