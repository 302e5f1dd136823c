#!/usr/bin/env python3
"""Check that code and documents use the field's words: a PyTorch engineer greps for "all-reduce", not for "exchange".

Words that have a better one in the field are listed with it. They must not come back, whether in names, docstrings,
comments, messages, help texts or documents. A docstring of one or two words says nothing, and is found, too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PHRASES = {
    r"number formats?": "mixed precision, dtype",
    r"ways? of training": "engine, training backend, strategy",
    r"speaks? for": "main process",
    r"sen[dt]s? round|hand(?:s|ed)? round|tell all": "broadcast, all-gather, collective",
    r"comput\w+ again": "activation checkpointing, recompute",
    r"page-locked|page_locked": "pinned memory",
    r"main memory": "CPU memory, host memory",
    r"wait(?:s|ing)? elsewhere": "offload",
    r"truth values?": "bool",
    r"whole numbers?": "int",
    r"(?:parameters|what|that) learns?\b|learning parameters?": "trainable, requires_grad",
    r"deal(?:s|t)? out": "yield",
    r"fill(?:s|ed)? up": "padding, remainder",
    r"settings files?": "config file",
    r"neighbours?": "compatibility, shim, process group",
    r"go(?:es)? back through": "backward pass",
    r"true size": "unscale, loss scale",
    r"wait(?:s|ing)? for ?ever": "deadlock, hang",
    r"put(?:s|ting)? together": "full tensor, unshard, build",
    r"hand(?:s|ed)? (?:out|over)": "yield, pass",
    r"learnt": "trained",
    r"amid": "during",
    r"talkative": "the axis with the most communication",
    r"left whole": "not sharded",
    r"what is a block": "wrapping policy",
    r"no say": "does not contribute to the loss",
    r"come whole": "replicated input",
    r"imitations? of": "mocked",
    r"sharing (?:a model|a batch|sequences|layers)": "tensor, context, sequence, pipeline parallelism",
    r"several of one's own": "a cluster of your own",
    r"commas between": "separated by commas",
    r"likewise": "in the same way, too",
    r"errors? that says? so|is warned of": "raises an error, warns",
    r"without a word": "silently, without a message",
    r"on the spot": "generated",
    r"(?:can|could) never go on": "deadlock",
    r"what becomes of": "how ... is converted, the result of",
    r"to each its": "each process gets its",
    r"has to say so": "must",
    r"drawn anew": "another random sample",
    r"as they were last released": "the released versions",
    r"whatever else there is|whatever it does": "even if ...",
    r"lends? them to nobody": "nothing: leave it out",
    r"is asked before": "is loaded first, is checked first",
}
NAMES = {
    "found_among_neighbours": "a generated table", 
    "sync_in_backward": "sync_next_backward", "first_sizes": "dim0_sizes",
    "Roles": "PrepareArguments", "wire_device": "collective_device", "group_device": "collective_device",
    "make_alike": "sync_module_states", "share_start_values": "sync_module_states", "local_part": "to_local",
    "AgreeingGradScaler": "ShardedGradScaler", "divides_gradients": "shards_gradients",
    "cut_like": "shard_like", "whole_optimizer_state": "full_optimizer_state", "write_whole": "the full state",
    "share_of": "shard_of", "is_whole": "is_integer", "as_whole": "as_integer", "WHOLE": "INTEGER",
    "as_boolean": "as_bool", "tell_transformers": "register_with_transformers", "gather_as_one": "set_leaf_modules",
    "learning_names": "trainable_names", "writes_states": "Engine.save", "WholeOptimizer": "FullStatesSave",
}  # fmt: skip
BINDINGS = {
    "packages/*/src/**/*.py": {
        "one": 110, "place": 62, "own": 40, "given": 40, "wanted": 38, "known": 33, "found": 16, "kept": 10, "made": 4,
    },
    "tests/**/*.py": {
        "one": 140, "kept": 125, "place": 54, "found": 75, "wanted": 54, "given": 50, "own": 34, "made": 26, "known": 8,
    },
}  # fmt: skip
"""How often a name may be bound that is no noun: `parameters`, `device` or `rank` says more. These only sink."""
LISTS = ("packages/*/src/**/*.py", "packages/*/README.md", "docs/**/*.md", "docs/**/*.py", "README.md")


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, word, and what to write instead, for each word of a text that has a better one in the field."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in PHRASES.items():
            for found in re.finditer(rf"(?i)\b(?:{pattern})\b", line):
                yield number, found[0], better
        for found in re.finditer(r"\b\w+\b", line):
            if found[0] in NAMES:
                yield number, found[0], NAMES[found[0]]


def empty_docstrings(text: str) -> Iterator[tuple[int, str, str]]:
    """The same for docstrings of functions that say nothing."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said is not None and len(said.split()) < 3:
                yield node.lineno, said, "what differs here, or leave it to the parent"


def surplus_bindings() -> Iterator[str]:
    """A line for each name that is bound more often than `BINDINGS` allows."""
    for pattern, ceilings in BINDINGS.items():
        counts = Counter(
            name.strip("_")
            for path in ROOT.glob(pattern)
            for name in bound_names(ast.parse(path.read_text()))
            if name.strip("_") in ceilings
        )
        for name, ceiling in ceilings.items():
            if counts[name] > ceiling:
                yield f"{pattern}: {name!r} is bound {counts[name]} times, at most {ceiling}: write what it is"


def bound_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module gives to variables, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def main() -> int:
    """Print what was found; the exit code says whether there was anything."""
    chosen = sys.argv[1:]
    count = 0
    for pattern in LISTS:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if chosen and not name.startswith(tuple(chosen)):
                continue
            text = path.read_text()
            empty = empty_docstrings(text) if path.suffix == ".py" and "packages" in path.parts else ()
            for number, word, better in (*findings(text), *empty):
                count += 1
                print(f"{name}:{number}: {word!r}: write {better}")
    for line in () if chosen else surplus_bindings():
        count += 1
        print(line)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
