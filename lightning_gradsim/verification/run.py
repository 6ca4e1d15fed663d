"""The self-check: module and batch in, what was found out."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.arguments import with_article
from lightning_gradsim.batches import map_tensors
from lightning_gradsim.errors import (
    GradSimError,
    LayerSelectionError,
    LossError,
    SampleMixingError,
)
from lightning_gradsim.factors import Factors
from lightning_gradsim.guard import evaluating, preserving
from lightning_gradsim.layer_selection import LayerSpec
from lightning_gradsim.losses import LossFunction
from lightning_gradsim.verification import company, descent, exactness
from lightning_gradsim.verification.company import check_company
from lightning_gradsim.verification.descent import check_sign
from lightning_gradsim.verification.exactness import Products, check_exactness, chosen_parameters, compute_products
from lightning_gradsim.verification.other_weights import find_noise
from lightning_gradsim.verification.record import Check, Verification
from lightning_gradsim.verification.samples import ForwardContext, Parameters, Samples
from lightning_gradsim.verification.trace import find_changed_input
from lightning_gradsim.whole_module import Recompute
from lightning_gradsim.wrapper import PerSampleGradients


def verify(
    module: nn.Module,
    batch: Any,
    layers: LayerSpec = "last",
    *,
    loss_fn: nn.Module | LossFunction | None = None,
    adapter: Adapter | None = None,
    num_samples: int = 4,
    evaluate: bool = True,
    step_size: float | None = None,
    forward_context: ForwardContext = nullcontext,
) -> Verification:
    """Check on one batch of yours that per-sample gradients are right, and that they exist at all.

    1. *Exactness*: gradients, dot products and norms as a pass computes them equal plain autograd on batches of one,
       within 1e-10 of the norms in float64, 1e-5 in float32, 0.1 in half precision and under autocast. Where rounding
       takes plain autograd in float32 further from float64 than that (samples that the model is sure of), ten times
       what it does is allowed, up to 0.05.
    2. *Batch composition*: a sample's loss and gradient are the same alone, among others, and when the batch runs
       again. A failure names the first layer that mixes samples or draws random numbers.
    3. *Sign*: a small SGD step on one sample's loss changes the others' as the dot products say, within 5 % (in float64
       on copies of the parameters; 50 % where the module runs in its own dtype only).

    The module is left as found: parameters, gradients, buffers, modes, hooks and random numbers.

    Args:
        module: The module.
        batch: A batch of at least two samples, as the loader gives it; moved to the module's device.
        layers: The choice of layers, as for ``GradSimCallback``.
        loss_fn: A criterion or function of (outputs, targets), as for ``GradSimCallback``.
        adapter: Reads batches of an unusual form.
        num_samples: How many samples are compared: those with the highest losses.
        evaluate: Whether the module is put into eval mode, as the callback does; otherwise it runs in the modes in
            which it is.
        step_size: Length of the steps relative to the norm of the chosen parameters; by default 1e-6 in float64, and
            1e-3 otherwise.
        forward_context: The precision context, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``.

    Returns:
        What was found: print it, or call ``raise_if_failed``.

    Raises:
        TypeError: If ``module`` or ``adapter`` is of another type.
        ValueError: If ``num_samples`` or ``step_size`` is out of range.
        BatchFormatError: If the batch cannot be read, or holds fewer than two samples.
        LayerSelectionError: If ``layers`` matches nothing.
        LossError: If there is no loss of one value a sample.
        NonFiniteError: If a loss is not finite.

    Example::

        verify(model, next(iter(train_loader)), layers="all").raise_if_failed()
    """
    _check_arguments(module, adapter, num_samples, step_size)
    reader = copy.copy(adapter) if adapter is not None else Adapter()
    reader.bind(module, loss_fn)
    with _as_found(module, evaluate=evaluate):
        device = next(iter(module.parameters()), torch.empty(0)).device
        batch = map_tensors(batch, lambda tensor: tensor.detach().to(device, copy=True))
        samples = Samples(module, reader, batch, forward_context, num_samples)
        with PerSampleGradients(module, layers) as watcher:
            factors, problem = _compute(samples, watcher)
            parameters = chosen_parameters(samples, watcher, factors)
            products = None if factors is None else compute_products(samples, watcher, factors)
        return Verification(
            _check(samples, parameters, products, problem, step_size),
            {} if factors is None else dict(watcher.steps),
            {} if factors is None else {name: str(reason) for name, reason in watcher.reasons.items()},
        )


def _compute(samples: Samples, watcher: PerSampleGradients) -> tuple[dict[str, Factors] | None, Exception | None]:
    """Factors of the whole batch the way a pass computes them, or why there are none."""
    with watcher.recording(), samples.context():
        losses = samples.losses(samples.batch)
    try:
        return watcher.factors(losses, recompute=Recompute(samples.losses, samples.batch, samples.context)), None
    except (LayerSelectionError, LossError):
        raise
    except GradSimError as error:
        return None, error
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None, error


def _check(
    samples: Samples,
    parameters: Parameters,
    products: Products | None,
    problem: Exception | None,
    step_size: float | None,
) -> tuple[Check, ...]:
    if problem is not None and not isinstance(problem, GradSimError):
        changed = find_changed_input(samples.module, lambda: samples.losses(samples.batch))
        which = "a value" if changed is None else f"the input of layer `{changed}`"
        message = (
            f"Autograd has no gradient: {which} is changed in place after it was used. Make the operation that follows "
            "out of place."
        )
        return (
            Check(exactness.NAME, False, message),
            Check(company.NAME, None, "There are no gradients to compare."),
            Check(descent.NAME, None, "There are no gradients to confirm."),
        )
    samples.noise = find_noise(samples, parameters)
    composition = check_company(samples, parameters)
    see = f'see "{company.NAME}"'
    if products is None:
        mixes = isinstance(problem, SampleMixingError) and not composition.passed
        message = f"The samples have no gradients of their own: {see}." if mixes else str(problem)
        exact, sign = Check(exactness.NAME, False, message), None
    elif not composition.passed:
        exact, sign = Check(exactness.NAME, None, f"One-sample autograd is no reference here: {see}."), None
    else:
        reference = torch.cat([samples.gradients(samples.take([row]), [0], parameters)[1] for row in samples.rows])
        exact = check_exactness(samples, products, reference)
        sign = check_sign(samples, parameters, reference, products.dots, step_size)
    return exact, composition, sign or Check(descent.NAME, None, "There are no gradients to confirm.")


@contextmanager
def _as_found(module: nn.Module, *, evaluate: bool) -> Iterator[None]:
    """The module in its mode for the checks; parameters, buffers, modes and random numbers are put back."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    states = random.getstate(), np.random.get_state()
    # An embedding with `max_norm` changes its weight in every forward.
    parameters = [(parameter, parameter.detach().clone(), parameter._version) for parameter in module.parameters()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices, key=str)))
        stack.enter_context(evaluating(module) if evaluate else preserving(module))
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for parameter, value, version in parameters:
                if parameter._version != version:
                    parameter.copy_(value)


def _check_arguments(module: object, adapter: object, num_samples: object, step_size: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`module` is {with_article(type(module).__name__)}. Expected an `nn.Module`, such as a LightningModule."
        )
    if adapter is not None and not isinstance(adapter, Adapter):
        kind = with_article(type(adapter).__name__)
        raise TypeError(f"`adapter` is {kind}. Expected an instance of an `Adapter` subclass.")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 2:
        raise ValueError(f"`num_samples={num_samples!r}` is too few to compare. Expected a whole number of at least 2.")
    if step_size is not None and (not isinstance(step_size, (int, float)) or not 0 < step_size < 1):
        raise ValueError(f"`step_size={step_size!r}` is no small step. Expected a number between 0 and 1, or `None`.")
