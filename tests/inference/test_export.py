"""Exported models predict what the original predicts; onnxruntime and Pillow are the oracles."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image, ImageOps

from pseudoloss.cli import main
from pseudoloss.cli.export import export_run
from pseudoloss.errors import ExportError, InputError
from pseudoloss.inference import export, export_files
from pseudoloss.inference.export import compare
from pseudoloss.inference.export_files import centre_crop, preprocessing
from pseudoloss.inference.model import Description, Model, load_model
from pseudoloss.nn import networks
from pseudoloss.runs import open_model

CLASSES = ("a", "b", "c", "d")


def make_model(tmp_path, network, channels=3, stored=(36, 40), size=(32, 32)):
    """An untrained model with non-trivial running statistics and preprocessing, whose predictions
    differ from image to image (those of deep networks hardly do before training)."""
    statistics = ((0.4, 0.5, 0.3)[:channels], (0.2, 0.25, 0.3)[:channels])
    description = Description(network, CLASSES, channels, stored, size, *statistics, 16)
    torch.manual_seed(0)
    built = networks.build(network, channels=channels, size=size, classes=4, projection=16)
    built.train()
    with torch.no_grad():
        for _ in range(3):
            built(torch.randn(8, channels, *size))
    Model(description, built, None).save(tmp_path / "x.safetensors")
    model = load_model(tmp_path / "x.safetensors")
    with torch.no_grad():
        classifier = model.network.classifier
        logits = model.network(model.views.plain(torch.from_numpy(noise(16, channels, stored))))[0]
        classifier.weight /= logits.std(0).mean()
        classifier.bias.copy_((classifier.bias - logits.mean(0)) / logits.std(0).mean())
    return model


def noise(n, channels, size, seed=1):
    """Images of noise, each brighter than the previous one."""
    images = np.random.default_rng(seed).integers(0, 256, (n, channels, *size))
    return (images * np.linspace(0.2, 1, n)[:, None, None, None]).astype(np.uint8)


def cropped(model, images_NCHW):
    top, left, height, width = centre_crop(model.description)
    part = images_NCHW[:, :, top : top + height, left : left + width]
    return part.astype(np.float32) / 255


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
@pytest.mark.parametrize(
    ("network", "channels"),
    [
        ("small-cnn", 1),
        ("preactresnet18", 3),
        ("preactresnet18-stemnorm", 3),
        ("preactresnet18-released", 3),
        ("resnet10t", 3),
        ("mobilenetv3_small_050", 1),
    ],
)
def test_every_kind_of_network(network, channels, form, tmp_path, capfd):
    model = make_model(tmp_path, network, channels)
    path = tmp_path / export.FILES[form]
    with export.silence():
        (export._write_onnx if form == "onnx" else export._write_torchscript)(model, path)
    assert compare(path, form, model) < 1e-5
    images = noise(7, channels, (36, 40), seed=2)
    wanted = model.predict_proba(images)
    assert wanted.std(0).max() > 1e-2  # not the same prediction for all
    for n in (1, 2, 7):  # any number of images
        pixels = cropped(model, images[:n])
        if form == "onnx":
            (found,) = onnxruntime.InferenceSession(path).run(["probabilities"], {"images": pixels})
        else:
            found = torch.jit.load(path)(torch.from_numpy(pixels)).detach().numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted[:n], atol=1e-5)
    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def exported(photo_run, tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    return {form: export_run(photo_run, root / form, form) for form in export.FILES}


@pytest.fixture
def photo(photo_folder):
    return next((photo_folder / "test").rglob("*.jpg"))


def test_files_of_an_export(exported, photo_run):
    model = open_model(photo_run)
    for form, found in exported.items():
        names = {"README.md", "classes.json", "preprocessing.json", export.FILES[form]}
        names |= set() if form == "safetensors" else {"predict.py", "image_files.py"}
        assert {path.name for path in found.path.iterdir()} == set(found.files) == names
        assert json.loads((found.path / "classes.json").read_text()) == list(model.classes)
        assert found.difference < 1e-5
    assert [path.name for path in found.path.parent.iterdir() if path.name.startswith(".")] == []


def test_graph_contains_no_paths_of_this_machine(exported):
    graph = (exported["onnx"].path / "model.onnx").read_bytes()
    assert str(networks.__file__).encode() not in graph


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_predict_program_works_without_pseudoloss(form, exported, photo_run, photo_folder):
    paths = sorted(str(path) for path in (photo_folder / "test").rglob("*.*"))
    block = "import sys, runpy; sys.modules['pseudoloss'] = None; "
    program = f"{block}runpy.run_path('predict.py', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", program, *paths],
        cwd=exported[form].path,
        capture_output=True,
        text=True,
        check=True,
    )
    table = open_model(photo_run).predict_files(paths)
    lines = [
        f"{row.path} {row.label} {row.probability:.4f}" for row in table.itertuples(index=False)
    ]
    assert result.stdout.splitlines() == lines
    assert result.stderr == ""
    command = shlex.join([sys.executable, "-c", program, *paths * 3])
    shell = ["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"]
    short = subprocess.run(shell, cwd=exported[form].path, capture_output=True, text=True)
    assert (short.returncode, short.stdout, short.stderr) == (0, lines[0] + "\n", "")


def test_predict_program_shows_control_characters(exported, photo, tmp_path):
    folder = shutil.copytree(exported["torchscript"].path, tmp_path / "export")
    classes = json.loads((folder / "classes.json").read_text())
    (folder / "classes.json").write_text(json.dumps([f"{name}\x1b]0;x\x07" for name in classes]))
    names = ["a\x1b]0;x\x07\u202e.jpg", "broken\x9b31m.jpg", "übel\u200c.jpg"]
    for name in names:
        (tmp_path / name).write_bytes(b"no image" if name[0] == "b" else photo.read_bytes())
    command = [sys.executable, "export/predict.py", *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr)
    first, second = done.stdout.splitlines()
    assert first.startswith(r"a\u001b]0;x\u0007\u202e.jpg ")
    assert r"\u001b]0;x\u0007 0." in first or r"\u001b]0;x\u0007 1." in first
    assert second.startswith("übel\u200c.jpg ")
    assert done.stderr.startswith(r"broken\u009b31m.jpg: skipped (")


@pytest.mark.parametrize("form", list(export.FILES))
def test_snippet_of_the_model_card_runs(form, exported, photo_run, photo, tmp_path):
    card = (exported[form].path / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    for path in exported[form].path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "photo.jpg").write_bytes(photo.read_bytes())
    result = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    label = open_model(photo_run).predict_files(photo)["label"][0]
    assert label in result.stdout


def test_model_card_describes_the_training(exported, photo_run):
    card = (exported["onnx"].path / "README.md").read_text()
    summary = json.loads((photo_run / "summary.json").read_text())
    assert f"{summary['accuracy']['last']:.2f}% after the last epoch" in card
    assert f"is not known: {summary['estimated_noise']['reasons'][0]}." in card
    assert "36 training images" in card
    assert "pls, 2 epochs (1 of warm-up)" in card
    assert "| epoch | the last one (2) |" in card


def test_model_card_warns_about_noisy_test_labels_and_the_best_epoch():
    accuracy = {
        "last": 80.0,
        "best": 81.0,
        "best_epoch": 3,
        "on": "held-out images",
        "noisy_labels": True,
    }
    text = " ".join(export_files._accuracy(accuracy, best=True))
    assert "on held-out images: 80.00% after the last epoch, 81.00% after" in text
    assert "may be wrong too" in text
    assert "measure it on other images" in text
    assert "not measured" in export_files._accuracy({"last": None}, best=False)[0]


@pytest.mark.parametrize("fit", ["crop", "stretch", "published-crop", "published-stretch"])
def test_preprocessing_steps_match_the_reader(fit, tmp_path):
    """The steps of preprocessing.json done with Pillow, on a large rotated photograph."""
    photo, exif = tmp_path / "photo.jpg", Image.Exif()
    exif[0x0112] = 6
    small = Image.fromarray(noise(1, 3, (6, 8))[0].transpose(1, 2, 0))
    small.resize((200, 150), Image.Resampling.BICUBIC).save(photo, exif=exif)
    description = Description(
        "small-cnn", CLASSES, 3, (18, 20), (15, 16), (0.5,) * 3, (0.2,) * 3, 8, fit
    )
    steps = preprocessing(description, "onnx")
    resize, crop = steps["resize"], steps["crop"]
    size, bicubic = (resize["width"], resize["height"]), Image.Resampling.BICUBIC
    with Image.open(photo) as image:
        if "draft" in resize["jpeg"]:
            image.draft(None, size)
        if "EXIF" in steps["orientation"]:
            image = ImageOps.exif_transpose(image)
        image = image.convert(steps["mode"])
    if fit == "crop":
        fitted = ImageOps.fit(image, size, bicubic)
    elif fit == "published-crop":
        fitted = image.resize((20 * 200 // 150, 20), bicubic)
        fitted = fitted.crop((3, 1, 23, 19))
    else:
        how = bicubic if fit == "stretch" else Image.Resampling.BILINEAR
        fitted = image.resize(size, how)
    array = np.asarray(fitted, dtype=np.float32)[
        crop["top"] : crop["top"] + crop["height"], crop["left"] : crop["left"] + crop["width"]
    ]
    model = make_model(tmp_path, "small-cnn", stored=(18, 20), size=(15, 16))
    mine = (array.transpose(2, 0, 1) / 255 - 0.5) / 0.2
    reader = type(model.reader)(3, (18, 20), fit)
    pixels = torch.from_numpy(reader.read(photo)[None])
    half = torch.full((3,), 0.5)
    views = type(model.views)(half, half * 0.4, (15, 16), 0, False)
    np.testing.assert_allclose(views.plain(pixels)[0], mine, atol=1e-6)
    assert steps["input"]["shape"] == ["N", 3, 15, 16]


def test_exported_safetensors_can_predict(exported, photo_run, photo_folder, capsys):
    texts = []
    for run in (photo_run, exported["safetensors"].path):
        assert main(["predict", str(run), str(photo_folder / "test")]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_export_of_the_best_model(photo_run, tmp_path):
    found = export_run(photo_run, tmp_path / "new" / "x", "safetensors", best=True)
    tensors = [load_model(p).network.state_dict() for p in (found.path / "model.safetensors",)]
    best = load_model(photo_run / "best.safetensors").network.state_dict()
    assert all(torch.equal(tensors[0][name], best[name]) for name in best)
    assert "the one with the best accuracy" in (found.path / "README.md").read_text()


# --------------------------------------------------------------------------------------- errors


def test_existing_folder_is_refused(photo_run, tmp_path, capsys):
    (tmp_path / "x").mkdir()
    assert main(["export", str(photo_run), "--out", str(tmp_path / "x")]) == 2
    assert "x: exists already" in capsys.readouterr().err
    assert list((tmp_path / "x").iterdir()) == []


def test_folder_that_cannot_be_written(photo_run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"--out .*/y: cannot be written"):
        export_run(photo_run, tmp_path / "file" / "y", "safetensors")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["RUN"], "--out is missing"),
        (["PHOTOS", "--out", "x"], "not a run folder (it has no config.json)"),
        (["RUN", "--out", "x", "--format", "caffe"], "--format"),
    ],
)
def test_wrong_input_is_one_line(
    given, message, photo_run, photo_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    filled = [w.replace("RUN", str(photo_run)).replace("PHOTOS", str(photo_folder)) for w in given]
    assert main(["export", *filled]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def without(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == missing else find(name, *a)
    )


def test_missing_package_is_named(photo_run, tmp_path, monkeypatch):
    without(monkeypatch, "onnxscript")
    with pytest.raises(InputError, match=r"needs onnxscript: pip install 'pseudoloss\[export\]'"):
        export_run(photo_run, tmp_path / "x")


def test_export_without_onnxruntime_is_not_compared(photo_run, tmp_path, monkeypatch, capsys):
    without(monkeypatch, "onnxruntime")
    assert main(["export", str(photo_run), "--out", str(tmp_path / "x")]) == 0
    assert "not compared with the original model: onnxruntime is not" in capsys.readouterr().out


def test_export_that_differs_from_the_original_is_not_written(
    photo_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        export.Deployed,
        "forward",
        lambda self, images: self.classifiers[0](self.backbones[0](images)).softmax(1),
    )
    out = str(tmp_path / "x")
    assert main(["export", str(photo_run), "--out", out, "--format", "torchscript"]) == 1
    captured = capsys.readouterr()
    assert "the exported model differs from the original by" in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_confident_models_are_compared_by_log_probabilities(tmp_path):
    """If all probabilities are 0 or 1, they do not show whether the pixels are right."""
    sure = make_model(tmp_path, "small-cnn")
    with torch.no_grad():
        sure.network.classifier.bias[0] += 40
    path = tmp_path / "x.pt"
    with export.silence():
        export._write_torchscript(sure, path)
    assert compare(path, "torchscript", sure) < 1e-5
    with torch.no_grad():
        sure.network.classifier.weight *= 1.2
    with pytest.raises(ExportError, match="differs from the original"):
        compare(path, "torchscript", sure)


def test_network_that_cannot_be_exported(photo_run, tmp_path, monkeypatch):
    def fail(self, images):
        raise NotImplementedError("no such thing")

    monkeypatch.setattr(export.Deployed, "forward", fail)
    with pytest.raises(ExportError, match=r"small-cnn cannot be exported .*try --format"):
        export_run(photo_run, tmp_path / "x", "torchscript")
    assert list(tmp_path.iterdir()) == []


def test_warnings_return_after_silence():
    with export.silence():
        warnings.warn("unheard", stacklevel=1)
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
