"""The code that the documentation shows runs as it stands, and prints what it says.

All Python blocks of a page run in their order in one namespace, which begins with what the page takes as given:
``GIVEN``. A page is run by one test, whose name stands in ``RUN_BY`` unless it is the common one; ``NOT_RUN`` names the
blocks that need a package of another project, which are compiled.
"""

import argparse
import importlib.util
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gradsim
from lightning_gradsim import GradSimCallback, PerSampleGradients, command_line
from lightning_gradsim.rules import find_rule, registry
from tests.noninterference.cases import CASES
from tests.trainer.faults import ELSEWHERE, FAULTS
from tests.trainer.support import Classifier, fit, loader, make_trainer, train_data, val_data

ROOT = Path(__file__).parents[1]


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOT_RUN = {("coming_from.md", 0): "cleanlab", ("coming_from.md", 2): "captum"}
RUN_BY = {
    "adapters.md": "test_the_adapters_of_the_page_on_batches",
    "layers.md": "test_the_rule_of_the_page_on_layers",
    "report.md": "test_the_sink_of_the_page_on_reports",
    "tutorial.md": "test_the_tutorial",
}
ONE_EPOCH = {
    "Trainer(callbacks": 'Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False, callbacks',
    "Trainer(max_epochs=10, ": 'Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False, ',
    "Trainer(max_epochs=30, ": 'Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False, ',
}


def trained(folder):
    """What pages on a training take as given, after a run of one epoch."""
    gradsim = GradSimCallback(on_error="raise", time_budget=None)
    model, trainer = Classifier(), make_trainer(folder, [gradsim])
    trainer.fit(model, loader(train_data()), loader(val_data()))
    return {"gradsim": gradsim, "trainer": trainer, "Net": Classifier, "DataLoader": DataLoader, **untrained(folder)}


def untrained(folder):
    """A module and its data."""
    batch = next(iter(loader(train_data())))
    data = {"train_set": train_data(), "train_loader": loader(train_data()), "val_loader": loader(val_data())}
    return {"model": Classifier(), "batch": batch, "Trainer": Trainer, "GradSimCallback": GradSimCallback, **data}


def with_checkpoints(folder):
    """The same, and checkpoints of its training in the working folder."""
    (folder / "checkpoints").mkdir()
    files = [folder / "checkpoints" / f"epoch={epoch}.ckpt" for epoch in (1, 2, 4, 8)]
    for file in files:
        torch.save(Classifier().state_dict(), file)
    return {**untrained(folder), "test_set": val_data(6), "checkpoint_files": files}


GIVEN = {"coming_from.md": with_checkpoints, "offline.md": with_checkpoints, "report.md": trained}


def run_page(page, folder, given=None, changes=None):
    """Run all Python blocks of a page, with a test's ``changes`` that shorten a reader's run; the names they leave."""
    names = {**GIVEN.get(page, untrained)(folder), **(given or {})}
    for number, block in enumerate(blocks(page)):
        for old, new in {**ONE_EPOCH, **(changes or {})}.items():
            block = block.replace(old, new)
        code = compile(block, f"{page}, block {number}", "exec")
        if (page, number) not in NOT_RUN:
            exec(code, names)
    return names


PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
COMMON = [page for page in PAGES if blocks(page) and page not in RUN_BY]


@pytest.mark.parametrize("page", COMMON)
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
def test_the_code_of_a_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


def test_every_page_is_run_and_what_is_not_run_is_named():
    for page, name in RUN_BY.items():
        assert blocks(page)
        assert f'run_page("{page}"' in Path(__file__).read_text(encoding="utf-8").partition(f"def {name}(")[2]
    for (page, number), package in NOT_RUN.items():
        assert re.search(rf"^from {package}\b", blocks(page)[number], re.MULTILINE)
    for page in PAGES:
        languages = re.findall(
            r"^```(.*)\n(?:.*\n)*?```$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(languages) <= {"python", "text", "yaml", "bash", ""}, page


def test_every_public_name_has_its_place_in_the_api_pages():
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES if page.startswith("api/"))
    described = re.findall(r"^::: lightning_gradsim\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE)
    errors = [name for name in lightning_gradsim.__all__ if name in {"GradSimError", "GradSimWarning"}]
    assert {*lightning_gradsim.__all__} <= {*described, *errors}
    assert "::: lightning_gradsim.errors" in pages
    index = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in index for name in lightning_gradsim.__all__)


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / page for page in PAGES)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_document_exist(document):
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shell = "\n".join(re.findall(r"^```(?:bash)?\n((?:.*\n)*?)```$", text, re.MULTILINE))
    commands = [*re.findall(r"`([^`\n]+)`", text), *(line.partition("#")[0] for line in shell.splitlines())]
    for words in (
        shlex.split(command) for command in commands if re.match(r"(make|python|lightning-gradsim) \S", command)
    ):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
        elif words[0] == "lightning-gradsim":
            check_options(command_line._parser(), words[1:])
        elif words[1].endswith(".py"):
            script = (ROOT / words[1]).read_text(encoding="utf-8")
            assert all(word.strip("[]") in script for word in words[2:] if word.strip("[]").startswith("--")), words


def check_options(parser, words):
    """The command line takes these words, of alternatives ``a|b|c`` each."""
    try:
        for choice in words[-1].split("|"):
            parser.parse_args([*words[:-1], choice])
    except (argparse.ArgumentError, SystemExit):
        pytest.fail(f"`lightning-gradsim {' '.join(words)}` is refused")


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return x * self.weight


def test_the_rule_of_the_page_on_layers(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlxtend")
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    data = TensorDataset(torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    given = {"model": example("mnist_convnet").ConvNet(), "train_loader": DataLoader(data, 64), "Scale": Scale}
    names = run_page("layers.md", tmp_path, given, {'layers="all"': 'layers="all", memory_budget=2**31'})
    assert capsys.readouterr().out == blocks("layers.md", "text")[0]
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
    run_page("tutorial.md", tmp_path, changes={"Trainer(max_epochs=30, ": "Trainer(max_epochs=4, " + quiet})
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


def test_the_adapters_of_the_page_on_batches(tmp_path):
    names = run_page("adapters.md", tmp_path)
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
    quick = partial(GradSimCallback, on_error="raise", time_budget=None, mislabel_score=None)
    names = run_page("report.md", tmp_path, {"GradSimCallback": quick})
    fit(tmp_path, names["gradsim"])
    printed = capsys.readouterr().out
    assert "| rank | sample | label |" in printed
    assert "'gradsim/errors':" in printed
