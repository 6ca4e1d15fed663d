"""captum's `TracInCP` for all layers, `TracInCPFast` for the last one, with a single checkpoint."""

from __future__ import annotations

from captum.influence import TracInCP, TracInCPFast
from engine_models import Work
from peer import Peer, make_loader, run
from torch import Tensor, nn

CHECKPOINT = ["the network as it is"]


def _load(model: nn.Module, checkpoint: str) -> float:
    return 1.0  # the learning rate, which scales the products


class AllLayers:
    """`TracInCP`.

    Its per-sample gradients by hooks cover linear layers and two-dimensional convolutions, and leave others out without
    a word; a model that has others needs its default, one autograd call a sample in batches of one.
    """

    package = "captum"
    has_head_bias = True
    pays_once = True

    def __init__(self, work: Work, batch_size: int) -> None:
        layers = [layer for layer in work.model.modules() if list(layer.parameters(recurse=False))]
        self.has_hooks = all(isinstance(layer, (nn.Linear, nn.Conv2d)) for layer in layers)
        self.way = f"TracInCP ({'hooks' if self.has_hooks else 'one by one'})"
        self.unit = batch_size if self.has_hooks else 16
        self.batch_size = batch_size if self.has_hooks else 1
        self.work = work
        self.queries = make_loader(work.query_inputs, work.query_labels, self.batch_size)

    def products(self, num_samples: int) -> Tensor:
        """The influence of the first samples on the queries."""
        tracin = TracInCP(
            self.work.model,
            make_loader(self.work.inputs[:num_samples], self.work.labels[:num_samples], self.batch_size),
            CHECKPOINT,
            _load,
            loss_fn=nn.CrossEntropyLoss(reduction="sum" if self.has_hooks else "none"),
            sample_wise_grads_per_batch=self.has_hooks,
        )
        return tracin.influence(self.queries)


class LastLayer:
    """`TracInCPFast`; it leaves out the bias, and goes through the queries again for each batch of samples."""

    package = "captum"
    way = "TracInCPFast"
    has_head_bias = False
    pays_once = False

    def __init__(self, work: Work, batch_size: int) -> None:
        self.work = work
        self.unit = self.batch_size = batch_size

    def products(self, num_samples: int) -> Tensor:
        """The influence of the first samples on the queries."""
        tracin = TracInCPFast(
            self.work.model,
            self.work.head,
            make_loader(self.work.inputs[:num_samples], self.work.labels[:num_samples], self.batch_size),
            CHECKPOINT,
            _load,
            loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        )
        return tracin.influence((self.work.query_inputs, self.work.query_labels))


def make(work: Work, batch_size: int) -> Peer:
    """The class that fits the choice of layers."""
    return AllLayers(work, batch_size) if work.layers == "all" else LastLayer(work, batch_size)


if __name__ == "__main__":
    run(make)
