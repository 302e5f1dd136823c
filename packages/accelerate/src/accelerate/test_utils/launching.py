"""Launching programs from tests."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import accelerate
from accelerate.test_utils.requirements import device_count


class SubprocessCallException(Exception):  # noqa: N818 (the name that other libraries know)
    """A command exited with an error."""


@dataclass
class RunOutput:
    """The result of a program.

    Args:
        returncode: Its exit code.
        stdout: The lines it printed.
        stderr: The lines it printed to stderr.
    """

    returncode: int
    stdout: list[str]
    stderr: list[str]


def get_launch_command(**kwargs: Any) -> list[str]:
    """The arguments of an `accelerate launch` command.

    Args:
        kwargs: Options by name; True stands for an option without a value, None is left out.

    Example:
        ```python
        get_launch_command(num_processes=2, multi_gpu=True)
        # ["accelerate", "launch", "--num_processes=2", "--multi_gpu"]
        ```
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    return ["accelerate", "launch", *(f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items())]


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command.

    Args:
        command: Its arguments.
        return_stdout (`bool`): Return what it printed.
        env: Its environment; that of this process when None.

    Raises:
        SubprocessCallException: It exited with an error; its output is in the message.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env) if env is not None else None,
        check=False,
    )
    text = done.stdout.decode("utf-8", errors="replace")
    if done.returncode:
        raise SubprocessCallException(f"`{' '.join(words)}` exited with code {done.returncode} and printed:\n{text}")
    return text if return_stdout else None


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command and show what it prints while it runs.

    Args:
        cmd: Its arguments.
        env: Its environment; that of this process when None.
        stdin: Where it reads from, as for `subprocess.Popen`.
        timeout: Seconds until it is killed.
        quiet (`bool`): Do not show what it prints.
        echo (`bool`): Show the command.

    Raises:
        RuntimeError: It exited with an error, or timed out.
    """
    words = [str(word) for word in cmd]
    if echo:
        sys.stdout.write(f"$ {' '.join(words)}\n")
    process = subprocess.Popen(
        words,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env) if env is not None else None,
        text=True,
        errors="replace",
    )
    lines: tuple[list[str], list[str]] = ([], [])
    readers = [
        threading.Thread(target=_pass_on, args=(source, stream_lines, None if quiet else target))
        for source, stream_lines, target in zip(
            (process.stdout, process.stderr), lines, (sys.stdout, sys.stderr), strict=True
        )
    ]
    for reader in readers:
        reader.start()
    try:
        returncode = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        returncode = process.wait()
        lines[1].append(f"(timeout: killed after {timeout} s)")
    for reader in readers:
        reader.join()
    if returncode:
        errors = "\n".join(lines[1])
        raise RuntimeError(f"`{' '.join(words)}` exited with code {returncode}. Its stderr:\n{errors}")
    return RunOutput(returncode, *lines)


def _pass_on(source: IO[str], lines: list[str], target: Any) -> None:
    with source:
        for line in source:
            lines.append(line.rstrip("\n"))
            if target is not None:
                target.write(line)


def path_in_accelerate_package(*components: str) -> Path:
    """A path inside the installed package.

    Args:
        components: Names of folders, and of the file.
    """
    return Path(accelerate.__file__).parent.joinpath(*components)


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """A block that must raise an exception.

    Args:
        exception_class: Its class.
        msg: What its message must contain.

    Raises:
        AssertionError: It raised none, or the message is another.
    """
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(
                f"The message of the {exception_class.__name__} does not contain {msg!r}: {error}"
            ) from error
        return
    raise AssertionError(f"Expected a {exception_class.__name__}, but none was raised.")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a function prints.

    Args:
        func: The function.
        args: Its arguments.
        kwargs: As above.
    """
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        func(*args, **kwargs)
    return captured.getvalue()
