"""Options of `accelerate kubernetes` in addition to those of `accelerate launch`, and checks of their values."""

from __future__ import annotations

import re
from argparse import Namespace

from accel_cli.arguments import Flag
from accel_cli.errors import UsageError
from accel_state.settings.option import INTEGER, one_of

KUBERNETES = (
    Flag("--kind", "trainjob, for Kubeflow Trainer, or job, which needs Kubernetes alone.", default="trainjob",
           kind=one_of("trainjob", "job")),
    Flag("--image", "Image of the containers: it has the script and this library.", metavar="IMAGE"),
    Flag("--name", "Name of the job; that of the script if left out.", metavar="NAME"),
    Flag("--namespace", "Namespace; the user's own if left out.", metavar="NAME"),
    Flag("--runtime", "Training runtime of a TrainJob.", default="torch-distributed", metavar="NAME"),
    Flag("--gpus_per_node", "GPUs of each pod, one process each.", kind=INTEGER, metavar="G"),
    Flag("--gpu_resource", "The name by which the cluster counts them.", default="nvidia.com/gpu", metavar="NAME"),
    Flag("--cpus", "CPU cores of each pod, such as 8 or 500m.", metavar="N"),
    Flag("--memory", "Memory of each pod, such as 64Gi.", metavar="SIZE"),
    Flag("--shared_memory", "Most of it that /dev/shm may take.", metavar="SIZE"),
    Flag("--volume", "A volume claim and where to mount it, such as runs:/runs; may be given several times.",
           action="append", metavar="CLAIM:PATH"),
    Flag("--pod_env", "An environment variable of the pods; may be given several times.", action="append",
           metavar="NAME=VALUE"),
    Flag("--pod_restarts", "How often a Job replaces each pod that fails.", default=0, kind=INTEGER, metavar="N"),
)  # fmt: skip

LABEL = re.compile(
    r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?"
)  # a pod's name has an index in addition, and at most 63 characters
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
QUANTITY = re.compile(r"(\d+(\.\d+)?)(m|k|Ki|[MGTPE]i?)?", re.ASCII)

# option -> pattern of its values, and a description for messages
SHAPES: dict[str, tuple[re.Pattern[str], str]] = {
    "image": (re.compile(r"[^\s]+"), "an image, such as registry.example.com/train:1"),
    "name": (LABEL, "a name of at most 50 lower-case letters, digits and hyphens, which begins with a letter"),
    "namespace": (LABEL, "the name of a namespace: lower-case letters, digits and hyphens"),
    "runtime": (SUBDOMAIN, "the name of a runtime: lower-case letters, digits, hyphens and dots"),
    "gpu_resource": (re.compile(r"[a-z0-9.-]+/[A-Za-z0-9_.-]+"), "the name of a resource, such as amd.com/gpu"),
    "cpus": (QUANTITY, "a quantity of Kubernetes, such as 8 or 500m"),
    "memory": (QUANTITY, "a quantity of Kubernetes, such as 64Gi"),
    "shared_memory": (QUANTITY, "a quantity of Kubernetes, such as 16Gi"),
    "volume": (re.compile(rf"{SUBDOMAIN.pattern}:/[^:\0]*"), "a claim and an absolute path, such as runs:/runs"),
    "pod_env": (re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*"), "a variable and its value, such as HF_HOME=/cache"),
}
LOWEST = {"gpus_per_node": 1, "pod_restarts": 0}
SET_BY_THE_JOB = ("machine_rank", "main_process_ip", "launcher", "dry_run")


def check_kubernetes_flags(args: Namespace) -> None:
    """Check the options for values that Kubernetes would refuse, or take for something else.

    Args:
        args: The parsed command line.

    Raises:
        ValueError: A value is not valid, or two contradict one another.
    """
    if args.image is None:
        raise UsageError(_no_image(args))
    for name, (pattern, shape) in SHAPES.items():
        value = getattr(args, name)
        for text in value if isinstance(value, list) else [value]:
            if text is not None and not pattern.fullmatch(text):
                raise UsageError(f"--{name} must be {shape}, got {text!r}.")
    for name, least in LOWEST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}.")
    for name in SET_BY_THE_JOB:
        if getattr(args, name):
            raise UsageError(
                f"--{name} has no meaning in a manifest: the pods are started by Kubernetes. Leave it out."
            )
    if args.cpu and args.gpus_per_node:
        raise UsageError("--cpu and --gpus_per_node contradict one another. Leave one of them out.")
    if args.kind == "trainjob" and args.pod_restarts:
        raise UsageError("--pod_restarts needs --kind job: the runtime of a TrainJob says how often it restarts.")
    paths = [text.partition(":")[2] for text in args.volume or ()] + (["/dev/shm"] if args.shared_memory else [])
    if len(paths) != len(set(paths)):
        raise UsageError(f"Two volumes cannot be mounted at one path: {', '.join(sorted(paths))}. Give each its own.")


def _no_image(args: Namespace) -> str:
    """What is missing, or in the wrong place: as in `accelerate launch`, what follows the script is passed to it."""
    if any(word.startswith("--image") for word in args.training_script_args):
        return (
            f"--image stands after {args.training_script}, so it is passed to the script. Write options first: accelerate kubernetes "
            f"--image IMAGE {args.training_script}"
        )
    return "--image is needed: the image of the containers, which has the script and this library."
