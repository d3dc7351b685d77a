"""Files to begin with: what is recommended, each line with its reason, and what is usually added as a comment."""

from enum import StrEnum


class Role(StrEnum):
    """The process that a file is for."""

    ENGINE = "engine"
    POOL = "pool"
    GATEWAY = "gateway"


def starting_file(role: Role) -> str:
    """Returns the text of a TOML file. `kvtier config check` accepts it where the variables that it names are set."""
    return {Role.ENGINE: _ENGINE, Role.POOL: _POOL, Role.GATEWAY: _GATEWAY}[role]


_ENGINE = """\
# An engine's configuration: for `kvtier engine serve`, and for the plug-ins of vLLM and SGLang.
# Every key: kvtier config keys. Then: kvtier config check FILE

tenant = "default"                      # whose blocks this engine has: one of the tables below

[tenants.default]
secret = "env:KVTIER_SECRET"            # openssl rand -hex 32; all engines of the tenant have it, and no pool
token = "env:KVTIER_TOKEN"              # openssl rand -hex 32; the pool has its SHA-256

[pool]
address = ["127.0.0.1:7600"]            # several: the fastest that works is taken
# address = ["unix:/run/kvtier/pool.sock", "pool.site.example:7600"]   # the socket: shared memory on the pool's host
# tls_ca = "ca.pem"                     # an address that is not of this machine needs it (docs/tls.md), or
# insecure = true                       # on a network that you trust: token and blocks travel in the clear

[host]
# capacity_bytes = "8GiB"               # host memory of all ranks together; the default suits a pool on this host

[disk]
# directory = "/var/lib/kvtier/engine"  # a local disk tier; a pool with a disk of its own is usually enough
# capacity_bytes = "200GiB"

[engine]                                # only for `kvtier engine serve`
# model = "path/to/model"               # a Hugging Face folder with safetensors, or a GGUF file
# listen = "127.0.0.1:8000"
# dtype = "float32"                     # on CUDA: the same tokens, cached or not; on the CPU bfloat16 has them, too
"""

_POOL = """\
# A cache pool's configuration: kvtier pool serve --config FILE
# Every key: kvtier config keys pool_service. Then: kvtier config check FILE

[pool_service]
listen = ["127.0.0.1:7600"]             # engines; "unix:/run/kvtier/pool.sock" beside it: shared memory on this host
grpc_listen = ["127.0.0.1:7601"]        # the public API
http_listen = "127.0.0.1:7602"          # /healthz, /metrics, /tenants
# tls_certificate = "pool.pem"          # needed for any other address than a loopback one: docs/tls.md
# tls_key = "pool.key"
memory_bytes = "1GiB"                   # as much as the host can spare
# disk_dir = "/var/lib/kvtier/pool"     # what survives a restart
# disk_bytes = "200GiB"
# redis_url = "redis://127.0.0.1:6379/0"   # shared by all pools of a site
# redis_password = "env:KVTIER_REDIS_PASSWORD"

[tenants.default]
token_sha256 = ["env:KVTIER_TOKEN_SHA256"]   # printf %s "$KVTIER_TOKEN" | sha256sum | cut -d' ' -f1

# With several tenants, each has a share; what one does not use is lent to the others.
# [tenants.default.memory]
# guaranteed_bytes = "512MiB"

# [operators.admin]                     # whoever has this token lists and purges tenants, and has no blocks
# token_sha256 = ["env:KVTIER_OPERATOR_SHA256"]
"""

_GATEWAY = """\
# A gateway's configuration: kvtier gateway serve --config FILE
# Every key: kvtier config keys gateway. Then: kvtier config check FILE

[gateway]
listen = "127.0.0.1:8080"               # clients; other addresses: tls_certificate and tls_key, or insecure = true
engines = ["http://127.0.0.1:8000"]     # several; "dns+http://name:port" is all addresses of a name
# tokenizer = "path/to/model"           # that of the engines: with secrets and a pool, requests go where their KV is
# strategy = "priced"                   # docs/routing.md has them all

[api_keys.alice]
tenant = "default"                      # engines get to know it, and say in their files: gateway_tenants = ["default"]
key_sha256 = ["env:ALICE_KEY_SHA256"]   # printf %s "$ALICE_KEY" | sha256sum | cut -d' ' -f1
# max_requests_per_s = 20
# max_concurrent = 64                   # answers at a time

[tenants.default]
# secret = "env:KVTIER_SECRET"          # that of the tenant's engines: it names blocks
# token = "env:KVTIER_TOKEN"            # lets the gateway ask the pool what it has

# [pool]
# address = ["127.0.0.1:7600"]
"""
