"""Prototypes: the greedy cover, step by step, and the radius."""

import pytest
import torch

from lightning_gradsim import prototypes
from lightning_gradsim.prototypes import cover_greedily, find_radius, select_prototypes


def assert_greedy(rows, covers, labels, number):
    """Every row has the highest gain at its turn, all gains counted anew; the order of equal ones is free."""
    uncovered = set(range(len(labels)))
    for row in [*rows, None]:
        gains = {
            (each, label): sum(
                (label == own) * (j in uncovered) - (label != own)
                for j, own in enumerate(labels.tolist())
                if covers[each, j]
            )
            for each in range(len(covers))
            for label in labels.unique().tolist()
        }
        best = max(gains.values())
        if row is None:
            assert best < 1 or len(rows) == number
            return
        label = max(labels.unique().tolist(), key=lambda each: gains[row, each])
        assert gains[row, label] == best >= 1
        uncovered -= {j for j in uncovered if covers[row, j] and labels[j] == label}


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_the_greedy_cover(share):
    covers, labels = torch.rand(12, 40) < share, torch.randint(3, (40,))
    covers[torch.arange(12), torch.arange(12)] = True
    rows = cover_greedily(covers, labels, 8).tolist()
    assert rows
    assert_greedy(rows, covers, labels, 8)


def test_one_prototype_a_cluster_and_then_no_more():
    features = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    assert sorted(select_prototypes(features, labels, 6, eps=0.15).tolist()) == [1, 4]


def test_a_sample_among_others_of_another_class_stands_for_none():
    features = torch.tensor([[0.0], [0.1], [0.2], [0.3], [0.12]])
    labels = torch.tensor([0, 0, 0, 0, 1])
    assert 4 not in select_prototypes(features, labels, 5, eps=0.5).tolist()


def test_the_radius_holds_as_many_of_a_class_as_each_prototype_has_to_cover():
    features, labels = torch.arange(20.0)[:, None], torch.zeros(20, dtype=torch.long)
    assert find_radius(features, labels, 10) == 1.0  # two others: one on each side
    assert find_radius(features, labels, 5) == 2.0


def test_of_many_samples_a_seeded_part_are_candidates(monkeypatch):
    monkeypatch.setattr(prototypes, "MAX_CELLS", 50 * 20)
    features, labels = torch.randn(50, 3), torch.randint(2, (50,))
    first, again = (select_prototypes(features, labels, 10, seed=1).tolist() for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first) <= 10
