"""Flags of the launcher that come after the script, which gets them instead."""

from __future__ import annotations

import re

from accel_cli.launch.flags.table import is_option
from accel_cli.launch.settings import LaunchSettings

LARGEST_SCRIPT_BYTES = 1_000_000
# parsers whose flags need not be spelled in the script: from dataclasses and signatures, config files or hand-written loops
PARSES_OTHERWISE = re.compile(
    r"\b(HfArgumentParser|TrlParser|parse_known_args|argv|parents|hydra|fire|click|typer|tyro|absl|docopt|jsonargparse"
    r"|simple_parsing|draccus|import\s.*\b(args|parse\w*|get_args|get_parser))\b|import \*"
)


def misplaced_flags(settings: LaunchSettings) -> tuple[str, ...]:
    """Return a note about flags of the launcher that the script neither names nor can parse, as far as its text says.

    Scripts with an option of the same name, as many have for `--mixed_precision`, and scripts that leave parsing to
    a library or to another file get none.

    Args:
        settings: The settings of a launch.
    """
    words = [word.partition("=")[0] for word in settings.training_script_args if word.startswith("--")]
    names = {word: word.strip("-").replace("-", "_") for word in words if len(word) > 2}
    flags = {word: name for word, name in names.items() if is_option(name)}
    text = _text(settings) if flags else ""
    if "Accelerator(" not in text or PARSES_OTHERWISE.search(text):
        return ()
    unread = [word for word, name in flags.items() if not re.search(rf"--{name.replace('_', '[-_]')}\b", text)]
    if not unread:
        return ()
    script = settings.training_script
    return (
        f"{' and '.join(dict.fromkeys(unread))} came after {script}, which gets it but has no such option. To set it for "
        f"the launch, put it before the script: accelerate launch {unread[0]} ... {script}",
    )


def _text(settings: LaunchSettings) -> str:
    """The script's text; empty if the launch runs something else."""
    if settings.module or settings.no_python or not settings.training_script.endswith(".py"):
        return ""
    try:
        with open(settings.training_script, encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST_SCRIPT_BYTES)
    except OSError:
        return ""
