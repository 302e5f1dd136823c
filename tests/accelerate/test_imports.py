"""Importing is cheap, the stubs are current, and every old path leads somewhere."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import accelerate
import accelerate.utils
from tools import make_stubs

ROOT = Path(__file__).resolve().parents[2]

HEAVY = ["psutil", "packaging", "yaml", "tqdm", "huggingface_hub", "safetensors", "transformers", "torch._dynamo",
         "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor",
         "torch.distributed.device_mesh"]  # fmt: skip

LEAVES = [
    "accelerator", "local_sgd", "logging", "parallelism_config", "state", "tracking", "utils", "utils.constants",
    "utils.dataclasses", "utils.environment", "utils.imports", "utils.other", "utils.torch_xla", "utils.tqdm",
    "utils.versions",
]  # fmt: skip


def in_a_fresh_interpreter(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.takes_turns
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "statement", ["import accelerate", "import accelerate.utils", "from accelerate import Accelerator"]
)
def test_importing_adds_nothing_heavy_to_torch(statement: str) -> None:
    program = (
        "import sys, torch; before = set(sys.modules); "
        f"{statement}; print([m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    )
    assert in_a_fresh_interpreter(program) == "[]"


def test_importing_the_package_loads_only_the_table() -> None:
    program = (
        "import sys; import accelerate; print(sorted(m for m in sys.modules if m.startswith(('accel', 'torch'))))"
    )
    assert (
        in_a_fresh_interpreter(program)
        == "['accel_ops', 'accel_state', 'accel_state.group_events', 'accel_state.lazy', 'accel_state.public_names', 'accelerate']"
    )


@pytest.mark.takes_turns
def test_submodules_are_reached_through_the_package() -> None:
    assert in_a_fresh_interpreter("import accelerate; print(accelerate.utils.gather.__name__)") == "gather"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = accelerate.nothing


@pytest.mark.parametrize("package", [accelerate, accelerate.utils])
def test_every_lazy_name_resolves(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(package, name)] == []
    assert set(names) <= set(dir(package))


@pytest.mark.parametrize("leaf", [*LEAVES, *accelerate.SUBMODULES])
def test_every_leaf_imports(leaf: str) -> None:
    importlib.import_module(f"accelerate.{leaf}")


@pytest.mark.takes_turns
def test_one_name_is_function_and_module() -> None:
    program = (
        "import accelerate.utils.tqdm; from accelerate.utils import tqdm; print(tqdm.__name__, callable(tqdm)); "
        "import accelerate; print(callable(accelerate.utils.tqdm))"
    )
    assert in_a_fresh_interpreter(program) == "tqdm True\nTrue"


@pytest.mark.takes_turns
def test_the_stubs_are_current() -> None:
    assert list(make_stubs.stale()) == [], "run: uv run tools/dev.py stubs"


@pytest.mark.takes_turns
def test_the_tool_sees_a_stale_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "__init__.py"
    package.write_text('"""A package."""\n\n__version__ = "1"\nEXPORTS = {"m.n": "b a c=d"}\nSUBMODULES = ("z",)\n')
    monkeypatch.setattr(make_stubs, "LAZY_PACKAGES", {"package": package})
    assert list(make_stubs.stale()) == [tmp_path / "__init__.pyi"]
    assert make_stubs.stale()[tmp_path / "__init__.pyi"].splitlines() == [
        '"""A package."""', "", "from m.n import a as a", "from m.n import b as b", "from m.n import d as c",
        "from package import z as z", "",
        "__version__: str",
    ]  # fmt: skip


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads((ROOT / "packages" / "accelerate" / "pyproject.toml").read_text())["project"]
    assert accelerate.__version__ == project["version"]


@pytest.mark.takes_turns
def test_the_table_of_legacy_names_is_found_in_the_sources() -> None:
    assert '"accel_state.enums": "DistributedType"' in make_stubs.make_legacy_table({"a.b": "DistributedType"})
    assert (
        '"accelerate.compat.megatron.functions": "megatron_lm_initialize=initialize"'
        in make_stubs.make_legacy_table({"a.b": "megatron_lm_initialize"})
    )
    with pytest.raises(KeyError, match="a.b.no_such_name: not exactly one module"):
        make_stubs.make_legacy_table({"a.b": "no_such_name"})
