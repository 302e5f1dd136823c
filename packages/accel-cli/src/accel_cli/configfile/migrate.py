"""Keys and values of older versions, and their names today."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from accel_cli.launch.flags.table import PREFIXES, is_option
from accel_state.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One key or value that an older version wrote differently.

    Attributes:
        old: The old key: `"key"` or `"section.key"`.
        new: Today's key; the same if only the value has changed, empty if the key was removed.
        convert: Converts the old value to today's.
        why: The reason, for the user.
        on_loading: Whether an old file cannot be loaded without it. The others are made by `accelerate config update`.
        when: Given the content of the file, whether the change applies.
    """

    old: str
    new: str
    convert: Callable[[Any], Any] = lambda value: value
    why: str = ""
    on_loading: bool = True
    when: Callable[[Values], bool] = lambda values: True


@dataclass(frozen=True, slots=True)
class Done:
    """A change that was made to a file.

    Attributes:
        change: The row of the table.
        before: The old value.
        after: Today's; None if it was removed.
    """

    change: Change
    before: Any
    after: Any

    def __str__(self) -> str:
        old, new, why = self.change.old, self.change.new, f" ({self.change.why})" if self.change.why else ""
        if not new or self.after is None:
            return f"removed {old}: {self.before!r}{why}"
        if old == new:
            return f"changed {old}: {self.before!r} is now {self.after!r}{why}"
        if self.before == self.after:
            return f"renamed {old} to {new}{why}"
        return f"replaced {old}: {self.before!r} by {new}: {self.after!r}{why}"


def word_for(*words: str, first: int = 1) -> Callable[[Any], Any]:
    """Make a function that converts the number of a choice, an `int` or `str`, to its name."""
    names = {str(number): word for number, word in enumerate(words, first)}
    return lambda value: value if isinstance(value, bool) else names.get(str(value), value)


def spelled(**words: Any) -> Callable[[Any], Any]:
    """Make a function that replaces some `str`, ignoring case, and keeps all other values."""
    return lambda value: words.get(value.upper(), value) if isinstance(value, str) else value


def empty_is_none(value: Any) -> Any:
    """Convert an empty `str` to None."""
    return None if value == "" else value


def none_if_off(value: Any) -> Any:
    """Convert `no`, which is False in YAML without quotes, to None."""
    return None if value is False or str(value).upper() == "NO" else value


def lower_case(value: Any) -> Any:
    """Convert a `str` to lower case; `no` without quotes is False in YAML."""
    return "no" if value is False else value.lower() if isinstance(value, str) else value


def joined(value: Any) -> Any:
    """Convert a list, or a single number, to a `str` separated by commas."""
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return str(value) if isinstance(value, int) else value


def truth_or_same(value: Any) -> Any:
    """Convert yes and no, true and false to bools."""
    return {"yes": True, "true": True, "no": False, "false": False}.get(str(value).lower(), value)


def device(value: Any) -> Any:
    """Convert a bool for offloading to the device."""
    return {True: "cpu", False: "none"}.get(value, value) if isinstance(value, bool) else value


def names_strategy(values: Values) -> bool:
    """True when a file for FSDP 1 has its sharding strategy under the key of FSDP 2."""
    section = values["fsdp_config"]
    strategy = str(section["fsdp_reshard_after_forward"]).upper()
    return str(section.get("fsdp_version", 1)) == "1" and strategy in FSDP_SHARDING_STRATEGY


CHANGES: tuple[Change, ...] = (
    Change("fp16", "mixed_precision", lambda on: "fp16" if on else "no", on_loading=False),
    Change("mixed_precision", "mixed_precision", lower_case),
    Change("distributed_type", "distributed_type", spelled(TPU="XLA", MPS="NO")),
    Change("dynamo_backend", "dynamo_config.dynamo_backend", none_if_off, on_loading=False),
    Change("dynamo_config.dynamo_backend", "dynamo_config.dynamo_backend", none_if_off, on_loading=False),
    Change("ipex_config", "", why="torch does this by itself now"),
    Change("main_process_ip", "main_process_ip", empty_is_none),
    Change("main_process_port", "main_process_port", empty_is_none),
    Change("num_processes", "num_processes", empty_is_none),
    Change("gpu_ids", "gpu_ids", joined),
    Change("rdzv_backend", "rdzv_backend", lambda value: value or "static"),
    Change("downcast_bf16", "downcast_bf16", truth_or_same, on_loading=False),
    Change("tpu_env", "tpu_env", lambda value: value or None, on_loading=False),
    Change("deepspeed_config.offload_optimizer", "deepspeed_config.offload_optimizer_device", device),
    Change("deepspeed_config.offload_param", "deepspeed_config.offload_param_device", device),
    Change("deepspeed_config.zero3_save_fp16_model", "deepspeed_config.zero3_save_16bit_model"),
    Change("deepspeed_config.zero_optimization_stage", "deepspeed_config.zero_stage"),
    Change("fsdp_config.backward_prefetch_policy", "fsdp_config.fsdp_backward_prefetch"),
    Change("fsdp_config.fsdp_backward_prefetch_policy", "fsdp_config.fsdp_backward_prefetch"),
    Change("fsdp_config.fsdp_transformer_cls_to_wrap", "fsdp_config.fsdp_transformer_layer_cls_to_wrap"),
    Change("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_sharding_strategy",
           word_for(*FSDP_SHARDING_STRATEGY)),
    Change("fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_auto_wrap_policy",
           word_for(*FSDP_AUTO_WRAP_POLICY)),
    Change("fsdp_config.fsdp_backward_prefetch", "fsdp_config.fsdp_backward_prefetch",
           word_for("BACKWARD_PRE", "BACKWARD_POST")),
    Change("fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_state_dict_type", word_for(*FSDP_STATE_DICT_TYPE)),
    Change("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_sharding_strategy",
           why="version 1 reads it under this name", when=names_strategy),
    Change("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_transformer_layer_cls_to_wrap", joined,
           on_loading=False),
    Change("fp8_config.fp8_amax_history_length", "fp8_config.fp8_amax_history_len"),
    Change("fp8_config.fp8_amax_compute_algorithm", "fp8_config.fp8_amax_compute_algo"),
    Change("fp8_config.fp8_optimization_level", "fp8_config.fp8_opt_level"),
)  # fmt: skip


def migrate(values: Values, *, loading: bool = False) -> tuple[Values, list[Done]]:
    """Update the content of a file to today's keys and values.

    Args:
        values: The content of the file; it is not changed.
        loading: Whether to make only the changes without which the file cannot be loaded.

    Returns:
        The new content, and the changes in order.
    """
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    done = list(_add_prefixes(values))
    for change in CHANGES:
        if change.on_loading or not loading:
            done += _apply(change, values)
    return values, done


def old_spellings(key: str) -> list[str]:
    """List every name that a key may have in an old file, today's first."""
    section, _, name = key.rpartition(".")
    names = [key, *(change.old for change in CHANGES if change.new == key and change.old != key)]
    prefix = PREFIXES.get(section, "")
    short = [f"{section}.{old.rpartition('.')[2].removeprefix(prefix)}" for old in names] if prefix else []
    return list(dict.fromkeys([*names, *short]))


def _add_prefixes(values: Values) -> Iterator[Done]:
    """Add the prefix to keys of a section that lack it."""
    old_names = {change.old for change in CHANGES}
    for section, prefix in PREFIXES.items():
        content = values.get(section)
        if not isinstance(content, dict):
            continue
        for key in list(content):
            name = f"{prefix}{key}"
            if str(key).startswith(prefix) or name in content:
                continue
            if f"{section}.{name}" in old_names or is_option(name):
                value = content.pop(key)
                content[name] = value
                yield Done(Change(f"{section}.{key}", f"{section}.{name}"), value, value)


def _apply(change: Change, values: Values) -> Iterator[Done]:
    home, name = _place(values, change.old)
    if home is None or name not in home or not change.when(values):
        return
    before = home[name]
    if before is None and change.old == change.new:
        return
    after = change.convert(before)
    if change.old == change.new:
        if after is None:
            del home[name]
        elif after == before and type(after) is type(before):
            return
        else:
            home[name] = after
        yield Done(change, before, after)
        return
    del home[name]
    if change.new and after is not None:
        section, _, new_name = change.new.rpartition(".")
        if section and values.get(section) is None:
            values[section] = {}
        new_home = values[section] if section else values
        if new_home.get(new_name) is None:
            new_home[new_name] = after
        after = new_home[new_name]
    yield Done(change, before, after if change.new else None)


def _place(values: Values, key: str) -> tuple[Values | None, str]:
    section, _, name = key.rpartition(".")
    home = values.get(section) if section else values
    return (home if isinstance(home, dict) else None), name
