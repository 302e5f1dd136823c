"""DeepSpeed's configuration as a dictionary: reading it, looking into it, filling its "auto" values."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from accel_state.public_names import known_as

AUTO = "auto"
OFFLOAD_DEVICES = frozenset({"cpu", "nvme"})


def read_config(source: Any) -> dict[str, Any]:
    """Read a DeepSpeed configuration.

    Args:
        source: A dictionary (which is copied), the path of a JSON file, or JSON in url-safe base64.

    Returns:
        A new dictionary, which the caller may change.

    Raises:
        ValueError: When the source is none of these, or holds no JSON object.
    """
    if isinstance(source, dict):
        return deepcopy(source)
    if isinstance(source, (str, os.PathLike)):
        text = _text_of(source)
        if text is not None:
            try:
                config = json.loads(text)
            except ValueError as error:
                raise ValueError(f"The DeepSpeed configuration {str(source)!r} is not JSON: {error}.") from None
            if isinstance(config, dict):
                return config
            if os.path.isfile(source):
                raise ValueError(
                    f"The DeepSpeed configuration {str(source)!r} holds a {type(config).__name__}, "
                    "not a JSON object. Write one, in braces."
                )
    raise ValueError(
        f"DeepSpeed configuration {source!r} cannot be used. Pass a dictionary, the path of an existing JSON file, or "
        "a JSON object in url-safe base64."
    )


def _text_of(source: str | os.PathLike[str]) -> str | None:
    if os.path.isfile(source):
        with open(source, encoding="utf-8") as file:
            return file.read()
    try:
        return base64.b64decode(str(source), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None


def find_node(config: Any, key: str) -> tuple[dict[str, Any] | None, str]:
    """The innermost section that a dotted key names.

    Args:
        config: The configuration.
        key: For example "zero_optimization.stage".

    Returns:
        The section (None when it is missing) and the last name of the key.
    """
    *sections, last = key.split(".")
    for section in sections:
        config = config.get(section) if isinstance(config, dict) else None
    return (config if isinstance(config, dict) else None), last


def get_value(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value under a dotted key, `default` when there is none."""
    node, last = find_node(config, key)
    return default if node is None else node.get(last, default)


def leaf_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values that are not sections."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaf_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def fill(config: dict[str, Any], key: str, values: Mapping[str, Any], mismatches: list[str], must_match: bool) -> None:
    """Replace one "auto" value, or compare a fixed one.

    Args:
        config: Changed in place.
        key: Dotted key; nothing is changed when it is missing.
        values: Known values by dotted key.
        mismatches: A message is appended when the configuration has another value than the known one.
        must_match: Whether fixed values are compared.

    Raises:
        ValueError: When the value is "auto" and `values` does not have it.
    """
    node, last = find_node(config, key)
    if node is None or node.get(last) is None:
        return
    if node[last] == AUTO:
        if key not in values:
            raise ValueError(
                f"{key}='auto' in the DeepSpeed configuration cannot be filled, because its value is not known. Set "
                "it in the configuration."
            )
        node[last] = values[key]
    elif must_match and key in values and node[last] != values[key]:
        mismatches.append(
            f"{key}: {node[last]!r} in the DeepSpeed configuration, {values[key]!r} in the training script"
        )


@known_as("accelerate.utils.deepspeed.HfDeepSpeedConfig")
class HfDeepSpeedConfig:
    """A DeepSpeed configuration that can be asked for values by dotted keys.

    Args:
        config_file_or_dict: A dictionary (which is copied), the path of a JSON file, or JSON in url-safe base64.

    Example:
        ```python
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        assert config.is_zero3() and config.get_value("zero_optimization.stage") == 3
        ```
    """

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = read_config(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage (-1 without one) and whether anything is offloaded; call it after changes to `config`."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        self._offload = any(
            self.get_value(f"zero_optimization.{name}.device") in OFFLOAD_DEVICES
            for name in ("offload_optimizer", "offload_param")
        )

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that holds a dotted key (None when missing), and the key's last name."""
        return find_node(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value under a dotted key, `default` when there is none."""
        return get_value(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a value or section.

        Raises:
            ValueError: When it is missing although `must_exist`.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"{ds_key_long!r} is not in the DeepSpeed configuration {self.config!r}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether there is a value and it counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether there is a value and it counts as false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients are sharded."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether parameters or optimizer states are offloaded to CPU memory or NVMe."""
        return self._offload
