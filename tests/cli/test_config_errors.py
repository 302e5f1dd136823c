"""Settings files with mistakes: one line that names file, line, key, value and what would be right; status 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from accel_cli.configfile.read import load_config_from_file
from accel_cli.main import main

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
        (START + "num_machines: two\n", "line 4: num_machines: 'two' is not a whole number."),
        (START + "main_process_port: true\n", "line 4: main_process_port: True is not a number."),
        (START + "same_network: perhaps\n", "line 4: same_network: 'perhaps' is not a truth value"),
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
         "line 5: fp8_config.amax_history_length: 'long' is not a whole number."),
        (START + "fsdp_config: 3\n", "line 4: fsdp_config must hold `key: value` pairs, got 3."),
        ("num_processes: 2\ndistributed_type: MULTI_GPUS\n",
         "line 2: distributed_type: 'MULTI_GPUS' is not one of NO, MULTI_CPU, "),
        ("distributed_type: 'NO'\ncompute_environment: moon\n", "line 2: compute_environment: 'moon' is not one of"),
        ("num_processes: 2\n", "There is no `distributed_type`"),
        (START + "num_processes: 4\n", "line 4 has the key 'num_processes' again (first in line 3): keep one of them."),
        (START + "fsdp_config:\n  a: 1\n  a: 2\n", "line 6 has the key 'a' again (first in line 5)"),
        (START + "a: [1,\n", "line 5: not valid YAML"),
        (START + "a: b: c\n", "line 4: not valid YAML, mapping values are not allowed"),
        (START + "a:\n\t- 1\n", "line 5: not valid YAML"),
        (START + "---\na: 1\n", "not valid YAML"),
        (START + "? [1]\n: 2\n", "unhashable"),
        ("distributed_type: !!python/object/apply:os.system ['touch hurt']\n",
         "line 1: the tag '!!python/object/apply:os.system' is not allowed"),
        ("a: !!python/name:os.system\n", "the tag '!!python/name:os.system' is not allowed"),
        ("a: !own 1\n", "the tag '!own' is not allowed"),
        ("", "must hold `key: value` pairs, but holds nothing."),
        ("# only a comment\n", "must hold `key: value` pairs, but holds nothing."),
        ("- a\n- b\n", "must hold `key: value` pairs, but holds a list."),
        ("just words\n", "must hold `key: value` pairs, but holds a str."),
        ("[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: " * 1 + "[" * 30000 + "]" * 30000, "nested too deeply"),
    ],
)  # fmt: skip
def test_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    Path("x.py").write_text("")
    assert main(["launch", "--config_file", "a.yaml", "x.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accelerate launch: error: Settings file 'a.yaml'")
    assert message in line
    assert not Path("hurt").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"distributed_type": "NO", "num_machnes": 1}, indent=1),
         "line 3 has unknown keys: ['num_machnes']."),
        ('{"distributed_type": "FSDP",\n\t"fsdp_config": {\n\t\t"fsdp_version": 7}}',
         "line 3: fsdp_config.fsdp_version: 7 is not one of 1, 2."),
        ('{"distributed_type": "NO", "debug": true, "debug": false}', "has the key 'debug' twice: keep one of them."),
        ('{"distributed_type": "NO",}', "is not valid JSON"),
        ("distributed_type: NO", "is not valid JSON: it must begin with a brace."),
        ("", "holds nothing"),
        ('{"a":' * 50000 + "1" + "}" * 50000, "nested too deeply"),
    ],
)  # fmt: skip
def test_json(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config_from_file(path)


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(path: Path) -> str:
        assert main(["env", "--config_file", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "does not exist" in said(tmp_path / "none.yaml")
    assert "it is a folder" in said(tmp_path)
    binary = tmp_path / "weights.yaml"
    binary.write_bytes(b"\x93NUMPY\xff\xfe\x00")
    assert "not a text file (byte 0 is not UTF-8)" in said(binary)
    binary.write_bytes(b"a: 1\x00")
    assert "it is not a text file." in said(binary)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * 1_000_001)
    assert "more than 1000000 bytes are no settings" in said(large)


def test_a_mark_at_the_beginning_and_merged_keys_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("\ufeffdistributed_type: &kind FSDP\nfsdp_config: &a\n  fsdp_version: 2\n", encoding="utf-8")
    assert load_config_from_file(path).fsdp_config == {"fsdp_version": 2}  # type: ignore[attr-defined]
    path.write_text("distributed_type: NO\nfp8_config: &a {margin: 1}\nfsdp_config:\n  <<: {fsdp_version: 2}\n")
    assert load_config_from_file(path).fsdp_config == {"fsdp_version": 2}  # type: ignore[attr-defined]
