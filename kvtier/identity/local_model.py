"""Finds a model's files on this machine, when an engine was given a folder or a name on the Hugging Face Hub."""

from pathlib import Path

from kvtier.errors import ConfigError


def local_model_folder(model: str, *, revision: str | None, cache_dir: str | None) -> Path:
    """Returns the folder that an engine reads the files of `model` from, as vLLM and SGLang find it.

    Looks at local files only, and downloads nothing: an engine has downloaded a model before it computes with it.

    :param model: a folder, or a name such as `Qwen/Qwen3-8B`.
    :param revision: the branch, tag or commit that the engine was given; None: its default branch.
    :param cache_dir: the folder of the Hugging Face cache that the engine was given; None: the one of the environment
        (`HF_HUB_CACHE`, `HF_HOME`).
    :raises ConfigError: it is neither a folder nor in that cache.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(f"{model} is no folder here, and without huggingface_hub no name: {error}") from error
    try:
        found = snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{model}{at} is neither a folder here nor in the Hugging Face cache: {str(error).splitlines()[0]}"
        ) from error
    return Path(found)
