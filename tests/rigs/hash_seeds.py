"""Runs a program under several seeds of Python's `hash`, which differs between processes."""

import os
import subprocess
import sys

SEEDS = ("0", "4711")


def outputs_by_hash_seed(program: str) -> set[str]:
    """Returns what the program prints, without white space around it. It is one text when the seed makes no difference.

    Each run is a process of its own, and has a minute.
    """
    command = [sys.executable, "-c", program]
    return {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
        for seed in SEEDS
    }
