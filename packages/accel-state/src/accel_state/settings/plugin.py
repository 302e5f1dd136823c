"""What the state asks of a plugin, whichever training engine it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    from accel_state.accelerator_state import AcceleratorState
    from accel_state.mesh import ParallelismConfig

VENDOR_KINDS = frozenset({"cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron"})
"""Device kinds of one vendor each, whose torch support follows that of CUDA."""


class Plugin:
    """Base of the settings that choose a training engine; the facts are read by `AcceleratorState`."""

    distributed_type: ClassVar[DistributedType | None] = None
    """The distributed type of a run with it; None when the plugin changes nothing about it."""
    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS
    """Names of the device kinds it can train on."""
    main_process: ClassVar[Literal["first", "last"]] = "first"
    """Whether the process of the first or of the last rank is the main process."""
    starts_own_group: ClassVar[bool] = False
    """Whether the library behind it joins the processes itself, so that no process group need be there yet."""

    @property
    def engine(self) -> str | None:
        """The name of the training engine in the table of engines; None for that of the distributed type."""
        return None

    def check(self) -> None:
        """Refuse what cannot work on any machine; called before processes are joined.

        Raises:
            MissingLibraryError: When the library behind it is not installed.
        """

    def check_mesh(self, config: ParallelismConfig) -> None:
        """Refuse mesh dimensions that it cannot be combined with.

        Raises:
            ValueError: Naming them.
        """

    def mixed_precision_in_use(self) -> str | None:
        """The mixed precision that its own configuration asks for; None where the run's counts."""
        return None

    @property
    def selected(self) -> bool:
        """Whether it is in use, of those that one argument gave."""
        return True

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Become the one in use, of those that one argument gave."""

    def attach(self, state: AcceleratorState) -> None:
        """Take over what the run has settled, such as mixed precision; called once, when the state is made."""
