"""What models spread over four GPUs, the CPU and the disk do, on the GPU machine; each function is one task."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_bigmodel.device_map.check import bytes_to_move
from accel_bigmodel.weights import contents, placing
from accel_bigmodel.weights.write import write_model_folder
from tests.cuda_shapes.recorder import COUNTERS, DRIVER, Recorder, Report

WIDTH, LAYERS = 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)])


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def _expected() -> torch.Tensor:
    with torch.no_grad():
        return build()(inputs())


def _map(places: list[Any]) -> dict[str, Any]:
    return {str(index): places[index * len(places) // LAYERS] for index in range(LAYERS)}


def _passes(model: nn.Module, recorder: Recorder, expected: torch.Tensor, device: str) -> dict[str, Any]:
    """Four forward passes, the last one recorded; whether all were right."""
    report = Report()
    right = []
    x = inputs().to(device)
    with torch.no_grad():
        for _ in range(3):
            right.append(torch.equal(model(x).cpu(), expected))
        with recorder.recording(report):
            output = model(x)
        right.append(torch.equal(output.cpu(), expected))
    return report.as_json() | {"right": all(right), "devices": sorted({str(p.device) for p in model.parameters()})}


def dispatched(places: list[Any], main: str, folder: str) -> dict[str, Any]:
    """`dispatch_model` with an explicit map."""
    expected = _expected()
    with Recorder() as recorder:
        model = dispatch_model(build(), _map(places), main_device=None, offload_dir=folder)
        return _passes(model, recorder, expected, main)


def inferred(folder: str) -> dict[str, Any]:
    """A map of four small GPUs and the rest on the CPU."""
    expected = _expected()
    model = build()
    block = sum(parameter.nbytes for parameter in model[0].parameters())
    limits: dict[Any, int] = {index: 2 * block for index in range(4)} | {"cpu": 100 * block}
    with Recorder() as recorder:
        places = infer_auto_device_map(model, limits, no_split_module_classes=["Block"])
        actual = _passes(dispatch_model(model, places), recorder, expected, "cuda:0")
    return actual | {"places": sorted({str(place) for place in places.values()})}


def loaded(places: list[Any], folder: str) -> dict[str, Any]:
    """A checkpoint loaded onto several devices."""
    expected = _expected()
    write_model_folder(build().state_dict(), Path(folder) / "model", "20KB")
    with init_empty_weights():
        model = build()
    with Recorder() as recorder:
        load_checkpoint_and_dispatch(model, Path(folder) / "model", _map(places), offload_folder=Path(folder) / "off")
        return _passes(model, recorder, expected, "cuda:1")


def streamed(folder: str) -> dict[str, Any]:
    """All weights in CPU memory, copied to the third GPU by a stream of its own."""
    expected = _expected()
    torch.cuda.set_device(3)
    DRIVER.pretended_reset()
    with Recorder() as recorder:
        model = cpu_offload(build(), torch.device("cuda"))
        model.offload_report()  # type: ignore[operator]  # copies may be timed only once it was asked for
        actual = _passes(model, recorder, expected, "cuda:3")
        actual["report"] = str(model.offload_report())  # type: ignore[operator]
        del model
        gc.collect()
        torch.cuda.synchronize()
    return actual | {"contexts": [index for index in range(8) if DRIVER.pretended_context(index)]}


def loaded_by_threads(folder: str) -> dict[str, Any]:
    """A large checkpoint read by threads, on rank 3 of a machine, to `"cuda"`."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]
    write_model_folder(nn.Sequential(*layers).state_dict(), Path(folder) / "model", "5MB")
    torch.cuda.set_device(3)
    DRIVER.pretended_reset()
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)])
    with Recorder():
        load_checkpoint_in_model(model, Path(folder) / "model", device_map={"": "cuda"})
        right = all(torch.equal(one.weight.cpu(), other.weight) for one, other in zip(model, layers, strict=True))
    return {
        "right": right,
        "devices": sorted({str(parameter.device) for parameter in model.parameters()}),
        "contexts": [index for index in range(8) if DRIVER.pretended_context(index)],
    }


class Sizes(nn.Module):
    """Tensors of all sizes: of many slices, of a part of one, of one number, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(3000, 3500, bias=False)
        self.small = nn.Linear(300, 7)
        self.norm = nn.BatchNorm1d(5)
        self.odd = nn.Linear(999, 2001, bias=False)
        self.none = nn.Parameter(torch.empty(0, 4))


SIZES_MAP = {"large": 1, "small": "cuda:3", "norm": "cuda", "odd": "cpu", "none": 0}


def loaded_in_slices(case: str, folder: str) -> dict[str, Any]:
    """A checkpoint that threads read to GPUs through pinned buffers."""
    torch.manual_seed(0)
    state = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in Sizes().state_dict().items()}
    path = Path(folder) / "model"
    write_model_folder(state, path, "20MB", safe_serialization=case != "a file of torch")
    torch.cuda.set_device(2)
    DRIVER.pretended_reset()
    places: Any = SIZES_MAP
    dtype = None
    with Recorder():
        if case == "in place":
            model, places = Sizes().to("cuda:3"), None
        elif case == "in place, converted":
            model, places = Sizes().to("cuda:3").double(), None
        else:
            with init_empty_weights():
                model = Sizes()
            dtype = torch.float16 if "converted" in case else None
        if "one after the other" in case:
            placing.MAX_RAW_BYTES = 1
        own = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        load_checkpoint_in_model(model, path, device_map=places, dtype=dtype)
        loaded = model.state_dict()
        right = [torch.equal(loaded[name].cpu(), state[name].to(loaded[name].dtype)) for name in state]
        stay = {name: tensor.data_ptr() for name, tensor in loaded.items()} == own
    return {
        "right": all(right),
        "in place": stay,
        "dtypes": sorted({str(tensor.dtype) for tensor in loaded.values()}),
        "devices": sorted({str(tensor.device) for tensor in loaded.values()}),
        "num_pinned": DRIVER.pretended_count(COUNTERS.index("pinned")),
        "contexts": [index for index in range(8) if DRIVER.pretended_context(index)],
    }


def loading_that_fails(folder: str) -> dict[str, Any]:
    """A file that cannot be read to its end."""
    write_model_folder(Sizes().state_dict(), Path(folder) / "model", "20MB")
    read_into, begun = contents.FileBytes.read_into, []

    def fails_late(source: contents.FileBytes, buffer: torch.Tensor, begin: int) -> None:
        begun.append(begin)
        if begin > 20_000_000:
            raise OSError("a bad block")
        read_into(source, buffer, begin)

    contents.FileBytes.read_into = fails_late  # type: ignore[method-assign]
    with init_empty_weights():
        model = Sizes()
    message = ""
    with Recorder():
        try:
            load_checkpoint_in_model(model, Path(folder) / "model", device_map={"": 1})
        except OSError as error:
            message = str(error)
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")]
    return {"message": message, "threads": alive, "empty": model.large.weight.is_meta, "begun": len(begun)}


def moved_to_the_current_gpu(folder: str) -> dict[str, Any]:
    """What a map to `"cuda"` would move of a model that is there already."""
    model = build().to("cuda:3")
    torch.cuda.set_device(3)
    return {"moved": {str(device): size for device, size in bytes_to_move(model, {"": "cuda"}).items()}}


def _anew(model: nn.Module, how: str) -> nn.Module:
    """A copy of a model, by `copy.deepcopy` or by `torch.save` and `torch.load`."""
    if how == "deepcopy":
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)  # noqa: TID251 - as programs do
    return loaded


def _offloaded(kind: str, folder: str) -> nn.Module:
    """A model of which some or all weights are offloaded."""
    if kind == "half on the CPU":
        return dispatch_model(build(), _map([0, "cpu"]))
    if kind == "on two GPUs, the CPU and the disk":
        return dispatch_model(build(), _map([0, 1, "cpu", "disk"]), offload_dir=folder)
    if kind == "cpu_offload":
        return cpu_offload(build(), 0)
    if kind == "cpu_offload, converted":
        return cpu_offload(
            build(), 0, state_dict={name: tensor.double() for name, tensor in build().state_dict().items()}
        )
    return disk_offload(build(), folder, 0)


def copied(kind: str, how: str, folder: str) -> dict[str, Any]:
    """An offloaded model and copies of it, made before it ran and later: all right, and each on its own."""
    x, plain = inputs(), build()
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(left).sum().backward()
    expected = plain(x).detach()
    with Recorder() as recorder:
        model = _offloaded(kind, folder)
        copies = [_anew(model, how)]
        with torch.no_grad():
            model(x.to("cuda:0"))
            copies.append(_anew(model, how))
            model(x.to("cuda:0"))
            copies.append(_anew(model, how))
        actual = [_passes(one, recorder, expected, "cuda:0") for one in [*copies, model]]
        gone = weakref.ref(model[-1])
        del model
        gc.collect()
        assert gone() is None, "a copy keeps nothing of the original"
        actual.append(_passes(copies[-1], recorder, expected, "cuda:0"))
        copies[-1](right.to("cuda:0")).sum().backward()
    return {
        "right": [each["right"] for each in actual],
        "waits": [each["waits"] for each in actual],
        "gradient right": bool(torch.equal(left.grad, right.grad)),  # type: ignore[arg-type]
    }


class Tied(nn.Module):
    """A model whose first and last weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = Block()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(x)))  # type: ignore[no-any-return]


def copied_with_tied_weights(places: list[Any], how: str, folder: str) -> dict[str, Any]:
    """Where the tied weights of a model and its copy are while they compute; the head's are offloaded."""
    x = inputs()
    plain = Tied()(x).detach()
    addresses: list[int] = []

    def used(model: nn.Module) -> bool:
        """Whether the output is right, and the head computes with the weight of the embedding."""
        head: Any = model.head
        handle = head._old_forward
        head._old_forward = lambda x: addresses.append(head.weight.data_ptr()) or handle(x)
        with torch.no_grad():
            output = model(x.to("cuda:0"))
        head._old_forward = handle
        return torch.equal(output.cpu(), plain) and addresses[-1] == model.embed.weight.data_ptr()  # type: ignore[union-attr]

    with Recorder():
        model = dispatch_model(Tied(), dict(zip(["middle", "embed", "head"], places, strict=True)))
        other = _anew(model, how)
        tied = [used(model), used(other), used(model), used(other)]
        apart = addresses[0] != addresses[1]
        with torch.no_grad():
            other.embed.weight.zero_()  # type: ignore[union-attr, operator]
            is_zero = not other(x.to("cuda:0")).cpu().any()
        del other
        gc.collect()
        return {"tied": [*tied, used(model)], "apart": apart, "zero": is_zero}


def state_dicts(folder: str) -> dict[str, Any]:
    """The state dicts of offloaded models with buffers, which stay on the GPU."""

    def with_buffers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Tied(), nn.BatchNorm1d(WIDTH))

    expected = with_buffers().state_dict()
    devices, right = set(), []
    with Recorder():
        for model in (
            cpu_offload(with_buffers(), 0),
            disk_offload(with_buffers(), Path(folder) / "all", 0),
            dispatch_model(with_buffers(), {"0": 0, "1": "cpu"}),
            dispatch_model(with_buffers(), {"0": "disk", "1": 0}, offload_dir=Path(folder) / "part"),
        ):
            state = get_state_dict_offloaded_model(model)
            norm = {f"1.{name}": tensor for name, tensor in model[1].state_dict().items()}  # type: ignore[index, union-attr, operator]
            norm = get_state_dict_from_offload(model[1], "1.weight", norm)  # type: ignore[index, arg-type]
            devices |= {str(tensor.device) for tensor in [*state.values(), *norm.values()]}
            right += [torch.equal(state[name], expected[name]) for name in expected]
            right += [torch.equal(norm[name], expected[name]) for name in norm]
            if not model[0].embed.weight.is_meta:  # type: ignore[union-attr]
                right.append(state["0.embed.weight"] is state["0.head.weight"])
    return {"devices": sorted(devices), "right": all(right)}


def reports(folder: str) -> list[str]:
    """Reports on a model that has not run yet, by the name of its device."""
    with Recorder():
        return [str(cpu_offload(build(), device).offload_report()) for device in (0, "cuda", "cuda:0")]  # type: ignore[operator]


def body_of_gpu_test(name: str, arguments: list[Any], folder: str) -> str:
    """The body of a test of tests/gpu/test_gpu_streaming.py."""
    from tests.gpu import test_gpu_streaming

    with Recorder():
        getattr(test_gpu_streaming, name)(*arguments, Path(folder))
    return "done"
