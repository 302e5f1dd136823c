"""The command `accelerate runs`: list, show and compare recorded runs, and write them as CSV or as a page."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from accel_cli.arguments import CommandParser, Option, add_options
from accel_cli.errors import UsageError, did_you_mean
from accel_state.settings.option import WHOLE, one_of

if TYPE_CHECKING:
    from accel_tracking.local.reading import Run

HELP = "List, show, compare and export recorded runs."
DESCRIPTION = """List, show, compare and export runs that were logged with the tracker "local".
A run is named by its number in the list, by its id or the beginning of it, or by the name that the program gave it
(then the newest of that name)."""
ACTIONS = ("list", "show", "compare")
NEWEST = 5  # how many runs `compare` takes when none are named

OPTIONS = (
    Option("action", "What to do: list (default), show or compare.", nargs="?", default="list", kind=one_of(*ACTIONS)),
    Option("run", "Runs; all of them if left out for list, the newest ones otherwise.", nargs="*"),
    Option("--dir", "Folder to search, with those below it.", default=".", metavar="FOLDER"),
    Option("--name", "Only runs of this name.", metavar="NAME"),
    Option("--metric", "Metric to show; a loss if left out.", metavar="NAME"),
    Option("--limit", "At most so many runs, the newest ones.", kind=WHOLE, metavar="N"),
    Option("--csv", "Write every point of the curves to this file; - for the terminal.", metavar="FILE"),
    Option("--html", "Write a page with the curves, which needs nothing but a browser.", metavar="FILE"),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate runs`."""
    parser.description = DESCRIPTION
    add_options(parser, OPTIONS)


def run(args: Namespace) -> int:
    """Print or write recorded runs.

    Args:
        args: What the parser of `add_arguments` gave.

    Returns:
        The exit status for the shell: 1 when there are no runs.

    Raises:
        UsageError: For a folder, run or metric that does not exist, or a file that cannot be written.
    """
    from accel_tracking.local.reading import read_runs

    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit {args.limit} shows nothing: give 1 or more.")
    if not os.path.isdir(args.dir):
        raise UsageError(f"The folder {args.dir!r} does not exist.")
    found = read_runs(args.dir)
    if not found:
        print(
            f'No runs below {os.path.abspath(args.dir)}. Accelerator(log_with="local", project_dir=...) records them.'
        )
        return 1
    runs = _choose(args, found)
    if args.csv or args.html:
        _export(args, runs)
    else:
        _show(args, runs, found)
    return 0


def _show(args: Namespace, runs: Sequence[Run], found: Sequence[Run]) -> None:
    from accel_cli.runs import views

    numbers = {run.id: place for place, run in enumerate(found, start=1)}
    view: Callable[..., list[str]] = {"list": views.listing, "show": views.details, "compare": views.comparison}[
        args.action
    ]
    print("\n".join(view(runs, metric=_metric(args, runs), numbers=numbers)))


def _choose(args: Namespace, found: Sequence[Run]) -> list[Run]:
    """The runs that were named, or as many of the newest as the action takes."""
    if args.run:
        chosen = [_find(word, found, args.dir) for word in args.run]
    else:
        usual = {"list": None, "show": 1, "compare": NEWEST}[args.action]
        named = [run for run in found if args.name is None or run.name == args.name]
        if not named:
            known = sorted({run.name for run in found})
            raise UsageError(f"No run has the name {args.name!r}.{did_you_mean(args.name, known)}")
        chosen = named[: args.limit or usual]
    if args.action == "compare" and len(chosen) < 2 and not (args.csv or args.html):
        raise UsageError("There is only one run to compare: name two or more.")
    return chosen


def _find(word: str, found: Sequence[Run], folder: str) -> Run:
    if word.isdigit() and 1 <= int(word) <= len(found):
        return found[int(word) - 1]
    for matches in (
        [run for run in found if run.id == word],
        [run for run in found if run.name == word][:1],  # the newest
        [run for run in found if run.id.startswith(word)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UsageError(f"{word!r} could be {' or '.join(repr(run.id) for run in matches[:4])}: give more of it.")
    known = [*(run.id for run in found), *(run.name for run in found)]
    raise UsageError(f"There is no run {word!r} below {os.path.abspath(folder)}.{did_you_mean(word, known)}")


def _metric(args: Namespace, runs: Sequence[Run]) -> str | None:
    from accel_tracking.local.comparing import common_metric, metric_names

    if args.metric is None:
        return common_metric(runs)
    known = metric_names(runs)
    if args.metric not in known:
        raise UsageError(f"None of these runs has a metric {args.metric!r}.{did_you_mean(args.metric, known)}")
    return str(args.metric)


def _export(args: Namespace, runs: Sequence[Run]) -> None:
    from accel_cli.runs.export import write_csv, write_page

    for path, write in ((args.csv, write_csv), (args.html, write_page)):
        if not path:
            continue
        try:
            write(runs, path)
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise UsageError(f"{path!r} cannot be written: {error.strerror or error}.") from None
        if path != "-":
            print(f"Wrote {len(runs)} run{'s' if len(runs) > 1 else ''} to {path}")
