"""The code that the documentation shows runs as it stands, and prints what it says."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback, PerSampleGradients
from lightning_gradsim.rules import find_rule, registry
from tests.noninterference.cases import CASES
from tests.trainer.faults import ELSEWHERE, FAULTS
from tests.trainer.support import fit

ROOT = Path(__file__).parents[1]


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return x * self.weight


def test_the_plan_of_the_page_on_layers(capsys):
    pytest.importorskip("mlxtend")
    model = example("mnist_convnet").ConvNet()
    data = TensorDataset(torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    code = blocks("layers.md")[0].replace('layers="all"', 'layers="all", memory_budget=2**31')
    exec(code, {"model": model, "train_loader": DataLoader(data, batch_size=64)})
    assert capsys.readouterr().out == blocks("layers.md", "text")[0]


def test_the_rule_of_the_page_on_layers(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    names = {"Scale": Scale}
    exec(blocks("layers.md")[1], names)
    assert find_rule("scale", Scale()) is names["scale_factors"]
    module, x = nn.Sequential(Scale(), nn.Linear(3, 2)), torch.randn(4, 3)
    with PerSampleGradients(module, "0") as gradients:
        found = gradients.materialise(lambda batch: module(batch).square().sum(1), x)
        assert gradients.steps == {"0": "rule"}
    expected = [torch.autograd.grad(module(x[i : i + 1]).square().sum(), module[0].weight)[0] for i in range(4)]
    torch.testing.assert_close(found["0.weight"], torch.stack(expected))


def first_column(page, heading):
    """Names in the first column of the table under a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [
        name
        for line in table.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(.+?)`", line.split("|")[1])
    ]


def test_the_page_of_promises_names_every_configuration():
    named = first_column("promises.md", "In which configurations")
    assert sorted(named) == sorted(case.name for case in CASES)


def test_the_page_of_promises_names_every_fault():
    named = first_column("promises.md", "When something fails")
    assert sorted(named) == sorted([*(fault.name for fault in FAULTS), *ELSEWHERE])
    for path, _, name in (place.partition("::") for place in ELSEWHERE.values()):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
def test_the_tutorial(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="an extra: `examples`")
    monkeypatch.chdir(tmp_path)
    quiet = "enable_progress_bar=False, enable_model_summary=False, "
    names = {}
    for block in blocks("tutorial.md"):
        exec(block.replace("Trainer(max_epochs=30, ", "Trainer(max_epochs=4, " + quiet), names)
    printed = capsys.readouterr().out
    harmful = re.findall(r"training sample \d+, labelled (\d), truly (\d)", printed)
    assert len(harmful) == 5
    assert sum(labelled != truly for labelled, truly in harmful) >= 2
    flagged, found, wrong = map(
        int, re.search(r"(\d+) samples flagged, (\d+) of them among the (\d+)", printed).groups()
    )
    assert 0.8 * wrong < found <= min(flagged, wrong)
    assert (tmp_path / "lightning_logs" / "version_0" / "gradsim" / "mistakes.png").exists()
    assert re.search(r"validation accuracy \d\d\.\d%, then \d\d\.\d%", printed)


def test_the_adapters_of_the_page_on_batches():
    names = {}
    for block in blocks("adapters.md"):
        exec(block, names)
    batch = {"waveform": torch.rand(3, 16), "word": torch.tensor([0, 1, 3]), "sureness": torch.tensor([1.0, 0.5, 0.0])}
    module = names["Segments"]()
    logits, words, losses = module.gradsim_step(batch)
    torch.testing.assert_close(losses.mean(), module.training_step(batch, 0))
    assert (logits.shape, losses[2]) == ((3, 4), 0)
    assert torch.equal(words, batch["word"])
    inputs, targets = names["Words"]().split(batch)
    assert torch.equal(inputs, batch["waveform"])
    assert torch.equal(targets, batch["word"])


def test_the_sink_of_the_page_on_reports(tmp_path, capsys):
    names = {"GradSimCallback": partial(GradSimCallback, on_error="raise", time_budget=None, mislabel_score=None)}
    exec(blocks("report.md")[1], names)
    fit(tmp_path, names["gradsim"])
    printed = capsys.readouterr().out
    assert "| rank | training sample |" in printed
    assert "'gradsim/errors':" in printed
