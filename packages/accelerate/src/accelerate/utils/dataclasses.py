"""Compatibility path for settings and their words, now `accel_state.settings` and `accel_state.enums`."""

from accel_integrations.bitsandbytes.settings import BnbQuantizationConfig as BnbQuantizationConfig
from accel_ops.nested import TensorInformation as TensorInformation
from accel_state.enums import BaseEnum as BaseEnum
from accel_state.enums import ComputeEnvironment as ComputeEnvironment
from accel_state.enums import CustomDtype as CustomDtype
from accel_state.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accel_state.enums import DistributedType as DistributedType
from accel_state.enums import DynamoBackend as DynamoBackend
from accel_state.enums import EnumWithContains as EnumWithContains
from accel_state.enums import FP8BackendType as FP8BackendType
from accel_state.enums import LoggerType as LoggerType
from accel_state.enums import PrecisionType as PrecisionType
from accel_state.enums import RNGType as RNGType
from accel_state.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_state.settings.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state.settings.compile import TorchDynamoPlugin as TorchDynamoPlugin
from accel_state.settings.data import DataLoaderConfiguration as DataLoaderConfiguration
from accel_state.settings.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_state.settings.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accel_state.settings.fp8 import AmaxComputeAlgorithm as AmaxComputeAlgorithm
from accel_state.settings.fp8 import AORecipeKwargs as AORecipeKwargs
from accel_state.settings.fp8 import Backend as Backend
from accel_state.settings.fp8 import FP8Format as FP8Format
from accel_state.settings.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accel_state.settings.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel_state.settings.fp8 import OptLevel as OptLevel
from accel_state.settings.fp8 import TERecipeKwargs as TERecipeKwargs
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_state.settings.fsdp_torch import get_module_class_from_name as get_module_class_from_name
from accel_state.settings.handlers import AutocastKwargs as AutocastKwargs
from accel_state.settings.handlers import GradScalerKwargs as GradScalerKwargs
from accel_state.settings.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.settings.handlers import KwargsHandler as KwargsHandler
from accel_state.settings.megatron import MegatronLMPlugin as MegatronLMPlugin
from accel_state.settings.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
)
from accel_state.settings.megatron_models import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accel_state.settings.megatron_models import parse_bert_config as parse_bert_config
from accel_state.settings.megatron_models import parse_glm4_moe_config as parse_glm4_moe_config
from accel_state.settings.megatron_models import parse_gpt2_config as parse_gpt2_config
from accel_state.settings.megatron_models import parse_llama_config as parse_llama_config
from accel_state.settings.megatron_models import parse_t5_config as parse_t5_config
from accel_state.settings.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from accel_state.settings.parallelism import PipelineParallelConfig as PipelineParallelConfig
from accel_state.settings.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from accel_state.settings.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from accel_state.settings.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accel_state.settings.profile import ProfileKwargs as ProfileKwargs
from accel_state.settings.profile import ProfilerActivity as ProfilerActivity
from accel_state.settings.project import ProjectConfiguration as ProjectConfiguration
from accelerate.compat.legacy import legacy_getattr

__getattr__ = legacy_getattr(__name__)  # what programs import from here
