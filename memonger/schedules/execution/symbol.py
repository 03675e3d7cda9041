"""Training with a schedule: a Symbol that MXNet binds and trains as any other.

MXNet knows nothing of a schedule, so what it makes of such a symbol is a plain one. Where that goes
through a method of the symbol, what is handed back remembers where it came from, and says so if it
is bound for training; looking at a network (as Module, ``mx.viz`` and others do) says nothing.
Where it becomes part of another symbol there is no later, and it is said at once. Either is logged
once for each network and place.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any, Mapping, Sequence

import numpy as np

from memonger.graph.inputs import InputSpec
from memonger.graph.read import forward_graph
from memonger.schedules.execution import arrays
from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.execution.executor import ScheduledExecutor, of_memory
from memonger.schedules.execution.write import Recipe
from memonger.schedules.schedule import Schedule
from memonger.schedules.training_step import TrainingStep
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx

log = logging.getLogger("memonger")

Symbol = mx.sym.Symbol
_SLOT = mx.symbol._internal.SymbolBase.handle  # where MXNet keeps the handle of a symbol

#: The files of MXNet that read the handle of a symbol to make something else of it.
LOSING = {
    os.path.join(os.path.dirname(mx.__file__), *path.split("/")): place
    for path, place in {
        # c_handle_array, which hands symbols to MXNet as inputs of an operator or of a Group
        "base.py": "it has become part of another symbol (an operator on top of it, mx.sym.Group)",
        "_ctypes/ndarray.py": "Gluon (SymbolBlock) runs it without one",  # CachedOp
        "contrib/amp/amp.py": "it was converted by mx.contrib.amp",
    }.items()
}


def _losing(method: str, place: str) -> Any:
    """Make a method of a symbol whose result has no schedule; ``place`` says where it was lost."""

    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._without(getattr(Symbol, method)(self, *args, **kwargs), place)

    return functools.wraps(getattr(Symbol, method))(made)


class ScheduledSymbol(Symbol):  # type: ignore[misc, valid-type]
    """A network with a schedule. It is used, saved and inspected as the network is.

    Bound without gradients it is MXNet's own executor; bound for training, a `ScheduledExecutor`,
    on one device, with dense arrays and the same results. It may share arrays and memory with
    executors of other symbols, planned or not. Where gradient arrays are given (``bind``;
    FeedForward does), the memory of the gradients is taken twice: there, and in the pool.

    The schedule is kept by ``copy``, ``deepcopy``, ``pickle``, and of a network with one output by
    its index, name, slice and loop. It is lost, and must be planned anew, with

    * files: what is saved is the plain network, which any MXNet can load; nothing is logged.
    * parts of it: an output among several, ``get_internals``, ``get_children``; and with it
      composed anew: ``symbol(data=other)``, ``optimize_for``, ``get_backend_symbol``. A warning is
      logged if such a symbol is bound for training.
    * more than it: operators on top of it, arithmetic, ``mx.sym.Group``, ``as_np_ndarray``,
      ``mx.contrib.amp.convert_symbol``; and Gluon (``SymbolBlock``). A warning is logged at once.
    """

    def __init__(self, handle: Any, recipe: Recipe, lost: str | None = None) -> None:
        super().__init__(handle)
        self._recipe = recipe
        self._lost = lost

    @property
    def handle(self) -> Any:
        """MXNet's symbol; reading it from where the schedule is lost is told."""
        place = LOSING.get(sys._getframe(1).f_code.co_filename)
        if place is not None:
            self._tell(place)
        return _SLOT.__get__(self)

    @handle.setter
    def handle(self, value: Any) -> None:
        _SLOT.__set__(self, value)

    @property
    def schedule(self) -> Schedule | None:
        """What a training step runs; None if this was made of a network with a schedule."""
        return self._recipe.schedule if self._lost is None else None

    def remember(self, step: TrainingStep, requests: Mapping[str, str], mkldnn: bool) -> None:
        """Take a training step that is there already; see ``Recipe.step``."""
        self._recipe.step(self, step.graph, requests, mkldnn, step)

    def _tell(self, place: str) -> None:
        if place not in self._recipe.told:
            self._recipe.told.add(place)
            log.warning(
                "the schedule of network %r is lost: %s; to train the new symbol by a schedule, "
                "plan it",
                self.name or ", ".join(self.list_outputs()),
                place,
            )

    # ------------------------------------------------------------------ what is made of it

    def _without(self, symbol: Any, place: str) -> Any:
        """A symbol that MXNet has made of this one."""
        if symbol is None:
            return None
        return _taking(symbol, self._recipe, self._lost or place)

    def __deepcopy__(self, memo: Any) -> ScheduledSymbol:  # __copy__ calls it too
        return _taking(super().__deepcopy__(memo), self._recipe, self._lost)

    def __reduce__(self) -> Any:
        events = self._recipe.schedule.events
        return _unpickled, (self.tojson(remove_amp_cast=False), events, self._lost)

    def __getitem__(self, index: Any) -> Any:
        names = self.list_outputs()
        if isinstance(index, slice):
            chosen = list(range(len(names)))[index]
            if chosen == list(range(len(names))):
                return self.__copy__()
            parts = [super(ScheduledSymbol, self).__getitem__(k) for k in chosen]
            return self._without(mx.sym.Group(parts), "outputs were taken from it")
        if len(names) == 1 and (index == names[0] or (index == 0 and isinstance(index, int))):
            return self.__copy__()
        return self._without(super().__getitem__(index), "an output was taken from it")

    def _compose(self, *args: Any, **kwargs: Any) -> None:
        self._lost = self._lost or "it was composed with other inputs"
        super()._compose(*args, **kwargs)

    get_internals = _losing("get_internals", "this is of its get_internals()")
    get_children = _losing("get_children", "this is of its get_children()")
    optimize_for = _losing("optimize_for", "it was optimized for a backend")
    get_backend_symbol = _losing("get_backend_symbol", "it was partitioned for a backend")

    def as_np_ndarray(self) -> Any:
        """The network as a symbol of NumPy's operators, without a schedule."""
        self._tell("it was converted with as_np_ndarray()")
        return super().as_np_ndarray()

    # ------------------------------------------------------------------ binding

    def _by_schedule(self, requests: Mapping[str, str], group2ctx: Any) -> bool:
        """Whether an executor with these requests runs the schedule, on one device."""
        if set(requests.values()) <= {"null"}:
            return False
        if self._lost is not None:
            self._tell(self._lost)
            return False
        if any(group2ctx if isinstance(group2ctx, (list, tuple)) else [group2ctx]):
            raise MemongerError(
                "a schedule runs on one device, so its network cannot be split with group2ctx; "
                "leave it out, or plan with marks"
            )
        return True

    def simple_bind(
        self,
        ctx: Any,
        grad_req: Any = "write",
        type_dict: Mapping[str, Any] | None = None,
        stype_dict: Mapping[str, str] | None = None,
        group2ctx: Any = None,
        shared_arg_names: Sequence[str] | None = None,
        shared_exec: Any = None,
        shared_buffer: Arrays | None = None,
        **kwargs: Any,
    ) -> Any:
        """Bind with arrays made for it; as ``mx.sym.Symbol.simple_bind``."""
        requests = arrays.requests_of(self.list_arguments(), grad_req)
        if not self._by_schedule(requests, group2ctx):
            usual = ctx, grad_req, type_dict, stype_dict, group2ctx, shared_arg_names
            return super().simple_bind(
                *usual, _sharer(requests, shared_exec), shared_buffer, **kwargs
            )
        arrays.refuse_sparse(stype_dict or {})
        inputs = {*self.list_arguments(), *self.list_auxiliary_states()}
        given = {k: v for k, v in kwargs.items() if k in inputs and isinstance(v, (tuple, list))}
        types = {k: np.dtype(v).name for k, v in (type_dict or {}).items() if k in inputs}
        graph = forward_graph(self, InputSpec({k: tuple(v) for k, v in given.items()}, types))
        tensors, auxiliary = arrays.tensors_of(graph)
        buffer: Arrays = {} if shared_buffer is None else shared_buffer
        args, grads, states = {}, {}, {}
        if shared_exec is not None and shared_buffer is not None:  # MXNet shares by a buffer only
            states = shared_exec.aux_dict
            for name in tensors.keys() & set(shared_arg_names or ()):
                args[name] = arrays.fitted(shared_exec.arg_dict.get(name), tensors[name], ctx)
                if requests[name] == "add":  # to what is the same for all that share
                    grads[name] = arrays.fitted(shared_exec.grad_dict.get(name), tensors[name], ctx)
        for name in tensors.keys() - args.keys():
            args[name] = arrays.buffered(buffer, name, tensors[name], ctx)
        aux = {name: arrays.fitted(states.get(name), each, ctx) for name, each in auxiliary.items()}
        about = self, self._recipe, ctx, graph
        return ScheduledExecutor(*about, args, grads, requests, aux, shared_exec)

    def bind(
        self,
        ctx: Any,
        args: Any,
        args_grad: Any = None,
        grad_req: Any = "write",
        aux_states: Any = None,
        group2ctx: Any = None,
        shared_exec: Any = None,
    ) -> Any:
        """Bind to arrays that are given; as ``mx.sym.Symbol.bind``."""
        names = self.list_arguments()
        grads = arrays.by_name(args_grad, names)
        requests = arrays.requests_of(names, grad_req)
        requests = {n: r if n in grads else "null" for n, r in requests.items()}
        if not self._by_schedule(requests, group2ctx):
            sharing = _sharer(requests, shared_exec)
            return super().bind(ctx, args, args_grad, grad_req, aux_states, group2ctx, sharing)
        given = arrays.by_name(args, names, "argument")
        aux = arrays.by_name(aux_states, self.list_auxiliary_states(), "auxiliary state")
        arrays.refuse_sparse({n: a.stype for n, a in [*given.items(), *grads.items()]})
        _refuse_places(grads, requests, shared_exec)
        types = {n: arrays.type_of(a) for n, a in given.items()}
        graph = forward_graph(self, InputSpec({n: a.shape for n, a in given.items()}, types))
        about = self, self._recipe, ctx, graph
        return ScheduledExecutor(*about, given, grads, requests, aux, shared_exec)


def scheduled(symbol: Any, schedule: Schedule) -> ScheduledSymbol:
    """Copy a network without marks so that it trains by a schedule (nodes of its ForwardGraph)."""
    return _taking(symbol.__copy__(), Recipe(schedule))


def _sharer(requests: Mapping[str, str], shared_exec: Any) -> Any:
    """Choose what MXNet's own executor shares with: without gradients it shares memory alone."""
    return of_memory(shared_exec) if set(requests.values()) <= {"null"} else shared_exec


def _refuse_places(grads: Arrays, requests: Mapping[str, str], shared_exec: Any) -> None:
    """Refuse arrays for gradients where others are, for each is written by itself."""
    lent = shared_exec.own.values() if isinstance(shared_exec, ScheduledExecutor) else ()
    pool = set(map(arrays.address, lent))
    added: dict[int, str] = {}
    for name, array in grads.items():
        if pool and arrays.address(array) in pool:
            raise MemongerError(
                f"bind: the array for the gradient of {name!r} lies in the memory that is shared "
                "with shared_exec; give it one of its own"
            )
        other = added.setdefault(arrays.address(array), name) if requests[name] == "add" else name
        if other != name:
            raise MemongerError(
                f"the gradients of {other!r} and {name!r} are added to one array, and a schedule "
                "copies back each sum by itself; give each an array of its own, or plan with "
                "how='marks'"
            )


def _taking(symbol: Any, recipe: Recipe, lost: str | None = None) -> ScheduledSymbol:
    """Make a ScheduledSymbol that takes a symbol's place: the handle is its from now on."""
    made = ScheduledSymbol(symbol.handle, recipe, lost)
    symbol.handle = mx.base.SymbolHandle()
    return made


def _unpickled(text: str, events: np.ndarray, lost: str | None) -> ScheduledSymbol:
    return _taking(mx.sym.load_json(text), Recipe(Schedule(events)), lost)
