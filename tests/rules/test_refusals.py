"""Settings of layers that have no exact per-sample gradient are refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_gradsim.errors import SampleMixingError, UnsupportedLayerError
from lightning_gradsim.factors import dot, squared_norms
from lightning_gradsim.wrapper import PerSampleGradients


def factors(module, inputs, layers="0"):
    labels = torch.arange(len(inputs)) % 3
    with PerSampleGradients(module, layers) as gradients:
        with gradients.recording():
            losses = F.cross_entropy(module(inputs), labels, reduction="none")
        return gradients.factors(losses)


@pytest.mark.parametrize("setting", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_embeddings_whose_gradient_depends_on_the_batch(setting):
    module = nn.Sequential(nn.Embedding(5, 4, **setting), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(UnsupportedLayerError, match=r"Layer `0`: `nn.Embedding` with `scale_grad_by_freq`.*`layers`"):
        factors(module, torch.randint(5, (6, 2)))


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_batchnorm_by_the_statistics_of_the_batch(options):
    module = nn.Sequential(nn.BatchNorm1d(4, **options), nn.Linear(4, 3)).train(not options)
    with pytest.raises(
        SampleMixingError, match=r"Layer `0` \(`BatchNorm1d`\) normalises by the statistics of the batch"
    ):
        factors(module, torch.randn(6, 4))


def test_an_embedding_without_positions_has_no_gradient():
    [found] = factors(
        nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)), torch.randint(5, (6, 2))
    ).values()
    assert not squared_norms(found.unused(3)).any()
    assert not dot(found, found.unused(3)).any()
    assert not dot(found.unused(3), found).any()


def test_embedding_products_in_chunks():
    [found] = factors(
        nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)), torch.randint(5, (6, 2))
    ).values()
    torch.testing.assert_close(dot(found, found, max_intermediate=1), dot(found, found))
    torch.testing.assert_close(dot(found, found).diagonal(), squared_norms(found))
