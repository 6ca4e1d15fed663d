from collections import Counter

import pytest
import torch

from lightning_gradsim import neighbours
from lightning_gradsim.errors import NonFiniteError
from lightning_gradsim.neighbours import count_references, estimate_flops, neighbour_votes


def reference(features, labels, k, distance, among=None):
    """Every pair on its own, in float64; ties by the smaller row. Disagreement and margin."""
    features = features.double()
    centred = features - features.mean(0)
    shares, margins = [], []
    for i in range(len(features)):
        pairs = []
        for j in range(len(features)) if among is None else among:
            if j == i:
                continue
            if distance == "euclidean":
                closeness = -float((features[i] - features[j]).square().sum())
            else:
                norms = float(centred[i].norm() * centred[j].norm())
                closeness = float(centred[i] @ centred[j]) / norms if norms else 0.0
            pairs.append((-closeness, j))
        votes = Counter(int(labels[j]) for _, j in sorted(pairs)[:k])
        own = votes.pop(int(labels[i]), 0)
        shares.append(1 - own / k)
        margins.append((max(votes.values(), default=0) - own) / k)
    return torch.tensor(shares), torch.tensor(margins)


def assert_votes(found, expected):
    torch.testing.assert_close(found.disagreement, expected[0])
    torch.testing.assert_close(found.margin, expected[1])


@pytest.fixture(params=[None, (3, 4), (7, 64)], ids=["one block", "tiny blocks", "blocks of rows"])
def blocks(request, monkeypatch):
    if request.param is not None:
        rows, columns = request.param
        monkeypatch.setattr(neighbours, "REFERENCE_ROWS", columns)
        monkeypatch.setattr(neighbours, "BLOCK_BYTES", 4 * columns * rows)


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.usefixtures("blocks")
def test_equals_one_pair_at_a_time(distance, dtype):
    features, labels = (torch.randn(60, 5) + 3).to(dtype), torch.randint(3, (60,))
    found = neighbour_votes(features, labels, k=7, distance=distance)
    assert_votes(found, reference(features, labels, 7, distance))
    assert found.num_references == 60


@pytest.mark.usefixtures("blocks")
def test_ties_go_to_the_smaller_row():
    # Whole numbers, symmetric about zero, so that distances are exact and nearly all of them tied.
    features = torch.randint(-1, 2, (30, 2)).double()
    features = torch.cat([features, -features])
    labels = torch.randint(4, (60,))
    found = neighbour_votes(features.float(), labels, k=5, distance="euclidean")
    assert_votes(found, reference(features, labels, 5, "euclidean"))


@pytest.mark.parametrize("columns", [159, 160, 170, 400])
@pytest.mark.parametrize("values", ["all different", "many ties"])
def test_the_largest_of_many(columns, values):
    closeness = torch.randn(20, columns) if values == "all different" else torch.randint(9, (20, columns)).float()
    found, ids = neighbours._largest(closeness, torch.arange(columns) * 3, 4)
    for i, row in enumerate(closeness.tolist()):
        expected = sorted(range(columns), key=lambda j: (-row[j], j))[:4]
        assert sorted(ids[i].tolist()) == sorted(3 * j for j in expected)
        assert sorted(found[i].tolist()) == sorted(row[j] for j in expected)


def test_ties_are_not_left_to_chance():
    features, labels = torch.zeros(50, 3), torch.arange(50)
    labels[:4] = 7
    found = neighbour_votes(features, labels, k=3).disagreement
    expected = torch.ones(50)
    expected[:4] = 0
    expected[7] = 0  # its label is that of its neighbours, the first three rows
    assert torch.equal(found, expected)


def test_ties_in_a_subset_go_to_the_smaller_row_too():
    limit = estimate_flops(50, 20, 3)
    nearest = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:20].sort().values[:3].tolist()
    labels = torch.zeros(50, dtype=torch.long)
    labels[nearest] = 1
    outside = [i for i in range(50) if i not in nearest]
    found = neighbour_votes(torch.zeros(50, 3), labels, k=3, max_flops=limit)
    assert (found.disagreement[outside] == 1).all()


def test_several_labels_a_sample():
    features, labels = torch.randn(40, 3), torch.randint(2, (40, 4)).bool()
    found = neighbour_votes(features, labels, k=5)
    assert found.disagreement.shape == found.margin.shape == (40, 4)
    for column in range(4):
        alone = neighbour_votes(features, labels[:, column], k=5)
        assert torch.equal(found.disagreement[:, column], alone.disagreement)
        torch.testing.assert_close(found.margin[:, column], alone.margin)


def test_targets_of_a_regression():
    features = torch.arange(6.0)[:, None]
    found = neighbour_votes(features, torch.tensor([0.0, 1.0, 2.0, 9.0, 4.0, 5.0]), k=2, distance="euclidean")
    assert found.disagreement.tolist() == [1.5, 0.0, 3.0, 6.0, 3.0, 1.5]
    assert not found.margin.any()


def test_a_subset_when_operations_are_limited():
    features, labels = torch.randn(80, 4), torch.randint(2, (80,))
    limit = estimate_flops(80, 30, 4)
    found = neighbour_votes(features, labels, k=6, max_flops=limit, seed=3)
    assert found.num_references == 30
    among = torch.randperm(80, generator=torch.Generator().manual_seed(3))[:30].tolist()
    assert_votes(found, reference(features, labels, 6, "cosine", among))
    other = neighbour_votes(features, labels, k=6, max_flops=limit, seed=4)
    assert not torch.equal(found.disagreement, other.disagreement)


@pytest.mark.parametrize(("limit", "expected"), [(None, 500), (1, 26), (10**12, 500), (500 * 100 * (2 * 8 + 100), 100)])
def test_references_that_operations_allow_for(limit, expected):
    assert count_references(500, 8, 25, limit) == expected


def test_memory_does_not_grow_with_the_samples(monkeypatch):
    monkeypatch.setattr(neighbours, "REFERENCE_ROWS", 16)
    monkeypatch.setattr(neighbours, "BLOCK_BYTES", 4 * 16 * 8)
    shapes = []
    largest = neighbours._largest

    def watched(closeness, ids, k):
        shapes.append(closeness.numel())
        return largest(closeness, ids, k)

    monkeypatch.setattr(neighbours, "_largest", watched)
    neighbour_votes(torch.randn(100, 2), torch.zeros(100, dtype=torch.long), k=3)
    assert max(shapes) == 16 * 8


def test_features_that_are_not_finite_are_named():
    features = torch.randn(30, 2)
    features[[4, 9]] = torch.tensor([torch.nan, torch.inf])
    with pytest.raises(NonFiniteError, match=r"rows \[4, 9\]"):
        neighbour_votes(features, torch.zeros(30, dtype=torch.long), k=3)
    features[:] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\] and 20 more"):
        neighbour_votes(features, torch.zeros(30, dtype=torch.long), k=3)


def test_too_few_samples():
    with pytest.raises(ValueError, match=r"`k=25` neighbours among 25 samples\. Expected at least 26"):
        neighbour_votes(torch.randn(25, 2), torch.zeros(25, dtype=torch.long))


def test_an_unknown_distance():
    with pytest.raises(ValueError, match="`distance='manhattan'` is not known"):
        neighbour_votes(torch.randn(30, 2), torch.zeros(30, dtype=torch.long), distance="manhattan")
