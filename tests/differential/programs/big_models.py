"""Sizes, budgets, device maps, ties, hooks and offloading of many models."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import done, record
from torch import nn

from accelerate import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    align_module_device,
    calculate_maximum_sizes,
    check_device_map,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    extract_submodules_state_dict,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    has_offloaded_params,
    load_offloaded_weight,
    named_module_tensors,
    offload_state_dict,
    offload_weight,
    retie_parameters,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import clean_device_map, compute_module_total_buffer_size, get_module_leaves


class Block(nn.Module):
    """Two layers, a norm, and perhaps a buffer."""

    def __init__(self, width: int, inner: int, buffer: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(inner, width, bias=buffer % 2 == 0)
        if buffer:
            self.register_buffer("kept", torch.ones(buffer))
            self.register_buffer("left", torch.ones(buffer), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Chosen(nn.Module):
    """A model by chance: embeddings, blocks in lists of lists, a head that may be tied, weights of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        width = chance.choice([4, 8])
        self.embed = nn.Embedding(chance.choice([8, 32]), width)
        blocks = [
            Block(width, chance.choice([4, 16, 32]), chance.choice([0, 0, 3, 40])) for _ in range(chance.randint(1, 5))
        ]
        self.blocks = nn.ModuleList(blocks)
        if chance.random() < 0.4:
            self.scale = nn.Parameter(torch.ones(width))
        if chance.random() < 0.4:
            self.extra = nn.Sequential(nn.Linear(width, width), nn.ModuleDict({"a": nn.Linear(width, width)})["a"])
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=chance.random() < 0.5)
        if chance.random() < 0.4:
            self.head.weight = self.embed.weight
        if len(blocks) > 1 and chance.random() < 0.3:
            blocks[-1].up = blocks[0].up if blocks[0].up.weight.shape == blocks[-1].up.weight.shape else blocks[-1].up
        if chance.random() < 0.3:
            self.half()
        if chance.random() < 0.2:
            self.embed.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "scale"):
            x = x * self.scale
        if hasattr(self, "extra"):
            x = self.extra(x)
        return self.head(x)


MODELS = 24


def facts(seed: int) -> None:
    model = Chosen(seed)
    special = {name: torch.int8 for index, name in enumerate(dict(model.named_parameters())) if index % 3 == 0}
    for dtype in (None, torch.float16, "int8", torch.int64, "int4"):
        options = {"dtype": _dtype(dtype)}
        record(f"sizes {seed} {dtype}", lambda options=options: ordered(compute_module_sizes(model, **options)))
        record(
            f"sizes_special {seed} {dtype}",
            lambda o=options: ordered(compute_module_sizes(model, special_dtypes=special, **o)),
        )
        record(f"buffer_size {seed} {dtype}", lambda o=options: float(compute_module_total_buffer_size(model, **o)))
    record(f"sizes_of_buffers {seed}", lambda: ordered(compute_module_sizes(model, buffers_only=True)))
    record(f"maximum_sizes {seed}", lambda: calculate_maximum_sizes(model))
    record(f"tied {seed}", lambda: find_tied_parameters(model))
    record(f"leaves {seed}", lambda: sorted(get_module_leaves(compute_module_sizes(model))))
    for classes in ([], ["Block"], ["Block", "Sequential"]):
        record(
            f"max_layer {seed} {classes}",
            lambda classes=classes: get_max_layer_size(
                list(model.named_children()), compute_module_sizes(model), classes
            ),
        )
    for buffers, recurse, persistent in itertools.product((True, False), repeat=3):
        record(
            f"tensors {seed} {buffers} {recurse} {persistent}",
            lambda b=buffers, r=recurse, p=persistent: [
                name for name, _ in named_module_tensors(model, b, recurse=r, remove_non_persistent=p)
            ],
        )


def ordered(sizes: Any) -> dict[Any, Any]:
    return {key: float(sizes[key]) if isinstance(sizes[key], int) else sizes[key] for key in sorted(sizes, key=str)}


def _dtype(name: Any) -> Any:
    from accelerate.utils import CustomDtype

    return CustomDtype.INT4 if name == "int4" else name


def maps(seed: int) -> None:
    model = Chosen(seed)
    total = int(compute_module_sizes(model)[""])
    alike = len({compute_module_sizes(block)[""] for block in model.blocks}) == 1
    buffers_too = "buffers" if any(True for _ in model.buffers()) else "weights"
    chance = random.Random(seed)
    budgets: list[dict[Any, int]] = [
        {0: total * 2, "cpu": total * 2}, {0: total // 2, 1: total // 2, "cpu": total}, {0: total // 3, "cpu": total // 3},
        {0: total // 4, 1: total // 4, 2: total // 4, "cpu": total // 8}, {0: 0, "cpu": total}, {"cpu": total // 2},
        {0: total // 3, 1: 0, 2: total * 2}, {0: total, 1: total // 10, "cpu": 0},
    ]  # fmt: skip
    budgets += [{device: int(total * chance.random()) for device in (0, 1, "cpu")} for _ in range(14)]
    options = list(
        itertools.product(
            ([], ["Block"], ["Block", "Sequential"]), (False, True), (False, True), (None, torch.float16)
        )
    )
    for number, budget in enumerate(budgets):
        for place, (classes, buffers, fallback, dtype) in enumerate(options):
            if (number + place) % 3:
                continue
            given = {"no_split_module_classes": classes, "dtype": dtype}
            name = f"{seed} {number} {classes} {buffers=} {fallback=} {dtype}"
            record(
                f"map {buffers_too} {name}",
                lambda budget=budget, buffers=buffers, fallback=fallback, given=given: ordered(
                    infer_auto_device_map(
                        model, dict(budget), offload_buffers=buffers, fallback_allocation=fallback, **given
                    )
                ),
            )
            if not buffers and not fallback:
                record(
                    f"map_in_full {buffers_too} {name}",
                    lambda budget=budget, given=given: ordered(
                        infer_auto_device_map(model, dict(budget), clean_result=False, **given)
                    ),
                )
            for low in (False, True):
                record(
                    f"balanced {low} {alike or not classes} {number} {name}",
                    lambda budget=budget, given=given, low=low: get_balanced_memory(
                        model, dict(budget), low_zero=low, **given
                    ),
                )


def checked(seed: int) -> None:
    model = Chosen(seed)
    chance = random.Random(seed)
    names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
    for number in range(20):
        device_map = {
            name: chance.choice([0, 1, "cpu", "disk"]) for name in chance.sample(names, chance.randint(0, 6))
        }
        record(f"check_device_map {seed} {number}", lambda m=device_map: check_device_map(model, m))
        places = {name: chance.choice([0, 1]) for name in ("embed", "blocks", "head")}
        leaves = {
            name: places[name.split(".")[0]] for name, _ in model.named_parameters() if name.split(".")[0] in places
        }
        record(f"clean_device_map {seed} {number}", lambda m=leaves: ordered(clean_device_map(dict(m))))
        tied = find_tied_parameters(model)
        record(f"check_tied {seed} {number}", lambda t=tied, m=device_map: check_tied_parameters_on_same_device(t, m))
    state = model.state_dict()
    for number in range(10):
        chosen = chance.sample(names, 3)
        record(f"extract {seed} {number}", lambda c=chosen: sorted(extract_submodules_state_dict(state, c)))


def placed(seed: int) -> None:
    """Models in parts give what whole ones give."""
    ids = torch.arange(6).reshape(2, 3)
    names = [name for name, _ in Chosen(seed).named_children()]
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            device_map = {name: chance.choice(["cpu", "cpu", "disk"]) for name in names}
            model = Chosen(seed).float()
            if hasattr(model, "scale"):
                device_map["scale"] = "cpu"
            expected = model(ids)

            def see(model=model, device_map=device_map, number=number, expected=expected):
                placed = dispatch_model(
                    model, dict(device_map), main_device="cpu", offload_dir=f"{folder}/{number}", force_hooks=True
                )
                devices = {name: tensor.device for name, tensor in placed.named_parameters()}
                same = torch.equal(placed(ids), expected)
                offloaded = {name: has_offloaded_params(module) for name, module in placed.named_modules()}
                files = sorted(path.name for path in Path(folder, str(number)).glob("*"))
                return [same, devices, offloaded, files, placed.hf_device_map == device_map]

            record(f"dispatch {seed} {number} {sorted(device_map.items())}", see)
        torch.save(Chosen(seed).float().state_dict(), f"{folder}/weights.bin")

        def whole(how: str) -> Any:
            model = Chosen(seed).float()
            expected = model(ids)
            if how == "cpu":
                cpu_offload(model, torch.device("cpu"))
            elif how == "disk":
                disk_offload(model, f"{folder}/all", torch.device("cpu"))
            else:
                with init_empty_weights(include_buffers=False):
                    empty = Chosen(seed).float()
                model = load_checkpoint_and_dispatch(empty, f"{folder}/weights.bin", {"": "cpu"})
            devices = {name: tensor.device for name, tensor in model.named_parameters()}
            return [torch.equal(model(ids), expected), devices]

        for how in ("cpu", "disk", "load"):
            record(f"whole {seed} {how}", lambda how=how: whole(how))


class Told(ModelHook):
    """Notes when it is called, and changes what goes through."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append(f"{self.name} init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"{self.name} pre")
        return tuple(arg + 1 for arg in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.seen.append(f"{self.name} post")
        return output * 2

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append(f"{self.name} detach")
        return module


def hooks() -> None:
    for appended in itertools.product((False, True), repeat=3):
        seen: list[str] = []
        layer = nn.Linear(2, 2)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        for number, append in enumerate(appended):
            add_hook_to_module(layer, Told(str(number), seen), append=append)
        out = layer(torch.ones(1, 2))
        kind = type(layer._hf_hook).__name__
        members = len(getattr(layer._hf_hook, "hooks", [0]))
        remove_hook_from_module(layer)
        after = [hasattr(layer, "_hf_hook"), hasattr(layer, "_old_forward"), layer(torch.ones(1, 2))]
        record(
            f"hooks {appended}", lambda seen=seen, out=out, k=kind, m=members, after=after: [seen, out, k, m, after]
        )
    seen = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for name, module in model.named_modules():
        add_hook_to_module(module, SequentialHook(Told(f"{name} a", seen), Told(f"{name} b", seen)))
    model(torch.ones(1, 2))
    remove_hook_from_module(model[1], recurse=True)
    remove_hook_from_submodules(model)
    record("nested_hooks", lambda: seen)
    layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook(execution_device="cpu", offload=True))
    record("aligned", lambda: [layer.weight.device, layer(torch.ones(1, 2)).device, layer.weight.device])
    with align_module_device(layer, "cpu"):
        record("align_module_device", lambda: [layer.weight.device, has_offloaded_params(layer)])
    record("aligned_after", lambda: [layer.weight.device, layer._hf_hook.execution_device])
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    attach_execution_device_hook(block, "cpu")
    record("execution_device", lambda: [type(getattr(m, "_hf_hook", None)).__name__ for m in block.modules()])


def chains() -> None:
    """Models that take turns on a device."""
    models = [nn.Linear(2, 2) for _ in range(3)]
    hooks_made: list[Any] = []
    for model in models:
        _, hook = cpu_offload_with_hook(model, "cpu", prev_module_hook=hooks_made[-1] if hooks_made else None)
        hooks_made.append(hook)
    record(
        "chain",
        lambda: [model(torch.ones(1, 2)).shape for model in models] + [type(hook).__name__ for hook in hooks_made],
    )
    for hook in hooks_made:
        hook.offload()
        hook.remove()
    record("chain_removed", lambda: [hasattr(model, "_hf_hook") for model in models])


def files() -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        index: dict[str, Any] = {}
        for number, (dtype, shape) in enumerate(itertools.product(dtypes, ((2, 3), (), (1,), (0, 2)))):
            weight = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
            record(
                f"offload_weight {dtype} {shape}",
                lambda w=weight, n=number: offload_weight(w, f"w.{n}", folder, index),
            )
            record(
                f"load_offloaded {dtype} {shape}",
                lambda n=number: load_offloaded_weight(f"{folder}/w.{n}.dat", index[f"w.{n}"]),
            )
        record("index", lambda: index)
        state = {"a.weight": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}
        offload_state_dict(Path(folder) / "state", state)
        record(
            "offload_state_dict",
            lambda: {p.name: p.read_bytes().hex() for p in sorted(Path(folder, "state").glob("*"))},
        )


def small() -> None:
    sizes = (
        "1GB",
        "1GiB",
        "5MB",
        "5MiB",
        "3KB",
        "3KiB",
        "1.5GB",
        "7",
        12,
        "1TB",
        "-1GB",
        "1 GB",
        "1gb",
        "abc",
        "",
        "5Mb",
        "5Gb",
    )
    for size in sizes:
        record(f"file_size {size!r}", lambda size=size: convert_file_size_to_int(size))
    for dtype in (
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int8",
        "bool",
        "uint8",
        "complex64",
        "float8_e4m3fn",
        "uint16",
    ):
        record(f"bytes {dtype}", lambda dtype=dtype: dtype_byte_size(getattr(torch, dtype)))
    for name in ("INT4", "INT2", "FP8"):
        record(f"bytes {name}", lambda name=name: dtype_byte_size(_custom(name)))
    for memory in (
        {"cpu": "1GB"},
        {0: "1GiB", "cpu": 5},
        {"disk": "1MB", "cpu": 1},
        {},
        {"cpu": 10, 1: 3, 0: 4},
        {"gpu": 1},
    ):
        record(f"max_memory {memory}", lambda memory=memory: get_max_memory(dict(memory)))
    layer = nn.Linear(2, 2)
    values = {"none": None, "right": torch.zeros(2, 2), "half": torch.zeros(2, 2).half(), "wrong": torch.zeros(3, 2)}
    for (how, value), device, dtype in itertools.product(values.items(), ("cpu", "meta"), (None, torch.float16)):

        def see(value=value, device=device, dtype=dtype):
            mine = nn.Linear(2, 2)
            set_module_tensor_to_device(mine, "weight", device, value, dtype)
            return [mine.weight.device, mine.weight.dtype, type(mine.weight).__name__, mine.weight.requires_grad]

        record(f"set_tensor {how} {device} {dtype}", see)
    record("set_unknown", lambda: set_module_tensor_to_device(layer, "nothing", "cpu"))
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    retie_parameters(tied, [["a.weight", "b.weight"], ["a.bias", "c.bias"]])
    record(
        "retied",
        lambda: [tied["a"].weight is tied["b"].weight, tied["a"].bias is tied["c"].bias, find_tied_parameters(tied)],
    )


def _custom(name: str) -> Any:
    from accelerate.utils import CustomDtype

    return CustomDtype[name]


if __name__ == "__main__":
    for seed in range(MODELS):
        facts(seed)
        maps(seed)
        checked(seed)
        if seed % 3 == 0:
            placed(seed)
    hooks()
    chains()
    files()
    small()
    done()
