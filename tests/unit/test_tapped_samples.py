"""The newest visit of every sample, against a dictionary."""

import random

import pytest
import torch

from lightning_gradsim.tapped_samples import INDEX_BYTES, TappedBlock, TappedSamples, _draw

FEATURES, CLASSES = 3, 2
ROW_BYTES = INDEX_BYTES + 2 * (2 * FEATURES + CLASSES) + 8


def block(ids, start=0, targets=None):
    ids = torch.tensor(ids, dtype=torch.long)
    values = torch.arange(start, start + len(ids), dtype=torch.float32)[:, None]
    features = (values + torch.arange(FEATURES)).half()
    return TappedBlock(
        ids,
        features,
        values - torch.arange(CLASSES),
        ids % 5 if targets is None else torch.tensor(targets),
        torch.arange(start, start + len(ids)),
        features,
    )


def random_blocks(number=12, size=9, num_ids=40, seed=3):
    draw = random.Random(seed)
    return [block([draw.randrange(num_ids) for _ in range(size)], start=size * i) for i in range(number)]


def newest(blocks):
    """The slow way: a dictionary."""
    rows = {}
    for each in blocks:
        for row, sample_id in enumerate(each.ids.tolist()):
            rows[sample_id] = each.rows(torch.tensor([row]))
    return rows


def assert_holds(samples, expected):
    rows = samples.compute()
    assert rows.ids.tolist() == sorted(expected)
    assert len(samples) == len(expected)
    for row, sample_id in enumerate(rows.ids.tolist()):
        one = expected[sample_id]
        assert rows.steps[row] == one.steps[0]
        assert torch.equal(rows.features[row], one.features[0])
        assert torch.equal(rows.logits[row], one.logits[0].half())
        assert torch.equal(rows.targets[row], one.targets[0])


def fill(blocks, max_rows=10**6, seed=0):
    samples = TappedSamples(max_rows * ROW_BYTES, seed)
    for each in blocks:
        samples.update(each)
    return samples


def test_nothing_before_the_first_visit():
    samples = TappedSamples(1000)
    assert samples.compute() is None
    assert len(samples) == 0


@pytest.mark.parametrize("num_ids", [3, 40, 10**12])
def test_the_newest_visit_of_every_sample(num_ids):
    blocks = random_blocks(num_ids=num_ids)
    samples = fill(blocks)
    assert_holds(samples, newest(blocks))
    assert samples.share == 1.0
    assert samples.num_relabelled == 0


def test_features_are_averaged_over_visits():
    samples = fill([block([1, 2], start=0), block([2, 3], start=4), block([2], start=9)])
    assert samples.compute().averages[:, 0].tolist() == [0.0, ((1 + 4) / 2 + 9) / 2, 5.0]
    assert samples.compute().features[:, 0].tolist() == [0.0, 9.0, 5.0]


def test_a_result_does_not_change_with_later_visits():
    samples = fill([block([1, 2])])
    rows = samples.compute()
    before = rows.features.clone()
    samples.update(block([2, 1], start=50))
    assert torch.equal(rows.features, before)


@pytest.mark.parametrize("order", [1, -1])
def test_without_room_a_seeded_choice_is_kept(order):
    ids = torch.randperm(300).tolist()
    blocks = [block(ids[start : start + 20], start=start) for start in range(0, 300, 20)][::order]
    samples = fill(blocks, max_rows=60)
    kept = set(samples.compute().ids.tolist())
    draws = _draw(torch.arange(300), 0)
    assert kept == {i for i in range(300) if draws[i] < samples.share}
    assert 45 <= len(kept) <= 60
    assert 0.1 < samples.share < 0.3
    assert_holds(samples, {i: one for i, one in newest(blocks).items() if i in kept})
    assert kept != set(fill(blocks, max_rows=60, seed=1).compute().ids.tolist())


def test_memory_stays_within_bounds():
    samples = fill([block(range(start, start + 64), start=start) for start in range(0, 6400, 64)], max_rows=500)
    room = sum(values.untyped_storage().nbytes() for values in vars(samples._rows).values())
    index = sum(values.untyped_storage().nbytes() for values in (samples._sorted_ids, samples._places))
    assert room + index <= 1.1 * 500 * ROW_BYTES
    assert len(samples) > 400


def test_draws_are_even_and_differ_by_seed():
    draws = _draw(torch.arange(20000), 0)
    counts = torch.histc(draws.float(), 10, 0, 1)
    assert ((draws >= 0) & (draws < 1)).all()
    assert (counts - 2000).abs().max() < 200
    other = _draw(torch.arange(20000), 1)
    assert abs(float(torch.corrcoef(torch.stack([draws, other]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([draws[1:], draws[:-1]]))[0, 1])) < 0.03


def test_samples_that_come_with_another_target_are_counted():
    samples = fill([block([4, 2, 9]), block([2, 9, 4]), block([2, 9], targets=[2, 0])])
    assert samples.num_relabelled == 1


def test_another_head_begins_anew():
    samples = fill([block([1, 2])])
    wider = block([7])
    features = torch.ones(1, FEATURES + 1).half()
    wider = TappedBlock(wider.ids, features, wider.logits, wider.targets, wider.steps, features)
    samples.update(wider)
    assert samples.compute().ids.tolist() == [7]


@pytest.mark.parametrize("max_rows", [10**6, 25])
def test_a_state_goes_on_as_if_uninterrupted(max_rows, tmp_path):
    blocks = random_blocks()
    for cut in (0, 5, len(blocks)):
        torch.save(fill(blocks[:cut], max_rows).state_dict(), tmp_path / "state")
        resumed = TappedSamples(max_rows * ROW_BYTES)
        resumed.update(block([1, 3]))  # forgotten
        resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        for each in blocks[cut:]:
            resumed.update(each)
        whole = fill(blocks, max_rows)
        assert resumed.share == whole.share
        for ours, theirs in zip(vars(resumed.compute()).values(), vars(whole.compute()).values(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("max_rows", [10**6, 25])
def test_several_are_joined_by_the_newest_visit(max_rows):
    blocks = random_blocks()
    parts = [fill(blocks[rank::3], max_rows) for rank in range(3)]
    joined = parts[0]
    joined.merge([part.state_dict() for part in parts[1:]])
    kept = {i: one for i, one in newest(blocks).items() if _draw(torch.tensor([i]), 0) < joined.share}
    assert_holds(joined, kept)
    assert joined.share == pytest.approx(min(part.share for part in parts)) or max_rows == 25


def test_a_state_of_another_version_is_left_out():
    samples = TappedSamples(1000)
    samples.load_state_dict({"version": 99})
    assert samples.compute() is None
