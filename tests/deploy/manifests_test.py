# SPDX-License-Identifier: Apache-2.0
"""docker/compose.yaml by the schema of the compose specification (check-jsonschema has it), deploy/kubernetes by those of
Kubernetes (kubernetes-validate has them), each with a mistake that must be found; and what no schema can say: that images,
users and sockets are those of the Dockerfile."""

import copy
import importlib.resources
import json
import pathlib
import re
import sys

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = "1.37"
OLDEST = "1.29"  # sidecars are from there on


def compose():
    text = importlib.resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    judge = jsonschema.validators.validator_for(json.loads(text))(json.loads(text))
    document = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    errors = [f"{error.json_path}: {error.message}" for error in judge.iter_errors(document)]
    assert not errors, errors
    broken = copy.deepcopy(document)
    broken["services"]["kvstratad"]["mem_limits"] = "6g"
    assert list(judge.iter_errors(broken)), "the schema lets a misspelt key pass"
    return document


def check_compose(document):
    profiles = {profile for service in document["services"].values() for profile in service["profiles"]}
    assert profiles == {"cpu", "gpu", "monitoring", "engines"}, profiles
    for name, service in document["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("./") or source in document["volumes"], f"{name}: {volume}"
        for option in service.get("security_opt", []):
            if option.startswith("seccomp="):
                assert (ROOT / "docker" / option.removeprefix("seccomp=")).exists(), option
    dockerfile = (ROOT / "docker/cpu.Dockerfile").read_text()
    (socket,) = re.findall(r"^ENV KVSTRATA_SOCKET=(\S+)", dockerfile, re.M)
    engine = document["services"]["engine"]
    assert engine["environment"]["KVSTRATA_SOCKET"] == socket
    assert "socket:" + str(pathlib.PurePath(socket).parent) in engine["volumes"], engine["volumes"]


def documents(name):
    return [part for part in yaml.safe_load_all((ROOT / "deploy/kubernetes" / name).read_text()) if part]


def judge_kubernetes(document, version, name):
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise AssertionError(f"{name}, {document['kind']}, {version}: {error.message}") from error


def containers(document):
    pod = document.get("spec", {}).get("template", {}).get("spec", {})
    return pod, pod.get("initContainers", []) + pod.get("containers", [])


def check_kubernetes(name):
    version = (ROOT / "VERSION").read_text().strip()
    daemons = 0
    for document in documents(name):
        for kubernetes in (OLDEST, KUBERNETES):
            judge_kubernetes(document, kubernetes, name)
        pod, all_containers = containers(document)
        for container in all_containers:
            if container["image"].startswith("kvstrata:"):
                assert container["image"] == f"kvstrata:{version}", container["image"]
            if container["name"] != "kvstratad":
                continue
            daemons += 1
            assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
            # Whoever restarts a daemon that has lost a disk loses its memory too.
            live, ready = (container[probe]["exec"]["command"] for probe in ("livenessProbe", "readinessProbe"))
            assert "--live" in live and "--live" not in ready, (live, ready)
            # Longer than the CLI itself waits (5 s).
            assert container["livenessProbe"]["timeoutSeconds"] > 5
    assert daemons == 1, f"{name} has {daemons} daemons"


def check_that_kubernetes_judges():
    (deployment,) = [d for d in documents("sidecar.yaml") if d["kind"] == "Deployment"]
    broken = copy.deepcopy(deployment)
    containers(broken)[1][0]["livenessprobe"] = {}
    try:
        judge_kubernetes(broken, KUBERNETES, "sidecar.yaml")
    except AssertionError:
        return
    raise SystemExit("the schema lets a misspelt key pass")


def main():
    check_compose(compose())
    for name in ("sidecar.yaml", "daemonset.yaml"):
        check_kubernetes(name)
    check_that_kubernetes_judges()
    print("compose and Kubernetes: valid")


if __name__ == "__main__":
    sys.exit(main())
