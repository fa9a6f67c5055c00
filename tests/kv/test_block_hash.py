"""Names of blocks: equal for equal content with equal history and keys, and for nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxpage.kv import block_hash as module
from jaxpage.kv.block_hash import block_hash, root_hash


def names(token_ids: list[int], block_size: int, salt: str | None = None) -> list[bytes]:
    parent, result = root_hash(cache_salt=salt), []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        result.append(parent)
    return result


def test_equal_content_has_equal_names() -> None:
    assert names([1, 2, 3, 4], 2) == names([1, 2, 3, 4], 2)
    assert names([1, 2, 3, 4], 2)[0] == names([1, 2, 9, 9], 2)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 23], [12, 3]),
        ([0, 1], [1, 0]),
        ([256, 0], [1, 0]),
        ([256, 0], [0, 1]),
        ([0], [0, 0]),
        ([2**31], [-(2**31)]),
    ],
)
def test_pfx_3a_token_lists_that_look_alike_when_joined(first: list[int], second: list[int]) -> None:
    assert block_hash(root_hash(), first) != block_hash(root_hash(), second)


def test_salts_share_nothing() -> None:
    roots = [root_hash(cache_salt=salt) for salt in (None, "", "none", "a", "b", "block")]
    assert len(set(roots)) == len(roots)
    assert root_hash(cache_salt="a") == root_hash(cache_salt="a")
    assert not set(names([1, 2, 3, 4], 2, "a")) & set(names([1, 2, 3, 4], 2, "b"))


def test_pfx_3_keys_of_different_meaning_do_not_meet() -> None:
    keys = [
        {},
        {"model": "a"},
        {"adapter": "a"},
        {"cache_salt": "a"},
        {"model": "a", "adapter": "a"},
        {"model": "a", "cache_salt": "a"},
        {"adapter": "a", "cache_salt": "a"},
        {"model": "a", "adapter": "", "cache_salt": ""},
        {"model": "adapter:1:a"},
        {"model": "cache_salt:1:a"},
        {"model": "1:aadapter"},
        {"cache_salt": "\ud800"},
    ]
    assert len({root_hash(**key) for key in keys}) == len(keys)


def test_a_root_is_no_block() -> None:
    """Not even a block with no tokens, or one whose tokens spell a root's keys."""
    assert root_hash() != block_hash(b"", [])
    assert block_hash(root_hash(), []) != root_hash()


def test_pfx_3_a_name_covers_everything_before_the_block() -> None:
    assert names([1, 2, 7, 8], 2)[1] != names([3, 4, 7, 8], 2)[1]
    assert names([7, 8, 7, 8], 2)[0] != names([7, 8, 7, 8], 2)[1]


def test_pfx_3_names_of_many_blocks_differ() -> None:
    """128 bits of a keyed hash: no need to compare the tokens on a hit."""
    root = root_hash()
    hashes = {block_hash(root, [first, second]) for first in range(100) for second in range(100)}
    assert len(hashes) == 10_000
    assert {len(name) for name in hashes} == {16}


def test_every_process_has_its_own_key() -> None:
    program = "from jaxpage.kv.block_hash import root_hash; print(root_hash().hex())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() != root_hash().hex()
    assert len(module._KEY) == 32
