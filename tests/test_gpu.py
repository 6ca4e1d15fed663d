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


def run(module, adapter, queries, train, device):
    module = module.to(device)
    batches = [
        (torch.arange(i, i + 10), tuple(part[i : i + 10].to(device) for part in train)) for i in range(0, 60, 10)
    ]
    query_batch = QueryBatch(range(len(queries[0])), tuple(part.to(device) for part in queries))
    return run_pass(module, adapter, [query_batch], batches, EngineSettings(top_k=5))


def test_cpu_and_cuda_agree():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    adapter = Adapter()
    adapter.bind(module)
    train = torch.randn(60, 6), torch.randint(4, (60,))
    queries = torch.randn(12, 6), torch.randint(4, (12,))
    here, there = run(module, adapter, queries, train, "cpu"), run(module, adapter, queries, train, "cuda")
    assert here.queries.keys() == there.queries.keys()
    for position, query in here.queries.items():
        scores = [sample.score for sample in query.harmful]
        assert [sample.score for sample in there.queries[position].harmful] == pytest.approx(scores, rel=1e-3, abs=1e-5)


def test_the_random_state_of_the_device_is_left_alone():
    state = torch.cuda.get_rng_state()
    test_cpu_and_cuda_agree()
    assert torch.equal(torch.cuda.get_rng_state(), state)
