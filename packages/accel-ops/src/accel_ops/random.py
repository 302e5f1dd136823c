"""Seeds and random states: set, broadcast to other processes, captured and restored."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_ops.collectives.tensors import broadcast
from accel_state.accelerator_state import AcceleratorState
from accel_state.devices import DeviceKind, device_kinds
from accel_state.enums import RNGType
from accel_state.libraries import is_numpy_available
from accel_state.processes import PartialState

_COMMON_SEEDS: dict[int, int] = {}
"""The seed of its own that `set_seed` gave torch last on this process, and the one it was asked for."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's random generators, on all devices.

    Args:
        seed (`int`): The seed.
        device_specific (`bool`): Add the rank, so that processes draw different numbers; the ranks of a tensor parallel
            group count as one, because their dropout must be the same.
        deterministic (`bool`): Make torch use deterministic algorithms, or fail where there is none.

    Raises:
        TypeError: The seed is no integer.
        ValueError: torch takes no such seed.
    """
    try:
        seed = operator.index(seed)  # NumPy's integers, too
    except TypeError:
        raise TypeError(f"set_seed({seed!r}): a {type(seed).__name__} is no seed. Give an integer.") from None
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"set_seed({seed}): torch takes seeds from -2**63 to 2**64 - 1 only.")
    common = seed
    if device_specific:
        seed += PartialState().process_index // _tensor_parallel_size()
    random.seed(seed)
    if is_numpy_available():
        import numpy as np

        np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # all devices that torch knows
    for kind in _generators():
        kind.seed(seed)
    _COMMON_SEEDS.clear()
    if seed != common:
        _COMMON_SEEDS[torch.initial_seed()] = common
    if deterministic:
        torch.use_deterministic_algorithms(True)


def common_seed() -> int:
    """The seed of torch's generator, without the rank that `set_seed(device_specific=True)` added on this process.

    For choices that must be the same on all processes. Seeds that a program gave torch itself come back as they are.
    """
    seed = torch.initial_seed()
    return _COMMON_SEEDS.get(seed, seed)


def _tensor_parallel_size() -> int:
    """The number of consecutive ranks that must draw the same numbers."""
    config = AcceleratorState._shared_state.get("parallelism_config")
    return 1 if config is None else config.tp_size


def _generators() -> list[DeviceKind]:
    """The available kinds of devices with a generator of their own."""
    return [kind for kind in device_kinds() if kind.name != "cpu" and kind.is_available() and kind.rng_module()]


def synchronize_rng_state(rng_type: RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Broadcast the state of a random generator from rank 0 to all processes.

    Args:
        rng_type (`RNGType`, *optional*): "torch", the name of a device, or "generator".
        generator (`torch.Generator`, *optional*): The one meant by "generator".

    Raises:
        ValueError: For "generator" without one.
    """
    name = getattr(rng_type, "value", rng_type)
    if name == RNGType.GENERATOR.value and generator is None:
        raise ValueError("rng_type='generator' needs the generator to synchronise: pass generator=...")
    state = PartialState()
    if state.num_processes == 1:
        return
    owner = _owner(name, generator)
    shared = owner.get_state() if isinstance(owner, torch.Generator) else owner.get_rng_state()
    is_number = not isinstance(shared, torch.Tensor)  # XLA's state is its seed
    shared = torch.tensor(shared) if is_number else shared
    device = shared.device
    shared = broadcast(shared.to(state.device)).to(device)
    shared = shared.item() if is_number else shared
    if isinstance(owner, torch.Generator):
        owner.set_state(shared)
    else:
        owner.set_rng_state(shared)


def _owner(name: Any, generator: torch.Generator | None) -> Any:
    """The object with the state: a generator, or a module with `get_rng_state` and `set_rng_state`."""
    if name == RNGType.GENERATOR.value:
        return generator
    if name == RNGType.TORCH.value:
        return torch
    for kind in device_kinds():
        if kind.name == name and kind.is_available() and kind.rng_module() is not None:
            return kind.rng_module()
    raise ValueError(f"rng_type={name!r} names a device that this machine does not have: leave it out of rng_types.")


def synchronize_rng_states(
    rng_types: Sequence[str | RNGType] | None = None, generator: torch.Generator | None = None
) -> None:
    """Broadcast the states of several random generators from rank 0 to all processes.

    Args:
        rng_types (list of `str` or `RNGType`, *optional*): Which; when None, torch's, those of this machine's
            accelerators, and `generator` if one is given.
        generator (`torch.Generator`, *optional*): The one meant by "generator".

    Raises:
        ValueError: For an unknown name.
    """
    if rng_types is None:
        chosen: list[Any] = [RNGType.TORCH, *(kind.name for kind in _generators())]
        chosen += [RNGType.GENERATOR] * (generator is not None)
    else:
        chosen = [RNGType(rng_type) for rng_type in rng_types]
    for rng_type in chosen:
        synchronize_rng_state(rng_type, generator=generator)


def capture_rng_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as plain containers, arrays and tensors.

    Returns:
        A dictionary for `restore_rng_state`; the keys are those of a checkpoint's random states.
    """
    states = capture_cpu_rng_state()
    for kind in _generators():
        module = kind.rng_module()
        capture = getattr(module, "get_rng_state_all", module.get_rng_state)
        states[_key(kind)] = capture()
    return states


def capture_cpu_rng_state() -> dict[str, Any]:
    """The states of the generators on the CPU; a subset of what `capture_rng_state` returns."""
    states: dict[str, Any] = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    if is_numpy_available():
        import numpy as np

        states["numpy_random_seed"] = np.random.get_state()
    return states


def same_rng_states(first: Any, second: Any) -> bool:
    """Whether two states of one generator are equal: tensors, arrays, and tuples of them and of numbers."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple) and not all(isinstance(part, (int, float, tuple, str, type(None))) for part in first):
        return len(first) == len(second) and all(map(same_rng_states, first, second))
    equal = first == second
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def restore_rng_state(states: Mapping[str, Any]) -> None:
    """Restore the states of random generators that `capture_rng_state` returned.

    States of devices that this machine does not have are ignored.
    """
    if "random_state" in states:
        version, numbers, gauss = states["random_state"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy_random_seed" in states and is_numpy_available():
        import numpy as np

        np.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"].cpu())
    for kind in _generators():
        module, state = kind.rng_module(), states.get(_key(kind))
        if state is not None:
            restore = getattr(module, "set_rng_state_all", module.set_rng_state)
            restore(state)


def _key(kind: DeviceKind) -> str:
    return "xm_seed" if kind.name == "xla" else f"torch_{kind.name}_manual_seed"
