"""A function that runs in started processes, as for `notebook_launcher`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from accel_state.enums import DistributedType
from accel_state.public_names import known_as


@known_as("accelerate.utils.launch.PrepareForLaunch")
class PrepareForLaunch:
    """A picklable function that sets the rank of its process before it calls another function.

    Args:
        launcher: The function to call.
        distributed_type: The kind of the distributed run.
        debug: Whether to join a gloo process group through the file named by `ACCELERATE_DEBUG_RDV_FILE`.
    """

    launcher: Callable[..., Any]
    distributed_type: DistributedType
    debug: bool

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function as process `index` of this machine, with `args`."""
        if self.debug or self.distributed_type not in (DistributedType.NO, DistributedType.XLA):
            rank = int(os.environ.get("NPROC", "1")) * int(os.environ.get("NODE_RANK", "0")) + index
            os.environ.update(LOCAL_RANK=str(index), RANK=str(rank))
        os.environ["FORK_LAUNCHED"] = "1"
        if not self.debug:
            self.launcher(*args)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork may have inherited a handler of an earlier launch
        self._join(index)
        self.launcher(*args)
        self._leave()

    def _join(self, index: int) -> None:
        import torch.distributed as dist

        world_size = int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], world_size)
        dist.init_process_group("gloo", rank=index, store=store, world_size=world_size)

    def _leave(self) -> None:
        """Destroy the process group on all ranks together, since the connections of others break when one leaves."""
        import torch.distributed as dist

        from accel_state.shutdown import close_process_group

        if dist.is_initialized():
            with suppress(RuntimeError):  # another process failed, and its error is shown instead
                close_process_group()
