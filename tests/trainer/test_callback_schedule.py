"""Which validations are looked at, and how much of the training data is read there."""

import itertools
from importlib import metadata
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar
from packaging.version import Version
from torch.utils.data import IterableDataset

import lightning_gradsim.presentation
from lightning_gradsim import GradSimCallback
from tests.trainer.support import (
    NUM_TRAIN,
    Classifier,
    Truth,
    assert_exact,
    fit,
    loader,
    make_trainer,
    read,
    strict,
    train_data,
    val_data,
)


class TestSchedule:
    def test_every_epoch(self, tmp_path):
        _, _, recorder = fit(tmp_path, max_epochs=3)
        assert recorder.moments == [(0, 6), (1, 12), (2, 18)]

    def test_every_second_epoch(self, tmp_path):
        _, _, recorder = fit(tmp_path, strict(every_n_epochs=2), max_epochs=5)
        assert recorder.moments == [(1, 12), (3, 24)]

    @pytest.mark.parametrize(
        ("options", "moments"),
        [
            ({"val_check_interval": 0.5}, [(0, 6), (1, 12)]),
            ({"val_check_interval": 0.5, "limit_train_batches": 5}, [(0, 4), (1, 9)]),
            ({"val_check_interval": 0.4}, [(0, 6), (1, 12)]),
            ({"val_check_interval": 4}, [(0, 4), (1, 10)]),
            ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [(0, 4), (1, 12)]),
            (
                {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 4},
                [(0, 5), (1, 10), (2, 15), (3, 20)],
            ),
            ({"val_check_interval": 9, "check_val_every_n_epoch": None, "max_epochs": 3}, [(1, 9), (2, 18)]),
            ({"check_val_every_n_epoch": 2, "max_epochs": 4}, [(1, 12), (3, 24)]),
        ],
        ids=str,
    )
    def test_only_the_last_validation_of_an_epoch(self, tmp_path, options, moments):
        _, _, recorder = fit(tmp_path, **{"max_epochs": 2, **options})
        assert recorder.moments == moments

    def test_a_quarter_of_an_epoch_that_it_does_not_divide(self, tmp_path):
        train = loader(train_data(55), batch_size=5)  # 11 batches, validation after 2, 4, 6, 8, 10
        _, _, recorder = fit(tmp_path, train=train, max_epochs=2, val_check_interval=0.25)
        assert recorder.moments == [(0, 10), (1, 21)]

    @pytest.mark.parametrize(
        ("options", "moments"),
        [
            ({"max_steps": 4, "val_check_interval": 2}, [(0, 4)]),
            ({"max_steps": 5, "val_check_interval": 2}, [(0, 4)]),
            ({"max_steps": 9, "val_check_interval": 2}, [(0, 6), (1, 8)]),
            ({"max_steps": 2, "val_check_interval": 2, "accumulate_grad_batches": 2}, [(0, 2)]),
        ],
        ids=str,
    )
    def test_a_run_that_ends_in_the_middle_of_an_epoch(self, tmp_path, options, moments):
        _, _, recorder = fit(tmp_path, max_epochs=-1, **options)
        assert recorder.moments == moments

    def test_an_endless_run(self, tmp_path):
        class Endless(IterableDataset):
            def __iter__(self):
                return itertools.cycle(list(train_data()))

        gradsim = strict(train_data=train_data())
        _, _, recorder = fit(
            tmp_path, gradsim, train=loader(Endless()), max_epochs=-1, max_steps=10, val_check_interval=4
        )
        assert recorder.moments == [(0, 8)]

    def test_limited_validation(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, strict(num_queries=99), limit_val_batches=2)
        assert read(gradsim).num_validation_samples == 20
        assert {query.sample_id for query in read(gradsim).queries} == {
            i for i in Truth(module).mistakes(val_data()) if i < 20
        }

    def test_after_a_warmup(self, tmp_path):
        _, _, recorder = fit(tmp_path, strict(warmup_epochs=2), max_epochs=4)
        assert recorder.moments == [(2, 18), (3, 24)]

    @pytest.mark.filterwarnings("ignore:.*no validation of this run was one to look at")
    @pytest.mark.parametrize(
        ("every_n_steps", "moments"),
        [(1, [(0, 3), (0, 6), (1, 9), (1, 12)]), (4, [(0, 6), (1, 12)]), (9, [(1, 9)]), (13, [])],
    )
    def test_every_n_steps(self, tmp_path, every_n_steps, moments):
        _, _, recorder = fit(tmp_path, strict(every_n_steps=every_n_steps), max_epochs=2, val_check_interval=0.5)
        assert recorder.moments == moments

    def test_a_second_fit_counts_steps_anew(self, tmp_path):
        gradsim = strict(every_n_steps=6)
        fit(tmp_path / "first", gradsim, max_epochs=3)
        _, _, recorder = fit(tmp_path / "second", gradsim, max_epochs=2)
        assert recorder.moments == [(0, 6), (1, 12)]


RUNS = [
    {"max_epochs": 3},
    {"max_epochs": 3, "val_check_interval": 0.5},
    {"max_epochs": 2, "val_check_interval": 0.4},
    {"max_epochs": 3, "check_val_every_n_epoch": 2},
    {"max_epochs": 5, "check_val_every_n_epoch": 2, "val_check_interval": 0.5},
    {"max_epochs": 3, "val_check_interval": 4, "check_val_every_n_epoch": None},
    {"max_epochs": 3, "val_check_interval": 10, "check_val_every_n_epoch": None},
    {"max_epochs": 3, "val_check_interval": 13, "check_val_every_n_epoch": None},
    {"max_epochs": -1, "max_steps": 9, "val_check_interval": 2},
    {"max_epochs": -1, "max_steps": 13, "val_check_interval": 4},
    {"max_epochs": -1, "max_steps": 12},
    {"max_epochs": 9, "max_steps": 17},
    {"max_epochs": -1, "max_steps": 5, "accumulate_grad_batches": 2, "val_check_interval": 2},
]


class TestTheLastValidation:
    @pytest.mark.parametrize("options", RUNS, ids=str)
    def test_is_known_when_it_comes(self, tmp_path, options):
        class Validations(Callback):
            def __init__(self):
                self.steps = []

            def on_validation_end(self, trainer, pl_module):
                if not trainer.sanity_checking:
                    self.steps.append(trainer.global_step)

        validations = Validations()
        gradsim, _, recorder = fit(tmp_path, strict(last_epoch_only=True), callbacks=[validations], **options)
        assert [step for _, step in recorder.moments] == validations.steps[-1:]
        assert read(gradsim).step == validations.steps[-1]

    @pytest.mark.parametrize("behind", [True, False])
    @pytest.mark.parametrize("option", ["last_epoch_only", "final_pass"])
    def test_is_found_after_an_early_stop(self, tmp_path, option, behind):
        """The loss of the second validation is no better than that of the first."""
        stop = EarlyStopping("val_loss", min_delta=100.0, patience=1)
        gradsim = strict(**{option: True})
        trainer = make_trainer(tmp_path, [stop, gradsim] if behind else [gradsim, stop], max_epochs=9)
        module = Classifier()
        trainer.fit(module, loader(train_data(), shuffle=True), loader(val_data()))
        assert trainer.global_step == 12
        assert (read(gradsim).epoch, read(gradsim).step) == (1, 12)
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    def test_in_validate_is_every_one(self, tmp_path):
        gradsim = strict(last_epoch_only=True, train_data=train_data())
        make_trainer(tmp_path, [gradsim]).validate(Classifier(), loader(val_data()), verbose=False)
        assert read(gradsim).queries


class Slow(Classifier):
    """On a clock of the test, our pass takes half a second a batch, and training a second."""

    def __init__(self, gradsim, now):
        super().__init__()
        self.gradsim, self.now = gradsim, now

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.gradsim._clock._begin is not None:
            self.now[0] += 0.5
        return batch

    def training_step(self, batch, batch_idx):
        self.now[0] += 1.0
        return super().training_step(batch, batch_idx)


class TestTimeBudget:
    @pytest.fixture
    def now(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr("lightning_gradsim.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
        return now

    def fit(self, tmp_path, gradsim, now, **options):
        options = {"train": loader(train_data()), "max_epochs": 10, **options}
        return fit(tmp_path, gradsim, Slow(gradsim, now), **options)

    def test_all_samples_have_their_turn(self, tmp_path, now):
        """A full pass would take half as long as training does."""
        _, module, recorder = self.fit(tmp_path, strict(time_budget=0.1), now)
        parts = [set(report.suspects.sample_ids.tolist()) for report in recorder.reports]
        assert set().union(*parts) == set(range(NUM_TRAIN))
        assert all(len(part) < NUM_TRAIN for part in parts)
        assert sum(map(len, parts[:3])) == len(set().union(*parts[:3]))
        assert read(recorder.gradsim).time_share <= 0.12
        for report, part in zip(recorder.reports, parts, strict=True):
            assert report.share_read == len(part) / NUM_TRAIN
            assert report.num_train_samples == len(part)
            assert report.reference == f"{len(part)} of 60 training samples, as many as the time budget allows"
            assert sum("`final_pass=True`" in note for note in report.notes) == 1
        last, ids = recorder.reports[-1], sorted(parts[-1])
        rest = torch.utils.data.Subset(train_data(), ids)
        module.now, module.gradsim = [0.0], strict()
        assert_exact(last, Truth(module), rest, val_data(), ids=ids)

    def test_a_part_is_a_fair_sample(self, tmp_path, now):
        """Of samples sorted by class, too."""
        data = train_data()
        order = data.tensors[1].argsort()
        data.tensors = tuple(tensor[order] for tensor in data.tensors)
        _, _, recorder = self.fit(tmp_path, strict(time_budget=0.1), now, train=loader(data), max_epochs=1)
        assert recorder.reports[0].num_train_samples == 20
        assert len(set(recorder.reports[0].suspects.labels.tolist())) == 4

    def test_validations_are_passed_over_where_too_little_is_left(self, tmp_path, now, monkeypatch):
        def take_time(*args, **kwargs):
            now[0] += 1.0
            return draw(*args, **kwargs)

        draw = lightning_gradsim.presentation.mistake_panel
        monkeypatch.setattr(lightning_gradsim.presentation, "mistake_panel", take_time)
        _, _, recorder = self.fit(tmp_path, strict(time_budget=0.1), now)
        epochs = [epoch for epoch, _ in recorder.moments]
        assert epochs[0] == 0
        assert epochs[-1] == 9
        assert 3 <= len(epochs) < 8
        gaps = [later - earlier - 1 for earlier, later in itertools.pairwise(epochs)]
        said = [next((note for note in report.notes if "passed over" in note), "") for report in recorder.reports[1:]]
        assert said == [
            {0: "", 1: "1 earlier validation was"}.get(gap, f"{gap} earlier validations were")
            + (" passed over to keep within `time_budget=0.1`" if gap else "")
            for gap in gaps
        ]

    def test_a_full_pass_at_the_end(self, tmp_path, now):
        _, module, recorder = self.fit(tmp_path, strict(time_budget=0.1, final_pass=True), now, max_epochs=3)
        assert [report.share_read < 1 for report in recorder.reports] == [True] * (len(recorder.reports) - 1) + [False]
        assert recorder.moments[-1] == (2, 18)
        assert_exact(read(recorder.gradsim), Truth(module), train_data(), val_data())

    def test_a_full_pass_after_an_early_stop(self, tmp_path, now):
        gradsim = strict(time_budget=0.1, final_pass=True)
        stop = EarlyStopping("val_loss", min_delta=100.0, patience=1)
        _, module, recorder = self.fit(tmp_path, gradsim, now, callbacks=[stop])
        assert all(report.share_read < 1 for report in recorder.reports)
        assert (read(gradsim).step, read(gradsim).share_read) == (12, 1)
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())

    def test_validate_reads_everything(self, tmp_path, now):
        gradsim = strict(time_budget=0.01, train_data=train_data())
        make_trainer(tmp_path, [gradsim]).validate(Slow(gradsim, now), loader(val_data()), verbose=False)
        assert read(gradsim).share_read == 1

    def test_turns_go_on_after_a_resume(self, tmp_path, now):
        parts = []
        for epoch in (1, 2):
            gradsim = strict(time_budget=0.1)
            trainer = make_trainer(tmp_path, [gradsim], max_epochs=epoch)
            saved = None if epoch == 1 else tmp_path / "saved.ckpt"
            trainer.fit(Slow(gradsim, now), loader(train_data()), loader(val_data()), ckpt_path=saved)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            parts.append(set(read(gradsim).suspects.sample_ids.tolist()))
        assert all(parts)
        assert not parts[0] & parts[1]

    def test_a_full_pass_at_the_end_leaves_the_budget_as_it_is(self, tmp_path, now):
        numbers = []
        for final_pass in (False, True):
            gradsim = strict(time_budget=0.02, final_pass=final_pass)
            _, _, recorder = self.fit(tmp_path / str(final_pass), gradsim, now)
            numbers.append(len(recorder.reports))
        assert numbers[0] == numbers[1] < 10
        assert read(gradsim).share_read == 1

    def test_a_short_run_is_explained_in_full_by_default(self, tmp_path):
        gradsim, module, _ = fit(tmp_path, GradSimCallback(on_error="raise", mislabel_score=None), max_epochs=4)
        assert read(gradsim).epoch == 3
        assert_exact(read(gradsim), Truth(module), train_data(), val_data())


class TestProgressBar:
    def run(self, tmp_path, monkeypatch, bar):
        monkeypatch.setattr("lightning_gradsim.lightning_bridge.BAR_DELAY", 0.0)
        fit(tmp_path, callbacks=[bar], enable_progress_bar=True, max_epochs=3)

    def test_rich(self, tmp_path, monkeypatch, capsys):
        """A second display beside Lightning's would raise; its own tasks must be where it looks for them."""
        if Version(lightning.__version__) < Version("2.6") and Version(metadata.version("rich")) >= Version("14.1"):
            pytest.skip("Lightning's own bar fails here: older releases need rich before 14.1")
        seen = []

        class Bar(RichProgressBar):
            def on_train_epoch_end(self, trainer, pl_module):
                super().on_train_epoch_end(trainer, pl_module)
                seen.append(
                    [
                        (task.total, task.completed, task.visible)
                        for task in self.progress.tasks
                        if "gradient" in task.description
                    ]
                )

        self.run(tmp_path, monkeypatch, Bar())
        assert seen == [[(6, 6, False)]] * 3
