"""Live classes. Each case runs cells in a real IPython shell."""

from __future__ import annotations

import dataclasses

import pytest

from pagedvllm.teach import LiveError, live, restore


def test_whole_class_keeps_subclasses_and_instances(cell):
    import torch
    from pagedvllm_toy import decoder, layers

    model, cls = decoder.Decoder(), layers.RMSNorm
    cell('''
    @extends("pagedvllm_toy.layers")
    class RMSNorm(nn.Module):
        """Root-mean-square norm."""

        def __init__(self, dim: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(dim))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, self.weight) - 5
    ''')
    assert layers.RMSNorm is cls is cell.ns["RMSNorm"] and decoder.FancyNorm.__mro__[1] is cls
    assert model.norm(torch.ones(4)).round().tolist() == [-3] * 4  # an old instance: new forward, old weights
    assert decoder.Decoder().norm(torch.ones(4)).tolist() == [-4] * 4
    restore()
    assert model.norm(torch.ones(4)).round().tolist() == [2] * 4


def test_part_of_a_class(cell):
    from pagedvllm_toy.kv import BlockPool

    cell('''
    @extends("pagedvllm_toy.kv")
    class BlockPool:
        """Fixed-size pages and the queue of the free ones."""

        def __init__(self, num_blocks: int) -> None:
            self.blocks = [Block(i) for i in range(num_blocks)]
            self.free_queue = deque(self.blocks[2:])
            self.__secret = 7

        @property
        def num_free(self) -> int:
            return len(self.free_queue) + 100

        ...
    ''')
    assert BlockPool(5).num_free == 103 and BlockPool.ceil_div(3, 2) == 2 and BlockPool.grow == 1
    with pytest.raises(AttributeError, match="read only"):
        BlockPool(5).num_free = 1
    restore()
    assert BlockPool(5).num_free == 4


def test_a_whole_class_drops_members(cell):
    from pagedvllm_toy.kv import BlockPool

    cell("""
    @extends("pagedvllm_toy.kv")
    class BlockPool:
        def __init__(self, num_blocks: int) -> None:
            self.blocks = []
    """)
    assert not hasattr(BlockPool, "allocate")
    restore()
    assert BlockPool(5).num_free == 4 and BlockPool.__doc__.startswith("Fixed")


def test_equality_takes_the_hash_away(cell):
    from pagedvllm_toy.kv import Plain

    cell("""
    @extends("pagedvllm_toy.kv")
    class Plain:
        def __init__(self) -> None:
            self.value = 4

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Plain) and self.value == other.value
    """)
    assert Plain() == Plain()
    with pytest.raises(TypeError, match="unhashable"):
        hash(Plain())
    restore()
    assert Plain() != Plain() and hash(Plain())


def test_dataclass_with_a_new_field(cell):
    from pagedvllm_toy.kv import PoolStats

    old = PoolStats(3, 1)
    cell('''
    @extends("pagedvllm_toy.kv")
    @dataclass
    class PoolStats:
        """Counters."""

        allocated: int = 0
        freed: int = 0
        evicted: int = 0

        @property
        def in_use(self) -> int:
            return self.allocated - self.freed - self.evicted
    ''')
    assert PoolStats(3, 1, 1).in_use == 1 and PoolStats() == PoolStats() and "evicted" in repr(PoolStats())
    assert old.in_use == 2  # the default is the class's
    restore()
    assert PoolStats(3, 1).in_use == 2 and not hasattr(PoolStats, "evicted") and "evicted" not in repr(old)


def test_frozen_dataclass_in_part_keeps_what_it_does_not_show(cell):
    from pagedvllm_toy.kv import Shape

    cell('''
    @extends("pagedvllm_toy.kv")
    @dataclass(frozen=True)
    class Shape:
        """A frozen dataclass."""

        blocks: int
        size: int = 32

        ...
    ''')
    shape = Shape(2)
    assert shape.tokens() == 64 and hash(shape) == 64 and Shape(4, 16) == shape
    with pytest.raises(ValueError, match="negative"):
        Shape(-1)
    for name in ("size", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(shape, name, 1)
    restore()
    assert Shape(2).tokens() == 32


def test_a_dataclass_in_part_shows_all_fields(cell):
    from pagedvllm_toy.kv import Shape

    with pytest.raises(LiveError, match="all its fields in one cell, without size"):
        cell("""
        @extends("pagedvllm_toy.kv")
        @dataclass(frozen=True)
        class Shape:
            blocks: int

            ...
        """)
    assert Shape(2).tokens() == 32


def test_slots_dataclass_methods_yes_fields_no(cell):
    from pagedvllm_toy.kv import Block

    block = Block(1)
    cell("""
    @extends("pagedvllm_toy.kv:Block")
    def take(self) -> Block:
        self.refs += 2
        return self
    """)
    assert block.take().refs == 2
    cell('''
    @extends("pagedvllm_toy.kv")
    @dataclass(slots=True)
    class Block:
        """One page."""

        index: int
        refs: int = 5

        def take(self) -> Block:
            self.refs += 3
            return self
    ''')
    assert Block(1).take().refs == 8 and block.take().refs == 5
    with pytest.raises(LiveError, match="slots"):
        cell("""
        @extends("pagedvllm_toy.kv")
        @dataclass(slots=True)
        class Block:
            index: int
            refs: int = 0
            hash: int = 0
        """)
    restore()
    assert Block(1).take().refs == 1


def test_fields_that_a_child_copied_cannot_change(cell):
    from pagedvllm_toy.kv import Child, Parent

    with pytest.raises(LiveError, match="dataclasses derived from Parent"):
        cell("""
        @extends("pagedvllm_toy.kv")
        @dataclass
        class Parent:
            a: int = 5
        """)
    assert Parent().a == 1 and Child().a == 1
    cell('''
    @extends("pagedvllm_toy.kv")
    @dataclass
    class Parent:
        """Its methods may change."""

        a: int = 1

        def double(self) -> int:
            return 2 * self.a
    ''')
    assert Child(a=4).double() == 8


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Color(enum.Enum):\n    RED = 2", "Color is made by EnumType"),
        ("class Pair(NamedTuple):\n    a: int", "Pair is made by NamedTuple"),
        ("class Policy(Protocol):\n    x = 1", "Policy is made by ProtocolMeta"),
        ("class Manager(BlockPool):\n    pass", "the bases of Manager"),
        ("class Plain:\n    __slots__ = ('a',)", "the slots of Plain"),
        ("@dataclass\nclass Plain:\n    a: int = 0", "a decorator of Plain|now differs|"),
    ],
)
def test_what_cannot_be_reopened(cell, source, reason):
    import pagedvllm_toy.kv as kv

    before = {name: dict(vars(value)) for name, value in vars(kv).items() if isinstance(value, type)}
    if source.startswith("@dataclass"):  # a plain class may become a dataclass
        cell(f'@extends("pagedvllm_toy.kv")\n{source}')
        assert kv.Plain(3).a == 3
        restore()
    else:
        with pytest.raises(LiveError, match=reason):
            cell(f'@extends("pagedvllm_toy.kv")\n{source}')
    for name, attributes in before.items():
        now = vars(vars(kv)[name])
        assert {k: v for k, v in attributes.items() if k not in ("__doc__", "__weakref__", "__dict__")} == {
            k: v for k, v in now.items() if k not in ("__doc__", "__weakref__", "__dict__")
        }


def test_methods_of_what_cannot_be_reopened(cell):
    from pagedvllm_toy.kv import Color, Pair

    cell("""
    @extends("pagedvllm_toy.kv:Color")
    def label(self) -> str:
        return self.name.lower()

    @extends("pagedvllm_toy.kv:Pair")
    def double(self) -> int:
        return self.a * 3
    """)
    assert Color.RED.label() == "red" and Pair(2).double() == 6


def test_abstract_methods_follow(cell):
    from pagedvllm_toy.kv import Base

    class Concrete(Base):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Concrete()
    cell("""
    @extends("pagedvllm_toy.kv:Base")
    def run(self) -> int:
        return 1
    """)
    assert not Base.__abstractmethods__ and Base().run() == 1
    restore()
    assert Base.__abstractmethods__ == {"run"}


def test_registered_class_stays_the_registered_class(cell):
    from pagedvllm_toy import layers

    gate = layers.Gate
    cell('''
    @extends("pagedvllm_toy.layers")
    @register("Gate")
    class Gate:
        """A registered class."""

        def open(self) -> bool:
            return True
    ''')
    assert layers.REGISTRY["Gate"] is gate and gate().open()


def test_class_and_method_edits_restore_in_any_order(cell):
    import torch
    from pagedvllm_toy import layers

    cell("""
    @extends("pagedvllm_toy.layers:RMSNorm")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2
    """)
    cell("""
    @extends("pagedvllm_toy.layers")
    class RMSNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        ...
    """)
    norm = layers.RMSNorm(2)
    assert norm(torch.ones(2)).tolist() == [3, 3]
    restore("pagedvllm_toy.layers", "RMSNorm")
    assert norm(torch.ones(2)).tolist() == [2, 2]
    restore()
    assert norm(torch.ones(2)).tolist() == pytest.approx([1, 1]) and not live.edits()
