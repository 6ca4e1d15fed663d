"""TensorBoard: what its reader gets back."""

import io

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_gradsim.report import Report
from lightning_gradsim.sinks.tensorboard import write_tensorboard
from lightning_gradsim.views.tables import suspects_markdown

PANEL = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


def make_report(time_share=0.25):
    return Report(
        epoch=3,
        step=120,
        layers=("head",),
        similarity="dot",
        reference="no training samples",
        num_train_samples=0,
        num_validation_samples=50,
        num_errors=4,
        seconds=1.5,
        time_share=time_share,
    )


def write_and_read(directory, report, panel=PANEL, **options):
    with SummaryWriter(str(directory)) as writer:
        write_tensorboard(writer, report, panel, **options)
        return EventAccumulator(str(directory)).Reload()  # before the writer is closed: it must have been flushed


def test_all_tags_at_the_step_of_the_report(tmp_path):
    reader = write_and_read(tmp_path, make_report())
    scalars = {tag: (reader.Scalars(tag)[0].step, reader.Scalars(tag)[0].value) for tag in reader.Tags()["scalars"]}
    assert scalars == {
        "gradsim/errors": (120, 4.0),
        "gradsim/suspects_flagged": (120, 0.0),
        "gradsim/overhead_seconds": (120, 1.5),
        "gradsim/overhead_share": (120, 0.25),
    }
    (image,) = reader.Images("gradsim/mistakes")
    assert image.step == 120
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), PANEL)
    (text,) = reader.Tensors("gradsim/suspects/text_summary")
    assert text.step == 120
    assert text.tensor_proto.string_val[0].decode() == suspects_markdown(make_report())


@pytest.mark.parametrize(
    ("report", "panel", "missing"),
    [(make_report(time_share=None), PANEL, "x/overhead_share"), (make_report(), None, "x/mistakes")],
)
def test_what_is_not_known_is_left_out(tmp_path, report, panel, missing):
    tags = write_and_read(tmp_path, report, panel, tag_prefix="x").Tags()
    written = {*tags["scalars"], *tags["images"], *tags["tensors"]}
    everything = {
        "errors",
        "suspects_flagged",
        "overhead_seconds",
        "overhead_share",
        "mistakes",
        "mistakes/text_summary",
        "suspects/text_summary",
    }
    assert written == {f"x/{tag}" for tag in everything} - {missing}


def test_a_writer_that_was_closed_is_opened_again(tmp_path):
    """Loggers close theirs at the end of every fit."""
    writer = SummaryWriter(str(tmp_path))
    writer.close()
    write_tensorboard(writer, make_report(), PANEL)
    writer.close()
    assert EventAccumulator(str(tmp_path)).Reload().Images("gradsim/mistakes")[0].step == 120
