"""The ways through queries and samples that `engine.py` compares in its own environment."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from engine_models import Work
from torch import Tensor, nn

from lightning_gradsim import Adapter
from lightning_gradsim.engine import EngineSettings, PassResult, run_pass
from lightning_gradsim.query_side import QueryBatch

BLOCK = 16
"""Gradients that the one-by-one way multiplies at a time."""


class Ways:
    """Every way through the work, for one batch size; `products` are ``[m, n]``, for the queries' given labels."""

    def __init__(self, work: Work, batch_size: int) -> None:
        self.work = work
        self.batch_size = batch_size
        self.adapter = Adapter()
        self.adapter.bind(work.model)

    @cached_property
    def query_gradients(self) -> Tensor:
        """Flat gradients of the queries, ``[m, p]``: what all ways but ours are given for nothing."""
        return torch.stack(list(self.work.gradients(self.work.query_inputs, self.work.query_labels)))

    def forward(self, num_samples: int) -> None:
        """A plain forward without gradients: no method that looks at every sample can take less."""
        self.work.forward(self.batch_size, num_samples)

    def train_step(self, num_samples: int) -> None:
        """Forward and backward of the mean loss for all parameters, as training does, without the optimizer."""
        for inputs, labels in self.work.batches(self.batch_size, num_samples):
            F.cross_entropy(self.work.model(inputs), labels).backward()
            self.work.model.zero_grad(set_to_none=True)

    def our_pass(self, num_samples: int, *, teachers: bool = False, top_k: int = 8) -> PassResult:
        """The pass of the callback; with teachers, there are two gradients a query."""
        work = self.work
        queries = QueryBatch(range(len(work.query_labels)), (work.query_inputs, work.query_labels))
        batches = zip(
            torch.arange(num_samples).split(self.batch_size), work.batches(self.batch_size, num_samples), strict=True
        )
        settings = EngineSettings(work.layers, "dot", top_k, teachers)
        return run_pass(work.model, self.adapter, [queries], batches, settings)

    def one_by_one(self, num_samples: int) -> Tensor:
        """Products by autograd for one sample at a time.

        The gradients of a few samples are multiplied together: it is faster, and a product of a matrix and a vector of
        two million entries adds up rounding errors beyond the tolerance.
        """
        work = self.work
        gradients = work.gradients(work.inputs[:num_samples], work.labels[:num_samples])
        blocks = iter(lambda: list(itertools.islice(gradients, BLOCK)), [])
        return torch.cat([self.query_gradients @ torch.stack(block).T for block in blocks], dim=1)

    def vmap(self, num_samples: int) -> Tensor:
        """Products by `torch.func`: `vmap(grad)` over batches."""
        work = self.work
        others = {name: value.detach() for name, value in work.model.named_parameters() if name not in work.parameters}
        state = {**others, **dict(work.model.named_buffers())}
        chosen = {name: value.detach() for name, value in work.parameters.items()}

        def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
            logits = torch.func.functional_call(work.model, {**state, **parameters}, (sample[None],))
            return F.cross_entropy(logits, label[None])

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        return torch.cat(
            [
                self._products(list(per_sample(chosen, inputs, labels).values()))
                for inputs, labels in work.batches(self.batch_size, num_samples)
            ],
            dim=1,
        )

    def opacus(self, num_samples: int) -> Tensor:
        """Products by Opacus' `GradSampleModule`, which materialises every gradient."""
        model, parameters = self._opacus_model
        products = []
        for inputs, labels in self.work.batches(self.batch_size, num_samples):
            F.cross_entropy(model(inputs), labels, reduction="sum").backward()
            products.append(self._products([parameter.grad_sample for parameter in parameters]))
            for parameter in parameters:
                parameter.grad = parameter.grad_sample = None
        return torch.cat(products, dim=1)

    @cached_property
    def _opacus_model(self) -> tuple[nn.Module, list[Any]]:
        from opacus import GradSampleModule

        # A copy: it wraps the model, and wants the modes and flags below.
        work = copy.copy(self.work)
        work.model = copy.deepcopy(self.work.model)
        work.freeze_others()
        # Its hooks ignore layers in eval mode; the modules around them stay there for dropout's sake.
        for layer in work.model.modules():
            if any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
                layer.train()
        return GradSampleModule(work.model, loss_reduction="sum"), list(work.parameters.values())

    def _products(self, grads: list[Tensor]) -> Tensor:
        # By parameter: joining the gradients first would copy them all.
        flat = [grad.flatten(1) for grad in grads]
        parts = self.query_gradients.split([grad.shape[1] for grad in flat], dim=1)
        return sum((part @ grad.T for part, grad in zip(parts, flat, strict=True)), start=torch.zeros(()))

    def by_name(self) -> dict[str, Callable[[int], Any]]:
        """The ways by the names that the table and `--ways` use."""
        return {
            "forward": self.forward,
            "train": self.train_step,
            "ours": self.our_pass,
            "teachers": lambda num_samples: self.our_pass(num_samples, teachers=True),
            "loop": self.one_by_one,
            "vmap": self.vmap,
            "opacus": self.opacus,
        }


def found_products(result: PassResult, squared_norms: Tensor, query_norms: Tensor) -> Tensor:
    """The products in the lists of a pass, ``[m, n]``.

    Args:
        result: A pass by `dot` whose lists are as long as there are samples: harmful then holds all negative products,
            look-alikes all positive cosines.
        squared_norms: Squared norms of the samples' gradients, ``[n]``.
        query_norms: Norms of the queries' gradients, ``[m]``.

    Returns:
        The products; zero where neither list has a sample.
    """
    norms = query_norms[:, None] * squared_norms.sqrt()
    found = torch.zeros_like(norms)
    for row, query in result.queries.items():
        for sample in query.harmful:
            found[row, sample.sample_id] = sample.score
        for sample in query.look_alikes:
            found[row, sample.sample_id] = sample.score * norms[row, sample.sample_id]
    return found
