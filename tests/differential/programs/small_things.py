"""Versions, switches, environments, seeds, names, folders and the settings of plugins."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import done, record
from torch import nn

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    clear_environment,
    compare_versions,
    convert_bytes,
    extract_model_from_parallel,
    find_executable_batch_size,
    get_pretty_name,
    has_offloaded_params,
    is_port_in_use,
    is_torch_version,
    merge_dicts,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    release_memory,
    set_seed,
    str_to_bool,
)
from accelerate.utils.environment import convert_dict_to_env_variables, get_int_from_env, purge_accelerate_environment
from accelerate.utils.memory import should_reduce_batch_size
from accelerate.utils.other import recursive_getattr

CHANCE = random.Random(0)


def versions() -> None:
    named = ("1.2.3", "1.10", "2.0.0rc1", "2.0.0.dev0", "0", "1.2", "1.2.3+cpu", "10.0", "nonsense")
    for (a, b), how in itertools.product(itertools.product(named, named), ("<", "<=", "==", "!=", ">=", ">", "=>")):
        from packaging.version import InvalidVersion, parse

        try:
            given = parse(a)
        except InvalidVersion:
            continue
        record(f"compare_versions {a} {how} {b}", lambda given=given, how=how, b=b: compare_versions(given, how, b))
    for how in ("<", "==", ">=", ">"):
        record(f"compare_library {how}", lambda how=how: compare_versions("torch", how, "2.13.0"))
        record(f"is_torch_version {how}", lambda how=how: is_torch_version(how, "2.13.0"))
    record("compare_unknown", lambda: compare_versions("no-such-library", "<", "1"))


def numbers() -> None:
    sizes = [0, 1, 999, 1000, 1023, 1024, 1025, 1024**2, 1.5, 1024**3 - 1, -5, 1024**6]
    for size in sizes + [CHANCE.randint(0, 10 ** CHANCE.randint(1, 18)) for _ in range(120)]:
        record(f"convert_bytes {size}", lambda size=size: convert_bytes(size))


def switches() -> None:
    words = (
        "1",
        "0",
        "true",
        "True",
        "TRUE",
        "yes",
        "y",
        "on",
        "t",
        "no",
        "n",
        "off",
        "f",
        "false",
        "False",
        "",
        "2",
        "maybe",
        " 1",
        "None",
    )
    for word in words:
        for to_bool in (False, True):
            record(f"str_to_bool {word!r} {to_bool}", lambda word=word, to_bool=to_bool: str_to_bool(word, to_bool))
        for default in (False, True):

            def see(word=word, default=default):
                with patch_environment(A_SWITCH=word):
                    return parse_flag_from_env("A_SWITCH", default)

            record(f"parse_flag {word!r} {default}", see)

        def choice(word=word):
            with patch_environment(A_CHOICE=word):
                return [parse_choice_from_env("A_CHOICE", "no"), parse_choice_from_env("NO_SUCH", "maybe")]

        record(f"parse_choice {word!r}", choice)

        def whole(word=word):
            with patch_environment(FIRST=word, SECOND="7"):
                return [get_int_from_env(["FIRST", "SECOND"], 3), get_int_from_env(["NOTHING"], 3)]

        record(f"get_int {word!r}", whole)
    record("parse_flag missing", lambda: [parse_flag_from_env("NO_SUCH"), parse_flag_from_env("NO_SUCH", True)])


def environments() -> None:
    def patched() -> Any:
        os.environ["KEPT"] = "old"
        with patch_environment(KEPT="new", lower_case=3, NEW=True):
            inside = {name: os.environ.get(name) for name in ("KEPT", "LOWER_CASE", "lower_case", "NEW")}
        return [inside, {name: os.environ.get(name) for name in ("KEPT", "LOWER_CASE", "NEW")}]

    record("patch_environment", patched)

    def failing() -> Any:
        try:
            with patch_environment(KEPT="new", ADDED="1"):
                raise KeyError("x")
        except KeyError:
            return [os.environ.get("KEPT"), os.environ.get("ADDED")]

    record("patch_environment failing", failing)

    def cleared() -> Any:
        with clear_environment():
            inside = dict(os.environ)
            os.environ["INSIDE"] = "1"
        return [inside, "INSIDE" in os.environ, os.environ["KEPT"]]

    record("clear_environment", cleared)

    @purge_accelerate_environment
    def dirty() -> None:
        os.environ["ACCELERATE_DIRTY"] = "1"
        os.environ["OTHER_DIRTY"] = "1"

    record("purge", lambda: [dirty(), os.environ.get("ACCELERATE_DIRTY"), os.environ.pop("OTHER_DIRTY", None)])
    for values in ({"A": "1", "B": "x y"}, {"A": "x;rm", "B": "ok"}, {"A": "a\nb"}, {"A=B": "1"}, {}):
        record(f"env_variables {values}", lambda values=values: convert_dict_to_env_variables(values))


def dicts() -> None:
    def made(depth: int) -> Any:
        if depth == 0 or CHANCE.random() < 0.3:
            return CHANCE.choice([1, "x", None, [1]])
        return {CHANCE.choice("abc"): made(depth - 1) for _ in range(CHANCE.randint(0, 3))}

    for number in range(80):
        source, target = {"r": made(3)}, {"r": made(3)}
        copies = json.loads(json.dumps([source, target]))
        record(f"merge_dicts {number}", lambda c=copies: [merge_dicts(c[0], c[1]), c[1]])
    record("recursive_getattr", lambda: recursive_getattr(nn.Sequential(nn.Linear(2, 2)), "0.weight.shape"))
    record("recursive_getattr missing", lambda: recursive_getattr(nn.Linear(1, 1), "weight.nothing.at"))


def batch_sizes() -> None:
    messages = (
        "CUDA out of memory. Tried",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory",
        "else",
    )
    for message in messages:
        record(f"should_reduce {message}", lambda message=message: should_reduce_batch_size(RuntimeError(message)))
        record(f"should_reduce_value {message}", lambda message=message: should_reduce_batch_size(ValueError(message)))
    for start, fits, message in itertools.product((1, 3, 16, 100, 128), (0, 1, 5, 60, 200), messages):
        tried: list[int] = []

        def see(start=start, fits=fits, message=message, tried=tried):
            @find_executable_batch_size(starting_batch_size=start)
            def train(batch_size: int, more: int) -> list[Any]:
                tried.append(batch_size)
                if batch_size > fits:
                    raise RuntimeError(message)
                return [batch_size, more]

            return train(4)

        record(f"batch_size {start} {fits} {message}", see)
        record(f"tried {start} {fits} {message}", lambda tried=tried: tried)

    def own_rule() -> Any:
        sizes = iter((50, 20, 10))
        tried = []

        @find_executable_batch_size(starting_batch_size=80, reduce_batch_size_fn=lambda: next(sizes))
        def train(batch_size: int) -> None:
            tried.append(batch_size)
            if batch_size > 10:
                raise RuntimeError(messages[0])

        train()
        train()
        return tried

    record("batch_size own rule", own_rule)

    def wrong_call() -> Any:
        @find_executable_batch_size
        def train(batch_size: int, more: int) -> None: ...

        return train(128, 3)

    record("batch_size given by hand", wrong_call)
    record("release_memory", lambda: release_memory(torch.ones(1), [1], {"a": 2}))


def seeds() -> None:
    Accelerator(cpu=True)
    for seed, specific, deterministic in itertools.product((0, 1, 42, 2**31, 2**32 - 1), (False, True), (False,)):
        set_seed(seed, device_specific=specific, deterministic=deterministic)
        drawn = [random.random(), float(np.random.rand()), torch.rand(2), random.randint(0, 99), torch.randperm(4)]
        record(f"set_seed {seed} {specific}", lambda drawn=drawn: drawn)


def names() -> None:
    class Local:
        pass

    for what in (
        nn.Linear,
        nn.Linear(1, 1),
        torch.optim.SGD,
        len,
        Local,
        Local(),
        3,
        "x",
        names,
        torch.float32,
        [1],
        lambda: 0,
    ):
        record(
            f"pretty {type(what).__name__} {len(str(what)) if not callable(what) else ''}",
            lambda what=what: get_pretty_name(what),
        )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        record("port taken", lambda: is_port_in_use(port))
    record("port free", lambda: is_port_in_use(port))
    record("port as text", lambda: is_port_in_use(str(port)))
    net = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(net, backend="eager")
    for keep in (True, False):
        record(
            f"unwrapped {keep}",
            lambda keep=keep: type(extract_model_from_parallel(compiled, keep_torch_compile=keep)).__name__,
        )
        record(
            f"unwrapped recursively {keep}",
            lambda keep=keep: extract_model_from_parallel(net, recursive=True, keep_fp32_wrapper=keep) is net,
        )
    record("has_offloaded_params", lambda: has_offloaded_params(net))


def folders() -> None:
    cases = itertools.product((None, 1, 2, 5), (True, False), (None, "logs"))
    for limit, automatic, logs in cases:
        with tempfile.TemporaryDirectory() as folder:
            AcceleratorState._reset_state()
            GradientState._reset_state()
            logging_dir = None if logs is None else f"{folder}/{logs}"
            configuration = ProjectConfiguration(
                project_dir=folder, logging_dir=logging_dir, automatic_checkpoint_naming=automatic, total_limit=limit
            )
            accelerator = Accelerator(cpu=True, project_config=configuration)
            accelerator.prepare(nn.Linear(1, 1))
            seen = []
            for _ in range(4):
                target = None if automatic else f"{folder}/own"
                where = accelerator.save_state(target)
                seen.append([str(where).replace(folder, "@"), accelerator.save_iteration])
                seen.append(
                    sorted(
                        str(path.relative_to(folder))
                        for path in Path(folder).rglob("*")
                        if path.name != "manifest.json"
                    )
                )
            record(f"folders {limit=} {automatic=} {logs=}", lambda seen=seen: seen)
            same_place = (
                str(accelerator.logging_dir).replace(folder, "@"),
                str(accelerator.project_dir).replace(folder, "@"),
            )
            record(f"places {limit=} {automatic=} {logs=}", lambda p=same_place: p)
    AcceleratorState._reset_state()
    plain = Accelerator(cpu=True)
    record("save_state without folder", lambda: plain.save_state())
    record("load_state without folder", lambda: plain.load_state())
    record("load_state of nothing", lambda: plain.load_state("/no/such/folder"))
    configuration = ProjectConfiguration()
    configuration.set_directories("somewhere")
    record("set_directories", lambda: configuration)


def handlers() -> None:
    made = (
        AutocastKwargs(), AutocastKwargs(enabled=False, cache_enabled=False), GradScalerKwargs(init_scale=4.0),
        DistributedDataParallelKwargs(bucket_cap_mb=3, static_graph=True), InitProcessGroupKwargs(backend="gloo"),
        ProfileKwargs(activities=["cpu"], record_shapes=True), GradientAccumulationPlugin(num_steps=3),
        DataLoaderConfiguration(split_batches=True), TorchDynamoPlugin(backend="inductor"),
    )  # fmt: skip
    for number, handler in enumerate(made):
        record(f"handler {number}", lambda handler=handler: handler)
        if hasattr(handler, "to_kwargs"):
            record(f"to_kwargs {number}", lambda handler=handler: handler.to_kwargs())
        if hasattr(handler, "to_dict"):
            record(f"to_dict {number}", lambda handler=handler: handler.to_dict())


FSDP = {
    "FSDP_VERSION": ("1", "2"), "FSDP_SHARDING_STRATEGY": ("1", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "3"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "false"), "FSDP_OFFLOAD_PARAMS": ("true", "0"),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), "FSDP_MIN_NUM_PARAMS": ("0", "100"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("Block", "Block,Linear"), "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"), "FSDP_USE_ORIG_PARAMS": ("true", "false"),
    "FSDP_SYNC_MODULE_STATES": ("true", "false"), "FSDP_FORWARD_PREFETCH": ("true", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true", "false"), "FSDP_CPU_RAM_EFFICIENT_LOADING": ("true", "false"),
}  # fmt: skip
SIMPLE = ("fsdp_version", "forward_prefetch", "activation_checkpointing", "cpu_ram_efficient_loading", "use_orig_params",
          "sync_module_states", "min_num_params", "transformer_cls_names_to_wrap", "limit_all_gathers")  # fmt: skip
DYNAMO = {
    "ACCELERATE_DYNAMO_BACKEND": ("no", "INDUCTOR", "eager", "aot_eager"), "ACCELERATE_DYNAMO_MODE": ("default", "max-autotune"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": ("true", "false"), "ACCELERATE_DYNAMO_USE_DYNAMIC": ("true", "false"),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": ("true", "false"),
}  # fmt: skip


def plugins() -> None:
    for number in range(300):
        chosen = {name: CHANCE.choice(values) for name, values in FSDP.items() if CHANCE.random() < 0.4}

        def fsdp(chosen=chosen):
            with patch_environment(**chosen):
                plugin = FullyShardedDataParallelPlugin()
                seen = {name: getattr(plugin, name) for name in SIMPLE}
                seen["state_dict_type"] = plugin.state_dict_type.name
                for name in ("sharding_strategy", "reshard_after_forward", "backward_prefetch", "cpu_offload"):
                    seen[name] = str(getattr(plugin, name))
                policy = plugin.auto_wrap_policy
                seen["policy"] = getattr(getattr(policy, "func", policy), "__name__", str(policy))
                return seen

        record(f"fsdp {number} {chosen}", fsdp)
    for number in range(120):
        chosen = {name: CHANCE.choice(values) for name, values in DYNAMO.items() if CHANCE.random() < 0.6}

        def dynamo(chosen=chosen):
            with patch_environment(**chosen):
                plugin = TorchDynamoPlugin()
                return [dataclasses.asdict(plugin), plugin.to_kwargs(), plugin.to_dict()]

        record(f"dynamo {number} {chosen}", dynamo)
    for value in ("1", "4", "abc", "0"):

        def steps(value=value):
            AcceleratorState._reset_state()
            with patch_environment(ACCELERATE_GRADIENT_ACCUMULATION_STEPS=value):
                return Accelerator(cpu=True).gradient_accumulation_steps

        record(f"accumulation {value}", steps)
    for value in ("no", "bf16", "fp16", "fp8", "NO", "half"):

        def mixed(value=value):
            AcceleratorState._reset_state()
            with patch_environment(ACCELERATE_MIXED_PRECISION=value):
                return Accelerator(cpu=True).mixed_precision

        record(f"mixed_precision {value}", mixed)


if __name__ == "__main__":
    record("state", lambda: [PartialState(cpu=True).device, PartialState().num_processes, repr(PartialState())])
    for part in (
        versions,
        numbers,
        switches,
        environments,
        dicts,
        batch_sizes,
        seeds,
        names,
        folders,
        handlers,
        plugins,
    ):
        part()
    done()
