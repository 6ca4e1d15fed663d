"""Compiled modules: the pass runs eagerly and gives the eager results; training is not touched."""

import pytest
import torch
from lightning.pytorch import seed_everything

from tests.trainer.support import Classifier, fit, loader, make_trainer, read, train_data, val_data

BACKEND = "aot_eager"  # the default backend needs a C++ compiler


def compile_whole(module):
    return torch.compile(module, backend=BACKEND)


def compile_in_place(module):
    module.compile(backend=BACKEND)
    return module


def compile_a_part(module):
    module.head.compile(backend=BACKEND)
    return module


def wrap_a_part(module):
    module.body = torch.compile(module.body, backend=BACKEND)
    return module


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [compile_whole, compile_in_place, compile_a_part, wrap_a_part])
def test_compiled_modules(compiled, tmp_path):
    seed_everything(1, verbose=False)
    eager, _, _ = fit(tmp_path / "eager", train=loader(train_data()))

    seed_everything(1, verbose=False)
    module = Classifier()
    gradsim, _, _ = fit(tmp_path / "compiled", module=compiled(module), train=loader(train_data()))

    seed_everything(1, verbose=False)
    alone = Classifier()
    make_trainer(tmp_path / "alone", []).fit(compiled(alone), loader(train_data()), loader(val_data()))

    for ours, theirs in zip(module.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    report = read(gradsim)
    for query, expected in zip(report.queries, read(eager).queries, strict=True):
        assert query.sample_id == expected.sample_id
        assert [s.sample_id for s in query.harmful] == [s.sample_id for s in expected.harmful]
        assert [s.score for s in query.harmful] == pytest.approx([s.score for s in expected.harmful], rel=1e-4)
    assert any("the module is compiled" in note for note in report.notes)
