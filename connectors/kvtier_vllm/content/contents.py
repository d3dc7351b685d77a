"""What KV depends on beside tokens, told by its content: adapters and media."""

from dataclasses import dataclass

from vllm.config import VllmConfig

from kvtier_vllm import compat
from kvtier_vllm.content.adapters import Adapters
from kvtier_vllm.content.identity import DIGESTS
from kvtier_vllm.content.media import Media


@dataclass(frozen=True, slots=True)
class Contents:
    """Scheduler thread only."""

    adapters: Adapters
    media: Media

    @classmethod
    def of(cls, config: VllmConfig) -> "Contents":
        """Makes what an engine of this configuration needs. To be closed."""
        return cls(
            Adapters(DIGESTS, compat.use_of_adapters(config)),
            Media(compat.encoder_of(config), compat.refused_media(config)),
        )

    def close(self) -> None:
        self.adapters.close()
        self.media.close()
