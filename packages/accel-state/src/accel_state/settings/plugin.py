"""`Plugin`: the base of settings that choose a training engine, with what `AcceleratorState` reads of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    import torch


class RunSoFar(Protocol):
    """The attributes of the state that a plugin may read."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        ...

    @property
    def mixed_precision(self) -> str:
        """The mixed precision: "no", "bf16", "fp16", "fp8", or one of another package."""
        ...


class MeshSizes(Protocol):
    """The attributes of the parallelism config that a plugin may read."""

    cp_size: int

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are sharded by context parallelism."""
        ...


VENDOR_KINDS = frozenset({"cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu", "neuron"})
"""Device kinds of one vendor each, whose torch support follows that of CUDA."""


class Plugin:
    """Base of the settings that choose a training engine; the facts are read by `AcceleratorState`."""

    distributed_type: ClassVar[DistributedType | None] = None
    """The distributed type of a run with it; None when the plugin does not change it."""
    works_on: ClassVar[frozenset[str]] = VENDOR_KINDS
    """Names of the device kinds it can train on."""
    left_to_device: ClassVar[frozenset[str]] = frozenset()
    """Names of those device kinds whose own engine reads it, so that it does not change the distributed type."""
    main_process: ClassVar[Literal["first", "last"]] = "first"
    """Whether the process of the first or of the last rank is the main process."""
    starts_own_group: ClassVar[bool] = False
    """Whether its library starts the process group itself."""

    @property
    def engine(self) -> str | None:
        """The name of the training engine in the table of engines; None for that of the distributed type."""
        return None

    def check(self) -> None:
        """Raise an error for settings that cannot work on any machine; called before the process group starts.

        Raises:
            MissingLibraryError: When its library is not installed.
        """

    def check_mesh(self, config: MeshSizes) -> None:
        """Raise an error for mesh dimensions that it cannot be combined with.

        Raises:
            ValueError: Naming them.
        """

    def mixed_precision_in_use(self) -> str | None:
        """The mixed precision of its own configuration; None where that of the run is used."""
        return None

    @property
    def selected(self) -> bool:
        """Whether it is in use, among the plugins of one argument."""
        return True

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make it the one in use, among the plugins of one argument."""

    def attach(self, state: RunSoFar) -> None:
        """Take settings of the run, such as mixed precision; called once, when the state is initialized."""
