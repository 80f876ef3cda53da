from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.cache import CacheChange, CacheChangeKind, CacheTier, pack_hashes, unpack_hashes

HASHES = st.lists(st.integers(min_value=0, max_value=(1 << 63) - 1), max_size=20)


@given(hashes=HASHES)
def test_hashes_come_back_as_they_were_packed(hashes: list[int]) -> None:
    packed = pack_hashes(hashes)
    assert list(unpack_hashes(packed)) == hashes
    assert packed == b"".join(hash_.to_bytes(8, "little") for hash_ in hashes)


def test_hashes_that_do_not_fit_are_not_packed() -> None:
    with pytest.raises(OverflowError):
        pack_hashes([1 << 63])


@given(packed=st.binary(max_size=40))
def test_only_whole_hashes_are_unpacked(packed: bytes) -> None:
    if len(packed) % 8:
        with pytest.raises(ValueError, match=f"got {len(packed)} bytes, expected a multiple of 8"):
            unpack_hashes(packed)
    else:
        assert len(unpack_hashes(packed)) == len(packed) // 8


def test_a_change_is_of_the_gpu_unless_it_says_otherwise() -> None:
    assert CacheChange(CacheChangeKind.CLEARED).tier is CacheTier.GPU
