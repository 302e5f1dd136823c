"""Weights that are brought in advance: right whatever runs, and where they are expected."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model
from accel_bigmodel.hooks.align import AlignDevicesHook, WeightSlot
from accel_bigmodel.hooks.hook import remove_hook_from_submodules
from accel_bigmodel.offload.collect import get_state_dict_offloaded_model
from accel_bigmodel.streaming import start
from accel_bigmodel.streaming.arena import Arena
from accel_bigmodel.streaming.report import offloading_hooks
from accel_bigmodel.streaming.settings import Streaming
from accel_bigmodel.streaming.start import ReadAhead
from accel_bigmodel.streaming.units import Unit, UnitWeight
from accel_bigmodel.tensors import align_module_device
from accel_bigmodel.weights.write import write_model_folder
from tests.bigmodel.lanes import CPU, LateLane, PromptDevice, ThreadLane, prompt_lane, stream_through
from tests.bigmodel.trees import mapped_file, saved_and_loaded
from tests.support.short_run import examples

WIDTH = 8


class Scale(nn.Module):
    """Holds a weight of its own around another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.weight) + self.weight


class Table(nn.Module):
    """Returns a view of its weight, as embeddings of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self) -> dict[str, Any]:
        return {"rows": (self.weight[1:3], 3)}


class Walk(nn.Module):
    """Runs its parts in the order it is told."""

    def __init__(self, kinds: list[int], tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(len(kinds))
        self.parts = nn.ModuleList([self._part(kind) for kind in kinds])
        self.table = Table()
        linears = [part for part in self.modules() if isinstance(part, nn.Linear)]
        if tied and len(linears) > 1:
            linears[-1].weight = linears[0].weight

    @staticmethod
    def _part(kind: int) -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH)
        return (linear, Scale(linear), nn.Sequential(linear, nn.LayerNorm(WIDTH)), nn.BatchNorm1d(WIDTH).eval())[kind]

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        rows = self.table()["rows"][0]
        for index in order:
            x = torch.tanh(self.parts[index % len(self.parts)](x))
        return x + rows.sum(0)


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
orders = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def walk_pair(kinds: list[int], tied: bool = False) -> tuple[Walk, Walk]:
    """A model that stays as it is, and the same, offloaded."""
    plain = Walk(kinds, tied)
    offloaded = copy.deepcopy(plain)
    cpu_offload(offloaded, "cpu", offload_buffers=True)
    return plain, offloaded


@pytest.mark.takes_turns
@examples(150)
@given(
    kinds=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    tied=st.booleans(),
    passes=st.lists(
        st.tuples(orders, st.sampled_from(["no_grad", "inference", "grad", "grad, then copied"])),
        min_size=2,
        max_size=7,
    ),
    depth=st.integers(0, 4),
    budget=st.sampled_from([None, 1, 2048, 5000, 40_000]),
)
@example(  # new blocks while gradients are on need a larger arena, which holds the block that runs next
    kinds=[0, 0, 0],
    tied=False,
    passes=[([0, 0, 2, 8], "no_grad"), ([1, 1], "grad"), ([2], "no_grad")],
    depth=2,
    budget=None,
)
def test_any_order_of_modules_gives_what_the_plain_model_gives(
    kinds: list[int], tied: bool, passes: list[tuple[list[int], str]], depth: int, budget: int | None
) -> None:
    plain, offloaded = walk_pair(kinds, tied)
    lane = LateLane()
    stream: Any = stream_through(offloaded, lane, Streaming(depth, budget))
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    for order, context in passes:
        with contexts.get(context, torch.enable_grad)():
            assert torch.equal(offloaded(X, order), plain(X, order))
        if context == "grad, then copied":
            offloaded = copy.deepcopy(offloaded)
            stream = offloaded.table._hf_hook.stream
            lane = stream.lane
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    if budget is not None and not any(context.startswith("grad") for _, context in passes) and lane.allocated_bytes:
        largest = max(block.num_bytes for block in stream.blocks)
        assert lane.allocated_bytes[-1] <= max(budget, largest) or len(lane.allocated_bytes) > 1


@pytest.mark.parametrize("lane_kind", ["thread", "stream"])
def test_all_lanes_give_what_the_plain_model_gives(lane_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, offloaded = walk_pair([0, 1, 2, 3, 0, 1], tied=True)
    lane = ThreadLane(CPU) if lane_kind == "thread" else prompt_lane(monkeypatch)
    stream = stream_through(offloaded, lane, Streaming(2, 4000))
    with torch.no_grad():
        for order in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2], [5, 4, 3, 2], [0, 1, 2, 3, 4, 5]):
            assert torch.equal(offloaded(X, order), plain(X, order))
    assert len(stream.blocks) > 3
    remove_hook_from_submodules(offloaded)
    assert torch.equal(offloaded(X, [0, 5]), plain(X, [0, 5]))


def test_memory_waits_for_copies_and_threads_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _, offloaded = walk_pair([0, 1, 2, 3, 0, 1], tied=True)
    lane: Any = prompt_lane(monkeypatch)
    allocated: list[int] = []
    allocate = lane.allocate

    def noted(num_bytes: int) -> torch.Tensor:
        memory: torch.Tensor = allocate(num_bytes)
        allocated.append(memory.data_ptr())
        return memory

    monkeypatch.setattr(lane, "allocate", noted)
    stream_through(offloaded, lane, Streaming(2, 4000))
    with torch.no_grad():
        for order in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
            offloaded(X, order)
    assert allocated
    assert lane.recorded == allocated, "each allocation once, the arena among them"
    assert set(PromptDevice.copied_on) == {CPU}, "no copy is made on the thread's own device, which is GPU 0"


def test_nothing_is_waited_for_once_the_order_is_known() -> None:
    _, offloaded = walk_pair([0] * 6)
    lane = LateLane()
    stream_through(offloaded, lane, Streaming(depth=2, budget=4096))
    order = list(range(6))
    with torch.no_grad():
        for _ in range(3):
            offloaded(X, order)
        begun = lane.num_begun
        lane.late.clear()
        offloaded(X, order)
        assert lane.num_begun > begun  # it does not all fit
        assert lane.late == []
        offloaded(X, order[::-1])  # brought late, and remembered
        assert lane.late
        offloaded(X, order[::-1])
        lane.late.clear()
        offloaded(X, order[::-1])
        assert lane.late == []
    _, offloaded = walk_pair([0, 0])
    lane = LateLane()
    stream_through(offloaded, lane, Streaming(budget="1MB"))
    with torch.no_grad():
        for _ in range(5):
            offloaded(X, [0, 1])
    assert lane.num_begun == 1, "what fits stays"


def test_weights_that_change_are_brought_again() -> None:
    plain, offloaded = walk_pair([0, 0, 0])
    lane = LateLane()
    stream_through(offloaded, lane, Streaming())
    weights = next(hook for _, hook in offloading_hooks(offloaded)).weights_map.dataset
    order = [0, 1, 2]
    with torch.no_grad():
        for _ in range(3):
            offloaded(X, order)
        weights["parts.1.weight"].mul_(2)
        plain.parts[1].weight.mul_(2)
        assert torch.equal(offloaded(X, order), plain(X, order))
        weights["parts.2.bias"] = torch.ones(WIDTH)
        plain.parts[2].bias.fill_(1)
        assert torch.equal(offloaded(X, order), plain(X, order))
        hook = offloaded.parts[0]._hf_hook
        hook.weights_map = {"weight": torch.eye(WIDTH), "bias": torch.zeros(WIDTH)}  # as adapters do
        plain.parts[0].weight.copy_(torch.eye(WIDTH))
        plain.parts[0].bias.zero_()
        assert torch.equal(offloaded(X, order), plain(X, order))


def test_packed_weights_can_be_replaced_and_take_no_second_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, offloaded = walk_pair([0, 0, 1], tied=True)
    stream = stream_through(offloaded, prompt_lane(monkeypatch), Streaming(budget=4096))
    weights = next(hook for _, hook in offloading_hooks(offloaded)).weights_map.dataset
    before = weakref.ref(weights["parts.1.weight"])
    order = [0, 1, 2]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(offloaded(X, order), plain(X, order))
        for _, hook in offloading_hooks(offloaded):
            for slot in hook.slots:
                slot.source = slot.ready = None  # which a CPU, unlike an accelerator, used in place in the first pass
        gc.collect()
        assert before() is None
        assert weights["parts.0.weight"].data_ptr() == weights["parts.2.inner.weight"].data_ptr()
        assert {block.packed is not None for block in stream.blocks} == {True}
        weights["parts.0.weight"].add_(1)
        plain.parts[0].weight.add_(1)
        assert torch.equal(offloaded(X, order), plain(X, order))
        weights["parts.1.weight"] = torch.full((WIDTH, WIDTH), 0.5)
        plain.parts[1].weight.fill_(0.5)
        assert torch.equal(offloaded(X, order), plain(X, order))
        offloaded.offload_report()  # copies are timed from now on
        for _ in range(2):
            offloaded(X, order)
    report = offloaded.offload_report()
    assert report.verdict.startswith(("transfer-bound", "compute-bound"))


def test_gradients_flow_through_streamed_weights() -> None:
    plain, offloaded = walk_pair([0, 1, 2, 0])
    stream_through(offloaded, LateLane(), Streaming(2, 3000))
    order = [0, 1, 2, 3]
    for _ in range(3):
        mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
        offloaded(mine, order).sum().backward()
        plain(theirs, order).sum().backward()
        assert torch.equal(mine.grad, theirs.grad)
        with torch.no_grad():
            assert torch.equal(offloaded(X, order), plain(X, order))


def test_views_of_weights_survive_and_an_error_in_a_forward_pass_leaves_a_working_model() -> None:
    plain, offloaded = walk_pair([0, 1, 2])
    stream_through(offloaded, LateLane(), Streaming(1, 1))
    with torch.no_grad():
        for _ in range(3):
            offloaded(X, [0, 1, 2])
        rows = offloaded.table()["rows"]
        offloaded(X, [0, 1, 2])
        assert torch.equal(rows[0], plain.table.weight[1:3])
        assert rows[1] == 3
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                offloaded(X[:, :3], [0])
            with pytest.raises(RuntimeError, match="must match"):
                offloaded(X[:, :3], [1])
        for _ in range(2):
            assert torch.equal(offloaded(X, [0, 1, 2]), plain(X, [0, 1, 2]))


def test_weights_of_another_dtype_are_converted_by_a_thread(tmp_path: Path) -> None:
    plain = Walk([0, 2, 1, 0])
    half = {name: tensor.half() for name, tensor in plain.state_dict().items()}
    offloaded = copy.deepcopy(plain)
    plain.load_state_dict(half)
    index = {name: {"safetensors_file": str(tmp_path / "model.safetensors"), "dtype": "float32"} for name in half}
    write_model_folder(half, tmp_path)
    cpu_offload(offloaded, "cpu", state_dict=half, streaming=Streaming(depth=1, budget=1000))
    from_memory = [offloaded]
    for copied in (copy.deepcopy, saved_and_loaded):
        from_memory += [copied(offloaded), copied(copied(offloaded))]
    from_disk = copy.deepcopy(plain)
    dispatch_model(from_disk, {"parts": "disk", "table": "cpu"}, offload_index=index)
    assert from_disk.parts[0]._hf_hook.stream is not None
    for model in (*from_memory, from_disk):
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(X, [0, 1, 2, 3]), plain(X, [0, 1, 2, 3]))
        assert ("disk -> cpu" if model is from_disk else "cpu -> cpu") in str(model.offload_report())
    streams = [model.parts[0]._hf_hook.stream for model in from_memory]
    assert all(isinstance(stream.lane, ThreadLane) for stream in streams)
    assert len({id(stream.lane) for stream in streams}) == len(streams), "each copy has a thread of its own"
    assert threading.active_count() < 20


def test_weights_in_files_are_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "SMALL_BYTES", 1)
    plain = Walk([0, 1, 2])
    offloaded = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    assert isinstance(offloaded.parts[0]._hf_hook.stream, ReadAhead)
    for order in ([0, 1, 2], [2, 1, 0], [2, 1, 0]):
        assert torch.equal(offloaded(X, order), plain(X, order))
    report = offloaded.offload_report()
    assert report.verdict == "nothing is copied: the CPU uses the weights in place"
    assert [(part.place, part.device) for part in report.modules] == [("disk", "cpu")]


@examples(60)
@given(passes=st.lists(orders, min_size=1, max_size=5), window=st.integers(0, 5000))
def test_files_are_read_in_the_order_in_which_modules_run(passes: list[list[int]], window: int) -> None:
    class Recorder(ReadAhead):
        def _ask_for(self, hook: Any) -> None:
            asked.append(hook)

    asked: list[Any] = []
    hooks = [AlignDevicesHook("cpu", weights_map={}) for _ in range(10)]
    units = [
        (hook, Unit("", hook, [UnitWeight(WeightSlot("", {}, "", X), torch.zeros(1 << 14), torch.float32, None)]))
        for hook in hooks
    ]
    reader = Recorder(units, window_bytes=window * 16)
    assert reader.hooks == hooks
    for order in passes:
        for index in order:
            reader.fetch(hooks[index])
            assert hooks[index] not in reader._ahead
            assert reader._ahead_bytes == len(reader._ahead) * (1 << 16)
    for repeat in range(4):
        asked.clear()
        for hook in hooks:
            assert repeat < 2 or window == 0 or next(iter(reader._ahead)) is hook
            reader.fetch(hook)


def weights_of(model: nn.Module) -> Any:
    """The mapping that holds the offloaded weights of a model."""
    return next(hook for _, hook in offloading_hooks(model)).weights_map.dataset


copies = pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])


@copies
@pytest.mark.parametrize("num_passes", [0, 1, 2, 3], ids=["not used", "recorded", "packed", "reused"])
@pytest.mark.parametrize("lane_kind", ["late", "thread", "stream"])
def test_a_copy_of_a_streamed_model_streams_on_its_own(
    copied: Callable[[nn.Module], Any], num_passes: int, lane_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, offloaded = walk_pair([0, 1, 2, 3, 0], tied=True)
    lane = {"late": LateLane, "thread": lambda: ThreadLane(CPU), "stream": lambda: prompt_lane(monkeypatch)}[
        lane_kind
    ]()
    settings, order = Streaming(1, 5000), [0, 1, 2, 3, 4]
    stream = stream_through(offloaded, lane, settings)
    with torch.no_grad():
        for _ in range(num_passes):
            offloaded(X, order)
        other = copied(offloaded)
        its_stream = other.parts[0]._hf_hook.stream
        assert its_stream is not stream
        assert its_stream.lane is not lane
        assert type(its_stream.lane) is type(lane)
        assert its_stream.settings == settings
        expected = plain(X, order)
        weights_of(other)["parts.1.weight"].zero_()
        for _ in range(3):
            assert torch.equal(offloaded(X, order), expected), "what was written to the copy is not in the original"
        plain.parts[1].weight.zero_()
        remove_hook_from_submodules(offloaded)
        for parameter in offloaded.parameters():
            parameter.fill_(3)
        del offloaded, stream, lane
        gc.collect()
        for _ in range(4):
            assert torch.equal(other(X, order), plain(X, order))
    assert its_stream.blocks
    names = {block.name for block in its_stream.blocks}
    assert "?" not in " ".join(names)
    weights = weights_of(other)
    assert weights["parts.0.weight"].data_ptr() == weights["parts.4.weight"].data_ptr(), "tied weights stay tied"
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    other(mine, order).sum().backward()
    plain(theirs, order).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_packed_weights_are_saved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, offloaded = walk_pair([0, 3, 1, 0])  # floats, and the numbers of batches
    stream = stream_through(offloaded, prompt_lane(monkeypatch), Streaming())
    with torch.no_grad():
        for _ in range(3):
            offloaded(X, [0, 1, 2, 3])
    assert {block.packed is not None for block in stream.blocks} == {True}
    state = get_state_dict_offloaded_model(offloaded)
    loaded = saved_and_loaded(state, weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    one = weights_of(offloaded)["parts.0.weight"]
    assert len(pickle.dumps(one)) < one.nbytes + 2000, "without the weights beside it"


@copies
def test_a_copy_leaves_on_disk_what_is_there(
    copied: Callable[[nn.Module], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "SMALL_BYTES", 1)
    plain = Walk([0, 1, 2])
    offloaded: Any = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    for _ in range(2):
        offloaded(X, [0, 1, 2])
    other = copied(copied(offloaded))
    assert torch.equal(other(X, [0, 1, 2]), plain(X, [0, 1, 2]))
    hook = other.parts[0]._hf_hook
    assert "0.weight.dat" in mapped_file(hook.weights_map["weight"])
    reader = hook.stream
    assert isinstance(reader, ReadAhead)
    assert reader is not offloaded.parts[0]._hf_hook.stream
    assert reader.hooks == [hook for _, hook in offloading_hooks(other)]
    assert torch.equal(other(X, [2, 1]), plain(X, [2, 1]))


@copies
def test_a_copy_computes_with_its_own_weights_in_place(copied: Callable[[nn.Module], Any]) -> None:
    plain, offloaded = walk_pair([0, 1], tied=True)
    for _ in range(2):
        offloaded(X, [0, 1])
    other = copied(offloaded)
    weights = weights_of(other)
    assert weights["parts.0.weight"].data_ptr() == weights["parts.1.inner.weight"].data_ptr()
    weights["parts.0.weight"].mul_(2)
    assert torch.equal(offloaded(X, [0, 1]), plain(X, [0, 1]))
    with torch.no_grad():
        plain.parts[0].weight.mul_(2)  # type: ignore[operator, union-attr]
    assert torch.equal(other(X, [0, 1]), plain(X, [0, 1]))


def test_weights_can_be_looked_at_and_collected_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, offloaded = walk_pair([0, 1])
    stream_through(offloaded, prompt_lane(monkeypatch), Streaming())
    with torch.no_grad():
        for _ in range(2):
            offloaded(X, [0, 1])
            with align_module_device(offloaded.parts[0]):
                assert torch.equal(offloaded.parts[0].weight, plain.parts[0].weight)
            with align_module_device(offloaded.parts[0], torch.device("meta")):
                assert offloaded.parts[0].weight.is_meta
            collected = get_state_dict_offloaded_model(offloaded)
            for name, tensor in plain.state_dict().items():
                assert torch.equal(collected[name], tensor)


def test_the_report_takes_neighbours_together() -> None:
    _, offloaded = walk_pair([0, 0, 2])
    stream_through(offloaded, LateLane(), Streaming(1, 1))
    assert offloaded.offload_report().verdict == "nothing is offloaded"
    with torch.no_grad():
        for _ in range(2):
            offloaded(X, [0, 1, 2])
    text = str(offloaded.offload_report())
    lines = text.splitlines()
    assert lines[0].split() == ["module", "is", "on", "runs", "on", "size"]
    assert lines[2].split()[:3] == ["parts.0", "...", "table"]
    assert lines[2].split()[-2:] == ["1.06", "kB"]
    assert "cpu -> cpu" in text
    assert text.splitlines()[-1].startswith("transfer-bound at 0.0 of 0.0 GB/s")


@pytest.mark.takes_turns
@pytest.mark.parametrize("compiled", ["whole", "blocks before", "blocks after"])
def test_streamed_models_can_be_compiled(compiled: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(10)])

    def compile_blocks() -> None:
        for index, block in enumerate(model):
            model[index] = torch.compile(block, backend=backend)

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    graphs: list[Any] = []
    plain, model = build(), build()
    if compiled == "blocks before":
        compile_blocks()
    cpu_offload(model, "cpu")
    stream_through(model, LateLane(), Streaming(depth=1, budget=2048))
    if compiled == "blocks after":
        compile_blocks()
    run = torch.compile(model, backend=backend) if compiled == "whole" else model
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(X), plain(X))
    assert graphs
    torch.compiler.reset()


@examples(200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_an_arena_gives_away_no_byte_twice(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(torch.zeros(100, dtype=torch.uint8), ["start"])
    taken: list[Any] = []
    touched: dict[int, str] = dict.fromkeys(range(100), "start")
    for number, (takes, size) in enumerate(steps):
        if takes or not taken:
            region = arena.take(size)
            if region is None:
                continue
            own = set(range(region.begin, region.begin + size))
            assert all(own.isdisjoint(range(other.begin, other.begin + other.memory.numel())) for other in taken)
            assert {touched[byte] for byte in own} - {""} <= set(region.busy_until)
            for byte in own:
                touched[byte] = ""
            region.busy_until = [f"use {number}"]
            taken.append(region)
        else:
            region = taken.pop(size % len(taken))
            arena.give_back(region)
            for byte in range(region.begin, region.begin + region.memory.numel()):
                touched[byte] = region.busy_until[0]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"depth": -1}, r"depth=-1.*0 or more"),
        ({"depth": 1.5}, r"depth=1.5"),
        ({"budget": "2 apples"}, r"'2 apples' is not a size"),
        ({"budget": -5}, r"budget=-5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Streaming(**arguments)


def test_weights_that_need_more_than_a_copy_go_their_own_way() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), nn.Conv2d(2, 2, 3))
    plain = copy.deepcopy(model)
    cpu_offload(model, "cpu")
    copy.deepcopy(model)  # there is nothing to stream where weights are used in place
    stream = stream_through(model, LateLane(), Streaming())
    images = torch.randn(1, 2, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(images), plain(images))
    assert [unit.name for block in stream.blocks for unit in block.units] == ["1"]
