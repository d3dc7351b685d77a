"""An approximate radix tree over prompts, with the engines that were sent each prefix (SGLang's gateway, `tree.rs`)."""

import heapq
from collections.abc import Iterator, Mapping
from os.path import commonprefix
from typing import NamedTuple

from kvtier_gateway.routing.values import EngineId


class Match(NamedTuple):
    """The longest known prefix of a text."""

    length: int
    """How many characters it has."""
    engines: Mapping[EngineId, int]
    """The engines that were sent this prefix, with the number of the last insertion of each."""


class _Node:
    __slots__ = ("children", "engines", "parent", "text")

    def __init__(self, text: str, parent: "_Node | None", engines: dict[EngineId, int]) -> None:
        self.text, self.parent, self.engines = text, parent, engines
        self.children: dict[str, _Node] = {}


class TextTree:
    """Each node is a piece of text after that of its parent. A node is split where texts part."""

    def __init__(self) -> None:
        self._root = _Node("", None, {})
        self._clock = 0
        self.sizes: dict[EngineId, int] = {}
        """Characters of the nodes of each engine."""

    def match(self, text: str) -> Match:
        """Returns the longest prefix of `text` that any engine was sent."""
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None or not child.engines:
                break
            shared = _common(child.text, text, at)
            node, at = child, at + shared
            if shared < len(child.text):
                break
        return Match(at, node.engines)

    def insert(self, text: str, engine: EngineId) -> None:
        """Notes that `text` was sent to `engine`."""
        self._clock += 1
        self.sizes.setdefault(engine, 0)
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = _Node(text[at:], node, {})
            elif (shared := _common(child.text, text, at)) < len(child.text):
                child = self._split(child, shared)
            if engine not in child.engines:
                self.sizes[engine] += len(child.text)
            child.engines[engine] = self._clock
            node, at = child, at + len(child.text)

    def evict(self, engine: EngineId, max_characters: int) -> None:
        """Forgets leaves that the engine was sent, the longest unused first, down to so many characters."""
        leaves = [(node.engines[engine], id(node), node) for node in self._nodes() if self._is_leaf(node, engine)]
        heapq.heapify(leaves)
        while leaves and self.sizes.get(engine, 0) > max_characters:
            node = heapq.heappop(leaves)[2]
            self._take(node, engine)
            parent = node.parent
            if parent is not None and self._is_leaf(parent, engine):
                heapq.heappush(leaves, (parent.engines[engine], id(parent), parent))

    def remove(self, engine: EngineId) -> None:
        """Forgets what the engine was sent."""
        self.evict(engine, -1)
        self.sizes.pop(engine, None)

    def _split(self, node: _Node, at: int) -> _Node:
        """Returns the new node of the first `at` characters, whose child `node` becomes."""
        head = _Node(node.text[:at], node.parent, dict(node.engines))
        assert node.parent is not None
        node.parent.children[head.text[0]] = head
        node.text, node.parent = node.text[at:], head
        head.children[node.text[0]] = node
        return head

    def _take(self, node: _Node, engine: EngineId) -> None:
        del node.engines[engine]
        self.sizes[engine] -= len(node.text)
        if not node.engines and not node.children and node.parent is not None:
            del node.parent.children[node.text[0]]

    @staticmethod
    def _is_leaf(node: _Node, engine: EngineId) -> bool:
        return engine in node.engines and not any(engine in child.engines for child in node.children.values())

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


def _common(piece: str, text: str, at: int) -> int:
    """Returns how many leading characters of `piece` stand in `text` from `at` on."""
    return len(piece) if text.startswith(piece, at) else len(commonprefix((piece, text[at : at + len(piece)])))  # noqa: RUF071 - characters are meant
