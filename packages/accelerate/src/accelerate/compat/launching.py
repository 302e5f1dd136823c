"""Functions of accelerate 1.15 for programs that build launches themselves."""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_cli.launch.command import finish
from accel_cli.launch.flags.group import OptionGroup
from accel_cli.launch.flags.table import FP8, GROUPS, PARALLELISM, known_options, value_of
from accel_cli.launch.libraries import check_libraries
from accel_cli.launch.machine import Machine
from accel_cli.launch.plan import Plan, agent_arguments, environment, make_plan, rendezvous
from accel_cli.launch.resolve import from_namespace, resolve
from accel_cli.launch.runners.sagemaker import credentials, job
from accel_cli.launch.runners.sagemaker import plan as plan_job
from accel_cli.launch.runners.tpu import xla_variables
from accel_cli.launch.settings import ROWS, LaunchSettings
from accel_cli.launch.validate import check_flags, check_settings
from accel_state.public_names import known_as

if TYPE_CHECKING:
    from accel_cli.configfile.schema import BaseConfig

options_to_group = {group.shown_with.lstrip("-"): group.title for group in GROUPS if group.shown_with}


def clean_option(option: str) -> str | None:
    """Turn a long flag into the name of its value: `--num-processes` into `num_processes`; None for other words."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


@known_as("accelerate.commands.launch.CustomHelpFormatter")
class CustomHelpFormatter(HelpFormatter):
    """Help without the groups of options whose flag is not on the command line.

    Attributes:
        titles: The titles of the groups that are left out.
    """

    titles: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = {clean_option(word.partition("=")[0]) for word in sys.argv[1:]}
        self.titles = [title for option, title in options_to_group.items() if option not in options]

    def add_argument(self, action: Action) -> None:
        """Add an option, unless its group is left out."""
        if not self._is_left_out():
            super().add_argument(action)

    def end_section(self) -> None:
        """Finish a group, and forget it if it is left out."""
        if self._is_left_out():
            self._current_section.items.clear()
        super().end_section()

    def _is_left_out(self) -> bool:
        return self._current_section.heading in self.titles


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return the value of a path variable with one more path at its end; the variable is not changed."""
    paths = [path for path in os.environ.get(env_var_name, "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, str(path_to_add)])


def settle_arguments(args: Namespace) -> tuple[Namespace, BaseConfig | None, bool]:
    """Check a parsed command line and resolve it in place, as `accelerate launch` does before it starts anything.

    The script is not checked, and a free port is chosen later by the runner.

    Args:
        args: The parsed command line of `accelerate launch`.

    Returns:
        `args`; the config file, or None if none is used; and whether the precision is that of the file.

    Raises:
        ValueError: The command line, the config file or the environment is not valid.
        FileNotFoundError: The config file of `--config_file` does not exist.
    """
    check_flags(from_namespace(args))
    settings = resolve(args)
    check_settings(settings, script=False)
    chosen = {name: getattr(settings, name) for name in ROWS if name != "main_process_port"}
    chosen |= {name: value_of(settings, name) for name in known_options().keys() - ROWS.keys()}
    # some flags are "true" or "false"; in a file these are bools, and programs expect them
    chosen |= {name: value == "True" for name, value in chosen.items()
               if settings.sources.get(name) == "file" and value in ("True", "False")}  # fmt: skip
    vars(args).update(chosen, use_cpu=settings.use_cpu)
    if settings.sources.get("main_process_port") != "guess":
        args.main_process_port = settings.main_process_port
    if settings.settings_file is None:
        return args, None, False
    from accel_cli.configfile.read import load_config_from_file

    return args, load_config_from_file(settings.settings_file), settings.sources.get("mixed_precision") == "file"


def filter_arguments(args: Namespace, parser: ArgumentParser, default_args: Sequence[str] = ()) -> Namespace:
    """Return the arguments that another parser has.

    Args:
        args: The arguments; names that the parser does not have are left out.
        parser: For example that of torch's launcher.
        default_args: Parsed for the rest; unknown ones are ignored.
    """
    namespace, _ = parser.parse_known_args(default_args)
    vars(namespace).update({name: value for name, value in vars(args).items() if hasattr(namespace, name)})
    return namespace


def mpirun_words(machine: Machine | None = None) -> tuple[str, str, str, str, str]:
    """Return the program and flags of this machine's mpirun.

    Args:
        machine: Queries about the machine.

    Returns:
        The program, and its flags for the list of machines, the number of processes, that of one machine, and what
        processes are bound to (empty where nobody must say so).

    Raises:
        ValueError: There is no mpirun (a FileNotFoundError, too), or an unknown one.
    """
    from accel_cli.launch.runners.mpi import kind_of

    kind = kind_of((machine or Machine()).mpi_version())
    return "mpirun", kind.hostfile, "-n", kind.per_machine, "--bind-to" if "--bind-to" in kind.always else ""


def prepare_simple_launcher_cmd_env(
    args: Namespace, machine: Machine | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command for one process, or for mpirun when there is a hostfile, and its whole environment.

    Args:
        args: The parsed command line of `accelerate launch`.
        machine: Queries about the machine.
    """
    settings = resolve(args, machine=machine)
    plan = make_plan(settings.with_changes(runner="mpi" if settings.runner == "mpi" else "simple"))
    return list(plan.argv), {**os.environ, **plan.environment}


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Return the whole environment of a process that torch's elastic agent starts.

    Args:
        args: The parsed command line of `accelerate launch`. The arguments of the agent are added to it, by the names
            of the agent's flags: `nproc_per_node`, `nnodes` and, depending on the machines, `master_addr`,
            `master_port` (a `str`), `node_rank` or `rdzv_endpoint`.
    """
    settings = _with_agent(args)
    words = agent_arguments(settings)
    vars(args).update({name: value if name == "node_rank" else str(value) for name, value in words.items()})
    args.main_process_port, args.rdzv_backend = settings.main_process_port, rendezvous(settings)
    return {**os.environ, **environment(settings, os.environ)}


def _with_agent(args: Namespace) -> LaunchSettings:
    settings = resolve(args).with_changes(runner="torchrun")
    if settings.num_machines == 1 and not settings.main_process_port:
        settings = settings.with_changes(main_process_port=Machine().port(settings.main_process_port))
    return settings


def setup_fp8_env(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of training in FP8 to `current_env`, and return it."""
    return _add(current_env, args, *FP8)


def prepare_extend_env_parallelism_config(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of the device mesh to `current_env`, and return it."""
    return _add(current_env, args, *PARALLELISM)


def _add(current_env: dict[str, str], args: Namespace, *groups: OptionGroup) -> dict[str, str]:
    settings = from_namespace(args)
    current_env |= {variable: text for group in groups for _, variable, text in group.variables(settings)}
    return current_env


def simple_launcher(args: Namespace) -> None:
    """Run the script in one process and wait.

    Raises:
        subprocess.CalledProcessError: When it fails; with `--quiet`, `SystemExit` instead.
    """
    command, variables = prepare_simple_launcher_cmd_env(args)
    finish(Plan("simple", tuple(command), variables, quiet=bool(args.quiet)))


def multi_gpu_launcher(args: Namespace) -> None:
    """Run the script in several processes, under torch's elastic agent, and wait; raises as `simple_launcher`."""
    finish(make_plan(_with_agent(args)))


def prepare_deepspeed_cmd_env(args: Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command and environment that start DeepSpeed's processes.

    Args:
        args: The parsed command line of `accelerate launch`.

    Returns:
        The command of DeepSpeed's launcher, or None when torch's elastic agent starts them; and the whole
        environment.
    """
    plan = make_plan(_with_deepspeed(args))
    return list(plan.argv) if plan.runner == "deepspeed" else None, {**os.environ, **plan.environment}


def deepspeed_launcher(args: Namespace) -> None:
    """Train with DeepSpeed, and wait; raises as `simple_launcher`, and ValueError without the library."""
    settings = _with_deepspeed(args)
    check_libraries(settings)
    finish(make_plan(settings))


def _with_deepspeed(args: Namespace) -> LaunchSettings:
    return resolve(Namespace(**{**vars(args), "use_deepspeed": True}))


def prepare_tpu(args: Namespace, current_env: dict[str, str], pod: bool = False) -> tuple[Namespace, dict[str, str]]:
    """Add the variables of torch_xla to `current_env`, and return it with the arguments.

    Args:
        args: The parsed command line of `accelerate launch`.
        current_env: The variables.
        pod: Whether the machines of a pod take part; `args.tpu` and `args.vm` then name it and them.
    """
    current_env |= xla_variables(from_namespace(args))
    if args.debug:
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm = getattr(args, "tpu_vm", None) or args.vm
        args.tpu = getattr(args, "tpu_name", None)
    return args, current_env


def tpu_launcher(args: Namespace) -> None:
    """Call a function of the script on every core of this machine's TPU, and wait; raises as `deepspeed_launcher`."""
    _launch_on_tpu(args, pod=False)


def tpu_pod_launcher(args: Namespace) -> None:
    """Start the script on every machine of a TPU pod, and wait; raises as `deepspeed_launcher`."""
    _launch_on_tpu(args, pod=True)


def _launch_on_tpu(args: Namespace, *, pod: bool) -> None:
    settings = resolve(Namespace(**{**vars(args), "tpu": True, "tpu_use_cluster": pod}))
    check_libraries(settings)
    finish(make_plan(settings))


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of SageMaker's `HuggingFace` estimator, and the inputs of its `fit`.

    The variables with the AWS credentials are set in this process.

    Args:
        sagemaker_config: A `SageMakerConfig`.
        args: The parsed command line of `accelerate launch`.

    Raises:
        ValueError: The script or its arguments cannot be sent.
    """
    settings = from_namespace(args)
    os.environ.update(credentials(sagemaker_config, settings, os.environ))
    return job(sagemaker_config, settings)


def sagemaker_launcher(sagemaker_config: Any, args: Namespace) -> None:
    """Start a job on Amazon SageMaker and wait for its end; raises as `deepspeed_launcher`."""
    settings = from_namespace(args).with_changes(
        sagemaker=sagemaker_config, use_deepspeed=False, tpu=False, runner="sagemaker"
    )
    check_libraries(settings)
    finish(plan_job(settings, os.environ))
