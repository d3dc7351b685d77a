"""Tokens to text while they come, and stop sequences: whatever the pieces, the text is that of the whole."""

import codecs
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvtier.text.prompts import PromptTokenizer
from kvtier_engine.text.answer_text import AnswerText
from kvtier_engine.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    special_tokens,
)
from kvtier_engine.text.stop_sequences import StopMatcher
from kvtier_engine.text.tokenizer import ChatTokenizer

EMOJI = "👩‍👩‍👧‍👦 naïve – 日本語 \ufffd e\u0301"


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token; so are some pairs that cut characters in two, and added ones, special and not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = TokenBytes(Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])))
    character = {tokens(i): c for i, c in enumerate(alphabet)}
    pairs = [(character[bytes([a])], character[bytes([b])]) for a, b in ((0x9F, 0x91), (0x91, 0xA9), (0x20, 0x61))]
    vocab = {c: i for i, c in enumerate(alphabet)} | {a + b: 256 + i for i, (a, b) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<tool>"), AddedToken("two words 日本")])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2's: words begin with U+2581, unknown characters fall back to bytes, a text's first space goes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.", "th", "he", "▁t"]
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", *bytes_, *letters])}
    merges = [("t", "h"), ("h", "e"), ("▁", "t")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
TOKEN_BYTES = TokenBytes(BYTE_LEVEL)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


def window(tokenizer: Tokenizer) -> WindowDetokenizer:
    return WindowDetokenizer(tokenizer, special_tokens(tokenizer))


def deltas(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3)))
@example(BYTE_LEVEL.encode(EMOJI).ids)
def test_byte_level_deltas_are_together_what_the_tokenizer_decodes(ids: list[int]) -> None:
    """Any tokens, valid text or not, unknown and special ones too."""
    assert "".join(deltas(ByteLevelDetokenizer(TOKEN_BYTES), ids)) == decode(BYTE_LEVEL, ids)


@given(st.text())
@example(EMOJI)
def test_no_delta_has_half_a_character_and_none_waits_longer_than_it_must(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    detokenizer = ByteLevelDetokenizer(TOKEN_BYTES)
    shown, data = "", b""
    for token_id in ids:
        shown += detokenizer.feed(token_id)
        data += TOKEN_BYTES(token_id)
        assert shown == codecs.getincrementaldecoder("utf-8")().decode(data)
    assert detokenizer.finish() == ""
    assert shown == text


@given(st.text() | st.text("the qi.日ü👩 "))
@example(EMOJI)
@example("  two  leading")
@example("日日日日日日日日日日 the")
def test_other_decoders_agree_too(text: str) -> None:
    ids = SENTENCEPIECE.encode(text).ids
    pieces = deltas(window(SENTENCEPIECE), ids)
    assert "".join(pieces) == decode(SENTENCEPIECE, ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.sampled_from(["</s>", "▁", "▁t", "he", "."])))
@example(["</s>", "▁", "</s>", "▁t", "he"])
def test_special_tokens_leave_no_trace(tokens: list[str]) -> None:
    ids = [SENTENCEPIECE.token_to_id(token) for token in tokens]
    assert "".join(deltas(window(SENTENCEPIECE), [10**6, *ids])) == decode(SENTENCEPIECE, ids)


@given(st.text())
@example(EMOJI)
def test_byte_level_inside_another_decoder(text: str) -> None:
    wrapped = Tokenizer.from_str(BYTE_LEVEL.to_str())
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel()])
    ids = wrapped.encode(text).ids
    assert "".join(deltas(window(wrapped), ids)) == text


def test_tokens_that_are_never_text_do_not_wait_for_ever() -> None:
    detokenizer = window(SENTENCEPIECE)
    bad = SENTENCEPIECE.token_to_id("<0xFF>")
    shown = [detokenizer.feed(bad) for _ in range(100)]
    assert len("".join(shown)) > 80
    assert set("".join(shown)) == {"\ufffd"}
    rest = [detokenizer.feed(i) for i in SENTENCEPIECE.encode("the end.").ids]
    assert "".join(rest).endswith("the end.")


@pytest.mark.parametrize(
    ("tokenizer", "kind"), [(BYTE_LEVEL, ByteLevelDetokenizer), (SENTENCEPIECE, WindowDetokenizer)]
)
def test_a_folder_s_tokenizer_knows_its_way(tmp_path: Path, tokenizer: Tokenizer, kind: type[Detokenizer]) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = ChatTokenizer(tmp_path)
    assert isinstance(chat.detokenizer(), kind)
    ids = chat.encode(" the emoji 👩 ends").tolist()
    assert chat.decode(ids) == decode(tokenizer, ids)
    assert chat.decode(ids[:-9]) == decode(tokenizer, ids[:-9])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_prompts_have_the_tokens_that_a_tokenizer_gives_them(
    tmp_path: Path, tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    own = Tokenizer.from_str(tokenizer.to_str())
    begin = own.get_added_tokens_decoder()[min(own.get_added_tokens_decoder())].content
    own.post_processor = processors.TemplateProcessing(f"{begin} $A", None, [(begin, own.token_to_id(begin))])
    own.save(str(tmp_path / "tokenizer.json"))
    prompts = PromptTokenizer(tmp_path)
    for text in ("", " ", EMOJI, "the end.</s> two words 日本<|end|>", "a " * 5000):
        expected = own.encode(text, add_special_tokens=add_special_tokens).ids
        assert prompts.encode(text, add_special_tokens=add_special_tokens).tolist() == expected


def test_other_threads_run_while_a_long_prompt_is_tokenised(tmp_path: Path) -> None:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    prompts, done, turns = PromptTokenizer(tmp_path), threading.Event(), 0

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    try:
        before = turns
        prompts.encode("ab " * 400_000)
        after = turns
    finally:
        done.set()
        other.join()
    assert after - before >= 5, "it gets one or two between steps of Python's own"


def test_tokenising_starts_no_threads_that_a_fork_would_lose(tmp_path: Path) -> None:
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    program = """
import os, pathlib, sys
from kvtier.text.prompts import PromptTokenizer
prompts = PromptTokenizer(pathlib.Path(sys.argv[1]))
num_threads = len(os.listdir("/proc/self/task"))
prompts.encode("a " * 100_000)
assert len(os.listdir("/proc/self/task")) == num_threads
child = os.fork()
if not child:
    os._exit(len(prompts.encode("abc")))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environ = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=environ, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")


ALPHABET = "ab"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def first_end(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first sequence ends, and how long the longest is that ends there: the definition, plainly."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end, max(lengths)
    return None


def may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop sequence."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(st.lists(st.text(ALPHABET + "c", max_size=6)), STOPS)
@example(["ab", "cd"], ["bcd", "c"])
@example(["aa", "ab"], ["aab"])
def test_stop_sequences_are_found_wherever_pieces_are_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = come = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        come += piece
        found = first_end(come, stops)
        assert matcher.found == (found is not None)
        if found is not None:
            assert shown == come[: found[0] - found[1]]
        else:
            assert shown == come[: len(come) - may_begin(come, stops)], "all that is certain, and nothing else"
    rest = matcher.finish()
    assert shown + rest == come or matcher.found
    assert not (matcher.found and rest)


def test_without_stop_sequences_nothing_is_held_back() -> None:
    matcher = StopMatcher([])
    assert (matcher.feed("ab"), matcher.feed(""), matcher.finish(), matcher.found) == ("ab", "", "", False)


@given(st.text("aé日👩 ", max_size=12), STOPS | st.lists(st.text("aé日👩 ", min_size=1, max_size=3), max_size=4))
def test_an_answer_ends_before_the_stop_sequence_whatever_the_tokens(text: str, stops: list[str]) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    answer = AnswerText(ByteLevelDetokenizer(TOKEN_BYTES), stops)
    shown = "".join(answer.feed([i]) for i in ids) + answer.finish()
    at_once = AnswerText(ByteLevelDetokenizer(TOKEN_BYTES), stops)
    assert at_once.feed(ids) + at_once.finish() == shown
    assert at_once.num_tokens == answer.num_tokens
    found = first_end(text, stops)
    if found is None:
        assert (shown, answer.num_tokens, answer.stopped) == (text, len(ids), False)
    else:
        assert shown == text[: found[0] - found[1]]
        assert answer.stopped
        counted = decode(BYTE_LEVEL, ids[: answer.num_tokens])
        assert counted.startswith(text[: found[0]]), "the token that completes the sequence counts"
        assert not decode(BYTE_LEVEL, ids[: answer.num_tokens - 1]).startswith(text[: found[0]])


def test_a_cut_character_at_the_very_end_is_shown_as_the_tokenizer_shows_it() -> None:
    ids = BYTE_LEVEL.encode("so 日").ids[:-1]
    answer = AnswerText(ByteLevelDetokenizer(TOKEN_BYTES))
    assert answer.feed(ids) == "so "
    assert answer.finish() == "\ufffd"
    assert decode(BYTE_LEVEL, ids) == "so \ufffd"
