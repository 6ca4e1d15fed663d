"""TensorBoard: what its reader gets back."""

import io

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_gradsim.sinks import Publication, TensorBoardSink

PANEL = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


CONTENT = Publication(
    120,
    images={"x/mistakes": PANEL},
    texts={"x/mistakes": "| a |", "x/suspects": "none"},
    scalars={"x/errors": 4.0, "x/overhead_seconds": 1.5},
    histograms={"x/self_influence": np.array([1.0, 2.0, 4.0])},
)


def test_everything_at_its_tag_and_step(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        CONTENT.write_to(TensorBoardSink(writer))
        reader = EventAccumulator(str(tmp_path)).Reload()  # before the writer is closed: it must have been flushed
    scalars = {tag: (reader.Scalars(tag)[0].step, reader.Scalars(tag)[0].value) for tag in reader.Tags()["scalars"]}
    assert scalars == {"x/errors": (120, 4.0), "x/overhead_seconds": (120, 1.5)}
    (image,) = reader.Images("x/mistakes")
    assert image.step == 120
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), PANEL)
    assert reader.Tags()["tensors"] == ["x/mistakes/text_summary", "x/suspects/text_summary"]
    (text,) = reader.Tensors("x/mistakes/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (120, "| a |")
    (histogram,) = reader.Histograms("x/self_influence")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.max) == (120, 3, 4)


def test_a_writer_that_was_closed_is_opened_again(tmp_path):
    """Loggers close theirs at the end of every fit."""
    writer = SummaryWriter(str(tmp_path))
    writer.close()
    CONTENT.write_to(TensorBoardSink(writer))
    writer.close()
    assert EventAccumulator(str(tmp_path)).Reload().Images("x/mistakes")[0].step == 120
