"""The dictionary of a state, shared or one per thread."""

from __future__ import annotations

import threading

from accel_state.shared import SharedDict, ThreadLocalSharedDict


def test_each_thread_has_its_own_under_xla_only() -> None:
    assert SharedDict is dict

    class State:
        _shared_state = ThreadLocalSharedDict()

        def __init__(self) -> None:
            self.__dict__ = self._shared_state

    seen = []

    def body() -> None:
        state = State()
        seen.append(dict(state.__dict__))
        state.rank = 1  # type: ignore[attr-defined]
        seen.append(State().rank)  # type: ignore[attr-defined]

    State().rank = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [{}, 1]
    assert State().rank == 0  # type: ignore[attr-defined]


def test_it_can_be_replaced() -> None:
    class State:
        _shared_state = ThreadLocalSharedDict(thread_local=True)

    State()._shared_state = {"rank": 2}
    assert State._shared_state == {"rank": 2}
