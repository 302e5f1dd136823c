"""Compatibility path for names for Megatron-LM."""

from accel_integrations.megatron.model import MegatronEngine as MegatronEngine
from accel_integrations.megatron.placeholders import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accel_integrations.megatron.placeholders import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accel_integrations.megatron.prepared import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accel_integrations.megatron.prepared import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accel_integrations.prepared.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from accel_integrations.prepared.scheduler import AcceleratedScheduler as AcceleratedScheduler
from accel_ops.nested import recursively_apply as recursively_apply
from accel_ops.placement import send_to_device as send_to_device
from accel_state.libraries import is_megatron_lm_available as is_megatron_lm_available
from accelerate.compat.megatron.functions import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accelerate.compat.megatron.functions import finish_mpu_init as finish_mpu_init
from accelerate.compat.megatron.functions import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelerate.compat.megatron.functions import initialize as initialize
from accelerate.compat.megatron.functions import model_provider_func as model_provider_func
from accelerate.compat.megatron.functions import prepare_data_loader as prepare_data_loader
from accelerate.compat.megatron.functions import (
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from accelerate.compat.megatron.functions import prepare_optimizer as prepare_optimizer
from accelerate.compat.megatron.functions import prepare_scheduler as prepare_scheduler
from accelerate.compat.megatron.train_steps import AbstractTrainStep as AbstractTrainStep
from accelerate.compat.megatron.train_steps import BertTrainStep as BertTrainStep
from accelerate.compat.megatron.train_steps import GPTTrainStep as GPTTrainStep
from accelerate.compat.megatron.train_steps import T5TrainStep as T5TrainStep
