"""The command `accelerate examples`: lists the examples, and copies one to where it can be run and changed."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path

from accel_cli.arguments import CommandParser, Flag, add_options
from accel_cli.errors import ExistingFileError, UsageError
from accel_cli.examples.catalog import Example, read_examples
from accel_state.settings.option import one_of

HELP = "List the examples, or copy one into a folder."
DESCRIPTION = """List the examples, or copy one, with the files that it needs, into a folder:
accelerate examples list; accelerate examples copy cv_example; accelerate examples copy checkpointing my_project."""

OPTIONS = (
    Flag("action", "What to do: list (default) or copy.", nargs="?", default="list", kind=one_of("list", "copy")),
    Flag("example", "Name of the example to copy; for list, a word that names or summaries contain.", nargs="?"),
    Flag("folder", "Where to copy it; made if it does not exist.", nargs="?", default="."),
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `accelerate examples`."""
    parser.description = DESCRIPTION
    add_options(parser, OPTIONS)


def run(args: Namespace) -> int:
    """List or copy examples.

    Args:
        args: The parsed arguments.

    Returns:
        The exit status for the shell: 1 if the list is empty.

    Raises:
        UsageError: There is no such example, or it cannot be written.
    """
    examples = read_examples()
    if args.action == "list":
        return _show(examples.values(), args.example)
    if args.example is None:
        raise UsageError("copy needs the name of an example. `accelerate examples list` shows them.")
    _copy(_choose(args.example, examples), examples, Path(args.folder))
    return 0


def _show(examples: Iterable[Example], word: str | None) -> int:
    """Print a table of names and summaries."""
    wanted = (word or "").lower()
    shown = [example for example in examples if wanted in f"{example.name} {example.summary}".lower()]
    if not shown:
        print(f"No example's name or summary contains {word!r}.")
        return 1
    width = max(len(example.name) for example in shown)
    room = max(30, shutil.get_terminal_size((120, 24)).columns - width - 2)
    for example in shown:
        first, *rest = textwrap.wrap(example.summary, room, break_on_hyphens=False)
        print(f"{example.name:{width}}  {first}")
        for line in rest:
            print(f"{'':{width}}  {line}")
    return 0


def _choose(word: str, examples: Mapping[str, Example]) -> Example:
    """The example of a name, which may lack its folder or have its suffix.

    Raises:
        UsageError: There is none, or several have this name.
    """
    matches = [example for example in examples.values() if word in example.aliases]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{word!r} is ambiguous: name one of {', '.join(example.name for example in matches)}.")
    from difflib import get_close_matches

    names = {alias: example.name for example in examples.values() for alias in example.aliases}
    near = dict.fromkeys(names[alias] for alias in get_close_matches(word, names, n=6, cutoff=0.5))
    near |= dict.fromkeys(name for name in examples if word.lower() in name.lower())
    hint = f" Near it are: {', '.join(list(near)[:5])}." if near else ""
    raise UsageError(f"There is no example {word!r}.{hint} `accelerate examples list` shows all.")


def _copy(example: Example, examples: Mapping[str, Example], folder: Path) -> None:
    """Copy an example and what it needs; nothing if one of the files exists.

    Raises:
        ExistingFileError: One of the files exists.
        UsageError: The folder cannot be written.
    """
    chosen = [example, *(examples[name] for name in example.needs)]
    copies = {folder / target: source for one in chosen for source, target in one.files()}
    if existing := [str(target) for target in copies if target.exists()]:
        raise ExistingFileError(f"{existing[0]} already exists. Name another folder, or remove it first.")
    try:
        for target, source in copies.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            print(f"Wrote {target}")
    except OSError as error:
        raise UsageError(f"{str(folder)!r} cannot be written: {error.strerror or error}.") from error
    program = folder / example.path.name
    if program.suffix == ".py":
        print(
            f"The first lines of it say how to run it, for instance:\n\n    accelerate launch {shlex.quote(str(program))}"
        )
