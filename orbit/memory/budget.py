"""A byte budget: charged before a resource is taken, repaid exactly once after it is gone.

Charging checks and takes in one step, so concurrent tasks of one loop never overshoot. It knows
neither what is charged nor how it is taken.
"""

from __future__ import annotations

from ..errors import BudgetExceeded, InternalError, UsageError


class Charge:
    """A part of a budget that is in use. Whoever holds it repays it, once."""

    __slots__ = ("_budget", "nbytes")

    def __init__(self, budget: Budget, nbytes: int) -> None:
        self._budget: Budget | None = budget
        self.nbytes = nbytes

    @property
    def live(self) -> bool:
        return self._budget is not None

    def repay(self) -> None:
        """Give all of it back. Raises InternalError the second time."""
        if self._budget is None:
            raise InternalError(f"a charge of {self.nbytes} bytes was repaid twice")
        self._budget.charged_bytes -= self.nbytes
        self._budget = None

    def split(self, nbytes: int) -> Charge:
        """Make a part of it a charge of its own, which is repaid apart."""
        if self._budget is None or not 0 <= nbytes <= self.nbytes:
            raise InternalError(f"a charge of {self.nbytes} bytes has no part of {nbytes}")
        self.nbytes -= nbytes
        return Charge(self._budget, nbytes)

    def shrink(self, nbytes: int) -> None:
        """Correct the charge downwards to what was really taken."""
        if self._budget is None or not 0 <= nbytes <= self.nbytes:
            raise InternalError(f"a charge of {self.nbytes} bytes cannot shrink to {nbytes}")
        self._budget.charged_bytes -= self.nbytes - nbytes
        self.nbytes = nbytes


class Budget:
    """`limit_bytes` in all; `knob` names the configuration value that raises it."""

    __slots__ = ("charged_bytes", "knob", "limit_bytes", "name")

    def __init__(self, name: str, limit_bytes: int, knob: str) -> None:
        if limit_bytes < 0:
            raise UsageError(f"{name}: a budget of {limit_bytes} bytes")
        self.name = name
        self.limit_bytes = limit_bytes
        self.knob = knob
        self.charged_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.charged_bytes

    def charge(self, nbytes: int) -> Charge:
        """Take `nbytes`, or raise BudgetExceeded and take nothing."""
        if nbytes < 0:
            raise InternalError(f"{self.name}: a charge of {nbytes} bytes")
        if nbytes > self.free_bytes:
            raise BudgetExceeded(self.name, nbytes, self.limit_bytes, self.charged_bytes, self.knob)
        self.charged_bytes += nbytes
        return Charge(self, nbytes)

    def repay(self, charge: Charge) -> None:
        """Give all of `charge` back. Raises InternalError the second time."""
        charge.repay()
