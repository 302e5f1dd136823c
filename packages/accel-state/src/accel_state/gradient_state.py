"""`GradientState`: where a program stands in its accumulation window and in its data loaders."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from accel_state.public_names import known_as
from accel_state.shared import SharedDict, fact

if TYPE_CHECKING:
    from accel_state.settings.accumulation import GradientAccumulationPlugin


@known_as("accelerate.state.GradientState")
class GradientState:
    """Whether this step is a sync step (all-reduces and applies gradients), and whether it is the last one of a data loader.

    All instances share one state. What the training loop reads at every step are plain attributes; data loaders are
    held by weak references, so the state keeps none of them alive.

    Args:
        gradient_accumulation_plugin: How gradients are accumulated. May be passed again later; the last one is used.
    """

    _shared_state: ClassVar[Any] = SharedDict()

    sync_gradients: bool = fact("True in steps that end an accumulation window.")
    plugin_kwargs: dict[str, Any] = fact("The settings of the plugin that differ from its defaults.")
    is_accumulating: bool = False
    """Whether the program is within a block of `accumulate` that does not end its window."""
    _is_xla_gradients_synced: bool
    _dataloader_references_ref: list[weakref.ref[Any] | None]
    _left_dataloader_ref: weakref.ref[Any] | None = None

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self._dataloader_references_ref = [None]  # None stands for "outside of every loader"
            self.plugin_kwargs = {}
            self._is_xla_gradients_synced = False
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def initialized(self) -> bool:
        """True once an instance has been created (and not been reset since)."""
        return "plugin_kwargs" in self._shared_state

    # ---- settings -----------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """The number of micro-batches over which gradients are accumulated."""
        return self.plugin_kwargs.get("num_steps") or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler steps in every micro-batch, to be as far as without accumulation."""
        return self.plugin_kwargs.get("adjust_scheduler", True)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a data loader ends the window."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    # ---- data loaders -------------------------------------------------------------------------------------------

    @property
    def active_dataloader(self) -> Any:
        """The prepared data loader that is being iterated, the innermost one; None outside of all."""
        for reference in reversed(self._dataloader_references_ref):
            if reference is None:
                break
            loader = reference()
            if loader is not None:  # one whose iteration was left early may be gone by now
                return loader
        return None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared data loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether this is the last batch of the active data loader."""
        loader = self.active_dataloader
        return False if loader is None else loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """How many samples of the last batch are real when batches are padded; -1 outside of a data loader."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    @property
    def left_dataloader(self) -> Any:
        """The loader whose iteration was left while its last batch was out, as `next(iter(loader))` does.

        None when there is none, or an iteration has begun since.
        """
        return None if self._left_dataloader_ref is None else self._left_dataloader_ref()

    @property
    def dataloader_references(self) -> list[Any]:
        """The data loaders being iterated, outermost first, behind a leading None."""
        return [None if reference is None else reference() for reference in self._dataloader_references_ref]

    @dataloader_references.setter
    def dataloader_references(self, references: list[Any]) -> None:
        self._dataloader_references_ref = [None if loader is None else weakref.ref(loader) for loader in references]

    def _add_dataloader(self, dataloader: Any) -> None:
        """Called by a prepared loader when its iteration begins."""
        alive = [
            reference for reference in self._dataloader_references_ref if reference is None or reference() is not None
        ]
        self._dataloader_references_ref = [*alive, weakref.ref(dataloader)]
        self._left_dataloader_ref = None

    def _leave_dataloader(self, dataloader: Any) -> None:
        """Called by a prepared loader whose iteration stops before its end, after `_remove_dataloader`."""
        self._left_dataloader_ref = weakref.ref(dataloader) if dataloader.end_of_dataloader else None

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Called by a prepared loader when its iteration ends, which may be after the state was reset."""
        if not self.initialized:
            return
        for position in range(len(self._dataloader_references_ref) - 1, 0, -1):
            reference = self._dataloader_references_ref[position]
            if reference is not None and reference() is dataloader:
                del self._dataloader_references_ref[position]
                return

    # ---- stepping -----------------------------------------------------------------------------------------------

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Called once per micro-batch, by `accumulate` and by other libraries' training loops."""
        self.sync_gradients = sync_gradients

    @property
    def is_xla_gradients_synced(self) -> bool:
        """On XLA: whether the gradients of this step have been all-reduced; always True under FSDP."""
        return self._is_xla_gradients_synced or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._is_xla_gradients_synced = value

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the shared state, so that the next instance is initialized again."""
        cls._shared_state.clear()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the data loaders, which are not pickled."""
        return {**self.__dict__, "_dataloader_references_ref": [None], "_left_dataloader_ref": None}

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
