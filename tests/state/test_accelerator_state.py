"""`AcceleratorState`: mixed precision, plugins, and what a second one may say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.distributed as dist

from accel_state import accelerator_state, devices, nvidia
from accel_state.accelerator_state import AcceleratorState
from accel_state.devices import DeviceKind
from accel_state.enums import DistributedType, DynamoBackend, PrecisionType
from accel_state.errors import MissingLibraryError
from accel_state.mesh import ParallelismConfig
from accel_state.processes import PartialState, kind_of
from accel_state.settings.compile import TorchDynamoPlugin
from accel_state.settings.fsdp import FullyShardedDataParallelPlugin
from accel_state.settings.plugin import Plugin
from tests.support.ranks import ranks


def make(**arguments: Any) -> AcceleratorState:
    return AcceleratorState(_from_accelerator=True, **arguments)


@dataclass
class Sharded(Plugin):
    """Stands in for FSDP."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    works_on: ClassVar[frozenset[str]] = frozenset({"cuda", "cpu"})

    fsdp_version: int = 2
    attached: list[tuple[str, DistributedType]] = field(default_factory=list)

    def attach(self, state: AcceleratorState) -> None:
        self.attached.append((state.mixed_precision, state.distributed_type))


@dataclass
class LastSpeaks(Plugin):
    """Stands in for Megatron-LM."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM
    works_on: ClassVar[frozenset[str]] = frozenset({"cpu"})
    main_process: ClassVar[Literal["first", "last"]] = "last"


@dataclass
class Speedy(Plugin):
    """Stands in for DeepSpeed."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.DEEPSPEED
    works_on: ClassVar[frozenset[str]] = frozenset({"cpu"})
    starts_own_group: ClassVar[bool] = True

    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    selected: bool = False

    def mixed_precision_in_use(self) -> str:
        return next((name for name, values in self.deepspeed_config.items() if values["enabled"]), "no")

    def select(self, _from_accelerator_state: bool = False) -> None:
        assert _from_accelerator_state
        self.selected = True

    def _unselect(self) -> None:
        self.selected = False


@dataclass
class Nowhere(Plugin):
    """Works on no device of this machine and changes nothing about the run."""

    works_on: ClassVar[frozenset[str]] = frozenset({"npu", "cuda"})


# ---- a first one ----------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    state = make()
    assert state.initialized
    assert state.mixed_precision == "no"
    assert state.device == torch.device("cpu")
    assert state.distributed_type == DistributedType.NO
    assert (state.deepspeed_plugin, state.fsdp_plugin, state.megatron_lm_plugin, state.torch_tp_plugin) == (None,) * 4
    assert (state.parallelism_config, state.device_mesh, state.is_fsdp2) == (None, None, False)
    assert state.dynamo_plugin.backend == DynamoBackend.NO
    assert not state.use_distributed
    assert state.is_main_process
    assert repr(state) == f"{PartialState()!r}\nMixed precision type: no\n"
    state.wait_for_everyone()
    with state.split_between_processes([1]) as part:
        assert part == [1]


def test_nobody_but_an_accelerator_makes_the_first_one() -> None:
    with pytest.raises(ValueError, match=r"AcceleratorState is not initialized: create an `Accelerator\(\)` first"):
        AcceleratorState()
    assert PartialState._shared_state == {}
    make(mixed_precision="bf16")
    assert AcceleratorState().mixed_precision == "bf16"


@pytest.mark.parametrize("given", ["bf16", "BF16", PrecisionType.BF16])
def test_spellings_of_a_number_format(given: Any) -> None:
    assert make(mixed_precision=given).mixed_precision == "bf16"


def test_the_environment_gives_the_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert make().mixed_precision == "fp16"
    AcceleratorState._reset_state()
    assert make(mixed_precision="no").mixed_precision == "no"


def test_unknown_number_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="mixed_precision='bf17' is not a mixed precision: use one of no, fp16, bf16, fp8"
    ):
        make(mixed_precision="bf17")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION='half' is not a mixed precision"):
        make()
    assert PartialState._shared_state == {}


def test_8_bit_floats_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_state, "is_fp8_available", lambda: False)
    with pytest.raises(MissingLibraryError, match="mixed_precision='fp8' needs the library"):
        make(mixed_precision="fp8")
    monkeypatch.setattr(accelerator_state, "is_fp8_available", lambda: True)
    assert make(mixed_precision="fp8").mixed_precision == "fp8"


@pytest.fixture
def cuda_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has this process compute on a GPU of the compute capability that is passed, as far as anybody asks."""
    monkeypatch.setattr(accelerator_state, "is_fp8_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    PartialState()
    PartialState._shared_state["device"] = torch.device("cuda", 0)

    def set_capability(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        nvidia.check_cuda_fp8_capability.cache_clear()

    yield set_capability
    nvidia.check_cuda_fp8_capability.cache_clear()


def test_gpus_without_8_bit_floats_compute_in_fp16(cuda_0: Any) -> None:
    cuda_0(8, 6)
    with pytest.warns(
        UserWarning, match="'cuda:0' does not compute in 8-bit floats .*'fp16' is used instead of 'fp8'"
    ):
        state = make(mixed_precision="fp8")
    assert state.mixed_precision == "fp16"
    assert AcceleratorState(mixed_precision="fp8").mixed_precision == "fp16", "the same wish contradicts nothing"
    with pytest.raises(ValueError, match="mixed_precision='bf16' contradicts mixed_precision='fp16'"):
        AcceleratorState(mixed_precision="bf16")


@pytest.mark.parametrize(("capability", "emulates"), [((8, 9), False), ((8, 0), True)])
def test_8_bit_floats_are_used_where_gpus_have_or_emulate_them(cuda_0: Any, capability: Any, emulates: bool) -> None:
    cuda_0(*capability)
    assert make(mixed_precision="fp8", _emulates_fp8=emulates).mixed_precision == "fp8"
    assert AcceleratorState(mixed_precision="fp8").mixed_precision == "fp8"


def test_the_first_gaudi_computes_in_bf16_instead_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_state, "is_fp8_available", lambda: True)
    monkeypatch.setattr(devices, "is_gaudi1", lambda: True)
    PartialState()
    PartialState._shared_state["device"] = torch.device("hpu")
    with pytest.warns(UserWarning, match="'hpu' does not compute in 8-bit floats .*'bf16' is used instead of 'fp8'"):
        assert make(mixed_precision="fp8").mixed_precision == "bf16"


def test_cpu_must_be_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    PartialState()
    make(cpu=True)  # here it makes no difference
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    PartialState()
    with pytest.raises(ValueError, match="cpu=True, but this process already uses the device 'meta'"):
        make(cpu=True)


def test_resetting_keeps_the_place_unless_told() -> None:
    state = make()
    AcceleratorState._reset_state()
    assert PartialState().initialized
    with pytest.raises(
        AttributeError, match=r"`AcceleratorState` object has no attribute '\w+' now.* create an `Accelerator\(\)`"
    ):
        _ = state.mixed_precision
    assert not hasattr(PartialState(), "mixed_precision")
    with pytest.raises(
        AttributeError, match=r"`PartialState` .* 'mixed_precision': .*Read `accelerator.mixed_precision`"
    ):
        _ = PartialState().mixed_precision
    for _ in range(2):
        make()
        assert PartialState().initialized
        PartialState._reset_state()  # by itself: the next one finds it again
    make()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


# ---- a second one ---------------------------------------------------------------------------------------------------


def test_a_second_one_may_repeat_what_is_settled() -> None:
    config = ParallelismConfig()
    first = make(mixed_precision="bf16", cpu=True, parallelism_config=config)
    second = make(mixed_precision="bf16", cpu=True, parallelism_config=config, dynamo_plugin=TorchDynamoPlugin())
    assert second.__dict__ is first.__dict__
    assert make().mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' contradicts mixed_precision='bf16'"),
        ({"mixed_precision": "half"}, "mixed_precision='half' is not a mixed precision"),
        ({"dynamo_plugin": TorchDynamoPlugin(backend="eager")}, "dynamo_backend='EAGER' contradicts .*='NO'"),
        ({"fsdp_plugin": Sharded()}, "fsdp_plugin=True contradicts fsdp_plugin=False"),
        ({"deepspeed_plugin": Speedy()}, "deepspeed_plugin=True contradicts deepspeed_plugin=False"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, r"(?s)parallelism_config=.*tp_size=2.* contradicts"),
    ],
)
def test_a_second_one_may_not_contradict(arguments: dict[str, Any], message: str) -> None:
    make(mixed_precision="bf16")
    with pytest.raises(ValueError, match=message):
        make(**arguments)
    assert AcceleratorState().mixed_precision == "bf16"


# ---- plugins --------------------------------------------------------------------------------------------------------


def test_a_plugin_for_several_processes_says_that_it_has_no_effect_in_one() -> None:
    plugin = Sharded()
    with pytest.warns(UserWarning, match="fsdp_plugin has no effect: .* Start the script with `accelerate launch`"):
        state = make(mixed_precision="bf16", fsdp_plugin=plugin)
    assert state.distributed_type == DistributedType.NO
    assert state.fsdp_plugin is plugin
    assert not state.is_fsdp2
    assert plugin.attached == [("bf16", DistributedType.NO)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"torch_tp_plugin": Nowhere()}, "torch_tp_plugin=Nowhere cannot train on 'cpu': it works on cuda, npu"),
        (
            {"deepspeed_plugin": Speedy(), "fsdp_plugin": Sharded()},
            "deepspeed_plugin and fsdp_plugin are different training engines",
        ),
        ({"deepspeed_plugin": {}}, "deepspeed_plugin={} is empty"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, r"tp_size=2 = 2 processes, but the run has 1"),
    ],
)
def test_plugins_that_cannot_train_here_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)
    assert AcceleratorState._shared_state == {}


def test_one_deepspeed_plugin_is_in_use() -> None:
    plugin = Speedy({"bf16": {"enabled": True}, "fp16": {"enabled": False}})
    state = make(deepspeed_plugin=plugin)
    assert state.distributed_type == DistributedType.DEEPSPEED
    assert state.deepspeed_plugin is state.deepspeed_plugins is plugin
    assert state.mixed_precision == "bf16"
    assert "ds_config: {'bf16'" in repr(state)
    with pytest.raises(ValueError, match=r"no DeepSpeed plugin named 'x': pass deepspeed_plugins="):
        state.get_deepspeed_plugin("x")


def test_several_deepspeed_plugins_take_turns() -> None:
    plugins = {"student": Speedy({"fp16": {"enabled": True}}), "teacher": Speedy()}
    state = make(deepspeed_plugin=plugins)
    assert state.deepspeed_plugin is plugins["student"]
    assert state.mixed_precision == "fp16"
    state.select_deepspeed_plugin("teacher")
    assert state.deepspeed_plugin is plugins["teacher"]
    assert not plugins["student"].selected
    assert state.mixed_precision == "no"
    assert state.get_deepspeed_plugin("student") is plugins["student"]
    with pytest.raises(ValueError, match="no DeepSpeed plugin named 'pupil': choose from 'student', 'teacher'"):
        state.select_deepspeed_plugin("pupil")
    with pytest.raises(ValueError, match="no DeepSpeed plugin named None"):
        state.select_deepspeed_plugin()
    assert state.deepspeed_plugin is plugins["teacher"]


@ranks(2)
def test_sharding_on_the_cpu_is_honoured(rank: int) -> None:
    plugin = Sharded()
    state = make(fsdp_plugin=plugin, mixed_precision="bf16")
    assert state.distributed_type == DistributedType.FSDP
    assert PartialState().distributed_type == DistributedType.MULTI_CPU
    assert state.is_fsdp2
    assert state.use_distributed
    assert plugin.attached == [("bf16", DistributedType.FSDP)]
    assert state.is_main_process == (rank == 0)


@ranks(3)
def test_the_last_process_may_be_the_main_one(rank: int, world: int) -> None:
    state = make(megatron_lm_plugin=LastSpeaks())
    assert state.distributed_type == DistributedType.MEGATRON_LM
    assert state.is_main_process == PartialState().is_main_process == (rank == world - 1)
    assert state.is_local_main_process == (rank == world - 1)


# ---- meshes ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_mesh_is_made(rank: int) -> None:
    state = make(parallelism_config=ParallelismConfig(dp_replicate_size=2))
    assert state.device_mesh is not None
    assert state.device_mesh.mesh_dim_names == ("dp_replicate",)
    assert list(state.device_mesh.get_coordinate() or ()) == [rank]
    state.destroy_process_group(dist.new_group([0, 1]))
    assert dist.is_initialized()


@ranks(2)
def test_version_1_of_fsdp_knows_no_shared_sequences() -> None:
    with pytest.raises(ValueError, match="cp_size=2 .*fsdp_version=2"):
        make(
            parallelism_config=ParallelismConfig(cp_size=2),
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1),
        )
    assert make(parallelism_config=ParallelismConfig(cp_size=2)).device_mesh is not None


# ---- devices that are not here --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "downcast", "expected"), [("bf16", None, False), ("bf16", "yes", True), ("no", "yes", False)]
)
def test_bf16_on_xla(precision: str, downcast: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    xla = kind_of(torch.device("xla"))
    kind = DeviceKind(
        "meta", xla.distributed_type, "xla", numbered=False, bf16=True, downcast_variable=xla.downcast_variable
    )
    monkeypatch.setattr("accel_state.accelerator_state.kind_of", lambda device: kind)
    monkeypatch.setattr("accel_state.processes.detect_device_kind", lambda: kind)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delenv("ACCELERATE_DOWNCAST_BF16", raising=False)
    if downcast:
        monkeypatch.setenv("ACCELERATE_DOWNCAST_BF16", downcast)
    state = make(mixed_precision=precision)
    assert state.downcast_bfloat is expected
    assert os.environ.get("XLA_DOWNCAST_BF16") == ("1" if expected else None)
    assert "XLA_USE_BF16" not in os.environ  # it would round parameters too


@pytest.mark.filterwarnings("ignore:Please use the new API settings")  # by which torch 2.9.0 announces others
def test_compiled_float32_may_use_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:0")
    monkeypatch.setattr(DeviceKind, "set_device", lambda self, index: None)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        make(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
