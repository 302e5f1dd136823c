"""Messages come once, or from all processes in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_state.logging import get_logger
from accel_state.processes import PartialState
from tests.support.ranks import ranks


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


def test_logging_before_there_is_a_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="'early' does not know the rank of this process yet"):
        get_logger("early").warning("too early")


def test_messages_carry_rank_place_and_extra(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("test_logging.place", "INFO")
    logger.info("hello %s", "world", extra={"step": 3})
    logger.error("bad", stacklevel=1)
    logger.log(logging.INFO, "all", main_process_only=False)
    logger.warning("ordered", in_order=True)
    get_logger("test_logging.below", "ERROR").warning("quiet")
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] hello world", "[RANK 0] bad", "[RANK 0] all", "[RANK 0] ordered",
    ]  # fmt: skip
    assert [record.filename for record in caplog.records] == [Path(__file__).name] * 4
    assert caplog.records[0].step == 3  # type: ignore[attr-defined]


def test_warnings_can_come_once(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("test_logging.once")
    for _ in range(3):
        logger.warning_once("again and again", extra={"epochs": [1, 2]})  # which cannot be hashed
    logger.warning_once("something else")
    assert [record.message for record in caplog.records] == [
        "[RANK 0] again and again", "[RANK 0] something else",
    ]  # fmt: skip
    assert caplog.records[0].filename == Path(__file__).name


def test_levels_come_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("test_logging.none").logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("test_logging.debug").logger.level == logging.DEBUG
    assert logging.getLogger().level == logging.DEBUG
    assert get_logger("test_logging.error", "error").logger.level == logging.ERROR
    with pytest.raises(ValueError, match="log_level='loud' is not a logging level"):
        get_logger("test_logging.loud", "loud")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "quiet")
    with pytest.raises(ValueError, match="ACCELERATE_LOG_LEVEL='quiet' is not a logging level"):
        get_logger("test_logging.quiet")


class _File(logging.Handler):
    """Appends to a file that all ranks write to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: Any) -> None:
        with self.path.open("a") as file:
            file.write(record.getMessage() + "\n")


@ranks(3)
def test_who_speaks_when(rank: int, world: int, tmp_path: Path) -> None:
    state = PartialState()
    logger = get_logger(f"test_logging.ranks.{tmp_path.name}")
    handler = _File(tmp_path / "log")
    logger.logger.addHandler(handler)
    logger.logger.propagate = False
    try:
        logger.warning("once")
        state.wait_for_everyone()
        logger.warning("ordered", in_order=True)
        logger.warning("ordered too", main_process_only=False, in_order=True)
        logger.warning("main only", main_process_only=True, in_order=True)
        logger.logger.setLevel(logging.ERROR if rank == 1 else logging.INFO)
        logger.info("some are quiet", in_order=True)
        logger.error("everyone", main_process_only=False)
        state.wait_for_everyone()
    finally:
        logger.logger.removeHandler(handler)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "[RANK 0] once"
    assert lines[1:4] == [f"[RANK {index}] ordered" for index in range(3)]
    assert lines[4:7] == [f"[RANK {index}] ordered too" for index in range(3)]
    assert lines[7] == "[RANK 0] main only"
    assert lines[8:10] == ["[RANK 0] some are quiet", "[RANK 2] some are quiet"]
    assert sorted(lines[10:]) == [f"[RANK {index}] everyone" for index in range(3)]


class Wrapper(logging.LoggerAdapter[Any]):
    """A logger of a program's own around ours, which points at its own caller."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})


def test_a_wrapped_logger_names_the_place_that_the_wrapper_points_at(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    Wrapper(get_logger("test_logging.wrapped"), {}).warning("here")
    assert caplog.records[0].funcName == "test_a_wrapped_logger_names_the_place_that_the_wrapper_points_at"
