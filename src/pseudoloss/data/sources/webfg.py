"""Web-aircraft, Web-bird and Web-car: images found by a search engine, at 512 pixels."""

from pathlib import Path

from pseudoloss.data.decoding import Reader
from pseudoloss.data.scanning import FileSource, LabelledFiles, Recipe, name_of
from pseudoloss.errors import InputError, reason
from pseudoloss.files import at_home, read_text

READER = Reader(3, (512, 512), "published-crop")  # row 21
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for pretrained networks
LAYOUT = "train-list.txt and val-list.txt, with lines such as train/a.jpg:3, and the images"
OWNERS = (
    "its owners publish it at "
    "https://github.com/NUST-Machine-Intelligence-Laboratory/weblyFG-dataset"
)


def web(name: str, folder: str) -> FileSource:
    """One of the three datasets. The true labels are known for the test images only."""
    spec = f"{name}:{folder}"
    root = at_home(folder)
    if not folder or not root.is_dir():
        raise InputError(f"{spec}: no such folder; it should hold {LAYOUT}; {OWNERS}")
    splits = {"train": _read_list(root, "train", spec), "test": _read_list(root, "val", spec)}
    return FileSource(name, splits, Recipe(READER, MEAN, STD, preset=name))


def _read_list(root: Path, split: str, spec: str) -> LabelledFiles:
    """The images and classes in a list. Its paths are relative to the dataset or to the split."""
    path = root / f"{split}-list.txt"
    try:
        lines = read_text(path).rstrip().splitlines()
    except OSError as error:
        raise InputError(
            f"{spec}: {path} cannot be read ({reason(error)}); {root} should hold {LAYOUT}; "
            f"{OWNERS}"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{spec}: {path} is not text") from None
    paths, labels = [], []
    for row, line in enumerate(lines, 1):
        name, colon, label = line.strip().rpartition(":")
        if not colon or not name or not label.strip():
            raise InputError(f"{spec}: {path}: line {row} is not PATH:CLASS")
        candidates = (root / name.strip(), root / split / name.strip())
        found = next((image for image in candidates if image.is_file()), None)
        if found is None:
            raise InputError(f"{spec}: {path}: line {row}: {candidates[0]} is missing; {OWNERS}")
        paths.append(found)
        labels.append(label.strip())
    if not paths:
        raise InputError(f"{spec}: {path} is empty; {OWNERS}")
    return LabelledFiles(tuple(paths), tuple(name_of(path, root) for path in paths), tuple(labels))
