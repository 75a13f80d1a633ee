#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`kvstrata doctor` on seeded misconfigurations: each is found by its check, with a fix, and what follows the fix is
found no more.

Usage: doctor_test.py --cli PATH. Some need root, to be nobody; ends with `N passed, N failed`.
"""
import argparse
import ctypes
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TESTS, os.path.join(TESTS, "python")]
from outcomes import Outcomes  # noqa: E402
from redis_server import free_port, redis_server  # noqa: E402

DEADLINE_S = 60
NOBODY = 65534
MISSING = []  # what was not checked, and why


def deny(*calls):
    """A seccomp filter under which these system calls of x86-64 answer EPERM; in the child."""
    def install():
        bpf = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the number
        for i, number in enumerate(calls):
            bpf.append(struct.pack("HBBI", 0x15, len(calls) - i, 0, number))
        bpf.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # allow
        bpf.append(struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 1))  # EPERM
        code = ctypes.create_string_buffer(b"".join(bpf))
        program = struct.pack("HxxxxxxP", len(bpf), ctypes.addressof(code))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.c_char_p(program)) == 0, ctypes.get_errno()
    return install


def limit(what, value):
    return lambda: resource.setrlimit(what, (value, value))


class Doctor:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.socket = os.path.join(folder, "k.sock")

    def __call__(self, *words, setup=None, as_nobody=False, **env):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSTRATA_")}
        environment.update({"KVSTRATA_SOCKET": self.socket, **env})
        command = [self.program, "doctor", "-o", "json", *words]
        if as_nobody:
            command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
        done = subprocess.run(command, env=environment, timeout=DEADLINE_S, capture_output=True, text=True,
                              preexec_fn=setup)
        assert done.returncode in (0, 1), f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        told = json.loads(done.stdout)
        fails = [c for c in told["checks"] if c["verdict"] == "FAIL"]
        assert told["healthy"] == (not fails) == (done.returncode == 0), told
        for check in told["checks"]:
            assert (check["fix"] != "") == (check["verdict"] != "OK"), check
        return told["checks"]


def found(checks, name, verdict, reason="", words=""):
    """The finding, or None."""
    return next((c for c in checks if c["check"] == name and c["verdict"] == verdict and
                 reason in c["reason"] and words in c["what"] + c["fix"]), None)


def seeded(doctor, wrong, right, name, verdict, reason="", words=""):
    """What `wrong` seeds is found; with `right` instead it is not. Both: words, or words and keywords."""
    def run(what):
        words_, keywords = what if isinstance(what, tuple) else (what, {})
        return doctor(*words_, **keywords)
    checks = run(wrong)
    assert found(checks, name, verdict, reason, words), f"no {verdict} {name} {reason} {words!r} in {checks}"
    checks = run(right)
    assert not found(checks, name, verdict, reason), f"still {verdict} {name} {reason} in {checks}"


def setting(*settings):
    return [word for s in settings for word in ("--set", s)]


# ---- configuration

def test_all_mistakes_at_once(doctor):
    checks = doctor(*setting("pool.hosst_bytes=1GiB", "log.level=loud", "work.queue=none"))
    wrong = [c for c in checks if c["check"] == "configuration" and c["verdict"] == "FAIL"]
    assert [c["reason"] for c in wrong] == ["CONFIG_KEY", "CONFIG_VALUE", "CONFIG_VALUE"], wrong
    assert "pool.host_bytes" in wrong[0]["what"]
    assert found(checks, "clocks", "OK") or found(checks, "clocks", "WARN"), "the machine is looked at all the same"
    assert found(checks, "machine", "WARN", words="not checked: the configuration has mistakes"), checks
    judged = [c["check"] for c in checks if c["check"] in ("memory", "descriptors", "socket", "disk_space", "cpus")]
    assert not judged, f"by defaults in place of what was meant: {judged}"


def test_without_a_file_it_says_what_is_judged(doctor):
    assert found(doctor(), "configuration", "OK", words="built-in defaults are judged"), doctor()
    path = os.path.join(doctor.folder, "sound.toml")
    with open(path, "w") as file:
        file.write("[log]\nlevel = \"info\"\n")
    assert found(doctor("--config", path), "configuration", "OK", words=path)


def test_sizes_without_quotes_hide_nothing(doctor):
    path = os.path.join(doctor.folder, "unquoted.toml")
    with open(path, "w") as file:
        file.write("[disk]\nbudget_bytes = 512MiB  # of the SSD\nload_timeout=5s\nbuget = 1\n"
                   "[limits]\nhost_bytes = 90%\n")
    wrong = [c for c in doctor("--config", path) if c["verdict"] == "FAIL"]
    said = [(c["reason"], c["what"]) for c in wrong]
    assert [reason for reason, _ in said] == ["CONFIG_SYNTAX"] * 3 + ["CONFIG_KEY"], said
    assert 'write: budget_bytes = "512MiB"' in said[0][1] and ":2:" in said[0][1], said
    assert 'write: load_timeout="5s"' in said[1][1], said
    assert 'write: host_bytes = "90%"' in said[2][1] and "disk.buget" in said[3][1], said


def test_a_misspelt_variable(doctor):
    seeded(doctor, ([], {"KVSTRATA_POOL_HOST_BYTE": "1GiB"}), ([], {"KVSTRATA_POOL_HOST_BYTES": "64MiB"}),
           "configuration", "WARN", words="KVSTRATA_POOL_HOST_BYTE")


def test_a_variable_is_no_matter_where_a_flag_says_another_socket(doctor):
    path = os.path.join(doctor.folder, "socket.toml")
    with open(path, "w") as file:
        file.write('socket.path = "/tmp/of-the-file.sock"\n')
    seeded(doctor, ["--config", path], ["--config", path, "--socket", f"{doctor.folder}/flag.sock"], "configuration",
           "WARN", words="KVSTRATA_SOCKET")


def test_watermarks_the_wrong_way_round(doctor):
    seeded(doctor, setting("pool.high_percent=50", "pool.low_percent=80"),
           setting("pool.high_percent=80", "pool.low_percent=50"), "configuration", "FAIL", "CONFIG_VALUE")


def test_a_file_that_is_none(doctor):
    path = os.path.join(doctor.folder, "broken.toml")
    with open(path, "w") as file:
        file.write("[pool\n")
    seeded(doctor, ["--config", path], [], "configuration", "FAIL", "CONFIG_SYNTAX", ":1:")
    seeded(doctor, ["--config", path + ".not"], [], "configuration", "FAIL", "CONFIG_FILE")


# ---- memory, limits

def test_pools_beyond_the_machine(doctor):
    seeded(doctor, setting("pool.host_bytes=15TiB"), setting("pool.host_bytes=64MiB", "pool.device_bytes=64MiB"),
           "memory", "FAIL", "POOL_BEYOND")


def test_chunks_beyond_the_machine(doctor):
    small = ["pool.host_bytes=64MiB", "pool.device_bytes=64MiB"]
    seeded(doctor, setting("chunks.bytes=7TiB", *small), setting("chunks.bytes=64MiB", *small), "memory", "WARN",
           words="lower pool.host_bytes, pool.device_bytes and chunks.bytes")


def test_a_memlock_limit_beside_a_disk(doctor):
    if not may_be_nobody():
        return
    disk = setting("disk.path=" + nobodys(doctor, "locked"), "disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB")
    small = limit(resource.RLIMIT_MEMLOCK, 64 << 10)
    seeded(doctor, (disk, {"setup": small, "as_nobody": True}), ([], {"setup": small, "as_nobody": True}),
           "memlock", "WARN", words="65536")


def test_a_memlock_limit_beside_a_gpu(doctor):
    if not may_be_nobody():
        return
    gpu, host = setting("pool.device=cuda"), setting("pool.host_bytes=4MiB")
    small, large = (limit(resource.RLIMIT_MEMLOCK, n) for n in (64 << 10, 8 << 20))
    seeded(doctor, (gpu + host, {"setup": small, "as_nobody": True}), (gpu + host, {"setup": large, "as_nobody": True}),
           "memlock", "FAIL", "HOST_UNREACHABLE", "memlock: -1")


def test_no_gpu(doctor):
    if os.path.exists("/dev/nvidiactl"):
        MISSING.append("no GPU: there is one")
        return
    seeded(doctor, setting("pool.device=cuda"), setting("pool.device=emulated"), "gpu", "FAIL", "CUDA_NO_DEVICE")


def test_few_descriptors(doctor):
    few, many = limit(resource.RLIMIT_NOFILE, 256), limit(resource.RLIMIT_NOFILE, 8192)
    seeded(doctor, ([], {"setup": few}), ([], {"setup": many}), "descriptors", "WARN", words="LimitNOFILE")
    seeded(doctor, ([], {"setup": many, "KVSTRATA_SESSION_MAX": "65536"}), ([], {"setup": many}), "descriptors", "WARN")


def test_few_threads(doctor):
    if not may_be_nobody():
        return
    few, many = limit(resource.RLIMIT_NPROC, 8), limit(resource.RLIMIT_NPROC, 4096)
    small = setting("pool.host_bytes=64MiB", "pool.device_bytes=64MiB")
    seeded(doctor, (small, {"setup": few, "as_nobody": True}), (small, {"setup": many, "as_nobody": True}),
           "threads", "FAIL", "THREADS")


def test_little_address_space(doctor):
    little, much = limit(resource.RLIMIT_AS, 256 << 20), limit(resource.RLIMIT_AS, 64 << 30)
    seeded(doctor, ([], {"setup": little}), ([], {"setup": much}), "address_space", "FAIL", "MEMORY", "RLIMIT_AS")


def test_cores_that_are_not_there(doctor):
    seeded(doctor, setting("work.cpus=1000"), setting("work.cpus=0"), "cpus", "FAIL", "WORK_CPUS")


def test_more_workers_than_cores(doctor):
    if os.cpu_count() < 2:
        MISSING.append("workers: one core")
        return
    seeded(doctor, setting("work.threads=256"), setting("work.threads=1"), "cpus", "WARN", words="work.threads")


def test_a_numa_node_that_is_not_there(doctor):
    seeded(doctor, setting("pool.host_numa=77"), setting("pool.host_numa=auto"), "numa", "FAIL", "NUMA_NODE")


# ---- disk

def test_a_disk_folder_without_a_parent(doctor):
    right = setting(f"disk.path={doctor.folder}/tier", "disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB")
    seeded(doctor, setting(f"disk.path={doctor.folder}/no/such/tier", "disk.budget_bytes=64MiB",
                           "disk.segment_bytes=16MiB"), right, "disk_space", "FAIL", "DISK_PATH")


def test_a_folder_that_is_not_there_is_told_once(doctor):
    checks = doctor(*setting(f"disk.path={doctor.folder}/no/tier", "disk.budget_bytes=64MiB",
                             "disk.segment_bytes=16MiB"))
    failure = found(checks, "disk_space", "FAIL", "DISK_PATH")
    assert failure and f"install -d -o kvstrata -m 0700 {doctor.folder}/no/tier" in failure["fix"], checks
    assert not [c for c in checks if c["check"] == "o_direct"], checks


def test_a_budget_beyond_the_disk(doctor):
    folder = f"disk.path={doctor.folder}/tier"
    seeded(doctor, setting(folder, "disk.budget_bytes=1TiB"),
           setting(folder, "disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB"), "disk_space", "FAIL", "DISK_SPACE")


def test_a_disk_that_is_memory(doctor):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if subprocess.run(["stat", "-f", "-c", "%T", memory], capture_output=True, text=True).stdout.strip() != "tmpfs":
            MISSING.append("tmpfs: /dev/shm is none")
            return
        rest = ("disk.budget_bytes=32MiB", "disk.segment_bytes=8MiB")
        seeded(doctor, setting(f"disk.path={memory}/tier", *rest), setting(f"disk.path={doctor.folder}/tier", *rest),
               "o_direct", "WARN", words="tmpfs")


def test_a_folder_of_another_user(doctor):
    if not may_be_nobody():
        return
    theirs = os.path.join(doctor.folder, "theirs")
    os.mkdir(theirs, 0o755)
    rest = ("disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB")
    seeded(doctor, (setting(f"disk.path={theirs}/tier", *rest), {"as_nobody": True}),
           (setting("disk.path=" + nobodys(doctor, "mine"), *rest), {"as_nobody": True}),
           "disk_space", "FAIL", "DISK_PERMISSION")


def test_a_read_only_file_system_is_not_a_question_of_owners(doctor):
    at = os.path.join(doctor.folder, "read_only")
    os.mkdir(at)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", at], capture_output=True).returncode != 0:
        MISSING.append("a read-only file system: nothing can be mounted here")
        return
    try:
        rest = ("disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB")
        checks = doctor(*setting(f"disk.path={at}/tier", *rest))
        failure = found(checks, "disk_space", "FAIL", "DISK_READ_ONLY", "remount,rw")
        assert failure and "chown" not in failure["what"] + failure["fix"], checks
    finally:
        subprocess.run(["umount", at], check=True)


def test_a_filter_that_forbids_io_uring(doctor):
    disk = setting(f"disk.path={doctor.folder}/tier", "disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB")
    if not found(doctor(*disk), "io_uring", "OK"):
        MISSING.append("io_uring: this machine has none")
        return
    seeded(doctor, (disk, {"setup": deny(425)}), disk, "io_uring", "WARN", words="seccomp")


# ---- sockets, descriptors

def test_a_socket_path_that_is_too_long(doctor):
    seeded(doctor, ["--socket", "/tmp/" + "x" * 120], ["--socket", doctor.socket], "configuration", "FAIL")


def test_a_socket_folder_that_is_not_there(doctor):
    seeded(doctor, ["--socket", f"{doctor.folder}/no/k.sock"], [], "socket", "FAIL", "SOCKET_DIRECTORY")


def test_a_socket_folder_for_everybody(doctor):
    shared = os.path.join(doctor.folder, "shared")
    os.mkdir(shared)
    os.chmod(shared, 0o777)
    def mended():
        os.chmod(shared, 0o755)
    seeded(doctor, ["--socket", f"{shared}/k.sock"], (["--socket", f"{shared}/k.sock"], {"setup": mended}),
           "socket", "FAIL", "SOCKET_DIRECTORY", "mode 0755")


def test_a_file_where_the_socket_should_be(doctor):
    path = os.path.join(doctor.folder, "file.sock")
    open(path, "w").close()
    seeded(doctor, ["--socket", path], (["--socket", path], {"setup": lambda: os.unlink(path)}),
           "socket", "FAIL", "SOCKET_PATH")


def test_a_stale_socket(doctor):
    path = os.path.join(doctor.folder, "stale.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
    seeded(doctor, ["--socket", path], (["--socket", path], {"setup": lambda: os.unlink(path)}), "socket", "WARN",
           words="left behind")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        assert found(doctor("--socket", path), "socket", "OK", words="served")


def test_a_filter_that_forbids_memfds(doctor):
    seeded(doctor, ([], {"setup": deny(319)}), [], "shared_memory", "FAIL", "MEMORY_EXHAUSTED", "memfd_create")


def test_a_parameters_folder_that_is_not_there(doctor):
    seeded(doctor, setting(f"parameters.directory={doctor.folder}/none"),
           setting(f"parameters.directory={doctor.folder}"), "parameters", "FAIL", "PARAMETERS_DIRECTORY")


# ---- http.listen, MPS

def test_an_address_that_is_not_loopback(doctor):
    seeded(doctor, setting("http.listen=0.0.0.0:9465"), setting("http.listen=127.0.0.1:0"), "configuration", "FAIL",
           "HTTP_LISTEN", "authentication")


def test_a_port_that_is_taken(doctor):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = setting(f"http.listen=127.0.0.1:{listener.getsockname()[1]}")
        checks = doctor(*taken)
        assert found(checks, "http", "FAIL", "HTTP_IN_USE", "another port"), checks
    assert found(doctor(*taken), "http", "OK", words="is free")


def test_what_a_daemon_holds_is_free_for_that_daemon_alone(doctor):
    disk = setting(f"disk.path={doctor.folder}/tier", "disk.budget_bytes=64MiB", "disk.segment_bytes=16MiB")
    ours = setting("http.listen=unix:" + doctor.folder + "/http.sock") + disk
    other = ["--socket", os.path.join(doctor.folder, "other.sock")]
    ready, tell = os.pipe()
    small = setting("pool.host_bytes=64MiB", "pool.device_bytes=64MiB")
    daemon = subprocess.Popen([os.path.join(doctor.folder, "kvstratad"), "--socket", doctor.socket, "--ready-fd",
                               str(tell), *ours, *small], pass_fds=[tell], stderr=subprocess.DEVNULL)
    os.close(tell)
    try:
        assert os.read(ready, 1), "the daemon did not start"
        checks = doctor(*ours)
        assert found(checks, "http", "OK", words=f"served by the daemon at '{doctor.socket}'"), checks
        assert found(checks, "disk_space", "OK"), checks
        checks = doctor(*other, *ours)
        assert found(checks, "http", "FAIL", "HTTP_IN_USE", "another daemon"), checks
        assert found(checks, "disk_space", "FAIL", "DISK_LOCKED", f"{doctor.folder}/other.sock"), checks
    finally:
        os.close(ready)
        daemon.terminate()
        daemon.wait(DEADLINE_S)
    assert found(doctor(*other, *disk), "disk_space", "OK")


def test_an_http_folder_that_is_not_there(doctor):
    seeded(doctor, setting(f"http.listen=unix:{doctor.folder}/no/http.sock"),
           setting(f"http.listen=unix:{doctor.folder}/http.sock"), "http", "FAIL", "SOCKET_DIRECTORY", "mkdir")


def test_mps(doctor):
    gpu = setting("pool.device=cuda")
    pipes = os.path.join(doctor.folder, "mps")
    os.mkdir(pipes)
    seeded(doctor, (gpu, {"CUDA_MPS_PIPE_DIRECTORY": pipes}), setting("pool.device=emulated"), "mps", "WARN",
           words="without MPS")
    os.mkfifo(os.path.join(pipes, "control"))
    seeded(doctor, (gpu, {"CUDA_MPS_PIPE_DIRECTORY": pipes}), setting("pool.device=emulated"), "mps", "WARN",
           words="one user")


# ---- the remote tier

def secret_of(doctor, name="secret", mode=0o600):
    path = os.path.join(doctor.folder, name)
    with open(path, "w") as file:
        file.write("5" * 64 + "\n")
    os.chmod(path, mode)
    return path


def test_a_remote_tier_without_a_secret(doctor):
    right = setting("remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor))
    seeded(doctor, setting("remote.redis=127.0.0.1:1"), right, "remote_files", "FAIL", "REMOTE_SECRET",
           "needs remote.secret_file")
    open_one = setting("remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor, "open", 0o644))
    seeded(doctor, open_one, right, "remote_files", "FAIL", "REMOTE_SECRET", "0644")
    failure = found(doctor(*open_one), "remote_files", "FAIL")
    assert failure["fix"] == f"chmod 600 {doctor.folder}/open", failure


def test_the_file_and_line_of_a_remote_tier_without_a_secret(doctor):
    path = os.path.join(doctor.folder, "remote.toml")
    with open(path, "w") as file:
        file.write('[remote]\nredis = "127.0.0.1:1"\n')
    assert found(doctor("--config", path), "remote_files", "FAIL", "REMOTE_SECRET", path + ":2:"), doctor("--config", path)


def test_a_password_that_is_missing_or_open(doctor):
    rest = ("remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor))
    password = secret_of(doctor, "password", 0o640)
    seeded(doctor, setting(*rest, f"remote.password_file={doctor.folder}/none"),
           setting(*rest, f"remote.password_file={password}"), "remote_files", "FAIL", "REDIS_PASSWORD",
           "remote.password_file")
    everybodys = secret_of(doctor, "everybodys", 0o644)
    seeded(doctor, setting(*rest, f"remote.password_file={everybodys}"),
           setting(*rest, f"remote.password_file={password}"), "remote_files", "WARN", words="0644")


def test_a_certificate_that_is_none(doctor):
    rest = ("remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor))
    seeded(doctor, setting(*rest, "remote.tls=true", "remote.tls_ca_file=" + secret_of(doctor, "ca.pem")), setting(*rest),
           "remote_files", "FAIL", "REDIS_TLS", "remote.tls_ca_file = '")
    seeded(doctor, setting(*rest, "remote.announce=10.255.255.1:7500"),
           setting(*rest, "remote.announce=127.0.0.1:7500"), "remote_files", "FAIL", "REMOTE_ANNOUNCE")


def test_an_announcement_without_a_remote_tier(doctor):
    announced = "remote.announce=127.0.0.1:7500"
    seeded(doctor, setting(announced),
           setting(announced, "remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor)), "configuration",
           "FAIL", "REMOTE_ANNOUNCE", "needs remote.redis")


def test_an_announced_port_that_is_taken(doctor):
    rest = ("remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        checks = doctor(*setting(*rest, f"remote.announce={address}"))
        assert found(checks, "announce", "FAIL", "REMOTE_ANNOUNCE_IN_USE",
                     f"remote.announce = '{address}': Address already in use"), checks
    assert found(doctor(*setting(*rest, f"remote.announce={address}")), "announce", "OK", words="is free")


def test_an_announced_name(doctor):
    rest = ("remote.redis=127.0.0.1:1", "remote.secret_file=" + secret_of(doctor))
    seeded(doctor, setting(*rest, "remote.announce=localhost:7500"), setting(*rest), "remote_files", "FAIL",
           "REMOTE_ANNOUNCE", "'localhost' is a name and no number; for daemons of one machine write 127.0.0.1:7500")


def test_servers_that_do_not_answer(doctor):
    secret = "remote.secret_file=" + secret_of(doctor)
    with redis_server() as redis:
        dead = f"127.0.0.1:{free_port()}"
        seeded(doctor, setting(f"remote.redis={dead}", secret), setting(f"remote.redis={redis.address}", secret),
               "remote", "WARN", words=dead + ": cannot connect")
        assert found(doctor(*setting(f"remote.redis={redis.address}", secret)), "remote", "OK", words="all 1 servers")
        redis.ask(b"CONFIG", b"SET", b"requirepass", b"sesame")
        assert found(doctor(*setting(f"remote.redis={redis.address}", secret)), "remote", "WARN", words="NOAUTH")
    assert found(doctor(), "remote", "OK", words="no remote tier")


def test_what_the_running_daemon_says_of_its_servers(doctor):
    rest = ("remote.secret_file=" + secret_of(doctor), "pool.host_bytes=64MiB", "pool.device_bytes=64MiB")
    own = setting(f"remote.redis=127.0.0.1:{free_port()}", f"remote.announce=127.0.0.1:{free_port()}", *rest)
    ready, tell = os.pipe()
    daemon = subprocess.Popen([os.path.join(doctor.folder, "kvstratad"), "--socket", doctor.socket, "--ready-fd",
                               str(tell), *own], pass_fds=[tell], stderr=subprocess.DEVNULL)
    os.close(tell)
    try:
        assert os.read(ready, 1), "the daemon did not start"
        end = time.monotonic() + DEADLINE_S
        illness = ""
        while not illness:
            assert time.monotonic() < end, "the daemon does not see that its server is none"
            done = subprocess.run([doctor.program, "tier", "ls", "-o", "json", "--socket", doctor.socket],
                                  capture_output=True, text=True, timeout=DEADLINE_S, check=True)
            illness = json.loads(done.stdout)["remotes"][0]["illness"]
            done = subprocess.run([doctor.program, "health", "-o", "json", "--socket", doctor.socket],
                                  capture_output=True, text=True, timeout=DEADLINE_S)
            told = json.loads(done.stdout)  # whatever it is by now, state and reason are of one moment
            assert told["state"].startswith("degraded") == told["why"].startswith("degraded"), told
            assert told["healthy"] == (done.returncode == 0) == (told["why"] == ""), told
        with redis_server() as redis:  # another one than the daemon's, and well
            checks = doctor(*setting(f"remote.redis={redis.address}", *rest))
            assert found(checks, "remote", "WARN", words="the running daemon says: "), checks
        without = doctor()  # a configuration without a remote tier
        assert found(without, "remote", "WARN", words="by a configuration of its own, and says: "), without
        checks = doctor(*own)
        told = found(checks, "remote", "WARN", words="the running daemon says: ")
        assert told and told["what"].count("Connection refused") == 1, checks
        assert found(checks, "announce", "OK", words="served by the daemon"), checks
    finally:
        os.close(ready)
        daemon.terminate()
        daemon.wait(DEADLINE_S)


# ---- the forms of the answer

def test_what_was_found_in_time_is_shown(doctor):
    """A kvstratad that hangs in its second check."""
    first = '{"check":"memory","verdict":"WARN","reason":"","what":"a } in it","fix":"more"}'
    program = os.path.join(doctor.folder, "kvstratad")
    os.unlink(program)
    with open(program, "w") as file:
        file.write("#!/bin/sh\ncase \"$*\" in\n"
                   f"*json*) printf '%s' '{{\"uid\":7,\"checks\":[{first},{{\"check\":\"gpu' ;;\n"
                   "*) echo 'WARN  memory' ;;\nesac\nexec sleep 600\n")
    os.chmod(program, 0o755)
    for form in ("json", "table", "name"):
        done = subprocess.run([doctor.program, "doctor", "-o", form, "--timeout", "8s"], capture_output=True, text=True,
                              timeout=DEADLINE_S)
        assert done.returncode == 6 and "DEADLINE" in done.stderr, done
        assert "memory" in done.stdout and "gpu" not in done.stdout, done
        if form == "json":
            told = json.loads(done.stdout)
            assert told == {"uid": 7, "checks": [json.loads(first)], "healthy": False}, told


def test_text_has_every_check_and_fix(doctor):
    environment = {**os.environ, "KVSTRATA_SOCKET": doctor.socket}
    done = subprocess.run([doctor.program, "doctor", *setting("work.cpus=1000")], env=environment,
                          timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    assert any(line.startswith("FAIL  cpus") and "WORK_CPUS" in line for line in lines), done.stdout
    assert any(line.strip().startswith("fix: taskset") for line in lines), done.stdout
    checks = {c["check"] for c in doctor(*setting("work.cpus=1000"))}
    assert checks == {line.split()[1] for line in lines if not line.startswith(" ")}, (checks, lines)


def may_be_nobody():
    if os.geteuid() == 0 and shutil.which("setpriv"):
        return True
    MISSING.append("nobody: needs root and setpriv")
    return False


def nobodys(doctor, name):
    """The path of a tier in a folder of nobody's."""
    folder = os.path.join(doctor.folder, name)
    os.mkdir(folder, 0o700)
    os.chown(folder, NOBODY, NOBODY)
    return os.path.join(folder, "tier")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cli", required=True)
    options = parser.parse_args()
    outcomes = Outcomes()
    for test in [t for n, t in globals().items() if n.startswith("test_")]:
        with tempfile.TemporaryDirectory(prefix="kvs-doctor-") as folder:
            os.chmod(folder, 0o755)
            # Where nobody can run them, whatever the build folder's mode.
            build = os.path.dirname(options.cli)
            for program in ("kvstrata", "kvstratad"):
                shutil.copy(os.path.join(build, program), folder)
            doctor = Doctor(os.path.join(folder, "kvstrata"), folder)
            library = os.path.join(build, "..", "lib")
            os.environ["LD_LIBRARY_PATH"] = os.path.join(folder, "lib")
            shutil.copytree(library, os.path.join(folder, "lib"),
                            ignore=lambda _, names: [n for n in names if not n.startswith("libkvstrata.so")])
            outcomes.run(test, doctor)
    for line in sorted(set(MISSING)):
        print(f"not checked: {line}")
    return outcomes.end()


if __name__ == "__main__":
    sys.exit(main())
