"""The command `accelerate runs`: list, show and compare recorded runs, and write them as CSV or as a page."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.arguments import CommandParser, Flag, add_options
from accel_cli.errors import UsageError, did_you_mean
from accel_state.settings.option import INTEGER, one_of

if TYPE_CHECKING:
    from accel_tracking.local.reading import Run

HELP = "List, show, compare and export recorded runs."
DESCRIPTION = """List, show, compare and export runs that were logged with the tracker "local".
A run is given by its number in the list, by its id or the beginning of it, or by its name (then the newest run of that
name)."""
ACTIONS = ("list", "show", "compare")
CSV_HEADER = ("run", "name", "metric", "step", "time", "value")
NEWEST = 5  # how many runs `compare` shows when none are named

OPTIONS = (
    Flag("action", "What to do: list (default), show or compare.", nargs="?", default="list", kind=one_of(*ACTIONS)),
    Flag("run", "Runs; all of them if left out for list, the newest ones otherwise.", nargs="*"),
    Flag("--dir", "Folder to search, with those below it.", default=".", metavar="FOLDER"),
    Flag("--name", "Only runs of this name.", metavar="NAME"),
    Flag("--metric", "Metric to show; a loss if left out.", metavar="NAME"),
    Flag("--limit", "Largest number of runs, the newest ones.", kind=INTEGER, metavar="N"),
    Flag("--csv", "Write every point of the curves to this file; - for the terminal.", metavar="FILE"),
    Flag("--html", "Write an HTML page with the curves, without external files.", metavar="FILE"),
)  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate runs`."""
    parser.description = DESCRIPTION
    add_options(parser, OPTIONS)


def run(args: Namespace) -> int:
    """Print or write recorded runs.

    Args:
        args: The parsed arguments.

    Returns:
        The exit status for the shell: 1 if there are no runs.

    Raises:
        UsageError: A folder, run or metric does not exist, or a file cannot be written.
    """
    from accel_tracking.local.reading import read_runs

    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit must be at least 1, got {args.limit}.")
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
    print(_encodable("\n".join(view(runs, metric=_metric(args, runs), numbers=numbers))))


def _encodable(text: str) -> str:
    """Draw curves with ASCII characters where the terminal's encoding lacks those of a drawing."""
    from accel_tracking.local.curves import ASCII, BLOCKS

    try:
        BLOCKS.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(ASCII)
    return text


def _choose(args: Namespace, found: Sequence[Run]) -> list[Run]:
    """The runs that were named, or the newest ones, as many as the action shows by default."""
    if args.run:
        chosen = [_find(word, found, args.dir) for word in args.run]
    else:
        default_count = {"list": None, "show": 1, "compare": NEWEST}[args.action]
        named = [run for run in found if args.name is None or run.name == args.name]
        if not named:
            known = sorted({run.name for run in found})
            raise UsageError(f"No run has the name {args.name!r}.{did_you_mean(args.name, known)}")
        chosen = named[: args.limit or default_count]
    if args.action == "compare" and len(chosen) < 2 and not (args.csv or args.html):
        raise UsageError("There is only one run to compare. Name two or more.")
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
            raise UsageError(
                f"{word!r} is ambiguous: it could be {' or '.join(repr(run.id) for run in matches[:4])}. Give more of the id."
            )
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
    for path, write in ((args.csv, _write_csv), (args.html, _write_page)):
        if not path:
            continue
        try:
            write(runs, path)
        except BrokenPipeError:  # the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise UsageError(f"{path!r} cannot be written: {error.strerror or error}.") from None
        if path != "-":
            print(f"Wrote {len(runs)} run{'s' if len(runs) > 1 else ''} to {path}")


def _write_csv(runs: Sequence[Run], path: str) -> None:
    """Write every point of every curve as a row.

    Args:
        runs: The runs.
        path: The file; "-" for standard output.
    """
    import csv
    from contextlib import nullcontext

    from accel_tracking.local.comparing import points

    # surrogates: bytes of a folder's name that the locale cannot decode
    with (
        nullcontext(sys.stdout)
        if path == "-"
        else open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_HEADER)
        writer.writerows(points(runs))


def _write_page(runs: Sequence[Run], path: str) -> None:
    """Write a page with the curves, settings, pictures and tables of runs.

    Args:
        runs: The runs.
        path: The file.
    """
    from accel_tracking.local.page import page

    names = sorted({run.name for run in runs})
    Path(path).write_text(page(runs, title=", ".join(names)), encoding="utf-8", errors="surrogateescape")
