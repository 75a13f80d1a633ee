# SPDX-License-Identifier: Apache-2.0
"""What systemd says of deploy/systemd/kvstratad.service: nothing is wrong with it, and its exposure is at most 4.0, with
what a GPU needs too. Without the sandbox it is worse, so that the score says something. Exit code 77: no systemd."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

UNITS = pathlib.Path(__file__).resolve().parents[2] / "deploy/systemd"
MOST = 4.0


def exposure(unit):
    said = subprocess.run(["systemd-analyze", "security", "--offline=true", unit], check=True, text=True,
                          stdout=subprocess.PIPE).stdout
    return float(re.search(r"Overall exposure level for \S+: ([\d.]+)", said)[1])


def written(folder, name, text):
    (folder / name).mkdir()
    unit = folder / name / "kvstratad.service"
    unit.write_text(text)
    return unit


def main():
    if not shutil.which("systemd-analyze"):
        print("SKIPPED: systemd-analyze is not here")
        return 77
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        # A program that is here, whose manual too: what is wrong then is the unit.
        text = (UNITS / "kvstratad.service").read_text().replace("/usr/bin/kvstratad", shutil.which("true"))
        text = text.replace("Documentation=man:kvstratad(1)\n", "")
        plain = written(folder, "plain", text)
        checked = subprocess.run(["systemd-analyze", "verify", plain], text=True, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT)
        about = [line for line in checked.stdout.splitlines() if "kvstratad" in line]
        assert checked.returncode == 0 and not about, checked.stdout
        # Later lines win, as those of a drop-in do.
        gpu = written(folder, "gpu", text.replace("[Install]", (UNITS / "gpu.conf").read_text() + "[Install]"))
        bare = written(folder, "bare", re.sub(r"\n# It serves Unix sockets.*?\[Install\]", "\n[Install]", text, flags=re.S))
        scores = {name: exposure(unit) for name, unit in (("plain", plain), ("gpu", gpu), ("bare", bare))}
        print(scores)
        assert scores["plain"] <= MOST and scores["gpu"] <= MOST < scores["bare"], scores
    return 0


if __name__ == "__main__":
    sys.exit(main())
