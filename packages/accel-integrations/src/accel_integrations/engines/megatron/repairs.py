"""What releases of megatron-core leave undefined, set once."""

from __future__ import annotations

from accel_integrations.engines.megatron.library import load


def define_router_gemm() -> None:
    """Say that there is no matrix product of Transformer Engine, where it is not installed.

    Routers of experts ask for it by a name that megatron-core 0.16.1 binds only where the import succeeds.
    """
    module = load("transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
