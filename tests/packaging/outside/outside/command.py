"""A command: a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="Whom to greet.")


def run(args: argparse.Namespace) -> None:
    print(f"hello {args.name}")
