"""The files that a model folder must have, before anything reads them."""

from pathlib import Path

from kvtier.errors import ConfigError


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of weights, in order. Raises `ConfigError` that says what the folder lacks, and the remedy."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not files:
        missing.append("*.safetensors (the weights)")
    if not missing:
        return files
    ggufs = sorted(folder.glob("*.gguf"))
    remedy = (
        f"to use the GGUF file in it, give its path: {ggufs[0]}"
        if ggufs
        else "download the complete model, for example with: hf download NAME --local-dir FOLDER"
    )
    raise ConfigError(f"model folder {folder} has no {', no '.join(missing)}; {remedy}")
