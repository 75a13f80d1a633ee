"""The image of docker/cpu.Dockerfile, without Docker: its stage `daemon` is built by buildah from the
binaries that were just made, and run by its ENTRYPOINT; its HEALTHCHECK, the CLI and `docker stop`'s
SIGTERM must find it well.

What stage `build` would leave in /src comes from this build instead, and debian:12-slim from Debian's
packages (kept in FOLDER between runs). Root, in namespaces of its own (chroot isolation): nothing is
mounted outside, and all that is written lies in FOLDER. Exit code 77: buildah is not here.

    image_test.py --bin build/bin --lib build/lib --folder build/image
"""

import argparse
import contextlib
import glob
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/cpu.Dockerfile"
BASE = "docker.io/library/debian:12-slim"
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
    built += [(ROOT / "docker/runtime.apt", "/src/docker/")]
    built += [(file, "/src/parameters/") for file in (ROOT / "parameters").glob("*.safetensors")]
    builder.image_of(built, "localhost/build")  # COPY --from=build finds it by its name
    dockerfile = builder.folder / "daemon.Dockerfile"
    dockerfile.write_text(stage("daemon"))
    builder("bud", "--quiet", "--format", "docker", "--isolation", "chroot", "--network", "host",
            "--pull-never", "--tag", "localhost/daemon", "--file", str(dockerfile), str(ROOT / "docker"))


def in_container(builder, container, *command):
    return [*builder.command, "run", "--isolation", "chroot", container, "--", *command]


def await_health(builder, container, check, daemon):
    deadline = time.monotonic() + HEALTHY_S
    while True:
        assert daemon.poll() is None, f"the daemon ended with {daemon.returncode}"
        if subprocess.run(in_container(builder, container, *check)).returncode == 0:
            return
        assert time.monotonic() < deadline, "the health check never succeeded"


def own_process(builder, daemon):
    """The pid of kvstratad below `buildah run`."""
    tree = subprocess.run(["ps", "-eo", "pid,ppid,comm"], stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split(None, 2) for line in tree.splitlines()[1:]]
    below = {daemon.pid}
    for _ in rows:
        below |= {int(pid) for pid, parent, _ in rows if int(parent) in below}
    (pid,) = [int(pid) for pid, _, name in rows if int(pid) in below and name.strip() == "kvstratad"]
    return pid


def run(builder):
    container = builder.says("from", "--pull-never", "localhost/daemon")
    image = json.loads(builder.says("inspect", "--type", "image", "localhost/daemon"))["Docker"]["config"]
    kind, *check = image["Healthcheck"]["Test"]
    assert kind == "CMD", kind
    daemon = subprocess.Popen(in_container(builder, container, *image["Entrypoint"]))
    try:
        await_health(builder, container, check, daemon)
        socket = image["Entrypoint"][image["Entrypoint"].index("--socket") + 1]
        subprocess.run(in_container(builder, container, "kvstrata", "--socket", socket, "status"), check=True)
        os.kill(own_process(builder, daemon), signal.SIGTERM)
        code = daemon.wait(timeout=30)
        assert code == 0, f"exit code {code}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            daemon.kill()
        builder("rm", container, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser()
    for name in ("--bin", "--lib", "--folder"):
        parser.add_argument(name, required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("buildah") or not shutil.which("mmdebstrap"):
        print("SKIPPED: wants root and docker/image.apt")
        return 77
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    builder = Builder(folder)
    try:
        build(builder, arguments.bin, arguments.lib)
        run(builder)
    finally:
        # Gigabytes that nobody needs; the archive stays.
        builder("rm", "--all", stdout=subprocess.DEVNULL)
        builder("rmi", "--all", "--force", stdout=subprocess.DEVNULL)
    print("image: built, started, healthy, stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
