#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How kvstratad starts, and refuses to: what it loads, what --check-config says, whose files it takes.

    start_test.py --daemon PATH --planted LIBRARY [unittest's own words]
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

DEADLINE_S = 60
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
SMALL_DISK = ["disk.budget_bytes=16MiB", "disk.segment_bytes=1MiB"]
PROGRAMS = argparse.Namespace()


def settings(*keys):
    return [word for key in keys for word in ("--set", key)]


class StartTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvs-start-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.folder.chmod(0o755)
        self.socket = self.folder / "k.sock"

    def run_daemon(self, *words, program=None, before=(), **options):
        """A daemon that ends by itself: its exit code and what it said."""
        command = [*before, str(program or PROGRAMS.daemon), *words]
        if "--socket" not in words and "--config" not in words:
            command += ["--socket", str(self.socket)]
        # Who should have been refused and was not ends with the test, as a failure.
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, **options)
        return result.returncode, result.stdout

    @contextlib.contextmanager
    def daemon(self, *words, before=()):
        """A daemon that serves, or the exit code and the words of one that does not: (code, said)."""
        reader, writer = os.pipe()
        log = self.folder / "log"
        with open(log, "w") as said:
            process = subprocess.Popen(
                [*before, PROGRAMS.daemon, "--socket", str(self.socket), "--ready-fd", str(writer), *words],
                pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            self.assertTrue(select.select([ready], [], [], DEADLINE_S)[0], "neither ready nor ended")
            serves = ready.read(1) != b""
        try:
            code = None if serves else process.wait(DEADLINE_S)
            yield code, log.read_text()
            if serves:
                process.send_signal(signal.SIGTERM)
                self.assertEqual(process.wait(DEADLINE_S), 0)
        finally:
            process.kill()
            process.wait()

    def disk(self, *more):
        return settings(f"disk.path={self.folder}/disk", *SMALL_DISK, *more)

    # --- the library ---

    def plant(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(shutil.copy(PROGRAMS.planted, folder / "libkvstrata_cuda.so"))

    def install(self):
        """A copy of the daemon in FOLDER/own/bin, its library in FOLDER/own/lib."""
        (self.folder / "own/bin").mkdir(parents=True)
        shutil.copy(PROGRAMS.daemon, self.folder / "own/bin/kvstratad")
        return self.plant(self.folder / "own/lib")

    def test_the_library_is_the_daemons_own_and_never_the_working_directorys(self):
        own = self.install()
        here = self.folder / "there/bin"
        for planted in (here, here.parent, self.folder / "there/lib"):
            self.plant(planted)
        link = self.folder / "links/kvstratad"
        link.parent.mkdir()
        link.symlink_to(self.folder / "own/bin/kvstratad")
        env = {key: value for key, value in os.environ.items() if key != "KVSTRATA_CUDA_LIBRARY"}
        for path in (self.folder / "own/bin", link.parent):  # by its bare name, through PATH
            with self.subTest(path=path):
                code, said = self.run_daemon(*settings("pool.device=cuda"), program="kvstratad", cwd=here,
                                             env={**env, "PATH": f"{path}:{os.environ['PATH']}"})
                self.assertEqual(code, 1, said)
                loaded = [line.split()[1] for line in said.splitlines() if line.startswith("loaded: ")]
                self.assertEqual([os.path.realpath(file) for file in loaded], [str(own)], said)

    def test_without_its_own_library_none_is_loaded(self):
        self.install().unlink()
        here = self.folder / "there/bin"
        for planted in (here, self.folder / "there/lib"):
            self.plant(planted)
        env = {**os.environ, "PATH": f"{self.folder}/own/bin:{os.environ['PATH']}"}
        code, said = self.run_daemon(*settings("pool.device=cuda"), program="kvstratad", cwd=here, env=env)
        self.assertEqual(code, 1)
        self.assertIn("CUDA_LIBRARY", said)
        self.assertNotIn("loaded: ", said)

    # --- what cannot start ---

    def cannot_start(self):
        """(what, exit code of the start, words of the message, flags)"""
        (self.folder / "file").write_text("")
        (self.folder / "link").symlink_to(self.folder)
        everybodys = self.folder / "everybodys"
        everybodys.mkdir()
        everybodys.chmod(0o777)
        (self.folder / "linked").mkdir()
        (self.folder / "precious").write_text("")
        (self.folder / "linked/segment.0").hardlink_to(self.folder / "precious")
        last_core = max(os.sched_getaffinity(0))
        disk = [f"disk.path={self.folder}/", *SMALL_DISK]
        return [
            ("no parent of disk.path", 2, "mkdir -p", settings(disk[0] + "no/disk", *SMALL_DISK)),
            ("disk.path is a file", 2, "DISK_PATH", settings(disk[0] + "file", *SMALL_DISK)),
            ("disk.path is a link", 2, "symbolic link", settings(disk[0] + "link", *SMALL_DISK)),
            ("disk.path may be written by all", 4, "chmod 700", settings(disk[0] + "everybodys", *SMALL_DISK)),
            ("a segment has two names", 4, "hard links", settings(disk[0] + "linked", *SMALL_DISK)),
            ("a budget below a segment", 2, "disk.budget_bytes = 1048576",
             settings(disk[0] + "disk", "disk.budget_bytes=1MiB")),
            ("disk.path in /proc", 2, "keeps no files", settings("disk.path=/proc/foo", *SMALL_DISK)),
            ("disk.path is /sys", 2, "keeps no files", settings("disk.path=/sys", *SMALL_DISK)),
            ("no GPU", 1, "CUDA_", settings("pool.device=cuda")),
            ("no such GPU", 1, "CUDA_", settings("pool.device=GPU-01234567-0123-0123-0123-0123456789ab")),
            ("no such NUMA node", 2, "NUMA_NODE", settings("pool.host_numa=777")),
            ("no such cores", 2, "WORK_CPUS", settings(f"work.cpus=0-{last_core + 97}")),
            ("low above high", 2, "at most pool.high_percent, which is 70",
             settings("pool.low_percent=80", "pool.high_percent=70")),
            ("pools beyond the machine", 2, "POOL_BEYOND_MACHINE",
             settings("pool.device_bytes=16TiB", "pool.host_bytes=16TiB")),
            ("a host pool beyond the machine", 2, "POOL_BEYOND_MACHINE", settings("pool.host_bytes=16TiB")),
            ("a device pool beyond the machine, emulated", 2, "POOL_BEYOND_MACHINE",
             settings("pool.device=emulated:64", "pool.device_bytes=1TiB")),
            ("no directory of parameters", 2, "PARAMETERS_DIRECTORY",
             settings(f"parameters.directory={self.folder}/none")),
            ("a file as directory of parameters", 2, "PARAMETERS_DIRECTORY",
             settings(f"parameters.directory={self.folder}/file")),
            ("a file at the socket", 2, "a regular file", ["--socket", f"{self.folder}/file"]),
            ("no directory of the socket", 2, "mkdir -p", ["--socket", f"{self.folder}/no/k.sock"]),
            ("a directory of the socket that all may write", 4, "SOCKET_DIRECTORY",
             ["--socket", f"{everybodys}/k.sock"]),
            ("a plan that is none", 2, "plans.mine", settings("plans.mine=ches")),
        ]

    def test_what_cannot_start_is_refused_by_the_check(self):
        cases = self.cannot_start()
        self.assertGreaterEqual(len(cases), 12)
        before = sorted(self.folder.rglob("*"))
        for what, code, words, flags in cases:
            with self.subTest(what):
                checked, said = self.run_daemon("--check-config", *flags)
                self.assertEqual(checked, 1, said)
                self.assertIn(words, said)
        self.assertEqual(sorted(self.folder.rglob("*")), before, "the check changes nothing")
        for what, code, words, flags in cases:
            with self.subTest(what):
                started, said = self.run_daemon(*flags)
                self.assertEqual(started, code, said)
                self.assertIn(words, said)

    def test_without_address_space_it_says_so_and_does_not_crash(self):
        served = 0
        for stack in (64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20):
            for megabytes in range(60, 480, 15):
                limits = ["prlimit", f"--as={megabytes}000000", f"--stack={stack}:"]
                with self.subTest(stack=stack, megabytes=megabytes):
                    with self.daemon(before=limits) as (code, said):
                        served += code is None
                        if code is not None:
                            self.assertEqual(code, 1, said)
                            self.assertIn("MEMORY", said)
                            self.assertIn("RLIMIT_AS", said)
        self.assertGreater(served, 0)

    def test_the_check_tells_how_much_address_space_is_wanted(self):
        code, said = self.run_daemon("--check-config", before=["prlimit", "--as=100000000"])
        self.assertEqual(code, 1, said)
        self.assertRegex(said, r"MEMORY.* MiB of address space are needed to start.* MiB are left of a limit of 95 MiB")

    def test_all_mistakes_are_told_at_once(self):
        file = self.folder / "k.toml"
        file.write_text('[pool]\nhost_bytes = "lots"\ndevice_byte = "1GiB"\nlow_percent = 95\n'
                        f'[disk]\npath = "{self.folder}/no/disk"\n[plans]\nmine = "ches"\n')
        code, said = self.run_daemon("--check-config", "--config", str(file), "--set", "work.cpus=1023",
                                     "--set", "threads", "--socket", str(self.socket))
        self.assertEqual(code, 1)
        for words in ("pool.host_bytes = 'lots'", "did you mean 'pool.device_bytes'", "pool.low_percent = '95'",
                      f"no folder '{self.folder}/no'", "plans.mine", "WORK_CPUS", "--set 'threads'"):
            self.assertIn(words, said)
        code, said = self.run_daemon("--config", str(file), "--socket", str(self.socket))
        self.assertEqual(code, 2)
        for words in ("did you mean 'pool.device_bytes'", "plans.mine", f"no folder '{self.folder}/no'"):
            self.assertIn(words, said)
        # Without a mistake in the configuration the machine's are told all the same.
        code, said = self.run_daemon(*settings(f"disk.path={self.folder}/no/disk", "work.cpus=1023",
                                               "pool.device=GPU-01234567-0123-0123-0123-0123456789ab"))
        for words in (f"no folder '{self.folder}/no'", "WORK_CPUS", "CUDA_"):
            self.assertIn(words, said)

    def test_a_remote_tier_without_its_files_is_refused_with_its_place(self):
        file = self.folder / "k.toml"
        file.write_text('[remote]\nredis = "127.0.0.1:1"\npassword_file = "/none"\n')
        for flags in (["--check-config"], []):
            with self.subTest(flags):
                code, said = self.run_daemon(*flags, "--config", str(file), "--socket", str(self.socket))
                self.assertEqual(code, 1 if flags else 2, said)
                self.assertRegex(said, rf"{file}:2:\d+: remote.redis = '127.0.0.1:1' needs remote.secret_file")
                self.assertRegex(said, rf"{file}:3:\d+: remote.password_file = '/none'")

    def test_the_log_names_the_remote_tier_and_not_its_secret(self):
        secret = self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text("s3cr3t" * 6 + "\n")
        with self.daemon(*settings("remote.redis=127.0.0.1:1,127.0.0.1:2", f"remote.secret_file={secret}",
                                   "remote.write=all")) as (code, said):
            self.assertIsNone(code, said)
            self.assertRegex(said, r"event=remote_open engine=redis servers=2 write=all seal=none tls=false")
        said = (self.folder / "log").read_text()
        self.assertRegex(said, r"event=remote_pages searches=0 found=0 read=0 missed=0")
        self.assertNotIn("s3cr3t", said)

    def test_a_variable_above_the_file_is_a_warning(self):
        file = self.folder / "k.toml"
        file.write_text(f'[socket]\npath = "{self.folder}/of_the_file.sock"\n')
        env = {**os.environ, "KVSTRATA_SOCKET": str(self.socket)}
        code, said = self.run_daemon("--check-config", "--config", str(file), env=env)
        self.assertEqual(code, 0, said)
        self.assertRegex(said, rf"KVSTRATA_SOCKET = '{self.socket}' overrides socket.path = '.*of_the_file.sock' "
                               rf"of {file}:2:")
        code, said = self.run_daemon("--check-config", "--config", os.path.relpath(file), env=env)
        self.assertIn(f"of {file}:2:", said, "a place is told by its whole path")

    # Only the check runs: a start that took it would fill this machine's file system.
    # tests/server/tier starts one on a small file system of its own.
    def test_the_check_refuses_a_budget_beyond_the_file_system(self):
        beyond = 2 * shutil.disk_usage(self.folder).total
        code, said = self.run_daemon("--check-config", *settings(
            f"disk.path={self.folder}/disk", f"disk.budget_bytes={beyond}", "disk.segment_bytes=4GiB"))
        self.assertEqual(code, 1, said)
        self.assertRegex(said, rf"DISK_SPACE: disk.budget_bytes = {beyond} .*lower it to [0-9]+ MiB")

    def test_a_default_pool_leaves_room_for_the_one_that_was_given(self):
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        code, said = self.run_daemon("--check-config", *settings(f"pool.device_bytes={machine * 97 // 100}"))
        if "POOL_BEYOND_CGROUP" in said:
            self.skipTest("the cgroup allows less than the machine has")
        self.assertEqual(code, 0, said)

    def test_the_check_warns(self):
        code, said = self.run_daemon("--check-config", env={**os.environ, "KVSTRATA_POOL_HOST_BYTE": "1GiB"})
        self.assertEqual(code, 0, said)
        self.assertIn("KVSTRATA_POOL_HOST_BYTES", said)

    def test_chunks_beyond_the_machine_are_a_warning_of_the_check_and_the_start(self):
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20  # MiB; a cgroup may have less
        pools = ["pool.host_bytes=64MiB", "pool.device_bytes=64MiB"]
        beyond, close = settings(f"chunks.bytes={machine + 1}MiB", *pools), settings(f"chunks.bytes={machine - 1}MiB", *pools)
        for words, why in ((beyond, "will be refused; make chunks.bytes smaller"), (close, "make chunks.bytes"),
                           (settings("chunks.bytes=64MiB", *pools), "")):
            code, said = self.run_daemon("--check-config", *words)
            self.assertEqual((code, "warning: chunks.bytes is " in said), (0, why != ""), said)
            self.assertIn(why, said)
        with self.daemon(*beyond) as (code, said):
            self.assertIsNone(code, said)
            self.assertRegex(said, r"warning event=configuration key=.?chunks.bytes.? why=.*make chunks.bytes smaller")

    def test_the_check_of_a_daemon_that_runs_is_well(self):
        flags = self.disk("shutdown.timeout=0.5s", "log.level=warning")
        with self.daemon(*flags) as (code, said):
            self.assertIsNone(code, said)
            checked, said = self.run_daemon("--check-config", *flags)
            self.assertEqual(checked, 0, said)

    # --- the disk's files ---

    def test_what_lies_there_under_another_name_is_not_written(self):
        disk = self.folder / "disk"
        precious = self.folder / "precious"
        for name in ("segment.0", "segment.7", "checkpoint.0", "checkpoint.1", "lock"):
            for size in (0, 100, 1 << 20):
                for link in (os.link, os.symlink):
                    with self.subTest(name=name, size=size, link=link.__name__):
                        shutil.rmtree(disk, ignore_errors=True)
                        disk.mkdir(0o700)
                        precious.write_bytes(b"P" * size)
                        link(precious, disk / name)
                        was = hashlib.sha256(precious.read_bytes()).digest()
                        code, said = self.run_daemon(*self.disk())
                        self.assertEqual(code, 4 if link is os.link else 2, said)
                        self.assertIn(f"disk/{name}", said)
                        self.assertEqual(hashlib.sha256(precious.read_bytes()).digest(), was)

    def test_a_file_that_is_no_file_is_refused_and_not_waited_for(self):
        (self.folder / "disk").mkdir(0o700)
        os.mkfifo(self.folder / "disk/segment.0", 0o600)
        code, said = self.run_daemon(*self.disk())
        self.assertEqual(code, 2, said)
        self.assertIn("no plain file", said)

    def test_folders_and_files_of_others_are_refused(self):
        if os.geteuid() != 0:
            self.skipTest("needs root to give files away")
        disk = self.folder / "disk"
        disk.mkdir(0o700)
        os.chown(disk, 12345, 12345)
        code, said = self.run_daemon(*self.disk())
        self.assertEqual((code, "user 12345" in said), (4, True), said)
        os.chown(disk, 0, 0)
        (disk / "segment.0").touch(0o600)
        os.chown(disk / "segment.0", 12345, 12345)
        code, said = self.run_daemon(*self.disk())
        self.assertEqual((code, "user 12345" in said), (4, True), said)
        os.chown(disk / "segment.0", 0, 0)
        (disk / "segment.0").chmod(0o620)
        code, said = self.run_daemon(*self.disk())
        self.assertEqual((code, "chmod 600" in said), (4, True), said)

    def test_a_disk_that_may_not_be_written_is_4(self):
        if os.geteuid() != 0:
            self.skipTest("needs root to become nobody")
        program = shutil.copy(PROGRAMS.daemon, self.folder / "kvstratad")
        (self.folder / "mine").mkdir()
        os.chown(self.folder / "mine", 65534, 65534)
        flags = ["--socket", f"{self.folder}/mine/k.sock", *self.disk()]
        for words in (["--check-config", *flags], flags):
            code, said = self.run_daemon(*words, program=program, before=NOBODY)
            self.assertEqual(code, 1 if "--check-config" in words else 4, said)
            self.assertIn("DISK_PERMISSION", said)

    def test_a_disk_that_another_daemon_has_is_3(self):
        with self.daemon(*self.disk()) as (code, said):
            self.assertIsNone(code, said)
            code, said = self.run_daemon("--socket", f"{self.folder}/other.sock", *self.disk())
            self.assertEqual(code, 3, said)
            self.assertIn("DISK_LOCKED", said)

    def test_a_limit_of_file_sizes_is_named(self):
        code, said = self.run_daemon(*self.disk(), before=["prlimit", "--fsize=1044480"])  # a block below a segment
        self.assertEqual(code, 1, said)
        self.assertIn("RLIMIT_FSIZE is 1044480; raise it", said)

    def test_an_option_that_is_none_names_the_nearest(self):
        code, said = self.run_daemon("--socke=/tmp/x")
        self.assertEqual(code, 2, said)
        self.assertIn("--socke", said)
        self.assertIn("did you mean '--socket'?", said)

    def test_a_segment_that_is_too_long_or_too_short_stops_nothing(self):
        with self.daemon(*self.disk()) as (code, said):
            self.assertIsNone(code, said)
        segments = [self.folder / f"disk/segment.{i}" for i in (0, 3, 5)]
        for path, size in zip(segments, ((1 << 20) + 4096, 1 << 22, 1000)):
            os.truncate(path, size)
        with self.daemon(*self.disk()) as (code, said):
            self.assertIsNone(code, said)
            self.assertIn("cut_segments=2", said)
        self.assertEqual([path.stat().st_size for path in segments], [1 << 20] * 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--planted", required=True)
    PROGRAMS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
