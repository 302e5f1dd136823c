"""What examples there are, what each shows, and which files belong to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).with_name("example-files")  # no name of a module: the programs are data, and import accelerate
FOLDERS = {
    "config_yaml_templates": "Config files for `accelerate launch`, and a script that shows what one leads to.",
    "deepspeed_config_templates": "Configuration files of DeepSpeed, for every ZeRO stage.",
    "torch_native_parallelism/configs": "Config files for eight GPUs: replicas, shards and tensor parallelism; long sequences.",
    "slurm": "Batch scripts for SLURM: one machine, several machines, FSDP.",
}
"""Folders that are copied as one example, and what they show."""
NEEDS = {
    "by_feature/deepspeed_with_config_support": ("by_feature/language_modeling", "deepspeed_config_templates"),
    "by_feature/megatron_lm_gpt_pretraining": ("by_feature/language_modeling",),
    "torch_native_parallelism/nd_parallel_trainer": ("torch_native_parallelism/configs",),
}
"""Other examples that one reads files of."""


@dataclass(frozen=True, slots=True)
class Example:
    """A program or a folder that can be copied.

    Attributes:
        name: Its place in the folder of examples, without `.py`.
        path: The file or folder.
        summary: What it shows, in a sentence.
        needs: Names of other examples that are copied with it.
    """

    name: str
    path: Path
    summary: str
    needs: tuple[str, ...] = ()

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names under which it is found: with and without its folder, and with `.py`."""
        short = self.path.name
        return tuple(dict.fromkeys((self.name, self.name + self.path.suffix, Path(self.name).name, short)))

    def files(self) -> Iterator[tuple[Path, Path]]:
        """Each file, and where it goes, relative to the folder that the example is copied to."""
        if self.path.is_file():
            yield self.path, Path(self.path.name)
            return
        for path in sorted(self.path.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, path.relative_to(self.path.parent)


def read_examples(folder: Path = FILES) -> dict[str, Example]:
    """Find all examples.

    Args:
        folder: Where they are.

    Returns:
        Name -> example: programs of the folder itself first, then by name.
    """
    examples = {name: Example(name, folder / name, summary) for name, summary in FOLDERS.items()}
    for path in folder.rglob("*.py"):
        place = path.relative_to(folder)
        if place.parts[0] not in FOLDERS:
            name = place.with_suffix("").as_posix()
            examples[name] = Example(name, path, _summary(path), NEEDS.get(name, ()))
    return {name: examples[name] for name in sorted(examples, key=lambda name: ("/" in name or name in FOLDERS, name))}


def _summary(path: Path) -> str:
    """The first paragraph of a program's docstring, on one line."""
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(said.split("\n\n")[0].split())
