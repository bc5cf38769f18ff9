import torch

import pseudoloss as pl
from pseudoloss.engine.randomness import generator, isolated_torch, stream_seed


def test_every_seed_stream_and_epoch_has_its_own_numbers():
    seeds = {stream_seed(s, name, e) for s in range(3) for name in "ab" for e in range(5)}
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)
    first, again, other = (
        torch.rand(3, generator=generator(torch.device("cpu"), 1, "epoch", epoch))
        for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_torch_is_as_before_after_training(tiny_source, tiny_settings):
    """The global random state, the number of threads and the switches of cuDNN."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    before = (cudnn.benchmark, cudnn.allow_tf32)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pl.train(tiny_source, quiet=True, **tiny_settings)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    with isolated_torch():
        torch.set_num_threads(threads + 1)
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, False)
    assert (torch.get_num_threads(), cudnn.benchmark, cudnn.allow_tf32) == (threads, *before)


def test_the_seed_decides_everything(tiny_source, tiny_settings):
    def weights(seed):
        settings = tiny_settings | {"seed": seed, "corrupt": "symmetric:0.2"}
        run = pl.train(tiny_source, quiet=True, **settings)
        return torch.cat([p.flatten() for p in run.model.network.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
