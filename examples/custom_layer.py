"""A layer of your own with a rule of its own: exact without it, cheaper with it.

`PatchEmbedding` cuts a picture into patches and sends each through one weight, as vision transformers do. Without a
rule its samples run once more; the rule says what its gradient is made of: a sum over patches of output gradient times
pixels. `verify` compares both with plain autograd. Run it with `python examples/custom_layer.py` (ten seconds).
"""

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gradsim import OuterFactors, Report, explain, plan, register_rule, verify


class PatchEmbedding(nn.Module):
    """Patches of `size` x `size` pixels, each mapped to `width` numbers: `[n, 1, h, w]` to `[n, patches, width]`."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.randn(width, size * size) / size)
        self.bias = nn.Parameter(torch.zeros(width))

    def patches(self, images: Tensor) -> Tensor:
        """`[n, 1, h, w]` as `[n, patches, pixels]`."""
        return nn.functional.unfold(images, self.size, stride=self.size).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images) @ self.weight.T + self.bias


def patch_factors(layer: PatchEmbedding, activations: Tensor, output_grads: Tensor) -> OuterFactors:
    """The rule: patches are shared positions `t`, and there is one channel group."""
    pixels = layer.patches(activations)  # [n, t, i]
    return OuterFactors(pixels.unsqueeze(2), output_grads.unsqueeze(2), bias=True)  # [n, t, 1, i], [n, t, 1, o]


def make_model() -> nn.Module:
    """A small network on 8x8 pictures that begins with the layer."""
    return nn.Sequential(PatchEmbedding(2, 24), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 24, 10))


def train(model: nn.Module, data: TensorDataset, epochs: int) -> None:
    """Plain PyTorch: nothing here knows Lightning."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for images, labels in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


def main(arguments: list[str] | None = None) -> Report:
    """Plan, check and time the layer without its rule and with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one epoch on a part of the digits")
    parser.add_argument("--log-dir", type=Path, default=None, help="not used: this example writes nothing")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    last = 300 if options.smoke else 1400
    train_set, test_set = (
        TensorDataset(images[:last], labels[:last]),
        TensorDataset(images[1400:1440], labels[1400:1440]),
    )
    model = make_model()
    train(model, train_set, epochs=1 if options.smoke else 10)

    reports = {}
    for title in ("without a rule", "with a rule"):
        if title == "with a rule":
            register_rule(PatchEmbedding, parameters=("weight", "bias"), overwrite=True)(patch_factors)
        begin = time.perf_counter()
        reports[title] = explain(model, test_set, train_set, layers="all")
        seconds = time.perf_counter() - begin
        print(f"\n{title}: {seconds:.2f} s for {len(test_set)} queries and {len(train_set)} samples")
        print(plan(model, (images[:64], labels[:64]), layers="all"))
        print(verify(model, (images[:8], labels[:8]), layers="all"))
    lists = [[[each.sample_id for each in query.harmful] for query in report.queries] for report in reports.values()]
    equal = sum(one == other for one, other in zip(*lists, strict=True))
    print(f"\nThe same harmful samples in the same order for {equal} of {len(test_set)} queries.")
    return reports["with a rule"]


if __name__ == "__main__":
    main()
