"""Loggers that know about processes: a message appears once, or from all processes in order."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from accel_state.processes import PartialState, is_initialized


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg] # not subscriptable at run time in all versions
    """A logger whose methods take two more keywords.

    `main_process_only` (`bool`, True): whether only the main process speaks. `in_order` (`bool`, False): whether all
    processes speak, one after the other; all of them must then make the call.
    """

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message.

        Args:
            level: As for `logging.Logger.log`.
            msg: The message.
            args: Its arguments.
            kwargs: `main_process_only`, `in_order`, and what `logging.Logger.log` takes.

        Raises:
            RuntimeError: Before this process has found its place.
        """
        if not is_initialized():
            raise RuntimeError(
                f"The logger {self.logger.name!r} cannot tell yet which process this is: make an `Accelerator()` or a "
                "`PartialState()` before logging."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2  # past this method and `_emit`
        if not self.isEnabledFor(level):
            return
        if in_order:
            state = PartialState()
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self._emit(level, msg, args, kwargs)
                state.wait_for_everyone()
        elif self._should_log(main_process_only):
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]) -> None:
        msg, kwargs = self.process(msg, kwargs)
        self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Say which process speaks."""
        if self.extra:
            kwargs.setdefault("extra", self.extra)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    @functools.lru_cache(None)  # noqa: B019 - loggers live as long as the program
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, but only the first time that this message comes."""
        self.warning(*args, stacklevel=2, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for one process among many.

    Args:
        name (`str`): As for `logging.getLogger`.
        log_level (`str`, *optional*): Such as `"INFO"`; `ACCELERATE_LOG_LEVEL` when None, and that of the root logger
            when there is no such variable either.

    Example:
        ```python
        logger = get_logger(__name__)
        logger.info("once")
        logger.info("from everyone", main_process_only=False)
        logger.info("from everyone, in order", main_process_only=False, in_order=True)
        ```
    """
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
