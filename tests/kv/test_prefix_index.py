"""The index of blocks by content: full blocks by name, and the block that goes on longest, against a plain scan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.kv.prefix_index import PrefixIndex

ROOT = b"root"


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def test_find_stops_at_the_first_unknown_name() -> None:
    index = PrefixIndex()
    for block, name in enumerate([b"a", b"b", b"c"], start=1):
        index.add(block, ROOT, [block, 0], name)
    assert index.find([b"a", b"b", b"x", b"c"]) == [1, 2]
    assert index.find([b"x", b"a"]) == []
    assert (len(index), 1 in index, 4 in index) == (3, True, False)


def test_the_first_block_of_a_name_stays_the_one_found() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6], b"a")
    index.add(2, ROOT, [5, 6], b"a")
    assert (index.find([b"a"]), 2 in index) == ([1], False)
    index.forget(2)
    assert index.find([b"a"]) == [1]
    index.forget(1)
    index.add(2, ROOT, [5, 6], b"a")
    assert index.find([b"a"]) == [2]


def test_a_partial_block_is_found_inside_only() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6, 7], None)
    assert index.find_inside(ROOT, [5, 6, 8]) == (1, 2)
    assert index.find_inside(ROOT, [5]) == (1, 1)
    assert index.find_inside(ROOT, [5, 6, 7, 8]) == (1, 3)
    assert index.find_inside(ROOT, [6]) is None
    assert index.find_inside(ROOT, []) is None
    assert index.find_inside(b"other", [5, 6, 7]) is None


def test_a_partial_block_that_says_nothing_new_is_left_out() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6, 7, 8], b"a")
    index.add(2, ROOT, [5, 6], None)
    assert 2 not in index
    index.add(2, ROOT, [5, 9], None)
    assert index.find_inside(ROOT, [5, 9, 1]) == (2, 2)


def test_a_block_that_fills_up_is_found_with_all_it_holds() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6], None)
    index.add(1, ROOT, [5, 6, 7], None)
    assert index.find_inside(ROOT, [5, 6, 7, 8]) == (1, 3)
    index.add(1, ROOT, [5, 6, 7, 8], b"a")
    assert (index.find([b"a"]), len(index)) == ([1], 1)
    index.check_integrity()


def test_excluded_blocks_are_not_found_inside() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6, 7], None)
    index.add(2, ROOT, [5, 6, 9], None)
    assert index.find_inside(ROOT, [5, 6, 7], {1}) == (2, 2)
    assert index.find_inside(ROOT, [5, 6, 7], {1, 2}) is None


def test_clear_forgets_all() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6], b"a")
    index.add(2, b"a", [5], None)
    index.clear()
    assert (len(index), index.find([b"a"]), index.find_inside(b"a", [5])) == (0, [], None)
    index.check_integrity()


def test_books_that_contradict_each_other_are_caught() -> None:
    index = PrefixIndex()
    index.add(1, ROOT, [5, 6], b"a")
    del index._block_of_name[b"a"]
    with pytest.raises(AssertionError, match="names"):
        index.check_integrity()


BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
ACTIONS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from([b"p", b"q"]), BLOCKS, st.booleans()), max_size=25)


@given(actions=ACTIONS, parent=st.sampled_from([b"p", b"q"]), query=BLOCKS, excluded=st.sets(st.integers(1, 8)))
def test_against_a_plain_scan(
    actions: list[tuple[int, bytes, list[int], bool]], parent: bytes, query: list[int], excluded: set[int]
) -> None:
    """Blocks of four tokens come and go; the longest hit is that of looking at every block."""
    index, model = PrefixIndex(), dict[int, tuple[bytes, tuple[int, ...]]]()
    for block, above, tokens, forgets in actions:
        if forgets:
            index.forget(block)
            model.pop(block, None)
            continue
        key = (above, tuple(tokens))
        is_full = len(tokens) == 4
        if is_full:
            is_known = key in model.values()
        else:
            is_known = any(other == above and held[: len(tokens)] == key[1] for other, held in model.values())
        index.add(block, above, tokens, above + bytes(tokens) if is_full else None)
        if not is_known:
            model[block] = key
        index.check_integrity()
    assert {block: entry[:2] for block, entry in index._entries.items()} == model
    allowed = {block: held for block, (above, held) in model.items() if above == parent and block not in excluded}
    most = max((shared(held, tuple(query)) for held in allowed.values()), default=0)
    found = index.find_inside(parent, query, excluded)
    if most == 0:
        assert found is None
    else:
        assert found is not None
        assert found[1] == most == shared(allowed[found[0]], tuple(query))
