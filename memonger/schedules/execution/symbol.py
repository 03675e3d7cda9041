"""Training with a schedule: a Symbol that MXNet binds and trains as any other.

`ScheduledSymbol` is the user's network, with a schedule. Everything about it is the network's:
names, shapes, JSON, what is saved. Only when it is bound for training does it hand out an executor
of its own (``executor``).

MXNet knows nothing of a schedule, so what it makes of such a symbol is a plain one. Where that goes
through a method of the symbol, what is handed back remembers where it came from, and says so if it
is bound for training; looking at a network (as Module, ``mx.viz`` and others do) says nothing.
Where it becomes part of another symbol there is no later, and it is said at once. Either is logged
once for each network and place.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Mapping, Sequence

import numpy as np

from memonger.graph.inputs import InputSpec
from memonger.schedules.execution import arrays
from memonger.schedules.execution.arrays import Arrays
from memonger.schedules.execution.executor import ScheduledExecutor, of_memory
from memonger.schedules.execution.write import Recipe, spec_of
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


class ScheduledSymbol(Symbol):  # type: ignore[misc, valid-type]
    """A network with a schedule. It is used, saved and inspected as the network is.

    The schedule is kept by ``copy``, ``deepcopy``, ``pickle`` (and so by a pickled FeedForward),
    and by ``symbol[0]``, ``symbol['softmax_output']``, ``symbol[:]`` and loops over a network with
    one output.

    Bound without gradients it is MXNet's own executor; bound for training, a `ScheduledExecutor`,
    on one device (no ``group2ctx``), with dense arrays, and with the same results, bit for bit (but
    for ``grad_req`` 'add', see there). It may share arrays and memory with executors of other
    symbols, planned or not. Where gradient arrays are given (``bind``; FeedForward does), the
    memory of the gradients is taken twice: there, and in the pool.

    It is lost, and what comes of the network must be planned by itself, with

    * files: ``save``, ``tojson``, ``save_checkpoint``, ``do_checkpoint`` write the plain network,
      which any MXNet can load. ``mx.sym.load``, ``load_checkpoint``, ``Module.load`` and
      ``FeedForward.load`` return that; nothing is logged. To resume by a plan, plan again::

          symbol, arguments, states = mx.model.load_checkpoint('net', 3)
          symbol = memonger.plan(symbol, shapes, how='schedule').symbol
          module = mx.mod.Module(symbol)
          module.fit(data, arg_params=arguments, aux_params=states, begin_epoch=3, num_epoch=9)

    * parts of it: an output among several, ``get_internals``, ``get_children``, and with it
      composed anew: ``symbol(data=other)``, ``optimize_for``, ``get_backend_symbol``. A warning is
      logged if such a symbol is bound for training.
    * more than it: operators on top of it, arithmetic, ``mx.sym.Group``, ``as_np_ndarray``,
      ``mx.contrib.amp.convert_symbol``; and Gluon (``SymbolBlock``), which does not train by
      executors. A warning is logged at once.
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
        """Take a training step that is there already; see ``Recipe.remember``."""
        self._recipe.remember(self, step, requests, mkldnn)

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._without(super().__deepcopy__(None), "it was composed with other inputs")
        made._compose(*args, **kwargs)
        return made

    def _compose(self, *args: Any, **kwargs: Any) -> None:
        self._lost = self._lost or "it was composed with other inputs"
        super()._compose(*args, **kwargs)

    def get_internals(self) -> Any:
        """The network's internals, as a symbol without a schedule."""
        return self._without(super().get_internals(), "this is of its get_internals()")

    def get_children(self) -> Any:
        """What the outputs read, as a symbol without a schedule."""
        return self._without(super().get_children(), "this is of its get_children()")

    def optimize_for(self, backend: str, *args: Any, **kwargs: Any) -> Any:
        """The network for a backend, without a schedule."""
        made = super().optimize_for(backend, *args, **kwargs)
        return self._without(made, f"it was optimized for the backend {backend!r}")

    def get_backend_symbol(self, backend: str) -> Any:
        """The network for a backend, without a schedule."""
        made = super().get_backend_symbol(backend)
        return self._without(made, f"it was partitioned for the backend {backend!r}")

    def as_np_ndarray(self) -> Any:
        """The network as a symbol of NumPy's operators, without a schedule."""
        self._tell("it was converted with as_np_ndarray()")
        return super().as_np_ndarray()

    # ------------------------------------------------------------------ binding

    def _by_schedule(self, requests: Mapping[str, str]) -> bool:
        """Whether an executor with these requests runs the schedule."""
        if set(requests.values()) <= {"null"}:
            return False
        if self._lost is not None:
            self._tell(self._lost)
        return self._lost is None

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
        if not self._by_schedule(requests):
            usual = ctx, grad_req, type_dict, stype_dict, group2ctx, shared_arg_names
            return super().simple_bind(
                *usual, _sharer(requests, shared_exec), shared_buffer, **kwargs
            )
        arrays.refuse_groups(group2ctx)
        arrays.refuse_sparse(stype_dict or {})
        inputs = {*self.list_arguments(), *self.list_auxiliary_states()}
        given = {k: tuple(v) for k, v in kwargs.items() if isinstance(v, (tuple, list))}
        types = {k: np.dtype(v).name for k, v in (type_dict or {}).items() if k in inputs}
        spec = InputSpec({k: v for k, v in given.items() if k in inputs}, types)
        tensors, auxiliary = self._recipe.tensors(self, spec)
        buffer: Arrays = {} if shared_buffer is None else shared_buffer
        # MXNet shares by a buffer only.
        sharer = shared_exec if shared_buffer is not None else None
        sharing = set(shared_arg_names or ()) if sharer is not None else set()
        args = {
            name: arrays.shared(shared_exec.arg_dict, name, tensor, ctx)
            if name in sharing
            else arrays.buffered(buffer, name, tensor, ctx)
            for name, tensor in tensors.items()
        }
        grads = {  # what gradients are added to is the same for all that share
            name: arrays.shared(shared_exec.grad_dict, name, tensors[name], ctx)
            for name, request in requests.items()
            if request == "add" and name in sharing
        }
        states = {} if sharer is None else sharer.aux_dict
        aux = {n: arrays.shared(states, n, tensor, ctx) for n, tensor in auxiliary.items()}
        return ScheduledExecutor(self, self._recipe, ctx, args, grads, requests, aux, shared_exec)

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
        if not self._by_schedule(requests):
            sharing = _sharer(requests, shared_exec)
            return super().bind(ctx, args, args_grad, grad_req, aux_states, group2ctx, sharing)
        arrays.refuse_groups(group2ctx)
        given = arrays.by_name(args, names, "argument")
        aux = arrays.by_name(aux_states, self.list_auxiliary_states(), "auxiliary state")
        for name, array in grads.items():
            if isinstance(shared_exec, ScheduledExecutor) and shared_exec.holds(array):
                raise MemongerError(
                    f"bind: the array for the gradient of {name!r} lies in the memory that is "
                    "shared with shared_exec; give it one of its own"
                )
        arrays.refuse_sparse({n: a.stype for n, a in [*given.items(), *grads.items()]})
        self._recipe.tensors(self, spec_of({n: arrays.tensor_of(a) for n, a in given.items()}))
        return ScheduledExecutor(self, self._recipe, ctx, given, grads, requests, aux, shared_exec)


def scheduled(symbol: Any, schedule: Schedule) -> ScheduledSymbol:
    """Copy a network without marks so that it trains by a schedule (nodes of its ForwardGraph)."""
    return _taking(symbol.__copy__(), Recipe(schedule))


def _sharer(requests: Mapping[str, str], shared_exec: Any) -> Any:
    """Choose what MXNet's own executor shares with: without gradients it shares memory alone."""
    return of_memory(shared_exec) if set(requests.values()) <= {"null"} else shared_exec


def _taking(symbol: Any, recipe: Recipe, lost: str | None = None) -> ScheduledSymbol:
    """Make a ScheduledSymbol that takes a symbol's place: the handle is its from now on."""
    made = ScheduledSymbol(symbol.handle, recipe, lost)
    symbol.handle = mx.base.SymbolHandle()
    return made


def _unpickled(text: str, events: np.ndarray, lost: str | None) -> ScheduledSymbol:
    return _taking(mx.sym.load_json(text), Recipe(Schedule(events)), lost)
