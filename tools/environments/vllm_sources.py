"""vLLM's source distribution, as pip hands it out: the one thing of a release that has its tests."""

import os
import subprocess
from pathlib import Path

_BUILD_TOOLS = ("setuptools>=77.0.3,<81", "setuptools-scm>=8", "setuptools-rust>=1.9", "packaging>=24.2", "wheel")
"""What its build asks for beside torch, as far as metadata needs it."""


class FetchError(OSError):
    """The source distribution cannot be had: see pip's own words, and whether there is a package index."""


def download(release: str, into: Path, *, python: str | Path) -> Path:
    """Downloads the source distribution of a release into a folder that has none; returns the archive's path.

    pip hands it out only once it has asked its build for the metadata. That runs with the torch that is installed
    there: left alone, pip would get another one for it, gigabytes with CUDA.

    :param python: of an environment with torch.
    :raises FetchError: pip failed.
    """
    tools = into / "tools"
    _pip(python, "install", f"--target={tools}", *_BUILD_TOOLS)
    # Told so, the build asks neither git for the version nor for a compiler.
    told = {"VLLM_VERSION_OVERRIDE": release, "VLLM_TARGET_DEVICE": "empty", "PYTHONPATH": str(tools)}
    source = ["--no-deps", "--no-binary=vllm", "--no-build-isolation"]
    _pip(python, "download", *source, f"--dest={into}", f"vllm=={release}", **told)
    (archive,) = into.glob("*.tar.gz")
    return archive


def _pip(python: str | Path, command: str, *arguments: str, **environ: str) -> None:
    whole = [python, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(whole, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise FetchError(f"pip {command} {' '.join(arguments)} failed: {ended.stdout[-2000:]}")
