"""Where reports go: files, loggers, and what users bring along."""

from lightning_gradsim.sinks.files import write_bytes_atomically, write_report_files, write_text_atomically
from lightning_gradsim.sinks.protocol import Publication, Sink, write_everywhere
from lightning_gradsim.sinks.tensorboard import TensorBoardSink, TensorBoardWriter
from lightning_gradsim.sinks.wandb import WandbSink

__all__ = [
    "Publication",
    "Sink",
    "TensorBoardSink",
    "TensorBoardWriter",
    "WandbSink",
    "write_bytes_atomically",
    "write_everywhere",
    "write_report_files",
    "write_text_atomically",
]
