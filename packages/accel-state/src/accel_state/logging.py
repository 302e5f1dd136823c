"""Loggers for distributed programs: a message is logged once, or by all ranks in order."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from accel_state.processes import PartialState, is_initialized
from accel_state.public_names import known_as


@known_as("accelerate.logging.MultiProcessAdapter")
class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose methods take two more keyword arguments and add the rank to messages.

    `main_process_only` (`bool`): whether only the main process logs; True unless `in_order` is.
    `in_order` (`bool`): whether all ranks log, one after the other; all of them must then make the call.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message.

        Args:
            level: As for `logging.Logger.log`.
            msg: The message.
            args: Its format arguments.
            kwargs: `main_process_only`, `in_order`, and what `logging.Logger.log` takes.

        Raises:
            RuntimeError: Before a `PartialState` is created.
        """
        if not is_initialized():
            raise RuntimeError(
                f"The logger {self.logger.name!r} does not know the rank of this process yet: create an `Accelerator()` or a "
                "`PartialState()` before logging."
            )
        state = PartialState()
        in_order = kwargs.pop("in_order", False)
        main_process_only = kwargs.pop("main_process_only", not in_order)
        kwargs["stacklevel"] = max(kwargs.get("stacklevel", 2), 2) + 1  # past `_emit`; this method counts, as in 1.15
        if main_process_only:
            if state.is_main_process:
                self._emit(level, msg, args, kwargs)
        elif in_order:
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self._emit(level, msg, args, kwargs)
                state.wait_for_everyone()  # whatever the level is here: other ranks may have another one
        else:
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]) -> None:
        if self.isEnabledFor(level):
            msg, kwargs = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Put the rank before the message."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, but only at the first call with the same arguments."""
        warned: set[str] = self.__dict__.setdefault("_warned", set())
        call = repr((args, kwargs))  # arguments need not be hashable, as those of `extra`
        if call not in warned:
            warned.add(call)
            self.warning(*args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for distributed programs.

    Args:
        name (`str`): As for `logging.getLogger`.
        log_level (`str`, *optional*): Such as `"INFO"`, for this logger and the root logger; `ACCELERATE_LOG_LEVEL`
            when None. Without either, levels are not changed.

    Raises:
        ValueError: For a level that does not exist.

    Example:
        ```python
        logger = get_logger(__name__)
        logger.info("once")
        logger.info("from everyone", main_process_only=False)
        logger.info("from everyone, in order", in_order=True)
        ```
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        known = logging.getLevelNamesMapping()
        if level.upper() not in known:
            source = "log_level" if log_level else "ACCELERATE_LOG_LEVEL"
            raise ValueError(f"{source}={level!r} is not a logging level: use one of {', '.join(known)}.")
        logger.setLevel(known[level.upper()])
        logging.getLogger().setLevel(known[level.upper()])
    return MultiProcessAdapter(logger, {})
