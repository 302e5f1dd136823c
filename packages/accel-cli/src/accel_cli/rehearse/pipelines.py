"""Pipelines in a rehearsal: what the modules of all stages return is measured here, since no other rank can say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from accel_integrations.parallel.pipeline.model import Pipeline
from accel_integrations.parallel.pipeline.shapes import Structure
from accel_integrations.parallel.pipeline.stage import StagedModel, _without_cache
from accel_integrations.parallel.pipeline.stage_modules import reallocate

Structures = dict[str, list[Structure]]


@contextmanager
def measured_stages() -> Iterator[None]:
    """A context in which a pipeline runs its full model once for each new shape of a batch, with empty weights in place of other ranks'."""
    call = StagedModel._call
    recorded: dict[StagedModel, Structures] = {}

    def call_and_record(staged: StagedModel, name: str, compute: Any, args: Any, kwargs: Any) -> Any:
        if staged not in recorded:
            return call(staged, name, compute, args, kwargs)
        original: Any = None if compute is not None else staged.model.get_submodule(name)._original
        if original is not None:
            reallocate(original, staged.device)
        output = (compute or original)(*args, **kwargs)
        if original is not None:
            reallocate(original, "meta")
        recorded[staged].setdefault(name, []).append(Structure.of(output))
        return output

    def measure(pipeline: Pipeline, batch: Any) -> Structures:
        key = (batch.signature, torch.is_grad_enabled(), pipeline.staged.model.training)
        if key not in pipeline._measured:
            args, kwargs = batch.inputs[0]
            recorded[pipeline.staged] = {}
            try:
                with _without_cache(getattr(pipeline.staged.model, "config", None)):
                    output = pipeline.staged._forward(*args, **kwargs)
            finally:
                structures = recorded.pop(pipeline.staged)
            pipeline._measured[key] = structures | {"": [Structure.of(output)]}
        return pipeline._measured[key]

    with ExitStack() as stack:
        stack.enter_context(patch.object(StagedModel, "_call", call_and_record))
        stack.enter_context(patch.object(Pipeline, "measure", measure))
        yield


__all__ = ["measured_stages"]
