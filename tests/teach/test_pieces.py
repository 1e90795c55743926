"""Cutting the package into pieces, and cells as text."""

from __future__ import annotations

import pytest

from pagedvllm.teach import LiveError, cells, pieces
from pagedvllm.teach.pieces import Home


def synced(cell: str) -> str:
    return cells.sync_cell(cell)


def test_dedent_leaves_the_inside_of_strings_alone():
    lines = [
        "    def f(self):",
        '        """Doc.',
        "",
        "        More.",
        '        """',
        "        x = '''a",
        "    b'''",
        "        return x",
    ]
    assert pieces.dedent(lines).split("\n") == [
        "def f(self):", '    """Doc.', "", "    More.", '    """', "    x = '''a", "    b'''", "    return x"
    ]  # fmt: skip
    f_string = ["    def f(self, y):", '        return f"""{y}', '      end"""']
    assert pieces.dedent(f_string).split("\n")[2] == '      end"""'


def test_indent_is_the_opposite():
    text = 'A = """x\n  y"""'
    assert pieces.indent(text) == '    A = """x\n  y"""'


def test_sync_fills_a_function_a_method_and_constants():
    cell = '@extends("pagedvllm_toy.layers")\ndef banner(name): ...'
    assert synced(cell) == (
        '@extends("pagedvllm_toy.layers")\ndef banner(name: str) -> str:\n    """Say hello.\n\n    Twice.\n    """\n'
        '    text = f"""hello\n  {name}\nbye"""\n    return text'
    )
    cell = '@extends("pagedvllm_toy.kv:BlockPool")\n@num_free.setter\ndef num_free(self): ...'
    assert "@num_free.setter\ndef num_free(self, value: int) -> None:" in synced(cell)
    cell = 'with extends("pagedvllm_toy.layers"):\n    EPS = 0\n    PROMPT = 0'
    assert synced(cell) == 'with extends("pagedvllm_toy.layers"):\n    EPS = 1e-6\n    PROMPT = """one\n  two"""'


def test_sync_of_a_class_in_part():
    cell = '@extends("pagedvllm_toy.kv")\nclass BlockPool:\n    """Old."""\n\n    def secret(self): ...\n\n    ...'
    assert synced(cell) == (
        '@extends("pagedvllm_toy.kv")\nclass BlockPool:\n    """Fixed-size pages and the queue of the free ones."""\n\n'
        "    def secret(self) -> int:\n        return self.__secret\n\n    ..."
    )


def test_sync_of_a_dataclass_in_part_shows_all_fields():
    cell = '@extends("pagedvllm_toy.kv")\n@dataclass(frozen=True)\nclass Shape:\n    """A."""\n\n    ...'
    assert synced(cell) == (
        '@extends("pagedvllm_toy.kv")\n@dataclass(frozen=True)\nclass Shape:\n    """A frozen dataclass."""\n\n'
        "    blocks: int\n    size: int = 16\n\n    ..."
    )


def test_sync_of_a_cell_in_order_is_no_change():
    cell = '@extends("pagedvllm_toy.kv:BlockPool")\ndef secret(self) -> int:\n    return self.__secret\n'
    assert synced(cell) == cell
    assert synced("%matplotlib inline\nprint(1)") == "%matplotlib inline\nprint(1)"
    assert synced("  \n!pip install x\nextends_not = 1") == "  \n!pip install x\nextends_not = 1"


def test_one_character_is_a_difference():
    cell = synced('@extends("pagedvllm_toy.kv:BlockPool")\ndef allocate(self): ...')
    (statement,) = cells.live_statements(cell)
    assert cells.same_as_package(statement, statement.node, cell)
    for old, new in ((" > ", " >= "), ("never a", "Never a"), ("take()", "take( )")):
        edited = cell.replace(old, new, 1)
        assert edited != cell
        (statement,) = cells.live_statements(edited)
        assert not cells.same_as_package(statement, statement.node, edited)


@pytest.mark.parametrize("cell", ["'pagedvllm_toy.kv:BlockPool')\ndef gone(self)", "'nowhere')\ndef f()"])
def test_what_the_package_does_not_have(cell):
    with pytest.raises(LiveError):
        synced(f"@extends({cell}: ...")


def test_definitions_under_conditions_count():
    home = Home("m", "", "try:\n    import x\nexcept ImportError:\n    def f():\n        return 1\nif x:\n    Y = 2\n")
    stmt = home.find("f")
    assert stmt is not None and pieces.piece(home, stmt) == "def f():\n    return 1"
    assert home.find("Y") is not None


def test_countable_lines():
    tree = Home("m", "", '"""Doc."""\nimport os\n\n\ndef f(\n    a,\n):\n    """Doc."""\n    return a\n').tree
    assert pieces.countable(tree) == {5, 6, 7, 9}
