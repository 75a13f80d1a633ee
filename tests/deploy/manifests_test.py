# SPDX-License-Identifier: Apache-2.0
"""docker/compose*.yaml by the schema of the compose specification (check-jsonschema has it), deploy/kubernetes by those of
Kubernetes (kubernetes-validate has them), each with a mistake that must be found; and what no schema can say: that images,
users and sockets are those of the Dockerfile, and secrets' modes and groups such as the daemon takes."""

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
SECRETS = "/etc/kvstrata/remote/"  # made by whoever runs compose.remote.yaml


def compose(name):
    text = importlib.resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    judge = jsonschema.validators.validator_for(json.loads(text))(json.loads(text))
    document = yaml.safe_load((ROOT / "docker" / name).read_text())
    errors = [f"{error.json_path}: {error.message}" for error in judge.iter_errors(document)]
    assert not errors, errors
    broken = copy.deepcopy(document)
    next(iter(broken["services"].values()))["mem_limits"] = "6g"
    assert list(judge.iter_errors(broken)), "the schema lets a misspelt key pass"
    return document


def check_places(document):
    """Volumes and files that are named are there; secrets are made by whoever runs it."""
    for name, service in document["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / "docker" / source).exists(), f"{name}: {volume}"
            elif not source.startswith(SECRETS):
                assert source in document["volumes"], f"{name}: {volume}"
        for option in service.get("security_opt", []):
            if option.startswith("seccomp="):
                assert (ROOT / "docker" / option.removeprefix("seccomp=")).exists(), option


def check_compose(document):
    check_places(document)
    profiles = {profile for service in document["services"].values() for profile in service["profiles"]}
    assert profiles == {"cpu", "gpu", "monitoring", "engines"}, profiles
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


def users_of_secrets():
    """Whom make_secrets.sh gives each folder to."""
    script = (ROOT / "deploy/remote/make_secrets.sh").read_text()
    users = dict(re.findall(r"(\w+)=\$\{\w+:-(\d+:\d+)\}", script))
    return {name: users[user] for user, names in re.findall(r'chown -R "\$(\w+)" ((?:"\$1/\w+" ?)+)', script)
            for name in re.findall(r"\$1/(\w+)", names)}


def check_compose_remote(document):
    check_places(document)
    services, users = document["services"], users_of_secrets()
    dockerfile = (ROOT / "docker/cpu.Dockerfile").read_text()
    (daemon,) = re.findall(r"^USER (\S+)", dockerfile, re.M)
    readers = set()
    for name, service in services.items():
        for volume in service["volumes"]:
            if volume.startswith(SECRETS):
                of = volume.split(":")[0].removeprefix(SECRETS)
                readers.add(of)
                assert users[of] == service.get("user", daemon), f"{name} cannot read {volume}"
    assert readers == set(users), readers
    servers = [f"127.0.0.1:{service['command'][-1]}" for name, service in services.items() if name.startswith("server-")]
    assert services["cluster"]["command"] == servers and len(servers) == 6, servers
    for name in ("node-a", "node-b"):
        assert set(services[name]["environment"]["KVSTRATA_REMOTE_REDIS"].split(",")) < set(servers), name


def merged(document, patch):
    """As kubectl merges it: lists by their items' name or mountPath."""
    if isinstance(document, dict) and isinstance(patch, dict):
        return {key: merged(document[key], patch[key]) if key in document and key in patch else
                document.get(key, patch.get(key)) for key in document | patch}
    if isinstance(document, list) and isinstance(patch, list):
        key = "mountPath" if "mountPath" in patch[0] else "name"
        changes = {item[key]: item for item in patch}
        return [merged(item, changes.pop(item[key], item)) for item in document] + list(changes.values())
    return patch


def check_kubernetes_remote():
    parts = {document["kind"]: document for document in documents("remote.yaml")}
    for name in ("servers.conf", "make_cluster.sh"):
        assert parts["ConfigMap"]["data"][name] == (ROOT / "deploy/remote" / name).read_text(), name
    (daemon_set,) = [document for document in documents("daemonset.yaml") if document["kind"] == "DaemonSet"]
    (patch,) = documents("remote_daemonset.yaml")
    parts["DaemonSet"] = merged(daemon_set, patch)
    for document in parts.values():
        for kubernetes in (OLDEST, KUBERNETES):
            judge_kubernetes(document, kubernetes, "remote.yaml")
    count, service = parts["StatefulSet"]["spec"]["replicas"], parts["Service"]["metadata"]["name"]
    servers = [f"{parts['StatefulSet']['metadata']['name']}-{i}.{service}:6379" for i in range(count)]
    assert count == 6 and containers(parts["Job"])[1][0]["args"] == servers, servers
    pod, (*_, daemon) = containers(parts["DaemonSet"])
    settings = {entry["name"]: entry["value"] for entry in daemon["env"]}
    assert "KVSTRATA_SOCKET" in settings, settings
    assert set(settings["KVSTRATA_REMOTE_REDIS"].split(",")) < set(servers), settings
    assert {"secrets", "socket", "disk"} <= {volume["name"] for volume in pod["volumes"]}, pod["volumes"]
    # The socket's group is the daemon's own; whose engines have it must not read the secret (remote_secret.h).
    assert pod["securityContext"]["fsGroup"] != pod["securityContext"]["runAsGroup"], pod["securityContext"]
    for document in parts.values():
        for volume in containers(document)[0].get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o400, volume


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
    check_compose(compose("compose.yaml"))
    check_compose_remote(compose("compose.remote.yaml"))
    for name in ("sidecar.yaml", "daemonset.yaml"):
        check_kubernetes(name)
    check_kubernetes_remote()
    check_that_kubernetes_judges()
    print("compose and Kubernetes: valid")


if __name__ == "__main__":
    sys.exit(main())
