"""The callback in the configuration files of LightningCLI."""

import contextlib
import importlib.util
import inspect
import io
import sys
from pathlib import Path

import pytest
import yaml

from lightning_gradsim import GradSimCallback

pytest.importorskip("jsonargparse", reason="an extra of Lightning, for LightningCLI")
pytest.importorskip("sklearn", reason="an extra: `examples`")
EXAMPLES = Path(__file__).parents[1] / "examples"
CALLBACK = "lightning_gradsim.GradSimCallback"
pytestmark = pytest.mark.filterwarnings(
    "ignore:LightningCLI's args parameter:UserWarning", "ignore::DeprecationWarning"
)


def run(*arguments, **options):
    spec = importlib.util.spec_from_file_location("digits_cli", EXAMPLES / "digits_cli.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_cli"] = module
    spec.loader.exec_module(module)
    try:
        return module.main([*arguments], **options)
    finally:
        del sys.modules["digits_cli"]


def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert not exit_.value.code
    return out.getvalue()


def small(folder):
    return [
        "--trainer.max_epochs=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--trainer.default_root_dir={folder}",
    ]


def test_the_configuration_file_trains(tmp_path):
    cli = run("fit", "--config", str(EXAMPLES / "digits_cli.yaml"), *small(tmp_path))
    gradsim = next(each for each in cli.trainer.callbacks if isinstance(each, GradSimCallback))
    assert gradsim.report.layers == ("net.1", "net.3")
    assert gradsim.report.class_names[3] == "three"
    assert gradsim.report.queries
    assert len(gradsim.report.suspects) == 1797 - 360


def test_every_argument_can_stand_in_the_file():
    text = printed("fit", "--config", str(EXAMPLES / "digits_cli.yaml"), "--print_config")
    arguments = yaml.safe_load(text)["trainer"]["callbacks"][0]["init_args"]
    assert list(arguments) == list(inspect.signature(GradSimCallback).parameters)


def test_every_argument_is_explained():
    text = " ".join(printed("fit", f"--trainer.callbacks.help={CALLBACK}").split())
    for name in inspect.signature(GradSimCallback).parameters:
        assert f"--trainer.callbacks.{name} " in text
    assert "Share of the training time that the callback may take" in text


@pytest.mark.parametrize(
    ("argument", "attribute", "expected"),
    [
        ("layers=[net.1, net.3]", "settings.layers", ["net.1", "net.3"]),
        ("every_n_steps=50", "_schedule.every_n_steps", 50),
        ("loss_fn=torch.nn.CrossEntropyLoss", "loss_fn.reduction", "mean"),
        ("adapter=lightning_gradsim.Adapter", "adapter.__class__.__name__", "Adapter"),
        ("mean=[0.5]", "_reporter._settings.presentation.mean", [0.5]),
    ],
)
def test_values_arrive(argument, attribute, expected):
    more = ["--trainer.callbacks.std=[2.0]"] if argument.startswith("mean") else []
    cli = run(f"--trainer.callbacks={CALLBACK}", f"--trainer.callbacks.{argument}", *more, run=False)
    found = next(each for each in cli.trainer.callbacks if isinstance(each, GradSimCallback))
    for name in attribute.split("."):
        found = getattr(found, name)
    assert found == expected


def test_wrong_values_are_told():
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit):
        run("fit", f"--trainer.callbacks={CALLBACK}", "--trainer.callbacks.similarity=dott")
    assert "dott" in err.getvalue()
