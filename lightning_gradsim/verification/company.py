"""Whether a sample's loss and gradient are its own, or depend on the company in its batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_gradsim.verification.record import Check
from lightning_gradsim.verification.samples import Parameters, Samples, floored, relative_difference
from lightning_gradsim.verification.trace import LayerCall, find_culprit, trace_sample

NAME = "batch composition"


@dataclass(frozen=True, eq=False)
class _Company:
    """One sample in one batch."""

    words: str
    batch: Any
    size: int
    position: int


def check_company(samples: Samples, parameters: Parameters) -> Check:
    """Run each sample alone, among others, at another place, and the same batch twice.

    Args:
        samples: The samples.
        parameters: The parameters whose gradients are compared.

    Returns:
        The check; a failure names the first layer that treats a sample differently.
    """
    losses, gradients = samples.gradients(samples.batch, samples.rows, parameters)
    norms = floored(gradients.norm(dim=1))
    allowed = samples.allowed(norms)
    largest, untested, count = 0.0, [], f"{len(samples.rows)} samples"
    for number, row in enumerate(samples.rows):
        home = _Company("in its batch", samples.batch, samples.size, row)
        for company in _companies(samples, row):
            try:
                loss, gradient = samples.gradients(company.batch, [company.position], parameters)
            except Exception as error:  # the batch runs, so whatever fails now does not bear this company
                untested.append(f"A sample cannot run {company.words}: {error}")
                continue
            loss_difference = float((loss[0] - losses[number]).abs() / losses[number].abs().clamp(min=1))
            difference, _ = relative_difference(gradient, gradients[number : number + 1], norms[number : number + 1])
            largest = max(largest, difference, loss_difference)
            if not (difference <= allowed and loss_difference <= samples.tolerance):
                same_loss = loss_difference <= samples.tolerance
                found = f"loss {losses[number]:.6g} {home.words} and {loss[0]:.6g} {company.words}"
                if same_loss:
                    found = f"one loss {home.words} and {company.words}, but two gradients ({difference:.1e} apart)"
                message = f"Sample {row} has {found}. {_explain(samples, home, company, same_loss=same_loss)}"
                return Check(NAME, False, message, largest, count)
    if untested:
        return Check(
            NAME,
            False,
            f"{untested[0]}. Expected a module that runs on any batch. {_hint(samples.module)}",
            count=count,
        )
    message = f"losses and gradients stay the same, to {allowed:.0e}: alone, among others, run again"
    return Check(NAME, True, message, largest, count)


def _companies(samples: Samples, row: int) -> Iterator[_Company]:
    size = samples.size
    # First, so that random numbers are not taken for mixing.
    yield _Company("in the same batch run again", samples.batch, size, row)
    yield _Company("alone", samples.take([row]), 1, 0)
    others = [(row + step) % size for step in reversed(range(max(size // 2, 1)))]
    others = [row, *others] if len(others) < 2 else others  # a batch of two: beside itself
    turned = [(index + 1) % size for index in range(size)]
    for words, rows in (("among other samples", others), ("at another place of its batch", turned)):
        batch = samples.take(rows)
        if batch is not None:
            yield _Company(words, batch, len(rows), len(rows) - 1 if rows is others else rows.index(row))


def _explain(samples: Samples, home: _Company, company: _Company, *, same_loss: bool) -> str:
    is_random = company.words.endswith("again")
    if same_loss:
        return _explain_gradient(samples.module)
    with samples.context():
        first = trace_sample(samples.module, lambda: samples.losses(home.batch), home.size, home.position)
        second = trace_sample(samples.module, lambda: samples.losses(company.batch), company.size, company.position)
    culprit = find_culprit(first, second, samples.tolerance)
    does = "draws random numbers" if is_random else "mixes samples"
    if culprit is None:
        return (
            f"No layer gives other outputs for equal inputs, so the loss {does}, or code between the layers does. "
            f"Expected a loss of each sample's own. {_hint(None, is_random=is_random)}"
        )
    return (
        f"{_named(culprit, samples.module)} {does}: its output for the sample changes although its input does not. "
        f"{_hint(culprit.layer, is_random=is_random)}"
    )


def _explain_gradient(module: nn.Module) -> str:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding) and layer.scale_grad_by_freq:
            return (
                f"Layer `{name}` (`Embedding`) scales gradients by how often an index is in the batch. Switch "
                "`scale_grad_by_freq` off, or leave the layer out of `layers`."
            )
    return (
        "A backward of the module's own, or a hook on its gradients, mixes samples or draws random numbers. Expected a "
        "gradient of each sample's own. Leave the layer out of `layers`."
    )


def _named(call: LayerCall, module: nn.Module) -> str:
    kind = type(call.layer).__name__
    if call.layer is module:
        return f"The forward of `{kind}`, between the layers in it,"
    inner = ", between the layers in it," if any(True for _ in call.layer.children()) else ""
    return f"Layer `{call.name}` (`{kind}`){inner}"


def _hint(layer: nn.Module | None, *, is_random: bool = False) -> str:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return "Leave it in eval mode (`evaluate=True`): with dropout a sample has another gradient in every forward."
    if is_random:
        return (
            "Draw random numbers in train mode only, as in `F.dropout(x, training=self.training)`, and verify with "
            "`evaluate=True`."
        )
    if layer is not None and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in layer.modules()):
        return (
            "It normalises by the statistics of the batch: put it into eval mode (`evaluate=True`), and keep "
            "`track_running_stats=True`."
        )
    return (
        "Such a sample has no gradient of its own. Take what samples share out of the forward in eval mode, and out of "
        "the loss (`loss_fn=`)."
    )
