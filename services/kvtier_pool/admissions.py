"""Which blocks get to a tier below the pool's memory, as its file says."""

from kvtier.errors import ConfigError
from kvtier.policies.admission import Admission
from kvtier.policies.admission_text import parse_admission


def tier_admission(field: str, text: str | None, capacity_bytes: int | None) -> Admission | None:
    """What the field says of a tier. Raises `ConfigError` for what a tier without `capacity_bytes` cannot have."""
    if text is None:
        return None
    try:
        return parse_admission(text, capacity_bytes)
    except ConfigError as error:
        raise ConfigError(f"pool_service.{field}: {error}") from error
