"""The comparison of two ways to compute the same steps. Real graphs need a GPU."""

import pytest

from conftest import TINY, make_source
from pseudoloss.config import Settings
from pseudoloss.engine.agreement import distances, run_phases


@pytest.mark.parametrize("method", ["pls", "divide-mix", "evidential-mix"])
def test_the_same_steps_have_no_distance_and_others_have_one(method):
    """Also where networks are trained in turn."""
    settings = Settings(**(TINY | {"method": method, "epochs": 2, "batch_size": 8}))
    plain, _ = run_phases(make_source(), settings, (1, 3))
    again, _ = run_phases(make_source(), settings, (1, 3), plain)
    nudged, _ = run_phases(make_source(), settings, (1, 3), plain, nudge=True)
    assert all(value == 0 for values in distances(plain, again).values() for value in values)
    found = distances(plain, nudged)
    assert found.keys() == {
        *("warm-up", "warm-up, losses of all images", "main", "main, losses of all images")
    }
    assert 0 < max(found["main"]) < 0.1
    assert (len(found["main"]) > 2) == (method != "pls")
