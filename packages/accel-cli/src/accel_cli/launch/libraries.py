"""Launches that need a library which may not be installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accel_cli.errors import NotHereError
from accel_cli.launch.settings import LaunchSettings


@dataclass(frozen=True, slots=True)
class Needed:
    """A library that a launch needs.

    Attributes:
        wanted_by: Given the settings, the flag or setting that needs it; empty when nothing does.
        library: Its name, for `import` and for pip.
        install: The argument of `pip install`.
        has: Modules of it that are used and that not all of its versions have.
    """

    wanted_by: Callable[[LaunchSettings], str]
    library: str
    install: str
    has: tuple[str, ...] = ()


SAGEMAKER = "sagemaker>=2.232,<3"  # version 3 has no estimators any more
NEEDED = (
    Needed(lambda settings: "--use_deepspeed" if settings.use_deepspeed else "", "deepspeed", "'accelerate[deepspeed]'"),
    Needed(lambda settings: "--tpu" if settings.tpu else "", "torch_xla", "'torch_xla[tpu]'"),
    Needed(lambda settings: "the config file (Amazon SageMaker)" if settings.sagemaker else "", "sagemaker",
           f"'{SAGEMAKER}'", has=("sagemaker.huggingface",)),
    Needed(lambda settings: "--launcher ray" if settings.launcher == "ray" else "", "ray", "'accelerate[ray]'",
           has=("ray.train",)),
)  # fmt: skip


def check_libraries(settings: LaunchSettings) -> None:
    """Check that the libraries of a launch are installed.

    Raises:
        ValueError: One is not installed, or lacks a module.
    """
    for row in NEEDED:
        who = row.wanted_by(settings)
        if who and not _is_installed(row.library):
            raise NotHereError(
                f"{who} needs the library {row.library!r}, which is not installed. Run: pip install {row.install}"
            )
        lacking = [module for module in row.has if who and not _has_module(module)]
        if lacking:
            raise NotHereError(
                f"{who} needs the module {lacking[0]!r}, which {_version(row.library)} does not have. Run: pip install "
                f"{row.install}"
            )
    if settings.runner == "deepspeed":
        _check_launcher(settings)
    if settings.runner == "tpu_pod":
        _check_pod()


def _is_installed(library: str) -> bool:
    from accel_state.libraries import is_installed  # slow to import, and most launches need no library

    return is_installed(library)


def _has_module(name: str) -> bool:
    """Look for a module of a package without importing it: sagemaker takes ten seconds."""
    import sys
    from importlib.machinery import PathFinder

    if name in sys.modules:
        return sys.modules[name] is not None
    package, _, inner = name.partition(".")
    spec = PathFinder.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return PathFinder.find_spec(inner, folders) is not None


def _version(library: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return f"the installed {library}"


def _check_launcher(settings: LaunchSettings) -> None:
    import shutil

    from accel_cli.launch.runners.deepspeed import LAUNCHERS

    launcher = LAUNCHERS[settings.deepspeed_multinode_launcher.lower()]
    if launcher.program and shutil.which(launcher.program) is None:
        raise NotHereError(
            f"--deepspeed_multinode_launcher {launcher.name} needs the program {launcher.program!r}, which is not "
            "installed. Install it, or use --deepspeed_multinode_launcher standard."
        )


def _check_pod() -> None:
    """Look for torch_xla's program for pods, without importing torch_xla: that takes many seconds."""
    import os
    from importlib.util import find_spec

    spec = find_spec("torch_xla")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if folders and not any(os.path.exists(os.path.join(folder, "distributed", "xla_dist.py")) for folder in folders):
        raise NotHereError(
            "This version of torch_xla has no program for pods (torch_xla.distributed.xla_dist). Start the script on "
            "every machine: accelerate tpu-config --command 'accelerate launch --tpu ...'"
        )
