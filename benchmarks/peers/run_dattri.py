"""dattri's Grad-Dot: `TracInAttributor` with weight one, without normalisation and without its random projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dattri.algorithm.tracin import TracInAttributor
from dattri.task import AttributionTask
from engine_models import Work
from peer import make_loader, run
from torch import Tensor


class Dattri:
    """`vmap(grad)`; it computes the gradients of the queries again for each batch of samples."""

    package = "dattri"
    way = "Grad-Dot"
    has_head_bias = True
    pays_once = False

    def __init__(self, work: Work, batch_size: int) -> None:
        self.work = work
        self.unit = self.batch_size = batch_size
        task = AttributionTask(self._loss, work.model, work.model.state_dict())
        names = None if work.layers == "all" else list(work.parameters)
        self.attributor = TracInAttributor(task, torch.ones(1), normalized_grad=False, layer_name=names)
        self.attributor.projector_kwargs = None  # its default is inexact; `None` to the constructor means the default
        self.queries = make_loader(work.query_inputs, work.query_labels, len(work.query_labels))

    def products(self, num_samples: int) -> Tensor:
        """The attribution of the first samples to the queries."""
        samples = make_loader(self.work.inputs[:num_samples], self.work.labels[:num_samples], self.batch_size)
        return self.attributor.attribute(samples, self.queries).T

    def _loss(self, parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        inputs, label = data
        logits = torch.func.functional_call(self.work.model, parameters, (inputs[None],))
        return F.cross_entropy(logits, label[None])


if __name__ == "__main__":
    run(Dattri)
