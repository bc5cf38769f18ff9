"""The cache of features: what is found is what was added, whatever happens to the files."""

import os
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.auditing import cache as caching
from pseudoloss.auditing.cache import FeatureCache, digest_of

WIDTH = 5


def row(i):
    return np.random.default_rng(i).standard_normal(WIDTH).astype(np.float16)


def digest(i):
    return digest_of(str(i).encode())


def fill(folder, numbers):
    cache = FeatureCache(folder, WIDTH)
    for i in numbers:
        cache.add(digest(i), row(i))
    cache.flush()
    return cache


def test_rows_are_found_again(tmp_path):
    fill(tmp_path, range(10))
    cache = FeatureCache(tmp_path, WIDTH)
    for i in range(10):
        np.testing.assert_array_equal(cache.find(digest(i)), row(i))
    assert cache.find(digest(10)) is None
    assert cache.notices == ()


def test_rows_are_found_before_they_are_written(tmp_path):
    cache = FeatureCache(tmp_path, WIDTH)
    cache.add(digest(1), row(1))
    np.testing.assert_array_equal(cache.find(digest(1)), row(1))
    assert not list(tmp_path.iterdir())


def test_full_shards_are_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "SHARD_ROWS", 4)
    cache = FeatureCache(tmp_path, WIDTH)
    for i in range(10):  # killed before it can write the last two
        cache.add(digest(i), row(i))
    found = FeatureCache(tmp_path, WIDTH)
    assert [found.find(digest(i)) is not None for i in range(10)] == [True] * 8 + [False] * 2


def test_slow_work_is_written_in_time(tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path, WIDTH)
    cache.add(digest(0), row(0))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + caching.SHARD_SECONDS + 1)
    cache.add(digest(1), row(1))
    assert FeatureCache(tmp_path, WIDTH).find(digest(0)) is not None


def test_two_writers_lose_nothing(tmp_path):
    first, second = FeatureCache(tmp_path, WIDTH), FeatureCache(tmp_path, WIDTH)
    for i in range(8):
        first.add(digest(i), row(i))
        second.add(digest(i + 4), row(i + 4))
    first.flush()
    second.flush()
    found = FeatureCache(tmp_path, WIDTH)
    for i in range(12):
        np.testing.assert_array_equal(found.find(digest(i)), row(i))


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10**6), change=st.integers(1, 255))
def test_any_changed_byte_is_noticed(tmp_path_factory, place, change):
    folder = tmp_path_factory.mktemp("cache")
    fill(folder, range(4))
    [shard] = folder.glob("*.shard")
    content = bytearray(shard.read_bytes())
    content[place % len(content)] ^= change
    shard.write_bytes(content)
    cache = FeatureCache(folder, WIDTH)
    assert all(cache.find(digest(i)) is None for i in range(4))
    assert not shard.exists()
    assert "1 damaged file" in cache.notices[0]


@settings(max_examples=20, deadline=None)
@given(length=st.integers(0, 10**6))
def test_a_truncated_shard_is_noticed(tmp_path_factory, length):
    folder = tmp_path_factory.mktemp("cache")
    fill(folder, range(4))
    [shard] = folder.glob("*.shard")
    content = shard.read_bytes()
    shard.write_bytes(content[: length % len(content)])
    cache = FeatureCache(folder, WIDTH)
    assert all(cache.find(digest(i)) is None for i in range(4))
    assert len(cache.notices) == 1


def test_a_damaged_shard_does_not_hide_an_intact_one(tmp_path):
    fill(tmp_path, [0])
    [damaged] = tmp_path.glob("*.shard")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    cache = FeatureCache(tmp_path, WIDTH)
    assert cache.find(digest(0)) is None
    cache.add(digest(0), row(0))
    np.testing.assert_array_equal(cache.find(digest(0)), row(0))
    cache.flush()
    again = FeatureCache(tmp_path, WIDTH)
    np.testing.assert_array_equal(again.find(digest(0)), row(0))
    assert again.notices == ()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    cache = fill(tmp_path / "file" / "inside", range(3))
    assert len(cache.notices) == 1
    assert "cannot be kept" in cache.notices[0]


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = fill(None, range(3))
    assert cache.find(digest(0)) is None
    assert not list(tmp_path.iterdir())


def test_old_drafts_are_removed(tmp_path):
    old, new = tmp_path / ".a.shard.draft", tmp_path / ".b.shard.draft"
    for draft in (old, new):
        draft.write_bytes(b"half")
    long_ago = time.time() - 2 * caching.OLD_DRAFT
    os.utime(old, (long_ago, long_ago))
    FeatureCache(tmp_path, WIDTH)
    assert not old.exists()
    assert new.exists()


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_digests_tell_parts_apart(first, second):
    assert (digest_of(*first) == digest_of(*second)) == (first == second)
