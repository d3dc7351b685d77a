"""Configuration: one TOML file, environment overrides, frozen after parsing.

    tenant = "red"                        # whose cache this engine uses

    [tenants.red]
    secret = "env:KVTIER_RED_SECRET"      # keys the prefix chain; stays in the engines
    token = "file:/run/secrets/red"       # proves to the pool who we are
    token_sha256 = ["..."]                # the pool's side: what the token must hash to

    [pool]
    address = "127.0.0.1:7600"

Any value can be overridden by `KVTIER__SECTION__FIELD`, e.g. `KVTIER__POOL__ADDRESS=pool:7600`; lists and
numbers are written as in TOML. Unknown keys are errors that name the nearest valid one. Sizes are bytes
as integers, or text with a unit: `"512MiB"`, `"2GiB"`.

Nothing else in kvtier reads the environment.
"""

from kvtier.config.config import Config
from kvtier.config.fields import OVERRIDE_PREFIX
from kvtier.config.parsing import load_config, merge_tables, nearest, parse_config, token_sha256

__all__ = ["OVERRIDE_PREFIX", "Config", "load_config", "merge_tables", "nearest", "parse_config", "token_sha256"]
