"""The order of the images and the random numbers of every step."""

from types import SimpleNamespace

import pytest
import torch

from conftest import make_trainer
from pseudoloss.data.storage import DeviceImages
from pseudoloss.engine.feed import BLOCK, Feed
from pseudoloss.methods.base import Step, Stream, fold, no_mixing, uniform

N = 60


ALL = (Stream(),)


def make_feed(streams=ALL, batch_size=10, parts=1, n=N, mixes=1):
    """Images whose pixels are their position in the dataset; labels are the position modulo 4."""
    images = torch.arange(n).clamp(max=255)[:, None, None, None].to(torch.uint8)
    given_N = torch.arange(n) % 4
    images = DeviceImages(images, torch.device("cpu"))
    return Feed(images, given_N, streams, batch_size, parts, draws=3, mixes=mixes)


def make_step(*lambdas):
    return Step(show=None, loss=None, draws=3, lambdas=lambdas or (fold,))


def run_epoch(feed, seed=0, state=None, step=None):
    """All batches of an epoch: one list of parts per step."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in feed.batches(step or make_step(), state, random):
        found.append([feed.batch(part) for part in range(feed.parts)])
        feed.step += 1
    return found


def indices(epoch):
    return [i for parts in epoch for batch in parts for i in batch.index_B.tolist()]


def test_an_epoch_visits_every_image_once_in_a_new_order():
    feed = make_feed()
    first = indices(run_epoch(feed, seed=0))
    assert sorted(first) == list(range(N))
    assert first != list(range(N))
    assert indices(run_epoch(feed, seed=0)) == first  # the same random numbers, the same order
    other = indices(run_epoch(feed, seed=1))
    assert sorted(other) == list(range(N))
    assert other != first


def test_the_images_of_an_incomplete_batch_are_omitted():
    feed = make_feed(batch_size=16)
    found = indices(run_epoch(feed))
    assert (feed.steps(None), len(found), len(set(found))) == (3, 48, 48)


def test_a_batch_holds_the_images_and_labels_of_its_index():
    for (batch,) in run_epoch(make_feed()):
        assert torch.equal(batch.images_BCHW.flatten().long(), batch.index_B)
        assert torch.equal(batch.given_B, batch.index_B % 4)
        assert batch.draws_BK.shape == (10, 3)
        assert batch.draws_BK.std() > 0.2


def test_partners_are_permutations_and_lambda_follows_its_rule():
    epoch = run_epoch(make_feed(mixes=3), step=make_step(fold, uniform, no_mixing))
    lams = [[batch.mixes[i].lam.item() for (batch,) in epoch] for i in range(3)]
    assert all(0.5 <= lam <= 1 for lam in lams[0])
    assert any(lam < 0.5 for lam in lams[1])
    assert set(lams[2]) == {1.0}
    assert len(set(lams[0])) == len(set(lams[1])) == 6  # drawn anew in every step
    for (batch,) in epoch:
        for mix in batch.mixes:
            assert sorted(mix.partner_B.tolist()) == list(range(10))
        assert batch.mixes[0].partner_B.tolist() != batch.mixes[1].partner_B.tolist()


def test_a_step_may_have_fewer_rules_than_the_feed_has_mixes():
    """The feed has as many mixes as any step of the method needs."""
    for (batch,) in run_epoch(make_feed(mixes=2), step=make_step(no_mixing)):
        assert batch.mixes[0].lam.item() == 1
    assert len(run_epoch(make_feed(mixes=1), step=make_step())) == 6


def test_random_numbers_are_drawn_anew_after_every_block_of_steps():
    epoch = run_epoch(make_feed(batch_size=2, n=2 * BLOCK + 20))
    assert len(epoch) == BLOCK + 10
    draws = {batch.draws_BK.flatten()[0].item() for (batch,) in epoch}
    lams = {batch.mixes[0].lam.item() for (batch,) in epoch}
    assert (len(draws), len(lams)) == (len(epoch), len(epoch))


def test_parts_of_a_step_share_its_images_and_mix_within_themselves():
    feed = make_feed(batch_size=12, parts=3)
    epoch = run_epoch(feed)
    assert sorted(indices(epoch)) == list(range(N))
    for parts in epoch:
        assert [len(batch.index_B) for batch in parts] == [4, 4, 4]
        for batch in parts:
            assert torch.equal(batch.images_BCHW.flatten().long(), batch.index_B)
            assert sorted(batch.mixes[0].partner_B.tolist()) == [0, 1, 2, 3]
            assert batch.draws_BK.shape == (4, 3)
        assert len({batch.mixes[0].lam.item() for batch in parts}) == 3


# ------------------------------------------------------------------------------------ streams


def state_of(clean):
    return SimpleNamespace(clean_N=torch.isin(torch.arange(N), torch.tensor(clean)))


CLEAN, NOISY = Stream(lambda state: state.clean_N), Stream(lambda state: ~state.clean_N, size=4)


@pytest.mark.parametrize("parts", [1, 2])
def test_streams_hold_only_masked_images_one_stream_after_the_other(parts):
    state = state_of(range(0, 25))
    feed = make_feed((CLEAN, NOISY), parts=parts)
    assert feed.steps(state) == 2  # of the leading stream: 25 images in batches of 10
    epoch = run_epoch(feed, state=state)
    assert len(epoch) == 2
    leading, second = [], []
    for batches in epoch:
        for batch in batches:
            assert len(batch.index_B) == 14 // parts
            leading += batch.index_B[: 10 // parts].tolist()
            second += batch.index_B[10 // parts :].tolist()
    assert len(set(leading)) == len(leading) == 20
    assert max(leading) < 25 <= min(second)
    assert len(set(second)) == len(second) == 8


def test_a_stream_that_is_too_short_repeats_and_uses_all_of_its_images():
    state = state_of(range(0, 57))  # three are noisy, and five steps need 20 of them
    epoch = run_epoch(make_feed((CLEAN, NOISY)), state=state)
    assert len(epoch) == 5
    second = [i for (batch,) in epoch for i in batch.index_B[10:].tolist()]
    assert sorted(set(second)) == [57, 58, 59]
    counts = [second.count(i) for i in (57, 58, 59)]
    assert max(counts) - min(counts) <= 1


def test_a_leading_stream_smaller_than_a_batch_has_one_step():
    state = state_of([3, 7])
    epoch = run_epoch(make_feed((CLEAN, NOISY)), state=state)
    assert len(epoch) == 1
    assert set(epoch[0][0].index_B[:10].tolist()) == {3, 7}


@pytest.mark.parametrize("clean", [(), range(N)])
def test_an_empty_mask_stands_for_all_images(clean):
    state = state_of(list(clean))
    feed = make_feed((CLEAN, NOISY))
    assert feed.steps(state) == 6
    epoch = run_epoch(feed, state=state)
    leading = [i for (batch,) in epoch for i in batch.index_B[:10].tolist()]
    second = [i for (batch,) in epoch for i in batch.index_B[10:].tolist()]
    assert sorted(leading) == list(range(N))
    assert len(set(second)) == len(second) == 24


def test_masks_may_change_between_epochs():
    feed = make_feed((CLEAN, NOISY))
    assert len(run_epoch(feed, state=state_of(range(40)))) == 4
    assert len(run_epoch(feed, state=state_of(range(20)))) == 2
    assert len(run_epoch(feed, state=state_of(range(60)))) == 6


# ---------------------------------------------------------------------------------- in a trainer


def test_an_epoch_that_starts_again_draws_the_same_numbers():
    trainer = make_trainer()
    visits, lams = [], []

    def record(phase):
        step, feed, _ = trainer.steps[phase][0]

        def call():
            batch = feed.batch(0)
            feed.step += 1
            visits.extend(batch.index_B.tolist())
            lams.append(batch.mixes[0].lam.item())

        trainer.steps[phase][0] = (step, feed, call)

    record(0)
    record(1)
    trainer.train_epoch(0)
    assert sorted(visits) == list(range(64))
    assert all(0.5 <= lam <= 1 for lam in lams)
    first = (list(visits), list(lams))
    visits.clear(), lams.clear()
    trainer.train_epoch(0)
    assert (visits, lams) == first
    visits.clear(), lams.clear()
    trainer.train_epoch(1)
    assert sorted(visits) == list(range(64))
    assert (visits, lams) != first


@pytest.mark.parametrize(("settings", "low"), [({}, 0.5), ({"mixup_lambda": "uniform"}, 0)])
def test_lambda_in_both_phases_is_as_the_settings_say(settings, low):
    trainer = make_trainer(**settings)
    for prepared in (trainer.steps[0][0], trainer.steps[1][0]):
        step, feed, _ = prepared
        lams = []
        for _ in range(20):
            feed.draw(step, torch.Generator().manual_seed(len(lams)))
            lams.append(feed.batch(0).mixes[0].lam.item())
        assert low <= min(lams) < low + 0.2


def test_without_mixup_lambda_is_one():
    trainer = make_trainer(mixup=False)
    for (step, feed, _), *_ in trainer.steps:
        feed.draw(step, torch.Generator())
        assert feed.batch(0).mixes[0].lam.item() == 1
