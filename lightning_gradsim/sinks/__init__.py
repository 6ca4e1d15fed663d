"""Where reports go: files and TensorBoard."""

from lightning_gradsim.sinks.files import save_png_atomically, write_report_files, write_text_atomically
from lightning_gradsim.sinks.tensorboard import TensorBoardWriter, write_tensorboard

__all__ = [
    "TensorBoardWriter",
    "save_png_atomically",
    "write_report_files",
    "write_tensorboard",
    "write_text_atomically",
]
