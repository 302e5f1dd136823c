"""Questions about the machines, their devices and their processes, mpirun and TPUs."""

from __future__ import annotations

import glob
import os
from typing import Any

from accel_cli.questionnaire.answer import Choice, Number, Path, Text, Truth, Words, choice
from accel_cli.questionnaire.question import Answers, Question, Topic, about, every, opposite, said
from accel_state.clusters import DEFAULT_PORT

MACHINES = Choice(
    (
        ("NO", "Single device (CPU, one GPU, MPS)"),
        ("MULTI_CPU", "Several CPU processes"),
        ("MULTI_GPU", "Several GPUs (NVIDIA or AMD)"),
        ("MULTI_XPU", "Several XPUs (Intel)"),
        ("MULTI_HPU", "Several HPUs (Intel Gaudi)"),
        ("MULTI_NPU", "Several NPUs (Huawei Ascend)"),
        ("MULTI_MLU", "Several MLUs (Cambricon)"),
        ("MULTI_SDAA", "Several SDAAs (Tecorigin)"),
        ("MULTI_MUSA", "Several MUSA GPUs (Moore Threads)"),
        ("MULTI_NEURON", "Several Neuron cores (AWS Trainium)"),
        ("XLA", "TPU"),
    )
)
ACCELERATORS = tuple(kind for kind, _ in MACHINES.options if kind not in ("NO", "MULTI_CPU", "XLA"))
SEVERAL = ("MULTI_CPU", *ACCELERATORS)

PLAIN = ("PLAIN", "a replica of the model on each rank (DDP)")
DEEPSPEED = ("DEEPSPEED", "DeepSpeed")
FSDP = ("FSDP", "FSDP: fully sharded data parallelism")
MEGATRON = ("MEGATRON_LM", "Megatron-LM")

# which training engines are offered on which machines
WAYS: dict[tuple[str, ...], Choice] = {
    ("MULTI_CPU", "MULTI_NEURON"): Choice((PLAIN, FSDP)),
    ("MULTI_GPU",): Choice((PLAIN, DEEPSPEED, FSDP, MEGATRON)),
    ("MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"): Choice((PLAIN, DEEPSPEED, FSDP)),
    ("NO",): Choice((("PLAIN", "plain PyTorch"), DEEPSPEED)),
}  # fmt: skip

FP8_HARDWARE = ("NO", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU")


def on_cpu(answers: Answers) -> bool:
    """True when no accelerator is used."""
    return answers.get("machine") == "MULTI_CPU" or bool(answers.get("use_cpu"))


def on_several_machines(answers: Answers) -> bool:
    """True when the rendezvous is over a network."""
    return bool(answers.get("num_machines", 1) > 1)


def in_fp8(answers: Answers) -> bool:
    """True when the devices may support FP8."""
    return answers.get("machine") in FP8_HARDWARE and not answers.get("use_cpu")


def by_hostfile(answers: Answers) -> bool:
    """True when the rank of this machine follows from a hostfile."""
    return answers.get("deepspeed_multinode_launcher", "standard") != "standard"


def divides_evenly(value: int, answers: Answers) -> str:
    """Reject a number of processes that is not divisible by the number of machines."""
    machines = answers.get("num_machines", 1)
    return f"{value} processes are not divisible by {machines} machines." if value % machines else ""


def is_one_of_them(value: int, answers: Answers) -> str:
    """Reject a machine rank that is too high."""
    last = answers["num_machines"] - 1
    return "" if value <= last else f"With {last + 1} machines, the rank must be at most {last}, got {value}."


def are_enough(value: str, answers: Answers) -> str:
    """Reject a list of devices that is not valid, or has fewer devices than processes."""
    words = [word.strip() for word in value.split(",")]
    if words == ["all"]:
        return ""
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        return f"{value!r} is neither `all` nor different device numbers such as 0,1."
    here = answers["num_processes"] // answers.get("num_machines", 1)
    return "" if len(words) >= here else f"{here} processes on this machine need {here} devices, got {len(words)}."


def default_processes(answers: Answers) -> int:
    """One process for each NVIDIA GPU of this machine, else one for each machine."""
    machines: int = answers.get("num_machines", 1)
    devices = glob.glob("/proc/driver/nvidia/gpus/*") if answers["machine"] == "MULTI_GPU" else []
    return machines * max(1, len(devices))


MACHINE = Topic(
    "Machine",
    (
        Question("machine", "Hardware?", MACHINES, "NO", is_saved=False),
        Question("use_cpu", "Train on the CPU even where there is an accelerator?", Truth(), False,
                 said("machine", "NO")),
        Question("num_machines", "Number of machines (nodes)?", Number(least=1), 1, said("machine", *SEVERAL)),
        *(Question("way", "Which training strategy?", ways, "PLAIN",
                   every(said("machine", *machines), opposite(said("use_cpu"))), is_saved=False)
          for machines, ways in WAYS.items()),
    ),
)  # fmt: skip

NETWORK = Topic(
    "Network",
    (
        about("machine_rank", None, opposite(by_hostfile), kind=Number(least=0), wrong=is_one_of_them),
        about("main_process_ip", kind=Text(without_blanks=True)),
        Question("main_process_port", "Which port on it for the rendezvous?", Number(1, 65535), DEFAULT_PORT),
        about("same_network", True),
        Question("rdzv_backend",
                 "Rendezvous backend? static: fixed set of nodes; c10d: nodes may leave and rejoin (needed for restarts)",
                 choice("static", "c10d"), "static", opposite(by_hostfile)),
    ),
    asked_when=on_several_machines,
)  # fmt: skip

PROCESSES = Topic(
    "Processes",
    (
        Question("num_processes", "Number of processes, on all machines together?", Number(least=1),
                 default_processes, said("machine", *SEVERAL), divides_evenly),
        Question("num_processes", "Number of TPU cores?", Number(least=1), 8, said("machine", "XLA")),
        Question("gpu_ids", "Which devices of this machine? Numbers such as 0,1 or all", Text(), "all",
                 said("machine", *ACCELERATORS), are_enough),
        Question("gpu_ids", "Which GPU? A number, or all", Text(), "all",
                 every(said("machine", "NO"), opposite(said("use_cpu"))),
                 lambda value, answers: are_enough(value, {"num_processes": 1})),
        about("enable_cpu_affinity", False, said("machine", "MULTI_GPU")),
        about("debug", False, said("machine", *SEVERAL)),
    ),
    asked_when=opposite(every(said("machine", "NO"), said("use_cpu"))),
)  # fmt: skip

NAME = Text(without_blanks=True)
HOSTFILE = os.path.expanduser("~/hostfile")

MPI = Topic(
    "MPI",
    (
        Question("uses_mpirun", "Start the processes with mpirun?", Truth(), False, is_saved=False),
        about("mpirun_hostfile", HOSTFILE, said("uses_mpirun"), kind=Path()),
        about("mpirun_ccl", 1, said("uses_mpirun"), kind=Number(least=1)),
    ),
    section="mpirun_config",
    asked_when=every(said("machine", "MULTI_CPU"), said("way", "PLAIN")),
)  # fmt: skip

COMMANDS = Choice((("none", "none"), ("file", "those in a file"), ("typed", "some that I type now")))
NAMES = Words(r"[\w.:/-]+", "the name or address of a machine")
LINES = Words(separator=";")
VARIABLES = Words(r"[A-Za-z_]\w*=.*", "a variable such as NAME=value")


def is_there(value: str, answers: Answers) -> str:
    """Reject a file that does not exist."""
    return "" if os.path.isfile(value) else f"The file {value!r} does not exist."


TPU = Topic(
    "TPU",
    (
        about("main_training_function", "main", kind=NAME),
        about("downcast_bf16", False),
        Question("tpu_use_cluster", "Is it a pod of several machines?", Truth(), False),
        about("tpu_name", None, said("tpu_use_cluster"), kind=NAME),
        about("tpu_zone", None, said("tpu_use_cluster"), kind=NAME),
        about("tpu_use_sudo", False, said("tpu_use_cluster")),
        Question("commands_from", "Which commands do the machines run first?", COMMANDS, "none",
                 said("tpu_use_cluster"), is_saved=False),
        Question("command_file", "Which file?", Path(), None, said("commands_from", "file"), is_there),
        Question("commands", "Which commands? With semicolons between them", LINES, None,
                 said("commands_from", "typed")),
        Question("tpu_vm", "Which machines of the pod? Names, separated by commas, nothing for all", NAMES, None,
                 said("tpu_use_cluster"), is_required=False),
        Question("tpu_env", "Which environment variables are set there? As in NAME=value, nothing for none", VARIABLES, None,
                 said("tpu_use_cluster"), is_required=False),
    ),
    asked_when=said("machine", "XLA"),
)  # fmt: skip


def placed(answers: Answers) -> dict[str, Any]:
    """The keys of the config file about hardware, engine and processes."""
    way, machine = answers.get("way", "PLAIN"), answers["machine"]
    return {
        "distributed_type": machine if way == "PLAIN" else way,
        "use_cpu": on_cpu(answers),
        "num_processes": answers.get("num_processes", 1),
    }
