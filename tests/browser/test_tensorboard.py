from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import GradSimCallback
from lightning_gradsim.views.canvas import MARK
from tests.trainer.support import Classifier, fit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
SERVER_SECONDS, BROWSER_SECONDS = 60, 120
STEPS = [60, 120]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: `apt-get install chromium`)"),
]


@pytest.fixture(scope="module")
def log_directory(tmp_path_factory):
    """A short training on digits, a fifth of the labels wrong."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    labels[:400:5] = (labels[:400:5] + 3) % 10
    train, val = TensorDataset(images[:400], labels[:400]), TensorDataset(images[400:600], labels[400:600])
    module = Classifier(num_outputs=10)
    module.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
    root = tmp_path_factory.mktemp("logs")
    gradsim = GradSimCallback(on_error="raise")
    loaders = DataLoader(train, batch_size=20), DataLoader(val, batch_size=50)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fit(root, gradsim, module, *loaders, max_epochs=6, check_val_every_n_epoch=3, num_sanity_val_steps=0)
    torch.set_num_threads(threads)
    shown = gradsim.report.queries[:6]
    assert any(sample.label_is_prediction for query in shown for sample in query.harmful[:4])
    return root


def wait_for(look, what, process=None, seconds=SERVER_SECONDS):
    """What ``look`` returns, as soon as it returns something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        assert process is None or process.poll() is None, f"the server ended while waiting for {what}"
        time.sleep(0.05)
    pytest.fail(f"{what} did not come within {seconds} s")


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.read()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return b""


@contextmanager
def tensorboard(log_directory, output):
    """The address of a server of these logs, on a port that it chooses itself."""
    arguments = ["--logdir", log_directory, "--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *map(str, arguments)], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        address = re.compile(r"http://127\.0\.0\.1:\d+/")
        yield wait_for(lambda: address.search(output.read_text()), "the address", process).group(0), process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def screenshot(url, path, profile):
    command = [
        CHROMIUM,
        *FLAGS.split(),
        f"--user-data-dir={profile}",
        "--window-size=1400,1600",
        "--virtual-time-budget=20000",
        f"--screenshot={path}",
        url,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_SECONDS, check=False)
    assert path.exists(), result.stderr[-2000:]
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture(scope="module")
def server(log_directory, tmp_path_factory):
    """The address of a server that has read everything, and its only run."""
    folder = tmp_path_factory.mktemp("server")
    with tensorboard(log_directory, folder / "server.log") as (url, process):
        runs = wait_for(lambda: json.loads(fetch(f"{url}data/plugin/images/tags") or "{}"), "the image tags", process)
        (run,) = runs
        yield url, run


@pytest.fixture
def open_dashboard(server):
    """Opens a dashboard in a browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])

        def open_dashboard(name):
            page = browser.new_page(viewport={"width": 1400, "height": 1600})
            page.set_default_timeout(SERVER_SECONDS * 1000)
            page.goto(f"{server[0]}#{name}")
            return page

        yield open_dashboard
        browser.close()


@pytest.mark.parametrize(
    ("kind", "content", "tags"),
    [
        ("images", "images", ["mistakes", "suspects", "class_pairs"]),
        ("text", "text", [f"{name}/text_summary" for name in ("mistakes", "suspects", "class_pairs")]),
        ("scalars", "scalars", ["errors", "suspects_flagged", "overhead_seconds", "overhead_share"]),
    ],
)
def test_tags_and_steps(server, kind, content, tags):
    url, run = server
    there = json.loads(fetch(f"{url}data/plugin/{kind}/tags"))[run]
    for tag in (f"gradsim/{name}" for name in tags):
        assert tag in there
        query = urllib.parse.urlencode({"run": run, "tag": tag, "sample": 0})
        found = json.loads(fetch(f"{url}data/plugin/{kind}/{content}?{query}"))
        steps = [each[1] if isinstance(each, list) else each["step"] for each in found]
        assert steps == STEPS, tag


def test_the_panel_in_the_images_dashboard(server, tmp_path):
    pixels = screenshot(f"{server[0]}#images", tmp_path / "images.png", tmp_path / "profile")
    assert pixels.shape == (1600, 1400, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100  # not a blank page, not an error message
    marked = (np.abs(pixels.astype(int) - np.array(MARK)[:3]) <= 8).all(2)
    assert marked.sum() > 200
    left, right = np.nonzero(marked.any(0))[0][[0, -1]]
    assert right - left < 400  # all of it in one card


def test_tables_in_the_text_dashboard(open_dashboard):
    page = open_dashboard("text")
    page.get_by_text(f"step {STEPS[-1]}").first.wait_for()
    for tag in ("class_pairs", "mistakes", "suspects"):
        page.get_by_text(f"gradsim/{tag}/text_summary", exact=True).first.wait_for()
    heads = page.locator("th", has_text=re.compile("^(prediction|loss|harmful|mistakes|suggested|flagged)$"))
    heads.last.wait_for()
    lines = heads.evaluate_all(
        """heads => heads.map(head => {
            const range = document.createRange();
            range.selectNodeContents(head);
            return range.getClientRects().length;
        })"""
    )
    assert len(lines) >= 6
    assert set(lines) == {1}, "words are whole"


def test_numbers_in_the_scalars_dashboard(open_dashboard):
    page = open_dashboard("scalars")
    for tag in ("errors", "suspects_flagged", "overhead_share"):
        page.get_by_text(f"gradsim/{tag}", exact=True).first.wait_for()
    assert page.locator("tf-scalar-card, vz-line-chart2, tf-line-chart-data-loader").count() >= 3
