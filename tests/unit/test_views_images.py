"""Tensors to pixels: nothing is clipped, darkened or hidden on the way."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_gradsim.views.canvas import BACKDROP
from lightning_gradsim.views.images import HATCH, picture_notes, png_size, shrink, to_png, to_rgb, to_tile

LEVELS = torch.randint(0, 256, (3, 6, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LEVELS[:, 0, 0], LEVELS[:, 0, 1] = 0, 255
RGB = LEVELS.permute(1, 2, 0).numpy()
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
COLUMN = [[[0.485]], [[0.456]], [[0.406]]], [[[0.229]], [[0.224]], [[0.225]]]


@pytest.mark.parametrize(
    ("sample", "value_range"),
    [
        pytest.param(LEVELS, "as given", id="uint8"),
        pytest.param(LEVELS.long(), "as given", id="int64"),
        pytest.param(LEVELS.float(), "0-255", id="0-255"),
        pytest.param(LEVELS.float() / 255, "0-1", id="0-1"),
        pytest.param(LEVELS.double() / 255 * 1.002 - 0.001, "0-1", id="0-1, slightly overshooting"),
        pytest.param(LEVELS.float() / 127.5 - 1, "stretched", id="-1 to 1"),
        pytest.param(LEVELS.float() / 255 * 16, "stretched", id="0-16"),
        pytest.param(LEVELS.long() - 128, "stretched", id="int8 range"),
        pytest.param(LEVELS.permute(1, 2, 0), "as given", id="channels last"),
        pytest.param(LEVELS[None, None], "as given", id="axes of length 1"),
        pytest.param((LEVELS.float() / 255).requires_grad_(), "0-1", id="with graph"),
        pytest.param(torch.cat([LEVELS, LEVELS[:1]]), "as given", id="four channels"),
        pytest.param(torch.cat([LEVELS, LEVELS[:2]]), "as given", id="five channels"),
    ],
)
def test_to_rgb_returns_the_original_pixels(sample, value_range):
    image = to_rgb(sample)
    assert image.value_range == value_range
    assert image.pixels.dtype == np.uint8
    assert np.abs(image.pixels.astype(int) - RGB).max() <= 1


@pytest.mark.parametrize(
    "sample",
    [LEVELS[0], LEVELS[:1], LEVELS[:1].permute(1, 2, 0), LEVELS[:2], LEVELS[:2].permute(1, 2, 0)],
    ids=["HW", "1HW", "HW1", "2HW", "HW2"],
)
def test_one_and_two_channels_show_the_first_as_grey(sample):
    np.testing.assert_array_equal(to_rgb(sample).pixels, np.repeat(RGB[..., :1], 3, axis=-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_denormalisation_returns_the_original_pixels(dtype):
    mean, std = (torch.tensor(values) for values in COLUMN)
    normalised = ((LEVELS.double() / 255 - mean) / std).to(dtype)
    image = to_rgb(normalised, MEAN, STD)
    assert image.value_range == "0-1"
    tolerance = {torch.bfloat16: 2, torch.float16: 1}.get(dtype, 0)
    assert np.abs(image.pixels.astype(int) - RGB).max() <= tolerance


def test_denormalisation_to_0_255_keeps_dark_images_dark():
    dark = LEVELS // 8
    image = to_rgb((dark.float() - 120) / 58, mean=[120.0], std=[58.0])
    assert image.value_range == "0-255"
    np.testing.assert_array_equal(image.pixels, dark.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("wanted", [{"mean": [0.0]}, {"std": [1.0]}, {"mean": [0.0] * 3, "std": [1.0]}])
def test_mean_and_std_default_to_zero_and_one(wanted):
    np.testing.assert_array_equal(to_rgb(LEVELS / 255, **wanted).pixels, RGB)


def test_integers_are_never_denormalised():
    np.testing.assert_array_equal(to_rgb(LEVELS, MEAN, STD).pixels, RGB)


def test_wrong_normalisation_is_stretched_not_clipped():
    assert to_rgb((LEVELS / 255 - 0.5) / 0.05, mean=[0.5], std=[0.2]).value_range == "stretched"


def test_a_mean_that_does_not_fit_the_channels_is_named():
    with pytest.raises(ValueError, match=r"`mean` has 2 values, but the images have 3 channels.*one for each channel"):
        to_rgb(LEVELS / 255, mean=[0.5, 0.5])


@pytest.mark.parametrize(
    ("sample", "level"),
    [
        (torch.full((3, 4, 4), 0.5), 128),
        (torch.zeros(4, 4), 0),
        (torch.full((1, 4, 4), 200, dtype=torch.uint8), 200),
        (torch.full((1, 4, 4), -7.0), 128),
        (torch.ones(4, 4, dtype=torch.bool), 255),
    ],
)
def test_constant_images(sample, level):
    assert np.unique(to_rgb(sample).pixels).tolist() == [level]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("channel", [0, slice(None)])
def test_non_finite_pixels_are_hatched_and_leave_the_rest_alone(value, channel):
    sample = LEVELS / 255
    sample[channel, 2:4, 1:5] = value
    image = to_rgb(sample)
    assert image.has_non_finite
    assert image.value_range == "0-1"
    hatched = image.pixels[2:4, 1:5].reshape(-1, 3)
    assert {tuple(pixel) for pixel in hatched.tolist()} == set(HATCH)
    rest = np.ones(RGB.shape[:2], dtype=bool)
    rest[2:4, 1:5] = False
    np.testing.assert_array_equal(image.pixels[rest], RGB[rest])


def test_each_stripe_of_the_hatching_is_far_from_grey():
    assert all(max(stripe) - min(stripe) >= 60 for stripe in HATCH)


def test_an_image_without_finite_pixels_is_all_hatched():
    pixels = to_rgb(torch.full((1, 4, 4), float("nan"))).pixels
    assert {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()} == set(HATCH)


@pytest.mark.parametrize(
    "sample",
    [
        None,
        torch.tensor(3.0),
        torch.zeros(13),
        torch.zeros(1, 13),
        torch.zeros(13, 1),
        torch.zeros(3, 0, 4),
        torch.zeros(2, 3, 8, 8),
        torch.zeros(3, 8, 8, dtype=torch.complex64),
        {"input_ids": torch.zeros(4)},
    ],
    ids=["None", "scalar", "vector", "row", "column", "empty", "video", "complex", "mapping"],
)
def test_what_is_no_image_gives_none_and_a_neutral_tile(sample):
    assert to_rgb(sample) is None
    tile = to_tile(None, 120)
    assert tile.shape == (120, 120, 3)
    assert tuple(tile[0, 0]) == BACKDROP
    assert len(np.unique(tile)) > 2, "the words are drawn"


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (32, 32), (100, 100), (640, 480), (10, 300), (1, 400), (3, 2)])
def test_tiles_keep_proportions_on_the_backdrop(size):
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    tile = to_tile(pixels, 154)
    assert tile.shape == (154, 154, 3)
    assert tile.dtype == np.uint8
    drawn = (tile == 0).all(axis=-1)
    height, width = int(drawn.any(axis=1).sum()), int(drawn.any(axis=0).sum())
    assert max(height, width) == 154
    assert (height % 2, width % 2) == (0, 0)
    assert height == pytest.approx(154 * size[0] / max(size), abs=2)
    assert width == pytest.approx(154 * size[1] / max(size), abs=2)
    assert {tuple(pixel) for pixel in tile[~drawn].tolist()} <= {BACKDROP}


def test_small_images_keep_hard_pixel_edges():
    board = np.indices((8, 8)).sum(axis=0) % 2 * 255
    tile = to_tile(np.repeat(board[..., None], 3, axis=-1).astype(np.uint8), 160)
    np.testing.assert_array_equal(tile[..., 0], np.kron(board, np.ones((20, 20))))


def test_large_images_are_averaged_not_sampled():
    stripes = np.zeros((600, 600, 3), dtype=np.uint8)
    stripes[::2] = 255
    inner = to_tile(stripes, 100)[10:90, 10:90]
    assert np.abs(inner.astype(int) - 128).max() < 10


def gradient(height, width, channels=3):
    """A picture whose every shrunk version can be told: red rises to the right, green downwards, blue is constant."""
    rows, columns = torch.linspace(0, 1, height)[:, None], torch.linspace(0, 1, width)[None]
    planes = [columns.expand(height, width), rows.expand(height, width), torch.full((height, width), 0.25)]
    return torch.stack([planes[i % 3] for i in range(channels)])


def as_uint8(image):
    return (image * 255).round().to(torch.uint8)


LOOKS = {
    "uint8": as_uint8,
    "float 0-1": lambda image: image,
    "float 0-255": lambda image: image * 255,
    "half": lambda image: image.half(),
    "16 bits": lambda image: (image * 60000).int(),
    "normalised": lambda image: (image - 0.4) / 0.2,
    "HWC": lambda image: as_uint8(image).permute(1, 2, 0),
    "HWC float": lambda image: image.permute(1, 2, 0),
    "four channels": lambda image: as_uint8(torch.cat([image, torch.ones_like(image[:1])])),
    "six channels": lambda image: as_uint8(torch.cat([image, 1 - image])),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("size", [(8, 8), (28, 28), (32, 48), (240, 320), (1024, 64), (1024, 1024)], ids=str)
def test_every_look_of_a_picture_gives_the_same_tile(size, look):
    """From 8 x 8 to 1024 x 1024, kept small and scaled with a filter: each place has the colour that it had."""
    image = look(gradient(*size))
    options = {"mean": [0.4], "std": [0.2]} if look is LOOKS["normalised"] else {}
    kept = shrink(to_rgb(image, **options), 320)
    assert max(kept.pixels.shape[:2]) == min(max(size), 320)
    tile = to_tile(kept.pixels, 138).astype(int)
    height, width = (2 * max(1, round(side * 138 / max(size) / 2)) for side in size)
    top, left = ((138 - side) // 4 * 2 for side in (height, width))
    picture = tile[top : top + height, left : left + width]
    across, down = (np.linspace(0, 255, side) for side in (width, height))
    # Steps of the original, or of the tile where that has fewer of them.
    assert np.abs(picture[..., 0] - across[None]).max() <= 255 / min(size[1], width) + 2
    assert np.abs(picture[..., 1] - down[:, None]).max() <= 255 / min(size[0], height) + 2
    # Stretched pictures have no other value of blue: it is where it lies between their lowest and highest.
    assert np.abs(picture[..., 2] - 64).max() <= 2


@pytest.mark.parametrize("size", [8, 28, 224, 1024])
def test_the_hatching_is_seen_on_a_tile_of_any_picture(size):
    image = gradient(size, size)
    image[:, : size // 2] = float("nan")
    tile = to_tile(shrink(to_rgb(image), 320).pixels, 138).astype(int)
    upper = tile[8:60, 8:130].reshape(-1, 3)
    assert (upper[:, 0] - upper[:, 1]).min() > 20, "magenta"
    stripes = np.array(HATCH, dtype=int)
    near = np.abs(upper[:, None] - stripes[None]).max(2)
    assert all((near[:, stripe] <= 24).mean() > 0.15 for stripe in (0, 1)), "both stripes"


@pytest.mark.parametrize(
    ("channels", "said"),
    [
        (1, None),
        (2, "channel 1 of 2 shown"),
        (3, None),
        (4, "channels 1 to 3 of 4 shown"),
        (13, "channels 1 to 3 of 13 shown"),
    ],
)
def test_which_channels_are_shown_is_said(channels, said):
    assert to_rgb(gradient(16, 16, channels)).shown_channels == said
    assert picture_notes([to_rgb(gradient(16, 16, channels))]) == ([] if said is None else [said])


def test_a_small_picture_is_kept_as_it_is():
    image = to_rgb(LEVELS)
    assert shrink(image, 320) is image


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 48), (1, 70), (700, 1)])
def test_a_png_file_holds_every_pixel(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    pixels[shape[0] // 2 :] = 7
    png = to_png(pixels)
    with Image.open(io.BytesIO(png)) as image:
        image.verify()  # the check sums
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.format, image.size) == ("RGB", "PNG", png_size(png))
        np.testing.assert_array_equal(np.asarray(image), pixels)
