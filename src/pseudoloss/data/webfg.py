"""Web-aircraft, Web-bird and Web-car: images that a search engine found, at 512 pixels."""

from pathlib import Path

import torch

from pseudoloss.data.decode import centre, decode, in_order
from pseudoloss.data.images import Data, ImageSet
from pseudoloss.errors import InputError

SIZE = 512
LAYOUT = "train-list.txt and val-list.txt, with lines such as train/a.jpg:3, and the images"
OWNERS = (
    "its owners publish it at "
    "https://github.com/NUST-Machine-Intelligence-Laboratory/weblyFG-dataset"
)


def web(name: str, folder: str) -> Data:
    """One of the three. Which of its labels are right is not known; the test images' are."""
    spec = f"{name}:{folder}"
    root = Path(folder).expanduser()
    if not folder or not root.is_dir():
        raise InputError(f"{spec}: no such folder; it should hold {LAYOUT}; {OWNERS}")
    train, test = (_listed(root, part, spec) for part in ("train", "val"))
    classes = in_order(label for _, label in train)
    place = {label: i for i, label in enumerate(classes)}
    for row, (_, label) in enumerate(test, 1):
        if label not in place:
            raise InputError(
                f"{spec}: val-list.txt: line {row}: no training image has the class {label}"
            )

    def image_set(listed: list[tuple[Path, str]]) -> ImageSet:
        paths = [path for path, _ in listed]
        pixels = decode(paths, centre(SIZE), (SIZE, SIZE), 3, spec)
        given_N = torch.tensor([place[label] for _, label in listed])
        names = tuple(str(path.relative_to(root)) for path in paths)
        return ImageSet(pixels, given_N, tuple(classes), None, names)

    return Data(
        name=name,
        train=image_set(train),
        test=image_set(test),
        mean=(0.485, 0.456, 0.406),  # ImageNet's: what pretrained networks expect
        std=(0.229, 0.224, 0.225),
        preset=name,
    )


def _listed(root: Path, part: str, spec: str) -> list[tuple[Path, str]]:
    """The images of a list, with their classes. Paths begin in the folder itself or in its part."""
    path = root / f"{part}-list.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f"{spec}: {path} cannot be read ({error.strerror}); {root} should hold {LAYOUT}; "
            f"{OWNERS}"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{spec}: {path} is not text") from None
    listed = []
    for row, line in enumerate(lines, 1):
        name, colon, label = line.strip().rpartition(":")
        if not colon or not name or not label.strip():
            raise InputError(f"{spec}: {path}: line {row} is not PATH:CLASS")
        candidates = (root / name.strip(), root / part / name.strip())
        found = next((image for image in candidates if image.is_file()), None)
        if found is None:
            raise InputError(f"{spec}: {path}: line {row}: {candidates[0]} is missing; {OWNERS}")
        listed.append((found, label.strip()))
    if not listed:
        raise InputError(f"{spec}: {path} is empty; {OWNERS}")
    return listed
