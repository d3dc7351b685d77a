"""Short answers of a Redis: the same however they are cut, and none that is larger than what has come."""

import pytest

from kvtier.errors import InvalidInputError
from kvtier.tiers.redis.answers import NOTHING, AnswerParser, ReplyError

SENT = (
    b":1\r\n+OK\r\n-OOM no room\r\n:-42\r\n$-1\r\n$0\r\n\r\n$17\r\n*2000000000\r\n:1\r\n\r\n"
    b"*-1\r\n*0\r\n*2\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n$1\r\n$\r\n:7\r\n"
)
ANSWERS = [
    1,
    b"OK",
    "OOM",
    -42,
    None,
    b"",
    b"*2000000000\r\n:1\r\n",
    None,
    [],
    [[0, 16383, [b"127.0.0.1", 7000]], b"$"],
    7,
]


def parsed(*pieces: bytes, count: int = 1) -> list[object]:
    parser = AnswerParser()
    parser.expect(count)
    answers: list[object] = []
    for piece in pieces:
        parser.feed(memoryview(piece))
        while (answer := parser.next()) is not NOTHING:
            answers.append(answer.code if isinstance(answer, ReplyError) else answer)
    parser.require_end()
    return answers


def test_however_they_are_cut() -> None:
    assert parsed(SENT, count=11) == ANSWERS
    assert parsed(*(SENT[i : i + 1] for i in range(len(SENT))), count=11) == ANSWERS
    for at in range(len(SENT)):
        assert parsed(SENT[:at], SENT[at:], count=11) == ANSWERS


@pytest.mark.parametrize(
    "sent",
    [
        b"*2000000000\r\n",
        b"*999999999999\r\n",
        b":1\r\n$2\r\nab\r\n*2000000000\r\n",
        b"*3\r\n:1\r\n:2\r\n*2000000000\r\n",
        b"*2\r\n*200000\r\n*200000\r\n",
        b"*1\r\n" * 300_000,
        b"%1\r\n*0\r\n:1\r\n",
        b"~2000000000\r\n",
        b">2000000000\r\n",
        b"_\r\n",
        b"\r\n",
        b"*\r\n",
        b"$-2\r\n",
        b"$+1\r\n",
        b"*1000000000000000000\r\n",
        b":1\n*2000000000\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_what_is_no_answer_or_announces_too_many(sent: bytes) -> None:
    for pieces in ((sent,), (sent[:1], sent[1:]), (sent[:-1], sent[-1:])):
        with pytest.raises(InvalidInputError, match="Redis"):
            parsed(*pieces)


@pytest.mark.parametrize("rest", [b":", b":1\r", b":1\r\n", b"$5\r\nhel", b"$5\r\n", b"*1\r\n", b"-E"])
def test_what_nobody_asked_for_is_found_out(rest: bytes) -> None:
    with pytest.raises(InvalidInputError, match="more than it was asked"):
        parsed(b":1\r\n" + rest)
    assert parsed(b":1\r\n") == [1]
