"""What collectives make of nested structures, on every process of two."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from record import RANK, done, record
from structures import Encoding, Maker, Output, Point, Records, Single, same_structure_again

from accelerate import Accelerator
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)

ANY = Maker(1)


def own_values(number: int, batch: int | None, **options: Any) -> Any:
    """The same structure with other values on each process; with `batch`, of another size too."""
    maker = Maker(20_000 + number)
    value = maker.structure(depth=number % 4, only_tensors=True, batch=3, **options)
    maker.generator.manual_seed(number * 2 + RANK)
    return same_structure_again(maker, value, 3 if batch is None else batch)


def even(number: int) -> None:
    value = own_values(number, None)
    record(f"gather {number}", lambda: gather(value))
    for how, scale in (("sum", 1.0), ("mean", 1.0), ("none", 1.0), ("sum", 0.5), ("mean", 2.0)):
        record(f"reduce {number} {how} {scale}", lambda how=how, scale=scale: reduce(_copy(value), how, scale))
    for source in (0, 1):
        record(f"broadcast {number} {source}", lambda source=source: broadcast(_copy(value), from_process=source))


def _copy(value: Any) -> Any:
    """1.15 works in place."""
    from accelerate.utils import recursively_apply

    return recursively_apply(torch.clone, value)


def uneven(number: int) -> None:
    value = own_values(number, 1 + 2 * ((number + RANK) % 2), dims=1 + number % 3)
    for dim, first in itertools.product((0, 1, -1), (False, True)):
        record(
            f"pad {number} {dim} {first}",
            lambda dim=dim, first=first: pad_across_processes(_copy(value), dim=dim, pad_index=-1, pad_first=first)
            if not _has_bool(value) else None,
        )  # fmt: skip
    if not _has_bool(value):  # which 1.15 turns into int64 on the process that has less, and both hang
        record(f"pad_gather {number}", lambda: gather(pad_across_processes(_copy(value))))


def _has_bool(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.bool
    return any(map(_has_bool, value.values() if hasattr(value, "values") else value))


def other_shapes(number: int) -> None:
    """Tensors that differ in several dimensions."""
    maker = Maker(number * 2 + RANK)
    shape = [maker.random.randint(1, 4) for _ in range(2)]
    value = {"x": torch.rand(shape, generator=maker.generator), "y": [torch.ones(shape[::-1], dtype=torch.int64)]}
    record(f"other_shapes {number}", lambda: pad_across_processes(pad_across_processes(value, dim=0), dim=1))


def objects(number: int) -> None:
    chosen = [
        [RANK], [{"rank": RANK, "list": [1, 2] * RANK}], ["text"] * (RANK + 1), [None, number], [(RANK, "a"), {3}],
        [], [Point(RANK, [1])], [torch.arange(RANK + 2)], [[[RANK]]],
    ][number]  # fmt: skip
    record(f"gather_object {number}", lambda: gather_object(list(chosen)))
    for source in (0, 1):
        shared = (list(chosen) * 2)[:1] or [None]
        record(
            f"broadcast_object_list {number} {source}",
            lambda s=source, shared=shared: broadcast_object_list(shared, s),
        )


def through(accelerator: Accelerator, number: int) -> None:
    value = own_values(30_000 + number, None)
    record(f"accelerator_gather {number}", lambda: accelerator.gather(value))
    record(f"accelerator_reduce {number}", lambda: accelerator.reduce(_copy(value), "mean"))
    record(f"accelerator_pad {number}", lambda: accelerator.pad_across_processes(own_values(number, RANK + 1, dims=1)))
    record(f"gather_for_metrics {number}", lambda: accelerator.gather_for_metrics(value))


def methods(accelerator: Accelerator) -> None:
    """The same through the accelerator."""
    for number in range(40):
        through(accelerator, number)
    record("gather_for_metrics objects", lambda: accelerator.gather_for_metrics([f"{RANK}"]))
    record("gather_for_metrics dict", lambda: accelerator.gather_for_metrics({"a": RANK}))
    record("gather_for_metrics number", lambda: accelerator.gather_for_metrics(RANK))


def splits(accelerator: Accelerator) -> None:
    """`split_between_processes` of all that can be cut."""
    inputs = {
        "list": list(range(7)), "tuple": tuple(range(5)), "text": "abcdefg", "short": [1], "empty": [],
        "tensor": torch.arange(5), "matrix": torch.arange(6).reshape(3, 2), "dict": {"a": [1, 2, 3], "b": torch.arange(3)},
        "unequal": {"a": [1, 2, 3], "b": [1]}, "nested": {"a": {"b": [1, 2, 3]}}, "even": [1, 2, 3, 4],
    }  # fmt: skip
    for (name, value), padding in itertools.product(inputs.items(), (False, True)):

        def see(value=value, padding=padding):
            with accelerator.split_between_processes(value, apply_padding=padding) as share:
                return share

        record(f"split {name} {padding}", see)


def triggers(accelerator: Accelerator) -> None:
    for rank in (0, 1):

        def see(rank=rank):
            if rank == RANK:
                accelerator.set_trigger()
            return [accelerator.check_trigger(), accelerator.check_trigger()]

        record(f"trigger {rank}", see)
    ran = []
    for name in ("on_main_process", "on_local_main_process", "on_last_process"):
        getattr(accelerator, name)(lambda name=name: ran.append(name))()
    for index in (0, 1):
        accelerator.on_process(lambda index=index: ran.append(index), process_index=index)()
        accelerator.on_local_process(lambda index=index: ran.append(index), local_process_index=index)()
    record("ran", lambda: ran)
    record("copies", lambda: copy_tensor_to_devices(torch.tensor([3]) if RANK == 0 else None))
    facts = ("num_processes", "process_index", "local_process_index", "is_main_process", "is_last_process", "device")
    record(
        "facts", lambda: {fact: getattr(accelerator, fact) for fact in (*facts, "distributed_type", "use_distributed")}
    )


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    for kind in (Encoding, Output, Records, Single):
        record(f"kind {kind.__name__}", lambda kind=kind: gather(kind({"a": ANY.tensor(1, 2)})))
    for number in range(120):
        even(number)
        uneven(number)
    for number in range(30):
        other_shapes(number)
    for number in range(9):
        objects(number)
    methods(accelerator)
    splits(accelerator)
    triggers(accelerator)
    wait_for_everyone()
    done()
    accelerator.end_training()
