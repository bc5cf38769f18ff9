"""Web-aircraft, Web-bird and Web-car: images that a search engine found, at 512 pixels."""

from pathlib import Path

from pseudoloss.data.decoding import Reader
from pseudoloss.data.scanning import LabelledFiles, Parts, Recipe, name_of
from pseudoloss.errors import InputError
from pseudoloss.paths import at_home

READER = Reader(3, (512, 512), "published-crop")  # row 21
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's: pretrained networks' own
LAYOUT = "train-list.txt and val-list.txt, with lines such as train/a.jpg:3, and the images"
OWNERS = (
    "its owners publish it at "
    "https://github.com/NUST-Machine-Intelligence-Laboratory/weblyFG-dataset"
)


def web(name: str, folder: str) -> Parts:
    """One of the three. Which of its labels are right is not known; the test images' are."""
    spec = f"{name}:{folder}"
    root = at_home(folder)
    if not folder or not root.is_dir():
        raise InputError(f"{spec}: no such folder; it should hold {LAYOUT}; {OWNERS}")
    listed = {"train": _listed(root, "train", spec), "test": _listed(root, "val", spec)}
    return Parts(name, listed, Recipe(READER, MEAN, STD, preset=name))


def _listed(root: Path, part: str, spec: str) -> LabelledFiles:
    """The images of a list, with their classes. Paths begin in the folder itself or in its part."""
    path = root / f"{part}-list.txt"
    try:
        lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    except OSError as error:
        raise InputError(
            f"{spec}: {path} cannot be read ({error.strerror}); {root} should hold {LAYOUT}; "
            f"{OWNERS}"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{spec}: {path} is not text") from None
    paths, labels = [], []
    for row, line in enumerate(lines, 1):
        name, colon, label = line.strip().rpartition(":")
        if not colon or not name or not label.strip():
            raise InputError(f"{spec}: {path}: line {row} is not PATH:CLASS")
        candidates = (root / name.strip(), root / part / name.strip())
        found = next((image for image in candidates if image.is_file()), None)
        if found is None:
            raise InputError(f"{spec}: {path}: line {row}: {candidates[0]} is missing; {OWNERS}")
        paths.append(found)
        labels.append(label.strip())
    if not paths:
        raise InputError(f"{spec}: {path} is empty; {OWNERS}")
    return LabelledFiles(tuple(paths), tuple(name_of(path, root) for path in paths), tuple(labels))
