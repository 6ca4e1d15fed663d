"""What views show is read from the datasets, and no more of it than is shown."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gradsim.queries import Query
from lightning_gradsim.records import InfluentialSample, QueryReport
from lightning_gradsim.report import Report
from lightning_gradsim.shown_samples import SHOWN_SUSPECTS, SHOWN_TILES, collect_shown_samples
from lightning_gradsim.suspects import SuspectTable
from lightning_gradsim.train_pass import make_reader
from lightning_gradsim.views import QUERIES_PER_PAGE, ExhibitMaker, to_rgb

NUM_TRAIN, NUM_VALIDATION = 60, 20


def image_data(number, seed=0):
    images = torch.rand(number, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(images, torch.arange(number) % 3)


def samples(start):
    return tuple(InfluentialSample(start + i, 0, 1.0, False) for i in range(8))


def make_report(num_queries=8, first_suspect=0):
    ids = torch.arange(first_suspect, first_suspect + 40)
    suspects = SuspectTable(ids, -ids.float(), ids.int(), None, None, ids > 0)
    queries = tuple(
        QueryReport(i, 0, 0, 1, 0.5, 1.0, samples(i), samples(8 + i), samples(16 + i)) for i in range(num_queries)
    )
    return Report(
        0, 0, ("head",), "dot", "all", NUM_TRAIN, NUM_VALIDATION, num_queries, queries=queries, suspects=suspects
    )


def kept_copies(report, data=None):
    return [
        Query(
            None if data is None else (data.tensors[0][[i]], data.tensors[1][[i]]),
            query.sample_id,
            0,
            i,
            query.label,
            query.loss,
        )
        for i, query in enumerate(report.queries)
    ]


def collect(report, train, validation=None, kept=None, maker=None):
    readers = {} if validation is None else {0: make_reader(validation)}
    kept = kept_copies(report) if kept is None else kept
    return collect_shown_samples(report, kept, make_reader(train), readers, maker or ExhibitMaker())


def pixels_of(exhibit):
    return exhibit.picture.pixels


def test_pictures_come_from_the_datasets():
    report, train, validation = make_report(), image_data(NUM_TRAIN), image_data(NUM_VALIDATION, seed=1)
    shown = collect(report, train, validation)
    assert len(shown.queries) == len(report.queries) > QUERIES_PER_PAGE
    assert shown.queries[QUERIES_PER_PAGE:] == (None,) * (len(report.queries) - QUERIES_PER_PAGE)
    wanted = set(range(SHOWN_SUSPECTS))
    for i, query in enumerate(report.queries[:QUERIES_PER_PAGE]):
        np.testing.assert_array_equal(pixels_of(shown.queries[i]), to_rgb(validation.tensors[0][i]).pixels)
        lists = (query.harmful, query.look_alikes, query.teachers)
        wanted |= {sample.sample_id for each in lists for sample in each[:SHOWN_TILES]}
    assert set(shown.train) == wanted
    for sample_id, exhibit in shown.train.items():
        np.testing.assert_array_equal(pixels_of(exhibit), to_rgb(train.tensors[0][sample_id]).pixels)
    assert shown.have_pictures
    assert not shown.have_words


def test_queries_without_an_id_are_shown_from_their_copies():
    validation = image_data(NUM_VALIDATION, seed=1)
    report = make_report()
    report = replace(report, queries=tuple(replace(query, sample_id=None) for query in report.queries))
    shown = collect(report, image_data(NUM_TRAIN), kept=kept_copies(report, validation))
    for i in range(QUERIES_PER_PAGE):
        np.testing.assert_array_equal(pixels_of(shown.queries[i]), to_rgb(validation.tensors[0][i]).pixels)


def test_suspects_that_the_training_data_lack_are_left_out():
    shown = collect(make_report(num_queries=0, first_suspect=50), image_data(NUM_TRAIN))
    assert set(shown.train) == set(range(50, NUM_TRAIN))


def test_other_inputs_show_nothing():
    data = TensorDataset(torch.randn(NUM_TRAIN, 400), torch.arange(NUM_TRAIN))
    shown = collect(make_report(), data, data)
    assert shown.note.startswith("inputs are vectors of 400 numbers")
    assert all(exhibit.is_empty for exhibit in [*shown.queries[:QUERIES_PER_PAGE], *shown.train.values()])
    assert not shown.have_pictures
    assert not shown.have_words


class Texts(Dataset):
    """Words and a label; batches hold numbers only. Samples know which process has read them."""

    def __len__(self):
        return NUM_TRAIN

    def __getitem__(self, index):
        return {"text": f"text {index}", "pid": os.getpid(), "handle": lambda: None}, index % 3


def to_numbers(batch):
    return torch.zeros(len(batch), 4), torch.tensor([label for _, label in batch])


def test_texts_of_samples_whose_batches_are_numbers():
    """Samples that cannot be sent between processes are described where they are read."""
    loader = DataLoader(Texts(), collate_fn=to_numbers)
    shown = collect(make_report(), loader, loader, maker=ExhibitMaker(describe=lambda sample: sample[0]["text"]))
    assert [exhibit.text for exhibit in shown.queries[:2]] == ["text 0", "text 1"]
    assert all(exhibit.text == f"text {sample_id}" for sample_id, exhibit in shown.train.items())
    assert shown.have_words
    assert shown.failure is None


def test_describe_runs_in_a_worker():
    pids = ExhibitMaker(describe=lambda sample: f"{sample[0]['pid']} {os.getpid()}")
    shown = collect(make_report(), DataLoader(Texts(), collate_fn=to_numbers), maker=pids)
    ours = str(os.getpid())
    assert all(ours not in exhibit.text.split() for exhibit in shown.train.values())


def test_a_describe_that_fails_is_told_and_stops_nothing():
    def describe(sample):
        raise KeyError("title")

    shown = collect(make_report(), image_data(NUM_TRAIN), maker=ExhibitMaker(describe=describe))
    assert shown.failure == "KeyError: 'title'"
    assert shown.have_pictures


def test_near_duplicates_of_queries_are_found():
    train, validation = image_data(NUM_TRAIN), image_data(NUM_VALIDATION, seed=1)
    train.tensors[0][3] = validation.tensors[0][1]  # among the harmful ones of query 1
    train.tensors[0][10] = validation.tensors[0][2] + 0.001  # among the look-alikes of query 2, after resaving
    train.tensors[0][25] = validation.tensors[0][0]  # in no list of query 0
    report = make_report()
    assert collect(report, train, validation).near_duplicates(report) == ((1, 3), (2, 10))


def test_constant_pictures_are_no_duplicates():
    blank = TensorDataset(torch.zeros(NUM_TRAIN, 1, 4, 4), torch.zeros(NUM_TRAIN))
    report = make_report()
    assert collect(report, blank, blank).near_duplicates(report) == ()


@pytest.mark.parametrize("size", [320, 1024])
def test_no_more_is_kept_than_is_shown(size):
    data = TensorDataset(torch.rand(2, 3, size, size // 2), torch.arange(2))
    exhibit = ExhibitMaker().make(data[0], [tensor[None] for tensor in data[0]])
    assert pixels_of(exhibit).shape == (320, 160, 3)
