"""Conditions of admission as a short text, e.g. `second-use` or `frequency:3,min-run:4`."""

from collections.abc import Callable, Mapping

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvtier.errors import ConfigError
from kvtier.policies.admission import (
    Admission,
    BytesPerDay,
    Condition,
    Frequency,
    MinRun,
    Offer,
    PerTenant,
    SecondUse,
    TenantShare,
)

_SIZE = TypeAdapter(ByteSize)
_MOST_REMEMBERED, _MOST_COUNTERS = 1 << 18, 1 << 20
"""The memory for each tenant where the text does not say it: 70 MB of keys, or 4 MiB of counters."""

CONDITIONS: Mapping[str, str] = {
    "second-use": "`second-use`: offered before, or `second-use:N` among the last N blocks offered",
    "frequency": "`frequency:3`: offered three times lately, at most 15",
    "min-run": "`min-run:4`: with at least four neighbours of its request, itself included",
    "tenant-share": "`tenant-share:0.25`: while its tenant has less than a quarter of the tier",
    "bytes-per-day": "`bytes-per-day:2TiB`: while that many bytes a day are not used up",
}
"""What can be said, with an example."""


def parse_admission(text: str, capacity_bytes: int | None) -> Admission:
    """New conditions that remember nothing yet; all of them have to hold. They are separated by commas.

    :param capacity_bytes: of the tier, in the unit of `Offer.nbytes`: as many blocks of a tenant are remembered as it
        would hold of the first one's size, within bounds. None: nobody knows.
    :raises ConfigError: the text says something else.
    """

    def remembering(make: Callable[[int], Condition], most: int) -> Condition:
        def make_for(offer: Offer) -> Condition:
            blocks = most if capacity_bytes is None else capacity_bytes // max(1, offer.nbytes)
            return make(max(1, min(blocks, most)))

        make(1)  # says now what is wrong with the text
        return PerTenant(make_for)

    makers: Mapping[str, Callable[[str], Condition]] = {
        "second-use": lambda value: remembering(
            lambda blocks: SecondUse(_number(value) if value else blocks), _MOST_REMEMBERED
        ),
        "frequency": lambda value: remembering(lambda blocks: Frequency(_number(value, 15), blocks), _MOST_COUNTERS),
        "min-run": lambda value: MinRun(_number(value)),
        "tenant-share": lambda value: TenantShare(_share(value) * _known(capacity_bytes)),
        "bytes-per-day": lambda value: BytesPerDay(_bytes(value)),
    }
    conditions = []
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        if name not in makers:
            raise ConfigError(f"there is no admission {name!r}: {'; '.join(CONDITIONS.values())}")
        try:
            conditions.append((name, makers[name](value.strip())))
        except ValueError as error:
            raise ConfigError(f"admission {part.strip()!r}: {error}; {CONDITIONS[name]}") from error
    return Admission(conditions)


def _number(value: str, most: int = 1 << 31) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise ValueError(f"{value!r} is no whole number from 1 to {most:,}")
    return int(value)


def _share(value: str) -> float:
    share = float(value) if value else 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{value!r} is no share above 0 and up to 1")
    return share


def _known(capacity_bytes: int | None) -> int:
    if capacity_bytes is None:
        raise ValueError("this tier does not say how much it holds, nor what each tenant has of it; leave it out")
    return capacity_bytes


def _bytes(value: str) -> int:
    try:
        return _positive(int(_SIZE.validate_python(value)))
    except ValidationError as error:
        raise ValueError(f"{value!r} is no number of bytes") from error


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError(f"{value} is not above 0")
    return value
