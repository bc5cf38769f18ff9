"""Tables of images."""

import pandas as pd
import pytest

from pseudoloss.data import ReadOptions, find_source
from pseudoloss.data.sources.table import table_files
from pseudoloss.errors import InputError

ALL = ReadOptions(hold_out=0)
FOUR = ("0.png", "1.png", "in/2.png", "in/3.png")


@pytest.fixture
def table(photos):
    """Writes a table beside four images."""
    folder = photos(*FOUR)

    def write(content, name="t.csv"):
        path = folder / name
        if isinstance(content, pd.DataFrame):
            content.to_parquet(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_csv(table):
    found = find_source(table("path,label\n0.png,cat\n1.png,dog\nin/2.png,cat\n"), ALL)
    assert found.train.names == ("0.png", "1.png", "in/2.png")
    assert found.train.labels == ("cat", "dog", "cat")
    assert found.test is None


def test_tsv_and_parquet(table):
    rows = pd.DataFrame({"path": ["0.png", "1.png"], "label": ["a", "b"]})
    tsv = table("path\tlabel\n0.png\ta\n1.png\tb\n", "t.TSV")
    for path in (tsv, table(rows, "t.parquet")):
        assert find_source(str(path), ALL).train.labels == ("a", "b")


def test_other_column_names(table):
    path = table("file,kind,part,label\n0.png,a,train,x\n1.png,b,train,x\n")
    options = ReadOptions(path_column="file", label_column="kind", split_column="part", hold_out=0)
    assert find_source(path, options).train.labels == ("a", "b")


@pytest.mark.parametrize("kind", ["int64", "float64", "Int64", "category", "str"])
def test_labels_can_be_whole_numbers(table, kind):
    rows = pd.DataFrame({"path": ["0.png", "1.png", "in/2.png"], "label": [10, 3, 10]})
    rows["label"] = rows["label"].astype(kind)
    found = find_source(table(rows, "t.parquet"), ALL)
    assert found.train.labels == ("10", "3", "10")
    assert found.classes == ("3", "10")


def test_paths_are_relative_to_the_table_or_absolute(table, photos, tmp_path, monkeypatch):
    other = photos("x.png", root="elsewhere") / "x.png"
    path = table(f"path,label\n0.png,a\n{other},b\n../elsewhere/x.png,b\n")
    monkeypatch.chdir(tmp_path)
    found = find_source("photos/t.csv", ALL)
    assert found.train.names == ("0.png", str(other), "../elsewhere/x.png")
    assert found.skipped == ()
    assert path.parent.name == "photos"


def test_quotes_commas_and_a_byte_order_mark(table, photos):
    photos("a, b.png", "~x.png", " y.png", 'q"q.png', "two\nlines.png")
    found = find_source(
        table(
            b'\xef\xbb\xbfpath,label\n"a, b.png","cat, large"\n~x.png, dog \n y.png,dog\n'
            b'"q""q.png",dog\n"two\nlines.png",\xc3\xa9t\xc3\xa9\n'
        ),
        ALL,
    )
    assert found.skipped == ()
    assert found.train.labels == ("cat, large", "dog", "dog", "dog", "été")


def test_spaces_around_cells_and_duplicate_columns(table):
    found = find_source(table("path , label,note,note\n 0.png, cat,x,\n1.png , dog ,y,\n"), ALL)
    assert (found.train.names, found.train.labels) == (("0.png", "1.png"), ("cat", "dog"))
    with pytest.raises(InputError, match=r"t.csv: has two columns label; rename one of them"):
        find_source(table("path , label,label\n 0.png, cat,x\n1.png , dog ,y\n"), ALL)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_refused(table, encoding):
    path = table("")
    path.write_bytes("\ufeffpath,label\n0.png,cat, a\n".encode(encoding))
    with pytest.raises(InputError, match=r"t.csv: is in UTF-16; save it as UTF-8"):
        find_source(path, ALL)


def test_paths_can_start_with_the_home_folder(table, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = table("path,label\n~/photos/0.png,a\n ~/photos/1.png,b\n")
    found = find_source(path, ALL)
    assert (found.train.names, found.skipped) == (("0.png", "1.png"), ())
    assert list(found.train.paths) == table_files(path, "path", "t.csv")


def test_labels_that_pandas_reads_as_missing(table):
    found = find_source(table("path,label\n0.png,NA\n1.png,null\nin/2.png,007\n"), ALL)
    assert found.train.labels == ("NA", "null", "007")


def test_splits(table):
    text = "path,label,split\n0.png,a,train\n1.png,b,Training\nin/2.png,a,VALID\nin/3.png,b,test\n"
    found = find_source(table(text))
    assert found.train.names == ("0.png", "1.png")
    assert found.test.names == ("in/2.png",)
    assert found.test_name == "the val images"


def test_missing_files_are_skipped_with_a_reason(table):
    path = table("path,label\n0.png,a\n1.png,b\nno.png,b\nin,b\n")
    found = find_source(path, ALL)
    assert [vars(entry) for entry in found.skipped] == [
        {"path": "no.png", "reason": "No such file or directory"},
        {"path": "in", "reason": "Is a directory"},
    ]
    with pytest.raises(InputError, match=r"no.png cannot be read .* without --strict"):
        find_source(path, ReadOptions(strict=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,label\n0.png,a\n", r"has no column path \(see --path-column\); known: file, label"),
        ("path,lable\n0.png,a\n", r"no column label \(see --label-column\); did you mean lable"),
        ("file,label\n0.png,a\n", "has no column path"),
        ("path,label\n0.png,a\n1.png,\n", "t.csv: row 2: label is empty"),
        ("path,label\n ,a\n", "t.csv: row 1: path is empty"),
        ("path,label,split\n0.png,a,\n", "t.csv: row 1: split is empty"),
        ("path,label,split\n0.png,a,dev\n", "row 1: split must be train, val or test, not dev"),
        ("path,label,split\n0.png,a,test\n", "has no images to train on, only test"),
        ("path,label\n", "has no rows"),
        (
            "path,label\n0.png,a\n1.png,b,c,d\n",
            "t.csv: row 2 has 4 fields, but there are 2 columns",
        ),
        (
            "path,label\n0.png,a,x\n1.png,b,x\n",
            "t.csv: row 1 has 3 fields, but there are 2 columns",
        ),
        ("label,path\n0.png,a,1.png\n", "row 1 has 3 fields"),
        ('path,label\n"0.png,a\n', "cannot be read"),
        ("", "is empty"),
        ("path;label\n0,1.png;a\n", "separated by semicolons; save it with commas"),
        ("path\tlabel\n0.png\ta\n", "separated by tabs; save it with commas"),
        (b"path,label\ncaf\xe9.png,a\n", "line 2 is not UTF-8"),
        ("path,label\nno.png,a\n", r"no images can be read \(no.png: No such file"),
        ("path,label\n0.png,a\n1.png,b\n".encode("utf-16"), "t.csv: "),
    ],
)
def test_invalid_tables_are_refused(table, content, message):
    with pytest.raises(InputError, match=message) as error:
        find_source(table(content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet"])
def test_missing_tables_and_folders_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=f"{name}: no such file"):
        find_source(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"{name}: "):
        find_source(tmp_path / name)


def test_broken_parquet_and_missing_labels_are_refused(table):
    with pytest.raises(InputError, match=r"t.parquet: cannot be read"):
        find_source(table("no parquet", "t.parquet"))
    rows = pd.DataFrame({"path": ["0.png", "1.png"], "label": pd.array([1, None], dtype="Int64")})
    with pytest.raises(InputError, match=r"row 2: label is empty"):
        find_source(table(rows, "t.parquet"))


def test_missing_split_column_is_refused(table):
    path = table("path,label,part\n0.png,a,train\n")
    with pytest.raises(InputError, match=r"no column prt .*; did you mean part"):
        find_source(path, ReadOptions(split_column="prt"))
