"""Media by their content: what the model gets decides, and nothing that anybody calls them."""

import gc
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from cache_pool import until
from kvtier_vllm import compat
from kvtier_vllm.content.media import Media

PIXELS = torch.arange(24, dtype=torch.float32).reshape(4, 6)
GRID = torch.tensor([1, 2, 2])
LARGE = 1 << 19
"""Numbers of 4 bytes: more than is hashed at once."""


def item(**fields: Any) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    return MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in fields.items()})


def feature(data: MultiModalKwargsItem | None, **how: Any) -> MultiModalFeatureSpec:
    position = PlaceholderRange(how.pop("offset", 0), how.pop("length", 4), how.pop("is_embed", None))
    named = {"modality": "image", "identifier": "a name", **how}
    return MultiModalFeatureSpec(data=data, mm_position=position, **named)


def request_with(*features: MultiModalFeatureSpec) -> Request:
    return Request("id", list(range(40)), SamplingParams(max_tokens=8), None, mm_features=list(features))


@pytest.fixture
def media() -> Iterator[Media]:
    media = Media("", {})
    yield media
    media.close()


@pytest.fixture
def digest(media: Media) -> Callable[[MultiModalFeatureSpec], bytes]:
    """As soon as it is known."""

    def digest(feature: MultiModalFeatureSpec) -> bytes:
        awaited = media.digests(request_with(feature))
        assert awaited is not None
        until(lambda: awaited.is_ready, "the digest")
        told = media.take(awaited)
        assert told is not None
        return told[0].digest

    return digest


def same() -> MultiModalKwargsItem:
    return item(pixel_values=PIXELS.clone(), image_grid_thw=GRID.clone(), timestamps=[0.5, 1.0])


def sent(data: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """As it comes to the scheduler's process."""
    received = MsgpackDecoder(MultiModalKwargsItem).decode(MsgpackEncoder().encode(data))
    assert isinstance(received, MultiModalKwargsItem)
    return received


SAME = {
    "another object": feature(same()),
    "another name": feature(same(), identifier="another", mm_hash="and another"),
    "another place": feature(same(), offset=7),
    "other order": feature(item(timestamps=(0.5, 1.0), image_grid_thw=GRID, pixel_values=PIXELS)),
    "other strides": feature(item(pixel_values=PIXELS.T.contiguous().T, image_grid_thw=GRID, timestamps=[0.5, 1.0])),
    "sent": feature(sent(same())),
}
OTHER = {
    "a pixel": feature(item(pixel_values=PIXELS.clone().index_fill_(0, torch.tensor([3]), 1), image_grid_thw=GRID)),
    "shape": feature(item(pixel_values=PIXELS.reshape(6, 4), image_grid_thw=GRID, timestamps=[0.5, 1.0])),
    "dtype": feature(item(pixel_values=PIXELS.view(torch.int32), image_grid_thw=GRID, timestamps=[0.5, 1.0])),
    "grid": feature(item(pixel_values=PIXELS, image_grid_thw=torch.tensor([1, 1, 4]), timestamps=[0.5, 1.0])),
    "times": feature(item(pixel_values=PIXELS, image_grid_thw=GRID, timestamps=[0.5, 1.5])),
    "nesting": feature(item(pixel_values=PIXELS, image_grid_thw=GRID, timestamps=[[0.5], 1.0])),
    "field": feature(item(pixels=PIXELS, image_grid_thw=GRID, timestamps=[0.5, 1.0])),
    "one field less": feature(item(pixel_values=PIXELS, image_grid_thw=GRID)),
    "two fields changed": feature(item(pixel_values=GRID, image_grid_thw=PIXELS, timestamps=[0.5, 1.0])),
    "modality": feature(same(), modality="video"),
    "length": feature(same(), length=5),
    "mask": feature(same(), is_embed=torch.tensor([True, True, False, True])),
    "another mask": feature(same(), is_embed=torch.tensor([True, False, True, True])),
}


@pytest.mark.parametrize("what", SAME)
def test_what_does_not_count(what: str, digest: Callable[[MultiModalFeatureSpec], bytes]) -> None:
    assert digest(SAME[what]) == digest(feature(same()))


def test_all_that_counts(digest: Callable[[MultiModalFeatureSpec], bytes]) -> None:
    digests = {what: digest(other) for what, other in OTHER.items()} | {"nothing": digest(feature(same()))}
    assert len(set(digests.values())) == len(digests)


def test_digests_are_the_same_for_ever(digest: Callable[[MultiModalFeatureSpec], bytes]) -> None:
    """Another digest is another key: nothing that was kept before would be found."""
    masked = feature(same(), is_embed=torch.tensor([True, True, False, True]))
    assert digest(feature(same())).hex() == "056615ae016bfad3aaccf6759b118965f61d7203a3b93275ee226a6d45e5a075"
    assert digest(masked).hex() == "f68800e87f5553248416b7cba05c9090322f9c346bbd76ffd64622112834e7e1"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64])
def test_every_dtype_has_its_bytes(dtype: torch.dtype, digest: Callable[[MultiModalFeatureSpec], bytes]) -> None:
    one, other = torch.zeros(3, 4).to(dtype), torch.zeros(3, 4)
    other[2, 3] = 1
    assert digest(feature(item(pixel_values=one))) == digest(feature(item(pixel_values=one.clone())))
    assert digest(feature(item(pixel_values=one))) != digest(feature(item(pixel_values=other.to(dtype))))


def test_other_settings_of_the_encoder_are_other_media() -> None:
    digests = set()
    for encoder in ("one", "other"):
        media = Media(encoder, {})
        awaited = media.digests(request_with(feature(same())))
        assert awaited is not None
        told = media.take(awaited)
        assert told is not None
        digests.add(told[0].digest)
        media.close()
    assert len(digests) == 2


def test_large_ones_are_hashed_behind_and_once_for_each_object(
    media: Media, digest: Callable[[MultiModalFeatureSpec], bytes]
) -> None:
    large = item(pixel_values=torch.zeros(2, LARGE))
    assert digest(feature(large, identifier="one")) == digest(feature(large, identifier="other"))
    assert len(media._known) == 1
    # Nothing is remembered of media that are gone: neither by a name nor by the place in memory that they had.
    del large
    gc.collect()
    until(lambda: not media._known, "media that are gone are forgotten")


def test_small_ones_are_hashed_at_once(media: Media) -> None:
    small = media.digests(request_with(feature(same()), feature(same(), offset=9)))
    assert small is not None
    assert small.is_ready
    told = media.take(small)
    assert told is not None
    assert [medium.offset for medium in told] == [0, 9]


def test_content_that_cannot_be_copied_is_not_told(media: Media, caplog: pytest.LogCaptureFixture) -> None:
    vast = torch.zeros(1).expand(1 << 20, 1 << 30)
    awaited = media.digests(request_with(feature(item(pixel_values=vast))))
    assert awaited is not None
    until(lambda: awaited.is_ready, "the attempt")
    assert media.take(awaited) is None
    assert "image: content that cannot be read" in caplog.text


LEFT_ALONE = {
    "no data": feature(None),
    "a field without data": feature(item(pixel_values=None, image_grid_thw=GRID)),
    "sizes alone": feature(item(image_grid_thw=GRID), length=4),
    "an address": feature(item(address=1 << 40, monotonic_id=7, signature=[1, 2, 3, 4, 5, 6])),
    "an unknown kind": feature(same(), modality="prompt_embeds"),
    "text": feature(item(pixel_values=PIXELS, name="cat")),
    "sparse": feature(item(pixel_values=PIXELS.to_sparse())),
    "elsewhere": feature(item(pixel_values=PIXELS.to("meta"))),
    "a refused kind": feature(same(), modality="audio"),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_what_has_no_content_here_is_left_alone(what: str, caplog: pytest.LogCaptureFixture) -> None:
    media = Media("", {"audio": "why"})
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        assert media.digests(request_with(feature(same()), LEFT_ALONE[what])) is None
    assert len([record for record in caplog.records if record.name.startswith("kvtier_vllm")]) == 1
    media.close()


def config(*, looks_ahead: bool = False, encoder_elsewhere: bool = False, tower: bool = False, **how: Any) -> Any:
    """What of vLLM's configuration is about media. `how`: of `MultiModalConfig`."""
    return SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=looks_ahead, multimodal_config=MultiModalConfig(**how)),
        ec_transfer_config=object() if encoder_elsewhere else None,
        lora_config=LoRAConfig(enable_tower_connector_lora=tower),
    )


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ({}, set()),
        ({"looks_ahead": True}, compat.MEDIA),
        ({"encoder_elsewhere": True}, compat.MEDIA),
        ({"mm_encoder_attn_dtype": "fp8"}, compat.MEDIA),
        ({"video_pruning_rate": 0.0}, set()),
        ({"video_pruning_rate": 0.5}, {"video", "vision_chunk"}),
    ],
    ids=["nothing special", "looks ahead", "encoder elsewhere", "scales", "not pruned", "pruned"],
)
def test_media_that_do_not_say_everything_are_refused(how: dict[str, Any], kinds: set[str]) -> None:
    assert compat.refused_media(config(**how)).keys() == kinds


def test_what_encoders_do_is_told_apart() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"mm_device_do_normalize": False},
        {"mm_encoder_attn_backend": "TORCH_SDPA"},
        {"tower": True},
    ]
    assert len({compat.encoder_of(config(**how)) for how in ways}) == len(ways)
    for kind_of_model in (compat.encoder_of, compat.refused_media):
        assert not kind_of_model(
            SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None), lora_config=None)
        )
