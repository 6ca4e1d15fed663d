"""Take the pictures of the documentation from what the examples have written.

Run from the root of the repository, behind the examples ``mislabel_digits``, ``mnist_convnet``, ``image_folder``,
``tabular`` and ``transformer`` with their own folders: ``python -m tests.browser.pictures``. It needs Chromium and
playwright. Then look at each picture, and at what is said of it where it is shown.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from lightning_gradsim.views.canvas import FRAME, RULE
from lightning_gradsim.views.tiles import MARGIN, TILE
from tests.browser.test_tensorboard import CHROMIUM, tensorboard

IMAGES = Path("docs/images")
NUM_MISTAKES, NUM_ROWS = 2, 3
PAGE_SIZE = {"width": 1180, "height": 1270}
TEXTS = "numpy → special"
"""The mistake that is shown of the transformer."""


def save(pixels: np.ndarray, name: str) -> None:
    """Write a picture with few colours, which are all that it has."""
    picture = Image.fromarray(np.ascontiguousarray(pixels)).quantize(256, dither=Image.Dither.NONE)
    picture.save(IMAGES / name, optimize=True)


def pixels_of(content: bytes | Path) -> np.ndarray:
    """The pixels of a file or its content."""
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as picture:
        return np.asarray(picture.convert("RGB"))


def first_mistakes(panel: np.ndarray) -> np.ndarray:
    """A panel up to the line behind the first mistakes."""
    lines = np.flatnonzero((panel[:, MARGIN:-MARGIN] == RULE).all((1, 2)))
    return panel[: lines[lines > lines[0] + 2][2 * (NUM_MISTAKES - 1)]]


def first_rows(gallery: np.ndarray) -> np.ndarray:
    """A gallery without its last rows of tiles."""
    edges = np.flatnonzero((gallery[:, MARGIN : MARGIN + TILE] == FRAME).all((1, 2)))
    return gallery[: edges[4 * NUM_ROWS] - 4]  # two rows of pixels above each row of tiles, two below it


def card(browser: Browser, logs: Path, tag: str) -> np.ndarray:
    """A picture in TensorBoard, as a screen with two pixels a point shows its card."""
    with tensorboard(logs, logs / "server.log") as (url, _):
        page = browser.new_page(viewport={"width": 1400, "height": 3000}, device_scale_factor=2)
        page.goto(f"{url}#images")
        shown = page.locator("tf-image-loader", has_text=tag)
        shown.locator("img").wait_for(timeout=60_000)
        page.wait_for_load_state("networkidle")
        return pixels_of(shown.screenshot())


def part(browser: Browser, folder: Path, begin: str | None, size: tuple[int, int]) -> np.ndarray:
    """A report's page from the first element that a selector finds, of this width and height."""
    width, height = size
    page = browser.new_page(viewport=PAGE_SIZE)
    page.goto((folder / "report.html").resolve().as_uri())
    box = {"x": 0, "y": 0} if begin is None else page.locator(begin).first.bounding_box()
    left, top = max(0, box["x"] - 10), max(0, box["y"] - 10)
    clip = {"x": left, "y": top, "width": width, "height": height}
    return pixels_of(page.screenshot(full_page=True, clip=clip))


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="where the examples have run")
    root = parser.parse_args().root
    logs = root / "demo_logs"
    digits, mnist = (logs / name / "version_0" / "gradsim" for name in ("digits", "mnist"))
    others = ("table_logs", "text_logs", "image_logs")
    table, texts, files = (root / name / "lightning_logs" / "version_0" / "gradsim" for name in others)
    save(first_mistakes(pixels_of(digits / "mistakes.png")), "mistakes.png")
    save(first_rows(pixels_of(digits / "suspects.png")), "suspects.png")
    save(first_rows(pixels_of(mnist / "suspects.png")), "mnist_doubtful.png")
    save(first_rows(pixels_of(files / "suspects.png")), "image_folder.png")
    save(pixels_of(mnist / "class_pairs.png"), "class_pairs.png")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        save(first_mistakes(card(browser, logs / "mnist", "gradsim/mistakes")), "mnist.png")
        save(part(browser, mnist, None, (1180, 1270)), "page.png")
        save(part(browser, table, "#mistakes", (1130, 675)), "tabular.png")
        save(part(browser, texts, f".query:has(.say:text-is('{TEXTS}'))", (690, 385)), "transformer.png")
        browser.close()


if __name__ == "__main__":
    main()
