"""What a program sees, one JSON line for each case, in a file of its rank."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(os.environ.get("RECORD_FOLDER", "."))
LINES = FOLDER / f"rank_{RANK}.jsonl"

warnings.simplefilter("ignore")


def record(case: str, see: Callable[[], Any]) -> None:
    """Write what `see` returns, or the classes of the exception that it raises."""
    try:
        seen = plain(see())
    except Exception as error:  # which one it is, is what the case says
        seen = {"raises": [kind.__name__ for kind in type(error).__mro__[:-2]]}
        if os.environ.get("RECORD_MESSAGES"):
            seen["message"] = f"{error}"[:300]
    with LINES.open("a") as file:
        file.write(json.dumps({"case": case, "seen": seen}) + "\n")


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
