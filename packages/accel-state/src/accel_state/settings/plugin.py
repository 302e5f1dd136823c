"""What the state knows of a plugin, whichever way of training it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState

VENDOR_KINDS = frozenset({"cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron"})
"""Device kinds of one vendor each, whose torch support follows that of CUDA."""


class Plugin:
    """Base of the settings that choose a way of training; the facts are read by `AcceleratorState`."""

    distributed_type: ClassVar[DistributedType | None] = None
    """The type of a run trained this way; None when the plugin changes nothing about it."""
    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS
    """Names of the device kinds it can train on."""
    main_process: ClassVar[Literal["first", "last"]] = "first"
    """Which process speaks for the run."""

    def check(self) -> None:
        """Refuse what cannot work on any machine; called before processes are joined.

        Raises:
            MissingLibraryError: When the library that trains this way is not installed.
        """

    def attach(self, state: AcceleratorState) -> None:
        """Take over what the run has settled, such as the number format; called once, when the state is made."""
