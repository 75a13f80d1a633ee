# SPDX-License-Identifier: Apache-2.0
"""docker/cuda.Dockerfile upon the image of cpu.Dockerfile, as image_test builds it, run where there is no driver: it finds
its CUDA backend, and says what is missing of the machine. Beside the CPU image, which starts on the same machine.

    cuda_image_test.py --bin build/bin --lib build/lib --folder build/image      lib has libkvstrata_cuda.so
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

import image_test

IMAGE = "localhost/cuda"
REFUSAL_S = 60


def main():
    parser = argparse.ArgumentParser()
    for name in ("--bin", "--lib", "--folder"):
        parser.add_argument(name, required=True, type=pathlib.Path)
    parser.add_argument(image_test.INSIDE, action="store_true")
    arguments = parser.parse_args()
    backend = arguments.lib / "libkvstrata_cuda.so"
    if os.path.exists("/dev/nvidiactl") or not backend.exists() or not shutil.which("podman"):
        print("SKIPPED: wants a build with CUDA, docker/image.apt, and no GPU")
        return 77
    if not arguments.inside:
        image_test.enter_namespaces(__file__, sys.argv[1:])
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    builder = image_test.Builder(folder)
    context = folder / "context"
    context.mkdir(exist_ok=True)
    shutil.copy(backend, context)
    try:
        image_test.build(builder, arguments.bin, arguments.lib)
        builder("bud", "--quiet", "--format", "docker", "--isolation", "chroot", "--pull-never", "--build-arg",
                f"BASE={image_test.IMAGE}", "--tag", IMAGE, "--file", str(image_test.ROOT / "docker/cuda.Dockerfile"),
                str(context))
        container = image_test.Container(builder, IMAGE, f"--security-opt=seccomp={image_test.SECCOMP}")
        refused = subprocess.run(container.started, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 timeout=REFUSAL_S)
        assert refused.returncode in (1, 2) and "CUDA_NO_DEVICE" in refused.stdout, refused.stdout
        print(refused.stdout.strip())
    finally:
        builder("rm", "--all", stdout=subprocess.DEVNULL)
        builder("rmi", "--all", "--force", stdout=subprocess.DEVNULL)
    print("CUDA image: built, run, refused for want of a driver")
    return 0


if __name__ == "__main__":
    sys.exit(main())
