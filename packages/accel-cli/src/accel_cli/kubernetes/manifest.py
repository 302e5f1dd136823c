"""The documents of a manifest: a Kubeflow `TrainJob`, or an Indexed Job with a headless Service."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from accel_cli.kubernetes.workload import Workload

SAVED_STATUS = 75  # of runs that saved because they were asked to end
TRAINER_CONTAINER = "node"  # the name of the job and of the container in Kubeflow's runtimes
MANAGER = "accelerate.dev/kubernetes"  # whose patches of the runtime these are
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(workload: Workload, kind: str) -> list[dict[str, Any]]:
    """Describe a workload.

    Args:
        workload: The pods.
        kind: `trainjob` or `job`.

    Returns:
        The documents of the manifest, in the order in which to apply them.
    """
    if kind == "trainjob":
        return [_train_job(workload)]
    return [*([_service(workload)] if workload.nodes > 1 else []), _indexed_job(workload)]


def _metadata(workload: Workload) -> dict[str, str]:
    return {"name": workload.name, **({"namespace": workload.namespace} if workload.namespace else {})}


def _train_job(workload: Workload) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "image": workload.image, "numNodes": workload.nodes, "numProcPerNode": workload.processes_per_node,
        "command": [_literal(word) for word in workload.command],
    }  # fmt: skip
    if workload.variables:
        trainer["env"] = _variables(workload)
    if workload.resources:
        trainer["resourcesPerNode"] = _resources(workload)
    spec: dict[str, Any] = {"runtimeRef": {"name": workload.runtime}, "trainer": trainer}
    container = {"name": TRAINER_CONTAINER} | _container_of_volumes(workload)
    if len(container) > 1:
        pod = {"containers": [container], **_pod_of_volumes(workload)}
        job = {"name": TRAINER_CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"template": {"spec": {"replicatedJobs": [job]}}}
        spec["runtimePatches"] = [{"manager": MANAGER, "trainingRuntimeSpec": patch}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(workload),
        "spec": spec,
    }


def _service(workload: Workload) -> dict[str, Any]:
    """Give each pod a name: that of pod 0 resolves before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(workload),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": workload.name},
        },
    }


def _indexed_job(workload: Workload) -> dict[str, Any]:
    """A Job that sets the variables of Kubeflow, which `accelerate launch` takes."""
    container: dict[str, Any] = {
        "name": TRAINER_CONTAINER, "image": workload.image,
        "command": [_literal(word) for word in workload.command],
        "env": [*_node_variables(workload), *_variables(workload)],
    }  # fmt: skip
    if workload.resources:
        container["resources"] = _resources(workload)
    pod = {
        "restartPolicy": "Never",
        **({"subdomain": workload.name} if workload.nodes > 1 else {}),
        "containers": [container | _container_of_volumes(workload)],
        **_pod_of_volumes(workload),
    }
    # pods that are evicted, and those that saved because they were asked to end, are no failures
    ignored = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [SAVED_STATUS]}},
    ]
    spec = {
        "completions": workload.nodes,
        "parallelism": workload.nodes,
        "completionMode": "Indexed",
        "backoffLimit": workload.restarts * workload.nodes,
        "podFailurePolicy": {"rules": ignored},
        "template": {"spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(workload), "spec": spec}


def _node_variables(workload: Workload) -> Iterator[dict[str, Any]]:
    yield {"name": "PET_NNODES", "value": str(workload.nodes)}
    yield {"name": "PET_NPROC_PER_NODE", "value": str(workload.processes_per_node)}
    yield {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    if workload.nodes > 1:
        yield {"name": "PET_MASTER_ADDR", "value": f"{workload.name}-0.{workload.name}"}
        yield {"name": "PET_MASTER_PORT", "value": str(workload.port)}


def _variables(workload: Workload) -> list[dict[str, Any]]:
    return [{"name": name, "value": _literal(value)} for name, value in workload.variables.items()]


def _literal(text: str) -> str:
    """Escape what Kubernetes would replace in commands and values of variables: `$(NAME)`, and `$$`, which it reads as `$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _resources(workload: Workload) -> dict[str, Any]:
    return {"requests": dict(workload.resources), "limits": dict(workload.resources)}


def _mounts(workload: Workload) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, path and source of each volume."""
    mounts = [
        (f"volume-{number}", path, {"persistentVolumeClaim": {"claimName": claim}})
        for number, (claim, path) in enumerate(workload.volumes)
    ]
    if workload.shared_memory:
        mounts.append(
            ("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": workload.shared_memory}})
        )
    return mounts


def _container_of_volumes(workload: Workload) -> dict[str, Any]:
    mounts = [{"name": name, "mountPath": path} for name, path, _ in _mounts(workload)]
    return {"volumeMounts": mounts} if mounts else {}


def _pod_of_volumes(workload: Workload) -> dict[str, Any]:
    volumes = [{"name": name, **source} for name, _, source in _mounts(workload)]
    return {"volumes": volumes} if volumes else {}
