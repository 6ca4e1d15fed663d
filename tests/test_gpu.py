"""What can only be seen on a CUDA device."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback
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


def test_the_peak_stays_within_the_budget():
    """What a pass takes beside module, queries and batches, over a module whose batch would not fit."""
    budget = 256 * 2**20
    module = nn.Sequential(nn.Linear(64, 2**16), nn.ReLU(), nn.Linear(2**16, 64), nn.ReLU(), nn.Linear(64, 4))
    train = make_data(4096, 64)
    queries = make_data(NUM_QUERIES, 64)
    module, adapter = module.to("cuda").eval(), Adapter()
    adapter.bind(module)
    batch = tuple(part.to("cuda") for part in train)
    query_batch = QueryBatch(range(NUM_QUERIES), tuple(part.to("cuda") for part in queries))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    settings = EngineSettings(layers="last:2", memory_budget=budget)
    found = run_pass(module, adapter, [query_batch], [(torch.arange(4096), batch)], settings)
    assert found.num_samples == 4096
    assert torch.cuda.max_memory_allocated() - before <= budget


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(conv_net(), nn.Dropout(0.2), nn.Linear(4, 4))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.criterion(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def flags():
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "attention": torch.backends.mha.get_fastpath_enabled(),
    }


def fit(tmp_path, callbacks, precision, num_train=400, max_epochs=2):
    seed_everything(1, verbose=False)
    module = Classifier()
    train, val = (TensorDataset(*make_data(number, 2, 8, 8)) for number in (num_train, 100))
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_epochs=max_epochs,
        deterministic=True,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(train, 20, shuffle=True), DataLoader(val, 50))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "weights": {name: value.cpu() for name, value in module.state_dict().items()},
        "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": (torch.get_rng_state(), torch.cuda.get_rng_state()),
        "flags": flags(),
    }


@pytest.fixture
def deterministic(monkeypatch):
    """What ``Trainer(deterministic=True)`` sets for good is set back."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:.*logger.*:lightning_gradsim.GradSimWarning")
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_training_stays_what_it_is(tmp_path, precision, layers):
    """With the scaler of float16, too."""
    gradsim = GradSimCallback(layers=layers, on_error="raise", time_budget=None)
    found, expected = fit(tmp_path, [gradsim], precision), fit(tmp_path, [], precision)
    assert gradsim.report is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:.*logger.*:lightning_gradsim.GradSimWarning")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_samples_are_chosen_beside_the_device(tmp_path, precision):
    """From what training steps have shown, which is kept on the CPU."""
    gradsim = GradSimCallback(mode="in_run", on_error="raise", time_budget=None)
    found, expected = (fit(tmp_path, each, precision, max_epochs=3) for each in ([gradsim], []))
    assert gradsim.report.recall["harmful"] > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore:.*logger.*:lightning_gradsim.GradSimWarning")
def test_the_share_of_the_time_is_kept(tmp_path):
    gradsim = GradSimCallback(layers="all", time_budget=0.1, on_error="raise", num_queries=8)
    fit(tmp_path, [gradsim], "32-true", num_train=20_000, max_epochs=10)
    print(f"overhead: {gradsim.report.time_share:.1%} of the training time")  # noqa: T201
    assert gradsim.report.time_share <= 0.2  # two reports of a run of seconds may read for a second
