"""Per-sample gradients of a convolution: its images and output gradients, unfolded only where that is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gradsim.factors.outer import Block, OuterFactors, block_length, fill_flat

UNFOLD_POSITIONS = 64
"""Output pixels up to which patches are built: below, the convolution kernels are bound by their set-up."""
UNFOLD_CHANNELS = 4
"""Input channels up to which they are: the convolution kernels work on more of them at once. With channel groups they
are not, as there would be a small product for every group of every sample."""


@dataclass(frozen=True)
class Window:
    """How a kernel moves over the images; one entry a spatial dimension.

    Attributes:
        kernel: Size of the kernel.
        stride: Step from one output pixel to the next.
        padding: Zeros on either side.
        dilation: Step inside the kernel.
        groups: Channel groups.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, eq=False)
class PatchFactors:
    """The per-sample gradients of a convolution.

    They are those of ``OuterFactors`` whose activations are the patches under the kernel (``outer``). The patches
    repeat every pixel once for each place of the kernel, so they are built for a part of the samples at a time, or not
    at all: the weight gradients of all samples are also those of one convolution in which every sample is a channel
    group of its own.

    Attributes:
        images: Layer inputs ``[n, channels, *pixels]``.
        maps: Gradients of each sample's loss by the layer's output, ``[n, channels, *pixels]``.
        window: How the kernel moves.
        bias: Whether a trainable bias takes part.
    """

    images: Tensor
    maps: Tensor
    window: Window
    bias: bool

    @property
    def num_samples(self) -> int:
        """Number of samples ``n``."""
        return self.maps.shape[0]

    @property
    def num_positions(self) -> int:
        """Number of shared positions ``t``, the output pixels."""
        return self.maps.shape[2:].numel()

    @property
    def num_groups(self) -> int:
        """Number of channel groups ``g``."""
        return self.window.groups

    @property
    def num_inputs(self) -> int:
        """Number of input features ``i``, the pixels of a patch and the one of the bias."""
        return self._patch_size + self.bias

    @property
    def num_outputs(self) -> int:
        """Number of output features ``o`` of a group."""
        return self.maps.shape[1] // self.window.groups

    @property
    def num_elements(self) -> int:
        """Elements of images and output gradients."""
        return self.images.numel() + self.maps.numel()

    @property
    def num_parameters(self) -> int:
        """Number of parameters that the gradient covers."""
        return self.maps.shape[1] * self.num_inputs

    @property
    def activations(self) -> Tensor:
        """Patches ``[n, t, g, i]``, built anew."""
        patches = unfold(self.images, self.window)
        return patches.view(len(patches), self.window.groups, self._patch_size, self.num_positions).permute(0, 3, 1, 2)

    @property
    def output_grads(self) -> Tensor:
        """Output gradients ``[n, t, g, o]``, a view."""
        shape = (self.num_samples, self.window.groups, self.num_outputs, self.num_positions)
        return self.maps.reshape(shape).permute(0, 3, 1, 2)

    @property
    def outer(self) -> OuterFactors:
        """The same gradients with all patches built."""
        return OuterFactors(self.activations, self.output_grads, self.bias)

    @property
    def gradients(self) -> Tensor:
        """Materialised per-sample gradients ``[n, g, o, i]``, the bias as the last ``i``."""
        return self.outer.gradients

    @cached_property
    def flat(self) -> Tensor:
        """Materialised per-sample gradients ``[n, p]``: all of the weight, then all of the bias."""
        return fill_flat(self, self.maps)

    def blocks(self, max_elements: int) -> Iterator[Block]:
        """The parts of ``flat``, each with at most so many elements where a sample's gradient allows.

        Args:
            max_elements: Elements that a block, and the patches for it, should have at most.

        Yields:
            The blocks.
        """
        weights = self.num_parameters - self.maps.shape[1] * self.bias
        convolves = self._convolves
        per_sample = weights if convolves else self._patch_size * self.window.groups * self.num_positions
        step = block_length(self.num_samples, per_sample, max_elements)
        for start in range(0, self.num_samples, step):
            rows = slice(start, min(start + step, self.num_samples))
            part = self.samples(rows)
            if convolves:
                yield Block(rows, slice(0, weights), part._convolved())
                continue
            for block in replace(part.outer, bias=False).blocks(max_elements):
                yield block.moved(start)
        if self.bias:
            yield Block(slice(0, self.num_samples), slice(weights, self.num_parameters), self.maps.flatten(2).sum(2))

    def samples(self, index: slice | Tensor) -> PatchFactors:
        """The factors of some samples: a slice (no copy) or indices, int64."""
        return PatchFactors(self.images[index], self.maps[index], self.window, self.bias)

    def summed(self) -> OuterFactors:
        """The sum over samples, as one sample."""
        total = self.maps.new_zeros(1, self.num_parameters)
        for block in self.blocks(SUMMED_ELEMENTS):
            total[0, block.columns] += block.gradients.sum(0)
        return OuterFactors.from_gradients([total])

    def unused(self, num_samples: int) -> OuterFactors:
        """Factors of the same layer for samples that did not pass through it: no positions, hence zero gradients."""
        shape = (num_samples, 0, self.window.groups)
        activations = self.images.new_zeros(*shape, self._patch_size)
        return OuterFactors(activations, self.maps.new_zeros(*shape, self.num_outputs), self.bias)

    def to(self, *, dtype: torch.dtype) -> PatchFactors:
        """The same factors in another dtype; themselves if they have it."""
        if self.maps.dtype == self.images.dtype == dtype:
            return self
        return PatchFactors(self.images.to(dtype), self.maps.to(dtype), self.window, self.bias)

    @staticmethod
    def concatenate_samples(parts: Sequence[PatchFactors]) -> PatchFactors:
        """Several batches of one layer with images of one size, in order."""
        images, maps = torch.cat([part.images for part in parts]), torch.cat([part.maps for part in parts])
        return PatchFactors(images, maps, parts[0].window, parts[0].bias)

    @property
    def _patch_size(self) -> int:
        return self.images.shape[1] // self.window.groups * torch.Size(self.window.kernel).numel()

    @property
    def _convolves(self) -> bool:
        # oneDNN's kernels, on the CPU, know no float64; others take one channel group after the other.
        if (
            self.images.device.type != "cpu"
            or self.images.dtype != torch.float32
            or not torch.backends.mkldnn.is_available()
        ):
            return False
        if self.window.groups > 1:
            return True
        is_small = self.num_positions <= UNFOLD_POSITIONS or self.images.shape[1] <= UNFOLD_CHANNELS
        return not is_small and torch.Size(self.window.kernel).numel() > 1

    def _convolved(self) -> Tensor:
        """Weight gradients ``[n, p]`` by a convolution with ``n g`` channel groups."""
        window, num_samples = self.window, self.num_samples
        images = self.images.reshape(1, -1, *self.images.shape[2:])
        maps = self.maps.reshape(1, -1, *self.maps.shape[2:])
        # Only the shape of the weight counts.
        weight = self.images.new_empty(()).expand(maps.shape[1], self.images.shape[1] // window.groups, *window.kernel)
        _, gradients, _ = torch.ops.aten.convolution_backward(
            maps,
            images,
            weight,
            None,
            window.stride,
            window.padding,
            window.dilation,
            False,
            [0] * len(window.kernel),
            num_samples * window.groups,
            [False, True, False],
        )
        result: Tensor = gradients.reshape(num_samples, -1)
        return result


SUMMED_ELEMENTS = 2**22
"""Elements of gradients that are in memory at once while they are summed."""


def unfold(images: Tensor, window: Window) -> Tensor:
    """Patches ``[n, channels * kernel, t]``, the input features in the order of the layer's weight."""
    # Views and one copy: torch's own `unfold` takes twice as long on the CPU, and knows two dimensions only.
    num_dims = len(window.kernel)
    if set(window.kernel) == {1} and not any(window.padding):
        steps = (slice(None), slice(None), *(slice(None, None, step) for step in window.stride))
        return images[steps].flatten(2)
    patches = F.pad(images, [size for size in reversed(window.padding) for _ in range(2)])
    for dim, (size, step, dilation) in enumerate(zip(window.kernel, window.stride, window.dilation, strict=True), 2):
        patches = patches.unfold(dim, dilation * (size - 1) + 1, step)[..., ::dilation]
    out, kernel = range(2, 2 + num_dims), range(2 + num_dims, 2 + 2 * num_dims)
    return patches.permute(0, 1, *kernel, *out).flatten(2 + num_dims).flatten(1, 1 + num_dims)
