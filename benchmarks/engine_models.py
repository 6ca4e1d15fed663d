"""The networks and data of `engine.py`, from a seed, so that every environment builds the same ones.

Needs nothing but torch: the peers' environments import it, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 10
VOCABULARY, LENGTH, WIDTH, NUM_HEADS, FEED_FORWARD, DEPTH = 10_000, 64, 128, 4, 512, 4


class ConvNet(nn.Module):
    """The network of `examples/mnist_convnet.py` as a plain module: what it is built from needs no Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        maps = F.max_pool2d(self.conv1(images), 2).relu()
        maps = F.max_pool2d(self.dropout(self.conv2(maps)), 2).relu()
        features = self.fc1(maps.flatten(1)).relu()
        return self.fc2(F.dropout(features, training=self.training))


class MLP(nn.Module):
    """784-512-256-10 units with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(784, 512)
        self.hidden2 = nn.Linear(512, 256)
        self.head = nn.Linear(256, NUM_CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of a batch of flat images."""
        return self.head(self.hidden2(self.hidden1(pixels).relu()).relu())


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_inputs != num_outputs:
            convolution = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(num_outputs))

    def forward(self, maps: Tensor) -> Tensor:
        """Maps after the block."""
        inner = self.bn2(self.conv2(self.bn1(self.conv1(maps)).relu()))
        return (inner + self.shortcut(maps)).relu()


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 pictures: a 3x3 stem without pooling, widths of 16, 32, 64 and 128."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        num_inputs = width
        for num_outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [BasicBlock(num_inputs, num_outputs, stride), BasicBlock(num_outputs, num_outputs, 1)]
            num_inputs = num_outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(num_inputs, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        maps = self.blocks(self.bn1(self.conv1(images)).relu())
        return self.fc(maps.mean((2, 3)))


class SelfAttention(nn.Module):
    """Attention as most code bases build it: four linear layers and torch's own attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens that have seen one another."""
        heads = [
            layer(tokens).unflatten(-1, (NUM_HEADS, WIDTH // NUM_HEADS)).transpose(-3, -2)
            for layer in (self.query, self.key, self.value)
        ]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(-3, -2).flatten(-2))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward part, each with a normalisation before it and a shortcut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.linear1 = nn.Linear(WIDTH, FEED_FORWARD)
        self.linear2 = nn.Linear(FEED_FORWARD, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens after the layer."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.linear2(F.gelu(self.linear1(self.norm2(tokens))))


class Transformer(nn.Module):
    """A text classifier: embedding, four encoder layers, the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(EncoderLayer() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of token ids ``[n, t]``."""
        return self.head(self.norm(self.layers(self.embedding(tokens))).mean(-2))


@dataclass(frozen=True)
class Spec:
    """How a network and its data are made.

    Attributes:
        build: Makes the network.
        shape: Shape of one input.
        head: Name of the last layer.
        num_samples: Training samples of a run unless told otherwise, so that a repeat takes seconds.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    head: str
    num_samples: int


SPECS = {
    "conv": Spec(ConvNet, (1, 28, 28), "fc2", 2048),
    "mlp": Spec(MLP, (784,), "head", 8192),
    "resnet": Spec(ResNet18, (3, 32, 32), "fc", 256),
    "transformer": Spec(Transformer, (LENGTH,), "head", 256),
}


class Work:
    """A network in eval, training samples and queries, and the layers whose gradients are asked for."""

    def __init__(self, name: str, layers: str, num_samples: int, num_queries: int) -> None:
        spec = SPECS[name]
        torch.manual_seed(0)
        self.model = spec.build().eval()
        self.head_name = spec.head
        self.layers = layers
        generator = torch.Generator().manual_seed(1)
        # Queries are drawn first: they are the same, whatever the number of samples.
        inputs = _draw(name, num_queries + num_samples, spec.shape, generator)
        self.query_inputs, self.inputs = inputs[:num_queries], inputs[num_queries:]
        self.labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
        with torch.no_grad():
            # Any label but the predicted one: only mistakes are queries.
            self.query_labels = (self.model(self.query_inputs).argmax(1) + 1) % NUM_CLASSES

    @property
    def head(self) -> nn.Module:
        """The last layer."""
        return self.model.get_submodule(self.head_name)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the chosen layers, by name."""
        named = dict(self.model.named_parameters())
        prefix = "" if self.layers == "all" else f"{self.head_name}."
        return {name: parameter for name, parameter in named.items() if name.startswith(prefix)}

    def freeze_others(self) -> None:
        """Take gradients off all other parameters, for those who choose parameters that way."""
        chosen = self.parameters
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in chosen)

    def exact(self) -> Work:
        """The same in float64."""
        work = copy.copy(self)
        work.model = copy.deepcopy(self.model).double()
        work.query_inputs, work.inputs = (
            values.double() if values.is_floating_point() else values for values in (self.query_inputs, self.inputs)
        )
        return work

    def batches(self, batch_size: int, num_samples: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Batches of the first samples, or of all."""
        pairs = (self.inputs[:num_samples].split(batch_size), self.labels[:num_samples].split(batch_size))
        return list(zip(*pairs, strict=True))

    def forward(self, batch_size: int, num_samples: int | None = None) -> None:
        """A plain forward without gradients."""
        with torch.no_grad():
            for inputs, _ in self.batches(batch_size, num_samples):
                self.model(inputs)

    def gradients(self, inputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
        """Flat gradients of the chosen layers, by autograd for one sample at a time."""
        parameters = list(self.parameters.values())
        for sample, label in zip(inputs.split(1), labels.split(1), strict=True):
            loss = F.cross_entropy(self.model(sample), label)
            yield torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)])


def _draw(name: str, number: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    draw: Any = torch.randn
    if name == "transformer":
        return torch.randint(VOCABULARY, (number, *shape), generator=generator)
    return draw(number, *shape, generator=generator)
