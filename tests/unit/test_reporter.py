"""Where reports go: the files of a folder are all of one report."""

from types import SimpleNamespace

import numpy as np

from lightning_gradsim.engine import EngineSettings
from lightning_gradsim.reporter import Drawing, Reporter, ReporterSettings
from lightning_gradsim.shown_samples import ShownSamples
from tests.unit.test_views_panel import make_report

NO_SINK = SimpleNamespace(
    write_images=lambda images, step: None,
    write_texts=lambda texts, step: None,
    write_scalars=lambda scalars, step: None,
)


def write(directory, *names):
    pixels = np.zeros((2, 2, 3), np.uint8)
    drawing = Drawing(dict.fromkeys(names, pixels), ShownSamples((), {}))
    settings = ReporterSettings(EngineSettings(), None, None, 0, None, None, None, False, "gradsim")
    Reporter(settings, warn=lambda _: None).write(make_report(), drawing, directory, [NO_SINK])
    return {path.stem for path in directory.glob("*.png")}


def test_pictures_of_an_earlier_report_do_not_stay(tmp_path):
    (tmp_path / "mine.png").touch()
    every = {"mistakes", "suspects", "class_pairs"}
    assert write(tmp_path, *every) == every | {"mine"}
    # Another reporter, as in a run that is resumed.
    assert write(tmp_path, "mistakes") == {"mistakes", "mine"}
    assert write(tmp_path) == {"mine"}
