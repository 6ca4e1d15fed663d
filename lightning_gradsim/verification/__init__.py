"""Whether the gradients of a user's own module, batch and loss are right: checked against plain autograd."""

from lightning_gradsim.verification.record import Check, Verification
from lightning_gradsim.verification.run import verify

__all__ = ["Check", "Verification", "verify"]
