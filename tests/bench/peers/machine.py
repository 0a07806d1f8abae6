"""What the figures hold for: this machine, its kernel, and how the run was asked for."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def placed(placement: str) -> tuple[str, str]:
    """The processors of owner and consumer, as taskset takes them."""
    cpus = sorted(os.sched_getaffinity(0))
    if placement == "free":
        every = ",".join(map(str, cpus))
        return every, every
    return str(cpus[0]), str(cpus[0] if placement == "same" else cpus[-1])


def about(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    return {
        "network": args.network,
        "placement": args.placement,
        "sizes": list(args.sizes),
        "repeats": args.repeats,
        "seed": args.seed,
        "quick": args.quick,
        "kernel": platform.release(),
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "revision": revision(root),
        "load": round(os.getloadavg()[0], 2),
    }


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def revision(root: Path) -> str:
    """Of the checkout, where git knows it."""
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "describe", "--always"]
    try:
        done = subprocess.run([*command, "--dirty"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
