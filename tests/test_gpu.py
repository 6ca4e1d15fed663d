"""What can only be seen on a CUDA device."""

import pytest
import torch
from torch import nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings, run_pass
from lightning_gradsim.query_side import QueryBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TRAIN, NUM_QUERIES, BATCH = 60, 12, 20


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(),
        nn.Linear(4 * 36, 4),
    )  # fmt: skip


def make_data(number, *shape):
    return torch.randn(number, *shape), torch.randint(4, (number,))


def run(module, queries, train, device, context=None, **settings):
    module, adapter = module.to(device).eval(), Adapter()
    adapter.bind(module)
    batches = [(ids, tuple(part[ids].to(device) for part in train)) for ids in torch.arange(NUM_TRAIN).split(BATCH)]
    query_batch = QueryBatch(range(NUM_QUERIES), tuple(part.to(device) for part in queries))
    arguments = () if context is None else (context,)
    return run_pass(module, adapter, [query_batch], batches, EngineSettings(top_k=5, **settings), *arguments)


def assert_close(found, expected, rel=1e-3, abs=1e-4):
    assert found.queries.keys() == expected.queries.keys()
    for position, query in expected.queries.items():
        scores = [sample.score for sample in query.harmful]
        assert [s.score for s in found.queries[position].harmful] == pytest.approx(scores, rel=rel, abs=abs)


@pytest.fixture
def plain_products():
    """Products without TF32, as the CPU computes them."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("plain_products")
@pytest.mark.parametrize("layers", ["last", "all"])
def test_cpu_and_cuda_agree(layers):
    module = conv_net()
    queries, train = make_data(NUM_QUERIES, 2, 8, 8), make_data(NUM_TRAIN, 2, 8, 8)
    expected = run(module, queries, train, "cpu", layers=layers)
    assert_close(run(module, queries, train, "cuda", layers=layers), expected)


@pytest.mark.usefixtures("plain_products")
def test_attention_runs_again_on_the_device():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.mix(x).mean(1))

    module = Net()
    queries, train = make_data(NUM_QUERIES, 5, 8), make_data(NUM_TRAIN, 5, 8)
    expected = run(module, queries, train, "cpu", layers="all")
    assert_close(run(module, queries, train, "cuda", layers="all"), expected)


def test_float16_autocast_is_close():
    module = conv_net()
    queries, train = make_data(NUM_QUERIES, 2, 8, 8), make_data(NUM_TRAIN, 2, 8, 8)
    expected = run(module, queries, train, "cuda", layers="all")
    context = lambda: torch.autocast("cuda", dtype=torch.float16)  # noqa: E731
    found = run(module, queries, train, "cuda", context, layers="all")
    shared = found.queries.keys() & expected.queries.keys()
    assert len(shared) >= NUM_QUERIES // 2  # a prediction may change by rounding
    for position in shared:
        scores = [sample.score for sample in expected.queries[position].harmful]
        ours = [sample.score for sample in found.queries[position].harmful]
        assert ours == pytest.approx(scores, rel=0.1, abs=0.1 * max(map(abs, scores)))


def test_out_of_memory_halves():
    """Less than a batch of the activations fits, and results stay the same."""
    module = nn.Sequential(nn.Linear(256, 2**18), nn.ReLU(), nn.Linear(2**18, 4))
    queries, train = make_data(NUM_QUERIES, 256), make_data(NUM_TRAIN, 256)
    expected = run(module, queries, train, "cuda")
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated() + 40 * 2**20
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        found = run(module, queries, train, "cuda", memory_budget=2**40)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.ran_short
    assert_close(found, expected)


def test_the_random_state_of_the_device_is_left_alone():
    state = torch.cuda.get_rng_state()
    run(conv_net(), make_data(NUM_QUERIES, 2, 8, 8), make_data(NUM_TRAIN, 2, 8, 8), "cuda", layers="all")
    assert torch.equal(torch.cuda.get_rng_state(), state)
