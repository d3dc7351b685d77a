"""What benchmarks leave: pictures and JSON, and files that are refused before anything is measured."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.options import require_writable
from kvtier.cli.plot import Bar, write_bars
from kvtier.errors import ConfigError
from kvtier_bench.measuring.report import Case, report

BARS = [Bar("shm <&>", 12.0, "12 GB/s", "shm", heading="read"), Bar("lookup", 3.0, "3 ms", scale="ms")]


def test_a_picture_in_svg(tmp_path: Path) -> None:
    write_bars(tmp_path / "bars.svg", BARS, title="Paths", caption="hardware")
    text = (tmp_path / "bars.svg").read_text()
    assert text.startswith("<svg ")
    assert "shm &lt;&amp;&gt;" in text


def test_a_picture_in_png(tmp_path: Path) -> None:
    write_bars(tmp_path / "bars.png", BARS, title="Paths", caption="hardware")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "hash", "--plot", str(tmp_path / "bars.gif")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert "name a file that ends in .svg or .png" in answer.stderr


@pytest.mark.parametrize(
    "command",
    [
        *(["-m", "kvtier.cli.main", "bench", name, "--plot"] for name in ("paths", "tiers", "ttft")),
        ["-m", "kvtier.cli.main", "demo", "--plot"],
        [str(Path(__file__).parents[1] / "soak" / "soak.py"), "--json"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "x.svg"
    answer = subprocess.run([sys.executable, *command, str(path)], capture_output=True, text=True, timeout=60)
    assert answer.returncode in (1, 2)
    assert f"{command[-1]} {path}: cannot be written: No such file or directory; name a file in" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_asking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    there, dangling = tmp_path / "there", tmp_path / "dangling"
    there.write_text("earlier figures")
    dangling.symlink_to("target")
    for path in (there, dangling, tmp_path / "new", Path(os.devnull)):
        require_writable("--plot", path)
    assert there.read_text() == "earlier figures"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "there"]


def test_no_file_to_write(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for name in ("", "circle", "n" * 300, "circle/x", "nul\0"):
        with pytest.raises(ConfigError, match=r"--plot .*: cannot be written: "):
            require_writable("--plot", tmp_path / name)


def test_figures_are_told_before_json_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk that standard output is redirected to does not lose them."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(OSError):
            report("Title", [Case("ours", "read", gb_per_s=1.25)], as_json=True)
    assert "1.25" in capsys.readouterr().err
