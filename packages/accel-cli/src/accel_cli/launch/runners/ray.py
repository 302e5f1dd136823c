"""A launch on Ray: Ray Train starts, places and restarts the workers; run as a program by the launches that this plans."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.launch.plan import Plan, environment
from accel_cli.launch.runners.local import LOOK_SECONDS
from accel_cli.launch.runners.ray_worker import Mailbox, Process, run_process
from accel_cli.launch.runners.signals import ENDING, NOTICES, handled, status_after
from accel_cli.launch.runners.simple import exit_status
from accel_cli.launch.settings import LaunchSettings
from accel_cli.supervise.failures import describe_end
from accel_cli.supervise.watch import PATIENCE_SECONDS
from accel_state.supervision import SIGNS_OF_LOSS

ADDRESS = "RAY_ADDRESS"
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
REACH_SECONDS = 10.0
FREE_SECONDS = 5.0  # until Ray knows that what a run used is free again
PASSED_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
SETTINGS_OF_RAY = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, Ray would copy this folder to every worker
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
STREAMS = {"stdout": sys.stdout, "stderr": sys.stderr}


def plan(settings: LaunchSettings, environ: Mapping[str, str]) -> Plan:
    """Plan a launch on Ray.

    Args:
        settings: The resolved settings.
        environ: The variables that are set already. Those with which our settings begin go to all workers.

    Raises:
        ValueError: A value of the options of Ray is not possible.
    """
    variables = environment(settings, environ)
    passed = [name for name in environ if name.startswith(PASSED_PREFIXES)]
    words = [sys.executable or "python3", "-m", __name__, "--num_processes", str(settings.num_processes)]
    words += ["--max_restarts", str(settings.max_restarts)] if settings.max_restarts else []
    words += ["--variables", ",".join(sorted({*variables, *passed}))]
    if resources := _resources(settings.ray_resources or ""):
        words += ["--resources", json.dumps(resources)]
    if settings.ray_runtime_env:
        words += ["--runtime_env", json.dumps(_runtime_env(settings.ray_runtime_env))]
    if settings.shutdown_timeout is not None:
        words += ["--shutdown_timeout", str(settings.shutdown_timeout)]
    words += ["--quiet"] if settings.quiet else []
    python = [] if settings.no_python else ["python", "-u"]
    module = ["-m"] if settings.module else []
    return Plan(
        "ray",
        (*words, "--", *python, *module, settings.training_script, *settings.training_script_args),
        variables,
        quiet=bool(settings.quiet),
    )


def _resources(text: str) -> dict[str, float]:
    """Resource -> amount, from text such as `CPU=4,GPU=1`."""
    resources = {}
    for pair in filter(None, text.split(",")):
        name, _, amount = pair.partition("=")
        try:
            resources[name.strip()] = float(amount)
        except ValueError:
            raise UsageError(f"--ray_resources must be pairs like CPU=4,GPU=1, got {text!r}.") from None
    return resources


def _runtime_env(text: str) -> dict[str, Any]:
    """The runtime environment of Ray, from a file or JSON."""
    import yaml

    try:
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                text = file.read()
        values = yaml.safe_load(text)  # which reads JSON, too
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--ray_runtime_env cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--ray_runtime_env must be a YAML or JSON file with a mapping, or JSON, got {text!r}.")
    return values


def main(words: Sequence[str] | None = None) -> int:
    """Run a script in the workers of Ray Train.

    Args:
        words: The command line; that of this process when None.

    Returns:
        The exit status, as that of a launch on this machine.
    """
    args = _parser().parse_args(words)
    for name, value in SETTINGS_OF_RAY.items():
        os.environ.setdefault(name, value)
    try:
        with _connected(args) as use_gpu:
            return _Run(args, use_gpu).run()
    except UsageError as error:
        print(f"accelerate launch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accelerate launch --launcher ray")
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--max_restarts", type=int, default=0)
    parser.add_argument("--shutdown_timeout", type=float, default=30.0)
    parser.add_argument("--variables", default="")
    parser.add_argument("--resources", type=json.loads)
    parser.add_argument("--runtime_env", type=json.loads)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("command", nargs="+")
    return parser


@contextmanager
def _connected(args: argparse.Namespace) -> Iterator[bool]:
    """Join the cluster of `RAY_ADDRESS`, or start one on this machine.

    Yields:
        Whether workers get GPUs.

    Raises:
        ValueError: It cannot be reached, or has fewer resources than the workers need.
    """
    import ray

    address = os.environ.get(ADDRESS)
    local = {} if address else _local_cluster(args)
    if address:
        _check_reachable(address)
    try:
        ray.init(address or "local", runtime_env=args.runtime_env, log_to_driver=False, logging_level="ERROR", **local)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"The cluster at {ADDRESS}={address}" if address else "A cluster on this machine"
        raise UsageError(f"{where} cannot be used: {(str(error) or repr(error)).splitlines()[0]}") from error
    try:
        total = ray.cluster_resources()
        use_gpu = os.environ.get("ACCELERATE_USE_CPU") != "True" and total.get("GPU", 0) > 0
        use_gpu = use_gpu and (args.resources or {}).get("GPU", 1) > 0
        _check_resources(args.resources or {"GPU" if use_gpu else "CPU": 1.0}, args.num_processes)
        yield use_gpu
    finally:
        ray.shutdown()


def _local_cluster(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a cluster on this machine: as in other launches, processes may share its cores."""
    cores = int(args.num_processes * (args.resources or {}).get("CPU", 1))
    return {"num_cpus": max(cores, os.cpu_count() or 1), "include_dashboard": False}


def _check_reachable(address: str) -> None:
    if address.startswith("ray://"):
        raise UsageError(
            f"{ADDRESS}={address} is a Ray Client's, which Ray Train does not support. Launch on a machine of the cluster, with "
            f"{ADDRESS}=auto, or from `ray job submit`."
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # auto, or local
        return
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"No head of Ray can be reached at {ADDRESS}={address} ({error}). Start it (ray start --head), correct the address, or "
            "unset the variable for a cluster on this machine."
        ) from None


def _check_resources(each: Mapping[str, float], count: int) -> None:
    """Check that the workers find what they reserve; what a run that has just ended used is waited for."""
    import ray

    if START_TIMEOUT in os.environ:  # nodes may come, or other runs end
        return
    deadline = time.monotonic() + FREE_SECONDS
    total, free = ray.cluster_resources(), ray.available_resources()
    while any(free.get(name, 0) < amount * count <= total.get(name, 0) for name, amount in each.items()):
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
        total, free = ray.cluster_resources(), ray.available_resources()
    for name, amount in each.items():
        if amount * count > free.get(name, 0):
            others = f", of which {free.get(name, 0):g} are free" if amount * count <= total.get(name, 0) else ""
            raise UsageError(
                f"{count} workers need {amount * count:g} {name}, and the cluster has {total.get(name, 0):g}{others}. Give a lower "
                f"--num_processes or --ray_resources. Where nodes are added on demand, or to wait for other runs, set {START_TIMEOUT} to "
                "the seconds to wait."
            )


class _Run:
    """One run of `TorchTrainer`, in a thread: this one prints, and takes signals."""

    def __init__(self, args: argparse.Namespace, use_gpu: bool) -> None:
        import ray

        self.args, self.use_gpu = args, use_gpu
        self.mailbox = ray.remote(Mailbox).options(num_cpus=0, label_selector=_this_node()).remote()
        self.codes: dict[int, int] = {}
        self.crashed: set[int] = set()
        self.begun: set[int] = set()
        self.victims: dict[int, str] = {}  # errors that may follow from one that is still to come
        self.tell_victims_at = float("inf")
        self.num_restarts = 0
        self.has_failed = False
        self.signal: int | None = None
        self.deadline = float("inf")
        self.error: BaseException | None = None

    def run(self) -> int:
        """Run to the end, and return the exit status."""
        thread = threading.Thread(target=self._fit, daemon=True)
        handlers = dict.fromkeys((*ENDING, "SIGINT"), self._end) | dict.fromkeys(NOTICES, self._send)
        with handled(handlers):
            thread.start()
            self._follow(thread)
        if self.signal is not None:
            return status_after(self.signal, self.codes, self.crashed)
        return 0 if self.error is None else self._report(self.error)

    def _fit(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        variables = [name for name in self.args.variables.split(",") if name in os.environ]
        runs_elsewhere = "working_dir" in (self.args.runtime_env or {})
        process = Process(
            tuple(self.args.command),
            {name: os.environ[name] for name in variables},
            None if runs_elsewhere else os.getcwd(),
            self.args.quiet,
        )
        restarts = self.args.max_restarts
        scaling = ScalingConfig(
            num_workers=self.args.num_processes, use_gpu=self.use_gpu, resources_per_worker=self.args.resources
        )
        try:
            with tempfile.TemporaryDirectory(prefix="accelerate_ray_") as folder:
                failures = FailureConfig(max_failures=restarts, controller_failure_limit=restarts)
                TorchTrainer(
                    run_process,
                    train_loop_config={"process": process, "mailbox": self.mailbox},
                    scaling_config=scaling,
                    torch_config=TorchConfig(backend="gloo"),  # only to agree on a port: the script makes its own
                    run_config=RunConfig(storage_path=folder, failure_config=failures),
                ).fit()
        except BaseException as error:  # for the main thread
            self.error = error

    def _follow(self, thread: threading.Thread) -> None:
        """Print what comes, until the run has ended or a signal's time is over."""
        import ray

        arrival = self.mailbox.read.remote()
        while thread.is_alive() and time.monotonic() < self.deadline:
            if ray.wait([arrival], timeout=LOOK_SECONDS)[0]:
                self._take(ray.get(arrival))
                arrival = self.mailbox.read.remote()
            if time.monotonic() > self.tell_victims_at:
                self._tell_victims()
        if ray.wait([arrival], timeout=LOOK_SECONDS)[0]:
            self._take(ray.get(arrival))
        self._tell_victims()

    def _take(self, news: list[tuple[str, int, Any]]) -> None:
        for kind, rank, content in news:
            if kind in STREAMS:
                STREAMS[kind].buffer.write(content)
                STREAMS[kind].flush()
            elif kind == "failure":
                self._take_failure(rank, content)
            elif kind == "ended":
                code, is_crash = content
                self.codes[rank] = code
                self.crashed |= {rank} if is_crash else set()
                if code < 0 and self.signal is None and not self.has_failed:
                    self._tell_failure(rank, f"accelerate launch: rank {rank} {describe_end(code)}.\n")
            else:
                self._begin(rank)

    def _begin(self, rank: int) -> None:
        """Take note of a process that begins; of one that has begun before, a new attempt of all."""
        if rank in self.begun:
            self._tell_victims()
            self.num_restarts += 1
            failed = self._first_failure()
            why = "a worker was lost" if failed is None else f"process {failed[0]} {describe_end(failed[1])}"
            self._say(
                f"accelerate launch: {why}; all are restarted (restart {self.num_restarts} of {self.args.max_restarts}).\n"
            )
            self.begun, self.codes, self.crashed, self.has_failed = set(), {}, set(), False
        self.begun.add(rank)

    def _take_failure(self, rank: int, text: str) -> None:
        """Print an error at once, unless another may be its cause."""
        if self.has_failed or not any(sign in text for sign in SIGNS_OF_LOSS):
            self._tell_failure(rank, text)
            self._tell_victims()
        else:
            self.tell_victims_at = min(self.tell_victims_at, time.monotonic() + PATIENCE_SECONDS)
            self.victims[rank] = text

    def _tell_victims(self) -> None:
        waiting, self.victims, self.tell_victims_at = self.victims, {}, float("inf")
        for rank, text in waiting.items():
            self._tell_failure(rank, text)

    def _tell_failure(self, rank: int, text: str) -> None:
        """Print the first failure of an attempt in full, and one line of those that follow."""
        if self.has_failed:
            text = f"accelerate launch: rank {rank} ended after it: {text.strip().splitlines()[-1].strip()}\n"
        self.has_failed = True
        self._say(text)

    def _say(self, text: str) -> None:
        if not self.args.quiet:
            print(text, file=sys.stderr, end="", flush=True)

    def _first_failure(self) -> tuple[int, int] | None:
        """Rank and code of a process that was killed, not terminated after another one; else of the first that failed."""
        failed = [(rank, code) for rank, code in self.codes.items() if code]
        killed = [(rank, code) for rank, code in failed if code < 0 and code != -signal.SIGTERM]
        return next(iter(killed or failed), None)

    def _send(self, number: int) -> None:
        self.mailbox.send.remote(signal.Signals(number).name)

    def _end(self, number: int) -> None:
        """Ask the processes to end; at once where there are none yet, or at the second time."""
        if not self.begun or self.signal is not None:
            self.deadline = 0.0
        else:
            self.deadline = time.monotonic() + self.args.shutdown_timeout
            self._send(number)
        self.signal = number

    def _report(self, error: BaseException) -> int:
        failed = self._first_failure()
        if failed is None:
            text = str(error).strip().splitlines()
            print(f"accelerate launch: {' '.join(text[:2])}"[:500], file=sys.stderr)
            return 1
        rank, code = failed
        self._say(f"accelerate launch: process {rank} {describe_end(code)}; the others were terminated.\n")
        return exit_status(code) or 1


def _this_node() -> dict[str, str]:
    import ray

    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


if __name__ == "__main__":
    sys.exit(main())
