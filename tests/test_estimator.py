"""PLS as an estimator of scikit-learn."""

import inspect
import pickle
from dataclasses import fields

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import check_is_fitted, validate_data

from conftest import TINY, make_images
from pseudoloss import PLS, InputError
from pseudoloss.config import PLSSettings, Settings


@pytest.fixture(scope="module")
def fitted():
    images, labels = make_images(200)
    names = np.array(["ant", "bee", "cat", "dog"])[labels]
    settings = TINY | {"epochs": 8, "flip": False, "device": "cpu"}
    return PLS(**settings).fit(images, names), images, names


def test_fit_predict_score(fitted):
    model, images, names = fitted
    assert model.classes_.tolist() == ["ant", "bee", "cat", "dog"]
    assert model.score(images, names) > 0.9
    probabilities = model.predict_proba(images[:7])
    assert probabilities.shape == (7, 4)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (model.predict(images[:7]) == model.classes_[probabilities.argmax(1)]).all()


def test_the_label_table(fitted):
    model, images, names = fitted
    assert len(model.labels_) == len(images)
    assert model.labels_["given_label"].tolist() == names.tolist()
    assert model.run_.summary["epochs"] == 8


def test_no_images_give_no_predictions(fitted):
    model, images = fitted[0], fitted[1]
    assert model.predict(images[:0]).shape == (0,)
    assert model.predict_proba(images[:0]).shape == (0, len(model.classes_))


def test_predictions_do_not_depend_on_the_other_images(fitted):
    """Bit for bit; a single image, too, which libraries would compute with other kernels."""
    model, images, _ = fitted
    whole = model.predict_proba(images[:20])
    for size in (1, 2, 7):
        parts = [model.predict_proba(images[i : min(i + size, 20)]) for i in range(0, 20, size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_kinds_of_images_and_labels():
    images, labels = make_images()
    for x in (images, images[..., 0], images / 255, images.transpose(0, 3, 1, 2)):
        model = PLS(**(TINY | {"epochs": 2})).fit(x, labels)
        assert model.predict(x).dtype == labels.dtype


def test_pickle(fitted):
    model, images, _ = fitted
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(images), model.predict_proba(images))


def test_clone_and_parameters():
    model = PLS(epochs=3, lr=0.2, preset="digits")
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert copy.set_params(lr=0.3).lr == 0.3
    assert "epochs=3" in repr(model)
    with pytest.raises(TypeError, match="no parameter 'epoch'"):
        PLS(epoch=3)


def test_parameters_are_the_shared_settings_and_those_of_pls():
    names = set(PLS().get_params())
    assert names == set(inspect.signature(PLS).parameters)
    shared = {field.name for field in fields(Settings)} - {"method_settings"}
    assert names == {"preset", "verbose"} | shared | {field.name for field in fields(PLSSettings)}
    assert {"gamma", "initial_trust", "protect_rare_classes", "schedule"} <= names
    for name in ("elr_beta", "forget_rate", "method_settings"):
        with pytest.raises(TypeError, match=f"no parameter '{name}'"):
            PLS(**{name: 1})


def test_settings_of_pls_reach_the_run():
    images, labels = make_images()
    model = PLS(gamma=1.5, schedule="constant", **(TINY | {"epochs": 2})).fit(images, labels)
    assert model.run_.settings.method_settings.gamma == 1.5
    assert model.run_.settings.schedule == "constant"


def test_small_datasets_get_small_batches():
    """As with pl.train: a fold of a small dataset may have fewer images than a batch."""
    images, labels = make_images()
    quick = {"network": "small-cnn", "epochs": 2}
    model = PLS(**quick).fit(images[:40], labels[:40])
    assert model.run_.settings.batch_size <= 40 // 8
    with pytest.raises(InputError, match="--batch-size 256 is larger than the dataset"):
        PLS(preset="default", **quick).fit(images[:40], labels[:40])


def test_grid_search():
    images, labels = make_images(96)
    search = GridSearchCV(PLS(**TINY), {"gamma": [1.0, 2.0]}, cv=2).fit(images, labels)
    assert search.best_params_["gamma"] in (1.0, 2.0)


def test_verbose(capsys):
    images, labels = make_images()
    PLS(**TINY).fit(images, labels)
    assert capsys.readouterr().out == ""
    PLS(verbose=True, **TINY).fit(images, labels)
    assert "epoch 1/3" in capsys.readouterr().out


def test_bad_input():
    images, labels = make_images()
    with pytest.raises(InputError, match="X: labels: 63 labels for 64 images"):
        PLS(**TINY).fit(images, labels[:-1])
    with pytest.raises(InputError, match="all labels are of one class"):
        PLS(**TINY).fit(images, labels * 0)
    with pytest.raises(InputError, match="--batch-size 256 is larger than the dataset"):
        PLS(preset="default").fit(images, labels)
    with pytest.raises(InputError, match="all numbers or all text"):
        PLS(**TINY).fit(images, np.array(["a", 1] * 32, dtype=object))
    with pytest.raises(NotFittedError):
        PLS().predict(images)
    with pytest.raises(NotFittedError):
        PLS().labels_  # noqa: B018
    with pytest.raises(ValueError, match="8×8"):
        PLS(**TINY).fit(images, labels).predict(images[:, :, :, :].repeat(3, axis=3))


# ------------------------------------------------------------------ scikit-learn's own checks


class FoldedPLS(PLS):
    """PLS for the tables of numbers in scikit-learn's checks: a row is scaled to 0..1 and becomes
    an image of 8×8. Everything else is PLS itself."""

    def fit(self, X, y):
        X = validate_data(self, X) if y is None else validate_data(self, X, y)[0]
        columns = self.n_features_in_
        self.low_, self.span_ = X.min(0), np.maximum(np.ptp(X, axis=0), 1e-9)
        super().fit(self._fold(X), y)
        self.n_features_in_ = columns
        return self

    def predict_proba(self, X):
        check_is_fitted(self, "run_")
        return super().predict_proba(self._fold(validate_data(self, X, reset=False)))

    def _fold(self, X):
        scaled = np.clip((X - self.low_) / self.span_, 0, 1)
        return scaled[:, np.arange(64) % X.shape[1]].reshape(-1, 8, 8)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = True, False
        return tags


QUICK = {"network": "small-cnn", "epochs": 5, "lr": 0.1, "pad": 0, "flip": False, "device": "cpu"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([FoldedPLS(**QUICK)])
def test_scikit_learns_checks(estimator, check):
    check(estimator)
