"""`docs/kernel-resources.md`: what every default kernel takes of each chip, a section for each Triton."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvtier_bench.gpu.resources.compiling import Resources

PATH = Path("docs/kernel-resources.md")
"""The page's path in the repository."""
COMMAND = f"python -m kvtier_bench.gpu.resources --write {PATH}"
"""What renews the section of the Triton that is installed."""
_HEAD = f"""# What every kernel takes of a chip

Written by `{COMMAND}`, once with each Triton, and held true by `tests/kernels/test_resources.py`:
figures of compiled machine code. Nothing of this has run. No default spills a register.

| column | what it is |
| --- | --- |
| tile | rows of queries x keys an iteration, warps, stages (`kvtier_kernels.tiles`) |
| registers, spilled | of a thread; spilled in bytes |
| shared | bytes of shared memory that a program asks for |
| products | instructions of the tensor cores in the whole kernel: `mma.sync`, `wgmma.mma_async`, `tcgen05.mma` |
| at a time | programs that fit a multiprocessor at a time, by registers, threads, shared and tensor memory |

"""
_COLUMNS = ("kernel", "configuration", "tile", "warps", "registers", "spilled", "shared", "products", "at a time")


def row(of: Resources) -> str:
    """The line of the table for this kernel."""
    cells = (
        of.kernel, of.configuration, of.tile, of.num_warps, of.registers, of.spilled_bytes, f"{of.shared_bytes:,}",
        of.products, of.programs_per_multiprocessor,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def rows(page: str, triton_version: str, chip: int) -> list[str] | None:
    """The lines that the page has for this chip; None when it has no section for that Triton."""
    section = _sections(page).get(triton_version)
    if section is None:
        return None
    _, _, after = section.partition(f"### sm_{chip}\n")
    table, _, _ = after.partition("\n### ")
    return [line for line in table.splitlines() if line.startswith("| _")]


def with_section(page: str, triton_version: str, found: Sequence[Resources]) -> str:
    """The page with the section of this Triton made anew, those of others as they are, oldest first."""
    parts = [f"## triton {triton_version}\n"]
    for chip in dict.fromkeys(of.chip for of in found):
        parts += [f"\n### sm_{chip}\n\n", f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}\n"]
        # A kernel that two launchers share is said once of each configuration.
        parts += [f"{line}\n" for line in dict.fromkeys(row(of) for of in found if of.chip == chip)]
    sections = _sections(page) | {triton_version: "".join(parts)}
    by_version = sorted(sections.items(), key=lambda item: [int(part) for part in re.findall(r"\d+", item[0])])
    return _HEAD + "\n".join(section.strip() + "\n" for _, section in by_version)


def _sections(page: str) -> dict[str, str]:
    """The sections of the page, by Triton's version."""
    texts = re.split(r"^(?=## triton )", page, flags=re.MULTILINE)[1:]
    return {text.split()[2]: text for text in texts}
