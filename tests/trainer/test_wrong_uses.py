"""Every argument that cannot work is refused with a message that names it, what was expected, and what to do."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gradsim import Adapter, GradSimCallback
from tests.trainer.support import (
    NOTHING,
    Truth,
    assert_exact,
    collect_warnings,
    fit,
    read,
    strict,
    train_data,
    val_data,
)

COUNT = "Expected a whole number of at least 1."
COUNT_OR_IDS = "Expected a whole number of at least 1, or a list of different sample ids."
LAYERS = 'Expected "last", "last:3", "all", names, globs, layer types or one predicate of (name, layer).'
SHARE = "Expected a share of the training time, such as 0.1, or None for no limit."
SIMILARITY = "is not known. Expected one of 'dot', 'cosine', 'asymmetric', 'influence'."
POLICY = "is not known. Expected one of 'highest_loss', 'random'."
MODE = "is not known. Expected one of 'auto', 'in_run', 'pass'."
ON_ERROR = "is not known. Expected one of 'warn', 'raise'."
TRUE_LABELS = "one label a training sample, by sample id: a list, an array or a tensor"
CHANNELS = "Expected one finite number a channel in both, `std` above 0."
ADAPTER = "Expected an instance of an `Adapter` subclass."
LOSS = "Expected an instance of a criterion, or a function."


def count(name, *, is_optional=False, at_least=1):
    """Rows for a whole number."""
    expected = COUNT.replace("1", str(at_least))
    rows = [
        ({name: at_least - 1}, ValueError, f"`{name}={at_least - 1}` is too small. {expected}"),
        ({name: -3}, ValueError, f"`{name}=-3` is too small. {expected}"),
        ({name: 2.5}, TypeError, f"`{name}=2.5` is a float. {expected}"),
        ({name: "8"}, TypeError, f"`{name}='8'` is a str. {expected}"),
        ({name: True}, TypeError, f"`{name}=True` is a bool. {expected}"),
    ]
    return rows if is_optional else [*rows, ({name: None}, TypeError, f"`{name}=None` is a NoneType. {expected}")]


def flag(name):
    """Rows for a flag."""
    return [
        ({name: "yes"}, TypeError, f"`{name}='yes'` is a str. Expected True or False."),
        ({name: 1}, TypeError, f"`{name}=1` is an int. Expected True or False."),
    ]


ARGUMENTS = [
    ({"layers": 3}, TypeError, f"`layers=3` holds an int. {LAYERS}"),
    ({"layers": None}, TypeError, f"`layers=None` holds a NoneType. {LAYERS}"),
    ({"layers": int}, TypeError, f"`layers=<class 'int'>` holds a type. {LAYERS}"),
    ({"layers": ["head", 3]}, TypeError, f"`layers=['head', 3]` holds an int. {LAYERS}"),
    ({"layers": nn.ReLU()}, TypeError, f"`layers=ReLU()` holds a ReLU. {LAYERS}"),
    ({"layers": []}, ValueError, f"`layers=[]` chooses nothing. {LAYERS}"),
    (
        {"layers": "last:0"},
        ValueError,
        "`layers='last:0'` names no number. Expected \"last:\" and a whole number of at least 1.",
    ),
    (
        {"mislabel_score": "margin"},
        ValueError,
        "`mislabel_score='margin'` is not known. Expected one of 'margin_knn', 'log_margin', 'knn', 'aum', 'loss', "
        "'el2n', 'self_influence', 'influence'.",
    ),
    ({"true_labels": "abc"}, TypeError, f"`true_labels='abc'` is a str. Expected {TRUE_LABELS}."),
    ({"true_labels": 3}, TypeError, f"`true_labels=3` is an int. Expected {TRUE_LABELS}."),
    ({"true_labels": [1j]}, TypeError, f"`true_labels` holds complex numbers. Expected {TRUE_LABELS}."),
    ({"true_labels": []}, ValueError, f"`true_labels` has the shape [0]. Expected {TRUE_LABELS}."),
    (
        {"true_labels": np.zeros((2, 2, 2))},
        ValueError,
        f"`true_labels` has the shape [2, 2, 2]. Expected {TRUE_LABELS}.",
    ),
    ({"true_labels": [0, -1]}, ValueError, f"`true_labels[1]` is -1, which is no label. Expected {TRUE_LABELS}."),
    (
        {"true_labels": torch.tensor([0.5, torch.nan])},
        ValueError,
        f"`true_labels[1]` is nan, which is no label. Expected {TRUE_LABELS}.",
    ),
    ({"max_state_mb": "1"}, TypeError, "`max_state_mb='1'` is a str. Expected a number above 0."),
    ({"damping": None}, TypeError, "`damping=None` is a NoneType. Expected a number above 0."),
    ({"damping": 0.0}, ValueError, "`damping=0.0` is too small. Expected a number above 0."),
    ({"damping": float("nan")}, ValueError, "`damping=nan` is too small. Expected a number above 0."),
    ({"max_state_mb": 0}, ValueError, "`max_state_mb=0` is too small. Expected a number above 0."),
    ({"id_key": 1.5}, TypeError, "`id_key=1.5` is a float. Expected a key or a place in batches."),
    ({"similarity": "dott"}, ValueError, f"`similarity='dott'` {SIMILARITY}"),
    ({"similarity": None}, ValueError, f"`similarity=None` {SIMILARITY}"),
    ({"similarity": ["dot"]}, ValueError, f"`similarity=['dot']` {SIMILARITY}"),
    *count("num_queries"),
    *count("top_k"),
    *count("every_n_epochs", is_optional=True),
    *count("every_n_steps", is_optional=True),
    *count("warmup_epochs", at_least=0),
    *flag("last_epoch_only"),
    (
        {"every_n_epochs": 2, "every_n_steps": 10},
        ValueError,
        "`every_n_epochs=2` and `every_n_steps=10` contradict each other. Pass one of them.",
    ),
    (
        {"every_n_epochs": 2, "last_epoch_only": True},
        ValueError,
        "`every_n_epochs=2` and `last_epoch_only=True` contradict each other. Pass one of them.",
    ),
    ({"time_budget": "10%"}, TypeError, f"`time_budget='10%'` is a str. {SHARE}"),
    ({"time_budget": True}, TypeError, f"`time_budget=True` is a bool. {SHARE}"),
    ({"time_budget": 0}, ValueError, f"`time_budget=0` is out of range. {SHARE}"),
    ({"time_budget": float("nan")}, ValueError, f"`time_budget=nan` is out of range. {SHARE}"),
    *flag("final_pass"),
    *flag("trusted_val"),
    (
        {"trusted_val": True, "mislabel_score": None},
        ValueError,
        "`trusted_val=True` and `mislabel_score=None` contradict each other: the first adds to the score of training "
        "steps. Leave one of them out.",
    ),
    ({"mode": "inrun"}, ValueError, f"`mode='inrun'` {MODE}"),
    ({"mode": None}, ValueError, f"`mode=None` {MODE}"),
    (
        {"mode": "in_run", "mislabel_score": None},
        ValueError,
        "`mode='in_run'` and `mislabel_score=None` contradict each other: the first needs training steps to be "
        "watched. Leave one of them out.",
    ),
    *[
        ({"along_run": value}, error, f"`along_run={value!r}` {what}. {COUNT_OR_IDS}")
        for value, error, what in (
            (0, ValueError, "is too small"),
            (True, TypeError, "is a bool"),
            (2.5, TypeError, "is a float"),
            ("8", TypeError, "is a str"),
            ([], ValueError, "is empty"),
            ([1, 2.5], TypeError, "holds a float"),
            ([True], TypeError, "holds a bool"),
            ([3, -1], ValueError, "holds a negative id"),
            ([3, 1, 3], ValueError, "holds an id twice"),
        )
    ],
    (
        {"along_run": 3, "mislabel_score": None, "max_state_mb": 0},
        ValueError,
        "`max_state_mb=0` is too small. Expected a number above 0.",
    ),
    *[
        (
            {"along_run": 3, "mode": mode},
            ValueError,
            f"`mode='{mode}'` and `along_run=3` contradict each other: the first reads some of the training samples, "
            "the second sums over all of them. Leave one of them out.",
        )
        for mode in ("in_run", "auto")
    ],
    ({"loss_fn": 3}, TypeError, f"`loss_fn=3` is an int. {LOSS}"),
    ({"loss_fn": nn.MSELoss}, TypeError, f"`loss_fn={nn.MSELoss!r}` is a type. {LOSS}"),
    ({"adapter": "mine"}, TypeError, f"`adapter='mine'` is a str. {ADAPTER}"),
    ({"adapter": Adapter}, TypeError, f"`adapter={Adapter!r}` is a type. {ADAPTER}"),
    *count("max_train_samples", is_optional=True),
    ({"query_policy": "hardest"}, ValueError, f"`query_policy='hardest'` {POLICY}"),
    ({"query_policy": None}, ValueError, f"`query_policy=None` {POLICY}"),
    ({"class_names": "cat"}, TypeError, "`class_names='cat'` is a str. Expected a list of strings."),
    ({"class_names": 4}, TypeError, "`class_names=4` is an int. Expected a list of strings."),
    ({"class_names": ["cat", 4]}, TypeError, "`class_names=['cat', 4]` is a list. Expected a list of strings."),
    (
        {"class_names": []},
        ValueError,
        "`class_names=[]` is empty. Expected one name a class, or None for the dataset's own.",
    ),
    ({"mean": [0.5]}, ValueError, "`mean` and `std` undo a normalisation together. Pass both or neither."),
    ({"std": [0.5]}, ValueError, "`mean` and `std` undo a normalisation together. Pass both or neither."),
    (
        {"mean": 0.5, "std": [0.2]},
        TypeError,
        "`mean=0.5` is a float. Expected a list of numbers, one a channel.",
    ),
    (
        {"mean": [0.5], "std": "a"},
        TypeError,
        "`std='a'` is a str. Expected a list of numbers, one a channel.",
    ),
    ({"mean": [0.5, 0.5], "std": [0.2]}, ValueError, f"`mean=[0.5, 0.5]` and `std=[0.2]`. {CHANNELS}"),
    ({"mean": [0.5], "std": [0.0]}, ValueError, f"`mean=[0.5]` and `std=[0.0]`. {CHANNELS}"),
    ({"mean": [float("nan")], "std": [0.2]}, ValueError, f"`mean=[nan]` and `std=[0.2]`. {CHANNELS}"),
    *flag("show_teachers"),
    *count("panel_pages"),
    *count("memory_budget", is_optional=True),
    ({"seed": "one"}, TypeError, "`seed='one'` is a str. Expected a whole number."),
    ({"seed": 1.5}, TypeError, "`seed=1.5` is a float. Expected a whole number."),
    ({"seed": True}, TypeError, "`seed=True` is a bool. Expected a whole number."),
    (
        {"seed": 2**64},
        ValueError,
        f"`seed={2**64}` does not fit into 64 bits. Expected a number from -2**63 to 2**64 - 1.",
    ),
    *[
        (
            {"name": name},
            ValueError,
            f"`name={name!r}` cannot name a folder. Expected a non-empty string without slashes.",
        )
        for name in ("", ".", "..", "a/b", "a\\b")
    ],
    (
        {"describe": 3},
        TypeError,
        "`describe=3` is an int. Expected a function of a sample, or a tokenizer with `decode`.",
    ),
    ({"feature_names": "age"}, TypeError, "`feature_names='age'` is a str. Expected a list of strings."),
    ({"feature_names": []}, ValueError, "`feature_names=[]` is empty. Expected one name a number, or None."),
    *[
        (
            {"sinks": sinks},
            TypeError,
            f"`sinks={shown}. Expected a list of objects with the methods `write_images`, `write_texts`, "
            "`write_scalars`.",
        )
        for sinks, shown in (("tensorboard", "'tensorboard'` is a str"), ([3], "3` is an int"))
    ],
    ({"name": 3}, TypeError, "`name=3` is an int. Expected a string."),
    ({"on_error": "ignore"}, ValueError, f"`on_error='ignore'` {ON_ERROR}"),
    ({"on_error": None}, ValueError, f"`on_error=None` {ON_ERROR}"),
]

AT_THE_START = {"train_data"}
"""Arguments that are looked at when training starts: see ``TestOtherTrainingData``."""


class TestArguments:
    @pytest.mark.parametrize(("options", "error", "message"), ARGUMENTS, ids=lambda value: str(value)[:40])
    def test_are_refused_at_construction(self, options, error, message):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            GradSimCallback(**options)

    @pytest.mark.parametrize("labels", [["cat", "dog"], [[0, 1], [1]], [0, None]], ids=str)
    def test_true_labels_that_are_no_numbers(self, labels):
        with pytest.raises(TypeError, match=r"^`true_labels` holds more than numbers: .*[^.]\. Expected one label a"):
            GradSimCallback(true_labels=labels)

    def test_none_is_left_out(self):
        tested = {name for options, _, _ in ARGUMENTS for name in options}
        assert tested | AT_THE_START == set(inspect.signature(GradSimCallback).parameters)

    def test_arrays_are_lists(self):
        GradSimCallback(class_names=np.array(["a", "b"]), mean=np.float32([0.5]), std=(1,))

    @pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
    def test_the_largest_seeds(self, seed):
        torch.Generator().manual_seed(GradSimCallback(seed=seed).seed)


class TestNothingToLookAt:
    @pytest.mark.parametrize(
        ("options", "trainer"),
        [
            ({}, {"limit_val_batches": 0}),
            ({}, {"check_val_every_n_epoch": 3}),
            ({"every_n_epochs": 3}, {"max_epochs": 2}),
            ({"warmup_epochs": 2}, {"max_epochs": 2}),
            ({"every_n_steps": 100}, {}),
        ],
        ids=str,
    )
    def test_is_said(self, tmp_path, options, trainer):
        with collect_warnings() as texts:
            gradsim, _, _ = fit(tmp_path, strict(**options), **trainer)
        assert gradsim.report is None
        assert texts == [NOTHING]


class TestMemoryBudget:
    def test_that_does_not_suffice_for_a_sample_is_noted(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(memory_budget=1))
        (note,) = read(gradsim).notes
        words = r"`memory_budget=1` does not suffice for one sample at a time, which takes about [\d,]+ bytes: "
        assert re.fullmatch(words + "the pass took as much", note)
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())


class TestTwoCallbacks:
    def test_of_different_names(self, tmp_path):
        other = strict(name="layers", layers="all", similarity="cosine")
        gradsim, module, _ = fit(tmp_path, strict(), callbacks=[other])
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())
        assert_exact(read(other), Truth(module, list(module.parameters())), train_data(), val_data())
        for name in ("gradsim", "layers"):
            assert (tmp_path / "run" / "version_0" / name / "report.json").exists()

    def test_of_one_name(self, tmp_path):
        # Lightning's own words, as it asks before we can.
        words = "Found more than one stateful callback of type `GradSimCallback`.*`callback.state_key` must be unique"
        with pytest.raises(RuntimeError, match=words):
            fit(tmp_path, GradSimCallback(), callbacks=[GradSimCallback(layers="all")])
