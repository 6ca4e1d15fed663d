"""How much memory a pass may take, and what happens when it does not suffice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_gradsim.guard import is_out_of_memory

DEFAULT_SHARE = 0.25
"""Share of the free memory that a pass may take where no budget is stated: the training run needs its own."""
CGROUP = Path("/sys/fs/cgroup")

Result = TypeVar("Result")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated.

    Args:
        device: Where. On CUDA what the allocator has reserved and does not use counts as free.

    Returns:
        Bytes on the device; on the CPU no more than what the limit of a container leaves.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        return available if limit.strip() == "max" else max(0, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # no container, or one that does not say
        return available


def default_budget(device: torch.device, num_processes: int = 1) -> int:
    """The budget where none is stated, in bytes.

    Args:
        device: Where the pass runs.
        num_processes: How many run it, each with a device of its own; beside a device they share one memory.

    Returns:
        A share of the free memory.
    """
    return int(DEFAULT_SHARE * free_memory(device)) // (1 if device.type == "cuda" else num_processes)


def release_memory() -> None:
    """Give back what failed attempts have left, before a smaller one."""
    gc.collect()
    torch.cuda.empty_cache()


class Portions:
    """A number of samples that are worked on together, halved whenever memory does not suffice.

    Args:
        size: The number to begin with.

    Attributes:
        size: The number at present.
        was_halved: Whether memory has not sufficed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.was_halved = False

    def split(self, total: int, work: Callable[[slice], Result]) -> Iterator[Result]:
        """Work on all samples, a portion at a time.

        Args:
            total: Number of samples.
            work: From some of them to a result; repeated for fewer where it runs out of memory.

        Yields:
            Results, in order.

        Raises:
            Exception: What ``work`` raises, out of memory for a single sample included.
        """
        start = 0
        while start < total:
            size = min(self.size, total - start)
            try:
                result = work(slice(start, start + size))
            except Exception as error:
                if size <= 1 or not is_out_of_memory(error):
                    raise
                self.size, self.was_halved = size // 2, True
            else:
                start += size
                yield result
                continue
            # Beyond the `except` block, which keeps the failed attempt's tensors alive.
            release_memory()


class GraphMeter:
    """Bytes that autograd keeps for a backward.

    Attributes:
        num_bytes: All tensors kept, each storage once.
        largest: The largest of them.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.largest = 0
        self._known: set[int] = set()

    @contextmanager
    def watching(self, *apart: Tensor) -> Iterator[None]:
        """Count what the forward inside keeps.

        Args:
            apart: Tensors that exist anyway, such as parameters, and don't count.

        Yields:
            Nothing.
        """
        plain = [tensor for tensor in apart if tensor.layout is torch.strided]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in plain}
        # Under autocast a graph keeps casts of the parameters, which are the same for any number of samples.
        casts = {tuple(sorted(tensor.shape)) for tensor in plain if isinstance(tensor, nn.Parameter)}

        def count(tensor: Tensor) -> None:
            if tensor.layout is not torch.strided:
                return
            if tensor.dtype in (torch.float16, torch.bfloat16) and tuple(sorted(tensor.shape)) in casts:
                return
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.num_bytes += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())

        def pack(tensor: Tensor) -> Tensor:
            count(tensor)
            # A result that its own node keeps, as that of a ReLU, would hold the graph, and the graph would hold it:
            # nothing collects such a circle.
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
