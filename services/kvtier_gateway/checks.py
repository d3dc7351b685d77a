"""What `kvtier config check` says of a gateway's settings."""

from collections.abc import Iterable

from kvtier.config import Config
from kvtier.config.certificate_findings import ending_certificates
from kvtier.config.findings import Finding, Severity, ended_tokens, errors_of
from kvtier.system.open_files import reachable_open_files
from kvtier_gateway.protection import OPEN_FILES_BESIDES, OPEN_FILES_PER_CONNECTION, most_connections, start_attempts


def gateway_findings(config: Config) -> Iterable[Finding]:
    """Looks at a file whose table `gateway` is set."""
    if "gateway" not in config.model_fields_set:
        return
    yield from errors_of(*start_attempts(config))
    yield from setting_findings(config)


def setting_findings(config: Config) -> Iterable[Finding]:
    """What there is to say of a gateway's settings alone."""
    table = config.gateway
    needed = table.max_connections * OPEN_FILES_PER_CONNECTION + OPEN_FILES_BESIDES
    most = most_connections(table)
    if most < table.max_connections:
        yield Finding(
            Severity.WARNING,
            "gateway.max_connections",
            f"{table.max_connections} need {needed:,} open files at times, and this process may have "
            f"{reachable_open_files():,}: no more than {most:,} are taken. Raise the limit (ulimit -Hn, LimitNOFILE=), "
            "or lower the key",
        )
    yield from ending_certificates(config, "gateway", ("tls_certificate", "engine_tls_ca"))
    urls = [engine.url for engine in table.engines]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield Finding(Severity.WARNING, "gateway.engines", f"{url} is there more than once; the first one counts")
    served = {name for engine in table.engines for name in engine.tenants or config.tenants}
    for name, key in config.api_keys.items():
        yield from ended_tokens(f"api_keys.{name}.key_sha256", key.key_sha256)
        if key.tenant not in served:
            yield Finding(
                Severity.WARNING,
                f"api_keys.{name}.tenant",
                f"no engine of gateway.engines has {key.tenant!r} among its tenants: its requests will be refused",
            )
