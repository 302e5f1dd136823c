"""What a program sees, one JSON line for each case, in a file of its rank.

Besides what is returned or raised, a case records what changed on the way: arguments of the library's functions that
the program calls, and environment variables.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(os.environ.get("RECORD_FOLDER", "."))
OF_OTHERS = ("TORCHINDUCTOR_", "TRITON_", "KMP_", "PYTORCH_NVML_")  # variables set when torch is first asked something
TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+")
LINES = FOLDER / f"rank_{RANK}.jsonl"

warnings.simplefilter("ignore")


changes: list[Any] = []  # of the case that runs: function, and the arguments that it left otherwise than they were


def record(case: str, see: Callable[[], Any]) -> None:
    """Write what `see` returns, or the classes of the exception that it raises, and what it changed."""
    _watch_functions()
    changes.clear()
    before = dict(os.environ)
    try:
        seen = plain(see())
    except Exception as error:  # which one it is, is what the case says
        seen = {"raises": [kind.__name__ for kind in type(error).__mro__[:-2]]}
        if os.environ.get("RECORD_MESSAGES"):
            seen["message"] = f"{error}"[:300]
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    variables = {name: os.environ.get(name) for name in changed if not name.startswith(OF_OTHERS)}
    if changes or variables:
        seen = {"result": seen, "arguments": list(changes), "environment": dict(sorted(variables.items()))}
    with LINES.open("a") as file:
        file.write(json.dumps({"case": case, "seen": seen}) + "\n")


@functools.cache
def _watch_functions() -> None:
    """Put functions in the place of the library's, in the program that runs, that note changed arguments."""
    program = vars(sys.modules["__main__"])
    for name, value in list(program.items()):
        if isinstance(value, types.FunctionType) and value.__module__.startswith(("accelerate", "accel_")):
            program[name] = _watched(value)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before = _snapshot([args, kwargs])
        try:
            return function(*args, **kwargs)
        finally:
            after = _snapshot([args, kwargs])
            if not _same(before, after):
                changes.append([function.__name__, after])

    return watched


def _snapshot(value: Any) -> Any:
    """A value as JSON, mappings sorted: in which order 1.15 puts keys into one is at times a matter of hashes.

    Entries of a defaultdict that say nothing are left out, because reading makes them.
    """
    if isinstance(value, collections.defaultdict):
        value = {key: item for key, item in value.items() if not isinstance(item, int | float | list) or item}
    if isinstance(value, Mapping):
        return {type(value).__name__: sorted(([plain(key), _snapshot(item)] for key, item in value.items()), key=str)}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return {type(value).__name__: [_snapshot(item) for item in value]}
    return TEMPORARY.sub("<folder>", value) if isinstance(value, str) else plain(value)


def _same(before: Any, after: Any) -> bool:
    return json.dumps(before) == json.dumps(after)  # unlike ==, it takes NaN for itself and 1 for another than 1.0


def done() -> None:
    """All cases are recorded: what happens to the process from here on is nobody's concern but ours."""
    (FOLDER / f"done_{RANK}").touch()


def plain(value: Any) -> Any:
    """A value as JSON that keeps the types users can tell apart."""
    import numpy as np
    import torch

    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        return {
            "tensor": str(value.dtype),
            "shape": list(value.shape),
            "device": value.device.type,
            "is": _numbers(value),
        }
    if isinstance(value, np.ndarray | np.generic):
        return {"array": str(value.dtype), "is": value.tolist()}
    if isinstance(value, enum.Enum):
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, torch.dtype | torch.device | torch.Size | Path | type):
        return {type(value).__name__: str(value)}
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {type(value).__name__: {name: plain(item) for name, item in zip(value._fields, value, strict=True)}}
    if isinstance(value, Mapping):
        return {type(value).__name__: [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple | set | frozenset):
        return {type(value).__name__: [plain(item) for item in value]}
    return {"object": type(value).__name__}


def _numbers(tensor: Any) -> Any:
    import torch

    if tensor.is_meta:
        return None
    dense = tensor.detach().to_dense()
    if tensor.is_complex():
        dense = torch.view_as_real(dense)
    return dense.float().tolist() if dense.is_floating_point() else dense.tolist()
