"""The interface of a parallel transform of a model along one mesh dimension, and the list of those that a run needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig


class Transform(ABC):
    """Changes a model in place, so that the ranks along one dimension of the device mesh compute it together.

    Args:
        config: The sizes of the mesh dimensions and their settings.
    """

    axis: ClassVar[str]

    def __init__(self, config: ParallelismConfig) -> None:
        self.config = config

    @classmethod
    def is_wanted(cls, config: ParallelismConfig) -> bool:
        """Whether a run with this configuration needs the transform."""
        size: int = getattr(config, f"{cls.axis}_size")
        return size > 1

    @abstractmethod
    def check(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Check that a model can be parallelized, before anything is changed.

        Raises:
            ValueError: It cannot; the message says why, and what would be accepted.
        """

    @abstractmethod
    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Change the model, and return the one to use.

        Args:
            model: The model, unsharded and the same on all ranks of the dimension.
            mesh: The full device mesh, of which `axis` is one dimension.
        """

    def sharded(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """A context in which every rank of the dimension has its shard of sequences; see `Accelerator.maybe_context_parallel`.

        Args:
            buffers: Tensors that are sharded in place, and restored afterwards.
            dims: The index of the sequence dimension of each.
            no_restore: The buffers that need not be restored.

        Raises:
            ValueError: For buffers that cannot be sharded.
        """
        return nullcontext()


TRANSFORMS = (
    "accel_integrations.parallel.expert:ExpertParallel",
    "accel_integrations.parallel.tensor:TensorParallel",
    "accel_integrations.parallel.context:ContextParallel",
    "accel_integrations.parallel.sequence:SequenceParallel",
)
"""In the order in which they are applied: layers are sharded before their attention is split along sequences, and
experts are distributed before the plan for the other layers is applied."""


def make_transforms(config: ParallelismConfig | None) -> tuple[Transform, ...]:
    """The transforms of a run, in their order; none where there is only data parallelism.

    Args:
        config: The sizes of the mesh dimensions.
    """
    if config is None or config.non_data_parallel_size == 1:
        return ()
    return tuple(kind(config) for kind in map(resolve_name, TRANSFORMS) if kind.is_wanted(config))
