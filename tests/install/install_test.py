# SPDX-License-Identifier: Apache-2.0
"""Installs this build, component by component, below a DESTDIR, then compiles and runs a C program that finds the
library by pkg-config, and one that finds it by CMake's find_package, against the daemon that was installed.

    install_test.py --cmake cmake --build build --version 1.2.3
"""

import argparse
import os
import pathlib
import re
import select
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PREFIX = "/opt/kvstrata"
# A tree may have no trained parameters.
OPTIONAL = r"share/kvstrata/parameters/.*\.safetensors"
# The files below the prefix that each component must have, and may have.
EXPECTED = {
    "library": {r"lib/libkvstrata\.so\.\d+", r"lib/libkvstrata\.so\.[\d.]+"},
    "remote": {r"lib/libkvstrata_remote\.so\.\d+", r"lib/libkvstrata_remote\.so\.[\d.]+"},
    "devel": {r"include/kvstrata/kvstrata\.h", r"include/kvstrata/client\.h",
              r"include/kvstrata/block_attention\.h", r"include/kvstrata/block_planes\.h", r"lib/libkvstrata\.so",
              r"lib/libkvstrata_remote\.so", r"lib/pkgconfig/kvstrata\.pc", r"lib/cmake/kvstrata/.*\.cmake"},
    "daemon": {r"bin/kvstratad", r"bin/kvstrata", r"/etc/kvstrata/kvstratad\.toml",
               r"lib/systemd/system/kvstratad\.service", r"lib/sysusers\.d/kvstrata\.conf",
               r"share/bash-completion/completions/kvstratad?", r"share/zsh/vendor-completions/_kvstrata",
               r"share/fish/vendor_completions\.d/kvstrata\.fish", r"share/man/man1/kvstratad?\.1",
               r"share/kvstrata/mooncake_agent/agent\.py"},
    "cuda": {r"lib/libkvstrata_cuda\.so", r"lib/systemd/system/kvstratad\.service\.d/10-gpu\.conf"},
}
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(attach C)
find_package(kvstrata {version} REQUIRED)
add_executable(attach {source})
target_link_libraries(attach PRIVATE kvstrata::kvstrata)
if(NOT TARGET kvstrata::remote)
  message(FATAL_ERROR "kvstrata::remote is not exported")
endif()
"""


def run(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, text=True, stdout=subprocess.PIPE,
                          timeout=120, **options).stdout.strip()


def files(root):
    """What lies below root: relative to the prefix, or from / on."""
    found = {"/" + path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    return {name.removeprefix(PREFIX + "/") for name in found}


def install(cmake, build, root):
    for component, patterns in EXPECTED.items():
        alone = root / component
        for where in (alone, root / "all"):
            run(cmake, "--install", build, "--prefix", PREFIX, "--component", component,
                env=os.environ | {"DESTDIR": str(where)})
        found = files(alone)
        if component == "cuda" and not found:
            continue  # a build without a CUDA compiler
        missing = [p for p in patterns if not any(re.fullmatch(p, name) for name in found)]
        foreign = [name for name in found if not any(re.fullmatch(p, name) for p in patterns | {OPTIONAL})]
        assert not missing and not foreign, f"{component}: lacks {missing}, has {foreign}"
    return root / "all" / PREFIX[1:]


def by_pkg_config(prefix, folder, version):
    environment = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    assert run("pkg-config", "--modversion", "kvstrata", env=environment) == version
    flags = run("pkg-config", "--cflags", "--libs", "kvstrata", env=environment).split()
    run("cc", "-std=c11", "-Wall", "-Werror", HERE / "attach.c", "-o", folder / "by_pkg_config", *flags)
    return folder / "by_pkg_config"


def by_find_package(cmake, prefix, folder, version):
    source = folder / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT.format(version=version, source=HERE / "attach.c"))
    run(cmake, "-S", source, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run(cmake, "--build", folder / "build")
    return folder / "build/attach"


def serve(prefix, socket, programs, version):
    """Each program attaches to the installed daemon, with the installed library; the CLI finds that by itself."""
    ready, write = os.pipe()
    daemon = subprocess.Popen([prefix / "bin/kvstratad", "--socket", socket, "--ready-fd", str(write), "--set",
                               "pool.device_bytes=64MiB", "--set", "pool.host_bytes=64MiB", "--config",
                               prefix.parents[1] / "etc/kvstrata/kvstratad.toml"], pass_fds=[write])
    os.close(write)
    try:
        assert select.select([ready], [], [], 60)[0] and os.read(ready, 1), "the daemon did not start"
        run(prefix / "bin/kvstrata", "--socket", socket, "health")
        for program in programs:
            said = run(program, socket, env=os.environ | {"LD_LIBRARY_PATH": str(prefix / "lib")})
            assert said == f"{version} linked", said
    finally:
        daemon.terminate()
        assert daemon.wait(timeout=30) == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--build", required=True, type=pathlib.Path)
    parser.add_argument("--version", required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-install-") as temporary:
        folder = pathlib.Path(temporary)
        prefix = install(arguments.cmake, arguments.build, folder)
        programs = [by_pkg_config(prefix, folder, arguments.version),
                    by_find_package(arguments.cmake, prefix, folder, arguments.version)]
        serve(prefix, folder / "kvstratad.sock", programs, arguments.version)
    print("installed, found by pkg-config and find_package, attached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
