# SPDX-License-Identifier: Apache-2.0
"""What a result file says of the machine that made it."""

from __future__ import annotations

import os


def device_name() -> str:
    """'2-core CPU (Intel(R) Xeon(R) Processor @ 2.50GHz, AVX-512)': the `device` of a result file."""
    model, flags = "unknown", ""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key.strip() == "model name" and model == "unknown":
                model = value.strip()
            elif key.strip() == "flags" and not flags:
                flags = value
    isa = next((f", {name}" for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    return f"{os.cpu_count()}-core CPU ({model}{isa})"
