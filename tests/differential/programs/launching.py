"""What a launched script finds in its environment, for many flags and config files.

python launching.py write|read FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from record import done, record

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import launch_command, launch_command_parser

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
SEEN = Path("seen")
SCRIPT = Path("script.py")
DUMP = """
import json, os, sys
kept = {k: v for k, v in os.environ.items() if k.startswith(%r)}
open("seen/" + os.environ.get("RANK", "0"), "w").write(json.dumps([kept, sys.argv[1:]]))
"""
STARTS = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_",
    "MASTER_",
    "RANK",
    "LOCAL_",
    "WORLD_",
    "GROUP_",
    "OMP_",
    "CUDA_",
    "IPEX",
    "KMP",
)
OWN = {"ACCELERATE_SUPERVISION"}  # where our launcher watches its processes
ONE = [
    "", "--cpu", "--cpu --mixed_precision bf16", "--cpu --mixed_precision fp16", "--cpu --num_processes 1",
    "--cpu --num_cpu_threads_per_process 3", "--cpu --gradient_accumulation_steps 4", "--cpu --debug",
    "--cpu --dynamo_backend inductor", "--cpu --dynamo_backend eager --dynamo_mode max-autotune",
    "--cpu --dynamo_backend inductor --dynamo_use_fullgraph --dynamo_use_dynamic", "--cpu --dynamo_use_regional_compilation",
    "--cpu --dynamo_backend inductor --dynamo_use_regional_compilation", "--cpu --num_machines 1 --machine_rank 0",
    "--cpu --main_process_port 29511", "--cpu --enable_cpu_affinity", "--cpu --gpu_ids 0", "--cpu --rdzv_backend static",
    "--cpu --mixed-precision bf16 --gradient-accumulation-steps 2", "--cpu --quiet", "--cpu --module", "--cpu --no_python",
    "--mixed_precision no", "--cpu --max_restarts 2", "--cpu --role trainer",
]  # fmt: skip
WRONG = [
    "--cpu --mixed_precision half",
    "--no_such_flag",
    "--cpu --num_processes many",
    "--cpu --dynamo_backend none_such",
]
TWO = [
    "--cpu --num_processes 2", "--cpu --num_processes 2 --mixed_precision bf16 --gradient_accumulation_steps 3",
    "--cpu --num_processes 2 --num_cpu_threads_per_process 1", "--cpu --num_processes 2 --main_process_port 29533",
]  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"distributed_type": "NO", "mixed_precision": "bf16", "use_cpu": True},
    "accumulating": {"distributed_type": "NO", "mixed_precision": "no", "use_cpu": True, "debug": True},
    "compiled": {
        "distributed_type": "NO", "mixed_precision": "no", "use_cpu": True,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False},
    },
    "two": {"distributed_type": "MULTI_CPU", "mixed_precision": "bf16", "use_cpu": True, "num_processes": 2},
}  # fmt: skip


def launched(flags: list[str], arguments: list[str]) -> Any:
    """What every process of a launch saw, or how the launch ended."""
    SEEN.mkdir(exist_ok=True)
    for old in SEEN.iterdir():
        old.unlink()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            launch_command(launch_command_parser().parse_args([*flags, str(SCRIPT), *arguments]))
            code = 0
        except SystemExit as end:
            code = int(bool(end.code))
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {
        "status": bool(status),
        "seen": {path.name: json.loads(path.read_text()) for path in sorted(SEEN.iterdir())},
    }


def look(name: str, flags: list[str]) -> None:
    actual = launched(flags, ["--lr", "0.1", "--mixed_precision", "own"])
    record(f"status {name}", lambda: actual["status"])
    variables = {variable for kept, _ in actual["seen"].values() for variable in kept}
    record(f"ranks {name}", lambda: [[rank, arguments] for rank, (_, arguments) in actual["seen"].items()])
    for variable in sorted(variables - OWN):
        record(f"{variable} {name}", lambda v=variable: [kept.get(v) for kept, _ in actual["seen"].values()])


def write() -> None:
    for mixed in ("no", "bf16", "fp16"):
        record(
            f"write_basic_config {mixed}",
            lambda mixed=mixed: bool(write_basic_config(mixed, FOLDER / f"basic_{mixed}.json")),
        )
    record("write_basic_config again", lambda: bool(write_basic_config("no", FOLDER / "basic_no.json")))
    for name, fields in CONFIGS.items():
        config = ClusterConfig(compute_environment="LOCAL_MACHINE", **{"debug": False, "num_processes": 1, **fields})
        config.to_yaml_file(FOLDER / f"{name}.yaml")
        config.to_json_file(FOLDER / f"{name}.json")
    for path in sorted(FOLDER.glob("*")):
        if path.suffix in (".yaml", ".json"):
            record(f"written {path.name}", lambda path=path: dict(sorted(yaml.safe_load(path.read_text()).items())))


def read() -> None:
    for path in sorted(FOLDER.glob("*")):
        if path.suffix not in (".yaml", ".json"):
            continue
        record(
            f"loaded {path.name}", lambda path=path: dict(sorted(load_config_from_file(str(path)).to_dict().items()))
        )
        if path.name != "basic_fp16.json":
            many = "many " if path.stem == "two" else ""
            look(f"{many}config {path.name}", ["--config_file", str(path)])
            look(f"{many}config {path.name} and flag", ["--config_file", str(path), "--mixed_precision", "fp16"])


def flags() -> None:
    for line in [*ONE, *WRONG, *TWO]:
        look(f"{'many ' if line in TWO else ''}flags {line}", line.split())


if __name__ == "__main__":
    SCRIPT.write_text(DUMP % (STARTS,))
    if HOW == "write":
        write()
    else:
        read()
        flags()
    done()
