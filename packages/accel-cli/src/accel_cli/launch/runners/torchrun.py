"""Several processes, started and monitored by torch's elastic agent."""

from __future__ import annotations

import glob
import logging
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.launch.machine import free_port, network_variables
from accel_cli.launch.network import POD_SECONDS, REACH_SECONDS, gloo_interface, wait_until_reached
from accel_cli.launch.plan import Plan
from accel_cli.launch.runners.local import HUNG_STATUS, LOOK_SECONDS
from accel_cli.launch.runners.meeting import Meeting
from accel_cli.launch.runners.signals import NOTICES, handled, status_after
from accel_cli.launch.runners.simple import exit_status
from accel_cli.supervise.failures import crash_line, describe_end
from accel_cli.supervise.watch import Watch
from accel_state.interfaces import own_address
from accel_state.long_wait import LongWait

TRIES = 3
TOLD_ALIKE = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "ACCELERATE_ENGINE", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_",
)  # fmt: skip
"""Beginnings of the variables of a script that must be the same on all machines."""
WAITS = {
    "static": {"next_rendezvous": ("timeout", 900)},
    "c10d": {"get_rendezvous_handler": ("read_timeout", 60), "next_rendezvous": ("join_timeout", 600)},
}
"""Rendezvous backend -> function in which the agent waits for other machines -> key of `--rdzv_conf` for how long, and its default."""


def run(plan: Plan) -> int:
    """Run the script in all processes of this machine and wait.

    Returns:
        0 if all of them succeeded, else the exit status of the one that failed first; 124 if they hung. After a signal,
        the result of `status_after`.
    """
    from torch.distributed import run as torchrun

    from accel_state.environment import patch_environment

    if plan.quiet:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = torchrun.get_args_parser().parse_args(plan.argv[3:])
    variables = dict(plan.environment)
    if variables.get("ACCELERATE_USE_CPU", "False") == "False":
        _check_devices(int(arguments.nproc_per_node), variables)
        variables |= network_variables()
    if str(arguments.nnodes) != "1":
        variables |= _join_network(arguments)
    watch = Watch(plan.hang_timeout, plan.quiet)
    notices = dict.fromkeys(NOTICES, lambda number: _send(number, watch))
    meets = _num_machines(arguments) > 1 and arguments.rdzv_backend in WAITS
    meeting = _meeting(arguments, watch, {**os.environ, **variables}) if meets else None
    waits = _waits(arguments, meeting) if meeting is not None else None
    if arguments.rdzv_backend != "static":
        arguments.node_rank = 0  # without effect, of which torch would warn
    ends = Ends(watch, arguments.max_restarts, _ignore if plan.quiet else _note)
    with patch_environment(**variables | watch.variables), _watching(watch, ends, waits), handled(notices):
        status = 1
        try:
            status = _run_to_the_end(torchrun, arguments, plan, watch, ends)
        finally:
            if meeting is not None:
                meeting.leave(status)
    return 1 if meeting is not None and meeting.fault else status


def _run_to_the_end(torchrun: Any, arguments: Namespace, plan: Plan, watch: Watch, ends: Ends) -> int:
    """Run the agent, and return the exit status."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        _run_agent(torchrun, arguments, plan)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ends.look()
        first = ends.cause() or End(rank, failure.pid, failure.exitcode)
        watch.begin_attempt(ends.killed)
        if not plan.quiet:
            where = "" if first.rank is None else crash_line(watch.folder, first.rank)
            _note(f"{first}{where}; the others were terminated.")
        return exit_status(first.code) or 1
    except SignalException as signal:  # the agent has ended the processes
        return HUNG_STATUS if watch.is_hanging else status_after(signal.sigval, ends.codes, watch.crashed)
    except (DistError, RendezvousError) as error:
        raise UsageError(_rendezvous_error(arguments, error)) from error
    return 0


def _meeting(arguments: Namespace, watch: Watch, environ: Mapping[str, str]) -> Meeting:
    """Let this launch and those of the other machines compare what they were told, and know of one another's end."""
    host, _, port = _endpoint(arguments).rpartition(":")
    is_static = arguments.rdzv_backend == "static"
    count = _num_machines(arguments)
    told = {
        "num_machines": str(count), "num_processes": str(count * int(arguments.nproc_per_node)),
        "rdzv_backend": arguments.rdzv_backend,
    } | {name: environ[name] for name in sorted(environ) if name.startswith(TOLD_ALIKE)}  # fmt: skip

    def end(reason: str) -> None:
        _note(reason)
        logging.disable(logging.WARNING)  # the agent tells what it does now
        if not _children():  # the agent waits in compiled code, where no signal reaches it
            watch.close(tell=False)
            os._exit(1)
        os.kill(os.getpid(), SIGTERM)  # the agent then terminates its processes

    meeting = Meeting(
        host, int(port), arguments.node_rank if is_static else None, count, told=told, has_store=arguments.node_rank == 0,
        has_met=lambda: watch.has_met, end=end,
    )  # fmt: skip
    meeting.start()
    return meeting


def _num_machines(arguments: Namespace) -> int:
    return int(str(arguments.nnodes).partition(":")[0])


def _endpoint(arguments: Namespace) -> str:
    return str(arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}")


def _waits(arguments: Namespace, meeting: Meeting) -> Callable[[], None]:
    """A function that looks whether the agent waits for other machines, and has a line printed if that lasts."""
    configuration = dict(pair.split("=", 1) for pair in arguments.rdzv_conf.split(",") if "=" in pair)
    limits = {
        function: float(configuration.get(name, seconds))
        for function, (name, seconds) in WAITS[arguments.rdzv_backend].items()
    }
    wait, thread = LongWait(_note), threading.get_ident()

    def look() -> None:
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code.co_name not in limits:
            frame = frame.f_back
        if frame is None:
            wait.end()
        else:
            wait.begin(meeting.absent, limits[frame.f_code.co_name])

    return look


def _ignore(text: str) -> None:
    """Take a line, and print nothing."""


def _note(text: str) -> None:
    print(f"accelerate launch: {text}", file=sys.stderr, flush=True)


def _join_network(arguments: Namespace) -> dict[str, str]:
    """Set the address at which the other machines reach this one; the agent would resolve its host name instead.

    Returns:
        Variables for gloo, for the same reason.
    """
    host, _, port = _endpoint(arguments).rpartition(":")
    listens_here = arguments.rdzv_backend == "static" and arguments.node_rank == 0
    seconds = POD_SECONDS if os.environ.get("PET_NNODES") else REACH_SECONDS
    wait_until_reached(host, int(port), listens_here=listens_here, seconds=seconds, note=_note)
    address = own_address(host)
    if address is None:
        return {}
    arguments.local_addr = arguments.local_addr or address
    if arguments.rdzv_backend == "c10d" and "is_host" not in arguments.rdzv_conf:
        mine = f"is_host={str(arguments.node_rank == 0).lower()}"
        arguments.rdzv_conf = f"{arguments.rdzv_conf},{mine}" if arguments.rdzv_conf else mine
    return gloo_interface(address, os.environ)


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended: its rank if it has reported one, and its code as in `subprocess.Popen.returncode`."""

    rank: int | None
    process_id: int
    code: int

    def __str__(self) -> str:
        name = "a process" if self.rank is None else f"process {self.rank}"
        return f"{name} (pid {self.process_id}) {describe_end(self.code)}"


class Ends:
    """How the processes of torch's agent have ended, which it tells nobody when it restarts them; its thread makes this.

    Args:
        watch: Knows their ranks.
        max_restarts: How often the agent restarts them.
        note: Prints a line for the user.
    """

    def __init__(self, watch: Watch, max_restarts: int, note: Callable[[str], None]) -> None:
        self._watch, self._max_restarts, self._note = watch, max_restarts, note
        self._thread = threading.get_ident()
        self._agent: Any = None
        self._attempt: frozenset[int] = frozenset()  # its process ids
        self._ends: dict[int, End] = {}  # of this attempt, by local rank
        self._num_restarts = 0

    def look(self) -> None:
        """See which processes have ended, and say that others have begun in their place."""
        processes = self._processes()
        attempt = frozenset(process.pid for process in processes.values())
        if self._attempt and not attempt & self._attempt:
            self._tell_restart()
        self._attempt = attempt
        ranks = {process_id: rank for rank, process_id in self._watch.running.items()}
        for local_rank, process in processes.items():
            if process.returncode is not None and local_rank not in self._ends:
                self._ends[local_rank] = End(ranks.get(process.pid), process.pid, process.returncode)

    @property
    def codes(self) -> dict[int, int]:
        """The exit codes of those that have ended, by local rank."""
        return {
            rank: process.returncode for rank, process in self._processes().items() if process.returncode is not None
        }

    def cause(self) -> End | None:
        """The end from which those of the other processes followed, as far as it can be told."""
        ends = [end for end in self._ends.values() if end.code]
        victims = self._watch.victims
        causes = [end for end in ends if end.rank not in victims and end.code != -SIGTERM]  # which the agent sends
        return next(iter(causes or ends), None)

    @property
    def killed(self) -> dict[int, int]:
        """The rank that was killed first, and its code, if that is what ended the others."""
        cause = self.cause()
        return {cause.rank: cause.code} if cause is not None and cause.rank is not None and cause.code < 0 else {}

    def _processes(self) -> Mapping[int, subprocess.Popen[bytes]]:
        """The processes of the agent, by local rank. It has no API for them."""
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

        frame = sys._current_frames().get(self._thread) if self._processes_of(self._agent) == {} else None
        while frame is not None:
            caller = frame.f_locals.get("self")
            self._agent = caller if isinstance(caller, LocalElasticAgent) else self._agent
            frame = frame.f_back
        return self._processes_of(self._agent)

    @staticmethod
    def _processes_of(agent: Any) -> Mapping[int, subprocess.Popen[bytes]]:
        handlers = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
        return {rank: handler.proc for rank, handler in handlers.items()}

    def _tell_restart(self) -> None:
        self._num_restarts += 1
        cause = self.cause()
        self._watch.begin_attempt(self.killed)
        if cause is None or cause.code == -SIGTERM:
            self._note("the processes are restarted: one of another machine has ended, or a machine came or went.")
        else:
            self._note(f"{cause}; all are restarted (restart {self._num_restarts} of {self._max_restarts}).")
        self._ends = {}


@contextmanager
def _watching(watch: Watch, ends: Ends, waits: Callable[[], None] | None) -> Iterator[None]:
    """Watch the processes from another thread, since the agent blocks this one; and the agent, where it may wait."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            ends.look()
            watch.look(ends.killed)
            if waits is not None:
                waits()
            if watch.is_hanging:
                os.kill(os.getpid(), SIGTERM)  # the agent then terminates its processes
                return

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        watch.close()


def _send(number: int, watch: Watch) -> None:
    """Send a signal to the processes of the agent."""
    for process_id in _children() or watch.process_ids:
        with suppress(ProcessLookupError):
            os.kill(process_id, number)


def _children() -> list[int]:
    """The children of this process, which are those of the agent; none on systems without /proc."""
    paths = glob.glob("/proc/self/task/*/children")
    return [int(word) for path in paths for word in Path(path).read_text(encoding="ascii").split()]


def _run_agent(torchrun: Any, arguments: Namespace, plan: Plan) -> None:
    """Run the agent, and try another port if ours is taken and the user did not choose it."""
    for attempt in range(TRIES):
        try:
            return torchrun.run(Namespace(**vars(arguments)))
        except RuntimeError as error:
            if not plan.port_may_change or "EADDRINUSE" not in str(error) or attempt == TRIES - 1:
                raise
            arguments.master_port = free_port()
    return None


def _check_devices(wanted: int, variables: dict[str, str]) -> None:
    """Check that there is an accelerator for each process. A machine without any trains on its CPU."""
    from accel_state.devices import detect_device_kind

    kind = detect_device_kind()
    if kind.name == "cpu" or kind.visible_devices_variable in variables or "ACCELERATE_TORCH_DEVICE" in os.environ:
        return
    count = kind.device_count()
    if 0 < count < wanted:
        raise UsageError(
            f"{wanted} processes need {wanted} {kind.name} devices, but this machine has {count}. "
            f"Give --num_processes {count}, or --cpu."
        )


def _rendezvous_error(arguments: Namespace, error: Exception) -> str:
    """The message for a failed rendezvous."""
    if "EADDRINUSE" in str(error):
        return (
            f"Port {arguments.master_port} of this machine is taken. Give another --main_process_port, or 0 for a "
            "free one."
        )
    return f"The rendezvous at {_endpoint(arguments)} failed: {str(error).splitlines()[0]}"
