"""`accelerate config` without a terminal: every kind of machine, every section."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_cli.configfile.read import load_config_from_file
from accel_cli.configfile.schema import SageMakerConfig
from accel_cli.main import main
from accel_cli.questionnaire.cluster import TOPICS, get_user_input
from accel_cli.questionnaire.previous import IMPLIED
from accel_cli.questionnaire.sagemaker import TOPICS as SAGEMAKER_TOPICS
from tests.cli.answering import Prepared
from tests.cli.pretended import Listed, settings_of
from tests.cli.running import python, refusal
from tests.cli.terminal import PROGRAM

Ask = Callable[..., dict[str, Any]]

SEVERAL_GPUS = {"Hardware?": "MULTI_GPU"}
PROCESSES = {"Number of processes": "4"}
MPIRUN = {"Hardware?": "MULTI_CPU", "Number of processes": "2", "mpirun?": "yes", "Hostfile": "/h"}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Answer in lines, and return what was written."""

    def answer(answers: dict[str, str], name: str = "config.yaml") -> dict[str, Any]:
        prepared = Prepared(answers)
        get_user_input(prepared)
        unused = [part for part in answers if not any(part in question for question in prepared.questions)]
        assert unused == []
        monkeypatch.setattr(sys, "stdin", io.StringIO(prepared.lines))
        path = tmp_path / name
        assert main(["config", "--config_file", str(path)]) == 0
        assert sys.stdin.read() == ""
        values: dict[str, Any] = yaml.safe_load(path.read_text())
        return values

    return answer


@pytest.mark.parametrize(
    "kind",
    ["MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON"],
)
def test_accelerators(ask: Ask, tmp_path: Path, kind: str) -> None:
    written = ask({"Hardware?": kind, "Number of processes": "2", "Which devices": "1,3"})
    assert written == written | {"distributed_type": kind, "num_processes": 2, "gpu_ids": "1,3", "use_cpu": False}
    settings = settings_of("--config_file", str(tmp_path / "config.yaml"), "x.py")
    assert (settings.multi_gpu, settings.num_processes, settings.gpu_ids) == (True, 2, "1,3")


def test_cpu_processes(ask: Ask, tmp_path: Path) -> None:
    written = ask({"Hardware?": "Several CPU processes", "Number of processes": "2", "Mixed precision?": "1"})
    assert written == written | {"distributed_type": "MULTI_CPU", "use_cpu": True, "mixed_precision": "bf16"}
    assert "mpirun_config" not in written
    settings = settings_of("--config_file", str(tmp_path / "config.yaml"), "x.py")
    assert (settings.use_cpu, settings.num_processes, settings.runner) == (True, 2, "local")


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ({"Which GPU": "3"},
         {"distributed_type": "NO", "gpu_ids": "3", "num_processes": 1, "use_cpu": False}),
        (MPIRUN, {"mpirun_config": {"mpirun_hostfile": "/h", "mpirun_ccl": 1}}),
        (MPIRUN | {"oneCCL": "4"}, {"mpirun_config": {"mpirun_hostfile": "/h", "mpirun_ccl": 4}}),
        (SEVERAL_GPUS | PROCESSES | {
            "Number of machines": "2", "Rank of this machine": "1", "Address of machine 0": "node-0.example",
            "Which port": "2222", "one local network": "no", "Rendezvous backend": "c10d", "Debug mode": "y",
         },
         {"num_machines": 2, "machine_rank": 1, "main_process_ip": "node-0.example", "main_process_port": 2222,
          "same_network": False, "rdzv_backend": "c10d", "debug": True}),
        ({"Hardware?": "TPU", "Number of TPU cores?": "4", "Function of the script": "train", "float and double": "y"},
         {"distributed_type": "XLA", "num_processes": 4, "main_training_function": "train", "downcast_bf16": True,
          "tpu_use_cluster": False}),
    ],
    ids=["one device", "mpirun", "oneCCL", "several machines", "TPU"],
)  # fmt: skip
def test_what_is_written_of_machines(ask: Ask, answers: dict[str, str], wanted: dict[str, Any]) -> None:
    written = ask(answers)
    assert written == written | wanted


@pytest.mark.parametrize(
    ("answers", "section", "content"),
    [
        (
            {"Compile the model": "y", "Backend of torch": "eager", "Change how it compiles": "y",
             "optimizes for": "max-autotune", "several graphs": "y", "shapes that change": "y", "repeated block": "y"},
            "dynamo_config",
            {"dynamo_backend": "EAGER", "dynamo_mode": "max-autotune", "dynamo_use_fullgraph": True,
             "dynamo_use_dynamic": True, "dynamo_use_regional_compilation": True},
        ),
        (
            {"Which training strategy": "DeepSpeed", "DeepSpeed JSON file": "y", "JSON config file": "ds.json",
             "Has the model mixture": "y", "Class names of": "A, B"},
            "deepspeed_config",
            {"deepspeed_config_file": "ds.json", "zero3_init_flag": False, "deepspeed_moe_layer_cls_names": "A,B"},
        ),
        (
            {"Which training strategy": "DEEPSPEED", "ZeRO stage": "1", "Number of machines": "2",
             "on the other machines": "pdsh", "Hostfile": "hosts", "to leave out": "", "to use alone": "a@b:0",
             "Address of machine 0": "a"},
            "deepspeed_config",
            {"zero_stage": 1, "gradient_accumulation_steps": 1, "deepspeed_multinode_launcher": "pdsh",
             "deepspeed_hostfile": "hosts", "deepspeed_inclusion_filter": "a@b:0"},
        ),
        (
            {"Which training strategy": "DEEPSPEED", "DeepSpeed JSON file": "n", "ZeRO stage": "3",
             "optimizer states are offloaded": "cpu", "parameters are offloaded": "nvme",
             "NVMe folder for offloaded parameters": "/local nvme", "Gradient accumulation steps": "4",
             "Clip gradients": "y", "Maximum gradient norm": "0.5", "Gather 16-bit weights": "y"},
            "deepspeed_config",
            {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "nvme",
             "offload_param_nvme_path": "/local nvme", "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
             "zero3_save_16bit_model": True, "zero3_init_flag": True},
        ),
        (
            {"Which training strategy": "DEEPSPEED", "with sequence parallelism": "y", "all-to-all of attention heads": "4",
             "Sequence length in": "512", "sequence lengths differ": "no", "Attention implementation": "flash_attention_2"},
            "parallelism_config",
            {"parallelism_config_sp_size": 4, "parallelism_config_sp_seq_length": 512,
             "parallelism_config_sp_seq_length_is_variable": False,
             "parallelism_config_sp_attn_implementation": "flash_attention_2",
             "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 1},
        ),
        (
            {"Which training strategy": "FSDP", "FSDP version": "1", "Sharding strategy": "SHARD_GRAD_OP",
             "units of their own": "SIZE_BASED_WRAP", "number of parameters": "1000",
             "backward pass prefetches": "BACKWARD_POST", "during the forward pass": "y"},
            "fsdp_config",
            {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": False,
             "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000,
             "fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_state_dict_type": "FULL_STATE_DICT",
             "fsdp_forward_prefetch": True, "fsdp_use_orig_params": True, "fsdp_cpu_ram_efficient_loading": True,
             "fsdp_sync_module_states": True, "fsdp_activation_checkpointing": False},
        ),
        (
            {"Which training strategy": "FSDP", "tensor or context parallelism": "y", "by ring attention": "2", "keys and values": "1",
             "a replica of the model": "1"},
            "parallelism_config",
            {"parallelism_config_tp_size": 1, "parallelism_config_cp_size": 2,
             "parallelism_config_cp_comm_strategy": "alltoall", "parallelism_config_dp_replicate_size": 1,
             "parallelism_config_dp_shard_size": 2},
        ),
        (
            {"Which training strategy": "MEGATRON_LM", "Tensor parallel size": "2", "Pipeline parallel size": "2", "Micro-batches": "3"},
            "megatron_lm_config",
            {"megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": True, "megatron_lm_pp_degree": 2,
             "megatron_lm_num_micro_batches": 3, "megatron_lm_recompute_activations": True,
             "megatron_lm_use_distributed_optimizer": True, "megatron_lm_gradient_clipping": 1.0},
        ),
        (
            {"Mixed precision?": "fp8", "FP8 backend": "TE", "length of the amax": "16", "from the history": "max",
             "higher precision": "true, false,no", "margin": "2", "updates of the scaling": "3", "FP8 format": "E4M3",
             "in evaluation": "y"},
            "fp8_config",
            {"fp8_backend": "TE", "fp8_use_autocast_during_eval": True, "fp8_margin": 2, "fp8_interval": 3,
             "fp8_format": "E4M3", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max",
             "fp8_override_linear_precision": "true, false,no"},
        ),
        (
            {"Mixed precision?": "fp8", "FP8 backend": "MS-AMP", "optimization level": "O1"},
            "fp8_config",
            {"fp8_backend": "MSAMP", "fp8_opt_level": "O1"},
        ),
        (
            {"Which training strategy": "FSDP", "Mixed precision?": "fp8", "FP8 backend": "ao", "all-gather FSDP": "n"},
            "fp8_config",
            {"fp8_backend": "AO", "fp8_enable_fsdp_float8_all_gather": False, "fp8_pad_inner_dim": True},
        ),
    ],
)  # fmt: skip
def test_sections(ask: Ask, tmp_path: Path, answers: dict[str, str], section: str, content: dict[str, Any]) -> None:
    written = ask(SEVERAL_GPUS | PROCESSES | answers)
    assert written[section] == content
    settings = settings_of("--config_file", str(tmp_path / "config.yaml"), "x.py", machine=Listed())
    missing = [key for key in content if settings.sources.get(key) != "file"]
    assert missing == []


def test_rare_megatron_settings(ask: Ask) -> None:
    more = {
        "in detail": "y", "What is recomputed": "full", "recomputed at a time": "2", "Expert parallel": "2",
        "Attention dropout": "0.1", "in float32": "y", "optimizer states to CPU": "y", "Overlap the copies": "y",
    }  # fmt: skip
    written = ask(SEVERAL_GPUS | PROCESSES | {"Which training strategy": "Megatron-LM"} | more)
    section = written["megatron_lm_config"]
    assert section == section | {
        "megatron_lm_recompute_granularity": "full", "megatron_lm_recompute_method": "uniform",
        "megatron_lm_recompute_num_layers": 2, "megatron_lm_expert_model_parallel_size": 2,
        "megatron_lm_attention_dropout": 0.1, "megatron_lm_attention_softmax_in_fp32": True,
        "megatron_lm_optimizer_cpu_offload": True, "megatron_lm_overlap_cpu_optimizer_d2h_h2d": True,
    }  # fmt: skip
    assert "megatron_lm_hidden_dropout" not in section


def test_a_pod_of_tpus(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "commands.sh"
    file.write_text("true\n")
    pod = {"Hardware?": "TPU", "pod of several": "y", "Name of the pod": "t", "Zone of the pod": "z", "sudo": "y"}
    typed = ask(pod | {"Which commands do": "2", "Which commands?": "echo a, b; ls", "Which machines of": "a,b",
                       "variables are set": "A=1,B=x=y"})  # fmt: skip
    assert typed == typed | {
        "tpu_use_cluster": True, "tpu_name": "t", "tpu_zone": "z", "tpu_use_sudo": True,
        "commands": ["echo a, b", "ls"], "tpu_vm": ["a", "b"], "tpu_env": ["A=1", "B=x=y"],
    }  # fmt: skip
    assert ask(pod | {"Which commands do": "file", "Which file": str(file)})["command_file"] == str(file)
    settings = settings_of("--config_file", str(tmp_path / "config.yaml"), "x.py")
    assert (settings.tpu, settings.tpu_use_cluster, settings.tpu_use_sudo) == (True, True, True)


def test_sagemaker(ask: Ask, tmp_path: Path) -> None:
    asked = {"Where do the processes run": "Amazon SageMaker", "IAM role": "trainer"}
    plain = ask(asked | {"own to use": "y", "its URI": "123.dkr/image:1", "data channels": "y", "metrics to": "n",
                         "Where is the file": "in.tsv", "sign in": "environment"})  # fmt: skip
    assert plain == {
        "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO", "mixed_precision": "no", "use_cpu": False,
        "debug": False, "ec2_instance_type": "ml.p3.2xlarge", "iam_role_name": "trainer", "num_machines": 1,
        "image_uri": "123.dkr/image:1", "region": "us-east-1", "gpu_ids": "all", "sagemaker_inputs_file": "in.tsv",
        "base_job_name": "accelerate-sagemaker-1", "pytorch_version": "1.10.2", "transformers_version": "4.17.0",
        "py_version": "py38", "enable_cpu_affinity": False,
    }  # fmt: skip
    several = ask(asked | {"Which kind of parallelism": "1", "type of machine": "ml.p3dn.24xlarge", "On how many": "4",
                           "Compile the model": "y"}, "config.json")  # fmt: skip
    assert several == several | {
        "profile": "default", "distributed_type": "DATA_PARALLEL", "ec2_instance_type": "ml.p3dn.24xlarge",
        "num_machines": 4, "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    }  # fmt: skip
    assert isinstance(load_config_from_file(tmp_path / "config.json"), SageMakerConfig)


@pytest.mark.parametrize(
    ("question", "wrong", "reason"),
    [
        ("Hardware?", "11", "'11' is not one of 0 (NO), 1 (MULTI_CPU)"),
        ("Hardware?", "MULTI_GPUS", "Did you mean 'MULTI_GPU'?"),
        ("Number of machines", "0", "It must be at least 1, got 0."),
        ("Number of machines", "some", "'some' is not an integer."),
        ("Rank of this machine", "", "An answer is needed here."),
        ("Rank of this machine", "2", "With 2 machines, the rank must be at most 1, got 2."),
        ("Address of machine 0", "a b", "'a b' must not contain blanks."),
        ("Which port", "70000", "It must be at most 65535, got 70000."),
        ("one local network", "perhaps", "'perhaps' is neither yes nor no."),
        ("Number of processes", "3", "3 processes are not divisible by 2 machines."),
        ("Which devices", "a", "'a' is neither `all` nor different device numbers"),
        ("Which devices", "0", "2 processes on this machine need 2 devices, got 1."),
        ("higher precision", "true,false", "'true,false' is not three bools"),
        ("Which training", "ddp?", "'ddp?' is not one of 0 (PLAIN)"),
    ],
)
def test_wrong_answers_are_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    question: str, wrong: str, reason: str,
) -> None:  # fmt: skip
    prepared = Prepared(SEVERAL_GPUS | PROCESSES | {
        "Number of machines": "2", "Rank of this": "1", "Address of": "a", "Mixed precision?": "fp8",
        "FP8 backend": "TE",
    })  # fmt: skip
    get_user_input(prepared)
    place = next(index for index, asked in enumerate(prepared.questions) if question in asked)
    prepared.typed.insert(place, wrong)
    monkeypatch.setattr(sys, "stdin", io.StringIO(prepared.lines))
    assert main(["config", "--config_file", str(tmp_path / "a.yaml")]) == 0
    assert reason in capsys.readouterr().out
    assert load_config_from_file(tmp_path / "a.yaml").mixed_precision == "fp8"


def test_sizes_that_do_not_fit(ask: Ask) -> None:
    fsdp = SEVERAL_GPUS | {
        "Which training strategy": "FSDP",
        "tensor or context parallelism": "y",
        "Number of processes": "8",
    }
    for answers, reason in (
        ({"every layer": "3"}, "8 processes are left, which is not divisible by 3"),
        ({"every layer": "2", "hold a replica": "4"}, "leave ranks for sharding"),
    ):
        with pytest.raises(ValueError, match=reason):
            ask(fsdp | answers)


@pytest.mark.parametrize("answers", [b"0\nMULTI_GPU\n", b"0\nMULTI_GPU\n\xff\n", None])
def test_answers_that_end_too_early(tmp_path: Path, answers: bytes | None) -> None:
    path = tmp_path / "a.yaml"
    command = [sys.executable, "-c", PROGRAM, "config", "--config_file", str(path)]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh"] if answers is None else []
    environ = {
        **os.environ,
        "PYTHONIOENCODING": "utf-8:surrogateescape",
    }  # as in the C locale; others refuse all answers at once
    done = subprocess.run(
        [*shell, *command], input=answers, capture_output=True, timeout=300, check=False, env=environ
    )
    said = done.stderr.decode()
    question = "Number of machines (nodes)? [1]" if answers else "Choice [this machine, or a cluster of your own]"
    assert done.returncode == 2
    assert f"There is no answer to {question!r}. Nothing was written." in said
    assert len(said.splitlines()) == 1
    assert not path.exists()


def test_places_that_cannot_be_written_are_refused_before_any_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "is a folder. Name a file in it" in refusal(capsys, "config", "--config_file", str(tmp_path))
    assert "cannot be written" in refusal(capsys, "config", "--config_file", str(tmp_path / "file" / "a.yaml"))


def test_interrupting_plain_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert main(["config", "--config_file", str(tmp_path / "a.yaml")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_asking_loads_neither_torch_nor_menus() -> None:
    code = "import accel_cli.questionnaire.cluster, sys; print({'torch', 'questionary', 'yaml'} & set(sys.modules))"
    assert python("-c", code).stdout.strip() == "set()"


def test_an_existing_file_gives_the_defaults_and_its_changes_are_listed(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ask({"Which GPU": "3"})
    path = tmp_path / "config.yaml"
    assert "exists" not in capsys.readouterr().out
    existing = load_config_from_file(path)
    prepared = Prepared({"Mixed precision?": "fp16"})
    get_user_input(prepared, existing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(prepared.lines))
        assert main(["config", "--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path} exists. Its values are the defaults of the questions.")
    assert f"What changes in {path}:\n  mixed_precision: no -> fp16\n\nSettings written" in out
    assert "Which GPU? A number, or all [3]" in out
    assert yaml.safe_load(path.read_text()) == first | {"mixed_precision": "fp16"}


def test_an_unreadable_file_gives_no_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text("num_procesess: 2\n")
    prepared = Prepared({})
    get_user_input(prepared)
    monkeypatch.setattr(sys, "stdin", io.StringIO(prepared.lines))
    assert main(["config", "--config_file", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path} exists, but its values cannot be the defaults: ")
    assert "did you mean 'num_processes'?" in out.lower()
    assert yaml.safe_load(path.read_text())["num_processes"] == 1


FILES = {
    "fsdp 2": {
        "distributed_type": "FSDP", "num_processes": 8, "gpu_ids": "all", "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True,
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                        "fsdp_transformer_layer_cls_to_wrap": "A,B", "fsdp_state_dict_type": "FULL_STATE_DICT",
                        "fsdp_cpu_ram_efficient_loading": False, "fsdp_activation_checkpointing": True,
                        "fsdp_activation_checkpointing_offload": True},
        "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1,
                               "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2},
        "dynamo_config": {"dynamo_backend": "EAGER", "dynamo_mode": "max-autotune", "dynamo_use_fullgraph": True,
                          "dynamo_use_dynamic": False, "dynamo_use_regional_compilation": False},
    },
    "deepspeed on two machines": {
        "distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 2, "gpu_ids": "0,1",
        "mixed_precision": "fp16", "same_network": False,
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "nvme",
                             "offload_param_nvme_path": "/n", "gradient_accumulation_steps": 4,
                             "gradient_clipping": 0.5, "zero3_save_16bit_model": True, "zero3_init_flag": False,
                             "deepspeed_moe_layer_cls_names": "Experts", "deepspeed_multinode_launcher": "pdsh",
                             "deepspeed_hostfile": "/h", "deepspeed_inclusion_filter": "a@b:0,1"},
        "main_process_ip": "10.0.0.1", "main_process_port": 29501,
    },
    "megatron": {
        "distributed_type": "MEGATRON_LM", "num_processes": 4, "gpu_ids": "all", "mixed_precision": "bf16",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": False,
                               "megatron_lm_pp_degree": 1, "megatron_lm_recompute_activations": False,
                               "megatron_lm_use_distributed_optimizer": True, "megatron_lm_gradient_clipping": 2.0},
    },
    "mpirun": {
        "distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "mixed_precision": "no",
        "mpirun_config": {"mpirun_hostfile": "/h", "mpirun_ccl": 4},
    },
    "pod": {
        "distributed_type": "XLA", "num_processes": 8, "mixed_precision": "bf16", "downcast_bf16": True,
        "main_training_function": "train", "tpu_use_cluster": True, "tpu_name": "t", "tpu_zone": "z",
        "tpu_use_sudo": True, "commands": ["a b", "c"], "tpu_vm": ["x", "y"], "tpu_env": ["A=1"],
    },
    "sagemaker": {
        "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "profile": "me",
        "region": "eu", "iam_role_name": "r", "image_uri": "i", "sagemaker_metrics_file": "m.tsv",
        "ec2_instance_type": "ml.p3dn.24xlarge", "num_machines": 4, "debug": True, "base_job_name": "b",
        "mixed_precision": "fp16",
    },
}  # fmt: skip


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_empty_answers_keep_an_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: dict[str, Any]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * 99))
    assert main(["config", "--config_file", str(path)]) == 0
    assert f"Nothing changes in {path}." in capsys.readouterr().out
    assert yaml.safe_load(path.read_text()) == content


def test_a_dash_leaves_out_what_is_not_required(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(FILES["pod"]))
    config: Any = get_user_input(Prepared({"Which machines of the pod?": "-"}), load_config_from_file(path))
    assert (config.tpu_vm, config.tpu_env) == (None, ["A=1"])


def test_answers_that_no_longer_fit_are_not_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(FILES["fsdp 2"]))
    answers = {"Number of processes": "3", "tensor or context": "no"}
    config: Any = get_user_input(Prepared(answers), load_config_from_file(path))
    assert (config.num_processes, config.parallelism_config) == (3, {})
    config = get_user_input(Prepared({"Number of processes": "3"}), load_config_from_file(path))
    assert config.parallelism_config["parallelism_config_tp_size"] == 1  # 2 does not divide 3


def test_the_answers_that_are_not_saved_follow_from_the_settings() -> None:
    questions = [question for topic in (*TOPICS, *SAGEMAKER_TOPICS) for question in topic.questions]
    assert {question.key for question in questions if not question.is_saved} == set(IMPLIED)
