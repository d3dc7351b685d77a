"""Time in the hands of a test."""


class StillClock:
    """Stands still until `now_s` is set on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
