"""Reports as pictures and tables; nothing here reads data or writes files."""

from lightning_gradsim.views.canvas import Pixels
from lightning_gradsim.views.images import RgbImage, ValueRange, to_rgb, to_tile
from lightning_gradsim.views.panel import mistake_panel
from lightning_gradsim.views.tables import mistakes_markdown, suspects_markdown

__all__ = [
    "Pixels",
    "RgbImage",
    "ValueRange",
    "mistake_panel",
    "mistakes_markdown",
    "suspects_markdown",
    "to_rgb",
    "to_tile",
]
