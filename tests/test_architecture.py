import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

IMPORT_PROBE = """
import logging, random
import lightning.pytorch, numpy, torch  # Lightning itself draws random numbers when it is imported

before = list(logging.getLogger().handlers), logging.getLogger().level
states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
threads, dtype = torch.get_num_threads(), torch.get_default_dtype()

import lightning_gradsim

assert (list(logging.getLogger().handlers), logging.getLogger().level) == before, "root logger"
assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states, "RNG"
assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype), "torch settings"
"""


def _run(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_contracts_hold():
    _run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])")


def test_import_leaves_the_process_as_found():
    _run(sys.executable, "-c", IMPORT_PROBE)
