"""The table `[pool]`, of an engine's access to the cache pool."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field

from kvtier.config.fields import Bytes, Count, PoolAddress, Seconds, Section, WritePolicyName, as_list
from kvtier.net.address import GRPC_PREFIX, Address


class PoolConfig(Section):
    """Access to the shared cache pool; off unless `address` is set."""

    address: Annotated[list[PoolAddress], BeforeValidator(as_list)] = Field(default=[])
    """`unix:/path` or `host:port` of the pool's `listen`, `grpc:host:port` of its `grpc_listen`, or a list of several
    of these: of the ways that work, the fastest is taken, which is the order here. Over a Unix socket, the pool shares
    its memory."""
    shared_memory: bool = True
    """Map the pool's memory where it is shared. Off to compare, or where descriptors cannot be passed."""
    direct_loads: bool = True
    """Copy blocks to the device from where they lie in memory that the pool shares, not by way of host memory. Needs
    `shared_memory` and `cache.io_process`. A device on CUDA has that memory pinned as its blocks are first asked for.
    Off to compare, or where it must not be pinned."""
    pinned_bytes: Bytes = ByteSize(64 * 2**30)
    """The most of the pool's memory that each rank maps for direct loads, and pins for a device on CUDA: as much as its
    users come back to within minutes. Slabs that nobody has read from for a minute make room for others. With less,
    blocks come by way of host memory, at 8 to 12 GB/s per thread. Large takes time: to pin a GiB takes 0.2 s or more,
    in which other processes on the host wait for NVIDIA's driver, too; and what an engine has mapped stays taken when
    the pool gives it up, until the engine has noticed. 0 maps nothing."""
    tls_ca: Path | None = None
    """CAs, in PEM, of the pool's certificate. Turns TLS on, for all but Unix sockets."""
    insecure: bool = False
    """Whether token and blocks may travel to other machines in the clear, without TLS. An engine with an address that
    is neither a Unix socket nor a loopback one does not start without `tls_ca` unless this is true: for networks that
    you trust. A pool in a container of the same machine counts as elsewhere, unless its port is published on loopback.
    """
    tls_certificate: Path | None = None
    """This engine's certificate, for a pool with `tls_client_ca`. One in its tenant's `certificate_names` stands for
    the token."""
    tls_key: Path | None = None
    """The private key of that certificate."""
    tls_server_name: str | None = None
    """What the pool's certificate must be for; without, the host in `address`."""
    connect_timeout_s: Seconds = 1.0
    """Deadline of one connection, its TLS handshake included."""
    call_timeout_s: Annotated[float, Field(gt=0, le=30)] = 5.0
    """Deadline of one call; the pool itself ends those that take over a minute. Below the time of a good transfer
    of `batch_blocks`, nothing hits."""
    breaker_failures: Count = 3
    """Failures in a row after which the pool is left alone for `breaker_open_s`."""
    breaker_open_s: Seconds = 2.0
    """Time between two probes of such a pool, for which no call waits. Short probes a dead pool often, long misses its
    return."""
    write_policy: WritePolicyName = "write_through"
    """When blocks in host memory are copied to the pool. The other two make engines share later, or less."""

    def addresses_elsewhere(self) -> list[str]:
        """The addresses that may be of another machine, in order."""
        return [text for text in self.address if not Address.parse(text.removeprefix(GRPC_PREFIX)).is_of_this_machine]
