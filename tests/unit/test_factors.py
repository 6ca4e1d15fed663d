"""Products of factors: algebra that holds for any sizes, whichever way they are computed."""

import pytest
import torch
import torch.nn.functional as F

from lightning_gradsim.factors import (
    IndexedFactors,
    OuterFactors,
    PatchFactors,
    Window,
    concatenate_labels,
    concatenate_positions,
    concatenate_samples,
    count_inputs,
    dot,
    dot_and_squared_norms,
    patches,
    squared_norms,
    uses_gram,
)
from lightning_gradsim.factors.outer import fill_flat

SIZES = [  # n, t, g, i, o
    (5, 1, 1, 3, 2),
    (4, 3, 1, 6, 5),
    (3, 9, 1, 2, 2),  # materialising is cheaper
    (4, 2, 3, 5, 4),  # channel groups
    (1, 1, 1, 1, 1),
]
KINDS = ["weight and bias", "weight", "bias"]


def make(sizes=(4, 3, 1, 6, 5), kind="weight and bias"):
    n, t, g, i, o = sizes
    activations = torch.randn(n, t, g, i, dtype=torch.float64) if "weight" in kind else None
    return OuterFactors(activations, torch.randn(n, t, g, o, dtype=torch.float64), bias="bias" in kind)


def gradients(factors):
    """The definition, term by term."""
    rows = []
    for n in range(factors.num_samples):
        total = 0
        for t in range(factors.num_positions):
            inputs = [] if factors.activations is None else [factors.activations[n, t]]
            inputs += [torch.ones(factors.output_grads.shape[2], 1, dtype=torch.float64)] if factors.bias else []
            total = total + factors.output_grads[n, t][:, :, None] * torch.cat(inputs, dim=1)[:, None, :]
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_contraction_over_positions(sizes, kind):
    factors = make(sizes, kind)
    torch.testing.assert_close(factors.gradients, gradients(factors))
    assert factors.num_parameters == factors.gradients[0].numel()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_self_dot_is_the_squared_norm(sizes, kind):
    factors = make(sizes, kind)
    torch.testing.assert_close(dot(factors, factors).diagonal(), squared_norms(factors))
    torch.testing.assert_close(squared_norms(factors), factors.gradients.square().flatten(1).sum(1))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_intermediate", [1, 10, 2**24])
def test_dot_is_symmetric_and_equals_the_gradients_products(sizes, kind, max_intermediate):
    one, other = make(sizes, kind), make((7, *sizes[1:]), kind)
    products = dot(one, other, max_intermediate=max_intermediate)
    torch.testing.assert_close(products, dot(other, one, max_intermediate=max_intermediate).T)
    torch.testing.assert_close(products, one.gradients.flatten(1) @ other.gradients.flatten(1).T)


@pytest.mark.parametrize("max_intermediate", [1, 17, 40, 100])
@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_change_nothing(sizes, max_intermediate):
    one, other = make(sizes), make((11, *sizes[1:]))
    torch.testing.assert_close(dot(one, other, max_intermediate=max_intermediate), dot(one, other))
    torch.testing.assert_close(squared_norms(other, max_intermediate=max_intermediate), squared_norms(other))


def test_chunks_bound_what_is_in_memory_at_once(monkeypatch):
    seen = []
    original = OuterFactors.samples
    monkeypatch.setattr(OuterFactors, "samples", lambda self, index: seen.append(index) or original(self, index))
    dot(make((2, 1, 1, 3, 2)), make((10, 1, 1, 3, 2)), max_intermediate=6)
    assert [(part.start, part.stop) for part in seen] == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_plan_follows_the_costs():
    assert uses_gram(make((4, 1, 1, 100, 10)), make((4, 1, 1, 100, 10)))
    assert not uses_gram(make((4, 50, 1, 4, 3)), make((4, 50, 1, 4, 3)))


def test_both_plans_agree_on_both_sides_of_the_threshold(monkeypatch):
    for sizes in SIZES:
        one, other = make(sizes), make((3, *sizes[1:]))
        values = []
        for plan in (True, False):
            monkeypatch.setattr("lightning_gradsim.factors.products.uses_gram", lambda *_, plan=plan: plan)
            values.append(dot(one, other))
        torch.testing.assert_close(*values)


def test_queries_and_training_samples_may_differ_in_length():
    one, other = make((3, 2, 1, 4, 3)), make((5, 7, 1, 4, 3))
    torch.testing.assert_close(dot(one, other), one.gradients.flatten(1) @ other.gradients.flatten(1).T)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_side_by_side_sum_their_gradients(kind):
    first, second = make((4, 2, 1, 3, 5), kind), make((4, 3, 1, 3, 5), kind)
    joined = concatenate_positions([first, second])
    assert joined.num_positions == 5
    torch.testing.assert_close(joined.gradients, first.gradients + second.gradients)
    torch.testing.assert_close(squared_norms(joined), (first.gradients + second.gradients).square().sum((1, 2, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_different_length_are_padded_exactly(kind):
    parts = [make((2, 1, 1, 3, 5), kind), make((3, 4, 1, 3, 5), kind), make((1, 2, 1, 3, 5), kind)]
    joined = concatenate_samples(parts)
    expected = torch.cat([part.gradients for part in parts])
    torch.testing.assert_close(joined.gradients, expected)
    torch.testing.assert_close(squared_norms(joined), expected.square().sum((1, 2, 3)))


def test_one_part_is_not_copied():
    factors = make()
    assert concatenate_positions([factors]) is factors
    assert concatenate_samples([factors]) is factors


@pytest.mark.parametrize("kind", KINDS)
def test_samples_by_slice_and_by_index(kind):
    factors = make(kind=kind)
    torch.testing.assert_close(factors.samples(slice(1, 3)).gradients, factors.gradients[1:3])
    rows = torch.tensor([3, 0])
    torch.testing.assert_close(factors.samples(rows).gradients, factors.gradients[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_unused_layers_have_zero_gradients(sizes, kind):
    factors = make(sizes, kind)
    unused = factors.unused(3)
    assert unused.num_samples == 3
    assert unused.gradients.shape == (3, *factors.gradients.shape[1:])
    assert not unused.gradients.any()
    assert not squared_norms(unused).any()
    assert not dot(factors, unused).any()
    assert dot(unused, factors).shape == (3, factors.num_samples)


@pytest.mark.parametrize("sizes", SIZES)
def test_no_samples(sizes):
    factors, none = make(sizes), make(sizes).samples(slice(0, 0))
    assert dot(factors, none).shape == (factors.num_samples, 0)
    assert dot(none, factors).shape == (0, factors.num_samples)
    assert squared_norms(none).shape == (0,)


def relabelled(sizes, kind="weight and bias"):
    """Samples with three labels each, with shared inputs and with inputs of their own."""
    first = make(sizes, kind)
    parts = [first, *(OuterFactors(first.activations, make(sizes, kind).output_grads, first.bias) for _ in range(2))]
    return concatenate_labels(parts), concatenate_samples(parts)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_intermediate", [1, 2**24])
def test_shared_inputs_change_nothing(sizes, kind, max_intermediate, monkeypatch):
    shared, own = relabelled(sizes, kind)
    train = make((7, *sizes[1:]), kind)
    assert count_inputs(shared) == (len(shared.activations) if "weight" in kind else 3 * sizes[0])
    assert count_inputs(shared) <= count_inputs(own) == own.num_samples
    for gram in (True, False):
        monkeypatch.setattr("lightning_gradsim.factors.products.uses_gram", lambda *_, gram=gram: gram)
        for keep in (True, False):
            options = {"max_intermediate": max_intermediate, "keep": keep}
            found = dot_and_squared_norms(shared, train, **options)
            torch.testing.assert_close(found, dot_and_squared_norms(own, train, **options))
    torch.testing.assert_close(squared_norms(shared), squared_norms(own))
    torch.testing.assert_close(shared.gradients, own.gradients)
    torch.testing.assert_close(shared.flat, own.flat)
    torch.testing.assert_close(shared.summed().gradients, own.summed().gradients)
    for index in (slice(1, 3), torch.tensor([2, 0])):
        torch.testing.assert_close(shared.samples(index).gradients, own.gradients[index])
    other = make((2, sizes[1] + 1, *sizes[2:]), kind)
    joined = concatenate_samples([other, shared, other, shared.samples(slice(1, 2))])
    expected = torch.cat([other.gradients, own.gradients, other.gradients, own.gradients[1:2]])
    torch.testing.assert_close(joined.gradients, expected)
    torch.testing.assert_close(dot(joined, train), expected.flatten(1) @ train.gradients.flatten(1).T)
    torch.testing.assert_close(concatenate_positions([shared, own]).gradients, 2 * own.gradients)


def test_inputs_that_differ_are_not_shared():
    one, other = make(), make()
    joined = concatenate_labels([one, other])
    assert joined.rows is None
    torch.testing.assert_close(joined.gradients, torch.cat([one.gradients, other.gradients]))


def test_shared_inputs_are_cheaper_to_compare():
    """Inputs are multiplied once however many labels there are, which can make factors the cheaper way."""
    shared, own = relabelled((4, 2, 1, 60, 3))
    assert uses_gram(shared, make((4, 2, 1, 60, 3)))
    assert not uses_gram(own, make((4, 2, 1, 60, 3)))


def test_dtype_of_products_is_that_of_the_factors():
    factors = make().to(dtype=torch.float32)
    assert factors.activations.dtype == factors.output_grads.dtype == torch.float32
    assert dot(factors, factors).dtype == squared_norms(factors).dtype == torch.float32


def test_norms_are_never_negative():
    factors = make((50, 4, 1, 3, 2)).to(dtype=torch.float32)
    cancelling = OuterFactors(
        torch.cat([factors.activations, factors.activations], dim=1),
        torch.cat([factors.output_grads, -factors.output_grads], dim=1),
        bias=True,
    )
    assert squared_norms(factors).min() > 0
    assert squared_norms(cancelling).abs().max() < 1e-4 * squared_norms(factors).min()


WINDOWS = [  # channels, outputs, pixels, window
    (4, 6, (7, 6), Window((3, 2), (2, 1), (1, 0), (1, 2), 2)),
    (2, 3, (9,), Window((3,), (1,), (1,), (2,), 1)),
    (2, 2, (3, 4, 3), Window((2, 2, 2), (1, 2, 1), (0, 1, 1), (1, 1, 1), 1)),
    (3, 4, (5, 5), Window((1, 1), (2, 2), (0, 0), (1, 1), 1)),
    (4, 4, (3, 4), Window((1, 1), (1, 1), (1, 1), (1, 1), 2)),
    (3, 6, (5, 4), Window((3, 2), (2, 1), (1, 0), (1, 2), 3)),
]
windows = pytest.mark.parametrize("shape", WINDOWS, ids=["2d", "1d", "3d", "1x1", "grouped 1x1", "depthwise"])


def convolution(shape, dtype=torch.float64, n=5, bias=True):
    channels, outputs, pixels, window = shape
    images = torch.randn(n, channels, *pixels, dtype=dtype)
    weight = torch.randn(outputs, channels // window.groups, *window.kernel, dtype=dtype)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(pixels)]
    maps = convolve(images, weight, None, window.stride, window.padding, window.dilation, window.groups)
    return PatchFactors(images, torch.randn_like(maps), window, bias)


@windows
@pytest.mark.parametrize("max_elements", [1, 50, 2**20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_convolutions_are_the_contraction_of_their_patches(shape, max_elements, dtype, monkeypatch):
    for limit in ("UNFOLD_POSITIONS", "UNFOLD_CHANNELS"):
        monkeypatch.setattr(patches, limit, 0)  # float32 goes through a convolution by sample wherever it can
    factors = convolution(shape, dtype)
    expected = factors.outer.gradients
    weights, biases = expected[..., :-1].flatten(1), expected[..., -1].flatten(1)
    found = fill_flat(factors, factors.maps, max_elements)
    torch.testing.assert_close(found, torch.cat([weights, biases], dim=1))
    assert found.shape == (5, factors.num_parameters)
    torch.testing.assert_close(factors.outer.flat, found)
    torch.testing.assert_close(factors.summed().gradients.flatten(), found.sum(0))


@windows
def test_convolutions_score_as_their_patches(shape):
    one, other = convolution(shape), convolution(shape, n=3)
    products, norms = dot_and_squared_norms(one, other)
    torch.testing.assert_close(products, one.outer.gradients.flatten(1) @ other.outer.gradients.flatten(1).T)
    torch.testing.assert_close(norms, other.outer.gradients.square().sum((1, 2, 3)))
    torch.testing.assert_close(dot(one, other), products)
    torch.testing.assert_close(squared_norms(other), norms)
    joined = concatenate_samples([one, other.outer])
    torch.testing.assert_close(joined.gradients, torch.cat([one.gradients, other.gradients]))


def test_images_of_different_size_are_joined_exactly():
    window = Window((3, 3), (1, 1), (1, 1), (1, 1), 1)
    small, large = convolution((2, 3, (4, 4), window)), convolution((2, 3, (6, 5), window))
    joined = concatenate_samples([small, large])
    torch.testing.assert_close(joined.gradients, torch.cat([small.gradients, large.gradients]))


@pytest.mark.parametrize("max_intermediate", [1, 30, 2**20])
@pytest.mark.parametrize("num_rows", [1, 4, 1000])
def test_embeddings_score_as_their_dense_gradients(num_rows, max_intermediate):
    def embedding(n, t):
        return IndexedFactors(torch.randint(num_rows, (n, t)), torch.randn(n, t, 3, dtype=torch.float64), num_rows)

    one, other = embedding(4, 6), embedding(5, 2)
    dense = [factors.materialise().flatten(1) for factors in (one, other)]
    products, norms = dot_and_squared_norms(one, other, max_intermediate=max_intermediate)
    torch.testing.assert_close(products, dense[0] @ dense[1].T)
    torch.testing.assert_close(norms, dense[1].square().sum(1))
    assert dot(one, other.unused(2)).shape == (4, 2)
