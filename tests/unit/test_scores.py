"""Similarities from dot products and norms."""

import pytest
import torch

from lightning_gradsim.scores import SIMILARITIES, compute_similarity


def make(dtype=torch.float64):
    queries, train = torch.randn(4, 6, dtype=dtype), torch.randn(9, 6, dtype=dtype)
    return queries, train, (queries @ train.T, queries.square().sum(1), train.square().sum(1))


def test_dot_is_the_product():
    _, _, values = make()
    assert compute_similarity("dot", *values) is values[0]


def test_cosine_is_the_product_of_unit_gradients():
    queries, train, values = make()
    expected = torch.nn.functional.cosine_similarity(queries[:, None], train[None], dim=-1)
    torch.testing.assert_close(compute_similarity("cosine", *values), expected)


def test_asymmetric_is_the_share_of_the_training_gradient():
    """Moving along the training gradient by itself changes its own loss by 1: the query's by the similarity."""
    queries, train, values = make()
    similarity = compute_similarity("asymmetric", *values)
    projections = similarity[:, :, None] * train[None]
    torch.testing.assert_close((queries[:, None] - projections).mul(train).sum(-1), torch.zeros_like(similarity))


@pytest.mark.parametrize("similarity", ["cosine", "asymmetric"])
def test_a_sample_is_wholly_similar_to_itself(similarity):
    _, train, _ = make()
    norms = train.square().sum(1)
    values = compute_similarity(similarity, train @ train.T, norms, norms)
    torch.testing.assert_close(values.diagonal(), torch.ones(9, dtype=torch.float64))


def test_cosine_does_not_depend_on_length_and_dot_does():
    _, _, values = make()
    longer = (values[0] * 6, values[1] * 4, values[2] * 9)
    torch.testing.assert_close(compute_similarity("cosine", *longer), compute_similarity("cosine", *values))
    torch.testing.assert_close(
        compute_similarity("asymmetric", *longer), compute_similarity("asymmetric", *values) / 1.5
    )


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_zero_gradient_is_similar_to_nothing(similarity):
    products = torch.zeros(2, 3)
    values = compute_similarity(similarity, products, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(values, torch.zeros(2, 3))


def test_cosine_survives_tiny_norms_in_float32():
    tiny = torch.tensor([1e-30])
    assert compute_similarity("cosine", tiny[None], tiny, tiny).item() == pytest.approx(1, rel=1e-5)


def test_cosine_stays_within_one():
    above = torch.tensor([[1.0 + 1e-6, -1.0 - 1e-6]])
    values = compute_similarity("cosine", above, torch.ones(1), torch.ones(2))
    assert values.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_not_a_number_stays_visible(similarity):
    values = compute_similarity(similarity, torch.tensor([[torch.nan]]), torch.ones(1), torch.ones(1))
    assert values.isnan().all()


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_no_queries_or_no_samples(similarity):
    assert compute_similarity(similarity, torch.empty(0, 3), torch.empty(0), torch.ones(3)).shape == (0, 3)
    assert compute_similarity(similarity, torch.empty(2, 0), torch.ones(2), torch.empty(0)).shape == (2, 0)
