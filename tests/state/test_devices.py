"""The table of device kinds, as far as a machine without accelerators can tell; fake modules stand in for the rest."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accel_ops.random import capture_rng_state, restore_rng_state, set_seed
from accel_state import devices, hardware, libraries, xla_runtime
from accel_state.devices import (
    DEVICE_KINDS,
    XlaKind,
    default_device,
    detect_device_kind,
    device_kind,
    resolve_device,
)
from accel_state.enums import DistributedType
from accel_state.processes import PartialState

NUMBERED = ["cuda", "xpu", "npu", "mlu", "musa", "sdaa", "neuron"]


class FakeModule(types.ModuleType):
    """Stands in for `torch.<kind>`."""

    def __init__(self, name: str, count: int = 2) -> None:
        super().__init__(name)
        self.count = count
        self.current: int | None = None
        self.emptied = 0
        self.seen_variables: dict[str, str] = {}

    def is_available(self) -> bool:
        self.seen_variables = dict(os.environ)
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        self.current = index

    def empty_cache(self) -> None:
        self.emptied += 1

    def is_bf16_supported(self) -> bool:
        return self.count == 2

    def get_rng_state(self) -> torch.Tensor:
        return torch.zeros(1)


@contextmanager
def cleared(*cached: Any) -> Iterator[None]:
    """These functions remember nothing from before, and nothing from this block afterwards."""
    for function in cached:
        function.cache_clear()
    try:
        yield
    finally:
        for function in cached:
            function.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, count: int = 2) -> FakeModule:
        module = FakeModule(f"torch.{name}", count)
        monkeypatch.setattr(torch, name, module, raising=False)
        return module

    return make


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A torch_xla with four processes, of which this is number 3."""
    package, runtime, core, model = (
        types.ModuleType(name)
        for name in ("torch_xla", "torch_xla.runtime", "torch_xla.core", "torch_xla.core.xla_model")
    )
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    package.device = lambda: torch.device("xla", 0)  # type: ignore[attr-defined]
    answers = {
        "global_ordinal": 3, "world_size": 4, "local_ordinal": 1, "local_process_count": 2, "device_type": "TPU",
        "global_runtime_device_count": 4,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(runtime, name, lambda value=value: value)
    model.tags = []  # type: ignore[attr-defined]
    model.rendezvous = model.tags.append  # type: ignore[attr-defined]
    for module in (package, runtime, core, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.delenv("XLA_USE_SPMD", raising=False)
    monkeypatch.setattr(devices, "_SPMD_AT_START", [])
    with cleared(libraries.is_torch_xla_available, devices._load):
        yield model


def test_this_machine_computes_on_the_cpu() -> None:
    kind = detect_device_kind()
    assert kind.name == "cpu"
    assert default_device() == torch.device("cpu")
    assert (kind.device_count(), kind.index_of(7), kind.device(7)) == (1, None, torch.device("cpu"))
    assert kind.supports_bf16()
    assert kind.supports_fp16()
    assert kind.rng_module() is None
    assert kind.own_place() is None
    kind.set_device(3)
    kind.empty_cache()
    kind.load_backend()


def test_rows_are_complete_and_unambiguous() -> None:
    names = [kind.name for kind in DEVICE_KINDS]
    assert names[-1] == "cpu"
    assert sorted(names) == sorted({*NUMBERED, "cpu", "mps", "hpu", "xla"})
    several = [kind.distributed_type for kind in DEVICE_KINDS if kind.collective_backend]
    assert len(set(several)) == len(several)
    assert DistributedType.NO not in several
    for kind in DEVICE_KINDS:
        assert device_kind(kind.name) is kind
    with pytest.raises(ValueError, match="'tpu' is not a device kind: use one of xla, .*cpu"):
        device_kind("tpu")
    before_cuda = names[: names.index("cuda")]
    assert {"npu", "mlu", "musa", "sdaa", "hpu", "xla"} <= {*before_cuda}, "torch.cuda answers for some of them"


@pytest.mark.parametrize("name", [kind.name for kind in DEVICE_KINDS if kind.name != "cpu"])
def test_kinds_that_are_not_here_are_not_available(name: str) -> None:
    kind = device_kind(name)
    assert not kind.is_available()
    assert kind.device_count() == 0


@pytest.mark.parametrize("name", NUMBERED)
def test_several_numbered_devices(name: str, fake: Any) -> None:
    module, kind = fake(name), device_kind(name)
    assert kind.is_available()
    assert detect_device_kind() is kind
    assert kind.device_count() == 2
    assert kind.index_of(1) == 1
    kind.set_device(None)
    assert module.current is None
    kind.set_device(1)
    assert module.current == 1
    kind.empty_cache()
    assert module.emptied == 1
    assert kind.rng_module() is module
    assert kind.supports_bf16()


def test_more_processes_than_devices_are_refused_unless_each_sees_only_its_own(fake: Any) -> None:
    fake("xpu", count=1)
    assert device_kind("xpu").index_of(3) == 0
    fake("xpu", count=2)
    with pytest.raises(ValueError, match=r"Local rank 2 .* but 2 are visible: start at most 2 .*ZE_AFFINITY_MASK"):
        device_kind("xpu").index_of(2)


def test_processes_share_devices_where_the_backend_is_one_of_the_cpu(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("xpu", count=2)
    state = PartialState()
    monkeypatch.setattr(PartialState, "_kind", lambda self: device_kind("xpu"))
    state.local_process_index, state.backend = 3, "gloo"
    state.set_device()
    assert state.device == torch.device("xpu", 1)
    for backend in ("xccl", "cpu:gloo,xpu:xccl"):
        state.backend = backend
        with pytest.raises(ValueError, match="let them share devices with backend='gloo'"):
            state.set_device()
    PartialState._reset_state()


@pytest.mark.parametrize(
    ("name", "variable"), [("cuda", "PYTORCH_NVML_BASED_CUDA_CHECK"), ("mlu", "PYTORCH_CNDEV_BASED_MLU_CHECK")]
)
def test_looking_for_devices_does_not_start_the_driver(
    name: str, variable: str, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)  # which importing DeepSpeed sets
    module = fake(name)
    assert device_kind(name).is_available()
    assert module.seen_variables[variable] == "1"
    assert variable not in os.environ


def test_the_device_decides_about_bf16(fake: Any) -> None:
    fake("npu", count=1)
    assert not device_kind("npu").supports_bf16()
    assert not hardware.is_bf16_available()
    assert hardware.is_fp16_available()


def test_mps(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("mps", count=1)
    kind = device_kind("mps")
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
    assert default_device() == torch.device("mps")
    assert hardware.is_mps_available()
    assert not hardware.is_mps_available(min_version="99")
    kind.set_device(None)
    assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major < 15)
    assert kind.supports_bf16()


def test_rocm_is_cuda_by_another_name(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("cuda")
    assert hardware.is_cuda_available()
    assert not hardware.is_rocm_available()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert hardware.is_rocm_available()


def test_the_first_gaudi_has_no_fp16(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("hpu", count=1)
    experimental = types.ModuleType("habana_frameworks.torch.utils.experimental")
    experimental.synDeviceType = types.SimpleNamespace(synDeviceGaudi="gaudi")  # type: ignore[attr-defined]
    experimental._get_device_type = lambda: "gaudi"  # type: ignore[attr-defined]
    parts = experimental.__name__.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, experimental.__name__, experimental)
    with cleared(hardware.is_hpu_available, devices.is_gaudi1):
        kind = device_kind("hpu")
        assert not kind.supports_fp16()
        assert kind.supports_bf16()
        assert kind.device(0) == torch.device("hpu")


def test_a_library_that_does_not_work_here_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "torch_musa.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    with cleared(devices._load):
        assert not device_kind("musa").is_available()


def test_counting_is_asked_for_separately(fake: Any) -> None:
    fake("sdaa")
    with cleared(hardware.is_sdaa_available):
        assert hardware.is_sdaa_available()
        assert hardware.is_sdaa_available(check_device=True)


# ---- XLA ------------------------------------------------------------------------------------------------------------


def test_xla_counts_its_own_processes(xla: Any) -> None:
    kind = detect_device_kind()
    assert kind.name == "xla"
    place = kind.own_place()
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert kind.device(5) == torch.device("xla", 0)
    assert kind.device_count() == 4
    kind.barrier(None)
    assert len(xla.tags) == 1
    kind.empty_cache()
    assert libraries.is_torch_xla_available(check_is_tpu=True)
    assert not libraries.is_torch_xla_available(check_is_gpu=True)
    assert hardware.is_bf16_available()
    assert not hardware.is_bf16_available(ignore_tpu=True)
    with pytest.raises(ValueError, match="check_is_tpu and check_is_gpu are both True"):
        libraries.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_torch_xla_that_only_found_a_cpu_is_not_used(xla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(xla_runtime, "_chosen", [None])  # it was torch_xla that has set it
    monkeypatch.setattr(xla_runtime, "_has_tpu", lambda: False)
    assert detect_device_kind().name == "cpu"
    monkeypatch.setattr(xla_runtime, "_chosen", ["CPU"])
    assert detect_device_kind().name == "xla"
    monkeypatch.delenv("PJRT_DEVICE")
    assert detect_device_kind().name == "cpu"
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert detect_device_kind().name == "xla"
    monkeypatch.setattr(libraries, "USE_TORCH_XLA", False)
    libraries.is_torch_xla_available.cache_clear()
    assert detect_device_kind().name == "cpu"


def test_xla_has_one_state_of_random_numbers_a_seed(xla: Any) -> None:
    seeds: list[int] = []
    xla.set_rng_state, xla.get_rng_state = seeds.append, lambda: seeds[-1]
    set_seed(7)
    assert seeds == [7]
    assert capture_rng_state()["xm_seed"] == 7
    restore_rng_state({"xm_seed": 9})
    assert seeds == [7, 9]


def test_spmd_is_chosen_before_the_device_is(xla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = detect_device_kind()
    assert isinstance(kind, XlaKind)
    kind.device()
    assert not kind.is_spmd()
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    with pytest.raises(RuntimeError, match=r"use_spmd\(\) was called after .* XLA_USE_SPMD=1"):
        kind.is_spmd()


@pytest.mark.parametrize(
    ("given", "expected"),
    [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), (1, "cuda:1"), (torch.device("cuda"), "cuda:3"), ("cpu", "cpu"),
     ("meta", "meta"), ("xpu", "xpu"), ("mps", "mps:0")],
)  # fmt: skip
def test_devices_are_resolved_as_tensors_have_them(given: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert resolve_device("cuda") == torch.device("cuda"), "of another machine, it stays as it is"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there is none here
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device(given) == torch.device(expected)
