"""The conformance suite: ``suite`` has the checks, ``inputs`` what they run on; here is what a check is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ablate.base.errors import with_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


@dataclass(frozen=True)
class Told:
    """A fact or a measurement, which cannot fail: a line, and figures whose names end with their units."""

    detail: str
    figures: dict[str, float] = field(default_factory=dict)


class Skip(Exception):  # noqa: N818  no error
    """Raised by a check that cannot run here; the message is the reason."""


def ending(error: Exception) -> NoReturn:
    """Raise an error, as the ``run`` of a check that can only end with it."""
    raise error


class FaultError(AssertionError):
    """A broken promise, with the tensors that show it by name."""

    def __init__(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(what)
        self.tensors = {
            name: tensor.detach().cpu().clone() for name, tensor in tensors.items()
        }


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise of a back end, or a fact of the device where ``backend`` is empty.

    ``kind`` is what is promised, ``of`` the policy, format or size for which it is. ``run`` returns a line
    for a promise that is kept, or what it measured. It raises ``AssertionError`` for a broken promise and
    ``Skip`` for what cannot be tested here; any other exception counts as a failure.
    """

    backend: str = ""
    kind: str = ""
    of: str
    run: Callable[[], str | Told]

    @property
    def name(self) -> str:
        """Kind and subject."""
        return f"{self.kind}: {self.of}" if self.kind else self.of

    def outcome(self) -> tuple[dict[str, Any], Exception | None]:
        """Run; return ``result``, ``detail`` and, for ``Told``, ``figures``; and the error of a failure."""
        try:
            result = self.run()
        except Skip as reason:
            return {"result": "skipped", "detail": str(reason)}, None
        except Exception as fault:
            # errors of drivers and compilers are failures to find
            if isinstance(fault, AssertionError) and str(fault):
                detail = str(fault)
            else:
                detail = with_type(fault)
            return {"result": "failed", "detail": detail}, fault
        if isinstance(result, Told):
            return {
                "result": "told",
                "detail": result.detail,
                "figures": result.figures,
            }, None
        return {"result": "passed", "detail": result}, None
