"""Rows are chosen that hold the lists, however old the features are, and what is missed is estimated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim import shortlist
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.head_gradients import output_grads
from lightning_gradsim.shortlist import HeadQueries, HeadWeights, Shortlist
from lightning_gradsim.tapped_samples import TappedBlock

N, FEATURES, CLASSES, QUERIES, TOP_K = 600, 6, 4, 5, 4


def grad_fn(logits, targets):
    return output_grads(Adapter(), logits, targets)


class World:
    """Samples whose features have moved since they were tapped, and everything about them by the slow way."""

    def __init__(self, noise=0.05, *, drift=True, bias=True, seed=0, relu=False, num_samples=N, predicted=True):
        draw = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=draw)

        old = random(num_samples, FEATURES).half()
        turn = torch.linalg.qr(random(FEATURES, FEATURES)).Q if drift else torch.eye(FEATURES)
        self.now = old.float() @ turn + (0.3 if drift else 0.0) + noise * random(num_samples, FEATURES)
        if relu:
            old, self.now = old.relu(), self.now.relu()
        self.layer = nn.Linear(FEATURES, CLASSES, bias=bias).requires_grad_(False)
        self.layer.weight.copy_(random(CLASSES, FEATURES))
        self.targets = torch.randint(CLASSES, (num_samples,), generator=draw)
        logits = self.layer(old.float()).half()
        ids, steps = torch.arange(num_samples), torch.zeros(num_samples, dtype=torch.long)
        self.tapped = TappedBlock(ids, old, logits, self.targets, steps, old)
        self.query_features = random(QUERIES, FEATURES)
        given, predicted_labels = torch.arange(QUERIES) % CLASSES, (torch.arange(QUERIES) + 1) % CLASSES
        z = self.layer(self.query_features)
        self.labels = [given, predicted_labels] if predicted else [given]
        grads = [grad_fn(z, labels) for labels in self.labels]
        self.queries = HeadQueries(self.query_features, grads[0], grads[1] if predicted else None)
        self.head = HeadWeights(self.layer.weight, self.layer.bias, bias)

    def gradient(self, features, target):
        """One sample's gradient by autograd."""
        layer = nn.Linear(FEATURES, CLASSES, bias=self.layer.bias is not None)
        layer.load_state_dict(self.layer.state_dict())
        loss = F.cross_entropy(layer(features[None]), target[None])
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(layer.parameters()))])

    def scores(self):
        """All scores, one gradient at a time, ``[L, N]``."""
        train = torch.stack([self.gradient(f, y) for f, y in zip(self.now, self.targets, strict=True)])
        parts = []
        for number, labels in enumerate(self.labels):
            own = torch.stack([self.gradient(f, y) for f, y in zip(self.query_features, labels, strict=True)])
            dots = own @ train.T
            cosines = dots / (own.norm(dim=1)[:, None] * train.norm(dim=1)).clamp(min=1e-30)
            parts += [-dots, cosines] if number == 0 else [dots]
        return torch.cat(parts)

    def lists(self):
        return self.scores().topk(TOP_K, dim=1).indices

    def read(self, max_rows=N, num_probe=40, **options):
        options |= {"top_k": TOP_K, "max_rows": max_rows, "num_probe": num_probe}
        chosen = Shortlist(self.tapped, self.head, self.queries, grad_fn, **options)
        batches = []
        while (rows := chosen.next_rows()) is not None:
            batches.append(rows)
            chosen.update(self.now[rows])
        return chosen, batches

    def recall(self, batches, lists=slice(None)):
        return float(torch.isin(self.lists()[lists], torch.cat(batches)).float().mean())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("predicted", [True, False])
def test_scores_are_those_of_one_gradient_at_a_time(bias, predicted):
    world = World(bias=bias, predicted=predicted, num_samples=30)
    chosen, _ = world.read()
    found = chosen._compute_scores(world.now, torch.arange(30))
    torch.testing.assert_close(found, world.scores(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine", "asymmetric"])
def test_harmful_samples_and_teachers_are_by_the_similarity(similarity):
    world = World(num_samples=30)
    chosen, _ = world.read(similarity=similarity)
    found = chosen._compute_scores(world.now, torch.arange(30)).split(QUERIES)
    harmful, look_alikes, teachers = world.scores().split(QUERIES)
    train = torch.stack([world.gradient(f, y) for f, y in zip(world.now, world.targets, strict=True)]).norm(dim=1)
    for labels, own, dots in zip(world.labels, (found[0], found[2]), (harmful, teachers), strict=True):
        queries = [world.gradient(f, y) for f, y in zip(world.query_features, labels, strict=True)]
        norms = {"dot": 1.0, "cosine": torch.stack(queries).norm(dim=1)[:, None] * train, "asymmetric": train**2}
        torch.testing.assert_close(own, dots / norms[similarity], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[1], look_alikes, rtol=1e-4, atol=1e-5)


def test_gradients_that_are_known_count_instead_of_those_of_the_features():
    world = World()
    chosen = Shortlist(world.tapped, world.head, world.queries, grad_fn, top_k=TOP_K, max_rows=N, num_probe=40)
    rows = chosen.next_rows()
    chosen.update(world.now[rows], torch.zeros(40, CLASSES))
    assert not chosen._scores.any()


def test_what_was_not_read_ends_the_rounds_and_is_missed():
    world = World(noise=0.3)
    chosen = Shortlist(world.tapped, world.head, world.queries, grad_fn, top_k=TOP_K, max_rows=N, num_probe=40)
    rows = chosen.next_rows()[:25]
    chosen.update(world.now[rows], rows=rows)
    assert chosen.next_rows() is None
    assert chosen._rows.tolist() == rows.tolist()
    assert chosen.recall < 0.5


def test_all_that_is_read_is_all_that_is_found(monkeypatch):
    monkeypatch.setattr(shortlist, "TARGET_RECALL", 2.0)
    chosen, batches = World(noise=1.0).read()
    assert len(torch.cat(batches)) == N
    assert chosen.recalls == (1.0, 1.0, 1.0)


def test_no_row_is_read_twice_nor_more_than_allowed():
    world = World(noise=1.0)
    for max_rows, num_probe in ((150, 40), (40, 40), (30, 40), (10**6, 40)):
        _, batches = world.read(max_rows, num_probe)
        rows = torch.cat(batches)
        assert len(rows.unique()) == len(rows) <= min(max_rows, N)
        assert len(batches[0]) == min(max_rows, num_probe)
        assert len(batches) <= 1 + shortlist.NUM_ROUNDS


def test_where_the_drift_is_a_map_everything_is_found_in_few_rows():
    world = World(noise=0.0)
    chosen, batches = world.read()
    assert world.recall(batches) == 1.0
    assert len(torch.cat(batches)) < 0.35 * N
    assert chosen.recall >= shortlist.TARGET_RECALL


def test_the_map_is_fitted_to_the_samples_read():
    world = World(noise=0.0)
    chosen, _ = world.read()
    mapped = chosen._mapped(torch.arange(N))
    assert (mapped - world.now).norm() < 0.02 * (world.tapped.features.float() - world.now).norm()


def test_leave_one_out_is_what_a_map_without_the_sample_makes_of_it(monkeypatch):
    monkeypatch.setattr(shortlist, "PENALTIES", (0.1,))
    world = World(noise=0.3, num_samples=60)
    chosen, batches = world.read(max_rows=25, num_probe=25)
    rows = torch.cat(batches)
    _, left_out = chosen._fit()
    inputs, averages = (part.double() for part in chosen._inputs(rows))
    wanted = world.now[rows].double() - averages
    penalty = 0.1 * torch.linalg.svdvals(inputs).square().mean()
    for row in range(len(rows)):
        others = torch.arange(len(rows)) != row
        gram = inputs[others].T @ inputs[others] + penalty * torch.eye(inputs.shape[1], dtype=torch.float64)
        solution = torch.linalg.solve(gram, inputs[others].T @ wanted[others])
        expected = averages[row] + inputs[row] @ solution
        torch.testing.assert_close(left_out[row], expected.float(), rtol=1e-3, atol=1e-4)


def test_of_wide_heads_the_main_directions_are_mapped(monkeypatch):
    world = World(noise=0.0)
    whole, _ = world.read()
    monkeypatch.setattr(shortlist, "MAX_WIDTH", 5)
    chosen, batches = world.read()
    assert chosen._basis.shape == (FEATURES, 5)
    torch.testing.assert_close(chosen._basis.T @ chosen._basis, torch.eye(5), rtol=1e-4, atol=1e-5)
    old = world.tapped.features.float()
    change, errors = world.now - old, [each._mapped(torch.arange(N)) - world.now for each in (whole, chosen)]
    assert errors[0].norm() < 0.1 * errors[1].norm()  # one of six directions stays as it was
    assert errors[1].norm() < 0.7 * change.norm()
    assert world.recall(batches) > 0.9


def test_features_behind_a_relu_stay_positive():
    world = World(noise=0.3, relu=True)
    chosen, _ = world.read()
    assert (chosen._mapped(torch.arange(N)) >= 0).all()
    world = World(noise=0.3)
    assert (world.read()[0]._mapped(torch.arange(N)) < 0).any()


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
def test_the_recall_is_estimated(noise):
    differences = []
    for seed in range(4):
        world = World(noise=noise, seed=seed)
        chosen, batches = world.read(max_rows=180)
        differences.append(chosen.recall - world.recall(batches))
    assert abs(sum(differences) / len(differences)) < 0.1
    assert max(map(abs, differences)) < 0.2


def test_members_in_places_beyond_those_looked_at_are_missed_too(monkeypatch):
    monkeypatch.setattr(shortlist, "DEPTH_FACTOR", 3)
    estimates, truths = [], []
    for seed in range(4):
        world = World(noise=1.0, seed=seed)
        chosen, batches = world.read(max_rows=120, num_probe=80)
        estimates.append(chosen.recall)
        truths.append(world.recall(batches))
    assert abs(sum(estimates) - sum(truths)) / 4 < 0.1


def test_more_is_read_where_features_are_less_certain():
    few, many = (len(torch.cat(World(noise=noise).read()[1])) for noise in (0.02, 0.5))
    assert few < many < N


def test_the_chosen_rows_are_better_than_random_ones():
    world = World(noise=0.3)
    _, batches = world.read(max_rows=180)
    assert world.recall(batches) > 0.3 + 0.4


def test_lists_that_count_more_are_found_first():
    world = World(noise=0.3)
    harmful = slice(0, QUERIES)
    chosen, batches = world.read(max_rows=100, weights=(1.0, 0.0, 0.0))
    _, evenly = world.read(max_rows=100)
    assert world.recall(batches, harmful) > world.recall(evenly, harmful) + 0.1
    assert chosen.recall == pytest.approx(chosen.recalls[0])
    assert chosen.recalls[0] > chosen.recalls[1] + 0.1
    assert chosen.recalls[0] == pytest.approx(world.recall(batches, harmful), abs=0.15)


def test_blocks_do_not_change_the_choice(monkeypatch):
    world = World(noise=0.3)
    chosen, batches = world.read(max_rows=150)
    whole = torch.cat(batches)
    monkeypatch.setattr(shortlist, "BLOCK_ROWS", 64)
    monkeypatch.setattr(shortlist, "_scale", lambda tapped: chosen._scale)
    assert set(torch.cat(world.read(max_rows=150)[1]).tolist()) == set(whole.tolist())


def test_maps_are_fitted_to_a_bounded_number_of_samples(monkeypatch):
    monkeypatch.setattr(shortlist, "MAX_FITTED", 50)
    chosen, batches = World(noise=0.3).read(max_rows=180)
    assert chosen._places.shape[1] == 50 < len(torch.cat(batches))
    assert World(noise=0.3).recall(batches) > 0.6


def test_the_seed_draws_the_probe_and_no_global_number_is_drawn():
    world = World()
    state = torch.get_rng_state()
    first, again, other = (world.read(seed=seed)[1][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert set(first.tolist()) != set(other.tolist())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_handful_of_samples_is_read_whole():
    world = World(num_samples=6)
    chosen, batches = world.read(num_probe=3)
    assert len(torch.cat(batches)) <= 6
    assert chosen.recall is not None
