"""What this machine's devices are and can do: the public functions on top of the table in `accel_state.devices`."""

from __future__ import annotations

import functools
import importlib

from accel_state.devices import detect_device_kind, device_kind, is_gaudi1
from accel_state.libraries import is_torch_version, is_torch_xla_available


def _is_usable(name: str, check_device: bool = False) -> bool:
    kind = device_kind(name)
    return kind.is_available() and (not check_device or kind.device_count() > 0)


def is_cuda_available() -> bool:
    """True when an NVIDIA or AMD GPU is usable; asking does not start CUDA, so the process may still fork."""
    return _is_usable("cuda")


def is_rocm_available() -> bool:
    """True when the usable GPU is an AMD one."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """True when the GPU of Apple silicon is usable and torch has `min_version` or later."""
    return is_torch_version(">=", min_version) and _is_usable("mps")


@functools.cache
def is_xpu_available(check_device: bool = False) -> bool:
    """True when an Intel GPU is usable; with `check_device`, when one can be counted as well."""
    return _is_usable("xpu", check_device)


@functools.cache
def is_npu_available(check_device: bool = False) -> bool:
    """True when an Ascend NPU is usable; with `check_device`, when one can be counted as well."""
    return _is_usable("npu", check_device)


@functools.cache
def is_mlu_available(check_device: bool = False) -> bool:
    """True when a Cambricon MLU is usable; with `check_device`, when one can be counted as well."""
    return _is_usable("mlu", check_device)


@functools.cache
def is_musa_available(check_device: bool = False) -> bool:
    """True when a Moore Threads GPU is usable; with `check_device`, when one can be counted as well."""
    return _is_usable("musa", check_device)


@functools.cache
def is_sdaa_available(check_device: bool = False) -> bool:
    """True when a Tecorigin SDAA device is usable; with `check_device`, when one can be counted as well."""
    return _is_usable("sdaa", check_device)


@functools.cache
def is_neuron_available(check_device: bool = False) -> bool:
    """True when an AWS Neuron core is usable; with `check_device`, when one can be counted as well."""
    return _is_usable("neuron", check_device)


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """True when an Intel Gaudi is usable; `init_hccl` also loads its collective library."""
    if not _is_usable("hpu"):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


@functools.cache
def is_habana_gaudi1() -> bool:
    """True when the Gaudi is one of the first generation, which lacks 16-bit floats."""
    return is_hpu_available() and is_gaudi1()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """True when this machine's device computes in bfloat16; with `ignore_tpu`, False on TPUs."""
    kind = detect_device_kind()
    if kind.name == "xla" and is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return kind.supports_bf16()


def is_fp16_available() -> bool:
    """True when this machine's device computes in float16."""
    return detect_device_kind().supports_fp16()


def get_current_device_type() -> tuple[str, str]:
    """The torch name of this machine's accelerator and the distributed type of several of them.

    Returns:
        For example `("xpu", "MULTI_XPU")`; `("cuda", "MULTI_GPU")` where no accelerator is found.
    """
    kind = detect_device_kind()
    if kind.name in ("cpu", "mps"):  # no launcher runs several of these, so scripts written for GPUs are assumed
        kind = device_kind("cuda")
    return kind.name, kind.distributed_type.value
