# SPDX-License-Identifier: Apache-2.0
"""The image of docker/cpu.Dockerfile, without Docker: its stage `daemon` is built by buildah from the
binaries that were just made, and run by podman and crun as docker/compose.yaml runs it: as its user, read-only, without
capabilities, under docker/seccomp.json. Its HEALTHCHECK, the CLI, an engine outside (with --python) and `docker stop`'s
SIGTERM must find it well, and io_uring must be there. Then as the sidecar of deploy/kubernetes: as nobody, with its socket
in a folder that is everybody's.

What stage `build` would leave in /src comes from this build instead, and debian:12-slim from Debian's
packages (kept in FOLDER between runs). Root, in namespaces of its own: nothing is mounted outside, and all that is
written lies in FOLDER. Exit code 77: buildah or podman is not here, or may run no container at all.

    image_test.py --bin build/bin --lib build/lib --folder build/image [--python build/venv/bin/python]
"""

import argparse
import glob
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/cpu.Dockerfile"
IMAGE = "localhost/daemon"
INSIDE = "--inside"
SECCOMP = ROOT / "docker/seccomp.json"
BASE = "docker.io/library/debian:12-slim"
SKIPPED = 77
HEALTHY_S = 120  # from the start; interval and retries of the health check are Docker's business


def stage(name):
    """The lines of one stage of the Dockerfile, as they are."""
    lines, inside = [], False
    for line in DOCKERFILE.read_text().splitlines():
        if line.startswith("FROM "):
            inside = line.split()[-1] == name
        if inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


class Builder:
    def __init__(self, folder):
        self.folder = folder
        # vfs: no file system of its own, hence no mount, works everywhere.
        self.command = ["buildah", "--root", f"{folder}/storage", "--runroot", f"{folder}/run",
                        "--storage-driver", "vfs"]

    def __call__(self, *arguments, **options):
        return subprocess.run([*self.command, *arguments], check=True, text=True, **options)

    def says(self, *arguments):
        return self(*arguments, stdout=subprocess.PIPE).stdout.strip()

    def image_of(self, files, name):
        """An image of nothing but files: {source: folder in it}, or an archive for '/'."""
        container = self.says("from", "scratch")
        for source, target in files:
            self("add", "--quiet", container, str(source), target)
        self("commit", "--quiet", "--rm", container, name)


def debian(folder):
    """An archive of a minimal Debian 12, from the mirror that this machine uses."""
    archive = folder / "debian12.tar"
    if not archive.exists():
        part = folder / "part.tar"
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", part,
                        "http://deb.debian.org/debian"], check=True)
        part.rename(archive)
    return archive


def build(builder, binaries, libraries):
    builder.image_of([(debian(builder.folder), "/")], BASE)
    built = [(file, "/src/build/lib/") for file in glob.glob(f"{libraries}/libkvstrata*.so*")]
    built += [(binaries / name, "/src/build/bin/") for name in ("kvstratad", "kvstrata")]
    built += [(file, "/src/parameters/") for file in (ROOT / "parameters").glob("*.safetensors")]
    built += [(ROOT / "integrations/mooncake_agent/agent.py", "/src/integrations/mooncake_agent/")]
    built += [(ROOT / "docker/runtime.apt", "/src/docker/"), (ROOT / "LICENSE", "/src/")]
    builder.image_of(built, "localhost/build")  # COPY --from=build finds it by its name
    dockerfile = builder.folder / "daemon.Dockerfile"
    dockerfile.write_text(stage("daemon"))
    builder("bud", "--quiet", "--format", "docker", "--isolation", "chroot", "--network", "host",
            "--pull-never", "--tag", IMAGE, "--file", str(dockerfile), str(ROOT / "docker"))


def limits():
    """podman raises them unless it is told, which a build machine may forbid. io_uring takes more than 4,096 files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return "--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=2000:2000"


class Container:
    """`podman run` of the image, as long as the `with` lasts; the end must be a clean one."""

    def __init__(self, builder, image, *options):
        # No cgroups, no network of its own, no systemd timer for the health check: of these a build machine has none.
        self.podman = ["podman", *builder.command[1:], "--runtime", "crun", "--cgroup-manager", "cgroupfs"]
        self.name = f"kvstrata-{os.getpid()}"
        self.log = builder.folder / "daemon.log"
        self.started = [*self.podman, "run", "--rm", "--name", self.name, "--cgroups=disabled", "--network=host",
                        *limits(), "--no-healthcheck", "--read-only",
                        "--cap-drop=all", "--security-opt=no-new-privileges", *options, image]

    def __enter__(self):
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(self.started, stdout=log, stderr=subprocess.STDOUT)
        return self

    def exec(self, *command):
        """Its exit code."""
        return subprocess.run([*self.podman, "exec", self.name, *command]).returncode

    def await_health(self, check):
        deadline = time.monotonic() + HEALTHY_S
        while self.exec(*check) != 0:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"{check} never succeeded: {self.log.read_text()}"

    def __exit__(self, kind, *_):
        subprocess.run([*self.podman, "stop", "--time", "10", self.name], stdout=subprocess.DEVNULL)
        try:
            code = self.process.wait(timeout=30)
        finally:
            self.process.kill()
        assert kind or code == 0, f"exit code {code}: {self.log.read_text()}"


def run_as_compose_does(builder, python):
    config = json.loads(builder.says("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    kind, *check = config["Healthcheck"]["Test"]
    assert kind == "CMD", kind
    user = int(config["User"].split(":")[0])
    assert user > 0, config["User"]
    sockets = builder.folder / "sockets"
    shutil.rmtree(sockets, ignore_errors=True)
    sockets.mkdir()
    os.chown(sockets, user, user)
    with Container(builder, IMAGE, f"--security-opt=seccomp={SECCOMP}", f"--volume={sockets}:/run/kvstrata",
                   "--env=KVSTRATA_DISK_PATH=/var/lib/kvstrata/disk", "--env=KVSTRATA_DISK_BUDGET_BYTES=300MiB",
                   "--env=KVSTRATA_DISK_SEGMENT_BYTES=64MiB") as container:
        container.await_health(check)
        assert container.exec("kvstrata", "status") == 0
        assert "queue=io_uring" in container.log.read_text(), container.log.read_text()
        if python:
            subprocess.run([python, "-B", ROOT / "tests/deploy/decode.py", sockets / "kvstratad.sock"], check=True,
                           timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT / "integrations/kvstrata/src")})


def run_as_sidecar(builder):
    with Container(builder, IMAGE, "--user=65534:65534", "--tmpfs=/run/pod:mode=0777", "--env=XDG_RUNTIME_DIR=/run/pod",
                   "--env=KVSTRATA_SOCKET=") as container:
        container.await_health(("kvstrata", "health", "-q", "--live"))
        container.await_health(("kvstrata", "health", "-q"))


def enter_namespaces(program, words):
    """Starts this program again, in a mount namespace whose root crun can pivot away from, where the machine's may be a
    chroot, and with cgroups of version 2, which crun asks for though it is to leave them alone."""
    script = f"""here=$PWD
        {{ mount --make-rprivate / && root=$(mktemp -d) && mount --rbind / "$root" && cd "$root" && pivot_root . . &&
          umount -l . && cd "$here" && {{ umount -R -l /sys/fs/cgroup 2>/dev/null; mount -t cgroup2 none /sys/fs/cgroup; }}
        }} || {{ echo "SKIPPED: this machine gives no mount namespace with a root and cgroups of its own"; exit {SKIPPED}; }}
        exec "$@" """
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-B", program, *words, INSIDE])


def runs_containers(builder):
    """Whether podman runs anything here; of what the image does it says nothing."""
    podman = Container(builder, BASE).podman
    found = subprocess.run([*podman, "run", "--rm", "--cgroups=disabled", "--network=host", *limits(), BASE, "true"],
                           stderr=subprocess.PIPE, text=True)
    if found.returncode != 0:
        print(f"SKIPPED: podman runs no container here: {found.stderr}")
    return found.returncode == 0


def main():
    parser = argparse.ArgumentParser()
    for name in ("--bin", "--lib", "--folder"):
        parser.add_argument(name, required=True, type=pathlib.Path)
    parser.add_argument("--python", type=pathlib.Path)
    parser.add_argument(INSIDE, action="store_true")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("buildah", "mmdebstrap", "podman", "crun")):
        print("SKIPPED: wants root and docker/image.apt")
        return SKIPPED
    if not arguments.inside:
        enter_namespaces(__file__, sys.argv[1:])
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    builder = Builder(folder)
    try:
        build(builder, arguments.bin, arguments.lib)
        if not runs_containers(builder):
            return SKIPPED
        run_as_compose_does(builder, arguments.python)
        run_as_sidecar(builder)
    finally:
        # Gigabytes that nobody needs; the archive stays.
        builder("rm", "--all", stdout=subprocess.DEVNULL)
        builder("rmi", "--all", "--force", stdout=subprocess.DEVNULL)
    print("image: built, started, healthy, attached to, stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
