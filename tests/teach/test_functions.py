"""Live functions, methods and constants. Each case runs cells in a real IPython shell."""

from __future__ import annotations

import inspect
import traceback

import pytest

from pagedvllm.teach import LiveError, live, restore

ALLOCATE = '''
@extends("pagedvllm_toy.kv:BlockPool")
def allocate(self, n: int, grow: int = grow) -> list[Block]:
    """Take n blocks, all or nothing.

    Raises NoFreeBlocks when there are fewer.
    """
    # never a partial allocation: the caller would have to give it back
    if n > self.num_free:
        raise NoFreeBlocks(n)
    return [self.free_queue.popleft().take() for _ in range(n)]
'''
EDITED = """
@extends("pagedvllm_toy.kv:BlockPool")
def allocate(self, n: int, grow: int = grow) -> list[Block]:
    raise NoFreeBlocks("edited")
"""


def test_method_in_place(cell, capsys):
    from pagedvllm_toy.kv import BlockPool, Manager

    manager = Manager(8, 16)
    bound, function = manager.pool.allocate, BlockPool.allocate
    cell(EDITED)
    for call in (lambda: manager.pool.allocate(1), lambda: bound(1), lambda: BlockPool(4).allocate(1)):
        with pytest.raises(RuntimeError, match="edited"):
            call()
    assert BlockPool.allocate is function
    assert function.__qualname__ == "BlockPool.allocate" and function.__module__ == "pagedvllm_toy.kv"
    assert "pagedvllm_toy.kv:BlockPool.allocate now differs" in capsys.readouterr().out
    restore()
    assert len(manager.pool.allocate(1)) == 1


def test_a_cell_equal_to_the_package_does_nothing(cell, capsys):
    from pagedvllm_toy.kv import BlockPool

    code = BlockPool.allocate.__code__
    cell(ALLOCATE)
    assert BlockPool.allocate.__code__ is code and not live.edits() and not live.history()[len(live.history()) :]
    assert "allocate" not in cell.ns and capsys.readouterr().out == ""


def test_always_installs_and_is_silent(cell, monkeypatch, capsys):
    from pagedvllm_toy.kv import BlockPool

    monkeypatch.setenv("PAGEDVLLM_LIVE", "always")
    code = BlockPool.allocate.__code__
    cell(ALLOCATE)
    assert BlockPool.allocate.__code__ is not code and live.edits() == ["pagedvllm_toy.kv:BlockPool.allocate"]
    assert live.history()[-1] == "pagedvllm_toy.kv:BlockPool.allocate"
    assert capsys.readouterr().out == "" and len(BlockPool(4).allocate(2)) == 2


def test_edited_back_is_a_restore(cell, capsys):
    from pagedvllm_toy.kv import BlockPool

    code = BlockPool.allocate.__code__
    cell(EDITED)
    cell(ALLOCATE)
    assert BlockPool.allocate.__code__ is code and not live.edits()
    assert "is the package's own again" in capsys.readouterr().out


def test_property_setter_static_class(cell):
    from pagedvllm_toy.kv import BlockPool

    pool = BlockPool(4)
    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    @property
    def num_free(self) -> int:
        return 99

    @extends("pagedvllm_toy.kv:BlockPool")
    @num_free.setter
    def num_free(self, value: int) -> None:
        self.got = value

    @extends("pagedvllm_toy.kv:BlockPool")
    @staticmethod
    def ceil_div(a: int, b: int) -> int:
        return 5

    @extends("pagedvllm_toy.kv:BlockPool")
    @classmethod
    def of_tokens(cls, tokens: int, size: int = NULL_BLOCK) -> BlockPool:
        return cls(7)
    """)
    pool.num_free = 3
    assert (pool.num_free, pool.got, BlockPool.ceil_div(1, 1), len(BlockPool.of_tokens(1).blocks)) == (99, 3, 5, 7)
    restore("pagedvllm_toy.kv:BlockPool", "num_free")
    assert pool.num_free == 3 and BlockPool.ceil_div(1, 1) == 5
    with pytest.raises(AttributeError, match="read only"):
        pool.num_free = 1
    restore()
    assert BlockPool.ceil_div(3, 2) == 2


def test_a_getter_alone_keeps_the_setter(cell):
    from pagedvllm_toy.kv import BlockPool

    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    @property
    def num_free(self) -> int:
        return 42
    """)
    assert BlockPool(4).num_free == 42
    with pytest.raises(AttributeError, match="read only"):
        BlockPool(4).num_free = 1


def test_private_names(cell):
    from pagedvllm_toy.kv import BlockPool

    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    def secret(self) -> int:
        return self.__secret + 1

    @extends("pagedvllm_toy.kv:BlockPool")
    def __hidden(self) -> int:
        return 2
    """)
    assert BlockPool(3).secret() == 8 and BlockPool(3).reveal() == 2


def test_cached_property_and_inner_class(cell):
    from pagedvllm_toy.kv import BlockPool

    cursor = BlockPool.Cursor()
    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    @cached_property
    def capacity(self) -> int:
        return 1000
    """)
    cell("""
    @extends("pagedvllm_toy.kv:BlockPool.Cursor")
    def step(self) -> int:
        return 2
    """)
    assert BlockPool(4).capacity == 1000 and cursor.step() == 2
    assert BlockPool.Cursor.step.__qualname__ == "BlockPool.Cursor.step"
    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    class Cursor:
        def step(self) -> int:
            return 3
    """)
    assert cursor.step() == 3 and type(cursor) is BlockPool.Cursor
    restore()
    assert BlockPool(4).capacity == 4 and cursor.step() == 1


def test_function_imported_by_name(cell):
    import torch
    from pagedvllm_toy import decoder

    x = torch.ones(4)
    before = decoder.Decoder()(x)
    cell("""
    @extends("pagedvllm_toy.layers")
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
        return x * 0
    """)
    assert decoder.Decoder()(x).tolist() == [1, 1, 1, 1]  # through an import, a registry and a subclass
    assert cell.ns["rms_norm"] is decoder.rms_norm is decoder.NORMS["rms"]
    restore()
    assert torch.equal(decoder.Decoder()(x), before)


def test_cached_function_is_rebound_everywhere(cell):
    from pagedvllm_toy import decoder, layers

    original, frozen = layers.rope_table, layers.FROZEN
    cell.ns["mine"] = original
    layers.FROZEN = ()
    cell("""
    @extends("pagedvllm_toy.layers")
    @functools.lru_cache(maxsize=8)
    def rope_table(n: int) -> list[int]:
        return [0]
    """)
    assert decoder.table_size(5) == 1 and decoder.table_size_by_registry(5) == 2
    assert cell.ns["mine"] is layers.rope_table is cell.ns["rope_table"]
    restore()
    assert decoder.table_size(5) == 5 and decoder.table_size_by_registry(5) == 10 and cell.ns["mine"] is original
    layers.FROZEN = frozen


def test_what_a_tuple_holds_cannot_follow(cell):
    from pagedvllm_toy import decoder

    with pytest.raises(LiveError, match="FROZEN holds the old definition"):
        cell("""
        @extends("pagedvllm_toy.layers")
        @functools.lru_cache(maxsize=8)
        def rope_table(n: int) -> list[int]:
            return [0]
        """)
    assert decoder.table_size(5) == 5 and decoder.table_size_by_registry(5) == 10


def test_registering_decorator(cell):
    from pagedvllm_toy import decoder, layers

    function = layers.relu
    cell("""
    @extends("pagedvllm_toy.layers")
    @register("relu")
    def relu(x: float) -> float:
        return 100.0
    """)
    assert decoder.activate(1.0) == 200.0 and layers.REGISTRY["relu"] is function
    restore()
    assert decoder.activate(1.0) == 2.0 and layers.REGISTRY["relu"] is function


def test_a_shared_closure_is_not_shared_damage(cell):
    from pagedvllm_toy import layers

    cell("""
    @extends("pagedvllm_toy.layers")
    @times(3)
    def one() -> int:
        return 1
    """)
    assert (layers.one(), layers.ten()) == (3, 20)
    restore()
    assert (layers.one(), layers.ten()) == (2, 20)


def test_constants(cell):
    from pagedvllm_toy import decoder, layers

    cell("""
    with extends("pagedvllm_toy.layers"):
        EPS = 1.0
        PROMPT = PROMPT + str(EPS)
    """)
    assert decoder.table_size(5) == 6 and layers.EPS == 1.0 and layers.LIMIT == 1e-6
    assert layers.PROMPT == "one\n  two1.0"
    assert layers.rms_norm.__defaults__ == (1e-6,)  # a limit the book tells: defaults were taken at import
    cell("""
    with extends("pagedvllm_toy.layers"):
        EPS = 1e-6
    """)
    assert layers.EPS == 1e-6 and live.edits() == ["pagedvllm_toy.layers:PROMPT"]
    restore()
    assert layers.PROMPT == "one\n  two"


def test_constants_are_all_or_none(cell):
    from pagedvllm_toy import layers

    with pytest.raises(NameError):
        cell("""
        with extends("pagedvllm_toy.layers"):
            EPS = 1.0
            LIMIT = NOWHERE
        """)
    assert layers.EPS == 1e-6 and not live.edits()


def test_inference_mode_wrapper(cell):
    import torch
    from pagedvllm_toy import decoder

    model = decoder.Decoder()
    cell("""
    @extends("pagedvllm_toy.decoder:Decoder")
    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 0 + 3
    """)
    y = model(torch.ones(4))
    assert y.tolist() == [3, 3, 3, 3] and y.is_inference()
    cell("""
    @extends("pagedvllm_toy.decoder:Decoder")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 0 + 4
    """)
    y = model(torch.ones(4))
    assert y.tolist() == [4, 4, 4, 4] and not y.is_inference()
    restore()
    assert model(torch.ones(4)).is_inference()


def test_super_added_and_removed(cell):
    from pagedvllm_toy.kv import CachingManager

    manager = CachingManager(9, 2)
    cell("""
    @extends("pagedvllm_toy.kv:CachingManager")
    def lookup(self, tokens: list[int]) -> int:
        return super().lookup(tokens) + 1
    """)
    assert manager.lookup([1, 2, 3]) == 1
    cell("""
    @extends("pagedvllm_toy.kv:CachingManager")
    def lookup(self, tokens: list[int]) -> int:
        return 2
    """)
    assert manager.lookup([1, 2, 3]) == 2
    restore()
    manager.lookup([1, 2, 3])
    assert manager.lookup([1, 2, 3]) == 2


def test_failed_edit_keeps_the_earlier_one(cell):
    from pagedvllm_toy import layers

    cell("""
    @extends("pagedvllm_toy.layers")
    def banner(name: str) -> str:
        return "first"
    """)
    with pytest.raises(NameError):
        cell("""
        @extends("pagedvllm_toy.layers")
        def banner(name: str = NOWHERE) -> str:
            return "second"
        """)
    assert layers.banner("x") == "first" and live.edits() == ["pagedvllm_toy.layers:banner"]


def test_an_edit_that_another_needs_stays(cell):
    from pagedvllm_toy import layers

    cell("""
    @extends("pagedvllm_toy.layers")
    def helper() -> int:
        return 5
    """)
    cell("""
    @extends("pagedvllm_toy.layers")
    def banner(name: str, n: int = helper()) -> str:
        return name * n
    """)
    with pytest.raises(LiveError, match="needs this one"):
        restore("pagedvllm_toy.layers:helper")
    assert layers.banner("x") == "xxxxx" and len(live.edits()) == 2
    with pytest.raises(LiveError, match="there is no edit"):
        restore("pagedvllm_toy.layers", "nothing")


def test_new_definitions_are_announced(cell, capsys):
    import pagedvllm_toy.kv as kv

    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    def used(self):
        return len(self.blocks) - self.num_free

    @extends("pagedvllm_toy.kv")
    def helper():
        return NULL_BLOCK
    """)
    assert kv.BlockPool(4).used() == 1 and kv.helper() == 0 == cell.ns["helper"]()
    assert capsys.readouterr().out.count("is new: the package has no such definition") == 2
    restore()
    assert not hasattr(kv.BlockPool, "used") and not hasattr(kv, "helper")


def test_names_of_the_notebook_are_not_hurt(cell):
    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    def hash(self) -> int:
        return 12
    """)
    assert "hash" not in cell.ns
    assert cell("hash(1)") == 1


def test_source_and_traceback_are_the_cells(cell):
    from pagedvllm_toy.kv import BlockPool

    cell("""
    @extends("pagedvllm_toy.kv:BlockPool")
    def secret(self) -> int:
        return 1 / 0
    """)
    assert "1 / 0" in inspect.getsource(BlockPool.secret)
    with pytest.raises(ZeroDivisionError) as caught:
        BlockPool(2).secret()
    assert "return 1 / 0" in "".join(traceback.format_exception(caught.value))


def test_closures_made_earlier_keep_the_old_body(cell):
    from pagedvllm_toy import layers

    cell("""
    @extends("pagedvllm_toy.layers")
    def make_scaler(factor: float) -> Callable[[float], float]:
        def scale(x: float) -> float:
            return x * factor + 100

        return scale
    """)
    assert layers.make_scaler(2.0)(1) == 102 and layers.double(1) == 2  # a limit the book tells


def test_triton(cell):
    pytest.importorskip("triton", reason="no Triton on this system")
    import torch
    from pagedvllm_toy import kernels

    x = torch.zeros(5)
    assert kernels.add(x).tolist() == [1] * 5
    cell("""
    @extends("pagedvllm_toy.kernels")
    @triton.jit
    def _twist(x):
        return x + 7
    """)
    assert kernels.add(x).tolist() == [7] * 5
    cell("""
    @extends("pagedvllm_toy.kernels")
    @triton.jit
    def add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n)
        tl.store(y_ptr + i, _twist(x) * 2, mask=i < n)
    """)
    assert kernels.add(x).tolist() == [14] * 5
    restore()
    assert kernels.add(x).tolist() == [1] * 5


@pytest.mark.parametrize("home", ["json", "json:JSONEncoder", "pagedvllm_other.kv", "__main__"])
def test_a_home_outside_the_package_is_refused(cell, home):
    import json

    code = json.dumps.__code__
    with pytest.raises(LiveError, match=f"{home}' is not a home of this package"):
        cell(f'@extends("{home}")\ndef dumps(*args): ...')
    assert json.dumps.__code__ is code and not live.edits()


@pytest.mark.parametrize(
    ("home", "definition", "reason"),
    [
        ("kv:BlockPool", "def num_free(self): return 1", "num_free is a property in the package: keep @property"),
        ("kv:BlockPool", "@cached_property\ndef num_free(self): return 1", "keep @property"),
        ("kv:BlockPool", "@property\ndef capacity(self): return 1", "a cached_property in .*: keep @cached_property"),
        ("kv:BlockPool", "def ceil_div(a, b): return 1", "keep @staticmethod"),
        ("kv:BlockPool", "def of_tokens(cls, n): return 1", "keep @classmethod"),
        ("kv:BlockPool", "@property\ndef secret(self): return 1", "secret is a function in .*: leave out @property"),
        ("kv:BlockPool", "def grow(self): return 1", "grow is a constant in the package"),
        ("kv", "def BlockPool(n): return 1", "BlockPool is a class in the package"),
        ("layers", "class rope_table: ...", "rope_table is a function in the package"),
        ("kv", "@dataclass\nclass PoolStats:\n    allocated: int = 0\n    freed: int = 0\n    def in_use(self): ...",
         "in_use is a property in the package: keep @property"),
    ],
)  # fmt: skip
def test_the_kind_of_a_definition_stays(cell, home, definition, reason):
    from pagedvllm_toy import kv

    with pytest.raises(LiveError, match=reason):
        cell(f'@extends("pagedvllm_toy.{home}")\n{definition}')
    assert not live.edits() and kv.BlockPool(4).num_free == 3 and kv.PoolStats(3, 1).in_use == 2


def test_a_wrapper_is_a_function(cell):
    from pagedvllm_toy import layers

    cell('@extends("pagedvllm_toy.layers")\n@functools.lru_cache\ndef banner(name):\n    return "cached"')
    assert layers.banner("x") == "cached"
    restore()
    assert layers.banner("x") != "cached"


def test_a_misspelt_name_is_new_and_says_what_is_near(cell, capsys):
    cell('@extends("pagedvllm_toy.kv:BlockPool")\ndef alocate(self, n): ...')
    assert "is new: the package has no alocate; did you mean allocate?" in capsys.readouterr().out
    assert live.edits() == ["pagedvllm_toy.kv:BlockPool.alocate"]


def test_restore_says_when_there_is_nothing_to_restore(cell, capsys):
    cell(EDITED)
    capsys.readouterr()
    restore()
    assert capsys.readouterr().out == ""
    restore()
    assert capsys.readouterr().out == "restore: no edit is installed\n"
