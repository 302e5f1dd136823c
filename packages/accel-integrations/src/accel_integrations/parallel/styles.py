"""The styles of a tensor parallel plan: names for the ways to shard a layer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn


class Style(NamedTuple):
    """One way to shard a layer.

    Args:
        meaning: A description.
        make: Builds torch's object from the modules `torch.distributed.tensor.parallel` and `torch.distributed.tensor`.
        sizes: The sizes of a layer that are sharded, the first that it has counts; empty when none is.
    """

    meaning: str
    make: Callable[[Any, Any], Any]
    sizes: tuple[str, ...] = ()


OUTPUTS, INPUTS = ("out_features", "embedding_dim"), ("in_features", "num_embeddings")

STYLES: dict[str, Style] = {
    "colwise": Style("output features are sharded", lambda p, t: p.ColwiseParallel(), OUTPUTS),
    "colwise_rep": Style(
        "output features are sharded, then all-gathered",
        lambda p, t: p.ColwiseParallel(output_layouts=t.Replicate()),
        OUTPUTS,
    ),
    "rowwise": Style("input features come sharded; outputs are all-reduced", lambda p, t: p.RowwiseParallel(), INPUTS),
    "rowwise_rep": Style(
        "input features come replicated and are sharded; outputs are all-reduced",
        lambda p, t: p.RowwiseParallel(input_layouts=t.Replicate()),
        INPUTS,
    ),
    "embedding_rowwise": Style(
        "the vocabulary is sharded", lambda p, t: p.RowwiseParallel(input_layouts=t.Replicate()), INPUTS
    ),
    "embedding_colwise": Style(
        "the vectors are sharded, then all-gathered",
        lambda p, t: p.ColwiseParallel(output_layouts=t.Replicate()),
        OUTPUTS,
    ),
    "sequence_parallel": Style(
        "a norm on this rank's shard of the sequence", lambda p, t: p.SequenceParallel(use_local_output=True)
    ),
    "colwise_from_sequence": Style(
        "as colwise, of inputs that are sharded along the sequence",
        lambda p, t: p.ColwiseParallel(input_layouts=t.Shard(1)),
        OUTPUTS,
    ),
    "colwise_rep_from_sequence": Style(
        "as colwise_rep, of inputs that are sharded along the sequence",
        lambda p, t: p.ColwiseParallel(input_layouts=t.Shard(1), output_layouts=t.Replicate()),
        OUTPUTS,
    ),
    "rowwise_to_sequence": Style(
        "as rowwise, with outputs sharded along the sequence",
        lambda p, t: p.RowwiseParallel(output_layouts=t.Shard(1)),
        INPUTS,
    ),
    "embedding_to_sequence": Style(
        "as embedding_rowwise, with outputs sharded along the sequence",
        lambda p, t: p.RowwiseParallel(input_layouts=t.Replicate(), output_layouts=t.Shard(1)),
        INPUTS,
    ),
    "gather_sequence": Style(
        "the first input comes sharded along the sequence and is all-gathered",
        lambda p, t: p.PrepareModuleInput(
            input_layouts=(t.Shard(1),), desired_input_layouts=(t.Replicate(),), use_local_output=True
        ),
    ),
}
SAME_AS = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
"""Aliases that transformers uses."""


def expand_plan(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan with the names of modules in place of patterns.

    Args:
        model: The model.
        plan: Style by name of a module, or by pattern: a `*` matches one component of a dotted name.

    Raises:
        ValueError: For a pattern that fits no module, with similar names.
    """
    names = [name for name, _ in model.named_modules() if name]
    styles = {}
    for pattern, style in plan.items():
        regular = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
        fitting = [name for name in names if regular.fullmatch(name)]
        if not fitting:
            general = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names})
            near = difflib.get_close_matches(pattern, general, n=5, cutoff=0.4) or general[:5]
            raise ValueError(
                f"The tensor parallel plan names {pattern!r}, but {type(model).__name__} has no such module. Similar "
                f"ones are {', '.join(map(repr, near))}."
            )
        styles.update(dict.fromkeys(fitting, style))
    return styles


def check_plan(model: nn.Module, plan: Mapping[str, Any], size: int) -> None:
    """Check that all styles exist, and that layers can be sharded evenly.

    Args:
        model: The model.
        plan: Style by name of a module.
        size: Over how many ranks layers are sharded.

    Raises:
        ValueError: The message names all that do not fit.
    """
    unknown = sorted({style for style in plan.values() if isinstance(style, str) and _row(style) is None})
    if unknown:
        raise ValueError(
            f"The tensor parallel plan has the styles {', '.join(map(repr, unknown))}, which are not known. Use "
            f"{', '.join(STYLES)}, or an object of torch.distributed.tensor.parallel."
        )
    uneven = []
    for name, style in plan.items():
        row, module = _row(style) if isinstance(style, str) else None, model.get_submodule(name)
        sharded = (
            next((attribute for attribute in row.sizes if hasattr(module, attribute)), None)
            if row is not None
            else None
        )
        if sharded is not None and getattr(module, sharded) % size:
            uneven.append(f"{name} ({sharded}={getattr(module, sharded)})")
    if uneven:
        raise ValueError(
            f"tp_size={size} does not divide {', '.join(uneven[:5])}{' and others' if len(uneven) > 5 else ''}. Choose "
            "a tp_size that divides these sizes, or leave the layers out of the plan."
        )


def make_style(style: Any) -> Any:
    """Torch's object for a style; objects come back as they are.

    Args:
        style: A name of `STYLES`, or a `torch.distributed.tensor.parallel.ParallelStyle`.
    """
    import torch.distributed.tensor as tensor
    import torch.distributed.tensor.parallel as parallel

    if not isinstance(style, str):
        return style
    row = _row(style)
    assert row is not None
    return row.make(parallel, tensor)


def _row(style: str) -> Style | None:
    return STYLES.get(SAME_AS.get(style, style))
