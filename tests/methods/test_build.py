"""Methods from settings."""

import pytest
import torch

from pseudoloss.config import METHOD_SETTINGS, DetectionSettings, Settings
from pseudoloss.errors import InputError
from pseudoloss.methods import build, pls
from pseudoloss.methods.ce import CrossEntropy
from pseudoloss.methods.co_teaching import CoTeaching
from pseudoloss.methods.divide_mix import DivideMix
from pseudoloss.methods.dsos import DSOS
from pseudoloss.methods.dynamic_bootstrapping import DynamicBootstrapping
from pseudoloss.methods.elr import ELR
from pseudoloss.methods.elr_plus import ELRPlus
from pseudoloss.methods.evidential_mix import EvidentialMix
from pseudoloss.methods.jo_src import JoSRC
from pseudoloss.methods.mixup import Mixup
from pseudoloss.methods.pls_plus import PLSPlus
from pseudoloss.methods.rrl import RRL

GIVEN = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2, 3])
CLASSES = {
    "pls": pls.PLS,
    "pls-plus": PLSPlus,
    "ce": CrossEntropy,
    "mixup": Mixup,
    "elr": ELR,
    "elr-plus": ELRPlus,
    "co-teaching": CoTeaching,
    "divide-mix": DivideMix,
    "dynamic-bootstrapping": DynamicBootstrapping,
    "dsos": DSOS,
    "rrl": RRL,
    "evidential-mix": EvidentialMix,
    "jo-src": JoSRC,
}


def method_of(**values):
    return build(Settings(**values), GIVEN, 4, False)


@pytest.mark.parametrize("name", METHOD_SETTINGS)
def test_the_method_that_the_settings_name(name):
    method = method_of(method=name, epochs=40)
    assert type(method) is CLASSES[name]
    assert (method.warmup, method.epochs) == (6, 40)
    if issubclass(METHOD_SETTINGS[name], DetectionSettings):
        method = method_of(method=name, threshold=0.7, noise_metric="capped-loss")
        assert (method.detector.metric, method.detector.threshold) == ("capped-loss", 0.7)


def test_settings_of_elr_and_co_teaching():
    elr = method_of(method="elr", elr_lambda=3, elr_beta=0.7)
    assert (elr.strength, elr.beta) == (3, 0.7)
    co = method_of(method="co-teaching", forget_rate=0.4, forget_epochs=5, ensemble=True)
    assert (co.forget_rate, co.forget_epochs, co.predicts) == (0.4, 5, co.networks)


def test_the_class_shares_that_the_balance_term_aims_at():
    """Row 14."""
    uniform = method_of().options.prior_C
    torch.testing.assert_close(uniform, torch.full((4,), 0.25))
    of_given = method_of(balance_prior="given").options.prior_C
    torch.testing.assert_close(of_given, torch.tensor([0.6, 0.2, 0.1, 0.1]))


@pytest.mark.parametrize(
    ("setting", "option", "wanted"),
    [
        ({"weighting": "separate"}, "classification", pls.classification_separate),
        ({"weighting": "interpolated"}, "classification", pls.classification_interpolated),
        ({"weighting": "first"}, "classification", pls.classification_first),
        ({"contrast_class": "mixed"}, "contrastive_class", pls.class_of_mixed),
        ({"contrast_class": "own"}, "contrastive_class", pls.class_of_own),
        ({"contrast_labels": "rows"}, "label_similarity", pls.similarity_of_rows),
        ({"contrast_labels": "mixed"}, "label_similarity", pls.similarity_of_mixed),
        ({"contrast_mix": "shared"}, "separate_contrast_mix", False),
        ({"contrast_mix": "separate"}, "separate_contrast_mix", True),
        ({"pseudo_label_mode": "train"}, "pseudo_labels_in_eval", False),
        ({"pseudo_label_mode": "eval"}, "pseudo_labels_in_eval", True),
        ({"correct": False}, "make_pseudo_labels", None),
        ({"trust_metric": "entropy"}, "trust_values", "entropy"),
        ({"trust_metric": "threshold"}, "trust_values", None),
    ],
)
def test_settings_of_pls_choose_its_options(setting, option, wanted):
    found = getattr(method_of(**setting).options, option)
    assert found is wanted or found == wanted


@pytest.mark.parametrize(
    ("norm", "normalise"), [("sum", pls.by_sum), ("max", pls.by_max)], ids=["sum", "max"]
)
def test_gamma_and_norm_of_pseudo_labels(norm, normalise):
    first, second = (torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    make = method_of(gamma=3, pseudo_label_norm=norm).options.make_pseudo_labels
    wanted = pls.make_pseudo_labels(first, second, 3.0, normalise)
    torch.testing.assert_close(make(first, second), wanted)


@pytest.mark.parametrize("method", ["divide-mix", "evidential-mix"])
def test_a_metric_of_what_predicts_cannot_split_labels(method):
    for metric in ("loss", "capped-loss"):
        assert method_of(method=method, noise_metric=metric).detector.metric == metric
    for metric in ("agreement", "disagreement", "js", "kl"):
        with pytest.raises(InputError, match=f"--noise-metric {metric}: this method splits labels"):
            method_of(method=method, noise_metric=metric)
