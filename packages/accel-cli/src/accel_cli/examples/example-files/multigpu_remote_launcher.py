"""Launch a script on all GPUs of another machine, over ssh, and see its output here.

    python multigpu_remote_launcher.py --host user@machine cv_example.py
    python multigpu_remote_launcher.py --host user@machine --launch "--num_processes 8" cv_example.py --epochs 3

The script is copied into a folder of that machine, and runs there under `accelerate launch`, with `--launch` as options and
what follows the script as its arguments. The machine needs a Python with accelerate: `--python` says which one. The exit code is
that of the launch. For several machines see the folder `slurm`; for notebooks, `notebook_launcher`.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path


def remote_command(args: argparse.Namespace) -> str:
    """What the shell of the other machine runs."""
    launch = [args.python, "-m", "accelerate.commands.launch", *shlex.split(args.launch)]
    script = [Path(args.script).name, *args.arguments]
    return f"cd {shlex.quote(args.folder)} && {shlex.join([*launch, *script])}"


def main() -> int:
    """Copy the script, launch it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True, help="the machine, as ssh takes it")
    parser.add_argument(
        "--folder", default="accelerate_runs", help="folder of that machine, made if it does not exist"
    )
    parser.add_argument("--python", default="python3", help="the Python of that machine")
    parser.add_argument("--launch", default="", help="options of accelerate launch, in quotes")
    parser.add_argument("--dry_run", action="store_true", help="only print the commands")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args()

    commands = [
        ["ssh", args.host, f"mkdir -p {shlex.quote(args.folder)}"],
        ["scp", "-q", args.script, f"{args.host}:{args.folder}/"],
        ["ssh", args.host, remote_command(args)],
    ]
    for command in commands:
        if args.dry_run:
            print(shlex.join(command))
        elif code := subprocess.run(command, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
