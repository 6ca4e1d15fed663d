import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAYS = ["forward", "train", "ours", "teachers", "loop", "vmap", "opacus"]


@pytest.fixture
def load(monkeypatch):
    """Imports a script of `benchmarks/`, whose modules find one another as in a run, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(ROOT / "benchmarks"):
            del sys.modules[name]


def test_the_engine_benchmark_measures_a_row(load, tmp_path, capsys):
    path = tmp_path / "engine.json"
    command = "--only conv/last --samples 48 --batch-sizes 16 --queries 4 --part 8 --repeats 1 --threads 1 --profile"
    ways = ["--seconds", "0.01", "--peers", str(tmp_path), "--ways", *WAYS, "captum"]
    load("engine").main([*command.split(), *ways, "--json", str(path)])
    (row,) = json.loads(path.read_text())["results"]
    assert row["row"] == "conv/last"
    assert row["parameters"] == 510
    assert list(row["ways"]) == [*WAYS, "captum"]
    assert row["ways"]["captum"]["refused"] == "no environment (make bench-peers)"
    for name in WAYS:
        assert row["ways"][name]["us"] > 0
        assert row["ways"][name].get("difference", 0.0) <= 1e-5
    assert 0 < row["flops"]["forward"] <= row["flops"]["ours"] < row["flops"]["train"]
    assert [target["bound"] for target in row["targets"]] == [None, ">= 15", "> 1"]
    printed = capsys.readouterr().out
    assert "MFLOP a sample" in printed
    assert "no environment" in printed
    assert "of a pass go" in printed


def test_a_way_that_is_wrong_is_said_to_be(load):
    engine = load("engine")
    assert "refused" not in engine.judge(1e-7)
    assert engine.judge(0.25)["refused"] == "wrong: differs from one-sample autograd by 2e-01"
    assert "refused" in engine.judge(float("nan"))


def test_the_benchmarked_network_is_that_of_the_example(load):
    pytest.importorskip("mlxtend", reason="an extra: `examples`")
    spec = importlib.util.spec_from_file_location("example_for_benchmark", ROOT / "examples" / "mnist_convnet.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ours, theirs = load("engine_models").ConvNet().state_dict(), example.ConvNet().state_dict()
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}


@pytest.mark.slow
def test_the_benchmark_of_processes_measures_a_row(tmp_path):
    path = tmp_path / "processes.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "processes.py"), "--only", "mlp/last"]
    command += ["--samples", "200", "--queries", "4", "--repeats", "1", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (result,) = json.loads(path.read_text()).values()
    assert result["samples"] == 200
    assert all(len(result[name]) == 1 and result[name][0] > 0 for name in ("one", "two", "one, cpu", "two, cpu"))
    assert "mlp/last" in printed.stdout


def test_the_in_run_benchmark_measures_a_row(load, tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn", reason="an extra: `examples`")
    monkeypatch.delenv("GRADSIM_DATA", raising=False)
    module = load("in_run")
    digits, *others = module.SETTINGS["digits/adam"][:3]
    monkeypatch.setitem(module.SETTINGS, "digits/adam", (digits, *others, 2))
    path = tmp_path / "in_run.json"
    module.main(["--only", "digits/adam", "cifar/adam", "--seeds", "0", "--limit", "0.3", "--json", str(path)])
    ((row,),) = json.loads(path.read_text())["results"].values()
    assert 0.05 < row["read"] <= 0.3
    assert row["recall"] > 0.6
    assert abs(row["estimated"] - row["recall"]) < 0.3
    assert row["seconds"] > 0 < row["seconds exact"]
    assert "left out: the environment variable GRADSIM_DATA" in capsys.readouterr().out


def test_the_benchmark_of_views_measures_a_row(load, capsys):
    (seconds,) = load("views").main(["--sides", "8", "--repeats", "1"]).values()
    assert seconds > 0
    assert "8 x 8:" in capsys.readouterr().out


def test_the_cost_of_influence_is_measured_with_its_moments(load, tmp_path, capsys):
    path = tmp_path / "cost.json"
    load("influence_cost").main(f"--models mlp --samples 256 --queries 4 --repeats 1 --json {path}".split())
    [row] = json.loads(path.read_text())
    assert row["moments_s"] > 0
    assert row["all"] > row["pass"] > 0
    assert "without moments" in capsys.readouterr().out
