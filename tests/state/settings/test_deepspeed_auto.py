"""DeepSpeed's configuration as a dictionary."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.deepspeed_auto import HfDeepSpeedConfig, fill, leaf_keys, read_config

CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
    "a": {"yes": True, "no": False, "none": None, "auto": "auto"},
}


def test_a_configuration_is_read_from_all_its_forms(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    for source in (CONFIG, file, str(file), encoded):
        assert read_config(source) == CONFIG
    assert read_config(CONFIG)["a"] is not CONFIG["a"]


@pytest.mark.parametrize("source", ["/nowhere/ds.json", "!", 3, ["a"], base64.urlsafe_b64encode(b"[1]").decode()])
def test_anything_else_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="cannot be used. Pass a dictionary"):
        read_config(source)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{x")
    with pytest.raises(ValueError, match=r"ds\.json' is not JSON"):
        read_config(file)
    file.write_text("[1]")
    with pytest.raises(ValueError, match=r"ds\.json' holds a list"):
        read_config(file)
    with pytest.raises(ValueError, match="cannot be used. Pass a dictionary"):
        read_config(tmp_path)


def test_questions_to_a_configuration() -> None:
    config = HfDeepSpeedConfig(CONFIG)
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (False, True, True)
    assert [config.is_true(f"a.{name}") for name in ("yes", "no", "none", "other")] == [True, False, False, False]
    assert [config.is_false(f"a.{name}") for name in ("yes", "no", "none", "other")] == [False, True, False, False]
    assert config.get_value("a.other", 5) == config.get_value("b.other", 5) == 5
    assert config.find_config_node("a.yes") == (CONFIG["a"], "yes")
    assert config.find_config_node("b.c.d") == (None, "d")
    assert not HfDeepSpeedConfig({}).is_offload()


def test_parts_can_be_deleted() -> None:
    config = HfDeepSpeedConfig(CONFIG)
    config.del_config_sub_tree("a.yes")
    config.del_config_sub_tree("b.c")
    assert "yes" not in config.config["a"]
    config.del_config_sub_tree("zero_optimization")
    config.set_stage_and_offload()
    assert not config.is_zero3()
    with pytest.raises(ValueError, match="'b.c' is not in the DeepSpeed configuration"):
        config.del_config_sub_tree("b.c", must_exist=True)
    assert "zero_optimization" in CONFIG


def test_filling() -> None:
    config = read_config(CONFIG)
    mismatches: list[str] = []
    known = {"a.auto": 4, "a.no": True, "a.none": 1, "a.missing": 1}
    for key in [*leaf_keys(config), "a.missing", "b.c"]:
        fill(config, key, known, mismatches, must_match=True)
    assert config["a"] == {"yes": True, "no": False, "none": None, "auto": 4}
    assert mismatches == ["a.no: False in the DeepSpeed configuration, True in the training script"]
    with pytest.raises(ValueError, match="a.auto='auto' .* cannot be filled"):
        fill(read_config(CONFIG), "a.auto", {}, [], must_match=False)
