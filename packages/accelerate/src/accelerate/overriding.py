"""Which members of `Accelerator` a subclass has overridden, or a library replaced, so that the other methods use them.

As in accelerate 1.15, `accumulate` calls `no_sync`, `gather_for_metrics` calls `gather`, `save_model` calls
`get_state_dict`, `prepare` calls `_prepare_deepspeed` under DeepSpeed, and loaders are shared out by `num_processes` and
`process_index`. Where nothing is overridden, shorter ways are taken.
"""

from __future__ import annotations

from typing import Any, TypeVar

NAMES = ("_prepare_deepspeed", "gather", "get_state_dict", "no_sync", "num_processes", "process_index")
Class = TypeVar("Class", bound=type)

OWN: dict[str, Any] = {}
"""What this library has under each of `NAMES`."""


def remember_own(owner: Class) -> Class:
    """Class decorator: what is under `NAMES` now is not overridden."""
    OWN.update({name: getattr(owner, name) for name in NAMES})
    return owner


def is_overridden(accelerator: Any, name: str) -> bool:
    """Whether the accelerator's class has anything else than this library's under a name.

    Args:
        accelerator: An `Accelerator`.
        name: One of `NAMES`.
    """
    return getattr(type(accelerator), name) is not OWN[name]
