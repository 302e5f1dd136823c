"""Config files with errors: one line that names file, line, key, value and what would be right; status 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accel_cli.configfile.read import load_config_from_file
from accel_cli.configfile.schema import ClusterConfig
from accel_cli.main import main
from tests.cli.running import refusal

START = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (START + "mixed_precison: bf16\n", "line 4 has unknown keys: ['mixed_precison']. Correct or remove them, or "
         "upgrade accelerate where a newer version wrote the file. Did you mean 'mixed_precision'?"),
        (START + "quantum_config: {}\n", "line 4 has unknown keys: ['quantum_config']. Correct or remove them, or"),
        (START + "\n\nzero_stage: 3\n", "line 6 has unknown keys: ['zero_stage']."),
        (START + "zero_stage: 3\n", "Put zero_stage into the section deepspeed_config."),
        (START + "fsdp_version: 2\n", "Put fsdp_version into the section fsdp_config."),
        (START + "mixed_precision: bf61\n", "line 4: mixed_precision: 'bf61' is not one of no, fp16, bf16, fp8. Did "
                                            "you mean 'bf16'?"),
        (START + "num_machines: two\n", "line 4: num_machines: 'two' is not an integer."),
        (START + "main_process_port: true\n", "line 4: main_process_port: True is not an integer."),
        (START + "same_network: perhaps\n", "line 4: same_network: 'perhaps' is not true or false"),
        (START + "fsdp_config:\n  fsdp_version: 3\n", "line 5: fsdp_config.fsdp_version: 3 is not one of 1, 2."),
        (START + "fsdp_config:\n  version: 3\n", "line 5: fsdp_config.version: 3 is not one of 1, 2."),
        (START + "fsdp_config: {fsdp_offload_params: maybe}\n",
         "line 4: fsdp_config.fsdp_offload_params: 'maybe' is not one of true, false."),
        (START + "fsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_WRAP\n",
         "line 5: fsdp_config.fsdp_auto_wrap_policy: 'TRANSFORMER_WRAP' is not one of TRANSFORMER_BASED_WRAP, "
         "SIZE_BASED_WRAP, NO_WRAP. Did you mean 'TRANSFORMER_BASED_WRAP'?"),
        (START + "deepspeed_config:\n  gradient_clipping: 1.0\n  zero_stage: 4\n",
         "line 6: deepspeed_config.zero_stage: 4 is not one of 0, 1, 2, 3."),
        (START + "deepspeed_config:\n  offload_param_device: gpu\n", "'gpu' is not one of none, cpu, nvme."),
        (START + "fp8_config:\n  amax_history_length: long\n",
         "line 5: fp8_config.amax_history_length: 'long' is not an integer of at least 1."),
        (START + "fsdp_config: 3\n", "line 4: fsdp_config must contain `key: value` pairs, got 3."),
        ("num_processes: 2\ndistributed_type: MULTI_GPUS\n",
         "line 2: distributed_type: 'MULTI_GPUS' is not one of NO, MULTI_CPU, "),
        ("distributed_type: 'NO'\ncompute_environment: moon\n", "line 2: compute_environment: 'moon' is not one of"),
        ("num_processes: 2\n", "`distributed_type` is missing"),
        (START + "a: [1,\n", "line 5: not valid YAML"),
        (START + "a: b: c\n", "line 4: not valid YAML, mapping values are not allowed"),
        (START + "a:\n\t- 1\n", "line 5: not valid YAML"),
        (START + "---\na: 1\n", "not valid YAML"),
        (START + "? [1]\n: 2\n", "unhashable"),
        ("distributed_type: !!python/object/apply:os.system ['touch hurt']\n",
         "line 1: the tag '!!python/object/apply:os.system' is not allowed"),
        ("a: !!python/name:os.system\n", "the tag '!!python/name:os.system' is not allowed"),
        ("a: !own 1\n", "the tag '!own' is not allowed"),
        ("", "must contain `key: value` pairs, but contains nothing."),
        ("# only a comment\n", "must contain `key: value` pairs, but contains nothing."),
        ("- a\n- b\n", "must contain `key: value` pairs, but contains a list."),
        ("just words\n", "must contain `key: value` pairs, but contains a str."),
        ("[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: " * 1 + "[" * 30000 + "]" * 30000, "nested too deeply"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("in_a_folder_with_a_script")
def test_yaml(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    Path("a.yaml").write_text(text)
    line = refusal(capsys, "launch", "--config_file", "a.yaml", "train.py")
    assert line.startswith("accelerate launch: error: Config file 'a.yaml'")
    assert message in line
    assert not Path("hurt").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"distributed_type": "NO", "num_machnes": 1}, indent=1),
         "line 3 has unknown keys: ['num_machnes']."),
        ('{"distributed_type": "FSDP",\n\t"fsdp_config": {\n\t\t"fsdp_version": 7}}',
         "line 3: fsdp_config.fsdp_version: 7 is not one of 1, 2."),
        ('{"distributed_type": "NO",}', "is not valid JSON"),
        ("distributed_type: NO", "is not valid JSON: it must begin with a brace."),
        ("", "contains nothing"),
        ('{"a":' + "[" * 400000 + "]" * 400000 + "}", "nested too deeply"),  # Python 3.14 reads 50,000
    ],
)  # fmt: skip
def test_json(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config_from_file(path)


@pytest.mark.parametrize(
    ("name", "text", "warning"),
    [
        ("a.yaml", START + "num_processes: 2\n", ""),  # as accelerate 0.30 wrote files
        ("a.yaml", START + "fp8_config: {margin: 1}\nfp8_config:\n  margin: 1\n", ""),
        ("a.yaml", START.replace("2", "4") + "num_processes: 2\n",
         "line 4 has the key 'num_processes' again (first in line 3), with another value. The last one is used."),
        ("a.yaml", START + "fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n", "line 6 has the key 'fsdp_version' again"),
        ("a.json", '{"distributed_type": "MULTI_GPU", "num_processes": 2, "num_processes": 2}', ""),
        ("a.json", '{"distributed_type": "MULTI_GPU", "num_processes": 4, "num_processes": 2}',
         "has the key 'num_processes' twice, with different values. The last one, 2, is used."),
    ],
)  # fmt: skip
def test_the_last_of_two_values_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str, warning: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.num_processes == 2
    assert (config.fsdp_config or {"fsdp_version": 2}) == {"fsdp_version": 2}
    assert [warning in record.getMessage() for record in caplog.records] == ([True] if warning else [])


def test_all_mistakes_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "num_processes: two\nmixed_precison: bf16\nfsdp_config:\n  fsdp_version: 7\ngpu: 1\ndistributed_type: FDSP\n"
    )
    assert main(["launch", "--config_file", str(path), "x.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"accelerate launch: error: Config file {str(path)!r} has 5 errors:"
    for number, said in [
        (1, "num_processes: 'two' is not an integer."),
        (2, "has unknown keys: ['mixed_precison'].*Did you mean 'mixed_precision'"),
        (4, "fsdp_config.fsdp_version: 7 is not one of 1, 2."),
        (5, "has unknown keys: ['gpu']"),
        (6, "distributed_type: 'FDSP' is not one of .*Did you mean 'FSDP'"),
    ]:
        pattern = rf"  - line {number}:? " + said.replace("[", r"\[")
        assert [line for line in lines[1:] if re.match(pattern, line)], (pattern, lines)
    path.write_text("num_processes: two\ndebug: perhaps\n")
    with pytest.raises(ValueError, match=r"(?s)3 errors:.*`distributed_type` is missing.*'two'.*'perhaps'"):
        load_config_from_file(path)


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(path: Path) -> str:
        return refusal(capsys, "env", "--config_file", str(path))

    assert "does not exist" in said(tmp_path / "none.yaml")
    assert "it is a folder" in said(tmp_path)
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\x93NUMPY\xff\xfe\x00")
    assert "not a text file (byte 0 is not UTF-8)" in said(binary)
    binary.write_bytes(b"a: 1\x00")
    assert "it is not a text file." in said(binary)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    assert "more than 1000000 bytes, too many for a config file" in said(large)


def test_a_mark_at_the_beginning_and_merged_keys_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("\ufeffdistributed_type: &kind FSDP\nfsdp_config: &a\n  fsdp_version: 2\n", encoding="utf-8")
    assert load_config_from_file(path).fsdp_config == {"fsdp_version": 2}  # type: ignore[attr-defined]
    path.write_text("distributed_type: NO\nfp8_config: &a {margin: 1}\nfsdp_config:\n  <<: {fsdp_version: 2}\n")
    assert load_config_from_file(path).fsdp_config == {"fsdp_version": 2}  # type: ignore[attr-defined]
