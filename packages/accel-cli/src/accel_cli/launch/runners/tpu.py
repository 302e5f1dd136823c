"""TPU cores, on which torch_xla calls a function of the script; run as a program by the launches that this plans."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from accel_cli.errors import UsageError, did_you_mean
from accel_cli.launch.flags.table import value_of
from accel_cli.launch.plan import Plan, environment
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_state.xla_runtime import is_spmd

DEFAULT_FUNCTION = "main"
IN_POD = "ACCELERATE_IN_TPU_POD"
PASSED_TO_POD = ("num_machines", "mixed_precision", "dynamo_backend", "num_processes", "main_training_function")


def plan(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """Plan a launch on the TPU of this machine.

    Args:
        settings: The resolved settings.
        environ: The variables that are set already.

    Raises:
        ValueError: With `--no_python`, since a program has no function to call.
    """
    if settings.no_python:
        raise UsageError("--no_python and --tpu exclude one another: torch_xla calls a function of a Python script.")
    words = [sys.executable or "python3", "-m", __name__, "--function", settings.main_training_function or "main"]
    if settings.num_processes is not None:
        words += ["--num_processes", str(settings.num_processes)]
    words += ["--module"] if settings.module else []
    return Plan(
        "tpu",
        (*words, settings.training_script, *settings.training_script_args),
        environment(settings, environ) | xla_variables(settings),
        quiet=bool(settings.quiet),
    )


def plan_pod(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """Plan a launch on every machine of a TPU pod, through torch_xla's program for it; arguments as in `plan`."""
    if not settings.tpu_name:
        raise UsageError(
            "--tpu_cluster needs the name of the TPU pod. Set tpu_name in the config file, or give --no_tpu_cluster."
        )
    variables = xla_variables(settings) | {IN_POD: "1"}
    if settings.debug:
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    words = [sys.executable or "python3", "-m", "torch_xla.distributed.xla_dist", "--tpu", settings.tpu_name]
    words += [word for machine in settings.vm or () for word in ("--vm", machine)]
    sent = [*(settings.env or ()), *(f"{name}={value}" for name, value in variables.items())]
    words += [word for variable in sent for word in ("--env", variable)]
    words += ["--restart-tpuvm-pod-server", "--", *(["sudo"] if settings.tpu_use_sudo else [])]
    words += ["accelerate-launch", "--tpu", "--no_tpu_cluster"]
    for name in PASSED_TO_POD:
        value = 1 if name == "num_machines" else _value(settings, name)
        words += [f"--{name}", str(value)] if value is not None else []
    words += ["-m"] if settings.module else []
    return Plan("tpu_pod", (*words, settings.training_script, *settings.training_script_args), {},
                quiet=bool(settings.quiet))  # fmt: skip


def _value(settings: LaunchSettings, name: str) -> Any:
    return getattr(settings, name) if name in ROWS else value_of(settings, name)


def xla_variables(settings: LaunchSettings) -> dict[str, str]:
    """Return the environment variables of torch_xla."""
    # not XLA_USE_BF16, which would round parameters too: autocast computes in bfloat16
    downcasts = str(settings.mixed_precision).lower() == "bf16" and settings.downcast_bf16
    return {"XLA_DOWNCAST_BF16": "1"} if downcasts else {}


def load_function(script: str, name: str, *, is_module: bool) -> Callable[..., Any]:
    """Import a script and find its function.

    Args:
        script: Path of the script, or name of a module.
        name: The function.
        is_module: Which of the two.

    Raises:
        ValueError: The script has no such function.
    """
    if is_module:
        module = import_module(script)
    else:
        folder, file = os.path.split(os.path.abspath(script))
        sys.path.insert(0, folder)  # the processes that are started import it by name
        module = import_module(os.path.splitext(file)[0])
    function = getattr(module, name, None)
    if not callable(function):
        known = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        raise UsageError(
            f"{script!r} has no function {name!r} for the TPU cores to call. Write one, or name another with "
            f"--main_training_function.{did_you_mean(name, known)}"
        )
    return function


def main(words: Sequence[str] | None = None) -> int:
    """Call the function of a script on every core.

    Args:
        words: The command line; that of this process when None.

    Returns:
        The exit status: 0, or 2 if the script cannot be started.
    """
    parser = argparse.ArgumentParser(prog="accelerate launch --tpu")
    parser.add_argument("--function", default=DEFAULT_FUNCTION)
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    from accel_cli.launched_function import PrepareForLaunch

    sys.argv = [args.script, *args.script_args]
    try:
        spawn = spawner()
        function = load_function(args.script, args.function, is_module=args.module)
    except UsageError as error:
        print(f"accelerate launch: error: {error}", file=sys.stderr)
        return 2
    # torch_xla starts one process, or one for each core
    spawn(PrepareForLaunch(function, distributed_type="XLA"), args=(), nprocs=1 if args.num_processes == 1 else None)
    return 0


def _call_here(function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> None:
    """Call a function in this process, which drives all cores: torch_xla starts no others under SPMD."""
    function(0, *args)


def spawner() -> Callable[..., Any]:
    """Find the function of torch_xla that starts a process on every core.

    Raises:
        ValueError: torch_xla cannot be imported.
    """
    if is_spmd():
        return _call_here
    try:
        return import_module("torch_xla.distributed.xla_multiprocessing").spawn
    except ImportError as error:
        raise UsageError(f"TPUs need the library 'torch_xla': {error}. Run: pip install 'torch_xla[tpu]'") from error


if __name__ == "__main__":
    sys.exit(main())
