"""Weights that are offloaded and read outside of the forward pass of their module, as programs by hand do and modules of torch do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from accel_bigmodel.weights.write import write_model_folder
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import set_module_tensor_to_device
from tests.bigmodel.trees import saved_and_loaded

CPU = torch.device("cpu")


class Parts(nn.Module):
    """Modules that torch or programs read from outside, a parameter and a buffer of its own, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.weight_norm = parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.free = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.linear(self.embedding(ids)) + self.free + self.shift)
        return result


IDS = torch.tensor([[1, 5, 9], [0, 2, 10]])
X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
READS: dict[str, Callable[[Any], Any]] = {
    "matrix product": lambda m: X @ m.linear.weight,
    "F.linear": lambda m: F.linear(X, m.linear.weight, m.linear.bias),
    ".T": lambda m: X @ m.linear.weight.T,
    ".t()": lambda m: X @ m.linear.weight.t(),
    "a tied head in a loss": lambda m: F.cross_entropy(F.linear(X, m.head.weight).view(-1, 11), IDS.view(-1)),
    "F.conv1d": lambda m: F.conv1d(X.transpose(1, 2), m.conv.weight, m.conv.bias),
    "F.embedding": lambda m: F.embedding(IDS, m.embedding.weight),
    "an index": lambda m: m.embedding.weight[IDS],
    "rows": lambda m: torch.stack(list(m.linear.weight)),
    "a sum": lambda m: m.linear.weight.sum(),
    "a norm": lambda m: m.linear.weight.norm(),
    "operators": lambda m: 1 + m.free * 2 - X / m.free,
    "a stack": lambda m: torch.stack([m.linear.bias, m.free]),
    "einsum": lambda m: torch.einsum("bsd,ed->bse", X, m.linear.weight),
    "where": lambda m: torch.where(X > 0, m.free, X),
    "double()": lambda m: m.linear.weight.double().sum(),
    "casts one after the other": lambda m: m.linear.weight.half().float() * 1,
    "to(dtype)": lambda m: m.linear.weight.to(torch.float64) * 1,
    "clone()": lambda m: m.linear.weight.clone(),
    "detach()": lambda m: m.linear.weight.detach() * 1,
    ".data": lambda m: m.linear.weight.data * 1,
    "cpu()": lambda m: m.linear.weight.cpu(),
    "tolist()": lambda m: m.linear.weight.tolist(),
    "item()": lambda m: m.free[0].item(),
    "numpy()": lambda m: m.linear.weight.detach().numpy().tolist(),
    "equal": lambda m: torch.equal(m.linear.weight, m.linear.weight),
    "a comparison": lambda m: m.free > 0,
    "repr": lambda m: repr(m.linear.weight),
    "a format": lambda m: f"{m.free[0]:.4f}",
    "a buffer": lambda m: m.shift * 2,
    "F.batch_norm": lambda m: F.batch_norm(X.transpose(1, 2), m.norm.running_mean, m.norm.running_var, m.norm.weight),
    "attention": lambda m: m.attention(X, X, X)[0],
    "LSTM": lambda m: m.lstm(X)[0],
    "a transformer layer": lambda m: m.layer(X),
    "a transformer layer's fast path": lambda m: m.layer.eval()(X),
    "weight norm": lambda m: m.weight_norm(X),
    "a parametrized weight": lambda m: m.weight_norm.weight * 1,
    "spectral norm": lambda m: m.spectral_norm.eval()(X),
    "functional_call": lambda m: torch.func.functional_call(m.linear, dict(m.linear.named_parameters()), (X,)),
    "all parameters": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "the state dict": lambda m: [value * 1 for value in m.state_dict().values()],
    "a saved state dict": lambda m: list(saved_and_loaded(m.state_dict(), weights_only=True).values()),
    "a copied weight": lambda m: copy.deepcopy(m.linear.weight) * 1,
    "a copied model": lambda m: copy.deepcopy(m).linear.weight * 1,
}
MAPS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, CPU),
    "cpu, with buffers": lambda model, folder: cpu_offload(model, CPU, offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, folder, CPU, offload_buffers=True),
    "mixed": lambda model, folder: dispatch_model(
        model,
        {name: "disk" if index % 3 == 1 else "cpu" for index, name in enumerate([*dict(model.named_children()), "free", "shift"])},
        main_device=CPU,
        offload_dir=folder,
        force_hooks=True,
    ),
}  # fmt: skip


def is_same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return actual.device == expected.device and actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], torch.Tensor):
        return len(actual) == len(expected) and all(map(is_same, actual, expected))
    return bool(actual == expected)


@pytest.mark.parametrize("offload", MAPS.values(), ids=MAPS)
def test_a_weight_is_read_wherever_it_is(offload: Callable[[nn.Module, Path], Any], tmp_path: Path) -> None:
    wrong = []
    for number, (name, read) in enumerate(READS.items()):
        model, plain = Parts(), Parts()
        offload(model, tmp_path / str(number))
        for when in ("before", "after"):
            if not is_same(read(model), read(plain)):
                wrong.append(f"{name}, {when} a forward pass")
            assert torch.equal(model(IDS), plain(IDS))
    assert wrong == []


@pytest.mark.parametrize("offload", MAPS.values(), ids=MAPS)
def test_what_describes_a_weight_says_that_it_is_offloaded(
    offload: Callable[[nn.Module, Path], Any], tmp_path: Path
) -> None:
    model, plain = Parts(), Parts()
    offload(model, tmp_path / "weights")
    for weight, expected in zip(model.linear.parameters(), plain.linear.parameters(), strict=True):
        assert isinstance(weight, nn.Parameter)
        assert weight.is_meta
        assert weight.device.type == "meta"
        assert (weight.shape, weight.dtype, weight.numel()) == (expected.shape, expected.dtype, expected.numel())
        assert weight.requires_grad
        assert len(weight) == len(expected)


def test_what_moves_to_an_offloaded_weight_goes_where_it_computes(tmp_path: Path) -> None:
    model = Parts()
    cpu_offload(model, CPU)
    device, meta = model.linear.weight.device, torch.device("meta")
    comparisons = [device == meta, meta == device, device != meta, device == CPU, device in {meta}]
    assert comparisons == [True, True, False, False, True]
    assert (device.type, device.index, str(device), repr(device)) == ("meta", None, "meta", "device(type='meta')")
    ones, module = torch.ones(2), nn.Linear(2, 2)
    expected = module.weight.clone()
    for moved in (
        ones.to(device),
        ones.to(device=device),
        torch.zeros_like(ones, device=device) + 1,
        ones.new_ones(2, device=device),
    ):
        assert torch.equal(moved, ones)
    assert torch.equal(module.to(device).weight, expected)
    with torch.device(device):
        assert torch.zeros(2).device == CPU
    file = io.BytesIO()
    torch.save(ones, file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location=device, weights_only=True), ones)  # noqa: TID251 - as programs do
    for copied in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert copied == meta
        assert isinstance(copied, torch.device)
    other = cpu_offload(nn.Linear(2, 2), CPU)
    weight, another = model.linear.weight, other.weight
    remove_hook_from_submodules(model)
    del model, other
    gc.collect()
    assert weight.device == meta  # of a model that is gone
    with pytest.raises(RuntimeError, match="'weight' cannot be read any more"):
        another.sum()


@pytest.mark.parametrize("offload", MAPS.values(), ids=MAPS)
def test_tied_weights_stay_tied(offload: Callable[[nn.Module, Path], Any], tmp_path: Path) -> None:
    model = Parts()
    count = len(list(model.parameters()))
    offload(model, tmp_path / "weights")
    for _ in range(2):
        assert len(list(model.parameters())) == count
        assert model.head.weight is model.embedding.weight
        model(IDS)
    remove_hook_from_submodules(model)
    assert len(list(model.parameters())) == count
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(IDS), Parts()(IDS))


def test_ties_of_weights_of_which_one_never_was_offloaded(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"inner": nn.Linear(4, 4), "outer": nn.Linear(4, 4)})
    model.outer.weight = model.inner.weight
    dispatch_model(model, {"inner": CPU, "outer": "disk"}, main_device=CPU, offload_dir=tmp_path, force_hooks=True)
    remove_hook_from_submodules(model)
    assert model.outer.weight is model.inner.weight


@pytest.mark.filterwarnings("ignore:.*which is a no-op")  # says torch of any tensor on the meta device
def test_what_is_written_to_a_weight_in_cpu_memory_stays() -> None:
    model, plain = Parts(), Parts()
    cpu_offload(model, CPU)
    model(IDS)
    with torch.no_grad():
        for one in (model, plain):
            nn.init.constant_(one.linear.weight, 0.5)
            one.linear.weight[0] = 3.0
            one.linear.weight *= one.free
            one.linear.bias.copy_(one.free)
            torch.add(one.free, 1.0, out=one.free.data)
    assert torch.equal(model.linear.weight, plain.linear.weight)
    assert torch.equal(model(IDS), plain(IDS))
    model.load_state_dict(Parts().state_dict())
    assert torch.equal(model(IDS), Parts()(IDS))


def test_a_weight_on_disk_is_not_written_to(tmp_path: Path) -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear)
    before = copy.deepcopy(linear.weight)
    disk_offload(model, tmp_path, CPU)
    with pytest.raises(RuntimeError, match=r"'0\.weight' is offloaded to disk, where it cannot be written to"):
        nn.init.zeros_(linear.weight)
    assert torch.equal(linear.weight, before)


ASSIGNMENTS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "an attribute": lambda m, new, folder: [
        setattr(module, name, nn.Parameter(weight.detach().clone()))
        for path, module in m.named_modules()
        for name, weight in new.get_submodule(path).named_parameters(recurse=False)
    ],
    "load_state_dict(assign=True)": lambda m, new, folder: m.load_state_dict(new.state_dict(), assign=True),
    "set_module_tensor_to_device": lambda m, new, folder: [
        set_module_tensor_to_device(m, name, CPU, value=weight.detach()) for name, weight in new.named_parameters()
    ],
    "load_checkpoint_in_model": lambda m, new, folder: (
        write_model_folder(new.state_dict(), folder / "new"),
        load_checkpoint_in_model(m, folder / "new"),
    ),
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("assign", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_a_weight_that_is_assigned_is_the_weight(
    assign: Callable[[Any, Any, Path], Any], is_used: bool, tmp_path: Path
) -> None:
    new, x = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))), torch.ones(1, 3)
    model = copy.deepcopy(new)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    dispatch_model(model, {"0": CPU, "1": "disk"}, main_device=CPU, offload_dir=tmp_path / "old", force_hooks=True)
    disk_offload(model[0], tmp_path / "first", CPU)
    if is_used:
        model(x)
    assign(model, new, tmp_path)
    unhooked = copy.deepcopy(model)
    remove_hook_from_submodules(unhooked)
    assert torch.equal(unhooked(x), new(x))
    for _ in range(2):
        assert torch.equal(model(x), new(x))
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in model.state_dict().items())
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), new(x))


def test_functional_calls_compute_with_the_weights_that_they_are_given(tmp_path: Path) -> None:
    plain, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(1, 3)
    model = disk_offload(copy.deepcopy(plain), tmp_path, CPU)
    for value in (1.0, 2.0):
        weights = {
            name: torch.full_like(weight, value, requires_grad=True) for name, weight in plain.named_parameters()
        }
        outputs = [torch.func.functional_call(one, weights, (x,)) for one in (model, plain)]
        assert torch.equal(*outputs)
        assert all(map(torch.equal, *(torch.autograd.grad(output.sum(), weights.values()) for output in outputs)))
    unhooked = copy.deepcopy(model)
    remove_hook_from_submodules(unhooked)
    assert torch.equal(unhooked(x), plain(x))
    assert torch.equal(model(x), plain(x))
    assert model[0]._hf_hook.assigned_slots == ()  # what is offloaded is prefetched again
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), plain(x))


def test_offloaded_weights_stay_so_when_a_forward_pass_fails_and_can_be_parametrized(tmp_path: Path) -> None:
    plain, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.ones(1, 3)
    model = disk_offload(copy.deepcopy(plain), tmp_path, CPU)
    expected = plain(x)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert torch.equal(model(x), expected)
    assert all(weight.is_meta for weight in model.parameters())
    parametrizations.weight_norm(model[1])
    assert torch.allclose(model(x), expected)
    torch.nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    assert torch.allclose(model(x), expected)
    remove_hook_from_submodules(model)
    assert torch.allclose(model(x), expected)


@pytest.mark.parametrize("is_used", [False, True])
def test_casts_and_switches_of_a_whole_model_read_nothing_and_hold(is_used: bool) -> None:
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    cpu_offload(model, CPU)
    x = torch.ones(1, 3)
    if is_used:
        model(x)
    for one in (model, plain):
        one.double().requires_grad_(False)
    assert model.weight.is_meta
    assert torch.equal(model(x.double()), plain(x.double()))
    assert not model(x.double()).requires_grad


def test_weights_on_disk_come_back_when_hooks_are_removed(tmp_path: Path) -> None:
    model = Parts()
    write_model_folder(model.state_dict(), tmp_path / "model", "1GB")
    with init_empty_weights():
        empty = Parts()
    load_checkpoint_and_dispatch(
        empty, tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    remove_hook_from_submodules(empty)
    assert not any(parameter.is_meta for parameter in empty.parameters())
    assert torch.equal(empty(IDS), model(IDS))
    dispatch_model(empty, {"": CPU})
    assert torch.equal(empty(IDS), model(IDS))


def test_an_offloaded_model_is_dispatched_anew(tmp_path: Path) -> None:
    model = disk_offload(Parts(), tmp_path / "first", CPU, offload_buffers=True)
    names = [*dict(model.named_children()), "free", "shift"]
    for number, places in enumerate((["cpu", "disk"], ["disk", "cpu"], ["cpu", "cpu"])):
        device_map = {name: places[index % 2] for index, name in enumerate(names)}
        dispatch_model(model, device_map, offload_dir=tmp_path / str(number))
        assert torch.equal(model(IDS), Parts()(IDS))
