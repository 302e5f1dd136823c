"""What the state asks of a plugin, whichever training engine it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from accel_state.enums import DistributedType

if TYPE_CHECKING:
    import torch


class RunSoFar(Protocol):
    """What a plugin may ask of the state that it is attached to."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        ...

    @property
    def mixed_precision(self) -> str:
        """What heavy arithmetic is done in: "no", "bf16", "fp16", "fp8", or what another package brings."""
        ...


class MeshSizes(Protocol):
    """What a plugin may ask of the parallelism configuration."""

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

    def check_mesh(self, config: MeshSizes) -> None:
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

    def attach(self, state: RunSoFar) -> None:
        """Take over what the run has settled, such as mixed precision; called once, when the state is made."""
