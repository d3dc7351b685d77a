"""Stop sequences: found as text comes, and no part of one shown before it is clear that it is none."""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Looks for the first end of any of some sequences, character by character.

    Where several end at the same character, the longest counts. So what is shown does not depend on how the text is cut
    into pieces. O(1) per character and sequence (Knuth, Morris and Pratt: "Fast pattern matching in strings", 1977).
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        """:param sequences: none of them empty."""
        self._sequences = [(sequence, _borders(sequence)) for sequence in sequences]
        self._matched = [0] * len(sequences)
        """How many characters of each sequence the text so far ends with."""
        self._held: deque[str] = deque()
        """Characters not shown: the longest of those."""
        self.found = False

    def feed(self, text: str) -> str:
        """What can be shown now. Nothing after a sequence was found."""
        if not self._sequences:
            return text
        shown: list[str] = []
        for character in text:
            if self.found:
                break
            self._held.append(character)
            ended = self._advance(character)
            keep = ended or max(self._matched)
            while len(self._held) > keep:
                shown.append(self._held.popleft())
            self.found = ended > 0
        return "".join(shown)

    def finish(self) -> str:
        """What was held back and is no stop sequence, since the text ends."""
        return "" if self.found else "".join(self._held)

    def _advance(self, character: str) -> int:
        """The length of the longest sequence that ends with `character`, or 0."""
        ended = 0
        for index, (sequence, borders) in enumerate(self._sequences):
            matched = self._matched[index]
            while matched and sequence[matched] != character:
                matched = borders[matched - 1]
            if sequence[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(sequence):
                ended = max(ended, matched)
        return ended


def _borders(sequence: str) -> list[int]:
    """Returns, for each prefix of `sequence`, the length of its longest proper prefix that is also its end."""
    borders = [0] * len(sequence)
    for end in range(1, len(sequence)):
        length = borders[end - 1]
        while length and sequence[length] != sequence[end]:
            length = borders[length - 1]
        borders[end] = length + (sequence[length] == sequence[end])
    return borders
