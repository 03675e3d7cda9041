"""Search plans of marks for the least memory: simulated annealing of sets of cuts.

A set of cuts is a plan. The results that are alive at a cut are saved, everything between two cuts
is recomputed, and nothing after the last. There are two cuts at each place. One saves all results
alive there, the other saves the newest alone, so that others (skip connections of a U-Net) are
recomputed. The search has three steps:

1. The network gets saved identities (``identities``) at its cuts, behind operators that would keep
   their inputs in memory if they were saved themselves.
2. The walk of Chen et al. 2016, algorithm 3, with a budget between two cuts gives initial sets, for
   several budgets, and with sizes raised to several exponents.
3. Simulated annealing (``search.c``) starts from the best set of each exponent, in a thread each.

The rules are applied to each plan that the search visits, and its memory is exact. It is archived
if it is the fastest of its size. The result depends on the network and on the times of its
operators, but not on the number of cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Sequence

import numpy as np

from memonger.graph.forward import SavedIdentity
from memonger.planners.annealing import Archive, Cooling, empty_archive, empty_memo
from memonger.planners.candidates import MarkPlan, Point, by_memory
from memonger.planners.marks.cuts import Cut, walk_over
from memonger.planners.marks.identities import cuts_behind_identities
from memonger.planners.marks.rules import RuleArrays, Rules
from memonger.support.kernels import Struct, compiled
from memonger.support.parallel import Threads
from memonger.support.types import Bools, Doubles, Int8s, Int64s

#: Of the first annealing. Over the seeds 1 to 7 the pools of seven networks of the examples differ
#: by 0.4 to 5 % (largest over smallest); this one is at most 0.2 % over the median of each.
SEED = 1


class Space(Struct):
    """The plans that the search considers, and how a state encodes one."""

    rules: RuleArrays
    match_ranges: Int64s
    after: Int64s
    keep_start: Int64s
    keep: Int64s
    forced: Bools
    saved: Int64s
    identities: Int64s
    seconds: Doubles


class Phase(NamedTuple):
    """One annealing for least memory, of the smallest ``starts`` plans.

    The starts take the pairs of temperatures in turn, because the change of memory by a moved cut
    differs between networks.
    """

    starts: int
    part: float  # the share of all tries
    #: First and last temperatures, as shares of a plan's memory.
    heats: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MarkEffort:
    """The length of a search.

    Its phases share ``tries``, or fewer, so that at most ``nodes`` nodes are replayed; both times
    ``patience``. The cost of a replay for each node grows beyond ``large`` nodes.
    """

    patience: float = 1.0
    tries: int = 27_500
    nodes: int = 37_500_000
    large: int = 10_000
    cuts: int = 600
    exponents: tuple[float, ...] = (1.0, 0.5, 0.2)
    walks: int = 20  # for each exponent, with two segments up to as many as cuts
    phases: tuple[Phase, ...] = (
        Phase(3, 0.5, ((0.006, 0.0002), (0.002, 0.0001))),
        Phase(1, 0.5, ((0.003, 0.0001),)),
    )
    sizes: int = 200  # of the archive: plans of different memory

    def times(self, patience: float) -> MarkEffort:
        """Return the effort of a search that is ``patience`` times as long."""
        return replace(self, patience=patience * self.patience)


EFFORT = MarkEffort()


class MarkSearch:
    """The search of one network with saved identities.

    Parameters
    ----------
    plain : Rules
        The rules of the network without identities.
    seconds : array of float64, (nodes,)
        The times of its nodes. An identity takes nearly no time.
    cuts : sequence of Cut
        Its cuts.
    identities : tuple of SavedIdentity
        The identities to insert.
    threads : Threads
        The threads of the search.
    effort : MarkEffort
        The length of the search.
    """

    def __init__(
        self,
        plain: Rules,
        seconds: Doubles,
        cuts: Sequence[Cut],
        identities: tuple[SavedIdentity, ...],
        threads: Threads,
        effort: MarkEffort,
    ) -> None:
        self.threads, self.effort = threads, effort
        self.rules = rules = plain.with_identities(identities)
        self.insertion = insertion = self.rules.insertion
        self.cuts: list[Cut] = []
        whole, newest = [], []  # the indices of the two cuts of each place
        for cut in cuts_behind_identities(cuts, insertion):
            whole.append(len(self.cuts))
            self.cuts += [cut, cut._replace(entries=cut.entries[-1:])][: len(cut.entries)]
            newest.append(len(self.cuts) - 1)
        #: For each exponent the sets of cuts to start from, (cuts,) each.
        self.starts: list[list[Int8s]] = []
        for walks in walk_over(plain.graph, cuts, effort.exponents, effort.walks):
            starts: dict[bytes, Int8s] = {}
            for kind in (whole, newest):
                for chosen in walks:
                    start = np.zeros(len(self.cuts), dtype=np.int8)
                    start[[kind[k] for k in chosen]] = True
                    starts[start.tobytes()] = start
            self.starts.append([*starts.values()])
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
            insertion.saved,
            insertion.places,
            seconds_of_all,
        )
        unplanned = plain.plan_memory(np.zeros_like(plain.recomputable)).planned_bytes
        shape = (len(self.cuts),)
        self.archive = empty_archive(unplanned, effort.sizes, shape, np.int8)

    def minimise(self) -> Point[Int8s]:
        """Return the plan of least memory. Archive all plans that are visited, and its beginnings.

        A beginning has the first cuts of the plan, so that it takes less time and more memory.
        """
        least = [min(map(self._record, starts), key=by_memory) for starts in self.starts]
        states = sorted(least, key=by_memory)
        for phase in self.effort.phases:
            states = self._anneal(states[: phase.starts], phase)
        cuts = np.flatnonzero(states[0].state)
        for cut in cuts[1:]:  # nothing is recomputed after the last one
            beginning = states[0].state.copy()
            beginning[cut:] = False
            self._record(beginning)
        return states[0]

    def plan(self, state: Int8s) -> MarkPlan:
        """Return the plan of the network without identities that a state encodes."""
        mask: Bools = compiled.read_state(self.space, state)[0]
        return MarkPlan(mask[self.insertion.new_index], self.insertion.find_used(mask))

    def _record(self, state: Int8s) -> Point[Int8s]:
        """Compute the costs of a state, and archive it."""
        pool, seconds = compiled.evaluate_state(self.space, state)
        compiled.record(self.archive, pool, seconds, state)
        return Point(pool, seconds, state)

    def _anneal(self, starts: Sequence[Point[Int8s]], phase: Phase) -> list[Point[Int8s]]:
        """Anneal states, in a thread each; return the results, the smallest first."""
        tries = int(self.tries * phase.part) // len(starts)

        def work(k: int, done: Int64s) -> tuple[Int8s, Archive]:
            start, (hot, cold) = starts[k], phase.heats[k % len(phase.heats)]
            most_bytes, shape = self.archive.most_bytes, start.state.shape
            archive = empty_archive(most_bytes, self.effort.sizes, shape, np.int8)
            cooling = Cooling(SEED + k, tries, hot, cold, float(start.nbytes))
            to = empty_memo(), archive, self.threads.stop, done
            return compiled.anneal_masks(self.space, start.state, cooling, *to), archive

        annealed = self.threads.run(work, range(len(starts)), tries, phase.part)
        for _, archive in annealed:
            for point in archive.points():
                compiled.record(self.archive, point.nbytes, point.time, point.state)
        states = {state.tobytes(): self._record(state) for state, _ in annealed}
        return sorted(states.values(), key=by_memory)
