"""Exception classes of the package; every one of them is a ``GradSimError`` and a fitting builtin."""

from __future__ import annotations

from collections.abc import Sequence


class GradSimError(Exception):
    """Base of everything that this package raises on purpose."""


class LayerSelectionError(GradSimError, ValueError):
    """The chosen layers do not exist, are not called, or have nothing to train."""


class UnsupportedLayerError(GradSimError, NotImplementedError):
    """A chosen layer has no gradient rule."""


class SampleMixingError(GradSimError, ValueError):
    """A sample's gradient depends on other samples of its batch, or its rows cannot be told apart."""


class BatchFormatError(GradSimError, TypeError):
    """A batch, or what the model returned for it, has a form that cannot be read."""


class LossError(GradSimError, ValueError):
    """No per-sample loss can be derived, or the one given is not one value a sample."""


class LabelRangeError(GradSimError, ValueError):
    """A label lies outside the classes of the model.

    Attributes:
        rows: Which samples of the batch have such a label.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NonFiniteError(GradSimError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class TrainingDataError(GradSimError, ValueError):
    """The training data cannot be read by sample id."""


class CheckpointError(GradSimError, ValueError):
    """A checkpoint cannot be read or does not fit, or sums over several take too much memory."""


class ProcessError(GradSimError, RuntimeError):
    """Another process of the run failed in its part of the work."""


class SinkError(GradSimError, OSError):
    """Several places took no report."""


class VerificationError(GradSimError, AssertionError):
    """A self-check failed."""


class GradSimWarning(UserWarning):
    """Something limits what the callback can say; training is not affected."""


class SavedReportError(GradSimError, ValueError):
    """The files of a report cannot be read back."""
