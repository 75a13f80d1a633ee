# SPDX-License-Identifier: Apache-2.0
"""docker/compose.remote.yaml without containers: its servers' commands, deploy/remote's settings and scripts, on ports of
this test's own; two daemons then share a prompt. Servers are Debian's redis (docker/packages.apt).

    remote_tier_test.py KVSTRATAD     prints what it sees; its exit code judges
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "integrations/kvstrata/src"))

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402

SERVER = "/usr/bin/redis-check-rdb"  # redis-tools has the server under this name; it is what it is called as
LAYERS, HEADS, DIM, PROMPT = 2, 2, 64, np.arange(1000, dtype=np.int32)
WAIT_S = 60


def free_ports(number: int) -> list[int]:
    """Each with the bus' port, 10000 above."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(8 * number)]
    ports = [s.getsockname()[1] for s in sockets if s.getsockname()[1] < 55000]
    for s in sockets:
        s.close()
    if len(ports) < number:
        raise SystemExit(f"{len(ports)} free ports below 55000; {number} are needed")
    return ports[:number]


class Servers:
    """Servers by the compose file, in `folder`; its ports replaced by free ones."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        services = yaml.safe_load((ROOT / "docker/compose.remote.yaml").read_text())["services"]
        self.commands = [s["command"] for name, s in services.items() if name.startswith("server-")]
        self.cluster, self.node = services["cluster"], services["node-a"]
        self.named = [command[-1] for command in self.commands]
        self.ports = free_ports(len(self.commands))
        self.running: list[subprocess.Popen[bytes]] = []

    def addresses(self, text: str) -> str:
        for named, port in zip(self.named, self.ports):
            text = text.replace(f":{named}", f":{port}")
        return text

    def settings(self, number: int) -> pathlib.Path:
        """servers.conf with a container's folders replaced."""
        data = self.folder / f"data-{number}"
        data.mkdir(exist_ok=True)
        text = (ROOT / "deploy/remote/servers.conf").read_text()
        for place, here in (("/data", data), ("/run/secrets", self.folder / "secrets")):
            assert place in text, place
            text = text.replace(place, str(here))
        path = data / "servers.conf"
        path.write_text(text)
        return path

    def start(self) -> None:
        for number, (command, port) in enumerate(zip(self.commands, self.ports)):
            assert command[:2] == ["valkey-server", "/etc/valkey/servers.conf"], command
            with open(self.folder / f"log-{number}", "ab") as log:
                self.running.append(subprocess.Popen(
                    ["redis-server", str(self.settings(number)), *command[2:-1], str(port)], executable=SERVER, stdout=log,
                    stderr=log))

    def stop(self) -> None:
        for server in self.running:
            server.send_signal(signal.SIGKILL)
            server.wait()
        self.running = []

    def make_cluster(self) -> str:
        """What the service `cluster` runs."""
        interpreter, script, password = self.cluster["entrypoint"]
        done = subprocess.run(
            [interpreter, str(ROOT / "deploy/remote" / pathlib.PurePath(script).name),
             password.replace("/run/secrets", str(self.folder / "secrets")),
             *(self.addresses(word) for word in self.cluster["command"])],
            env={**os.environ, "CLI": "redis-cli", "PATIENCE": str(WAIT_S)}, timeout=4 * WAIT_S, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def ask(self, user: str, password: str, *words: str, number: int = 0) -> str:
        return subprocess.run(["redis-cli", "-h", "127.0.0.1", "-p", str(self.ports[number]), "--user", user, *words],
                              env={**os.environ, "REDISCLI_AUTH": password}, timeout=WAIT_S, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True).stdout.strip()

    def daemon(self) -> Daemon:
        """A node of the compose file; whatever it computes goes there."""
        settings = {name: self.addresses(value).replace("/run/secrets", str(self.folder / "secrets"))
                    for name, value in self.node["environment"].items()}
        return Daemon("--set", "remote.write=all", "--set", "remote.min_tokens=32", "--set", "pool.host_bytes=128MiB",
                      binary=sys.argv[1], environment=settings)


def secret_files(folder: pathlib.Path) -> None:
    script = ROOT / "deploy/remote/make_secrets.sh"
    subprocess.run([script, folder], check=True)
    again = subprocess.run([script, folder], stderr=subprocess.PIPE, text=True)
    assert again.returncode == 2 and "does not exist yet" in again.stderr, again
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert [str(path.relative_to(folder)) for path in files] == [
        "admin/password", "daemons/remote.password", "daemons/remote.secret", "servers/replication.conf",
        "servers/users.acl"], files
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o400, path
        if os.geteuid() == 0:
            assert path.stat().st_uid == (10001 if path.parent.name == "daemons" else 10002), path
            shutil.chown(path, 0, 0)  # this test's daemons are root's
            shutil.chown(path.parent, 0, 0)


def secrets_of_others(folder: pathlib.Path) -> None:
    """As root makes them for servers and daemons that run as other users than the images'."""
    if os.geteuid() != 0:
        return
    subprocess.run([ROOT / "deploy/remote/make_secrets.sh", folder], check=True,
                   env={**os.environ, "DAEMONS": "65534:65533", "SERVERS": "65532:65531"})
    for name, owner in (("daemons", (65534, 65533)), ("servers", (65532, 65531)), ("admin", (65532, 65531))):
        for path in (folder / name, *(folder / name).iterdir()):
            assert (path.stat().st_uid, path.stat().st_gid) == owner, path


def check_users(servers: Servers, secrets: pathlib.Path) -> None:
    kvstrata_password = (secrets / "daemons/remote.password").read_text().strip()
    for words in (("flushall",), ("config", "get", "masterauth"), ("keys", "*"), ("get", "others"), ("acl", "list")):
        assert "NOPERM" in servers.ask("kvstrata", kvstrata_password, *words), words
    assert "WRONGPASS" in servers.ask("default", "", "ping") or "NOAUTH" in servers.ask("default", "", "get", "kv1:x")
    assert "WRONGPASS" in servers.ask("kvstrata", "guessed", "ping")


def check_settings(servers: Servers, admin: str) -> None:
    for number in range(len(servers.ports)):
        for name, value in (("cluster-require-full-coverage", "no"), ("maxmemory-policy", "allkeys-lru"), ("save", ""),
                            ("appendonly", "no"), ("maxmemory", "1073741824")):
            said = servers.ask("admin", admin, "config", "get", name, number=number).split("\n")
            assert said == [name, value] or said == [name] and value == "", (number, said)
        said = servers.ask("admin", admin, "config", "get", "client-output-buffer-limit", number=number)
        assert "2147483648 1073741824 60" in said, said


def masters_of(nodes: str) -> tuple[int, int]:
    lines = [line.split() for line in nodes.split("\n") if "@" in line]
    return sum("master" in words[2] for words in lines), sum("slave" in words[2] for words in lines)


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HEADS, DIM), dtype=np.float32)


def prompt_on(daemon: Daemon) -> int:
    """The prompt, of which so many tokens came from elsewhere; gone from there when this returns."""
    with kvstrata.attach(daemon.socket, client_name="remote_tier_test") as session:
        model = session.register_model("test", "sha256:test", layers=LAYERS, query_heads=HEADS, kv_heads=HEADS, head_dim=DIM)
        with session.open(model, "full", PROMPT) as sequence:
            held, missing = sequence.held, PROMPT[sequence.held:]
            with session.step([(sequence, missing)]) as step:
                for layer in range(LAYERS):
                    step.append(layer, rows(len(missing), layer), rows(len(missing), layer + 10))
                    step.attend(layer, rows(len(missing), layer + 20))
            sequence.prefill_done()
    return held


def check_nodes(servers: Servers, admin: str) -> None:
    def values() -> int:
        """On all masters and replicas."""
        return sum(int(servers.ask("admin", admin, "dbsize", number=i)) for i in range(len(servers.ports)))

    before = values()
    with servers.daemon() as first, servers.daemon() as second:
        assert prompt_on(first) == 0
        deadline = time.monotonic() + WAIT_S
        held = 0
        while held < len(PROMPT) - 64:  # written behind the step; asked again once a miss is forgotten
            assert time.monotonic() < deadline, f"{held} tokens held, {values() - before} values\n{second.said()}"
            held = max(held, prompt_on(second) if values() > before else 0)
    print(f"{held} of {len(PROMPT)} tokens came from the other node, in {values() - before} values and copies")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as folder:
        secrets = pathlib.Path(folder) / "secrets"
        secret_files(secrets)
        secrets_of_others(pathlib.Path(folder) / "others")
        admin = (secrets / "admin/password").read_text().strip()
        servers = Servers(pathlib.Path(folder))
        try:
            servers.start()
            assert masters_of(servers.make_cluster()) == (3, 3)
            check_settings(servers, admin)
            check_users(servers, secrets)
            check_nodes(servers, admin)
            # All at once at other addresses, as pods come back: none finds another by what it knew.
            servers.stop()
            servers.ports = free_ports(len(servers.ports))
            servers.start()
            assert masters_of(servers.make_cluster()) == (3, 3)
            assert masters_of(servers.make_cluster()) == (3, 3)
            check_users(servers, secrets)
        finally:
            servers.stop()
    print("a cluster of three masters and three replicas, made and mended")


if __name__ == "__main__":
    main()
