"""Layers without a rule: the recorded calls of one layer run again, each sample on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gradsim.batches import map_tensors, tensors_of
from lightning_gradsim.errors import UnsupportedLayerError
from lightning_gradsim.guard import is_out_of_memory
from lightning_gradsim.precision import raise_half
from lightning_gradsim.recorder import Call
from lightning_gradsim.whole_module import Gradients, Recompute, WholeModule


class Replay:
    """Materialised per-sample gradients of one layer, from its inputs and the gradients by its output.

    The gradient of a sample is the vector-Jacobian product of the layer for this sample alone. It costs one more
    forward and backward of the layer, where a run of the whole module would cost one of the module.

    Args:
        layer: The layer.
        parameters: The parameters by their names in the layer.

    Source:
        As Opacus does for layers without a sampler (``functorch`` mode); we take all arguments of a call, keep those
        that are common to all samples apart, and fall back to single samples where ``vmap`` fails.
    """

    def __init__(self, layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._layer = [layer]
        self._single = WholeModule(layer, parameters)
        self._forms: dict[str, list[torch.Size | None]] = {}
        self._shapes: dict[str, list[torch.Size]] = {}

    @property
    def step(self) -> str:
        """Which way is taken, in the words of the ladder."""
        return "vmap(layer)" if self._single.step == "vmap" else self._single.step

    def gradients(self, call: Call, output_grads: Tensor, num_samples: int) -> Gradients:
        """Gradients of each sample's own loss.

        Args:
            call: The call, with its inputs.
            output_grads: Gradients of the losses by its output, first dimension ``B``.
            num_samples: Number of samples ``B``.

        Returns:
            Gradients ``[B, *shape]`` by parameter; half precision as float32.

        Raises:
            UnsupportedLayerError: If the layer's inputs cannot be cut into samples, or it fails on single ones.
        """
        inputs = list(tensors_of(call.inputs))
        form = self._settle_form(call.inputs, inputs, num_samples)
        own = [tensor for tensor, has_rows in zip(inputs, form, strict=True) if has_rows]

        def losses(batch: tuple[Sequence[Tensor], Tensor]) -> Tensor:
            mine, grads = iter(batch[0]), batch[1]
            arguments = iter([next(mine) if rows else tensor for tensor, rows in zip(inputs, form, strict=True)])
            args, kwargs = map_tensors(call.inputs, lambda _: next(arguments))
            output = self._layer[0](*args, **kwargs)
            output = output if isinstance(output, Tensor) else output[0]
            if output.shape != grads.shape:
                raise UnsupportedLayerError(self._words("mixes inputs of one sample with those of all"))
            return (raise_half(output) * grads).flatten(1).sum(1)

        recompute = Recompute(losses, (own, raise_half(output_grads)), _autocast(call))
        try:
            return self._single.gradients(recompute, num_samples)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedLayerError(self._words(f"does not run on single samples: {error}")) from error

    def _settle_form(self, arguments: Any, inputs: Sequence[Tensor], num_samples: int) -> list[bool]:
        # Whether an input holds one row a sample, or is common to all. The first call with such arguments decides, and
        # its gradients are checked: a mask [t, t] looks like rows where t is the number of samples. Where the mask is
        # not even looked at (`is_causal`), the check finds nothing; another number of samples tells then.
        key = repr(map_tensors(arguments, lambda _: Tensor))
        known = self._forms.get(key)
        if known is None:
            known = [tensor.shape if tensor.shape[:1] != (num_samples,) else None for tensor in inputs]
            if num_samples > 1:
                self._forms[key], self._shapes[key] = known, [tensor.shape for tensor in inputs]
                self._single.check_again()
        elif num_samples > 1:
            for place, tensor in enumerate(inputs):
                if known[place] is None and tensor.shape[:1] != (num_samples,):
                    if tensor.shape != self._shapes[key][place]:
                        raise UnsupportedLayerError(self._words("was called with inputs of another form than before"))
                    known[place] = tensor.shape
                    self._single.check_again()
        return [shape is None for shape in known]

    def _words(self, problem: str) -> str:
        kind = type(self._layer[0]).__name__
        return f"a `{kind}` {problem}. Leave the layer out of `layers`, or give it a rule with `register_rule({kind})`"


def _autocast(call: Call) -> Callable[[], AbstractContextManager[Any]]:
    if call.autocast is None:
        return nullcontext
    return lambda: torch.autocast(call.activations.device.type, dtype=call.autocast)
