"""Builds the pretended driver and keeps one process that runs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

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
    if torch.cuda.is_available():
        return "this machine has a GPU: see tests/gpu"
    return None


def _headers() -> Path:
    return Path(torch.__file__).parents[1] / "nvidia/cu13/include"


def build(folder: Path) -> Path:
    """Compile the driver; under libcuda's own name, so that no other one is looked for."""
    (folder / "crt").mkdir()
    (folder / "crt/host_defines.h").write_text(HOST_DEFINES)
    library = folder / "libpretended.so"
    options = ["-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        ["gcc", *options, f"-I{folder}", f"-I{_headers()}", "-o", str(library), str(HERE / "pretended_driver.c")],
        check=True,
    )
    return library


class GpuMachine:
    """A process that sees eight GPUs, and runs each task in a fork."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        library = build(Path(self._folder.name))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda_shapes.worker"],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=clean | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONPATH": _search_path()},
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
