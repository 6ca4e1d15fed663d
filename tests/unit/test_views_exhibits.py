"""Exhibits of every kind of sample: pictures, texts, tokens, named values, anything."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_gradsim.views.exhibits import MAX_NUMBERED, MAX_TEXT, Exhibit, ExhibitMaker, are_near_duplicates
from lightning_gradsim.views.values import make_scale

TOKENS = {"input_ids": torch.tensor([[5, 6, 7, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
TOKENIZER = SimpleNamespace(decode=lambda tokens: " ".join(f"w{token}" for token in tokens))
LEVELS = np.arange(90, dtype=np.uint8).reshape(5, 6, 3)


@pytest.mark.parametrize(
    ("sample", "batch", "describe", "text"),
    [
        pytest.param(("a text", 1), (torch.zeros(1, 3), 1), None, "a text", id="pair"),
        pytest.param({"text": "a text", "id": "x"}, {"x": torch.zeros(1, 3)}, None, "a text", id="mapping"),
        pytest.param("a text", torch.zeros(1, 3), None, "a text", id="alone"),
        pytest.param({"id": "x"}, {"x": torch.zeros(1, 3)}, None, None, id="no text"),
        pytest.param((7, 1), (torch.zeros(1, 3), 1), lambda sample: sample[0], "7", id="describe"),
        pytest.param(None, TOKENS, TOKENIZER, "w5 w6 w7", id="tokens and their mask"),
        pytest.param(None, (TOKENS, torch.ones(1)), TOKENIZER, "w5 w6 w7", id="tokens in a pair"),
        pytest.param(None, (torch.tensor([[1, 2]]), torch.ones(1)), TOKENIZER, "w1 w2", id="tokens alone"),
        pytest.param(None, (torch.rand(1, 2), torch.ones(1)), TOKENIZER, None, id="no tokens"),
    ],
)
def test_texts(sample, batch, describe, text):
    assert ExhibitMaker(describe=describe).make(sample, batch).text == text


def test_long_texts_are_cut():
    assert ExhibitMaker().make(("x" * 10**6, 1), torch.zeros(1)).text == "x" * MAX_TEXT + "…"


@pytest.mark.parametrize(
    "sample",
    [Image.fromarray(LEVELS), (Image.fromarray(LEVELS), 1), {"image": LEVELS}, (LEVELS, 3)],
    ids=["PIL", "PIL in a pair", "array in a mapping", "array in a pair"],
)
def test_pictures_of_samples_whose_batches_have_none(sample):
    exhibit = ExhibitMaker().make(sample, {"features": torch.zeros(1, 9)})
    np.testing.assert_array_equal(exhibit.picture.pixels, LEVELS)


def test_the_batch_comes_first():
    batch = (torch.from_numpy(255 - LEVELS).permute(2, 0, 1)[None], torch.zeros(1))
    np.testing.assert_array_equal(ExhibitMaker().make((LEVELS, 0), batch).picture.pixels, 255 - LEVELS)


def test_a_picture_may_have_words():
    exhibit = ExhibitMaker(describe=lambda _: "a ship").make((LEVELS, 0), torch.from_numpy(LEVELS)[None])
    assert exhibit.text == "a ship"
    assert exhibit.picture is not None


def test_named_values():
    maker = ExhibitMaker(feature_names=["age", "height"])
    exhibit = maker.make(None, {"x": torch.tensor([[31, 1.5]]), "y": torch.zeros(1)})
    assert exhibit.values == (("age", 31.0), ("height", 1.5))
    assert exhibit.picture is None
    assert maker.make(None, torch.zeros(1, 3)).values is None, "another number of values"


@pytest.mark.parametrize(
    "sample",
    [None, 3, object(), torch.zeros(5), [], {}, (None, None), torch.zeros(2, 2, 2, 2, 2)],
    ids=lambda sample: type(sample).__name__,  # the address of an object differs between processes
)
def test_anything_else_shows_nothing(sample):
    assert ExhibitMaker(feature_names=["a", "b"], describe=None).make(sample, sample).is_empty


def test_numbers_without_names_are_numbered_as_long_as_they_are_few():
    maker = ExhibitMaker()
    assert maker.make(None, (torch.tensor([[31, 1.5]]), torch.zeros(1))).values == (("0", 31.0), ("1", 1.5))
    assert maker.make(None, torch.zeros(1, MAX_NUMBERED)).note is None
    many = maker.make(None, torch.zeros(1, MAX_NUMBERED + 1))
    assert many.values is None
    assert many.note == "inputs are vectors of 51 numbers, which are not shown: pass `feature_names=` or `describe=`"
    assert maker.make(None, TOKENS).is_empty, "token ids are no features"
    assert maker.make((LEVELS, 0), torch.zeros(1, 3)).values is None, "a picture says more"


def test_another_number_of_names_than_of_numbers_is_told_of():
    exhibit = ExhibitMaker(feature_names=["a", "b"]).make(None, (torch.zeros(1, 3), torch.zeros(1)))
    assert exhibit.is_empty
    assert exhibit.note.startswith("`feature_names=` has 2 names, but an input has 3 numbers")


def test_equal_texts_and_values_are_duplicates():
    assert are_near_duplicates(Exhibit(text="a  b\n"), Exhibit(text="a b"))
    assert not are_near_duplicates(Exhibit(text="a b"), Exhibit(text="a c"))
    assert not are_near_duplicates(Exhibit(text=" "), Exhibit(text=""))
    assert are_near_duplicates(Exhibit(values=(("a", 1.0),)), Exhibit(values=(("a", 1.0),)))
    assert not are_near_duplicates(Exhibit(values=(("a", 1.0),)), Exhibit(values=(("a", 1.1),)))
    assert not are_near_duplicates(Exhibit(), Exhibit())


def test_values_that_differ_by_a_good_part_of_their_range_are_marked():
    nan = float("nan")
    shown = [
        [("age", 20.0), ("height", 1.0), ("sex", 0.0), ("weight", nan), ("one", 1.0)],
        [("age", 24.0), ("height", 2.0), ("sex", 1.0), ("weight", 3.0), ("one", 1.0)],
        [("age", 60.0), ("height", 1.1), ("sex", 1.0), ("weight", nan), ("one", 1.0)],
    ]
    scale = make_scale(shown)
    assert scale.ranges == (40.0, 1.0, 1.0, 0.0, 0.0)
    assert [cell.differs for cell in scale.cells(shown[1], shown[0])] == [False, True, True, True, False]
    assert [cell.differs for cell in scale.cells(shown[2], shown[0])] == [True, False, True, False, False]
    assert [cell.value for cell in scale.cells(shown[0], None)] == ["20", "1", "0", "nan", "1"]
