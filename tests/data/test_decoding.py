"""Decoding image files: every format and mode, and files that are not images."""

import io
import os
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps, features
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from pseudoloss.data.decoding import (
    Item,
    Reader,
    UnreadableError,
    full_pixels,
    header,
    no_warnings,
    printable,
)

READER = Reader(3, (16, 16))


def picture(width=16, height=16):
    """An image with slow colour changes, which JPEG preserves."""
    y, x = np.mgrid[0 : 1 : complex(height), 0 : 1 : complex(width)]
    return np.stack([40 + 180 * x, 200 - 150 * y, 60 + 100 * x * y], 2).astype(np.uint8)


def saved(path, image, **options):
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(path, **options)
    return path


def read(path, channels=3, size=(16, 16), fit="crop"):
    return Reader(channels, size, fit).read(path).transpose(1, 2, 0)


# --------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("name", "kind", "off"),
    [
        ("a.jpg", "JPEG", 8),
        ("a.JPEG", "JPEG", 8),
        ("a.png", "PNG", 0),
        ("a.webp", "WEBP", 0),
        ("a.bmp", "BMP", 0),
        ("a.tif", "TIFF", 0),
        ("a.ppm", "PPM", 0),
        ("no suffix", "PNG", 0),
        ("wrong.jpg", "PNG", 0),
    ],
)
def test_formats(tmp_path, name, kind, off):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(kind, {})
    path = saved(tmp_path / name, picture(), format=kind, **options)
    found = read(path)
    assert found.dtype == np.uint8
    assert np.abs(found.astype(int) - picture()).max() <= off
    assert header(path) == (16, 16, "RGB", kind)
    assert not header(path).is_grey


@pytest.mark.parametrize(("suffix", "feature"), [("jp2", "jpg_2000"), ("avif", "avif")])
def test_formats_of_some_pillow_builds(tmp_path, suffix, feature):
    if not features.check(feature):
        pytest.skip(f"this Pillow has no {suffix}")
    path = saved(tmp_path / f"a.{suffix}", picture(32, 32))
    found = read(path, size=(32, 32)).astype(int)
    assert np.abs(found - picture(32, 32)).mean() <= 4


def test_first_picture_of_a_multi_picture_jpeg(tmp_path):
    pictures = [Image.new("RGB", (40, 40), colour) for colour in ("red", "lime")]
    pictures[0].save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=pictures[1:])
    assert header(tmp_path / "a.jpg").format == "MPO"
    assert np.abs(read(tmp_path / "a.jpg")[5, 5].astype(int) - (255, 0, 0)).max() <= 3


def test_gif_colours(tmp_path):
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]], np.uint8)
    image = colours[np.arange(256).reshape(16, 16) % 4]
    path = saved(tmp_path / "a.gif", image)
    np.testing.assert_array_equal(read(path), image)


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    for name in ("a.gif", "a.webp", "a.png"):
        path = tmp_path / name
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, lossless=True)
        assert read(path)[5, 5].tolist() == [255, 0, 0], name


def test_first_page_of_a_tiff(tmp_path):
    pages = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime")]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert read(tmp_path / "a.tif")[5, 5].tolist() == [255, 0, 0]


# ----------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "gif"])
def test_grey(tmp_path, suffix):
    grey = picture()[..., 0]
    path = saved(tmp_path / f"a.{suffix}", grey)
    np.testing.assert_array_equal(read(path, channels=1)[..., 0], grey)
    np.testing.assert_array_equal(read(path)[..., 2], grey)
    assert header(path).is_grey or suffix == "gif"  # which has a palette


def test_one_bit(tmp_path):
    bits = np.indices((16, 16)).sum(0) % 3 == 0
    path = saved(tmp_path / "a.png", Image.fromarray(bits))
    assert header(path).mode == "1"
    assert header(path).is_grey
    np.testing.assert_array_equal(read(path, channels=1)[..., 0], 255 * bits)


def test_palette(tmp_path):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([1, 2, 3, 200, 100, 50])
    path = saved(tmp_path / "a.png", image)
    assert read(path)[3, 3].tolist() == [200, 100, 50]
    assert not header(path).is_grey


@pytest.mark.parametrize("transparency", [0, b"\x00\xff", b"\x00"])
def test_transparent_palette_gets_a_white_background(tmp_path, transparency):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([1, 2, 3, 200, 100, 50])
    image.paste(0, (0, 0, 8, 16))
    path = saved(tmp_path / "a.png", image, transparency=transparency)
    found = read(path)
    assert found[8, 2].tolist() == [255, 255, 255]
    assert found[8, 12].tolist() == [200, 100, 50]


def test_transparent_gif_gets_a_white_background(tmp_path):
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    image.paste((200, 0, 0, 255), (0, 0, 8, 16))
    path = saved(tmp_path / "a.gif", image)
    assert read(path)[8, [2, 12]].tolist() == [[200, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_rgba_gets_a_white_background(tmp_path, suffix):
    image = np.full((16, 16, 4), (200, 100, 0, 255), np.uint8)
    image[:, :8, 3] = 0
    image[:8, :, 3] //= 2
    options = {"lossless": True} if suffix == "webp" else {}
    path = saved(tmp_path / f"a.{suffix}", image, **options)
    found = read(path).astype(int)
    alpha = image[..., 3:] / 255
    wanted = np.rint(alpha * image[..., :3] + (1 - alpha) * 255)
    assert np.abs(found - wanted).max() <= 1


def test_transparent_grey_gets_a_white_background(tmp_path):
    image = Image.merge("LA", [Image.new("L", (16, 16), 100), Image.new("L", (16, 16), 0)])
    image.paste((100, 255), (0, 0, 8, 16))
    path = saved(tmp_path / "a.png", image)
    assert header(path).is_grey
    assert read(path, channels=1)[5, [2, 12], 0].tolist() == [100, 255]


@pytest.mark.parametrize(("mode", "colour"), [("L", 7), ("RGB", (7, 8, 9))])
def test_transparent_colour_gets_a_white_background(tmp_path, mode, colour):
    image = Image.new(mode, (16, 16), colour)
    path = saved(tmp_path / "a.png", image, transparency=colour)
    assert read(path)[5, 5].tolist() == [255, 255, 255]


def test_cmyk_colours(tmp_path):
    """An image for print: cyan is the absence of red."""
    colours = {"red": (0, 255, 255, 0), "cyan": (255, 0, 0, 0), "black": (0, 0, 0, 255)}
    wanted = {"red": (255, 0, 0), "cyan": (0, 255, 255), "black": (0, 0, 0)}
    for name, colour in colours.items():
        path = saved(tmp_path / f"{name}.jpg", Image.new("CMYK", (32, 32), colour), quality=95)
        assert header(path).mode == "CMYK"
        assert np.abs(read(path)[5, 5].astype(int) - wanted[name]).max() <= 6, name


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_grey(tmp_path, suffix):
    deep = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    path = saved(tmp_path / f"a.{suffix}", deep)
    assert header(path).is_grey
    np.testing.assert_array_equal(
        read(path, channels=1)[..., 0], np.rint(deep / 65535 * 255).astype(np.uint8)
    )


def test_big_endian_16_bit_grey(tmp_path):
    deep = np.linspace(0, 65535, 256).astype(">u2").reshape(16, 16)
    image = Image.frombytes("I;16B", (16, 16), deep.tobytes())
    path = saved(tmp_path / "a.tif", image)
    assert read(path, channels=1)[[0, 15], [0, 15], 0].tolist() == [0, 255]


def png_16_bit(rgb):
    """A PNG file with 16 bits per channel, which PIL cannot write."""
    import struct
    import zlib

    height, width, _ = rgb.shape

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rgb)
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def test_16_bit_rgb(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png_16_bit(picture().astype(np.uint16) * 257))
    np.testing.assert_array_equal(read(path), picture())


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0, 0.5, 1, 1], [0, 128, 255, 255]),  # fractions
        ([0, 100, 255, 7], [0, 100, 255, 7]),  # 8 bits
        ([0, 65535, 32768, 257], [0, 255, 128, 1]),  # 16 bits
        ([np.nan, 1, np.inf, -1], [0, 255, 0, 0]),
    ],
)
def test_floats(tmp_path, values, wanted):
    image = np.array(values, np.float32).repeat(64).reshape(16, 16)
    path = saved(tmp_path / "a.tif", image)
    assert header(path).mode == "F"
    assert read(path, channels=1)[::4, 0, 0].tolist() == wanted


# ------------------------------------------------------------------------ rotation and size


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_exif_orientation_is_applied(tmp_path, orientation, suffix):
    """Each image is stored with the inverse of its orientation."""
    inverse = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = Image.fromarray(picture(24, 16))
    stored = image.transpose(inverse[orientation]) if orientation > 1 else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"webp": {"lossless": True}, "jpg": {"quality": 95, "subsampling": 0}}
    path = saved(tmp_path / f"a.{suffix}", stored, exif=exif, **options.get(suffix, {}))
    found = read(path, size=(16, 24)).astype(int)
    assert np.abs(found - picture(24, 16)).max() <= 8


def test_broken_exif_is_ignored(tmp_path):
    path = saved(tmp_path / "a.jpg", picture(), exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff", quality=95)
    with no_warnings():
        assert np.abs(read(path).astype(int) - picture()).max() <= 8


def test_reduced_jpeg_decoding_gives_the_same_image(tmp_path):
    path = saved(tmp_path / "a.jpg", picture(640, 480), quality=92)
    image = Image.open(path)
    wanted = np.asarray(ImageOps.fit(image, (32, 32), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(read(path, size=(32, 32)) - wanted).mean() < 1
    assert np.abs(read(path, size=(32, 32)) - wanted).max() <= 6


def test_crop_keeps_the_centre_and_stretch_keeps_everything(tmp_path):
    image = np.zeros((16, 48, 3), np.uint8)
    image[:, 16:32] = 255  # a white square in the middle
    path = saved(tmp_path / "a.png", image)
    assert read(path, fit="crop").min() == 255
    stretched = read(path, fit="stretch")
    assert stretched[:, 1].max() == 0
    assert stretched[:, 8].min() == 255


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 7)])
def test_images_of_any_shape_get_the_size(tmp_path, size):
    path = saved(tmp_path / "a.png", Image.new("RGB", size, (9, 8, 7)))
    for fit in ("crop", "stretch"):
        assert (read(path, fit=fit) == (9, 8, 7)).all()


# ---------------------------------------------------------------------------------- not images


def assert_unreadable(path, reason):
    """As a file, and as bytes at full size."""
    for read_image in (READER.read, lambda path: full_pixels(path.read_bytes())):
        with pytest.raises(UnreadableError, match=reason):
            read_image(path)


def test_an_empty_file(tmp_path):
    path = tmp_path / "a.jpg"
    path.touch()
    assert_unreadable(path, "empty file")
    with pytest.raises(UnreadableError, match="empty file"):
        header(path)


@pytest.mark.parametrize("content", [b"hello, I am no image\n" * 50, b"\xff\xd8\xff", b"\x89PNG"])
def test_text_with_the_suffix_of_an_image(tmp_path, content):
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    assert_unreadable(path, "not an image")
    with pytest.raises(UnreadableError, match="not an image"):
        header(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "tif"])
def test_truncated_files(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = saved(tmp_path / f"a.{suffix}", noise).read_bytes()
    path = tmp_path / f"half.{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    assert_unreadable(path, ".")


def test_folders_and_missing_files(tmp_path):
    (tmp_path / "x.jpg").mkdir()
    for path, reason in ((tmp_path / "x.jpg", "s a directory"), (tmp_path / "no.jpg", "No such")):
        for read_image in (READER.read, header):
            with pytest.raises(UnreadableError, match=reason):
                read_image(path)


def test_unsupported_formats(tmp_path):
    """PIL would start Ghostscript for EPS files."""
    path = saved(tmp_path / "a.eps", picture())
    with pytest.raises(UnreadableError, match="the format EPS is not supported"):
        header(path)
    assert_unreadable(path, "the format EPS is not supported")


def bomb(width, height):
    """A PNG that claims to be huge."""
    import struct
    import zlib

    content = bytearray(png_16_bit(picture().astype(np.uint16)))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    return bytes(content)


def test_decompression_bombs_are_refused(tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(100_000, 100_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_unreadable(path, "too many pixels")
        with pytest.raises(UnreadableError, match="too many pixels"):
            header(path)


def test_large_images_give_no_warning(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(bomb(10_000, 10_000))
    with warnings.catch_warnings(record=True) as caught, no_warnings():
        assert header(path)[:2] == (10_000, 10_000)
    assert caught == []


# --------------------------------------------------------------------------------------- items


def test_items_with_bytes_or_images(tmp_path):
    path = saved(tmp_path / "a.png", picture())
    items = [Item(path.read_bytes), Item(lambda: Image.fromarray(picture()))]
    for item in items:
        np.testing.assert_array_equal(READER.read(item).transpose(1, 2, 0), picture())
        assert header(item)[:3] == (16, 16, "RGB")
    known = Item(lambda: pytest.fail("was loaded"), header(path))
    assert header(known) == header(path)


def test_reading_an_item_does_not_close_its_image():
    image = Image.fromarray(picture())
    for _ in range(2):  # the second read fails if the first closed the image
        READER.read(Item(lambda: image))
    assert image.getpixel((0, 0)) == tuple(picture()[0, 0])


def test_full_pixels(tmp_path):
    content = io.BytesIO()
    Image.fromarray(picture(40, 30)).save(content, "BMP")
    found, image = full_pixels(content.getvalue())
    assert found == (40, 30, "RGB", "BMP")
    np.testing.assert_array_equal(np.asarray(image), picture(40, 30))


def test_paths_of_any_bytes_are_printable():
    assert printable("a b\n'\"😀.jpg") == "a b\n'\"😀.jpg"
    assert printable(b"caf\xe9.jpg".decode("utf-8", "surrogateescape")) == r"caf\xe9.jpg"


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_pipes_do_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read_image in (header, Reader(3, (8, 8)).read):
        with pytest.raises(UnreadableError, match="a pipe, not a file"):
            read_image(tmp_path / "pipe")


def test_published_crop_equals_torchvision():
    """The shorter side is resized, then the centre is cropped."""
    random = np.random.default_rng(0)
    for size in ((90, 60), (41, 77), (64, 64), (300, 40)):
        image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
        ours = Reader(3, (64, 64), "published-crop").pixels(image)
        theirs = np.asarray(Compose([Resize(64, InterpolationMode.BICUBIC), CenterCrop(64)])(image))
        np.testing.assert_array_equal(ours.transpose(1, 2, 0), theirs)
