"""What a manifest promises: checks that the schema of Kubernetes does not make, and the pods that its controllers start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate

VERSION = "1.37"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|[MGTPE]i?)?")
PORT_OF_TRAINER = "29400"

# of Kubeflow Trainer 2.4, whose schema is in no package: the fields, by the path of those above them
FIELDS_OF_TRAIN_JOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"runtimeRef", "trainer", "runtimePatches"},
    "trainer": {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"},
    "runtimePatches": {"manager", "trainingRuntimeSpec"},
}


def check(documents: list[dict[str, Any]]) -> None:
    """Check a manifest as an API server would."""
    for document in documents:
        if document["kind"] == "TrainJob":
            _check_train_job(document)
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)
        assert LABEL.fullmatch(document["metadata"]["name"])
    services = [document["metadata"]["name"] for document in documents if document["kind"] == "Service"]
    for job in (document for document in documents if document["kind"] == "Job"):
        _check_job(job, services)


def _check_job(job: dict[str, Any], services: list[str]) -> None:
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] in ("Indexed", "NonIndexed")
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    assert pod["restartPolicy"] == "Never" or "podFailurePolicy" not in spec
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("Ignore", "Count", "FailJob", "FailIndex")
        assert rule.get("onExitCodes", {"operator": "In"})["operator"] in ("In", "NotIn")
        assert 0 not in rule.get("onExitCodes", {}).get("values", [])
    assert LABEL.fullmatch(f"{name}-{spec['completions'] - 1}"), "the host name of the last pod"
    assert services == ([pod["subdomain"]] if spec["completions"] > 1 else [])
    _check_pod(pod)


def _check_train_job(job: dict[str, Any]) -> None:
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    spec = job["spec"]
    patches = spec.get("runtimePatches", [])
    for path, fields in (
        ("", job),
        ("spec", spec),
        ("trainer", spec["trainer"]),
        *(("runtimePatches", each) for each in patches),
    ):
        assert set(fields) <= FIELDS_OF_TRAIN_JOB[path]
    for patch in patches:
        assert re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", patch["manager"])
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert replicated["name"] == "node"
        _check_pod(replicated["template"]["spec"]["template"]["spec"])


def _check_pod(pod: dict[str, Any]) -> None:
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    assert all(LABEL.fullmatch(name) for name in volumes)
    assert len(volumes) == len(set(volumes))
    for container in pod["containers"]:
        mounts = container.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} <= set(volumes)
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        for amount in container.get("resources", {}).get("limits", {}).values():
            assert QUANTITY.fullmatch(amount)


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the domain name, the command and the environment of each pod, as the controllers and the kubelet start them."""
    for domain, command, variables in _pods(documents):
        environ: dict[str, str] = {}
        for name, value in variables.items():
            environ[name] = expanded(value, environ)
        yield domain, [expanded(word, environ) for word in command], environ


def expanded(text: str, environ: dict[str, str]) -> str:
    """Replace `$(NAME)` by the value of a variable, and `$$` by `$`, as the kubelet reads a text from left to right."""
    done = ""
    while text:
        reference = re.match(r"\$\(([^)]*)\)", text)
        if text.startswith("$$"):
            done, text = f"{done}$", text[2:]
        elif reference:
            done, text = done + environ.get(reference[1], reference[0]), text[reference.end() :]
        else:
            done, text = done + text[0], text[1:]
    return done


def _pods(documents: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    job = documents[-1]
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "TrainJob":
        trainer = spec["trainer"]
        for index in range(trainer["numNodes"]):
            nodes = {
                "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": PORT_OF_TRAINER,
            }  # fmt: skip
            yield f"{name}-node-0-{index}.{name}", trainer["command"], nodes | _values(trainer.get("env", []), index)
        return
    (container,) = spec["template"]["spec"]["containers"]
    for index in range(spec["completions"]):
        domain = f"{name}-{index}.{spec['template']['spec']['subdomain']}"
        yield domain, container["command"], _values(container["env"], index)


def _values(variables: list[dict[str, Any]], index: int) -> dict[str, str]:
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
    return {
        variable["name"]: variable["value"]
        if "value" in variable
        else fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in variables
    }
