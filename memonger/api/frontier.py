"""``frontier``: the plans that no other beats in memory and time."""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, Sequence, Tuple, TypeVar

import numpy as np

from memonger.api import fastest, scheduling
from memonger.api import plot as report
from memonger.api.plan import EITHER, WAYS, Plan, check_choice, plan_of
from memonger.api.request import read_request
from memonger.api.scheduling import check_limits
from memonger.api.solution import Candidate, Solution
from memonger.costs.memory import MB
from memonger.graph.inputs import check_count
from memonger.support.errors import MemongerError

log = logging.getLogger("memonger")

P = TypeVar("P", Candidate, Plan)


class Frontier(Tuple[Plan, ...]):
    """Plans that no other beats in both memory and time, the fastest first; prints as a table."""

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended early (Ctrl-C): these are the best that it had found."""
        return any(each.interrupted for each in self)

    def __str__(self) -> str:
        lines = [
            "%12s %8s %12s %8s %8s" % ("memory (MB)", "of it", "added time", "again", "copies")
        ]
        for each in self:
            lines.append(
                f"{each.pool_bytes / MB:12.1f} "
                f"{100 * each.pool_bytes / max(1, each.unplanned_bytes):6.0f} % "
                f"{100 * (each.added_time or 0):10.1f} % {len(each.recomputed):8} "
                f"{len(each.copies):8}"
            )
        return "\n".join(lines)

    def plot(self, file: Any) -> None:
        """Draw memory against the predicted time.

        Parameters
        ----------
        file : str or path
            A picture of 1200 by 800 pixels where it ends in ``.png``; ``.svg`` and ``.pdf`` too.

        Raises
        ------
        MemongerError
            If matplotlib is not installed, or the file cannot be written.

        Examples
        --------
        >>> memonger.frontier(net, {'data': (32, 3, 224, 224)}).plot('frontier.png')
        """
        report.plot_frontier(
            file,
            [each.pool_bytes for each in self],
            [each.added_time or 0.0 for each in self],
            self[0].unplanned_bytes,
        )


def frontier(
    net: Any,
    shapes: Any = None,
    *,
    how: str = "marks",
    points: int = 20,
    measure: bool = False,
    patience: float = 1.0,
    type_dict: Mapping[str, Any] | None = None,
    grad_req: Any = "write",
    ctx: Any = None,
    ntrial: int = 6,
    until: str | None = None,
    devices: int = 1,
    kept_copies: bool = True,
    **input_shapes: Any,
) -> Frontier:
    """The plans that no other beats in both memory and time, from no plan to the smallest.

    Parameters
    ----------
    net : mx.sym.Symbol
    how : {'marks', 'schedule', 'auto'}
        Plans of which kind; 'auto': of both, by two searches.
    points : int
        The most plans that are returned; each is bound once. Where there are more, those are taken
        whose memory is nearest to equal steps between no plan and the smallest.
    shapes, measure, patience, type_dict, grad_req, ctx, ntrial, until, devices, kept_copies
        As for ``plan``.
    **input_shapes
        As for ``plan``.

    Returns
    -------
    Frontier
        A tuple of ``Plan``, the fastest first. Printed it is a table; ``plot`` draws it.

    Raises
    ------
    MemongerError
        If something about the network, the shapes or the call is wrong; it says what to do.
    KeyboardInterrupt
        If it is interrupted before anything was found; later, what was found so far is returned.

    Examples
    --------
    >>> plans = memonger.frontier(net, {'data': (32, 3, 224, 224)})
    >>> print(plans)
    """
    check_choice("way (how)", how, (*WAYS, EITHER))
    points = check_count("points", points, 2)
    ntrial = check_count("ntrial", ntrial, 1)
    _, patience = check_limits("marks", None, patience)
    request = read_request(net, shapes, input_shapes, type_dict, grad_req, ctx, until, devices)
    options = fastest.Options(ntrial, bool(kept_copies), patience, bool(measure))
    searches: dict[str, Callable[[], tuple[list[Candidate], bool]]] = {
        "marks": lambda: fastest.candidates(request, options),
        "schedule": lambda: scheduling.candidates(request, patience, ntrial, bool(measure)),
    }
    candidates: list[Candidate] = []
    interrupted = False
    for way in WAYS if how == EITHER else (how,):
        try:
            found, interrupted = searches[way]()
        except (MemongerError, KeyboardInterrupt) as error:  # a network that no schedule can hold
            if not candidates:
                raise
            log.info("no plans by how=%r: %s", way, error)
            interrupted, found = isinstance(error, KeyboardInterrupt), []
        candidates += found
        if interrupted:
            break
    candidates = _undominated(candidates)
    pools = [candidate.pool_bytes for candidate in candidates]
    solutions: list[tuple[Solution, Any]] = []
    for k in _spread(pools, points):
        try:
            solutions.append(candidates[k].confirmed(interrupted))
        except KeyboardInterrupt:
            if not solutions:
                raise
            interrupted = True
            break
    if interrupted:
        log.warning("interrupted: these are the plans that were found so far")
    for warning in dict.fromkeys(text for solution, _ in solutions for text in solution.warnings):
        log.warning(warning)
    plans = [
        plan_of(
            request,
            symbol,
            solution._replace(facts={**solution.facts, "interrupted": interrupted}),
        )
        for solution, symbol in solutions
    ]
    return Frontier(_undominated(plans))


def _undominated(plans: Sequence[P]) -> list[P]:
    """Those that no other beats in both memory and time, the fastest first."""
    best: list[P] = []
    for plan in sorted(plans, key=lambda plan: (plan.added_time or 0.0, plan.pool_bytes)):
        if not best or plan.pool_bytes < best[-1].pool_bytes:
            best.append(plan)
    return best


def _spread(pools: Sequence[int], points: int) -> list[int]:
    """The places of at most so many plans, nearest to equal steps from the first to the last."""
    if len(pools) <= points:
        return list(range(len(pools)))
    steps = np.linspace(pools[0], pools[-1], points)
    return sorted({int(np.abs(np.array(pools) - step).argmin()) for step in steps})
