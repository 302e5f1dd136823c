"""Which engine trains a run, and what is said when there is none."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import accel_integrations
from accel_integrations.engines import registry
from accel_integrations.engines.ddp import DDPEngine
from accel_integrations.engines.delegating import DelegatingEngine
from accel_integrations.engines.engine import Engine, EngineContext
from accel_integrations.engines.registry import ENGINES, engine_class, make_engine
from accel_integrations.engines.single import SingleEngine
from accel_state import shutdown
from accel_state.enums import DistributedType
from accelerate import Accelerator
from tests.integrations.training import new_engine


def test_every_type_and_name_is_there() -> None:
    assert set(ENGINES) == {kind.value for kind in DistributedType} | {"FSDP2"}
    for name in accel_integrations.__all__:
        assert getattr(accel_integrations, name) is not None


@pytest.mark.parametrize("kind", list(DistributedType))
def test_engines_load_by_name(kind: DistributedType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", None)  # asking installed packages would fail
    assert issubclass(engine_class(kind), Engine)


def test_other_packages_bring_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def entry_points(**query: str) -> list[Any]:
        asked.append(query)
        return [SimpleNamespace(name="HORSES", load=lambda: SingleEngine)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert engine_class("HORSES") is SingleEngine
    assert asked == [{"group": "accelerate.engines"}]
    with pytest.raises(NotImplementedError, match="'PONIES' is not known; there are NO, .*, XLA, HORSES"):
        engine_class("PONIES")


def test_a_program_chooses_its_engine() -> None:
    class Counting(DelegatingEngine):
        name = "counting"

        def __init__(self, context: EngineContext) -> None:
            super().__init__(SingleEngine(context))

    assert isinstance(Accelerator(cpu=True, engine=Counting).engine, Counting)
    assert isinstance(Accelerator(cpu=True, engine="MULTI_CPU").engine, DDPEngine)
    assert isinstance(Accelerator(cpu=True).engine, SingleEngine), "others are as before"
    with pytest.raises(NotImplementedError, match="'HORSES' is not known"):
        Accelerator(cpu=True, engine="HORSES")
    for wrong, reason in ((3, "neither a name nor a class"), (lambda context: {}, "made a dict, which is no Engine")):
        with pytest.raises(TypeError, match=reason):
            Accelerator(cpu=True, engine=wrong)  # type: ignore[arg-type]


def test_engines_are_closed_before_the_group_and_not_made_where_settings_cannot_be_combined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []
    monkeypatch.setattr(SingleEngine, "close", lambda self: closed.append(self))
    monkeypatch.setattr(shutdown, "_callbacks", [])
    context = new_engine().context  # this one is gone when its turn comes
    engine = make_engine(context)
    gc.collect()
    shutdown._call_back()
    assert closed == [engine]

    def check(self: Engine) -> None:
        raise ValueError("these settings")

    monkeypatch.setattr(SingleEngine, "check", check)
    with pytest.raises(ValueError, match="these settings"):
        make_engine(context)


HEAVY = (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "psutil",
    "yaml",
    "numpy",
    "deepspeed",
)


@pytest.mark.thorough
def test_importing_engines_stays_cheap() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import accel_integrations.engines.registry, accel_integrations.engines.single, accel_integrations.compile\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules and name not in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.strip() == "[]"
