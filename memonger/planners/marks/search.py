"""The search for marks: sets of cuts, annealed for the least memory.

A set of cuts is a plan: what is alive at a cut is saved, everything between is recomputed, what
comes after the last cut is not. At each place there are two cuts: one saves all that is alive
there, the other its newest result alone, so that others (skip connections of a U-Net) are
recomputed all the same. The search:

1. Where the network may be cut it gets saved identities (``identities``) of operators that would
   hold what they were computed from if they were saved themselves.
2. It starts from the original's walk with a budget between two cuts (Chen et al. 2016, algorithm
   3), for several budgets, with sizes raised to several exponents.
3. Simulated annealing (``search.c``) of the best for each exponent, a thread each.

Every plan that is visited obeys the rules, is replayed to the byte, and is archived if it is the
fastest of its size. The result depends on the network and the times of its operators alone, not on
the machine's cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import SavedIdentity
from memonger.planners.annealing import Archive, Cooling, empty_archive, empty_memo
from memonger.planners.candidates import Candidate, MarkPlan, by_memory
from memonger.planners.marks.cuts import Cut, walk_over
from memonger.planners.marks.identities import cuts_behind_identities
from memonger.planners.marks.rules import RuleArrays, Rules
from memonger.support.kernels import Struct, compiled
from memonger.support.parallel import Threads
from memonger.support.types import Bools, Doubles, Int8s, Int64s

SEED = 73  # of the first annealing


class Space(Struct):
    """The plans that are searched, and what a state of the search is."""

    rules: RuleArrays


class Phase(NamedTuple):
    """One annealing for least memory, of the smallest ``starts`` plans.

    The temperatures are taken in turn, for networks differ in what moving a cut changes.
    """

    starts: int
    part: float  # of all tries
    heats: tuple[tuple[float, float], ...]  # first and last temperature, by a plan's memory


@dataclass(frozen=True)
class Effort:
    """How long the search is.

    Its phases share ``tries``, or so many that ``nodes`` are replayed, times ``patience``. Beyond
    ``large`` nodes a replay is slower by the node.
    """

    patience: float = 1.0
    tries: int = 55_000
    nodes: int = 75_000_000
    large: int = 10_000
    cuts: int = 600
    exponents: tuple[float, ...] = (1.0, 0.5, 0.2)
    walks: int = 20  # for each exponent: numbers of segments from two to that of the cuts
    phases: tuple[Phase, ...] = (
        Phase(3, 0.4, ((0.006, 0.0002), (0.002, 0.0001))),
        Phase(2, 0.6, ((0.003, 0.0001),)),
    )
    sizes: int = 200  # of plans in the archive

    def times(self, patience: float) -> Effort:
        """Return the effort of a search that is so many times as long."""
        return replace(self, patience=patience * self.patience)


EFFORT = Effort()


class MarkSearch:
    """The search of one network with some saved identities.

    ``plain`` and ``cuts`` are of the network without any, and so are the ``seconds`` that its nodes
    take: saved identities take next to none.
    """

    def __init__(
        self,
        plain: Rules,
        seconds: Doubles,
        cuts: Sequence[Cut],
        identities: tuple[SavedIdentity, ...],
        threads: Threads,
        effort: Effort,
    ) -> None:
        self.threads, self.effort = threads, effort
        self.rules = rules = plain.with_identities(identities)
        self.insertion = insertion = self.rules.insertion
        self.cuts: list[Cut] = []
        whole, newest = [], []  # the two cuts of each place, by index
        for cut in cuts_behind_identities(cuts, insertion):
            whole.append(len(self.cuts))
            self.cuts += [cut, cut._replace(entries=cut.entries[-1:])][: len(cut.entries)]
            newest.append(len(self.cuts) - 1)
        #: For each exponent the sets of cuts to start from.
        self.starts = [
            [
                np.isin(np.arange(len(self.cuts)), np.array(kind)[chosen]).astype(np.int8)
                for kind in (whole, newest)
                for chosen in walk_over(plain.graph, cuts, exponent, effort.walks)
            ]
            for exponent in effort.exponents
        ]
        count = insertion.node_count
        seconds_of_all = np.zeros(count)
        seconds_of_all[insertion.new_index] = seconds
        tries = min(effort.tries, effort.nodes / count * min(1, effort.large / count))
        self.tries = int(effort.patience * tries / self.rules.slowness)
        self.space = Space(
            rules.arrays[0],
            np.array(rules.trainings[0].settings.match_ranges),
            np.array([cut.after for cut in self.cuts], dtype=np.int64),
            np.cumsum([0] + [len(cut.keep) for cut in self.cuts]),
            np.array([i for cut in self.cuts for i in cut.keep], dtype=np.int64),
            rules.forced,
            np.array([insertion.new_index[k.node] for k in identities], dtype=np.int64),
            np.array([insertion.index_of(k) for k in identities], dtype=np.int64),
            seconds_of_all,
        )
        unplanned = plain.plan_memory(np.zeros_like(plain.allowed)).pool_bytes
        shape = (len(self.cuts),)
        self.archive = empty_archive(unplanned, effort.sizes, shape, np.int8)

    def minimise(self) -> Candidate:
        """Find the plan of least memory; archive what is visited, and the beginnings of it."""
        least = [min(map(self._record, starts), key=by_memory) for starts in self.starts]
        states = sorted(least, key=by_memory)
        for phase in self.effort.phases:
            states = self._anneal(states[: phase.starts], phase)
        cuts = np.flatnonzero(states[0].recipe)
        for cut in cuts[1:]:  # nothing is recomputed after the last one
            beginning = states[0].recipe.copy()
            beginning[cut:] = False
            self._record(beginning)
        return states[0]

    def plans(self) -> list[Candidate]:
        """List the archived plans, with their cost while no saved identity is taken out."""
        return [replace(state, recipe=self.plan(state)) for state in self.archive.candidates()]

    def plan(self, state: Candidate) -> MarkPlan:
        """Make the plan of the plain network that a state is."""
        mask: Bools = compiled.read_state(self.space, state.recipe)[0]
        return MarkPlan(mask[self.insertion.new_index], self.insertion.find_used(mask))

    def _record(self, state: Int8s) -> Candidate:
        """Evaluate and archive a state."""
        pool, seconds = compiled.evaluate_state(self.space, state)
        compiled.record(self.archive, pool, seconds, state)
        return Candidate(pool, seconds, state)

    def _anneal(self, starts: Sequence[Candidate], phase: Phase) -> list[Candidate]:
        """Anneal states, a thread each; return what came of it, the smallest first."""
        tries = int(self.tries * phase.part) // len(starts)

        def work(k: int, done: Int64s) -> tuple[Int8s, Archive]:
            start, (hot, cold) = starts[k], phase.heats[k % len(phase.heats)]
            most_bytes, shape = self.archive.most_bytes, start.recipe.shape
            archive = empty_archive(most_bytes, self.effort.sizes, shape, np.int8)
            cooling = Cooling(SEED + k, tries, hot, cold, float(start.pool_bytes))
            to = empty_memo(), archive, self.threads.stop, done
            return compiled.anneal_masks(self.space, start.recipe, cooling, *to), archive

        annealed = self.threads.run(work, range(len(starts)), tries, phase.part)
        for _, archive in annealed:
            for plan in archive.candidates():
                compiled.record(self.archive, plan.pool_bytes, plan.time, plan.recipe)
        states = {state.tobytes(): self._record(state) for state, _ in annealed}
        return sorted(states.values(), key=by_memory)
