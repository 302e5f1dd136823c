"""What sharing out means, written a second time as plain arithmetic on `range(length)`."""

from __future__ import annotations

from itertools import cycle, islice

from hypothesis import strategies as st
from torch.utils.data import IterableDataset


class Numbers(IterableDataset):  # type: ignore[type-arg]
    """A stream of 0 .. length - 1 that counts how often it is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_read = 0

    def __iter__(self):
        for number in range(self.length):
            self.num_read += 1
            yield number


class SizedNumbers(Numbers):
    """One that knows its length."""

    def __len__(self) -> int:
        return self.length


def padded_samples(length: int, global_size: int, drop_last: bool) -> list[int]:
    """All samples in order, without the last round if it is not full, or that one filled up with the first samples."""
    samples = list(range(length))
    if drop_last:
        return samples[: length // global_size * global_size]
    return samples + list(islice(cycle(samples[:global_size]), -length % global_size)) if length else []


def shard_of(samples: list[int], per_process: int, world: int, rank: int) -> list[list[int]]:
    """One process's consecutive part of every round."""
    global_size = per_process * world
    return [
        samples[start + rank * per_process : start + (rank + 1) * per_process]
        for start in range(0, len(samples), global_size)
    ]


sizes = st.fixed_dictionaries(
    {
        "length": st.integers(0, 60),
        "per_process": st.integers(1, 7),
        "world": st.integers(1, 8),
        "split": st.booleans(),
        "drop_last": st.booleans(),
    }
)
