"""Sample ids of training batches are right under every kind of loader: samples carry their own, to compare with."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_gradsim import lightning_bridge as bridge
from lightning_gradsim.errors import BatchFormatError
from lightning_gradsim.sample_id_recorder import SampleIdRecorder
from tests.trainer.support import make_trainer

NUM_SAMPLES, BATCH_SIZE = 23, 4
pytestmark = pytest.mark.filterwarnings(
    "ignore:You requested to overfit:UserWarning",
    "ignore:You defined a `validation_step` but:UserWarning",
    "ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning",
)


class Model(LightningModule):
    """Learns from batches of (features with the id first, label), and keeps the ids that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layer = nn.Linear(3, 2)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.read(batch)
        self.seen.append(x[:, 0].long().tolist())
        return nn.functional.cross_entropy(self.layer(x[:, 1:]), y)

    @staticmethod
    def read(batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, dict):
            batch = batch["x"], batch["y"]
        return batch[0], batch[1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0][:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Watcher(Callback):
    """Asks for the ids of every batch, as a callback does."""

    def __init__(self, id_key: str | int | None = None) -> None:
        self.recorder = SampleIdRecorder(id_key)
        self.ids: list[list[int] | None] = []
        self.reasons: set[str | None] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.recorder.attach(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loaders = bridge.flatten_loaders(trainer.train_dataloader)
        ids = self.recorder.find_ids(loaders, batch, batch_idx, len(pl_module.read(batch)[1]))  # type: ignore[operator]
        self.ids.append(None if ids is None else ids.tolist())
        self.reasons.add(self.recorder.reason)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.recorder.detach()


def samples(number: int = NUM_SAMPLES, first_id: int = 0) -> TensorDataset:
    ids = torch.arange(first_id, first_id + number, dtype=torch.float32)
    features = torch.randn(number, 3, generator=torch.Generator().manual_seed(4))
    return TensorDataset(torch.cat([ids[:, None], features], dim=1), torch.arange(number) % 2)


def concatenated() -> Dataset[Any]:
    """Ids count on from the length beneath each part: 10 samples, of which 4 are taken, then 9."""
    return ConcatDataset([Subset(samples(10), [7, 2, 9, 2]), samples(9, first_id=10)])


class Named(Dataset[Any]):
    """Samples as mappings that carry an id."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = samples()[index]
        return {"x": x, "y": y, "uid": index}


class Stream(IterableDataset[Any]):
    def __init__(self, of_batches: bool = False, with_ids: bool = False) -> None:
        self.of_batches, self.with_ids = of_batches, with_ids

    def __iter__(self) -> Any:
        x, y = samples().tensors
        parts = (
            zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True) if self.of_batches else zip(x, y, strict=True)
        )
        return ((*part, part[0][..., 0].long()) if self.with_ids else part for part in parts)


class Batches:
    """A loader that is none of torch's."""

    def __iter__(self) -> Any:
        return iter([samples()[:4], samples()[4:8]])


class Backwards:
    """A batch sampler of the user's own."""

    def __iter__(self) -> Any:
        return iter([[3, 2], [1, 0]])

    def __len__(self) -> int:
        return 2


class Data(LightningDataModule):
    """A new loader, over another part of the samples, whenever it is asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.num_asked = options, 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.num_asked += 1
        part = Subset(samples(), range(self.num_asked, NUM_SAMPLES))
        return DataLoader(part, BATCH_SIZE, shuffle=True, **self.options)


def distributed(shuffle: bool) -> Any:
    return DistributedSampler(samples(), num_replicas=2, rank=1, shuffle=shuffle)


LOADERS = {
    "plain": lambda: DataLoader(samples(), BATCH_SIZE),
    "shuffled": lambda: DataLoader(samples(), BATCH_SIZE, shuffle=True),
    "own generator": lambda: DataLoader(
        samples(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(6)
    ),
    "drop last": lambda: DataLoader(samples(), BATCH_SIZE, shuffle=True, drop_last=True),
    "one a batch": lambda: DataLoader(samples(), 1, shuffle=True),
    "all in a batch": lambda: DataLoader(samples(), 99, shuffle=True),
    "workers": lambda: DataLoader(samples(), BATCH_SIZE, shuffle=True, num_workers=2),
    "workers, deep prefetch": lambda: DataLoader(samples(), BATCH_SIZE, shuffle=True, num_workers=1, prefetch_factor=9),
    "persistent workers": lambda: DataLoader(
        samples(), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "distributed": lambda: DataLoader(samples(), BATCH_SIZE, sampler=distributed(shuffle=True)),
    "distributed, in order": lambda: DataLoader(samples(), BATCH_SIZE, sampler=distributed(shuffle=False)),
    "weighted": lambda: DataLoader(
        samples(), BATCH_SIZE, sampler=WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1), 40)
    ),
    "part": lambda: DataLoader(samples(), BATCH_SIZE, sampler=SubsetRandomSampler([3, 5, 8, 13, 21])),
    "list as sampler": lambda: DataLoader(samples(), BATCH_SIZE, sampler=[4, 4, 0, 22, 7]),
    "subset": lambda: DataLoader(Subset(samples(), [9, 4, 20, 1, 4]), 2, shuffle=True),
    "subset of subset": lambda: DataLoader(Subset(Subset(samples(), range(5, 20)), [0, 14, 3]), 2, shuffle=True),
    "concatenated": lambda: DataLoader(concatenated(), BATCH_SIZE, shuffle=True),
}


def run(train: Any, tmp_path: Any, watcher: Watcher | None, **options: Any) -> Model:
    torch.manual_seed(7)
    model = Model()
    trainer = make_trainer(tmp_path, [watcher] if watcher else [], **{"max_epochs": 3, "logger": False, **options})
    if isinstance(train, LightningDataModule):
        trainer.fit(model, datamodule=train)
    else:
        trainer.fit(model, train, DataLoader(samples(), 8))
    assert "process_dataloader" not in vars(trainer.strategy)
    return model


def check(make: Any, tmp_path: Any, **options: Any) -> Model:
    """Ids are those that the samples carry; order and weights are those of a run without the recorder."""
    watcher, loader = Watcher(), make()
    sampler = None if isinstance(loader, LightningDataModule) else loader.batch_sampler.sampler
    model = run(loader, tmp_path, watcher, **options)
    assert watcher.reasons == {None}
    assert watcher.ids == model.seen
    assert len(model.seen) >= 3
    if sampler is not None:
        assert loader.batch_sampler.sampler is sampler
    other = run(make(), tmp_path, None, **options)
    assert other.seen == model.seen
    assert torch.equal(other.layer.weight, model.layer.weight)
    return model


@pytest.mark.parametrize("name", LOADERS)
def test_ids_are_those_of_the_samples(name, tmp_path):
    check(LOADERS[name], tmp_path, num_sanity_val_steps=0)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 2},
        {"limit_train_batches": 0.5},
        {"overfit_batches": 2},
        {"val_check_interval": 2},
        {"num_sanity_val_steps": 2},
        {"accumulate_grad_batches": 3},
        {"check_val_every_n_epoch": None, "val_check_interval": 4},
        {"reload_dataloaders_every_n_epochs": 2},
        {"max_steps": 8, "max_epochs": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ids_are_right_however_the_trainer_reads(options, num_workers, tmp_path):
    def make() -> Any:
        return DataLoader(samples(), BATCH_SIZE, shuffle=True, num_workers=num_workers)

    check(make, tmp_path, **{"num_sanity_val_steps": 0, **options})


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["in-process", "workers"])
def test_ids_are_right_when_loaders_are_made_anew(every, workers, tmp_path):
    check(lambda: Data(**workers), tmp_path, reload_dataloaders_every_n_epochs=every)


def test_ids_are_right_in_a_run_resumed_within_an_epoch(tmp_path):
    saver = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(tmp_path, [saver], logger=False, enable_checkpointing=True)
    trainer.fit(Model(), LOADERS["shuffled"]())
    watcher, model = Watcher(), Model()
    again = make_trainer(tmp_path, [watcher], logger=False, max_epochs=2)
    again.fit(model, LOADERS["shuffled"](), ckpt_path=str(tmp_path / "saved" / "step=4.ckpt"))
    assert watcher.ids == model.seen
    assert len(model.seen) >= 6
    if Version(lightning.__version__) >= Version("2.6"):  # older releases do not go on within the epoch
        assert len(model.seen) == 2 + 6


def test_the_same_recorder_serves_one_run_after_another(tmp_path):
    watcher, loader = Watcher(), LOADERS["shuffled"]()
    first, second = run(loader, tmp_path, watcher), run(loader, tmp_path, watcher)
    assert watcher.ids == first.seen + second.seen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_may_serve_validation_as_well(num_workers, tmp_path):
    watcher, model = Watcher(), Model()
    loader = DataLoader(samples(), BATCH_SIZE, shuffle=True, num_workers=num_workers)
    trainer = make_trainer(tmp_path, [watcher], logger=False, max_epochs=2, val_check_interval=2)
    trainer.fit(model, loader, loader)
    assert watcher.ids == model.seen


def test_two_recorders_stand_beside_each_other(tmp_path):
    one, two, model = Watcher(), Watcher(), Model()
    loader = LOADERS["shuffled"]()
    sampler = loader.batch_sampler.sampler
    trainer = make_trainer(tmp_path, [one, two], logger=False, max_epochs=2)
    trainer.fit(model, loader)
    assert one.ids == two.ids == model.seen
    assert loader.batch_sampler.sampler is sampler
    assert "process_dataloader" not in vars(trainer.strategy)


def test_one_that_goes_early_leaves_the_other_at_work(tmp_path):
    class Leaving(Watcher):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.recorder.detach()

        def on_train_batch_start(self, *args: Any) -> None:
            pass

    for early, late in ((0, 1), (1, 0)):
        callbacks = [Watcher(), Watcher()]
        callbacks[early] = Leaving()
        model, data = Model(), Data()
        trainer = make_trainer(tmp_path, callbacks, logger=False, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        trainer.fit(model, datamodule=data)
        assert callbacks[late].ids == model.seen
        assert "process_dataloader" not in vars(trainer.strategy)


def test_other_loaders_are_left_alone(tmp_path):
    class Looking(Watcher):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert type(trainer.val_dataloaders.batch_sampler.sampler) is SequentialSampler

    run(LOADERS["plain"](), tmp_path, Looking())


UNKNOWN = {
    "batch sampler of its own (`Backwards`)": lambda: DataLoader(samples(), batch_sampler=Backwards()),
    "`batch_size=None`": lambda: DataLoader(
        TensorDataset(samples().tensors[0][None], samples().tensors[1][None]), None
    ),
    "iterable dataset (`Stream`)": lambda: DataLoader(Stream(), BATCH_SIZE),
    "no `DataLoader`": Batches,
    "reads 2 loaders at once": lambda: [LOADERS["plain"](), LOADERS["shuffled"]()],
    "whatever order its workers end": lambda: DataLoader(samples(), BATCH_SIZE, num_workers=1, in_order=False),
    "holds 3 samples where the sampler has drawn 4": lambda: DataLoader(
        samples(), BATCH_SIZE, drop_last=True, collate_fn=lambda parts: torch.utils.data.default_collate(parts[1:])
    ),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_where_ids_are_not_known_the_reason_is_said(reason, tmp_path):
    class FirstOfTwo(Model):
        @staticmethod
        def read(batch: Any) -> tuple[Tensor, Tensor]:
            batch = batch[0] if isinstance(batch[0], (list, tuple)) else batch
            return Model.read(batch)

    watcher, model = Watcher(), FirstOfTwo()
    make_trainer(tmp_path, [watcher], logger=False).fit(model, UNKNOWN[reason]())
    assert set(watcher.ids) == {None}
    (said,) = watcher.reasons
    assert said is not None
    assert reason in said
    assert "`id_key=`" in said


def test_a_sampler_of_keys_is_said(tmp_path):
    class ByKey(Dataset[Any]):
        def __getitem__(self, key: str) -> Any:
            return samples()[int(key)]

    watcher = Watcher()
    make_trainer(tmp_path, [watcher], logger=False).fit(Model(), DataLoader(ByKey(), 2, sampler=["3", "1"]))
    assert watcher.ids == [None]
    assert "draws '3', which is no index" in str(watcher.reasons)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: DataLoader(Named(), BATCH_SIZE, shuffle=True, num_workers=1), "uid"),
        (lambda: DataLoader(Named(), batch_sampler=Backwards()), "uid"),
        (lambda: DataLoader(Stream(with_ids=True), BATCH_SIZE), 2),
        (lambda: DataLoader(Stream(of_batches=True, with_ids=True), None), 2),
    ],
    ids=["mapping", "batch sampler", "stream", "stream of batches"],
)
def test_batches_may_carry_ids(make, key, tmp_path):
    watcher = Watcher(key)
    model = run(make(), tmp_path, watcher)
    assert watcher.ids == model.seen
    assert watcher.reasons == {None}


@pytest.mark.parametrize(
    ("key", "words"),
    [("id", r"no entry for `id_key='id'`; it has the keys \['uid', 'x', 'y'\]"), ("x", r"shape \(4, 4\)")],
)
def test_an_entry_that_holds_no_ids_is_refused(key, words, tmp_path):
    with pytest.raises(BatchFormatError, match=words):
        run(DataLoader(Named(), BATCH_SIZE), tmp_path, Watcher(key))


def test_a_run_that_fails_leaves_nothing_behind(tmp_path):
    class Failing(Watcher):
        def on_train_batch_start(self, *args: Any) -> None:
            raise RuntimeError("on purpose")

        def on_exception(self, *args: Any) -> None:
            self.recorder.detach()

    loader = LOADERS["shuffled"]()
    sampler = loader.batch_sampler.sampler
    trainer = make_trainer(tmp_path, [Failing()], logger=False)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Model(), loader)
    assert loader.batch_sampler.sampler is sampler
    assert "process_dataloader" not in vars(trainer.strategy)
