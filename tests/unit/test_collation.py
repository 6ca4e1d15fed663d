import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lightning_gradsim.collation import find_reordering, reorders_samples
from lightning_gradsim.train_pass import make_reader

NUM = 30


class Texts(Dataset):
    """Sequences of several lengths."""

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return torch.arange(1, 2 + (index * 7) % 11) * (index + 1), index % 3


def padded(samples):
    x = torch.nn.utils.rnn.pad_sequence([sample[0] for sample in samples], batch_first=True)
    return x, torch.tensor([sample[1] for sample in samples])


def longest_first(samples):
    return padded(sorted(samples, key=lambda sample: -len(sample[0])))


def by_label(samples):
    return default_collate(sorted(samples, key=lambda sample: int(sample[1])))


def noisy(samples):
    x, y = padded(samples)
    return x + torch.randn(x.shape), y


def noisy_by_label(samples):
    return noisy(sorted(samples, key=lambda sample: int(sample[1])))


def flattened(samples):
    return torch.cat([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


def normalised(samples):
    x, y = default_collate(samples)
    return x - x.mean(0), y


def reversed_in_mapping(samples):
    x, y = default_collate(samples[::-1])
    return {"x": x, "y": y}


DATA = TensorDataset(torch.randn(NUM, 3), torch.arange(NUM) % 5)
CASES = {
    "default": (DATA, default_collate, False),
    "padded": (Texts(), padded, False),
    "longest first": (Texts(), longest_first, True),
    "by label": (DATA, by_label, True),
    "a mapping": (DATA, reversed_in_mapping, True),
    "noisy": (Texts(), noisy, False),
    "noisy, by label": (Texts(), noisy_by_label, True),
    "flattened": (Texts(), flattened, False),
    "depends on the batch": (DATA, normalised, False),
    "one sample": (TensorDataset(torch.ones(1, 2)), lambda samples: samples[0], False),
}


@pytest.mark.parametrize(("dataset", "collate", "reorders"), CASES.values(), ids=CASES)
def test_samples_in_another_order(dataset, collate, reorders):
    loader = DataLoader(dataset, 4, collate_fn=collate)
    assert reorders_samples(make_reader(loader)) is reorders
    assert (find_reordering(loader) is not None) is reorders


def test_the_function_is_named():
    assert "`collate_fn` (`longest_first`) gives samples in" in find_reordering(
        DataLoader(Texts(), collate_fn=longest_first)
    )


def test_what_cannot_be_read_is_left_to_the_pass():
    def broken(samples):
        raise ValueError("boom")

    assert find_reordering(DataLoader(DATA, collate_fn=broken)) is None
    assert find_reordering([DataLoader(DATA)]) is None
