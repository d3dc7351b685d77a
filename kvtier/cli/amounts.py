"""Amounts as people read them."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
UNKNOWN = "-"
"""What stands where nothing is told: nothing is not 0."""


def bytes_text(amount: float | None) -> str:
    """`amount` bytes in the largest unit that it fills, with one decimal."""
    if amount is None:
        return UNKNOWN
    for unit in _UNITS[:-1]:
        if abs(amount) < 1024:
            return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} {_UNITS[-1]}"


def speed_text(bytes_per_s: float | None) -> str:
    """Bytes per second in GB/s."""
    return UNKNOWN if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def count_text(count: float | None) -> str:
    """A whole number, all of its digits."""
    return UNKNOWN if count is None else f"{count:,.0f}"


def short_count_text(count: float) -> str:
    """A whole number in five characters: all digits below 10,000, then thousands, millions and so on."""
    if count < 10_000:
        return f"{count:,.0f}"
    for unit in "kMG":
        count /= 1000
        if count < 999.5:
            return f"{count:.3g}{unit}"
    return f"{count / 1000:,.0f}T"


def short_bytes_text(amount: float) -> str:
    """`amount` bytes in the largest unit that it fills, in eight characters."""
    number, unit = bytes_text(amount).split()
    digits = float(number.replace(",", ""))
    return f"{digits:.0f} {unit}" if digits >= 10 or not digits % 1 else f"{digits:.1f} {unit}"


def rate_text(per_s: float | None) -> str:
    """How often something happens in a second: one decimal below 10."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:,.1f}" if 0 < per_s < 10 else f"{per_s:,.0f}"


def share_text(part: float | None, whole: float | None) -> str:
    """A part of a whole in percent."""
    return UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


def counts_text(counts: dict[str, float]) -> str:
    """Counts by name, in one line."""
    return ", ".join(f"{name} {count:,.0f}" for name, count in counts.items())


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 10:
        return f"{seconds * 1000:,.0f} ms"
    for unit, size in (("s", 120), ("min", 60), ("h", 48)):
        if seconds < size:
            return f"{seconds:,.0f} {unit}"
        seconds /= 24 if unit == "h" else 60
    return f"{seconds:,.1f} days"
