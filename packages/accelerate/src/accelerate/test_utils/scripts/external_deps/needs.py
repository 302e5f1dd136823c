"""What checks of DeepSpeed need."""

from __future__ import annotations

from accelerate.test_utils.scripts.checks.check import Process, SkippedError
from accelerate.utils import is_deepspeed_available


def need_deepspeed(process: Process) -> None:
    """Skip where DeepSpeed cannot train.

    Raises:
        SkippedError: With what is missing.
    """
    if not is_deepspeed_available():
        raise SkippedError("needs DeepSpeed: pip install deepspeed")
    from accel_integrations.engines.registry import engine_class

    try:
        engine_class("DEEPSPEED")
    except (ImportError, NotImplementedError) as error:
        raise SkippedError(f"needs the engine for DeepSpeed: {error}") from error
    if process.kind.value not in ("DEEPSPEED", "NO", "MULTI_CPU", "MULTI_GPU"):
        raise SkippedError(f"trains with DeepSpeed, not with {process.kind.value}")
