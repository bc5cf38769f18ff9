import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pseudoloss.cli.inspection import inspect
from pseudoloss.cli.inspection_report import report
from pseudoloss.cli.near_duplicates import BITS, MOST_DIFFERENT, difference_hash, near_groups


def picture(seed, size=64):
    """Smooth random shapes, as in photographs."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return small.resize((size, size), Image.Resampling.BICUBIC)


@given(st.lists(st.sets(st.integers(0, BITS - 1), max_size=8), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_groups_are_those_of_all_pairs(flipped):
    """The slow way: the connected parts of the graph of all near pairs."""
    base = np.random.default_rng(0).integers(0, 2, BITS)
    bits = np.array([[bit ^ (k in some) for k, bit in enumerate(base)] for some in flipped])
    near = (bits[:, None] != bits[None]).sum(2) <= MOST_DIFFERENT
    for _ in bits:
        near = (near.astype(int) @ near.astype(int)) > 0
    wanted = sorted({tuple(np.flatnonzero(row)) for row in near if row.sum() > 1})
    hashes = [np.packbits(row.astype(np.uint8)).tobytes() for row in bits]
    assert near_groups(hashes) == [list(group) for group in wanted]


def test_flat_images_have_no_hash():
    assert difference_hash(Image.new("RGB", (20, 20), (9, 80, 3))) == b""
    assert near_groups([b"", b"", b""]) == []


@pytest.mark.parametrize("seed", range(5))
def test_resized_and_brighter_pictures_are_near_and_others_are_not(seed):
    whole = picture(seed)
    changed = [
        whole.resize((40, 40), Image.Resampling.BICUBIC),
        whole.point(lambda value: min(255, value + 6)),
    ]
    pictures = [picture(seed + 100), whole, *changed, picture(seed + 200)]
    assert near_groups([difference_hash(each) for each in pictures]) == [[1, 2, 3]]


def test_inspect_lists_near_duplicates_with_different_labels_first(tmp_path):
    for name, seed in (("a/1", 1), ("a/2", 2), ("a/3", 3), ("b/4", 4), ("b/5", 5), ("b/6", 6)):
        file = tmp_path / "photos" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(seed).save(file)
    picture(1).resize((40, 40)).save(tmp_path / "photos" / "a" / "copy of 1.png")
    picture(2).save(tmp_path / "photos" / "b" / "copy of 2.jpg", quality=90)
    found = inspect(tmp_path / "photos", hold_out=0)
    near = found.duplicates.near
    assert (near.pictures, near.images) == (2, 4)
    shown = [{image["image"] for image in group} for group in near.examples]
    assert shown == [{"a/2.png", "b/copy of 2.jpg"}, {"a/1.png", "a/copy of 1.png"}]
    assert "2 pictures in nearly the same form more than once; different labels first" in report(
        found
    )
    assert "duplicates no exact copies" in report(found)


def test_class_counts_include_held_out_images(photos):
    folder = photos(*[f"{label}/{i}.png" for label in "ab" for i in range(10)])
    found = inspect(folder, hold_out=0.2)
    assert found.held_out
    assert (found.train, found.test) == (16, 4)
    assert found.classes == {"a": 10, "b": 10}
