"""One pass: which queries and samples it lists, what it refuses, what it leaves behind."""

import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from lightning_gradsim import batch_runner, sample_statistics, scorer
from lightning_gradsim.adapter import Adapter
from lightning_gradsim.batch_runner import BatchRunner
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.errors import GradSimError, LabelRangeError, NonFiniteError, SampleMixingError
from lightning_gradsim.factors import dot_and_squared_norms
from lightning_gradsim.guard import evaluating
from lightning_gradsim.query_side import NUM_WITNESSES, QueryBatch
from lightning_gradsim.scores import SIMILARITIES
from lightning_gradsim.wrapper import PerSampleGradients
from tests.cases import Net

FEATURES, CLASSES = 4, 3


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Brittle(nn.Module):
    """The gradient of samples with a first feature above 50 is not finite, although their loss is."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return ScaledGradient.apply(self.head(x), torch.where(x[:, :1] > 50, torch.nan, 1.0))


def samples(number):
    return torch.randn(number, FEATURES), torch.randint(CLASSES, (number,))


def wrong_samples(module, number):
    """Samples that the module gets wrong."""
    x, _ = samples(number)
    with torch.no_grad():
        predictions = module(x).argmax(1)
    return x, (predictions + 1) % CLASSES


def run(module, queries, train, *, ids=None, batch_size=5, criterion=None, adapter=None, context=None, **settings):
    adapter = adapter or Adapter()
    adapter.bind(module, criterion)
    query_batches = [] if queries is None else [QueryBatch(range(len(queries[0])), queries)]
    ids = torch.arange(len(train[0])) if ids is None else ids
    batches = [(ids[rows], tuple(part[rows] for part in train)) for rows in torch.arange(len(ids)).split(batch_size)]
    context = nullcontext if context is None else context
    return run_pass(module, adapter, query_batches, batches, EngineSettings(**settings), context, batches)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_lists_hold_opponents_and_proponents_only(similarity):
    module = nn.Linear(FEATURES, CLASSES)
    result = run(module, wrong_samples(module, 6), samples(40), similarity=similarity, top_k=40)
    for query in result.queries.values():
        assert query.harmful
        assert query.look_alikes
        assert query.teachers
        assert all(sample.score < 0 for sample in query.harmful)
        assert all(sample.score > 0 for sample in (*query.look_alikes, *query.teachers))
        assert all(sample.score <= 1 for sample in query.look_alikes)
        if similarity == "cosine":
            assert not {s.sample_id for s in query.harmful} & {s.sample_id for s in query.look_alikes}


def test_a_step_on_an_opponent_raises_the_loss_and_on_a_proponent_lowers_it():
    """By the score, to first order in the step width."""
    module, step_width = nn.Linear(FEATURES, CLASSES).double(), 1e-4
    inputs, labels = (part.double() if part.is_floating_point() else part for part in samples(30))
    x = torch.randn(1, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        y = (module(x).argmax(1) + 1) % CLASSES
    [query] = run(module, (x, y), (inputs, labels), top_k=5).queries.values()

    def change(sample_id, label):
        """How the query's loss for a label changes by a step on a training sample, over the step width."""
        loss = nn.functional.cross_entropy(module(inputs[[sample_id]]), labels[[sample_id]])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            moved = [p - step_width * grad for p, grad in zip(module.parameters(), grads, strict=True)]
            outputs = torch.cat([nn.functional.linear(x, *moved), module(x)])
            after, before = nn.functional.cross_entropy(outputs, torch.tensor([label, label]), reduction="none")
        return float(after - before) / step_width

    for sample in query.harmful:
        assert change(sample.sample_id, query.label) > 0
        assert change(sample.sample_id, query.label) == pytest.approx(-sample.score, rel=0.01)
    for sample in query.teachers:
        assert change(sample.sample_id, query.prediction) < 0
        assert change(sample.sample_id, query.prediction) == pytest.approx(-sample.score, rel=0.01)


def test_records_say_what_a_sample_is():
    module = nn.Linear(FEATURES, CLASSES)
    queries, train = wrong_samples(module, 6), samples(40)
    ids = torch.randperm(500)[:40]
    result = run(module, queries, train, ids=ids)
    labels = dict(zip(ids.tolist(), train[1].tolist(), strict=True))
    with torch.no_grad():
        logits = module(queries[0])
    assert list(result.queries) == list(range(6))
    for position, query in result.queries.items():
        assert query.label == int(queries[1][position])
        assert query.prediction == int(logits[position].argmax())
        assert query.probability == pytest.approx(float(logits[position].softmax(0).max()))
        assert query.loss == pytest.approx(float(nn.functional.cross_entropy(logits[position], queries[1][position])))
        for sample in (*query.harmful, *query.look_alikes, *query.teachers):
            assert sample.label == labels[sample.sample_id]
            assert sample.label_is_prediction == (sample.label == query.prediction)
    assert result.num_samples == 40
    assert result.layers == ("(the module)",)
    assert result.has_teachers


def test_queries_that_are_right_by_now_are_absent():
    module = nn.Linear(FEATURES, CLASSES)
    x, y = wrong_samples(module, 6)
    y[[1, 4]] = (y[[1, 4]] - 1) % CLASSES
    assert list(run(module, (x, y), samples(20)).queries) == [0, 2, 3, 5]
    assert not run(module, (x[[1, 4]], y[[1, 4]]), samples(20)).queries


def test_dropped_queries_change_nothing_for_the_others():
    module = nn.Linear(FEATURES, CLASSES)
    (x, y), train = wrong_samples(module, 6), samples(20)
    alone = run(module, (x[2:3], y[2:3]), train).queries[0]
    y[[0, 1]] = (y[[0, 1]] - 1) % CLASSES
    among = run(module, (x, y), train).queries[2]
    assert [s.sample_id for s in among.harmful] == [s.sample_id for s in alone.harmful]
    assert [s.sample_id for s in among.teachers] == [s.sample_id for s in alone.teachers]


@pytest.mark.parametrize("top_k", [1, 3, NUM_WITNESSES, 12, 1000])
def test_length_of_the_lists(top_k):
    module = nn.Linear(FEATURES, CLASSES)
    queries, train = wrong_samples(module, 4), samples(30)
    everything = run(module, queries, train, top_k=1000).queries
    for position, query in run(module, queries, train, top_k=top_k).queries.items():
        assert query.harmful == everything[position].harmful[:top_k]
        assert query.look_alikes == everything[position].look_alikes[:top_k]
        assert query.teachers == everything[position].teachers[:top_k]
        assert query.label_looks_wrong == everything[position].label_looks_wrong


def test_ties_go_to_the_smaller_id():
    module = nn.Linear(FEATURES, CLASSES)
    x, y = samples(1)
    train = x.expand(12, -1), y.expand(12)
    ids = torch.randperm(100)[:12]
    result = run(module, wrong_samples(module, 5), train, ids=ids, batch_size=5, top_k=4)
    lists = [each for q in result.queries.values() for each in (q.harmful, q.look_alikes, q.teachers) if each]
    assert lists
    assert all([sample.sample_id for sample in each] == sorted(ids.tolist())[:4] for each in lists)
    assert result.suspects.sample_ids.tolist() == sorted(ids.tolist())


def test_no_queries():
    module, train = nn.Linear(FEATURES, CLASSES), samples(20)
    result = run(module, None, train)
    assert result.queries == {}
    assert not result.has_teachers
    assert result.num_samples == len(result.suspects) == 20
    torch.testing.assert_close(result.suspects.scores, run(module, wrong_samples(module, 3), train).suspects.scores)


def test_no_queries_and_no_samples():
    result = run_pass(nn.Linear(FEATURES, CLASSES), Adapter(), [], [], EngineSettings())
    assert (result.queries, len(result.suspects), result.num_samples) == ({}, 0, 0)


def test_suspects_are_flagged_where_the_model_disagrees():
    module, (x, y) = nn.Linear(FEATURES, CLASSES), samples(20)
    suspects = run(module, None, (x, y)).suspects
    with torch.no_grad():
        logits = module(x)
    for suspect in suspects:
        assert suspect.label == int(y[suspect.sample_id])
        assert suspect.flagged == (int(logits[suspect.sample_id].argmax()) != suspect.label)
        others = logits[suspect.sample_id].softmax(0).clone()
        others[suspect.label] = -1
        assert suspect.suggested_label == int(others.argmax())
        assert suspect.probability == pytest.approx(float(others.max()), abs=1e-3)


def test_regression_has_neither_teachers_nor_flags():
    module = nn.Linear(FEATURES, 1)
    x = torch.randn(20, FEATURES)
    result = run(module, (x[:4], torch.randn(4)), (x, torch.randn(20)), criterion=nn.MSELoss())
    assert len(result.queries) == 4
    assert not result.has_teachers
    assert result.suspects.num_flagged == 0
    assert all(query.harmful and not query.teachers and query.probability is None for query in result.queries.values())


def test_without_teachers_the_rest_is_the_same():
    module = nn.Linear(FEATURES, CLASSES)
    data = wrong_samples(module, 6), samples(40)
    full, short = run(module, *data), run(module, *data, teachers=False)
    assert full.has_teachers
    assert not short.has_teachers
    for position, query in short.queries.items():
        assert not query.teachers
        assert not query.label_looks_wrong
        assert [s.sample_id for s in query.harmful] == [s.sample_id for s in full.queries[position].harmful]
        assert [s.sample_id for s in query.look_alikes] == [s.sample_id for s in full.queries[position].look_alikes]


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.head(x).transpose(1, 2)


def test_batches_of_different_length():
    """Outputs of such batches cannot be put together; their samples are scored all the same."""
    module, adapter = Tagger(), Adapter()
    adapter.bind(module, nn.CrossEntropyLoss())
    texts = [(torch.randn(4, length, FEATURES), torch.randint(CLASSES, (4, length))) for length in (3, 5, 5, 2)]

    def scored(batches):
        ids = torch.arange(12).split(len(batches[0][0]))
        queries = [QueryBatch(range(4), texts[0])]
        return run_pass(module, adapter, queries, zip(ids, batches, strict=True), EngineSettings())

    whole = scored(texts[1:])
    singly = scored([(x[i : i + 1], y[i : i + 1]) for x, y in texts[1:] for i in range(4)])
    assert whole.num_samples == singly.num_samples == 12
    assert len(whole.queries) == 4
    for position, query in whole.queries.items():
        other = singly.queries[position]
        assert [s.sample_id for s in query.harmful] == [s.sample_id for s in other.harmful]
        assert [s.score for s in query.harmful] == pytest.approx([s.score for s in other.harmful], rel=1e-4)


def near_one_sample(label_nearby, number_nearby, label_far=2, margin=6.0):
    """A query of label 0, predicted as 1, among training samples that are close to it and others that are not."""
    module = nn.Linear(FEATURES, CLASSES, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(CLASSES, FEATURES))
    query = torch.tensor([[0.0, margin, 0.0, 5.0]]), torch.tensor([0])
    near = query[0] + 0.01 * torch.randn(number_nearby, FEATURES)
    far = torch.randn(20, FEATURES) * torch.tensor([1.0, 1.0, 1.0, 0.0])
    labels = torch.cat([torch.full((number_nearby,), label_nearby), torch.full((20,), label_far)])
    [report] = run(module, query, (torch.cat([near, far]), labels)).queries.values()
    return report


def test_a_validation_label_is_doubted_where_the_closest_samples_carry_the_prediction():
    assert near_one_sample(1, NUM_WITNESSES).label_looks_wrong


@pytest.mark.parametrize(("label", "number"), [(0, NUM_WITNESSES), (2, NUM_WITNESSES), (1, NUM_WITNESSES - 1)])
def test_a_validation_label_is_not_doubted_without_witnesses(label, number):
    assert not near_one_sample(label, number).label_looks_wrong


def test_a_validation_label_is_not_doubted_where_the_model_is_unsure():
    assert not near_one_sample(1, NUM_WITNESSES, margin=2.0).label_looks_wrong


@pytest.mark.parametrize("batch_size", [1, 7, 20])
def test_training_losses_that_are_not_finite_are_named(batch_size):
    module, (x, y) = nn.Linear(FEATURES, CLASSES), samples(20)
    x[[3, 11]] = torch.nan
    ids = torch.arange(20) + 500
    with pytest.raises(NonFiniteError, match=r"sample ids \[503, 511\]\)\. Nothing is scored\. Check the loss"):
        run(module, wrong_samples(module, 3), (x, y), ids=ids, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 7, 20])
def test_training_gradients_that_are_not_finite_are_named(batch_size):
    module, (x, y) = Brittle(), samples(20)
    x[[3, 11], 0] = 100
    ids = torch.arange(20) + 500
    with pytest.raises(NonFiniteError, match=r"sample ids \[503, 511\]\)\. Nothing is scored"):
        run(module, wrong_samples(module, 3), (x, y), ids=ids, batch_size=batch_size)


def test_queries_that_are_not_finite_are_refused():
    module, (x, y) = nn.Linear(FEATURES, CLASSES), samples(4)
    x[2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"loss of a query is not finite.*Check the loss in eval mode"):
        run(module, (x, y), samples(20))


def test_query_gradients_that_are_not_finite_are_refused():
    module = Brittle()
    x, y = samples(4)
    x[2, 0] = 100
    with torch.no_grad():
        y = (module(x).argmax(1) + 1) % CLASSES
    with pytest.raises(NonFiniteError, match=r"gradient of a query is not finite.*the layers above `head`"):
        run(module, (x, y), samples(20))


def test_labels_out_of_range_are_named():
    module, (x, y) = nn.Linear(FEATURES, CLASSES), samples(20)
    y[7] = 9
    with pytest.raises(LabelRangeError, match=r"Training samples \[107\]: Labels \[9\] lie outside"):
        run(module, None, (x, y), ids=torch.arange(20) + 100)


def test_mixing_is_refused():
    module = Net(nn.Linear(FEATURES, CLASSES), tail=nn.BatchNorm1d(CLASSES, affine=False, track_running_stats=False))
    with pytest.raises(SampleMixingError, match="Layer `tail`"):
        run(module, None, samples(20))


def snapshot(module):
    return (
        {name: value.clone() for name, value in module.state_dict().items()},
        [part.training for part in module.modules()],
        [(len(part._forward_hooks), len(part._forward_pre_hooks), sorted(vars(part))) for part in module.modules()],
        [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        torch.is_grad_enabled(),
        torch.get_rng_state().clone(),
    )


def assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert_same(list(left.values()), list(right.values()))
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("failing", [False, True])
def test_the_module_is_left_as_found(failing):
    trunk = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5))
    module = Net(nn.Linear(8, CLASSES), trunk).train()
    trunk[1].eval()
    x, y = samples(20)
    nn.functional.cross_entropy(module(x), y).backward()
    before = snapshot(module)
    if failing:
        y = y.clone()
        y[-1] = 17
        with pytest.raises(LabelRangeError):
            run(module, (x[:4], y[:4]), (x, y))
    else:
        run(module, (x[:4], y[:4]), (x, y))
    assert_same(snapshot(module), before)


def test_every_forward_runs_in_the_precision_context(monkeypatch):
    monkeypatch.setattr(batch_runner, "JOINED_SAMPLES", 1)
    entered = []

    @contextmanager
    def context():
        entered.append(True)
        yield

    module = nn.Linear(FEATURES, CLASSES)
    run(module, wrong_samples(module, 3), samples(20), batch_size=5, context=context)
    assert len(entered) == 1 + 1 + 4  # counting operations, queries, batches


def test_batches_are_let_go(monkeypatch):
    monkeypatch.setattr(batch_runner, "JOINED_SAMPLES", 1)
    """Working memory does not grow with the number of training samples."""
    module, alive, most = nn.Linear(FEATURES, CLASSES), [], 0
    adapter = Adapter()

    def batches():
        nonlocal most
        for start in range(0, 200, 5):
            x, y = samples(5)
            alive.append(weakref.ref(x))
            yield torch.arange(start, start + 5), (x, y)
            del x, y
            most = max(most, sum(reference() is not None for reference in alive))

    run_pass(module, adapter, [QueryBatch(range(3), wrong_samples(module, 3))], batches(), EngineSettings())
    assert len(alive) == 40
    assert most <= 1


def test_errors_are_of_the_package():
    with pytest.raises(
        GradSimError, match=r"`layers='headd'` matches no layer or parameter of `Net`\. Closest: `head`"
    ):
        run(Net(nn.Linear(FEATURES, CLASSES)), None, samples(5), layers="headd")


class Narrow(nn.Linear):
    """A module that runs out of memory beyond a few samples."""

    capacity = 3

    def forward(self, x):
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def assert_same_result(result, expected):
    assert result.queries.keys() == expected.queries.keys()
    for position, query in result.queries.items():
        other = expected.queries[position]
        for ours, theirs in zip(
            (query.harmful, query.look_alikes, query.teachers),
            (other.harmful, other.look_alikes, other.teachers),
            strict=True,
        ):
            assert [sample.sample_id for sample in ours] == [sample.sample_id for sample in theirs]
            assert [s.score for s in ours] == pytest.approx([s.score for s in theirs], rel=1e-4, abs=1e-6)
    assert result.suspects.sample_ids.tolist() == expected.suspects.sample_ids.tolist()
    torch.testing.assert_close(result.suspects.scores, expected.suspects.scores)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_out_of_memory_halves_and_changes_nothing(layers):
    module = Narrow(FEATURES, CLASSES)
    module.capacity = 100
    queries, train = wrong_samples(module, 6), samples(40)
    expected = run(module, queries, train, batch_size=20, layers=layers)
    assert not expected.ran_short
    module.capacity = 3
    found = run(module, queries, train, batch_size=20, layers=layers)
    assert found.ran_short
    assert_same_result(found, expected)


def test_out_of_memory_for_a_single_sample_raises():
    module = Narrow(FEATURES, CLASSES)
    queries = wrong_samples(module, 3)
    module.capacity = 0
    with pytest.raises(torch.OutOfMemoryError):
        run(module, queries, samples(5))


def test_products_that_run_out_of_memory_shrink(monkeypatch):
    module = nn.Linear(FEATURES, CLASSES)
    queries, train = wrong_samples(module, 6), samples(40)
    expected = run(module, queries, train)
    seen = []

    def narrow(*args, max_intermediate, **options):
        seen.append((max_intermediate, options["keep"]))
        if max_intermediate > 2**20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return dot_and_squared_norms(*args, max_intermediate=max_intermediate, **options)

    monkeypatch.setattr(scorer, "dot_and_squared_norms", narrow)
    found = run(module, queries, train)
    assert found.ran_short
    assert seen[0] == (2**24, True)
    assert seen[-1] == (2**20, False)
    assert_same_result(found, expected)


def test_labels_out_of_range_are_named_in_any_portion():
    module = nn.Linear(FEATURES, CLASSES)
    x, y = samples(20)
    y[[1, 13]] = 7
    with pytest.raises(LabelRangeError, match=r"Training samples \[1\]") as first:
        run(module, None, (x, y), batch_size=20)
    assert first.value.rows == (1,)
    y[1] = 0
    with pytest.raises(LabelRangeError, match=r"Training samples \[13\]") as second:
        run(module, None, (x, y), batch_size=20)
    assert second.value.rows == (13,)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_small_batches_run_together(layers):
    sizes = []

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

        def forward(self, x):
            sizes.append(len(x))
            return self.head(self.hidden(x).tanh())

    module = Counts()
    queries, train = wrong_samples(module, 20), samples(700)
    sizes.clear()
    found = run(module, queries, train, batch_size=10, layers=layers)
    assert sizes[-2:] == [510, 190]
    assert found.plan.batch_size == 10
    assert_same_result(found, run(module, queries, train, batch_size=700, layers=layers))


def test_waiting_logits_count(monkeypatch):
    """Logits of many classes are memory, too: they are scored before they fill the budget."""
    sizes = []
    update = sample_statistics.SampleStatistics.update
    monkeypatch.setattr(
        sample_statistics.SampleStatistics,
        "update",
        lambda self, ids, *args, **options: (sizes.append(len(ids)), update(self, ids, *args, **options)),
    )
    monkeypatch.setattr(batch_runner, "JOINED_SAMPLES", 1)
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2000))
    x, y = torch.randn(200, FEATURES), torch.randint(2000, (200,))
    run(module, None, (x, y), batch_size=10, layers="all", memory_budget=2**22)
    assert sum(sizes) == 200
    assert max(sizes) <= 2**22 / 8 / 4 / 2000 + 10


class TakesGradients(nn.Linear):
    """A forward that PyTorch does not let us measure."""

    def forward(self, x):
        return super().forward(torch.func.vmap(torch.func.grad(lambda row: (row**2).sum() / 2))(x))


@pytest.mark.parametrize("layers", ["last", "all"])
def test_a_forward_that_takes_gradients_itself(layers):
    module = TakesGradients(FEATURES, CLASSES)
    plain = nn.Linear(FEATURES, CLASSES)
    plain.load_state_dict(module.state_dict())
    queries, train = wrong_samples(plain, 6), samples(40)
    assert_same_result(run(module, queries, train, layers=layers), run(plain, queries, train, layers=layers))


class Pair:
    """A batch of the user's own kind, which cannot be cut."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class ReadsPairs(Adapter):
    def split(self, batch):
        return batch.x, batch.y


def test_batches_that_cannot_be_cut_run_whole():
    module, adapter = nn.Linear(FEATURES, CLASSES), ReadsPairs()
    adapter.bind(module)
    queries, (x, y) = wrong_samples(module, 6), samples(40)
    expected = run(module, queries, (x, y))
    batches = [(ids, Pair(x[ids], y[ids])) for ids in torch.arange(40).split(20)]
    found = run_pass(module, adapter, [QueryBatch(range(6), Pair(*queries))], batches, EngineSettings(memory_budget=1))
    assert_same_result(found, expected)


def test_a_batch_that_is_a_part_of_a_larger_tensor_counts_as_itself():
    """The storage that it shares exists anyway: it must not make portions smaller."""
    module, adapter = nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)), Adapter()
    adapter.bind(module)
    x, y = samples(10_000)
    sizes = []
    for batch in ((x[:16], y[:16]), (x[:16].clone(), y[:16].clone())):
        with evaluating(module), PerSampleGradients(module, "all") as gradients:
            runner = BatchRunner(module, adapter, gradients, memory_budget=10**6)
            list(runner.run(batch, 16))
        sizes.append(runner.portions.size)
    assert sizes[0] == sizes[1]
