"""Saving on the main process alone, where it holds the full state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accel_state.supervision import report_progress
from accel_state.warning import warn_user
from accelerate.checkpoint.attendance import Call, attendance

if TYPE_CHECKING:
    from accelerate.checkpoint.run import Run


def begin_call(kind: str, accelerator: Run, facts: dict[str, Any], *, main_writes_all: bool = False) -> Call | None:
    """Find out whether all ranks make a call, or the main process alone.

    Args:
        kind: The method of the accelerator that is called.
        accelerator: The accelerator whose method it is.
        facts: What the main process publishes about the call for the other ranks.
        main_writes_all: Whether the main process can write everything by itself, where the engine replicates models.

    Returns:
        Who takes part; None if all ranks do, or if that cannot be determined.

    Raises:
        RuntimeError: It was called on some ranks only, and what is to be saved is sharded over all of them.
    """
    report_progress()
    state, engine = accelerator.state, accelerator.engine
    has_no_group_left = (
        state.num_processes > 1 and getattr(state, "backend", None) is not None and not dist.is_initialized()
    )
    notes = attendance()
    if has_no_group_left:
        call = Call("", False, 0.0, facts)
    elif notes is None or state.num_processes == 1:
        return None
    elif state.process_index > 0:
        call = notes.join(kind)
    elif engine.is_replicated and main_writes_all:
        call = Call(notes.open_at_once(kind, facts, alone=True), False, 0.0, facts)
    else:
        call = notes.open(kind, can_do_alone=engine.is_replicated, facts=facts)
    if not call.everyone and not engine.is_replicated:
        why = "the process group has ended" if has_no_group_left else "some processes did not call it"
        raise RuntimeError(
            f"{kind}() needs all processes, but {why}. With the {engine.name!r} engine each process holds a shard of what is "
            f"saved. Call {kind}() on all processes, without `if accelerator.is_main_process`."
        )
    return call


@contextmanager
def publishing_outcome(call: Call) -> Iterator[dict[str, Any]]:
    """A block on the main process whose outcome is published at its end, for ranks that make the call later.

    Yields:
        The outcome to publish, as a dict to be filled.
    """
    outcome: dict[str, Any] = {}
    notes = attendance()  # the block may end in another thread, when the process group is gone
    try:
        yield outcome
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if call.key and notes is not None:
            notes.finish(call, outcome)


def outcome_of(call: Call, kind: str) -> dict[str, Any]:
    """The outcome of a call that the main process makes alone; empty where the process group has ended."""
    notes = attendance()
    return {} if notes is None or not call.key else notes.outcome(call, kind)


def warn_of_saving_alone(call: Call, folder: os.PathLike[str]) -> None:
    """Warn, once per process group, what a checkpoint lacks that the main process saved alone."""
    notes = attendance()
    if notes is not None and notes.has_warned:
        return
    if notes is not None:
        notes.has_warned = True
    waited = f", for which it waited {call.waited:.0f} s" if call.waited >= 1 else ""
    warn_user(
        f"save_state() was called on the main process without the others{waited}. {os.fspath(folder)} lacks their RNG "
        "states and the positions of their data loaders. Call save_state() on all processes to save these, too."
    )
