from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from pseudoloss.methods import base
from pseudoloss.methods.base import (
    LabelState,
    Method,
    Mix,
    mix_within,
    tensors_of,
)


@dataclass(frozen=True)
class ExampleState(LabelState):
    target_NC: Tensor
    prototype_CD: Tensor
    temperature: Tensor
    classes: int


def example(n, seed=0):
    random = torch.Generator().manual_seed(seed)
    return ExampleState(
        **LabelState.start(torch.arange(n) % 3, 3),
        target_NC=torch.rand(n, 3, generator=random),
        prototype_CD=torch.rand(3, 2, generator=random),
        temperature=torch.rand((), generator=random),
        classes=3,
    )


def test_at_the_start_no_label_is_flagged():
    given_N = torch.tensor([2, 0, 1, 1])
    values = LabelState.start(given_N, 3)
    assert not values["noisy_N"].any()
    assert not values["protected_C"].any()
    assert values["predicted_N"].tolist() == [2, 0, 1, 1]
    assert values["predicted_N"].dtype == torch.int32
    assert len({value.data_ptr() for value in values.values()}) == len(values)


def test_every_tensor_of_a_state_and_nothing_else():
    state = example(4)
    assert tensors_of(state).keys() - LabelState.start(torch.arange(4) % 3, 3).keys() == {
        "target_NC",
        "prototype_CD",
        "temperature",
    }


def test_images_are_scored_from_the_end_of_the_warm_up_on():
    method = Method(detector=None, warmup=3)
    assert [epoch for epoch in range(6) if method.scores_after(epoch)] == [2, 3, 4, 5]
    assert [epoch for epoch in range(6) if method.in_warm_up(epoch)] == [0, 1, 2]
    assert Method(detector=None, warmup=0).scores_after(0)


def test_a_method_must_define_its_phases():
    with pytest.raises(NotImplementedError):
        Method(detector=None, warmup=0).phases()


class Declared(base.Method):
    """A method with these declarations."""

    def __init__(self, phases, **declared):
        super().__init__(detector=None, warmup=0)
        self._phases = phases
        vars(self).update(declared)

    def phases(self):
        return self._phases


def a_phase(name="main", epochs=2, trains=("net",)):
    return base.Phase(name, epochs, (base.Step(show=None, loss=None, draws=0, trains=trains),))


def test_declarations_that_fit_together_are_accepted():
    base.check_declarations(Declared((a_phase("a", 0), a_phase("b", 3))), 3)
    follower = {"teacher": base.Ema("net", 0.9)}
    base.check_declarations(Declared((a_phase(),), ema=follower, predicts=("teacher",)), 2)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Declared((a_phase(epochs=3),)), "3 epochs together, the run has 2"),
        (Declared((a_phase(epochs=1), a_phase(epochs=1))), "the same name"),
        (Declared((a_phase(trains=("other",)),)), "a step trains 'other'"),
        (Declared((a_phase(),), ema={"t": base.Ema("x", 0.9)}), "an EMA follows 'x'"),
        (Declared((a_phase(),), predicts=("t",)), "the model predicts with 't'"),
    ],
)
def test_contradicting_declarations_are_refused(method, message):
    with pytest.raises(ValueError, match=message):
        base.check_declarations(method, 2)


@pytest.mark.parametrize("alpha", [0.5, 1, 4, 32])
def test_lambda_has_a_beta_distribution(alpha):
    """Against scipy's quantiles; near the ends those of α < 1 are not smooth."""
    u = np.linspace(0.01, 0.99, 999)
    lam = base.beta(alpha)(torch.from_numpy(u).float()).numpy()
    np.testing.assert_allclose(lam, stats.beta.ppf(u, alpha, alpha), atol=1e-5)
    ends = base.beta(alpha)(torch.tensor([0.0, 1.0]))
    assert ends.tolist() == [0, 1]


def test_folded_lambda_is_at_least_a_half():
    u = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    lam = base.beta(4)(u)
    folded = base.beta(4, folded=True)(u)
    torch.testing.assert_close(folded, torch.maximum(lam, 1 - lam))
    assert (lam < 0.5).any()


# ------------------------------------------------------------------------------------------ mixing


@settings(max_examples=50, deadline=None)
@given(
    partner=st.integers(1, 9).flatmap(lambda n: st.permutations(list(range(n)))),
    bits=st.integers(0, 511),
)
def test_mixing_within_a_mask_keeps_the_mask_and_every_image_once(partner, bits):
    """In each group, the partners of the images in their order are the group in random order."""
    partner_B = torch.tensor(partner)
    mask_B = torch.tensor([bool(bits >> i & 1) for i in range(len(partner))])
    mix = mix_within(Mix(partner_B, torch.tensor(0.3)), mask_B)
    assert float(mix.lam) == pytest.approx(0.3)
    for value in (False, True):
        group = [i for i in range(len(partner)) if bool(mask_B[i]) == value]
        wanted = [j for j in partner if bool(mask_B[j]) == value]
        assert [int(mix.partner_B[i]) for i in group] == wanted
    if mask_B.all() or not mask_B.any():
        assert torch.equal(mix.partner_B, partner_B)


def test_partners_within_a_mask_are_uniform():
    """Each of the six orders of three images is as likely as the others."""
    mask_B = torch.tensor([True, False, True, False, True])
    random, counts = torch.Generator().manual_seed(0), {}
    for _ in range(3000):
        mix = Mix(torch.randperm(5, generator=random), torch.tensor(0.5))
        order = tuple(mix_within(mix, mask_B).partner_B[mask_B].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 0.001
