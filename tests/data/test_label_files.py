"""Labels from files: human annotations and tables."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pseudoloss.data import arrays, corrupt
from pseudoloss.errors import InputError

CLEAN = np.arange(40) % 4


def image_set(paths=None, names=("ant", "bee", "cat", "dog"), truth=CLEAN):
    images = np.zeros((40, 8, 8), np.uint8)
    return arrays(images, CLEAN, classes=names, paths=paths, true_labels=truth).train


# ------------------------------------------------------------------------------------- human


@pytest.fixture
def human_file(tmp_path):
    """Writes a file like those of CIFAR-N; a key with the value None is omitted."""

    def write(**changes):
        content = {"clean_label": CLEAN, "noisy_label": (CLEAN + (np.arange(40) < 10)) % 4}
        content = {key: value for key, value in (content | changes).items() if value is not None}
        torch.save(content, tmp_path / "human.pt")
        return f"human:{tmp_path}/human.pt"

    return write


def test_human_labels(human_file):
    noisy = corrupt(image_set(), human_file(), 1)
    assert noisy.noise == {"in": 0.25, "out": 0}
    assert torch.equal(noisy.true_N, torch.from_numpy(CLEAN))
    other_seed = corrupt(image_set(), human_file(), 2)
    assert torch.equal(other_seed.given_N, noisy.given_N)


def test_human_labels_can_be_chosen_by_name(human_file):
    aggregated = (CLEAN + (np.arange(40) < 2)) % 4
    noise = human_file(noisy_label=None, worse_label=(CLEAN + 1) % 4, aggre_label=aggregated)
    assert corrupt(image_set(), noise, 1).noise_rate == 1  # worse_label is the default
    assert corrupt(image_set(), f"{noise}:aggre_label", 1).noise_rate == 0.05
    with pytest.raises(InputError, match=r"has no agre_label; did you mean aggre_label"):
        corrupt(image_set(), f"{noise}:agre_label", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clean_label": None}, "has no clean_label"),
        ({"noisy_label": None}, "has no noisy_label"),
        (
            {"clean_label": np.roll(CLEAN, 1)},
            r"not those of the source \(40 differ, first for image 0\)",
        ),
        ({"clean_label": CLEAN[:39]}, "clean_label: must be 40 whole numbers"),
        ({"noisy_label": CLEAN / 2}, "noisy_label: must be 40 whole numbers"),
        ({"noisy_label": CLEAN + 1}, r"noisy_label: 4 of image 3 is not a class \(0 to 3\)"),
        ({"noisy_label": CLEAN * 0}, "all labels are of one class"),
    ],
)
def test_invalid_human_labels_are_refused(human_file, changes, message):
    with pytest.raises(InputError, match=rf"--corrupt human:.*{message}"):
        corrupt(image_set(), human_file(**changes), 1)


def test_missing_human_labels_name_the_download_page():
    with pytest.raises(InputError, match=r"CIFAR-100_human.pt; .*http://www.noisylabels.com"):
        corrupt(image_set(), "human:nowhere.pt", 1)


# ------------------------------------------------------------------------------------- tables


@pytest.fixture
def table(tmp_path):
    def write(text):
        path = tmp_path / "labels.csv"
        path.write_text(text)
        return f"labels:{path}"

    return write


def rows(header, keys, labels):
    return "\n".join([header, *(f"{k},{label}" for k, label in zip(keys, labels, strict=True))])


def test_table_by_index_in_any_order(table):
    order = np.random.default_rng(0).permutation(40)
    labels = (CLEAN + 1) % 4
    noisy = corrupt(image_set(), table(rows("index,label", order, labels[order])), 1)
    assert noisy.given_N.tolist() == labels.tolist()
    assert torch.equal(noisy.true_N, torch.from_numpy(CLEAN))
    assert noisy.noise_rate == 1


def test_table_by_path_with_extra_columns(table):
    paths = [f"a,b/{i}.png" for i in range(40)]
    text = "note,label,path\n" + "".join(
        f'x,{"bee" if i else "dog"},"{path}"\n' for i, path in enumerate(paths)
    )
    clean = image_set(paths)
    with pytest.raises(InputError, match="class ant has no image"):
        corrupt(clean, table(text), 1)
    labels = [("ant", "bee", "cat", "dog")[(i + 1) % 4] for i in range(40)]
    text = "path,label\n" + "".join(
        f'"{path}",{label}\n' for path, label in zip(paths, labels, strict=True)
    )
    assert corrupt(clean, table(text), 1).given_N.tolist() == ((CLEAN + 1) % 4).tolist()


def test_unique_paths_take_precedence_over_indices(table):
    """An index can mean another image after files were added or removed. In CIFAR, two images can
    have the same path."""
    labels = (CLEAN + 1) % 4
    shifted = [*range(1, 40), 0]
    for paths, of_row in (
        ([f"{i}.png" for i in range(40)], list(range(40))),
        (["same.png"] * 2 + [f"{i}.png" for i in range(38)], shifted),
    ):
        text = "index,path,label\n" + "".join(
            f"{index},{path},{label}\n"
            for index, path, label in zip(shifted, paths, labels, strict=True)
        )
        given = corrupt(image_set(paths), table(text), 1).given_N
        assert given[of_row].tolist() == labels.tolist()


def test_class_names_take_precedence_over_numbers(table):
    """The classes are called 3, 2, 1, 0."""
    clean = image_set(names=("3", "2", "1", "0"))
    noisy = corrupt(clean, table(rows("index, label", range(40), CLEAN)), 1)
    assert noisy.given_N.tolist() == (3 - CLEAN).tolist()


def test_spaces_around_cells_are_ignored_unless_a_name_has_them(table):
    for labels in ([f" {label} " for label in CLEAN], [f" {'abcd'[label]}" for label in CLEAN]):
        clean = image_set([f"{i}.png" for i in range(39)] + [" x.png"], names=("a", " b", "c", "d"))
        for header, keys in (("index, label", range(40)), ("path ,label", clean.paths)):
            noisy = corrupt(clean, table(rows(header, [f"{key}" for key in keys], labels)), 1)
            assert noisy.given_N.tolist() == CLEAN.tolist()


def test_table_does_not_set_true_labels(table):
    unknown = replace(image_set(), true_N=None)
    noisy = corrupt(unknown, table(rows("index,label", range(40), (CLEAN + 1) % 4)), 1)
    assert noisy.true_N is None
    assert noisy.noise_rate is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index,lable\n0,1", "needs the columns index,label or path,label"),
        ("", "is empty"),
        (
            rows("index,label", range(39), CLEAN[:39]),
            r"1 images have no row \(the first has the index 39\)",
        ),
        (rows("index,label", [*range(40), 7], [*CLEAN, 1]), "the index 7 has 2 rows"),
        (
            rows("index,label", [*range(39), 99], CLEAN),
            "row 40: no image that is trained on or held out has the index 99",
        ),
        (rows("index,label", range(40), [*CLEAN[:39], "dgo"]), "row 40: dgo is not a class"),
        (rows("index,label", range(40), [*CLEAN[:39], 9]), "row 40: 9 is not a class"),
        (rows("index,label", range(40), [*CLEAN[:39], " "]), "row 40: label is empty"),
        ("index,label\n0,1,9\n1,1,9", "row 1 has 3 fields, but there are 2 columns"),
        (rows("index,label", range(40), [*CLEAN[:39], "1,9"]), "row 40 has 3 fields"),
        ("index,label, label\n0,1,2", "has two columns label; rename one of them"),
        (rows("path,label", range(40), CLEAN), "have no paths; use the column index"),
    ],
)
def test_invalid_tables_are_refused(table, text, message):
    with pytest.raises(InputError, match=rf"--corrupt labels:.*{message}") as error:
        corrupt(image_set(), table(text), 1)
    assert "\n" not in str(error.value)


def test_missing_table():
    with pytest.raises(InputError, match=r"--corrupt labels:nowhere.csv: no such file"):
        corrupt(image_set(), "labels:nowhere.csv", 1)
