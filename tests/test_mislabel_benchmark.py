import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="an extra: `examples`")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def load(monkeypatch):
    """Imports a script of `benchmarks/`, whose modules find one another as in a run, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(ROOT / "benchmarks"):
            del sys.modules[name]


@pytest.fixture
def short(load, monkeypatch):
    """The benchmark with settings of two epochs."""
    settings, benchmark = load("mislabel_train").SETTINGS, load("mislabel")
    for name, setting in settings.items():
        changed = load("dataclasses").replace(setting, epochs=2)
        monkeypatch.setitem(settings, name, changed)
    return benchmark


@pytest.mark.parametrize("noise", ["sym20", "pair20"])
def test_the_noise_that_is_asked_for(load, noise):
    data = load("mislabel_data")
    made, same = data.make_synthetic("digits", noise, 1), data.make_synthetic("digits", noise, 1)
    assert int(made.flipped.sum()) == round(0.2 * 1439)
    assert torch.equal(made.train_y, same.train_y)
    assert not torch.equal(made.flipped, data.make_synthetic("digits", noise, 2).flipped)
    if noise == "pair20":
        for given, true in zip(made.train_y[made.flipped], made.true_y[made.flipped], strict=True):
            assert data.PAIRS[int(true)] == int(given)


def test_ambiguous_samples_take_the_label_of_their_runner_up(load):
    # Three clouds on a line: what is far out cannot be ambiguous, and its runner-up is the cloud in the middle.
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    inputs = (4 * labels + torch.randn(90, generator=generator))[:, None]
    flip = load("mislabel_data").flip_ambiguous
    given = flip(inputs, labels, 0.1, np.random.default_rng(0), 0)
    flipped = given != labels
    assert int(flipped.sum()) == 9
    assert (given[flipped & (labels != 1)] == 1).all()
    assert torch.equal(given, flip(inputs, labels, 0.1, np.random.default_rng(0), 0))


def test_clean_labels_and_a_split(load):
    made = load("mislabel_data").make_synthetic("digits", "clean", 0)
    assert not made.flipped.any()
    assert [len(made.train_y), len(made.validation_y), len(made.test_y)] == [1439, 179, 179]
    rows = torch.cat([made.train_x, made.validation_x, made.test_x])
    assert len(rows.unique(dim=0)) == 1797  # no picture twice


def test_the_record_is_what_the_training_steps_saw(load):
    training = load("mislabel_train")
    sets = load("mislabel_data").make_synthetic("digits", "sym20", 0)
    setting = load("dataclasses").replace(training.SETTINGS["digits-sym20"], epochs=1, batch_size=1439)
    record = training.train(setting, sets, 5)
    torch.manual_seed(5)
    logits, features = setting.make_network()(sets.train_x)  # one step sees all samples with the first weights
    torch.testing.assert_close(record.logits[0], logits)
    torch.testing.assert_close(record.features[0], features.half(), rtol=1e-3, atol=1e-3)
    assert torch.equal(record.rates[0], torch.full((1439,), setting.learning_rate))


def test_shifted_and_mirrored_pictures(load):
    images = torch.arange(2 * 3 * 64.0).reshape(2, 3, 8, 8) + 1
    seen = [load("mislabel_train").augmented(images)[1] for _ in range(40)]
    padded = torch.nn.functional.pad(images[1], [4] * 4)
    windows = [padded[:, i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
    assert all(any(torch.equal(s, w) or torch.equal(s, w.flip(2)) for w in windows) for s in seen)
    assert len({float(s.sum()) for s in seen}) > 10


def test_a_run_goes_on_where_it_stopped(short, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GRADSIM_DATA", raising=False)
    command = ["--cache", str(tmp_path), "--only", "digits-sym20", "digits-clean", "music", "--seeds", "0", "1"]
    path = tmp_path / "figures.json"
    short.main([*command, "--json", str(path)])
    printed = capsys.readouterr().out
    assert "music is left out: GRADSIM_DATA is unset" in printed
    assert "over AUM" in printed
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["digits-sym20", "digits-clean"]
    figures = results["digits-sym20"]["0"]
    assert 0.5 < figures["aum"]["AP"] <= 1
    assert figures["run"]["noise"] == pytest.approx(0.2, abs=1e-3)
    monkeypatch.setattr(short, "measure", None)  # nothing is trained or measured twice
    short.main([*command, "--json", str(path)])
    assert json.loads(path.read_text())["results"] == results


def test_a_second_training_without_flagged_samples(short, load, tmp_path, capsys):
    command = ["--cache", str(tmp_path), "--only", "digits-sym20", "--seeds", "0", "--act"]
    short.main(command)
    figures = json.loads((tmp_path / "figures" / "digits-sym20-0.json").read_text())
    assert list(figures["act"]) == list(load("mislabel_measure").ACTIONS)
    assert all(0.5 < accuracy < 1 for accuracy in figures["act"].values())
    assert len(set(figures["act"].values())) > 2
    assert "| test accuracy | as is | dropped |" in capsys.readouterr().out


def test_ranks_and_intervals(load):
    benchmark, measuring = load("mislabel"), load("mislabel_measure")
    wrong = torch.tensor([True, False, True, False])
    figures = measuring.rank_figures(torch.tensor([4.0, 3.0, 2.0, 1.0]), wrong)
    assert figures["AP"] == pytest.approx((1 + 2 / 3) / 2)
    assert figures["AUROC"] == pytest.approx(3 / 4)
    assert figures["precision@n"] == 0.5
    assert figures["top 1 %"] == figures["top 5 %"] == 1.0
    mean, low, high = benchmark.interval([0.01, 0.02, 0.03])
    assert [mean, low, high] == pytest.approx([0.02, 0.02 - 4.303 * 0.01 / 3**0.5, 0.02 + 4.303 * 0.01 / 3**0.5])


@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_the_whole_case(load, tmp_path, capsys, monkeypatch):
    case, settings = load("whole_case"), load("mislabel_train").SETTINGS
    monkeypatch.setitem(settings, "digits-sym20", load("dataclasses").replace(settings["digits-sym20"], epochs=4))
    train = case.fit

    def share_of_right_labels(setting, sets, seed, dataset, gradsim=None):
        if gradsim is not None:
            return train(setting, sets, seed, dataset, gradsim)
        truth = {x.numpy().tobytes(): y for x, y in zip(sets.train_x, sets.true_y, strict=True)}
        return float(np.mean([truth[x.numpy().tobytes()] == y for x, y in dataset]))

    monkeypatch.setattr(case, "fit", share_of_right_labels)  # of a second training all but what it is given is noise
    path = tmp_path / "case.json"
    case.main(f"--cache {tmp_path} --only digits-sym20 --seeds 5 --json {path}".split())
    figures = json.loads(path.read_text())["results"]["digits-sym20"]["5"]
    assert figures["found"]["of flagged wrong"] > 3 * figures["found"]["wrong labels"] > 0.5
    right = figures["test accuracy"]
    assert right.pop("as it is") > 0.8
    assert right["dropped"] > right["relabelled"] > 0.9
    assert right["all flagged dropped"] > right["all flagged relabelled"] > 0.9
    assert 0.75 < right["as many dropped at random"] < 0.85
    assert right["first tenth put right by a person"] > right["a random tenth put right"] > 0.8
    assert right["wrong ones dropped (the truth)"] == right["all labels right (the truth)"] == 1
    assert "| all labels right (the truth) | 1.000 |" in capsys.readouterr().out
