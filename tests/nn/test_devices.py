"""Choice of device and precision."""

import pytest
import torch

from pseudoloss.errors import InputError
from pseudoloss.nn.devices import (
    choose_device,
    choose_precision,
    cpu_threads,
    device_name,
    using,
)


def test_devices_by_name():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize("name", ["cuda:97", "tpu", "meta", ""])
def test_unknown_devices_are_refused(name):
    with pytest.raises(InputError, match=f"--device {name}"):
        choose_device(name)


def test_precision_depends_on_the_device():
    assert choose_precision("auto", torch.device("cpu")) == torch.float32
    assert choose_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_name_of_the_cpu_tells_its_threads():
    assert device_name(torch.device("cpu")).startswith("CPU (")
    assert device_name(torch.device("meta")) == "meta"


def test_using_the_cpu_changes_nothing():
    with using(torch.device("cpu")):
        assert torch.ones(2).device.type == "cpu"


def test_the_number_of_threads_comes_back_also_after_an_error():
    before, inside = torch.get_num_threads(), []

    def fail():
        with cpu_threads(before + 1):
            inside.append(torch.get_num_threads())
            with cpu_threads(1):
                inside.append(torch.get_num_threads())
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [before + 1, 1, before + 1]
    assert torch.get_num_threads() == before
