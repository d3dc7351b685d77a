"""The processes of one demo: their folder, their secrets, and how pools and engines are configured."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import token_sha256
from kvtier.system.processes import Service

TENANTS = ("red", "blue")
_ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class Stage:
    """The folder in which the processes of one demo live, and what they are told."""

    folder: Path
    model: Path
    dtype: str
    environ: Mapping[str, str]
    """Secrets and tokens, by environment variable."""

    @classmethod
    def prepare(cls, folder: Path, model: Path, dtype: str) -> "Stage":
        """Makes up secrets."""
        environ = {}
        for tenant in TENANTS:
            environ[f"DEMO_{tenant.upper()}_SECRET"] = secrets.token_hex(32)
            environ[f"DEMO_{tenant.upper()}_TOKEN"] = secrets.token_urlsafe(32)
        return cls(folder, model, dtype, environ)

    def pool(
        self, *, listen: Sequence[str] = (_ANY_PORT,), disk: str = "pool-disk", redis_url: str | None = None
    ) -> Service:
        """Starts a cache pool of 1 GiB of memory over a disk, in the folder `disk`, and a Redis if there is one."""
        addresses = ", ".join(f'"{address}"' for address in listen)
        redis = f'redis_url = "{redis_url}"\n' if redis_url else ""
        tenants = [
            f'[tenants.{tenant}]\ntoken_sha256 = ["{token_sha256(self.environ[f"DEMO_{tenant.upper()}_TOKEN"])}"]\n'
            for tenant in TENANTS
        ]
        config = self.folder / "pool.toml"
        config.write_text(
            f'[pool_service]\nlisten = [{addresses}]\ngrpc_listen = ["{_ANY_PORT}"]\nhttp_listen = "{_ANY_PORT}"\n'
            f'memory_bytes = "1GiB"\ndisk_dir = "{disk}"\ndisk_bytes = "2GiB"\n{redis}{"".join(tenants)}'
        )
        return Service(["pool", "serve", "--config", str(config)], log=self.folder / "pool.log", environ={})

    def engine(
        self,
        name: str,
        *,
        tenant: str,
        pool_address: str | None,
        dtype: str | None = None,
        settings: Mapping[str, int] | None = None,
    ) -> Service:
        """Starts an engine process; without an address it caches nothing at all.

        :param settings: more of `[engine]`, by key.
        """
        config = self.folder / f"engine-{name}.toml"
        cache = f'[pool]\naddress = "{pool_address}"' if pool_address else ""
        more = "".join(f"{key} = {value}\n" for key, value in (settings or {}).items())
        config.write_text(
            f'tenant = "{tenant}"\n'
            f"[tenants.{tenant}]\n"
            f'secret = "env:DEMO_{tenant.upper()}_SECRET"\ntoken = "env:DEMO_{tenant.upper()}_TOKEN"\n'
            f'[engine]\nmodel = "{self.model}"\nlisten = "{_ANY_PORT}"\ndtype = "{dtype or self.dtype}"\n{more}'
            f"cache = {str(pool_address is not None).lower()}\n"
            f'[host]\ncapacity_bytes = "512MiB"\n{cache}\n'
        )
        arguments = ["engine", "serve", "--config", str(config)]
        return Service(arguments, log=self.folder / f"engine-{name}.log", environ=self.environ)
