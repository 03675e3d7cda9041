"""The parameters that several public calls share, told once and filled into their docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

PARAMETERS = """
net : mx.sym.Symbol
    The network. Marks (``mirror_stage``) are used if there are any, and not needed.
sym : mx.sym.Symbol
    The network.
shapes : dict or list of mx.io.DataDesc
    Shapes of the inputs: ``{'data': (32, 3, 224, 224)}``, or ``iterator.provide_data +
    iterator.provide_label``. They may be given as keywords too.
how : {'marks', 'schedule', 'auto'}
    'marks': each result is recomputed at most once, by marks that MXNet's executor reads.
    'schedule': as often as it pays; the training step is written out when the symbol is bound.
    'auto', with a budget: both are searched, and the plan that is predicted to be faster is taken.
work : float, optional
    The most forward work of a training step, in forward passes: 2.0 allows one pass more. Marks
    take at most 2; schedules by default at most 2 log2(n) for n operators, as for O(log n) memory.
budget : int, str or float, optional
    The memory that may be taken: the plan is then the fastest that fits. Bytes (an int), text
    ('6GB', '6GiB', '800MB'), a share of the memory without a plan ('60%', or a float in (0, 1]), or
    'device': what is free on the GPU ``ctx``.
budget_of : {'pool', 'device'}, optional
    What the budget bounds: ``pool_bytes`` (the default), or all that the GPU holds:
    ``device_bytes`` and the optimiser's state; not what cuDNN and CUDA take for themselves.
optimizer : str, (str, dict) or mx.optimizer.Optimizer, optional
    Whose state counts with ``budget_of='device'``: 'adam', or ``('sgd', {'momentum': 0.9})``.
measure : bool
    For a budget: time each operator on the device, once, instead of predicting it from its FLOPs.
patience : float, optional
    Times the usual length of the search, for smaller plans. By default a network that takes less
    than 16 MB without a plan gets a twentieth of it (0.05), and the log says so; others 1.
type_dict : dict, optional
    Types of inputs by name, as ``simple_bind`` takes it; float32 where nothing is told.
grad_req : str, list or dict
    'write', 'add' or 'null' as ``simple_bind`` takes it. The plan is right for others too; its
    memory is told with these. ``Module`` asks for none of its data and labels ('null').
ctx : mx.Context or {'cpu', 'gpu', 'any'}, optional
    Where the network is trained: by default 'gpu' if MXNet is built with CUDA, and otherwise 'any'.
    For a GPU, memory is told with pointwise fusion (``MXNET_USE_FUSION``) as it is set, and what is
    kept costs nothing more with it; on a CPU such a plan may round differently from the network
    without it. A plan for 'any' device is right on both. One for 'cpu' leaves cuDNN's BatchNorm on,
    and does not hold for a GPU. With 'gpu' nothing is bound on a GPU; operators are timed on one,
    for a budget, if one is there. ``mx.gpu(0)`` must be there, and MXNet binds the plan on it.
planner : {'smallest', 'chen2016'}
    'smallest' searches for the least memory, and takes nothing worse than the original's plan with
    the rules or than none; 'chen2016' is the original algorithm, on the marks of the network.
ntrial : int
    Thresholds that the original's search tries beyond its first three.
until : str, optional
    The name of a layer, or of its output (``'conv1_output'``). It and what follows is kept. A part
    of a name, or a pattern (``'stage3_*_plus'``), is the first layer that it fits; '' is none.
devices : int
    Among how many ``Module`` will split the batch; plan and memory are of the largest share.
kept_copies : bool
    Whether identities (named ``*_keep``) may be inserted to keep results without their inputs.
rules : bool
    False gives the bare plan, without the rules that keep it right on every device.
**input_shapes
    Shapes of inputs by name, the batch first: ``data=(32, 3, 224, 224)``.
file : str or path
    A picture of 1200 by 800 pixels where it ends in ``.png``; ``.svg`` and ``.pdf`` too. A report
    is one HTML file.
others : iterable of Plan, optional
    More plans of the same network at the same shapes, to be shown beside: those of a `frontier`.
network : str
    The name of the network's file, for the commands that are shown.
"""

#: What calls with these parameters raise, but for an exception that they tell of themselves.
RAISES = {
    ("file",): """MemongerError
    If matplotlib (plotly for a report) is not installed, or the file cannot be written.
""",
    ("shapes",): """MemongerError
    If something about the network, the shapes or the call is wrong; it says what to do.
""",
    ("budget", "patience"): """BudgetError
    If nothing that was found fits the budget; it tells the least memory that was found.
""",
    ("patience",): """KeyboardInterrupt
    If it is interrupted before anything was found; later, the best so far is returned.
""",
}


def documented(function: F) -> F:
    """Complete the docstring of a public call: shared parameters, what is returned and raised."""
    first, *parts = re.split(r"^(\w+)\n-+\n", inspect.cleandoc(function.__doc__ or ""), flags=re.M)
    sections = dict(zip(parts[::2], parts[1::2]))
    told = {**_entries(PARAMETERS), **_entries(sections.pop("Parameters", ""))}
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    raises = sections.pop("Raises", "")
    for given, error in RAISES.items():
        raises += error if {*given} <= {*names} and error.split()[0] not in raises else ""
    parameters = "".join(told[name] for name in names)
    returns = sections.pop("Returns", function.__annotations__["return"])
    whole = {"Parameters": parameters, "Returns": returns, "Raises": raises}
    function.__doc__ = first.rstrip()
    for title, body in {**whole, **sections}.items():
        if body not in ("", "None"):
            function.__doc__ += f"\n\n{title}\n{'-' * len(title)}\n{body.rstrip()}"
    return function


def _entries(section: str) -> dict[str, str]:
    """Split a section into its entries, by the name that each is of."""
    entries = re.finditer(r"^\*{0,2}(\w+).*\n(?:(?: .*)?\n)*", section.rstrip() + "\n", re.M)
    return {entry[1]: entry[0].rstrip() + "\n" for entry in entries}
