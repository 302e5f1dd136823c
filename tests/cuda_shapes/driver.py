"""Builds the pretended driver and keeps one process that runs on it.

Any command runs on a machine with pretended GPUs like this; `--gpus` says how many there are, one by default:

    uv run python -m tests.cuda_shapes.driver --gpus 1 pytest
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.hidden_devices import with_all_devices

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOST_DEFINES = """
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define __forceinline__ inline
"""  # CUDA's own is in a package of the compiler nvcc, which is not needed

SMI = """#!/bin/sh
index=0
while [ $index -lt $PRETENDED_GPUS ]; do
  case $1 in
    -L) echo "GPU $index: pretended GPU $index (UUID: GPU-0000000$index-pretended)" ;;
    *=name) echo "pretended GPU $index" ;;
    *=driver_version) echo 580.00.00 ;;
    *=pci.bus_id,uuid) echo "00000000:0$index:00.0, GPU-0000000$index-pretended" ;;
    *) echo 0 ;;
  esac
  index=$((index + 1))
done
"""  # what `nvidia-smi` prints of at most ten GPUs


def missing() -> str | None:
    """Why GPUs cannot be pretended here; None when they can."""
    if sys.platform != "linux":
        return "only the dynamic linker of Linux lets a library take another's place"
    if torch.version.cuda is None or torch.version.cuda.partition(".")[0] != "13":
        return f"needs a torch for CUDA 13, this one is for {torch.version.cuda or 'the CPU'}"
    if shutil.which("gcc") is None:
        return "needs gcc"
    if not (_headers() / "cuda_runtime_api.h").exists():
        return "needs the headers of nvidia-cuda-runtime"
    return None


def _headers() -> Path:
    return Path(torch.__file__).parents[1] / "nvidia/cu13/include"


def build(folder: Path) -> list[Path]:
    """Compile the driver and the library that counts GPUs, under NVIDIA's own names, so that no others are looked for.

    Args:
        folder: An empty folder for them.

    Returns:
        The libraries to load before all others.
    """
    (folder / "crt").mkdir()
    (folder / "crt/host_defines.h").write_text(HOST_DEFINES)
    libraries = []
    for name, own_name, defines in (
        ("libpretended.so", "libcuda.so.1", []),
        ("libpretended-ml.so", "libnvidia-ml.so.1", ["-DNVML"]),
    ):
        options = [
            "-O1",
            "-shared",
            "-fPIC",
            "-w",
            *defines,
            f"-Wl,-soname,{own_name}",
            f"-I{folder}",
            f"-I{_headers()}",
        ]
        libraries.append(folder / name)
        subprocess.run(["gcc", *options, "-o", str(libraries[-1]), str(HERE / "pretended_driver.c")], check=True)
    return libraries


def pretend(folder: Path, gpus: int) -> dict[str, str]:
    """The environment variables of a process that sees pretended GPUs; its children see them, too.

    Args:
        folder: An empty folder for what is built, which must outlive the process.
        gpus: The number of GPUs.
    """
    program = folder / "programs/nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    return {
        **with_all_devices(os.environ),
        "LD_PRELOAD": " ".join(str(library) for library in build(folder)),
        "PRETENDED_GPUS": str(gpus),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
    }


class GpuMachine:
    """A process that sees eight GPUs, and runs each task in a fork."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        environment = pretend(Path(self._folder.name), gpus=8)
        clean = {name: value for name, value in environment.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda_shapes.worker"],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _search_path()},
        )  # fmt: skip
        self._done: dict[tuple[Any, ...], Any] = {}

    def run(self, module: str, function: str, *arguments: Any) -> Any:
        """What a function of `tests.cuda_shapes` returns on this machine; each call is made once."""
        key = (module, function, *arguments)
        if key not in self._done:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result.json"
                task = [f"tests.cuda_shapes.{module}", function, [*arguments, folder], str(result)]
                assert self._process.stdin is not None
                assert self._process.stdout is not None
                self._process.stdin.write(json.dumps(task) + "\n")
                self._process.stdin.flush()
                code = self._process.stdout.readline().strip()
                self._done[key] = (
                    json.loads(result.read_text()) if result.exists() else {"error": f"wait status {code}"}
                )
        return self._done[key]

    def close(self) -> None:
        """End the process, which has nothing to do between tasks, and which any fork of this one could keep waiting."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


def _search_path() -> str:
    return os.pathsep.join([path for path in sys.path if path])


def main() -> int:
    """Run a command on a machine with pretended GPUs, and return its exit code."""
    parser = argparse.ArgumentParser(description="Run a command on a machine with pretended GPUs.")
    parser.add_argument("--gpus", type=int, default=1, help="the number of GPUs (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, such as `pytest tests/state`")
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        parser.error(f"GPUs cannot be pretended here: {reason}.")
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(arguments.command, env=pretend(Path(folder), arguments.gpus), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
