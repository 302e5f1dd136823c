"""Carries out a plan that it reads as JSON from its standard input: a run of `python -m accel_cli.launch.planned`."""

from __future__ import annotations

import json
import sys

from accel_cli.launch.command import run_plan
from accel_cli.launch.plan import Plan

if __name__ == "__main__":
    sys.exit(run_plan(Plan(**json.load(sys.stdin))))
