"""`accelerate to-fsdp2`: what becomes of each setting, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_cli.main import main
from accelerate.commands import to_fsdp2
from accelerate.commands.to_fsdp2 import (
    ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING,
    ConversionStatus,
    convert_config_to_fsdp2,
    load_config,
)
from tests.cli.pretended import settled
from tests.cli.running import PROGRAM, refusal, run

KEPT = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_activation_checkpointing": True,
}  # fmt: skip
VERSION_1 = KEPT | {
    "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False, "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
}  # fmt: skip
VERSION_2 = KEPT | {"fsdp_version": 2, "fsdp_reshard_after_forward": False}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str = "old.yaml", **section: Any) -> dict[str, Any]:
    """Write settings with a section on FSDP."""
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2}
    values["fsdp_config"] = section
    Path(name).write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return values


def convert(*words: str) -> dict[str, Any]:
    """Run the command and return the section that it wrote."""
    assert main(["to-fsdp2", "--config_file", "old.yaml", "--output_file", "new.yaml", *words]) == 0
    section: dict[str, Any] = yaml.safe_load(Path("new.yaml").read_text())["fsdp_config"]
    return section


def test_every_setting_is_kept_renamed_or_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    before = write(**VERSION_1)
    assert convert() == VERSION_2
    assert yaml.safe_load(Path("new.yaml").read_text()) == before | {"fsdp_config": VERSION_2}
    assert load_config("old.yaml") == before
    said = capsys.readouterr()
    rows = {" ".join(line.split()) for line in said.out.splitlines()}
    assert {
        "fsdp_sharding_strategy SHARD_GRAD_OP renamed fsdp_reshard_after_forward false",
        "fsdp_offload_params false kept fsdp_offload_params false",
        "fsdp_use_orig_params true dropped",
        "fsdp_version 1 changed fsdp_version 2",
        "Settings for FSDP 2 written to new.yaml",
    } <= rows
    dropped = ["fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"]
    assert [line.split()[3].rstrip(":") for line in said.err.splitlines()] == dropped
    assert "fsdp_forward_prefetch: FSDP 2 does not support it yet." in said.err


@pytest.mark.parametrize("strategy", list(ARGUMENT_VALUE_MAPPING["fsdp_sharding_strategy"]))
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_the_result_launches_without_a_word(key: str, strategy: str) -> None:
    write(**VERSION_1 | {"fsdp_sharding_strategy": None, key: strategy})
    section = convert()
    assert section["fsdp_reshard_after_forward"] is ARGUMENT_VALUE_MAPPING[key][strategy]
    Path("train.py").touch()
    settings, plan = settled("--config_file", "new.yaml", "train.py")
    assert settings.notes == ()
    assert plan.environment["FSDP_VERSION"] == "2"
    assert plan.environment["FSDP_RESHARD_AFTER_FORWARD"] == str(section["fsdp_reshard_after_forward"]).lower()


def test_old_words_and_what_version_2_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    write(sharding_strategy=4, backward_prefetch_policy=2, fsdp_state_dict_type="LOCAL_STATE_DICT")
    assert convert() == {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip
    said = capsys.readouterr()
    assert "changed fsdp_state_dict_type: FSDP 2 has no local state dicts." in said.err
    assert "renamed fsdp_sharding_strategy: FSDP 2 shards over all ranks" in said.err
    assert "parallelism_config_dp_replicate_size" in said.err
    assert "changed fsdp_config.fsdp_sharding_strategy: 4 is now 'HYBRID_SHARD'" in said.out


def test_the_strategy_counts_where_both_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    write(fsdp_reshard_after_forward=True, fsdp_sharding_strategy="SHARD_GRAD_OP")
    assert convert() == {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    assert "dropped fsdp_reshard_after_forward: FSDP 1 reads fsdp_sharding_strategy." in capsys.readouterr().err


def test_what_nobody_knows_is_kept_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    write(fsdp_colour="blue")
    assert convert()["fsdp_colour"] == "blue"
    assert "kept fsdp_colour: it is not an option of FSDP" in capsys.readouterr().err


def test_the_file_itself_can_be_replaced() -> None:
    write(**VERSION_1)
    os.symlink("old.yaml", "link.yaml")
    assert main(["to-fsdp2", "--config-file", "link.yaml", "--overwrite"]) == 0
    assert yaml.safe_load(Path("old.yaml").read_text())["fsdp_config"] == VERSION_2
    assert Path("link.yaml").is_symlink()
    assert sorted(os.listdir()) == ["link.yaml", "old.yaml"]


@pytest.mark.parametrize("target", ["new.yaml", "old.yaml"])
def test_settings_for_version_2_are_copied_with_a_warning(target: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("old.yaml").write_text(text := "distributed_type: FSDP\n# mine\nfsdp_config:\n  fsdp_version: 2\n")
    assert main(["to-fsdp2", "--config_file", "old.yaml", "--output_file", target, "--overwrite"]) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "line 4: fsdp_version is 2 already" in caplog.text
    assert yaml.safe_load(Path(target).read_text()) == yaml.safe_load(text)
    assert Path("old.yaml").read_text() == text


def test_the_reader_of_settings_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(**VERSION_1)
    monkeypatch.setattr(to_fsdp2, "load_config", lambda path: {"fsdp_config": {"fsdp_version": 2}})
    words = ["--config_file", "old.yaml", "--output_file", "new.yaml"]
    to_fsdp2.to_fsdp2_command(to_fsdp2.to_fsdp2_command_parser().parse_args(words))
    assert "2 already" in caplog.text
    assert yaml.safe_load(Path("new.yaml").read_text()) == {"fsdp_config": {"fsdp_version": 2}}


def test_errors_about_files_are_those_of_python() -> None:
    parse = to_fsdp2.to_fsdp2_command_parser().parse_args
    with pytest.raises(FileNotFoundError):
        to_fsdp2.to_fsdp2_command(parse(["--config_file", "no.yaml"]))
    write(**VERSION_1)
    os.symlink("nowhere", "link.yaml")
    for name in ("old.yaml", "link.yaml"):
        with pytest.raises(FileExistsError):
            to_fsdp2.to_fsdp2_command(parse(["--config_file", "old.yaml", "--output_file", name]))


def test_a_section_that_says_nothing() -> None:
    write()
    assert convert() == {"fsdp_version": 2}


def test_json_stays_json() -> None:
    write("old.json", **VERSION_1)
    assert main(["to-fsdp2", "--config_file", "old.json", "--output_file", "folder/new.json"]) == 0
    assert json.loads(Path("folder/new.json").read_text())["fsdp_config"] == VERSION_2


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, ["--output_file", "new.yaml"], "'old.yaml' does not exist"),
        ("{distributed_type: MULTI_GPU}", ["--output_file", "new.yaml"], "is not for FSDP: its distributed_type is"),
        (None, [], "'old.yaml' does not exist"),
        ("{distributed_type: FSDP}", [], "Give --output_file, or --overwrite"),
        ("{distributed_type: FSDP}", ["--output_file", "there.yaml"], "'there.yaml' already exists"),
        ("{distributed_type: FSDP}", ["--output_file", "folder", "--overwrite"], "'folder' is a folder"),
        ("{distributed_type: FSPD}", ["--output_file", "new.yaml"], "Did you mean 'FSDP'?"),
        ("{distributed_type: FSDP, fsdp_config: {fsdp_sharding_strategy: HALF}}", ["--output_file", "new.yaml"], "'HALF'"),
        ("a: [", ["--output_file", "new.yaml"], "not valid YAML"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line_and_nothing_is_written(
    content: str | None, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("old.yaml").write_text(content)
    Path("there.yaml").write_text("mine")
    Path("folder").mkdir()
    assert message in refusal(capsys, "to-fsdp2", "--config_file", "old.yaml", *words)
    assert not Path("new.yaml").exists()
    assert Path("there.yaml").read_text() == "mine"


def test_programs_convert_dictionaries() -> None:
    config = {"distributed_type": "FSDP", "fsdp_config": dict(VERSION_1)}
    assert convert_config_to_fsdp2(config)["fsdp_config"] == VERSION_2
    assert config["fsdp_config"] == VERSION_1
    for other in ({}, {"fsdp_config": {}}, {"fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}}):
        assert convert_config_to_fsdp2(other) == other
    with pytest.raises(FileNotFoundError):
        load_config("no.yaml")


def test_the_tables_that_others_read() -> None:
    assert ARGUMENT_KEY_MAPPING["fsdp_sharding_strategy"] == "fsdp_reshard_after_forward"
    assert ARGUMENT_KEY_MAPPING["fsdp_forward_prefetch"] is ConversionStatus.NOT_YET_IMPLEMENTED
    assert [(status.name, status.value) for status in ConversionStatus] == [
        ("NOT_YET_IMPLEMENTED", 0),
        ("REMOVED", -1),
    ]
    assert to_fsdp2.to_fsdp2_command_parser().parse_args(["--config_file", "a"]).overwrite is False


def test_names_that_the_terminal_cannot_print_do_not_stop_the_report(tmp_path: Path) -> None:
    content = {"distributed_type": "FSDP", "fsdp_config": VERSION_1 | {"fsdp_transformer_layer_cls_to_wrap": "Größe"}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    words = ["to-fsdp2", "--config_file", "old.yaml", "--output_file", "new.yaml"]
    done = run(PROGRAM, *words, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert "Gr\\xf6\\xdfe" in done.stdout
    written = yaml.safe_load((tmp_path / "new.yaml").read_text(encoding="utf-8"))
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Größe"
