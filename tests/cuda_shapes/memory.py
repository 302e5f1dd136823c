"""The memory of tensors on pretended GPUs, which is host memory."""

from __future__ import annotations

import ctypes

import torch


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a CPU tensor; one that is on the CPU already comes back as it is."""
    if not tensor.is_cuda:
        return tensor.detach()
    storage = tensor.untyped_storage()
    actual = torch.empty(0, dtype=tensor.dtype, device="cpu")
    if storage.nbytes() == 0:
        return actual.new_empty(tensor.shape)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    alias = torch.frombuffer(memory, dtype=torch.uint8)
    actual.set_(alias.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return actual.conj() if tensor.is_conj() else actual


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What a kernel would have written on a device."""
    result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        memory_of(result).copy_(tensor)
    return result
