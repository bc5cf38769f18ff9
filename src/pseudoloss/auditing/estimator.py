"""The label audit as a scikit-learn estimator."""

from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from pseudoloss.auditing.audit import Method, audit
from pseudoloss.errors import InputError
from pseudoloss.labels.decisions import MIN_TRUST

LABELS = ("given_label", "predicted_label", "suggested_label", "candidate_label")


class LabelAudit(BaseEstimator):  # type: ignore[misc]
    """Finds wrong labels of rows of features, with the interface of scikit-learn.

    Args:
        method: "latent", the latent-label model; or "two-mixtures", as pseudo-loss selection.
        folds: of the cross-validation.
        threshold: a label is flagged if its probability of being wrong is at least this; None: the
            one with the highest expected F1, from 0.25 to 0.5.
        min_trust: a suggestion becomes a new label from this probability of being right on, if it
            is more probable than the given label.
        seed: of the folds.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        verbose: print the results.

    Attributes:
        label_issues_: one row per row of X: `is_label_issue`, `label_score` (the lowest are the
            most doubtful), `given_label`, `predicted_label`, `suggested_label` (missing where a
            label needs a review), `candidate_label`, `p_noisy`, `trust`, `action`,
            `outlier_score`, `duplicate_group`.
        p_noisy_: probability that each label is wrong.
        noise_rate_: estimated share of wrong labels.
        noise_interval_: lower and upper end of the interval of that share.
        pred_probs_: out-of-fold predictions, columns in the order of `classes_`.
        classes_: the labels, sorted.
        audit_: the whole audit.

    Example:
        >>> found = LabelAudit().fit(embeddings, y)
        >>> found.label_issues_[found.label_issues_.is_label_issue]
    """

    def __init__(
        self,
        *,
        method: Method = "latent",
        folds: int = 5,
        threshold: float | None = None,
        min_trust: float = MIN_TRUST,
        seed: int = 1,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.folds = folds
        self.threshold = threshold
        self.min_trust = min_trust
        self.seed = seed
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Audit the labels `y` of the features `X` (N,D)."""
        if y is None:
            raise InputError("LabelAudit requires y to be passed, but the target y is None")
        index = X.index if isinstance(X, pd.DataFrame) else None
        X = validate_data(self, X, dtype=[np.float32, np.float16, np.float64], ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        try:
            check_classification_targets(y)
            self.classes_, codes = np.unique(y, return_inverse=True)
        except TypeError:
            raise InputError("y: labels must be all numbers or all text") from None
        if len(codes) != len(X):
            raise InputError(f"y: {len(codes)} labels for {len(X)} rows of X")
        self.audit_ = audit(
            features=X,
            labels=codes,
            method=self.method,
            folds=self.folds,
            threshold=self.threshold,
            min_trust=self.min_trust,
            seed=self.seed,
            device=self.device,
            quiet=not self.verbose,
        )
        table = self.audit_.labels.drop(columns=["index", "path", "part"])
        for name in LABELS:  # the codes in the table as labels of the user's type
            table[name] = self._labels(table[name])
        first = ["is_label_issue", "label_score", *LABELS]
        table = table[[*first, *(name for name in table if name not in first)]]
        self.label_issues_ = table if index is None else table.set_axis(index)
        return self

    def fit_predict(self, X: Any, y: Any) -> np.ndarray:
        """Whether each label is an issue."""
        return np.asarray(self.fit(X, y).label_issues_["is_label_issue"])

    @property
    def p_noisy_(self) -> np.ndarray:
        return np.asarray(self.label_issues_["p_noisy"])

    @property
    def pred_probs_(self) -> np.ndarray:
        return self.audit_.pred_probs

    @property
    def noise_rate_(self) -> float:
        return float(self.audit_.summary["estimated_noise"]["rate"])

    @property
    def noise_interval_(self) -> tuple[float, float]:
        noise = self.audit_.summary["estimated_noise"]
        return float(noise["low"]), float(noise["high"])

    def _labels(self, codes: pd.Series) -> np.ndarray:
        known = codes.notna().to_numpy()
        at = codes.where(known, "0").astype(np.int64).to_numpy()
        if known.all():
            return np.asarray(self.classes_[at])
        labels = self.classes_[at].astype(object)
        labels[~known] = None
        return np.asarray(labels)
