import os
import random

import numpy as np
import pytest
import torch

SEED = 20240229

# What pytest, Lightning and the libraries below them set for their own use and leave behind.
FOREIGN_VARIABLES = frozenset(
    {
        "CRC32C_SW_MODE",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "POPLAR_ENGINE_OPTIONS",
        "PYTEST_CURRENT_TEST",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "WORLD_SIZE",
    }
)

# Sums of floats depend on how many threads share them: the same number on every machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _leak_guards():
    """Fails a test that leaves the process otherwise than it found it, and puts right what it can for the next one."""
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    grad_mode, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield
    leaks = [
        *_changed_variables(environment),
        *(["grad mode"] if torch.is_grad_enabled() != grad_mode else []),
        *(["inference mode"] if torch.is_inference_mode_enabled() else []),
        *(["default dtype"] if torch.get_default_dtype() != dtype else []),
        *(["number of threads"] if torch.get_num_threads() != threads else []),
        *(["deterministic algorithms"] if torch.are_deterministic_algorithms_enabled() else []),
    ]
    os.environ.clear()
    os.environ.update(environment)
    torch.set_grad_enabled(grad_mode)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    assert not leaks, f"the test left changed: {', '.join(leaks)}"


def _changed_variables(before):
    names = (before.keys() | os.environ.keys()) - FOREIGN_VARIABLES
    return [f"variable {name}" for name in sorted(names) if before.get(name) != os.environ.get(name)]
