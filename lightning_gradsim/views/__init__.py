"""Reports as pictures, tables and pages; nothing here reads data or writes files."""

from lightning_gradsim.views.canvas import Pixels
from lightning_gradsim.views.exhibits import Exhibit, ExhibitMaker, are_near_duplicates
from lightning_gradsim.views.gallery import suspects_gallery
from lightning_gradsim.views.images import RgbImage, ValueRange, to_rgb, to_tile
from lightning_gradsim.views.page import report_page
from lightning_gradsim.views.pairs import class_pairs_picture
from lightning_gradsim.views.panel import QUERIES_PER_PAGE, mistake_panel
from lightning_gradsim.views.tables import class_pairs_markdown, mistakes_markdown, suspects_markdown

__all__ = [
    "QUERIES_PER_PAGE",
    "Exhibit",
    "ExhibitMaker",
    "Pixels",
    "RgbImage",
    "ValueRange",
    "are_near_duplicates",
    "class_pairs_markdown",
    "class_pairs_picture",
    "mistake_panel",
    "mistakes_markdown",
    "report_page",
    "suspects_gallery",
    "suspects_markdown",
    "to_rgb",
    "to_tile",
]
