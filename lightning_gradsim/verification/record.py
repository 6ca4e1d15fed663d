"""What a self-check found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import indent, wrap

from lightning_gradsim.errors import VerificationError
from lightning_gradsim.layer_selection import THE_MODULE

WIDTH = 100


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: Which one: "exactness", "batch composition" or "sign".
        passed: Whether it passed; ``None`` where nothing could be tested, which the message explains.
        message: What was found, and for a failure what to do.
        difference: Largest difference found, in the unit that the message names; NaN if none was measured.
        count: How much was compared, in words.
    """

    name: str
    passed: bool | None
    message: str
    difference: float = math.nan
    count: str = ""

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        return "not tested" if self.passed is None else "passed" if self.passed else "FAILED"


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found; true if no check failed, and prints as a table.

    Attributes:
        checks: The checks.
        steps: The step of the ladder that serves each layer, by name; empty if no gradients could be computed.
        reasons: Why a layer is not served by hooks, by name.
    """

    checks: tuple[Check, ...]
    steps: Mapping[str, str]
    reasons: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    def __bool__(self) -> bool:
        """Whether no check failed, so that ``assert verify(...)`` means what it says."""
        return self.passed

    def raise_if_failed(self) -> None:
        """Turn failed checks into an error.

        Raises:
            VerificationError: If a check failed; all messages are in it.
        """
        if self.failures:
            raise VerificationError("\n".join(f"{check.name}: {check.message}" for check in self.failures))

    def __str__(self) -> str:
        """A table for a terminal."""
        lines = []
        for check in self.checks:
            difference = "" if math.isnan(check.difference) else f"{check.difference:.1e}"
            lines.append(f"{check.verdict:<11} {check.name:<18} {difference:>8}  {check.count}".rstrip())
            lines.append(_block(check.message))
        for name, step in self.steps.items():
            lines.append(f"layer `{name or THE_MODULE}`: {step}")
            if name in self.reasons:
                # Its first sentence: what to do about it is done already.
                sentence, end, _ = self.reasons[name].partition(". ")
                lines.append(_block(sentence + end.rstrip()))
        return "\n".join(lines)


def _block(text: str) -> str:
    return indent("\n".join(wrap(text, WIDTH - 12, break_long_words=False, break_on_hyphens=False)), " " * 12)
