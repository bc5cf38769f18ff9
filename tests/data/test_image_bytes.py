"""Any bytes as an image: pixels of the right shape, or a reason of one line."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pseudoloss.data.decoding import Item, Limits, Reader, UnreadableError, full_pixels, header

LIMITS = Limits(1, 0.5)
READER = Reader(3, (8, 8), limits=LIMITS)
FORMS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")


def file_of(form):
    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, form)
    return content.getvalue()


FILES = {form: file_of(form) for form in FORMS}


def check(content):
    for call in (READER.decode, lambda x: full_pixels(x, 8, LIMITS), lambda x: header(item(x))):
        try:
            found = call(content)
        except UnreadableError as error:
            reason = str(error)
            assert reason
            assert len(reason.splitlines()) == 1
        else:
            if isinstance(found, np.ndarray):
                assert (found.shape, found.dtype) == ((3, 8, 8), np.uint8)


def item(content):
    return Item(lambda: content)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", *(file[:12] for file in FILES.values())]))
def test_any_bytes(content, start):
    check(start + content)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=4),
    st.floats(0.2, 1),
)
def test_damaged_files(form, changes, kept):
    content = bytearray(FILES[form])
    for place, value in changes:
        at = int(place * (len(content) - 1))
        content[at : at + len(value)] = value
    check(bytes(content[: max(1, int(kept * len(content)))]))


@pytest.mark.parametrize("form", FORMS)
def test_whole_files_are_read(form):
    assert header(item(FILES[form]))[:2] == (14, 12)
    assert READER.decode(FILES[form]).shape == (3, 8, 8)
