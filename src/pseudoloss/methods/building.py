"""How each method is made from the settings of a run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from pseudoloss.config import (
    CoTeachingSettings,
    DetectionSettings,
    DivideMixSettings,
    DSOSSettings,
    DynamicBootstrappingSettings,
    ELRPlusSettings,
    ELRSettings,
    EvidentialMixSettings,
    JoSRCSettings,
    MixMatchSettings,
    MixupSettings,
    PLSPlusSettings,
    PLSSettings,
    RRLSettings,
    Settings,
    flag,
)
from pseudoloss.errors import InputError
from pseudoloss.methods import detection, evidential_mix, metrics, pls, rrl
from pseudoloss.methods.base import Method, beta, fold, no_mixing, uniform
from pseudoloss.methods.ce import CrossEntropy
from pseudoloss.methods.co_teaching import CoTeaching
from pseudoloss.methods.detection import FROM_THE_LOSS, LossDetector
from pseudoloss.methods.divide_mix import DivideMix
from pseudoloss.methods.dsos import DSOS
from pseudoloss.methods.dynamic_bootstrapping import DynamicBootstrapping
from pseudoloss.methods.elr import ELR
from pseudoloss.methods.elr_plus import ELRPlus
from pseudoloss.methods.evidential_mix import EvidentialMix
from pseudoloss.methods.jo_src import JoSRC
from pseudoloss.methods.mixmatch import MixMatchOptions
from pseudoloss.methods.mixture import Mixture
from pseudoloss.methods.mixup import Mixup
from pseudoloss.methods.pls_metrics import of_pseudo_labels
from pseudoloss.methods.pls_plus import STRONG_VIEWS, PLSPlus, Switches
from pseudoloss.methods.pseudo_labels import PLSState

NORMALISE = {"sum": pls.by_sum, "max": pls.by_max}
# Additions of PLS-plus to parts of PLS that can be switched off.
ADDED_TO = {"mixup": ("cutmix", "mixup_alpha"), "correct": ("debias", "ema_pseudo_labels")}


class Given(NamedTuple):
    """What a method is built from, beside the settings of the run."""

    detector: LossDetector
    given_N: Tensor  # given labels, on the device of the run
    classes: int


def build(settings: Settings, given_N: Tensor, classes: int, weak_is_plain: bool) -> Method:
    """The method that the settings ask for.

    Args:
        settings: of the run.
        given_N: the given labels, on the device of the run.
        classes: number of classes.
        weak_is_plain: whether weak views are the same as plain ones, by the settings.
    """
    own = settings.method_settings
    detection_settings = own if isinstance(own, DetectionSettings) else DetectionSettings()
    detector = build_detector(detection_settings, weak_is_plain)
    return BUILDERS[settings.method](settings, Given(detector, given_N, classes))


def build_ce(settings: Settings, given: Given) -> Method:
    return CrossEntropy(given.detector, settings.epochs, settings.warmup_epochs)


def build_mixup(settings: Settings, given: Given) -> Method:
    own = cast(MixupSettings, settings.method_settings)
    return Mixup(given.detector, settings.epochs, settings.warmup_epochs, own.mixup_alpha)


def build_elr(settings: Settings, given: Given) -> Method:
    own = cast(ELRSettings, settings.method_settings)
    length = (settings.epochs, settings.warmup_epochs)
    return ELR(given.detector, *length, own.elr_lambda, own.elr_beta)


def build_elr_plus(settings: Settings, given: Given) -> Method:
    own = cast(ELRPlusSettings, settings.method_settings)
    return ELRPlus(
        given.detector,
        settings.epochs,
        settings.warmup_epochs,
        strength=own.elr_lambda,
        beta=own.elr_beta,
        alpha=own.mixup_alpha,
        decay=own.ema_decay,
        batch_size=settings.batch_size,
        steps=max(len(given.given_N) // settings.batch_size, 1) * settings.epochs,
        ramp_steps=own.ramp_steps,
    )


def build_co_teaching(settings: Settings, given: Given) -> Method:
    own = cast(CoTeachingSettings, settings.method_settings)
    length = (settings.epochs, settings.warmup_epochs)
    return CoTeaching(given.detector, *length, own.forget_rate, own.forget_epochs, own.ensemble)


def build_divide_mix(settings: Settings, given: Given) -> Method:
    own = cast(DivideMixSettings, settings.method_settings)
    _check_splits_by_loss(own)
    return DivideMix(
        given.detector,
        _mixmatch(own, given),
        settings.epochs,
        settings.warmup_epochs,
        settings.batch_size,
        own.warmup_penalty,
        own.loss_epochs,
    )


def build_dynamic_bootstrapping(settings: Settings, given: Given) -> Method:
    own = cast(DynamicBootstrappingSettings, settings.method_settings)
    return DynamicBootstrapping(
        given.detector,
        settings.epochs,
        settings.warmup_epochs,
        hard=own.bootstrapping == "hard",
        alpha=own.mixup_alpha,
        balance=own.balance,
        guided_epochs=own.guided_epochs,
        prior_C=_prior("uniform", given.given_N, given.classes),
    )


def build_dsos(settings: Settings, given: Given) -> Method:
    own = cast(DSOSSettings, settings.method_settings)
    parts = settings.accumulate
    half = max(settings.batch_size // 2 // parts, 2) * parts
    main_batch_size = own.main_batch_size or half
    if main_batch_size < 2 * parts:
        raise InputError(
            f"--main-batch-size {main_batch_size} must be at least twice --accumulate {parts}"
        )
    return DSOS(
        given.detector,
        settings.epochs,
        settings.warmup_epochs,
        own.entropy_weight,
        not own.as_released,
        own.softening_temperature,
        own.correct_above,
        own.warmup_mixup,
        main_batch_size,
    )


def build_rrl(settings: Settings, given: Given) -> Method:
    own = cast(RRLSettings, settings.method_settings)
    keep_threshold = own.keep_threshold
    if keep_threshold is None:
        keep_threshold = max(1 / given.classes, 0.02)
    options = rrl.Options(
        temperature=own.contrast_temperature,
        instance_weight=own.instance_weight,
        prototype_weight=own.prototype_weight,
        ramp_epochs=own.prototype_ramp,
        reconstruction_weight=own.reconstruction_weight,
        lambda_rule=beta(own.mixup_alpha),
        neighbours=own.neighbours,
        keep_threshold=keep_threshold,
        use_threshold=own.use_threshold,
        one_chain=own.as_released,
        dimensions=settings.projection,
    )
    length = (settings.epochs, settings.warmup_epochs)
    return rrl.RRL(given.detector, options, *length, len(given.given_N))


def build_evidential_mix(settings: Settings, given: Given) -> Method:
    own = cast(EvidentialMixSettings, settings.method_settings)
    _check_splits_by_loss(own)
    return EvidentialMix(
        given.detector,
        _mixmatch(own, given),
        evidential_mix.RELEASED if own.as_released else evidential_mix.PAPER,
        settings.epochs,
        settings.warmup_epochs,
        min(own.classifier_warmup, settings.warmup_epochs),
        settings.batch_size,
        settings.lr,
    )


def _check_splits_by_loss(own: MixMatchSettings) -> None:
    """Other metrics come from what predicts, not from the network whose losses split the labels."""
    if own.noise_metric not in FROM_THE_LOSS:
        raise InputError(
            f"--noise-metric {own.noise_metric}: this method splits labels by their losses; use "
            "loss or capped-loss"
        )


def _mixmatch(own: MixMatchSettings, given: Given) -> MixMatchOptions:
    return MixMatchOptions(
        own.mixup_alpha,
        own.temperature,
        own.lambda_u,
        own.ramp_epochs,
        _prior("uniform", given.given_N, given.classes),
    )


def build_jo_src(settings: Settings, given: Given) -> Method:
    own = cast(JoSRCSettings, settings.method_settings)
    first, last = own.clean_threshold, own.last_clean_threshold
    if last < first:
        raise InputError(
            f"--last-clean-threshold {last:g} must be at least the --clean-threshold {first:g}"
        )
    largest = 1 - 1 / given.classes
    if own.label_smoothing >= largest:  # the label of another class would have the larger share
        raise InputError(
            f"--label-smoothing {own.label_smoothing:g}: must be below {largest:.3g} with "
            f"{given.classes} classes, such as 0.1; otherwise a label stands for another class"
        )
    return JoSRC(
        given.detector,
        given.classes,
        settings.epochs,
        settings.warmup_epochs,
        own.label_smoothing,
        (first, last),
        own.consistency,
        own.ema_decay,
        own.largest_divergence,
    )


def build_pls(settings: Settings, given: Given) -> Method:
    own = cast(PLSSettings, settings.method_settings)
    options = pls_options(own, given.given_N, given.classes)
    return pls.PLS(given.detector, options, settings.epochs, settings.warmup_epochs)


def build_pls_plus(settings: Settings, given: Given) -> Method:
    own = cast(PLSPlusSettings, settings.method_settings)
    _check_switches(own)
    options = pls_options(own, given.given_N, given.classes)
    if own.mixup and own.mixup_alpha != 1:
        rule = beta(own.mixup_alpha, folded=own.mixup_lambda == "folded")
        options = replace(options, lambda_rule=rule)
    switches = Switches(
        strong_loss=own.strong_loss,
        strong_loss_ramp=own.strong_loss_ramp,
        strong_view=STRONG_VIEWS[own.strong_view],
        strong_cutout=own.strong_cutout,
        cutmix=own.cutmix,
        first_epoch_trust=own.first_epoch_trust,
        debias=own.debias,
        debias_momentum=own.debias_momentum,
        one_view=own.pseudo_label_views == 1,
        opposite_flips=own.opposite_flips,
        gamma=own.gamma,
        normalise=NORMALISE[own.pseudo_label_norm],
        ema_decay=own.ema_decay,
        ema_pseudo_labels=own.ema_pseudo_labels,
        ema_scoring=own.ema_scoring,
        ema_prediction=own.ema_prediction,
        loss_momentum=own.loss_momentum,
        warmup_trend=own.warmup_trend,
        mode_gate=own.mode_gate,
        by_neighbours=own.selection == "neighbours",
        neighbours=own.neighbours,
        neighbour_share=own.neighbour_share,
        relabel=own.relabel,
    )
    length = (settings.epochs, settings.warmup_epochs)
    return PLSPlus(given.detector, options, switches, *length, len(given.given_N))


def _check_switches(own: PLSPlusSettings) -> None:
    """Refuse switches that contradict each other."""
    if own.initial_trust and not own.first_epoch_trust:
        raise InputError(
            "--no-first-epoch-trust: contradicts --initial-trust, which computes trust before that "
            "epoch"
        )
    for name in ("ema_pseudo_labels", "ema_scoring", "ema_prediction"):
        if getattr(own, name) and own.ema_decay == 0:
            raise InputError(f"{flag(name)}: needs --ema-decay, such as 0.999")
    for part, additions in ADDED_TO.items():
        for name in additions:
            if not getattr(own, part) and getattr(own, name) != getattr(PLSPlusSettings, name):
                raise InputError(f"{flag(name)}: does nothing with {flag(f'no_{part}')}")
    by_mixture = own.selection == "mixture"
    if not by_mixture and (own.loss_momentum > 0 or own.mode_gate > 0):
        name = "--loss-momentum" if own.loss_momentum > 0 else "--mode-gate"
        raise InputError(f"{name}: is for --selection mixture; a vote of neighbours has no modes")
    others = own.noise_metric not in FROM_THE_LOSS
    if by_mixture and others and own.ema_scoring != own.ema_prediction:
        raise InputError(
            f"--noise-metric {own.noise_metric}: is of the network that predicts; use "
            "--ema-scoring and --ema-prediction together, or neither"
        )


BUILDERS: dict[str, Callable[[Settings, Given], Method]] = {
    "pls": build_pls,
    "pls-plus": build_pls_plus,
    "ce": build_ce,
    "mixup": build_mixup,
    "elr": build_elr,
    "elr-plus": build_elr_plus,
    "co-teaching": build_co_teaching,
    "divide-mix": build_divide_mix,
    "dynamic-bootstrapping": build_dynamic_bootstrapping,
    "dsos": build_dsos,
    "rrl": build_rrl,
    "evidential-mix": build_evidential_mix,
    "jo-src": build_jo_src,
}
"""How each method is built from the settings, by its name."""


def build_detector(own: DetectionSettings, weak_is_plain: bool = False) -> LossDetector:
    if own.noise_metric == "kl" and weak_is_plain:
        raise InputError(
            "--noise-metric kl compares the plain view of an image with a weak one; without "
            "padding, crop and flip they are the same. Use --pad 1 or more, or --flip"
        )
    rules = {"noisy": detection.high_loss, "clean": detection.not_low_loss}
    return LossDetector(
        own.noise_metric, rules[own.threshold_on], own.threshold, own.protect_rare_classes
    )


def pls_options(own: PLSSettings, given_N: Tensor, classes: int) -> pls.Options:
    normalise = NORMALISE[own.pseudo_label_norm]
    make = partial(pls.make_pseudo_labels, gamma=own.gamma, normalise=normalise)
    lambdas = {"folded": fold, "uniform": uniform}
    return pls.Options(
        make_pseudo_labels=make if own.correct else None,
        pseudo_labels_in_eval=own.pseudo_label_mode == "eval",
        trust=_trust(own),
        trust_values=None if own.trust_metric == "threshold" else own.trust_metric,
        initial_trust=own.initial_trust,
        trust_in_classification=own.trust_in_classification,
        trust_in_contrast=own.trust_in_contrast,
        classification={
            "separate": pls.classification_separate,
            "interpolated": pls.classification_interpolated,
            "first": pls.classification_first,
        }[own.weighting],
        lambda_rule=lambdas[own.mixup_lambda] if own.mixup else no_mixing,
        contrast=own.contrast,
        mu=own.mu,
        contrastive_class={"mixed": pls.class_of_mixed, "own": pls.class_of_own}[
            own.contrast_class
        ],
        label_similarity={"rows": pls.similarity_of_rows, "mixed": pls.similarity_of_mixed}[
            own.contrast_labels
        ],
        separate_contrast_mix=own.contrast_mix == "separate",
        balance=own.balance,
        prior_C=_prior(own.balance_prior, given_N, classes),
    )


def _trust(own: PLSSettings) -> pls.Trust:
    """Stage 2, by the metric that the settings name."""

    def by_pseudo_loss(state: PLSState) -> tuple[Tensor, Mixture | None]:
        return pls.trust_by_mixture(state.pseudo_loss_N, state.noisy_N)

    if own.trust_metric == "pseudo-loss":
        return by_pseudo_loss
    metric = metrics.entropy if own.trust_metric == "entropy" else metrics.confidence

    def by_metric(state: PLSState) -> tuple[Tensor, Mixture | None]:
        value_N = of_pseudo_labels(metric, state)
        if own.trust_metric != "threshold":
            return pls.trust_by_mixture(value_N, state.noisy_N)
        return pls.trust_confident(value_N, state.noisy_N, own.trust_threshold), None

    return by_metric


def _prior(kind: str, given_N: Tensor, classes: int) -> Tensor:
    """The class shares that the balance term aims at."""
    if kind == "uniform":
        return torch.full((classes,), 1 / classes, device=given_N.device)
    return torch.bincount(given_N, minlength=classes).float() / len(given_N)
