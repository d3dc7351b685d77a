"""Kinds of values in the configuration, and what all its tables have in common."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from kvtier.errors import ConfigError
from kvtier.net.address import GRPC_PREFIX, Address, require_possible_name
from kvtier.net.plain_url import OF_A_REDIS, require_no_credentials
from kvtier.policies.admission_text import parse_admission

OVERRIDE_PREFIX = "KVTIER__"
NO_REFERENCE = 'use "env:NAME" or "file:PATH": a secret itself does not belong where others may read it'


def _checked_size(size: object) -> object:
    # Pydantic takes all digits of Unicode, and looks at the beginning only.
    if isinstance(size, str) and not re.fullmatch(r"\s*([0-9_]+|[0-9]*\.?[0-9]+\s*[A-Za-z]*)\s*", size):
        raise ValueError("not a size; use a number of bytes, or a size such as 4GiB")
    return size


Size = BeforeValidator(_checked_size)
"""What a `ByteSize` needs besides."""


Bytes = Annotated[ByteSize, Field(ge=0, le=2**60), Size]
TierBytes = Annotated[ByteSize, Field(ge=2**20, le=2**60), Size]
"""The size of a tier of the pool, or of a tenant's part of one."""
SegmentBytes = Annotated[ByteSize, Field(ge=2**20, le=2**40), Size]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Count = Annotated[int, Field(ge=1)]
WritePolicyName = Literal["write_through", "write_through_selective", "write_back"]
"""A `kvtier.tiers.common.write_policy.WritePolicy`: at once, at the n-th use, or at eviction."""


def _not_auto(name: object) -> object:
    if name == "auto":
        raise ValueError(
            "'auto' was removed: leave it out for 'raw', or set 'lz4' or 'planes-zstd' where the way to the tier is "
            "slow (`kvtier bench codec` says where they pay)"
        )
    return name


CodecName = Annotated[Literal["raw", "lz4", "planes-zstd"], BeforeValidator(_not_auto)]
"""A `kvtier.codec.stored_form.Codec`. For what is written from now on: every tier reads all of them, but releases
before this one know no `planes-zstd`."""

PolicyName = Literal["default", "lru", "lfu", "slru", "fifo", "mru", "filo", "priority", "s3fifo", "arc"]
"""A policy of eviction: one of `kvtier.policies.registry.POLICIES`."""


def _checked_admission(text: str) -> str:
    try:
        parse_admission(text, capacity_bytes=1)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


AdmissionText = Annotated[str, AfterValidator(_checked_admission)]
"""Conditions as `kvtier.policies.admission_text.parse_admission` takes them."""

SyncName = Literal["none", "sealed", "batch"]
"""A `kvtier.tiers.disk.state.segment_files.SyncPolicy`: what of a disk tier outlives a loss of power."""
DirectIoName = Literal["auto", "on", "off"]
"""A `kvtier.tiers.disk.medium.direct_io.DirectIo`: whether a disk tier goes past the page cache."""


def _checked_reference(text: str) -> str:
    if not text.startswith(("env:", "file:")):
        raise ValueError(NO_REFERENCE)
    return text


SecretReference = Annotated[str, AfterValidator(_checked_reference)]
"""Where a secret is, for `kvtier.config.references.References.secret`."""


def _checked_address(text: str) -> str:
    if text.startswith(GRPC_PREFIX):
        raise ValueError(f"{text!r}: `{GRPC_PREFIX}` is for engines; here use host:port or unix:/path")
    try:
        Address.parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


def _checked_pool_address(text: str) -> str:
    _checked_address(text.removeprefix(GRPC_PREFIX))
    return text


def _checked_http_address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {text!r}: use host:port; port 0 takes a free one")
    try:
        require_possible_name(host)
    except ConfigError as error:
        raise ValueError(f"address {text!r}: {error}") from error
    return text


def _checked_mode(mode: int) -> int:
    if mode & ~0o666:
        raise ValueError(f"{mode} is {mode:#o}, no permissions of a socket; write them in octal, such as 0o660")
    return mode


def checked_url(text: str, instead: str) -> str:
    """A URL as it stands. Raises `ValueError` where `require_no_credentials` raises."""
    try:
        require_no_credentials(text, instead)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


def _checked_redis_url(text: str) -> str:
    return text and checked_url(text, OF_A_REDIS)


RedisUrl = Annotated[str, AfterValidator(_checked_redis_url)]
"""What `kvtier.tiers.redis.address.RedisAddress.parse` takes, without credentials; empty: none, so that an environment
can take it away."""
ListenAddress = Annotated[str, AfterValidator(_checked_address)]
"""Text that `Address.parse` takes."""
HttpAddress = Annotated[str, AfterValidator(_checked_http_address)]
"""`host:port`, `[v6]:port`, or `:port` on all addresses."""
PoolAddress = Annotated[str, AfterValidator(_checked_pool_address)]
"""`host:port`, `[v6]:port` or `:port`, or a gRPC address behind `grpc:`."""
SocketMode = Annotated[int, Field(ge=0), AfterValidator(_checked_mode)]
"""Permissions of a Unix socket."""
Group = Annotated[int, Field(ge=0, lt=2**32 - 1)] | Annotated[str, Field(min_length=1)]
"""A group of the system, by number or name. The kernel takes -1 for no change."""


def as_list(value: Any) -> Any:
    """Makes a list of one address where several may stand."""
    return [value] if isinstance(value, str) else value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that a field takes."""
    if below := get_args(annotation):
        for each in below:
            yield from _kinds(each)
    else:
        yield annotation


class Section(BaseModel):
    """A table of the file. Frozen; unknown keys are errors, and so is `true` where a number stands."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic takes them for 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = list(_kinds(cls.model_fields[info.field_name].annotation))
            if bool not in kinds and any(kind in kinds for kind in (int, float, ByteSize)):
                raise ValueError("neither true nor false can stand there; kvtier config keys says what can")
        return value
