"""What is drawn and where it goes: files of one report only, each picture encoded once, more pages where asked."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_gradsim.presentation import Drawing, Presentation, PresentationSettings
from lightning_gradsim.queries import Query
from lightning_gradsim.shown_samples import ShownSamples
from lightning_gradsim.sinks import protocol
from lightning_gradsim.train_pass import make_reader
from lightning_gradsim.views import report_page
from tests.unit.test_sinks_protocol import Memory
from tests.unit.test_views_panel import make_query, make_report

NO_SINK = SimpleNamespace(
    write_images=lambda images, step: None,
    write_texts=lambda texts, step: None,
    write_scalars=lambda scalars, step: None,
)


class WithPngs(Memory):
    def write_pngs(self, pngs, step):
        self.got.append(("pngs", dict(pngs), step))


def write(directory, *names, sinks=(NO_SINK,)):
    pixels = np.zeros((2, 2, 3), np.uint8)
    drawing = Drawing(dict.fromkeys(names, pixels), ShownSamples((), {}))
    Presentation(PresentationSettings("gradsim"), warn=lambda _: None).write(make_report(), drawing, directory, sinks)
    return {path.stem for path in directory.glob("*.png")}


def test_pictures_of_an_earlier_report_do_not_stay(tmp_path):
    for name in ("mine", "mistakes_mine"):
        (tmp_path / f"{name}.png").touch()
    own, every = {"mine", "mistakes_mine"}, {"mistakes", "mistakes_2", "mistakes_12", "suspects", "class_pairs"}
    assert write(tmp_path, *every) == every | own
    # Another reporter, as in a run that is resumed.
    assert write(tmp_path, "mistakes", "mistakes_2") == {"mistakes", "mistakes_2"} | own
    assert write(tmp_path) == own


def test_a_picture_is_encoded_once_for_all_places(tmp_path, monkeypatch):
    encoded = []
    monkeypatch.setattr(protocol, "to_png", lambda pixels: encoded.append(pixels.shape) or b"a file")
    sinks = [WithPngs(), WithPngs(), Memory()]
    write(tmp_path, "mistakes", sinks=sinks)
    assert encoded == [(2, 2, 3)]
    assert (tmp_path / "mistakes.png").read_bytes() == b"a file"
    assert [sink.got[1] for sink in sinks[:2]] == [("pngs", {"gradsim/mistakes": b"a file"}, 2300)] * 2
    assert sinks[2].got[1][0] == "images"


@pytest.mark.parametrize(
    ("num_queries", "panel_pages", "names"),
    [
        (8, 1, ["mistakes"]),
        (8, 2, ["mistakes", "mistakes_2"]),
        (13, 5, ["mistakes", "mistakes_2", "mistakes_3"]),
        (6, 2, ["mistakes"]),
        (0, 2, ["mistakes"]),
    ],
)
def test_more_pages_only_when_asked(num_queries, panel_pages, names):
    report = make_report(*(make_query(sample_id=place) for place in range(num_queries)))
    kept = [Query(None, query.sample_id, 0, 0, query.label, query.loss) for query in report.queries]
    samples = [(torch.full((1, 8, 8), place / 32), 0) for place in range(32)]
    presentation = Presentation(PresentationSettings("x", panel_pages=panel_pages), warn=lambda _: None)
    drawing = presentation.draw(report, kept, make_reader([samples[0]] * 200), {0: make_reader(samples)})
    assert [name for name in drawing.pictures if name != "suspects"] == names
    shown = min(num_queries, 6 * panel_pages)
    assert [exhibit is not None for exhibit in drawing.shown.queries] == [True] * shown + [False] * (
        num_queries - shown
    )
    page = report_page(report, drawing.shown.queries, drawing.shown.train)
    assert page.count('class="verdict"') == shown, "the page shows the mistakes of all panels"
