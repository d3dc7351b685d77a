"""Completion of the command line in each shell that is installed here, as somebody who types meets it."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from terminal import on_terminal

INTERACTIVE = {"bash": ["-i"], "zsh": ["-i"], "fish": ["--interactive"]}


@pytest.mark.parametrize("shell", INTERACTIVE)
def test_commands_and_options_are_completed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        if os.environ.get("KVTIER_TEST_SHELLS"):
            pytest.fail(f"KVTIER_TEST_SHELLS is set, and there is no {shell}")
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    (tmp_path / ".zshrc").touch()  # without it zsh asks what to put there
    command = [shell, *INTERACTIVE[shell]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"HOME": str(tmp_path), "PATH": path, "LANG": "C.UTF-8"}
    with on_terminal(command, environ) as screen:
        screen.type(b"kvtier --install-completion\n")
        screen.wait_for("completion installed in")
    with on_terminal(command, environ) as screen:
        screen.type(b"echo re''ady\n")
        screen.wait_for("ready")
        screen.type(b"kvtier pool ser\t")
        if shell == "zsh":  # the first Tab of a session only loads the function: the script is Typer's
            screen.wait_for("\x07")
            screen.type(b"\t")
        screen.type(b"--hel\t\n")
        screen.wait_for("Usage: kvtier pool serve")
