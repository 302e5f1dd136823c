"""What proves a deadlock, and what does not."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ops.watch import this_process, watcher
from accel_ops.watch.calls import Call, GroupCalls, read_calls
from accel_ops.watch.judging import LEFT, Verdict, judge, may_conflict
from accel_ops.watch.notes import ENDED, RUNS, STANDS, Board, Note
from tests.support.ranks import ranks

LONG = 1000.0


def call(number: int, name: str = "all_reduce", shape: tuple[int, ...] = (4,), dtype: str = "Float") -> Call:
    return Call(number, name, (dtype,), (shape,), number)


def calls(*given: Call, members: tuple[int, ...] = (0, 1)) -> GroupCalls:
    return GroupCalls(members, {each.number: each for each in given})


def stands(*given: Call, group: str = "0", **facts: Any) -> Note:
    note = Note(STANDS, "train.py:1 in main", "all_reduce", "collective", group, calls={"0": calls(*given)}, stand=1)
    return replace(note, **facts)


def verdict(*notes: Note, waited: float = LONG, ended: float = LONG) -> Verdict | None:
    """The verdict of rank 0, which reads for the second time that all stand."""
    given = dict(enumerate(notes))
    before = {rank: replace(note, beat=note.beat - 1) for rank, note in given.items()}
    return judge(0, given, before, waited, dict.fromkeys(given, ended))


def test_waiting_alone_proves_nothing() -> None:
    runs = Note(RUNS, "train.py:9 in main", calls={"0": calls(call(1))})
    sleeps = Note(STANDS, "train.py:9 in main", calls={"0": calls(call(1))})
    for other in (runs, sleeps, stands(call(1), call(2))):
        assert verdict(stands(call(1), call(2)), other) is None
    assert verdict(stands(call(1)), stands(call(1)), waited=1e6) is None


def test_ranks_that_run_are_never_compared() -> None:
    own = stands(call(1))
    assert not may_conflict(own, Note(RUNS), LONG)
    assert not may_conflict(own, Note(STANDS, "train.py:9 in main"), LONG)
    assert not may_conflict(own, stands(), 1.0), "they stand in one collective"
    assert may_conflict(own, stands(operation="barrier"), 0.3)


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (call(2), call(2, "broadcast"), False),
        (call(2), call(2, shape=(5,)), False),
        (call(2), call(2, dtype="Long"), False),
        (call(2), call(2, shape=(2, 2)), True),
        (call(2, "broadcast"), call(2, "broadcast", dtype="Int"), True),
        (call(2, "broadcast"), call(2, "broadcast", shape=(9,)), False),
        (call(2, "all_to_all"), call(2, "all_to_all", shape=(9,)), True),
        (call(2, "scatter"), call(2, "scatter", shape=(0,)), True),
    ],
)
def test_calls_under_one_number_must_fit(one: Call, other: Call, fits: bool) -> None:
    actual = verdict(stands(call(1), one), stands(call(1), other))
    assert (actual is None) == fits
    assert actual is None or "number 2 in process group '0'" in actual.title


def test_groups_of_one_name_and_other_ranks_are_not_compared() -> None:
    mine = {"3": calls(call(1), members=(0, 2))}
    others = {"3": calls(call(1, "broadcast"), members=(1, 2))}
    assert verdict(stands(calls=mine, group="3"), stands(calls=others, group="3")) is None


def test_a_rank_that_has_left_proves_it_after_a_moment() -> None:
    gone = Note(ENDED, "train.py:8 in main", LEFT)
    assert verdict(stands(call(1)), gone, ended=0.1) is None
    actual = verdict(stands(call(1)), gone)
    assert actual is not None
    assert actual.rows[1] == ("has left the process group", "train.py:8 in main")
    alone = {"0": calls(call(1), members=(0, 2))}
    assert verdict(stands(calls=alone), gone) is None, "it does not wait for that rank"


def test_a_rank_that_may_compute_waits_only_for_what_it_has_called() -> None:
    gone = Note(ENDED, "train.py:8 in main", LEFT, counts={"0": 3})
    for kind in ("backward", "work", "inside"):
        after = stands(call(3), kind=kind, group="", counts={"0": 3})
        assert verdict(after, gone) is None, "all are done, and this one computes"
        assert verdict(stands(call(4), kind=kind, group="", counts={"0": 4}), gone) is not None
        assert verdict(stands(call(4), kind=kind, group="", counts={"0": 9}), gone) is None, "sends count, too"
        assert verdict(after, replace(gone, counts={})) is None


def test_ranks_that_wait_in_a_circle() -> None:
    a, b = calls(call(1)), calls()
    first = stands(calls={"A": a, "B": b}, group="A")
    second = stands(calls={"A": b, "B": a}, group="B")
    assert verdict(first, second) is not None
    assert verdict(first, second, waited=0.5) is None
    assert verdict(first, replace(second, kind="", state=RUNS)) is None
    given = {0: first, 1: second}
    assert judge(0, given, {0: first, 1: second}, LONG, {}) is None, "nobody has said so twice"
    third = stands(calls={"A": b, "B": b}, group="A")
    assert verdict(first, third, second) is None, "rank 1 has called nothing that is missing"


def test_large_tensors_may_be_on_their_way() -> None:
    first = stands(kind="peer", peer=1, data="float32[100000000]")
    second = stands(kind="peer", peer=0, data="float32[4]")
    assert verdict(first, second, waited=30.0) is None
    assert verdict(first, second, waited=60.0) is not None


def test_input_is_waited_for_on_the_main_process() -> None:
    reads = Note(STANDS, "train.py:3 in main", reads_input=True)
    assert verdict(stands(call(1)), reads) is not None
    given = {0: reads, 1: stands(call(1))}
    assert judge(1, given, {}, LONG, {}) is None


def test_ranks_with_one_row_share_a_line() -> None:
    rows = {rank: ("all_reduce", "train.py:1 in main") for rank in range(12)} | {12: ("barrier", "train.py:2 in main")}
    text = str(Verdict("title", rows, "advice"))
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 4 more  all_reduce  train.py:1 in main" in text
    assert len(text.splitlines()) == 7


def test_notes_survive_the_store() -> None:
    note = stands(call(1), call(2, "broadcast"), peer=3, data="float32[4]")
    assert Note.from_text(note.to_text()) == note


@ranks(2)
def test_calls_are_read_from_the_recorder(rank: int) -> None:
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    dist.barrier()
    own = read_calls(0)["0"]
    assert own.ranks == (0, 1)
    last = [own.calls[number] for number in sorted(own.calls)[-2:]]
    assert [each.name for each in last] == ["all_reduce", "barrier"], "sends have no number"
    assert last[0].data == "float32[3]"


@ranks(2)
def test_nobody_is_watched_without_a_tcp_store() -> None:
    this_process.begin()
    assert not [thread for thread in threading.enumerate() if thread.name == "accelerate_watch"]


def test_a_rank_that_leaves_while_it_is_connecting_says_so_once_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tries, may_go_on = threading.Event(), threading.Event()

    def slow_board(*arguments: Any) -> Board:
        tries.set()
        may_go_on.wait(60)
        return Board(*arguments)

    monkeypatch.setattr(watcher, "Board", slow_board)
    monkeypatch.setattr(watcher, "SECONDS_TO_STOP", 0.01)
    one = watcher.Watcher(store, 0, 0)
    one.start()
    assert tries.wait(60)
    one.stop("has ended", "train.py:3 in main")
    may_go_on.set()
    one._thread.join(60)
    other = Board(store, str(one._name), 1, 2)
    note = other.read()[0]
    assert (note.state, note.operation, note.line) == (ENDED, "has ended", "train.py:3 in main")
    one.close()
    other.close()
    dist.destroy_process_group()
