"""The loss of every method is finite, with finite gradients, whatever a batch holds."""

from itertools import cycle, product

import pytest
import torch

from pseudoloss.config import METHOD_SETTINGS, Settings
from pseudoloss.methods import build
from pseudoloss.methods.base import Batch, Mix, Outputs, tensors_of
from pseudoloss.nn.views import Views

N, C, D, EPOCHS, WARMUP = 24, 4, 5, 9, 3
VIEWS = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)

PLS_FORMS = [
    {"pseudo_label_norm": "max", "weighting": "interpolated", "contrast_labels": "mixed"},
    {"weighting": "first", "contrast_class": "own", "contrast_mix": "separate"},
    {"trust_in_contrast": False, "trust_in_classification": False, "balance_prior": "given"},
    {"gamma": 100.0, "mu": 0.001, "balance": 1000.0},
    {"gamma": 0.01, "mu": 1000.0, "mixup_lambda": "uniform"},
]
FORMS = {name: {"method": name} for name in METHOD_SETTINGS}
FORMS |= {f"pls {i}": {"method": "pls", **form} for i, form in enumerate(PLS_FORMS, 1)}
FORMS |= {"elr, strong": {"method": "elr", "elr_lambda": 1000.0, "elr_beta": 0.0}}
FORMS |= {"elr-plus, strong": {"method": "elr-plus", "elr_lambda": 1000.0, "ramp_steps": 1}}
FORMS |= {
    "divide-mix, all": {"method": "divide-mix", "lambda_u": 1000.0, "warmup_penalty": 10.0}
    | {"temperature": 0.05, "mixup_alpha": 0.1}
}
FORMS |= {
    "evidential-mix, all": {"method": "evidential-mix", "lambda_u": 1000.0, "temperature": 0.05}
}
FORMS |= {"co-teaching, all": {"method": "co-teaching", "forget_rate": 0.99, "forget_epochs": 1}}
FORMS |= {
    "soft-to-hard": {
        "method": "dynamic-bootstrapping",
        "bootstrapping": "soft-to-hard",
        "balance": 1000.0,
        "guided_epochs": 1,
    }
}

FORMS |= {
    "pls-plus, all": {
        "method": "pls-plus",
        "strong_loss": 1000.0,
        "strong_view": "trivial",
        "strong_cutout": 0.9,
        "mixup_alpha": 4.0,
        "cutmix": 0.5,
        "first_epoch_trust": False,
        "debias": 1.0,
        "debias_momentum": 0.0,
        "gamma": 100.0,
        "ema_decay": 0.9,
        "ema_pseudo_labels": True,
    },
    "pls-plus, max": {
        "method": "pls-plus",
        "pseudo_label_norm": "max",
        "strong_loss": 1.0,
        "strong_loss_ramp": 2,
        "strong_view": "rand",
        "debias": 0.5,
        "contrast": False,
        "gamma": 0.01,
    },
}

FORMS |= {"dsos, as released": {"method": "dsos", "as_released": True, "entropy_weight": 1000.0}}
FORMS |= {"dsos, hard": {"method": "dsos", "softening_temperature": 1e-6, "warmup_mixup": False}}

FORMS |= {"jo-src, unbounded": {"method": "jo-src", "largest_divergence": 1e6, "consistency": 1.0}}
FORMS |= {"jo-src, sure": {"method": "jo-src", "label_smoothing": 0.0, "clean_threshold": 0.01}}

LOGITS = {
    "zero": lambda B: torch.zeros(B, C),
    "random": lambda B: torch.randn(B, C),
    "±1e4": lambda B: torch.where(torch.rand(B, C) < 0.5, -1e4, 1e4),
    "one at 1e4": lambda B: torch.eye(C)[torch.arange(B) % C] * 1e4,
    "all at -1e4": lambda B: torch.full((B, C), -1e4),
}
DTYPES = [torch.float32, torch.bfloat16]
PROJECTIONS = {"zero": 0.0, "random": 1.0, "large": 1e4}
LABELS = {
    "all clean": (False, 1.0),
    "all noisy, no trust": (True, 0.0),
    "all noisy, full trust": (True, 1.0),
    "all noisy, some trust": (True, None),
    "half noisy": (None, None),
    "none noisy, no trust": (False, 0.0),
}


def given_labels(one_class):
    """Labels of all images; of one class in every batch."""
    return torch.zeros(N, dtype=torch.long) if one_class else torch.arange(N) % C


def state_of(method, given_N, labels):
    state = method.start(given_N, C)
    noisy, trust = labels
    state.noisy_N.copy_(torch.arange(N) % 2 == 0 if noisy is None else torch.tensor(noisy))
    if hasattr(state, "u_N"):
        state.u_N.copy_(torch.rand(N) if trust is None else torch.tensor(trust))
    if hasattr(state, "trust_N"):
        state.trust_N.copy_(torch.rand(N) if trust is None else torch.tensor(trust))
    if hasattr(state, "used_N"):
        state.used_N.copy_(~state.noisy_N)
    method.begin_epoch(state, EPOCHS - 1)
    return state


def batch_of(B, given_N, step, lam):
    """B images of every stream."""
    B *= len(step.streams)
    index_B = torch.randperm(N)[:B]
    images_BCHW = torch.zeros(B, 3, 8, 8, dtype=torch.uint8)
    found = tuple(Mix(torch.randperm(B), torch.tensor(lam)) for _ in step.lambdas)
    return Batch(index_B, images_BCHW, given_N[index_B], found, torch.rand(B, step.draws))


def views_of(step, given_N, state):
    """The views of each kind that each network sees: how many rows per image of a stream. Views
    that depend on outputs are finite, whatever these are."""
    batch = batch_of(2, given_N, step, 0.7)

    def rows(shown):
        return {
            role: tuple([len(view) // 2 for view in kind] for kind in views)
            for role, views in shown.items()
        }

    counts = rows(step.show(VIEWS, batch))
    if step.show_next is None:
        return counts
    for logits, dtype in product(LOGITS, DTYPES):
        shown = step.show_next(
            VIEWS, batch, outputs_of(counts, 2, logits, 1.0, dtype, False), state
        )
        assert all(view.isfinite().all() for found in shown.values() for view in found.with_grad)
    more = rows(shown)
    return {
        role: tuple(a + b for a, b in zip(counts[role], more[role], strict=True)) for role in more
    }


def outputs_of(counts, images, logits, scale, dtype, decoder=False):
    """What networks that see such views could say."""

    def view(rows, with_grad):
        B = rows * images
        found = [LOGITS[logits](B).to(dtype), (torch.randn(B, D) * scale).to(dtype)]
        found += [torch.rand(B, 1) * scale] if decoder else []
        return tuple(t.requires_grad_(with_grad) for t in found)

    return {
        role: Outputs(*([view(rows, i == 1) for rows in kind] for i, kind in enumerate(each)))
        for role, each in counts.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_finite(form, dtype):
    """Extreme logits, one class in a batch, all, no or half of the labels noisy, every or no label
    trusted, batches of one image, mixing with λ of 0 and 1: all of these together."""
    torch.manual_seed(0)
    usual = {"epochs": EPOCHS, "warmup": WARMUP, "lr": 0.1, "projection": D}
    settings = Settings(**(usual | FORMS[form]))
    for one_class in (False, True):
        given_N = given_labels(one_class)
        method = build(settings, given_N, C, False)
        for step in dict.fromkeys(step for phase in method.phases() for step in phase.steps):
            counts = views_of(step, given_N, method.start(given_N, C))
            # 3 and 5 have no common divisor: all logits meet all projections.
            scales = cycle(PROJECTIONS.values())
            for (labels, logits), scale in zip(product(LABELS, LOGITS), scales, strict=False):
                for B, lam in ((1, 1.0), (8, 0.0), (8, 0.7)):
                    state = state_of(method, given_N, LABELS[labels])
                    batch = batch_of(B, given_N, step, lam)
                    outputs = outputs_of(counts, B, logits, scale, dtype, method.decoder)
                    case = (one_class, labels, logits, scale, B, lam)
                    check(step.loss(outputs, batch, state), outputs, state, case)


def check(loss, outputs, state, case):
    assert loss.isfinite(), case
    if loss.requires_grad:  # not of a step that trains nothing
        loss.backward()
    leaves = [t for found in outputs.values() for pair in found.with_grad for t in pair]
    for leaf in leaves:
        assert leaf.grad is None or leaf.grad.isfinite().all(), case
    for name, tensor in tensors_of(state).items():
        if tensor.is_floating_point():
            assert tensor.isfinite().all(), (case, name)
