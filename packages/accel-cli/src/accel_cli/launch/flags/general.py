"""Options about the machine, its processes and the script."""

from __future__ import annotations

from argparse import SUPPRESS

from accel_cli.arguments import Option, only_if_on, switch
from accel_cli.launch.flags.group import OptionGroup

DYNAMO_BACKENDS = (
    "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
    "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "torchxla_trace_once", "tvm",
)  # fmt: skip
MISSPELT_BACKENDS = {"torhchxla_trace_once": "torchxla_trace_once"}  # accelerate 1.15 accepts only the wrong spelling
DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")
PRECISIONS = ("no", "fp16", "bf16", "fp8")


def dynamo_name(backend: str) -> str:
    """Spell a backend as the member of `DynamoBackend` that it is."""
    word = backend.lower()
    return MISSPELT_BACKENDS.get(word, word).upper()


COMMAND = OptionGroup(
    "",
    (
        Option("--config_file", "Settings file to use instead of the default one.", metavar="FILE"),
        switch("-q --quiet", "Print nothing of our own when the script fails.", default=None),
        switch("-m --module", "The script is the name of a module, as in `python -m`.", default=None),
        switch("--no_python", "The script is a program of its own: do not put `python` before it.", default=None),
        switch("--dry_run", "Start nothing: print every setting, where it comes from, and the command.", default=None),
        switch(
            "--debug",
            "Compare shapes on all processes before every collective operation.",
            default=None,
            environment="ACCELERATE_DEBUG_MODE",
            spelled=only_if_on("true"),
        ),
    ),
)

HARDWARE = OptionGroup(
    "Hardware Selection Arguments",
    (
        switch("--cpu", "Train on the CPU, whatever else there is."),
        switch("--multi_gpu", "Train on several GPUs or other accelerators, one process each."),
        switch("--tpu", "Train on TPUs."),
    ),
)

RESOURCES = OptionGroup(
    "Resource Selection Arguments",
    (
        Option(
            "--mixed_precision",
            "Number format to compute in.",
            choices=PRECISIONS,
            environment="ACCELERATE_MIXED_PRECISION",
        ),
        Option("--num_processes", "How many processes to start, on all machines together.", type=int, metavar="N"),
        Option("--num_machines", "How many machines take part.", type=int, metavar="N"),
        Option(
            "--num_cpu_threads_per_process",
            "CPU threads of each process.",
            type=int,
            metavar="N",
            environment="OMP_NUM_THREADS",
        ),
        Option(
            "--hang_timeout",
            "End the run, and show where each process is, when none has made progress for this long.",
            type=float,
            metavar="SECONDS",
        ),
        switch(
            "--enable_cpu_affinity",
            "Keep each process on the CPU cores that are near its GPU.",
            environment="ACCELERATE_CPU_AFFINITY",
            spelled=only_if_on("1"),
        ),
        Option(
            "--dynamo_backend",
            "Compile the model with this backend of torch.compile.",
            choices=DYNAMO_BACKENDS,
            metavar="BACKEND",
            environment="ACCELERATE_DYNAMO_BACKEND",
            spelled=dynamo_name,
        ),
        Option(
            "--dynamo_mode",
            "What torch.compile optimises for.",
            default="default",
            choices=DYNAMO_MODES,
            environment="ACCELERATE_DYNAMO_MODE",
        ),
        switch(
            "--dynamo_use_fullgraph",
            "Fail rather than split the model into several graphs.",
            environment="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        ),
        switch(
            "--dynamo_use_dynamic",
            "Compile for shapes that change.",
            environment="ACCELERATE_DYNAMO_USE_DYNAMIC",
        ),
        switch(
            "--dynamo_use_regional_compilation",
            "Compile a repeated block once instead of the whole model.",
            environment="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        ),
    ),
)

PARADIGM = OptionGroup(
    "Training Paradigm Arguments",
    (
        switch("--use_deepspeed", "Train with DeepSpeed."),
        switch("--use_fsdp", "Train with fully sharded data parallelism."),
        switch("--use_parallelism_config", "Combine several kinds of parallelism."),
        switch("--use_megatron_lm", "Train with Megatron-LM."),
    ),
)

PROCESSES = OptionGroup(
    "Distributed GPUs",
    (
        Option("--gpu_ids", "Which GPUs of this machine to use, separated by commas; `all` for all.", metavar="IDS"),
        switch("--same_network", "All machines are in one local network."),
        Option("--machine_rank", "Number of this machine, from 0.", type=int, metavar="N"),
        Option("--main_process_ip", "Address of machine 0.", metavar="ADDRESS"),
        Option("--main_process_port", "Port on machine 0; 0 for any free one.", type=int, metavar="PORT"),
        Option("-t --tee", "Write output to a file and to the console: 1 stdout, 2 stderr, 3 both.", default="0"),
        Option("--log_dir", "Folder for the files that --tee writes.", metavar="FOLDER"),
        Option("--role", "Name of the processes in the logs.", default="default"),
        Option("--rdzv_backend", "How processes find one another.", default="static", metavar="BACKEND"),
        Option("--rdzv_conf", "More on that, as key=value pairs separated by commas.", default="", metavar="PAIRS"),
        Option("--max_restarts", "How often to start all processes again after a failure.", default=0, type=int,
               metavar="N"),
        Option("--monitor_interval", "Seconds between looks at the processes.", default=0.1, type=float,
               metavar="SECONDS"),
    ),
    shown_with="--multi_gpu",
)  # fmt: skip

TPU = OptionGroup(
    "TPU",
    (
        switch("--tpu_cluster", "Start on all machines of a TPU pod.", dest="tpu_use_cluster"),
        Option("--no_tpu_cluster", "Start on this machine only.", default=True, type=None, action="store_false",
               dest="tpu_use_cluster"),
        switch("--tpu_use_sudo", "Run the command on the pod's machines with sudo."),
        Option("--vm", "A machine of the pod; may be given several times.", action="append"),
        Option("--env", "A variable to set on the pod's machines; may be given several times.", action="append"),
        Option("--main_training_function", "Function of the script to call on each core.", metavar="NAME"),
        switch("--downcast_bf16", "Use bfloat16 for both float and double.",
               environment="ACCELERATE_DOWNCAST_BF16", spelled=only_if_on("true")),
        Option("", "Name of the pod.", dest="tpu_name"),
        Option("", "Zone of the pod.", dest="tpu_zone"),
    ),
    shown_with="--tpu",
    handed_when=lambda settings: settings.tpu,
)  # fmt: skip

AWS = OptionGroup(
    "AWS Arguments",
    (
        Option("--aws_access_key_id", "Key id for starting an Amazon SageMaker job.", metavar="ID"),
        Option("--aws_secret_access_key", "Its secret key.", metavar="KEY"),
    ),
    shown_with="--aws_access_key_id",
)

MPI = OptionGroup(
    "MPI Arguments",
    (
        Option("--mpirun_hostfile", "List of machines for starting CPU processes with mpirun.", metavar="FILE"),
        Option("", "oneCCL worker threads of each process.", dest="mpirun_ccl", type=int,
               environment="CCL_WORKER_COUNT"),
    ),
    shown_with="--cpu",
    handed_when=lambda settings: settings.use_cpu and bool(settings.mpirun_hostfile),
)  # fmt: skip

# what older versions had: accepted, and answered with a line on what to do instead
RETIRED = OptionGroup("", (switch("--ipex", SUPPRESS), switch("--use_xpu", SUPPRESS)))

SCRIPT = OptionGroup(
    "",
    (
        Option("training_script", "The script to run."),
        Option("training_script_args", "Its arguments: everything that follows.", type=None, nargs="..."),
    ),
)
