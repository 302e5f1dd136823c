"""The settings of a launch: one field for each option that the launcher itself uses, and the resolved values.

Options that the launcher only passes to the processes are fields of settings classes; see `flags.table`.
"""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from accel_cli.arguments import Flag, only_if_on, switch
from accel_state.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accel_state.enums import PrecisionType
from accel_state.settings.option import BOOLEAN, INTEGER, NUMBER, one_of

CHECK_GRADIENTS = "ACCELERATE_CHECK_GRADIENTS"
PRECEDENCE = ("flag", "file", "environment", "cluster", "guess")
PRECISIONS = tuple(PrecisionType.list())

COMMAND, HARDWARE, RESOURCES = "", "Hardware Selection Arguments", "Resource Selection Arguments"
PARADIGM, PROCESSES, TPU = "Training Paradigm Arguments", "Distributed GPUs", "TPU"
DEEPSPEED, FP8, AWS, MPI = "DeepSpeed Arguments", "FP8 Arguments", "AWS Arguments", "MPI Arguments"
RAY = "Ray Arguments"
RETIRED, SCRIPT = "retired", "script"  # not headings: options without help, and positional arguments


def _row(group: str, option: Flag, *more: Flag) -> Any:
    """A field that is an option of `accelerate launch`.

    Args:
        group: The heading it stands under.
        option: The row; its name is that of the field.
        *more: Other flags that set the same value.
    """
    return field(default=option.default, metadata={"group": group, "rows": (option, *more)})


@dataclass(frozen=True, eq=False, repr=False)
class LaunchSettings:
    """The options of a launch, and what was resolved of them. Options that were not given have their default.

    The fields without a row of their own are set by `resolve`:

    Attributes:
        use_cpu: Whether processes run on the CPU.
        options: Name -> value of the options that settings classes declare; `flags.table.value_of` adds their
            defaults.
        sources: Option name -> `"flag"`, `"file"`, `"environment"`, `"cluster"` or `"guess"`; an option that is not in it has its
            default.
        notes: Lines to print for the user.
        runner: Which runner starts the processes, a key of `accel_cli.launch.plan.PLANNERS`.
        settings_file: Path of the config file that was read.
        sagemaker: Its content, a `SageMakerConfig`, if it is for Amazon.
        deepspeed_fields: Fields of the file that a DeepSpeed configuration file would contain, too.
        cluster: Whose job this command is a part of; empty outside of one.
        started_by: The launcher that started this command once for each process; empty if this command starts them.
        is_apart: Whether variables name ranks of another run, which the processes of this one must not take for theirs.
        hosts: Machines of the hostfile, with the number of slots of each if it is given.
        has_default_hostfile: Whether DeepSpeed's default hostfile exists.
        visible_devices_variable: The variable that limits which accelerators a process sees.
        device_fault: The error of settings that ask for accelerators which the processes would not see; empty without one.
        mpi_version: The output of `mpirun --version`.
        is_root: Whether this user is root.
        port_was_named: Whether the user chose the port of the rendezvous.
    """

    config_file: str | None = _row(
        COMMAND, Flag("--config_file", "Config file to use instead of the default one.", metavar="FILE")
    )
    quiet: bool = _row(COMMAND, switch("-q --quiet", "Suppress the launcher's crash report.", default=None))
    module: bool = _row(
        COMMAND, switch("-m --module", "The script is the name of a module, as in `python -m`.", default=None)
    )
    no_python: bool = _row(
        COMMAND,
        switch("--no_python", "The script is a program of its own: do not put `python` before it.", default=None),
    )
    dry_run: bool = _row(
        COMMAND,
        switch("--dry_run", "Start nothing: print every setting, where it comes from, and the command.", default=None),
    )
    debug: bool = _row(
        COMMAND,
        switch(
            "--debug",
            "Debug mode: check tensor shapes on all ranks before every collective (slower).",
            default=None,
            environment="ACCELERATE_DEBUG_MODE",
            spelled=only_if_on("true"),
        ),
    )
    cpu: bool = _row(HARDWARE, switch("--cpu", "Train on CPU even if an accelerator is available."))
    multi_gpu: bool = _row(
        HARDWARE, switch("--multi_gpu", "Train on several GPUs or other accelerators, one process each.")
    )
    tpu: bool = _row(HARDWARE, switch("--tpu", "Train on TPUs."))
    mixed_precision: str = _row(
        RESOURCES,
        Flag(
            "--mixed_precision",
            "Mixed precision dtype; `no` trains in the model's own.",
            kind=one_of(*PRECISIONS)._replace(brought_by="accelerate.precisions"),
            environment="ACCELERATE_MIXED_PRECISION",
            spelled=str,
        ),
    )
    num_processes: int = _row(
        RESOURCES, Flag("--num_processes", "Number of processes, on all machines together.", kind=INTEGER)
    )
    num_machines: int = _row(RESOURCES, Flag("--num_machines", "Number of machines.", kind=INTEGER))
    num_cpu_threads_per_process: int | None = _row(
        RESOURCES,
        Flag(
            "--num_cpu_threads_per_process",
            "CPU threads of each process.",
            kind=INTEGER,
            environment="OMP_NUM_THREADS",
        ),
    )
    hang_timeout: float | None = _row(
        RESOURCES,
        Flag(
            "--hang_timeout",
            "End the run, and show where each process is, when none has made progress for this long.",
            kind=NUMBER,
            metavar="SECONDS",
        ),
    )
    watch_ranks: bool = _row(
        RESOURCES,
        Flag(
            "--no_watch_ranks",
            "Disable deadlock detection; stuck ranks wait for the process-group timeout.",
            default=True,
            kind=BOOLEAN,
            action="store_false",
            dest="watch_ranks",
            environment="ACCELERATE_WATCH_RANKS",
            spelled=lambda value: "" if value else "0",
        ),
    )
    enable_cpu_affinity: bool = _row(
        RESOURCES,
        switch(
            "--enable_cpu_affinity",
            "Pin each process to the CPU cores that are near its GPU.",
            environment="ACCELERATE_CPU_AFFINITY",
            spelled=only_if_on("1"),
        ),
    )
    use_deepspeed: bool = _row(PARADIGM, switch("--use_deepspeed", "Train with DeepSpeed."))
    use_fsdp: bool = _row(PARADIGM, switch("--use_fsdp", "Train with fully sharded data parallelism."))
    use_parallelism_config: bool = _row(
        PARADIGM, switch("--use_parallelism_config", "Combine several kinds of parallelism.")
    )
    use_megatron_lm: bool = _row(PARADIGM, switch("--use_megatron_lm", "Train with Megatron-LM."))
    engine: str | None = _row(
        PARADIGM,
        Flag("--engine", "Train with an engine of another package.", environment="ACCELERATE_ENGINE"),
    )
    launcher: str | None = _row(
        PROCESSES,
        Flag("--launcher", "Who starts the processes: ray, for the workers of Ray Train.", kind=one_of("ray")),
    )
    ray_resources: str | None = _row(
        RAY, Flag("--ray_resources", "What each process reserves, such as CPU=4,GPU=1.", metavar="PAIRS")
    )
    ray_runtime_env: str | None = _row(
        RAY, Flag("--ray_runtime_env", "Ray's runtime environment: a YAML or JSON file, or JSON.", metavar="ENV")
    )
    gpu_ids: str | None = _row(
        PROCESSES,
        Flag("--gpu_ids", "GPUs of this machine to use, separated by commas; `all` for all.", metavar="IDS"),
    )
    same_network: bool = _row(PROCESSES, switch("--same_network", "All machines are in one local network."))
    machine_rank: int = _row(PROCESSES, Flag("--machine_rank", "Rank of this machine, from 0.", kind=INTEGER))
    main_process_ip: str | None = _row(
        PROCESSES, Flag("--main_process_ip", "Address of machine 0.", metavar="ADDRESS")
    )
    main_process_port: int | None = _row(
        PROCESSES,
        Flag("--main_process_port", "Port on machine 0; 0 for any free one.", kind=INTEGER, metavar="PORT"),
    )
    tee: str = _row(
        PROCESSES,
        Flag("-t --tee", "Write output to a file and to the console: 1 stdout, 2 stderr, 3 both.", default="0"),
    )
    log_dir: str | None = _row(
        PROCESSES, Flag("--log_dir", "Folder for the files that --tee writes.", metavar="FOLDER")
    )
    role: str = _row(PROCESSES, Flag("--role", "Name of the processes in the logs.", default="default"))
    rdzv_backend: str = _row(
        PROCESSES, Flag("--rdzv_backend", "Rendezvous backend.", default="static", metavar="BACKEND")
    )
    rdzv_conf: str = _row(
        PROCESSES,
        Flag(
            "--rdzv_conf",
            "Rendezvous configuration, as key=value pairs separated by commas.",
            default="",
            metavar="PAIRS",
        ),
    )
    max_restarts: int = _row(
        PROCESSES,
        Flag("--max_restarts", "How often to restart all processes after a failure.", default=0, kind=INTEGER),
    )
    monitor_interval: float = _row(
        PROCESSES,
        Flag(
            "--monitor_interval",
            "Seconds between two checks of the processes.",
            default=0.1,
            kind=NUMBER,
            metavar="SECONDS",
        ),
    )
    shutdown_timeout: int | None = _row(
        PROCESSES,
        Flag(
            "--shutdown_timeout",
            "How long processes may go on after a signal, for example to save, before they are killed; 30 by default.",
            kind=INTEGER,
            metavar="SECONDS",
            environment="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
    )
    tpu_use_cluster: bool = _row(
        TPU,
        switch("--tpu_cluster", "Start on all machines of a TPU pod.", dest="tpu_use_cluster"),
        Flag(
            "--no_tpu_cluster",
            "Start on this machine only.",
            default=True,
            kind=BOOLEAN,
            action="store_false",
            dest="tpu_use_cluster",
        ),
    )
    tpu_use_sudo: bool = _row(TPU, switch("--tpu_use_sudo", "Run the command on the pod's machines with sudo."))
    vm: list[str] | None = _row(
        TPU, Flag("--vm", "A machine of the pod; may be given several times.", action="append")
    )
    env: list[str] | None = _row(
        TPU,
        Flag(
            "--env",
            "An environment variable to set on the pod's machines; may be given several times.",
            action="append",
        ),
    )
    main_training_function: str | None = _row(
        TPU, Flag("--main_training_function", "Function of the script to call on each core.", metavar="NAME")
    )
    downcast_bf16: bool = _row(
        TPU,
        switch(
            "--downcast_bf16",
            "Use bfloat16 for both float and double.",
            environment="ACCELERATE_DOWNCAST_BF16",
            spelled=only_if_on("true"),
        ),
    )
    tpu_name: str | None = _row(TPU, Flag("", "Name of the pod.", dest="tpu_name"))
    tpu_zone: str | None = _row(TPU, Flag("", "Zone of the pod.", dest="tpu_zone"))
    deepspeed_hostfile: str | None = _row(
        DEEPSPEED, Flag("--deepspeed_hostfile", "Hostfile: the list of machines.", metavar="FILE")
    )
    deepspeed_exclusion_filter: str | None = _row(
        DEEPSPEED, Flag("--deepspeed_exclusion_filter", "Machines or GPUs to leave out.", metavar="FILTER")
    )
    deepspeed_inclusion_filter: str | None = _row(
        DEEPSPEED, Flag("--deepspeed_inclusion_filter", "Machines or GPUs to use.", metavar="FILTER")
    )
    deepspeed_multinode_launcher: str = _row(
        DEEPSPEED,
        Flag(
            "--deepspeed_multinode_launcher",
            "How to start on several machines: pdsh, standard (this command on each of them), openmpi, mvapich, "
            "mpich, slurm or nossh.",
            kind=one_of(*DEEPSPEED_MULTINODE_LAUNCHERS, exact=False),
            as_text=True,
            metavar="LAUNCHER",
        ),
    )
    fp8_backend: str | None = _row(
        FP8,
        Flag(
            "--fp8_backend",
            "FP8 backend: torchao, Transformer Engine or MS-AMP.",
            kind=one_of("ao", "te", "msamp"),
            environment="ACCELERATE_FP8_BACKEND",
            spelled=str,
        ),
    )
    aws_access_key_id: str | None = _row(
        AWS, Flag("--aws_access_key_id", "Key id for starting an Amazon SageMaker job.", metavar="ID")
    )
    aws_secret_access_key: str | None = _row(AWS, Flag("--aws_secret_access_key", "Its secret key.", metavar="KEY"))
    mpirun_hostfile: str | None = _row(
        MPI, Flag("--mpirun_hostfile", "Hostfile for starting CPU processes with mpirun.", metavar="FILE")
    )
    mpirun_ccl: int | None = _row(
        MPI,
        Flag("", "oneCCL worker threads of each process.", kind=INTEGER, dest="mpirun_ccl",
               environment="CCL_WORKER_COUNT"),
    )  # fmt: skip
    # options of older versions: accepted, with a note that they have no effect
    ipex: bool = _row(RETIRED, switch("--ipex", SUPPRESS))
    use_xpu: bool = _row(RETIRED, switch("--use_xpu", SUPPRESS))
    training_script: str = _row(SCRIPT, Flag("training_script", "The script to run."))
    training_script_args: list[str] = _row(
        SCRIPT, Flag("training_script_args", "Its arguments: everything that follows.", nargs="...")
    )

    use_cpu: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    runner: str = ""
    settings_file: str | None = None
    sagemaker: Any = None
    deepspeed_fields: tuple[str, ...] = ()
    cluster: str = ""
    started_by: str = ""
    is_apart: bool = False
    hosts: Mapping[str, int | None] = field(default_factory=dict)
    has_default_hostfile: bool = False
    visible_devices_variable: str = "CUDA_VISIBLE_DEVICES"
    device_fault: str = ""
    mpi_version: str = ""
    is_root: bool = False
    port_was_named: bool = False

    def with_changes(self, **changes: Any) -> Self:
        """Return these settings with other values in some fields."""
        return replace(self, **changes)

    def with_values(self, values: Mapping[str, Any], source: str) -> Self:
        """Return these settings with options set, except for those that a source of higher precedence has set.

        Args:
            values: Option name -> value.
            source: One of `PRECEDENCE`.
        """
        rank = PRECEDENCE.index(source)
        taken = {
            name: value
            for name, value in values.items()
            if name not in self.sources or rank <= PRECEDENCE.index(self.sources[name])
        }
        own = {name: value for name, value in taken.items() if name in ROWS}
        others = {name: value for name, value in taken.items() if name not in ROWS}
        sources = {**self.sources, **dict.fromkeys(taken, source)}
        return replace(self, **own, options={**self.options, **others}, sources=sources)

    def with_notes(self, *notes: str) -> Self:
        """Return these settings with further notes for the user."""
        return replace(self, notes=(*self.notes, *notes)) if notes else self


def rows_under(group: str) -> Iterator[Flag]:
    """Yield the rows of the launcher's own options under a heading."""
    for known in fields(LaunchSettings):
        if known.metadata.get("group") == group:
            yield from known.metadata["rows"]


# where two flags set one value, the first one has its default
ROWS: Mapping[str, Flag] = {
    known.name: known.metadata["rows"][0] for known in fields(LaunchSettings) if "rows" in known.metadata
}
