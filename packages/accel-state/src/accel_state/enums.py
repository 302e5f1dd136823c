"""The enums of choices, with the values that config files and environment variables hold."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any

from accel_state.public_names import known_as


@known_as("accelerate.utils.dataclasses.EnumWithContains")
class EnumWithContains(EnumMeta):
    """Metaclass with which `value in SomeEnum` works for plain values as well as for members."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


@known_as("accelerate.utils.dataclasses.BaseEnum")
class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enum that prints as its value and can list its values."""

    def __str__(self) -> Any:
        return self.value

    @classmethod
    def list(cls) -> list[Any]:
        """The values of all members, in the order of their definition."""
        return [member.value for member in cls]


@known_as("accelerate.utils.dataclasses.DistributedType")
class DistributedType(str, Enum):  # noqa: UP042 - str() gives the name with its class, as programs expect
    """How a run is spread over processes: the training engine where one was chosen, else the kind of device."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    TPU = "XLA"  # the old name of the same member

    @classmethod
    def _missing_(cls, value: object) -> DistributedType | None:
        return cls.XLA if value == "TPU" else None


@known_as("accelerate.utils.dataclasses.SageMakerDistributedType")
class SageMakerDistributedType(str, Enum):  # noqa: UP042 - str() gives the name with its class, as programs expect
    """How a SageMaker job is spread over its instances."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


@known_as("accelerate.utils.dataclasses.ComputeEnvironment")
class ComputeEnvironment(str, Enum):  # noqa: UP042 - str() gives the name with its class, as programs expect
    """Where `accelerate launch` starts the processes."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


@known_as("accelerate.utils.dataclasses.FP8BackendType")
class FP8BackendType(str, Enum):  # noqa: UP042 - str() gives the name with its class, as programs expect
    """The library that computes in 8-bit floats: Transformer Engine, MS-AMP or torchao."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


@known_as("accelerate.utils.dataclasses.DynamoBackend")
class DynamoBackend(str, BaseEnum):
    """The backend of `torch.compile`; `NO` means not to compile."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@known_as("accelerate.utils.dataclasses.PrecisionType")
class PrecisionType(str, BaseEnum):
    """The values of `mixed_precision`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


@known_as("accelerate.utils.dataclasses.RNGType")
class RNGType(BaseEnum):
    """A random number generator whose state can be synchronised and saved."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


@known_as("accelerate.utils.dataclasses.LoggerType")
class LoggerType(BaseEnum):
    """An experiment tracker; `ALL` means every one that is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    COMET_ML = "comet_ml"  # another spelling of the same member
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


@known_as("accelerate.utils.dataclasses.DDPCommunicationHookType")
class DDPCommunicationHookType(BaseEnum):
    """How DistributedDataParallel compresses gradients for the all-reduce."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@known_as("accelerate.utils.dataclasses.CustomDtype")
class CustomDtype(Enum):
    """Dtypes for which memory is computed although torch has no plain dtype for them."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
