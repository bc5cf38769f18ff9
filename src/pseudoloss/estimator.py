"""PLS as a scikit-learn estimator."""

import inspect
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from pseudoloss.config import Settings, setting_types
from pseudoloss.data import arrays
from pseudoloss.engine.training import train
from pseudoloss.errors import InputError


class PLS(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """An image classifier for noisy labels with the interface of scikit-learn.

    Args:
        preset: settings to start from. None: the defaults, adapted to the number of images and to
            imbalanced classes.
        verbose: print one line per epoch.
        settings: any setting of `pseudoloss.Settings`, including those of PLS; None keeps the value
            of the preset.

    Attributes:
        classes_: the labels, sorted.
        labels_: the label table, one row per image.
        run_: the whole run: metrics, summary, model.
        n_features_in_: number of pixels in an image, over all channels.

    Example:
        >>> model = PLS(epochs=50).fit(images, labels)
        >>> model.labels_[model.labels_.is_label_issue]
        >>> model.predict(new_images)
    """

    def __init__(
        self, *, preset: str | None = None, verbose: bool = False, **settings: Any
    ) -> None:
        self.preset = preset
        self.verbose = verbose
        unknown = settings.keys() - _SETTINGS
        if unknown:
            raise TypeError(f"PLS has no parameter {sorted(unknown)[0]!r}")
        for name in _SETTINGS:
            setattr(self, name, settings.get(name))

    def fit(self, X: Any, y: Any) -> Self:
        """Train on images (N,H,W, N,H,W,C or N,C,H,W; uint8 or floats from 0 to 1) and labels."""
        if y is None:
            raise InputError("PLS requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        try:
            check_classification_targets(y)
            self.classes_, codes = np.unique(y, return_inverse=True)
        except TypeError:
            raise InputError("y: labels must be all numbers or all text") from None
        data = arrays(X, codes, classes=[str(label) for label in self.classes_.tolist()], name="X")
        chosen = {
            name: getattr(self, name) for name in _SETTINGS if getattr(self, name) is not None
        }
        self.run_ = train(data, preset=self.preset, quiet=not self.verbose, **chosen)
        self.n_features_in_ = int(np.prod(data.train.images_NCHW.shape[1:]))
        return self

    @property
    def labels_(self) -> pd.DataFrame:
        """The label table."""
        check_is_fitted(self, "run_")
        return self.run_.labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each of `classes_`, one row per image."""
        check_is_fitted(self, "run_")
        return self.run_.model.predict_proba(X)

    def predict(self, X: Any) -> np.ndarray:
        """The most likely label of each image."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags


_SETTINGS = tuple(setting_types(Settings.method))

# scikit-learn reads the parameters from the signature, so it gets one parameter per setting.
# config/ remains the only place that lists them.
_given = inspect.signature(PLS.__init__)
PLS.__init__.__signature__ = _given.replace(  # type: ignore[attr-defined]
    parameters=[
        *(p for p in _given.parameters.values() if p.kind is not p.VAR_KEYWORD),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in _SETTINGS
        ),
    ]
)
