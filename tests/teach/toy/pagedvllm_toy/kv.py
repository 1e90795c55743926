"""Classes of every kind that a cell may edit."""

from __future__ import annotations

import abc
import enum
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

NULL_BLOCK = 0


class NoFreeBlocks(RuntimeError):
    """Fewer blocks are free than were asked for."""


@dataclass(slots=True)
class Block:
    """One page."""

    index: int
    refs: int = 0

    def take(self) -> Block:
        self.refs += 1
        return self


@dataclass
class PoolStats:
    """Counters."""

    allocated: int = 0
    freed: int = 0

    @property
    def in_use(self) -> int:
        return self.allocated - self.freed


@dataclass(frozen=True)
class Shape:
    """A frozen dataclass."""

    blocks: int
    size: int = 16

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise ValueError("blocks must not be negative")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self.tokens() == other.tokens()

    def __hash__(self) -> int:
        return self.tokens()

    def tokens(self) -> int:
        return self.blocks * self.size


@dataclass
class Parent:
    """A dataclass with a dataclass child."""

    a: int = 1


@dataclass
class Child(Parent):
    """The child has copied the field."""

    b: int = 2


class BlockPool:
    """Fixed-size pages and the queue of the free ones."""

    grow = 1  # a class constant that a default names

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue = deque(self.blocks[1:])
        self.__secret = 7

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    @num_free.setter
    def num_free(self, value: int) -> None:
        raise AttributeError("read only")

    def allocate(self, n: int, grow: int = grow) -> list[Block]:
        """Take n blocks, all or nothing.

        Raises NoFreeBlocks when there are fewer.
        """
        # never a partial allocation: the caller would have to give it back
        if n > self.num_free:
            raise NoFreeBlocks(n)
        return [self.free_queue.popleft().take() for _ in range(n)]

    def secret(self) -> int:
        return self.__secret

    def __hidden(self) -> int:
        return 1

    def reveal(self) -> int:
        return self.__hidden()

    @staticmethod
    def ceil_div(a: int, b: int) -> int:
        return -(-a // b)

    @classmethod
    def of_tokens(cls, tokens: int, size: int = 16) -> BlockPool:
        return cls(cls.ceil_div(tokens, size) + 1)

    @cached_property
    def capacity(self) -> int:
        return len(self.blocks)

    class Cursor:
        """A class in a class."""

        def step(self) -> int:
            return 1


class Manager:
    """Holds a pool."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.size = size

    def lookup(self, tokens: list[int]) -> int:
        return 0


class CachingManager(Manager):
    """Remembers what it saw."""

    def __init__(self, num_blocks: int, size: int) -> None:
        super().__init__(num_blocks, size)
        self.seen: list[int] = []

    def lookup(self, tokens: list[int]) -> int:
        known = super().lookup(tokens) + len(self.seen)
        self.seen = tokens[:2]
        return known


class Color(enum.Enum):
    """An enumeration."""

    RED = 1

    def label(self) -> str:
        return self.name


class Pair(NamedTuple):
    """A named tuple."""

    a: int

    def double(self) -> int:
        return self.a * 2


class Policy(Protocol):
    """A protocol."""

    def choose(self) -> int: ...


class Base(abc.ABC):
    """An abstract class."""

    @abc.abstractmethod
    def run(self) -> int: ...


class Plain:
    """Equality by identity."""

    def __init__(self) -> None:
        self.value = 3
