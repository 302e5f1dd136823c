"""Ring attention on the CPU: torch has the algorithm, but registers it only for kernels of other devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from accel_integrations.parallel.torch_ring import ring_attention, ring_operators

SEQUENCE_DIM = 2  # of queries, keys and values: (batch, heads, sequence, features)
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register() -> None:
    """Let context parallel attention run on the CPU."""
    operators = ring_operators()
    operators.setdefault(FORWARD, _forward)
    operators.setdefault(BACKWARD, _backward)
    ring = ring_attention()
    if not hasattr(ring._create_rotater, "__wrapped__"):
        ring._create_rotater = _one_at_a_time(ring._create_rotater)


def _one_at_a_time(create: Callable[..., Any]) -> Callable[..., Any]:
    """Have exchanges of CPU tensors end before the next one begins.

    Two that are under way in one group of gloo end the process now and then if the group has two threads, as those of a device mesh
    that the program has made itself: see `accel_state.gloo_groups`.
    """

    @wraps(create)
    def create_rotater(*arguments: Any, **options: Any) -> Any:
        rotater = create(*arguments, **options)
        begin = rotater.exchange_buffers

        def exchange_buffers(buffer: torch.Tensor) -> None:
            begin(buffer)
            if buffer.device.type == "cpu":
                rotater.next_buffer()  # waits for it

        rotater.exchange_buffers = exchange_buffers
        return rotater

    return create_rotater


def _forward(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[DTensor, ...]:
    query, key, value, *rest = arguments
    dropout = rest[0] if rest else 0.0
    is_causal = rest[1] if len(rest) > 1 else False
    output, logarithms, *_ = ring_attention()._templated_ring_attention(
        query.device_mesh.get_group(),
        SEQUENCE_DIM,
        kernel,
        *map(_local, (query, key, value)),
        is_causal=is_causal,
        dropout_p=dropout,
        scale=options.get("scale"),
    )
    return _sharded(output, query), _sharded(logarithms, query)


def _backward(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[DTensor, ...]:
    gradient, query, key, value, output, logarithms, dropout, is_causal = arguments

    def one_step(
        *, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, **kwargs: Any
    ) -> Any:
        return kernel(grad_out, query, key, value, out, logsumexp, dropout, is_causal, **kwargs)

    gradients = ring_attention()._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        SEQUENCE_DIM,
        one_step,
        _local(gradient),
        "grad_out",
        *map(_local, (query, key, value, output, logarithms)),
        is_causal=is_causal,
        scale=options.get("scale"),
    )
    return tuple(_sharded(one, query) for one in gradients[:3])


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor that is sharded along the sequence."""
    return DTensor.from_local(local, like.device_mesh, [Shard(SEQUENCE_DIM)], run_check=False)
