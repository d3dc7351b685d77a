"""Tests of the connector under vLLM's own scheduler, with helpers out of vLLM's source distribution."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

collect_ignore_glob = [] if os.environ.get("KVTIER_TEST_VLLM") == "1" else ["test_*.py"]

if TYPE_CHECKING:
    from stepping_rig import Engine

if not collect_ignore_glob:
    sys.path.insert(0, str(Path(__file__).parent))

    import stepping_rig
    from opt_config import write_model
    from sdist import VLLM_CACHE
    from vllm_rig import TOKENS, settings

    from cache_pool import WAIT_S

    @pytest.fixture(scope="session")
    def opt_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("opt") / "model")

    @pytest.fixture
    def start(opt_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., "Engine"]]:
        """Starts an engine with host memory, and disk where `disk=True`; all that it starts share the disk's folder.

        One engine at a time may have it. `client` is of the table `pool`.
        """
        monkeypatch.setenv("KV_SECRET", "a secret of more than sixteen bytes")
        for name, token in TOKENS.items():
            monkeypatch.setenv(f"{name.upper()}_TOKEN", token)
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(VLLM_CACHE))
        with ExitStack() as stack:

            def start(
                *,
                disk: bool = False,
                pool: str = "",
                client: Mapping[str, Any] | None = None,
                num_host_blocks: int = 400,
                lookup_deadline_s: float = WAIT_S,
                load_deadline_s: float = WAIT_S,
                save_answers: bool = True,
                tenant: str | None = "red",
                gateway: Sequence[str] = (),
                **how: Any,
            ) -> "Engine":
                tables: dict[str, Any] = {"host": {"capacity_bytes": num_host_blocks * 256}}
                if pool:
                    tables["pool"] = {"address": pool, **(client or {})}
                if disk:
                    tables["disk"] = {"directory": str(tmp_path / "disk"), "reserve_bytes": 0}
                cache = {"io_process": False, "save_answers": save_answers}
                deadlines = {"lookup_deadline_s": lookup_deadline_s, "load_deadline_s": load_deadline_s}
                extra = settings(tenant, gateway=gateway, cache=cache | deadlines, **tables)
                return stack.enter_context(stepping_rig.engine(opt_model, extra, **how))

            yield start
