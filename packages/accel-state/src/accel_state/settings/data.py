"""Settings of prepared data loaders."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from accel_state.guessing import guess_arguments
from accel_state.public_names import known_as
from accel_state.settings.option import BOOLEAN, Kind, as_integer, is_integer, option, resolve_options

SEED = Kind(
    "an integer from -2**63 to 2**64 - 1 (seeds of torch)",
    int,
    lambda value: is_integer(value) and -(2**63) <= operator.index(value) < 2**64,
    convert=as_integer,
    metavar="N",
)


@known_as("accelerate.utils.dataclasses.DataLoaderConfiguration")
@guess_arguments
@dataclass
class DataLoaderConfiguration:
    """How `Accelerator.prepare` prepares data loaders.

    Args:
        split_batches (`bool`): Whether the loader's batch size is the global one, split between the processes, rather
            than the size every process gets.
        dispatch_batches (`bool`, *optional*): Whether the main process reads all data and sends each process its
            share. When None: only for iterable datasets.
        even_batches (`bool`): Whether the last batches are padded from the beginning, so that every process gets
            equally many.
        use_seedable_sampler (`bool`): Whether shuffling depends on seed and epoch alone, and so repeats exactly.
        data_seed (`int`, *optional*): Seed of that sampler; drawn from torch's global generator when None.
        non_blocking (`bool`): Whether the host goes on before a batch is copied to the device also where it is not in pinned
            memory (`DataLoader(pin_memory=True)`). It never waits for copies of batches that are.
        use_stateful_dataloader (`bool`): Whether loaders continue an epoch by themselves after `load_state`, and have
            `state_dict` and `load_state_dict`; through torchdata where it is installed.
        already_sharded (`bool`): Whether each process's loader yields a shard of its own, which is read as it is. Samplers and streams
            that say so themselves, such as a `DistributedSampler`, are recognized without it.

    Example:
        ```python
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        ```
    """

    split_batches: bool = option(False, kind=BOOLEAN)
    dispatch_batches: bool | None = option(None, kind=BOOLEAN)
    even_batches: bool = option(True, kind=BOOLEAN)
    use_seedable_sampler: bool = option(False, kind=BOOLEAN)
    data_seed: int | None = option(None, kind=SEED)
    non_blocking: bool = option(False, kind=BOOLEAN)
    use_stateful_dataloader: bool = option(False, kind=BOOLEAN)
    already_sharded: bool = option(False, kind=BOOLEAN)

    def __post_init__(self) -> None:
        resolve_options(self)
        if self.already_sharded and (self.dispatch_batches or self.split_batches):
            wrong = "dispatch_batches" if self.dispatch_batches else "split_batches"
            raise ValueError(
                f"already_sharded=True reads each process's loader as it is, so {wrong}=True has nothing to do. Leave one of them out."
            )
