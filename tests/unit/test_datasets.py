"""Views of datasets with other labels."""

import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_gradsim.datasets import Relabelled
from lightning_gradsim.errors import BatchFormatError

Pair = namedtuple("Pair", ["x", "y"])
SAMPLES = {
    "pair": ((1.5, 3), (1.5, 7)),
    "list": ([1.5, 3], [1.5, 7]),
    "more": ((1.5, 3, "name"), (1.5, 7, "name")),
    "named": (Pair(1.5, 3), Pair(1.5, 7)),
    "mapping": ({"x": 1.5, "label": 3}, {"x": 1.5, "label": 7}),
    "array": ((1.5, np.int64(3)), (1.5, np.int64(7))),
    "tensor": ((1.5, torch.tensor(3)), (1.5, torch.tensor(7))),
    "zero-dimensional array": ((1.5, np.array(3)), (1.5, np.array(7))),
    "float": ((1.5, torch.tensor([3.0])), (1.5, torch.tensor([7.0]))),
}


@pytest.mark.parametrize(("sample", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_the_label_is_replaced_in_its_own_form(sample, expected):
    view = Relabelled([sample, sample], {1: 7})
    assert view[0] is sample
    assert view[1] == expected
    assert type(view[1]) is type(sample)
    label = view[1]["label"] if isinstance(sample, dict) else view[1][1]
    assert type(label) is type(sample["label"] if isinstance(sample, dict) else sample[1])


def test_it_reads_like_its_dataset():
    view = Relabelled(TensorDataset(torch.arange(3.0), torch.arange(3)), {2: 0})
    assert len(view) == 3
    assert [int(y) for _, y in view] == [0, 1, 0]
    assert int(view[-1][1]) == 0
    with pytest.raises(IndexError):
        view[3]
    assert [int(y) for _, y in pickle.loads(pickle.dumps(view))] == [0, 1, 0]


@pytest.mark.parametrize("label", [torch.tensor([0, 1, 0]), np.array([0.0, 1.0])])
def test_labels_that_are_no_class_index(label):
    with pytest.raises(BatchFormatError, match="so a class index cannot replace it"):
        Relabelled([(1.5, label)], {0: 1})[0]


@pytest.mark.parametrize("sample", [3, "text", (1.5,), {"x": 1}, {"label": 1, "target": 2}])
def test_samples_without_a_label_to_replace(sample):
    with pytest.raises(BatchFormatError, match=r"whose label cannot be replaced\. Expected"):
        Relabelled([sample], {0: 7})[0]
