"""The page in a real browser: no request, no complaint, tables that sort."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lightning_gradsim.views import Exhibit, report_page
from tests.unit.test_views_gallery import make_suspects
from tests.unit.test_views_page import make_page, picture
from tests.unit.test_views_panel import make_query, make_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: `apt-get install chromium`)"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens a page of ours from a file, and collects what it asks for and complains of."""
    contexts = []

    def open_page(html, **options):
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.requests, page.complaints = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def make_html(exhibit=None):
    suspects = make_suspects(sample_ids=torch.tensor([30, 4, 100, 22, 7, 9, 11, 2, 1]))
    queries = make_query(harmful=(True, False)), make_query(loss=12.5, probability=0.05), make_query(loss=0.25)
    return make_page(make_report(*queries, suspects=suspects), exhibit)


def column(page, place, table=0):
    rows = page.locator("table:has(th[data-sort])").nth(table).locator("tbody tr")
    return [rows.nth(i).locator("td").nth(place).inner_text() for i in range(rows.count())]


def test_it_asks_for_nothing_and_complains_of_nothing(open_page):
    page = open_page(make_html())
    assert [url for url in page.requests if not url.startswith(("data:", Path(page.url).as_posix()))] == [page.url]
    assert page.complaints == []
    images = page.locator("img")
    assert images.count() > 10
    assert all(images.nth(i).evaluate("image => image.naturalWidth") == 8 for i in range(images.count()))


def test_tables_sort_by_number_and_by_word_both_ways(open_page):
    page = open_page(make_html())
    suspects = page.locator("table:has(th[data-sort])").nth(1)
    samples = suspects.locator("th", has_text="sample")
    samples.click()
    assert column(page, 1, 1) == ["1", "2", "4", "7", "9", "11", "22", "30", "100"]
    samples.click()
    assert column(page, 1, 1) == ["100", "30", "22", "11", "9", "7", "4", "2", "1"]
    assert samples.get_attribute("aria-sort") == "descending"
    suspects.locator("th", has_text="suggested label").press("Enter")
    assert column(page, 3, 1) == ["cat"] * 3 + ["dog"] * 3 + ["ship"] * 3
    assert samples.get_attribute("aria-sort") is None
    page.locator("th", has_text="probability").first.click()
    assert column(page, 3) == ["5%", "97%", "97%"]
    page.locator("th", has_text="loss").first.click()
    assert column(page, 4) == ["0.250", "3.50", "12.5"]


def test_it_can_be_read_without_script(open_page):
    page = open_page(make_html(), java_script_enabled=False)
    assert page.locator("figure:visible").count() >= 18
    assert page.get_by_text("labelled dog, predicted ship with 97%").first.is_visible()
    assert page.locator("th[data-sort]").first.evaluate("head => getComputedStyle(head).cursor") == "auto"


@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_into_the_window(open_page, width):
    page = open_page(make_html(), viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "per_line"), [(360, 2), (500, 4), (700, 4), (1400, 4)])
def test_lines_of_tiles_have_no_hole(open_page, width, per_line):
    page = open_page(make_html(), viewport={"width": width, "height": 900})
    tiles = page.locator(".rows .tiles").nth(1).locator("figure")
    tops = [tiles.nth(i).bounding_box()["y"] for i in range(tiles.count())]
    assert len(tops) == 4
    assert [tops.count(top) for top in sorted(set(tops))] == [per_line] * (4 // per_line)


@pytest.mark.parametrize("width", [390, 1400])
def test_texts_have_room(open_page, width):
    text = Exhibit(text="https://example.com/" + "without-a-space/" * 12 + " and a few words more")
    html = make_html(text)
    page = open_page(html, viewport={"width": width, "height": 900})
    widths = page.evaluate("[...document.querySelectorAll('td.words')].map(e => e.getBoundingClientRect().width)")
    assert len(widths) == (2 + 4) + 2 * (4 + 4) + 9, "samples in lists, suspects"
    assert min(widths) >= 250
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_of_numbers_stay_where_they_are(open_page):
    html = make_html(Exhibit(values=tuple((f"the name of column {i}", float(i)) for i in range(20))))
    page = open_page(html, viewport={"width": 390, "height": 900})
    left = page.evaluate(
        """() => {
            const table = document.querySelector("table.values"), box = table.parentElement;
            const name = table.rows[3].cells[0];
            const before = name.getBoundingClientRect().left;
            box.scrollLeft = 200;
            return [before, name.getBoundingClientRect().left, box.scrollLeft];
        }"""
    )
    assert left[0] == left[1]
    assert left[2] == 200


def test_what_users_wrote_does_nothing(open_page):
    nasty = "<img src=x onerror=\"document.title='gone'\"><script>document.title='gone'</script>"
    report = make_report(make_query(), class_names=(nasty, nasty, nasty), notes=(nasty,))
    page = open_page(report_page(report, [picture()], {0: picture()}))
    assert "gone" not in page.title()
    assert page.complaints == []
    assert page.get_by_text(nasty).first.is_visible()
