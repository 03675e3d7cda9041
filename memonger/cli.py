"""The command ``memonger``, for scripts, and for networks that are in a ``-symbol.json`` file.

Every verb but ``run`` is a public function of the package. The exit status is 0 where all is well,
1 where the answer is no (``check`` finds a difference, nothing fits the budget), 2 for a mistake;
one line on stderr tells which. What a search has found is printed where it cannot be written too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
from typing import Any, Callable, Sequence

# Nothing here imports MXNet, which takes seconds, before a verb is carried out.
import memonger
from memonger import BudgetError, MemongerError
from memonger.support import files
from memonger.support.errors import INTERRUPTED, MISTAKE, in_words, said_by_mxnet

log = logging.getLogger("memonger")

OK, NO = 0, 1
UNSAVED = "a schedule cannot be saved for MXNet; leave out --output, or plan with --how marks"


def main(arguments: Sequence[str] | None = None, begin: Callable[[], object] = lambda: None) -> int:
    """Run the command with these arguments, by default those of the process; return its status.

    ``begin`` is called when all is imported: what runs then ends well at a KeyboardInterrupt.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.verb == "run":
        return _run(options, begin)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names need not be of the terminal's letters
            stream.reconfigure(errors="backslashreplace")
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(format="memonger: %(message)s", level=level)
    status = MISTAKE
    try:
        _check_places(options)
        network = memonger.load(options.network)
        memonger.frontier  # noqa: B018  imports all that a verb needs
        begin()
        status = options.run(network, options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has seen enough, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except MemongerError as error:
        text, status = str(error), NO if isinstance(error, BudgetError) else MISTAKE
    except MemoryError as error:
        text = f"this machine has not memory enough: {error}"
    except KeyboardInterrupt:
        text = INTERRUPTED
    except Exception as error:
        if type(error).__name__ != "MXNetError":
            raise
        text = "MXNet says: " + said_by_mxnet(error)
    sys.stdout.flush()
    print("memonger: " + " ".join(text.split()), file=sys.stderr)
    return status


def _run(options: argparse.Namespace, begin: Callable[[], object]) -> int:
    """Run a script that trains, with plans for all that it binds; it needs no change."""
    from memonger.scripts.run import prepare

    given = {name: getattr(options, name, None) for name in ENABLING}
    given["cache"] = not given.pop("no_cache")
    try:
        start = prepare(options.script, options.arguments, options.module, given)
    except MemongerError as error:
        print(f"memonger: {error}", file=sys.stderr)
        return MISTAKE
    begin()
    start()
    return OK


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; options of ``run`` may be told by variables too: MEMONGER_BUDGET."""
    verb, *others = [*arguments] or [""]
    if verb == "run":
        for option in ENABLING:
            flag, value = _flags(option)[-1], os.environ.get(f"MEMONGER_{option.upper()}", "")
            if OPTIONS[option][0] is bool:
                others[:0] = [flag] if value not in ("", "0") else []
            else:
                others[:0] = [f"{flag}={value}"] if value else []
    return _parser().parse_args([verb, *others] if arguments else arguments)


def _check_places(options: argparse.Namespace) -> None:
    """Check that all can be written, before a long search is begun for it."""
    if options.output is not None:
        files.check_writable(options.output)
    if options.plot is not None:
        from memonger.api.plot import check_picture

        check_picture(options.plot)
    page = options.output if options.run is _report else options.report
    if page is not None:
        from memonger.api.report import check_report

        check_report(page)
    for name in ("plot", "report"):
        file = getattr(options, name)
        if file is not None and os.path.realpath(file) == os.path.realpath(options.output or ""):
            raise MemongerError(f"--output and --{name} are the same file, {file!r}")


def _plan(network: Any, options: argparse.Namespace) -> int:
    """Plan a network and save it; plain MXNet loads and trains it."""
    given, report = _given(options), None
    if given.get("how") == "schedule" and options.output:
        raise MemongerError(UNSAVED)
    plan = _timed(memonger.plan(network, **given), given)
    try:
        if options.check:
            spec, ctx = plan.request.spec, plan.request.ctx  # of the share of one device
            about = {"type_dict": spec.types, "ctx": ctx}
            report = memonger.check(network, plan.symbol, spec.shapes, **about)
    except KeyboardInterrupt:
        raise MemongerError("interrupted before the plan was checked") from None
    finally:
        text, data = str(plan), _as_data(plan)
        if report is not None:
            text, data["check"] = f"{plan}\n{'check':10} {report}", _as_data(report)
        _tell(options, text, plan, data)
    return OK if report is None or report else NO


def _timed(plan: Any, given: Any) -> Any:
    """Predict the time that a plan adds, where that is not known; without it if it cannot be."""
    try:
        time = plan.predict_time(given.get("measure", False))
        return dataclasses.replace(plan, added_time=time)
    except (MemongerError, KeyboardInterrupt) as error:  # the plan is known all the same
        log.warning("the time that the plan adds cannot be predicted: %s", error or "interrupted")
        return plan


def _frontier(network: Any, options: argparse.Namespace) -> int:
    """Tell the plans that no other beats in memory and time."""
    plans = memonger.frontier(network, **_given(options))
    return _tell(options, plans, plans)


def _report(network: Any, options: argparse.Namespace) -> int:
    """Write an HTML page of a plan, beside the plans that no other beats."""
    given = _given(options)
    asked = {k: v for k, v in given.items() if k != "points"}
    searched = {k: v for k, v in given.items() if k not in ("work", *LIMIT)}
    plans = memonger.frontier(network, **searched)
    if given.get("how") == "auto" and "budget" not in given:
        plan, others = plans[-1], [*plans]
    else:
        plan, others = _timed(memonger.plan(network, **asked), given), [*plans]
    if "mirror_stage" in network.tojson():  # the original's planner has something to go by
        bare = {k: v for k, v in searched.items() if k not in ("how", "points")}
        others.append(memonger.plan(network, planner="chen2016", **bare))
    limit = {k: v for k, v in given.items() if k in LIMIT}
    try:
        plan.report(options.output, others=others, network=options.network, **limit)
    finally:
        print(json.dumps(_as_data(plan), indent=2) if options.json else plan)
    return OK


def _batch(network: Any, options: argparse.Namespace) -> int:
    """Tell the largest batch that fits, with a plan and without."""
    found = memonger.largest_batch(network, **_given(options))
    try:
        if options.report is not None:
            found.report(options.report, network=options.network)
    finally:
        _tell(options, found, found.plan)
    return OK


def _cost(network: Any, options: argparse.Namespace) -> int:
    """Tell the memory that a network takes in training as it is."""
    found = memonger.explain(network, **_given(options))
    pool, peak, exact = found.pool_bytes, found.peak_bytes, not found.inexact
    text = f"pool     {in_words(pool)}{'' if exact else ', bound, in whole MB'}\n"
    text += f"peak     {in_words(peak)} alive at once, in {found.peak}"
    figures = {"pool_bytes": pool, "peak_bytes": peak, "exact": exact}
    return _tell(options, text if found.tensors or pool else found, data=figures)


def _explain(network: Any, options: argparse.Namespace) -> int:
    """Tell what makes up the memory of a network, or of a plan."""
    if options.plan:
        return _tell(options, memonger.plan(network, **_given(options)).explain())
    for name in PLANNING:
        if name in vars(options):
            raise MemongerError(f"--{name.replace('_', '-')} is for a plan; give --plan too")
    return _tell(options, memonger.explain(network, **_given(options)))


def _check(network: Any, options: argparse.Namespace) -> int:
    """Train a network and its plan and compare them bit for bit."""
    report = memonger.check(network, memonger.load(options.planned), **_given(options))
    _tell(options, report, data={**_as_data(report), "equal": bool(report)})
    return OK if report else NO


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Give the keyword arguments of the package's function: the options that were given."""
    given = {name: value for name, value in vars(options).items() if name in KEYWORDS}
    if "ctx" in given:
        from memonger.graph.inputs import read_name

        given["ctx"] = read_name(given["ctx"])
    return {"shapes": None, **given}


def _as_data(found: Any) -> Any:
    """Give a named tuple as a dict, and a Plan without its symbol, and those in them too."""
    if isinstance(found, memonger.Plan):
        from memonger.api.plan import figures

        return {**figures(found), "schedule": found.schedule and found.schedule.operations.tolist()}
    if hasattr(found, "_asdict"):
        return {name: _as_data(value) for name, value in found._asdict().items()}
    return [_as_data(value) for value in found] if isinstance(found, tuple) else found


def _tell(options: argparse.Namespace, found: Any, plan: Any = None, data: Any = None) -> int:
    """Write the files, and print what was found, or with ``--json`` its data, in any case."""
    try:
        if options.output is not None:
            from memonger.support.versions import json_of

            if plan.schedule is not None:
                raise MemongerError(UNSAVED)
            files.write(options.output, json_of(plan.symbol).encode())
        if options.plot is not None:
            plan.plot(options.plot)
    except KeyboardInterrupt:
        raise MemongerError("interrupted before all was written") from None
    finally:
        if options.json:
            found = json.dumps(_as_data(found) if data is None else data, indent=2)
        print(found)
    return OK


class _Pairs(argparse.Action):
    """Read ``--shape data=32,3,224,224`` or ``--type data=float16``, any number of times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name, _, value = values.partition("=")
        known = vars(namespace).setdefault(self.dest, {})
        if name in known:
            parser.error(f"{option} {name} is given twice")
        if not (name and value):
            parser.error(f"{option} {values}: it is written as {self.metavar}")
        if self.dest == "shapes":
            sizes = [size.strip() for size in value.strip("()").rstrip(",").split(",")]
            if not all(re.fullmatch("N|[0-9]{1,18}", size) for size in sizes):
                parser.error(f"{option} {values}: sizes are whole numbers, as in {self.metavar}")
            value = tuple(None if size == "N" else int(size) for size in sizes)
        known[name] = value


def _budget(text: str) -> Any:
    """Read a budget: an int or a float where it is a number, otherwise as it is."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _optimizer(text: str) -> Any:
    """Read an optimiser by name, or with its parameters: 'adam', 'sgd,momentum=0.9'."""
    name, *given = text.split(",")
    pairs = (pair.partition("=") for pair in given)
    try:
        return name, {key: json.loads(value) for key, _, value in pairs}
    except ValueError:
        said = f"{text!r}: an optimizer is written as sgd,momentum=0.9"
        raise argparse.ArgumentTypeError(said) from None


WAYS = ("marks", "schedule", "auto")

#: What an option takes (its type, its choices; bool for a switch), its placeholder, what it is.
OPTIONS: dict[str, tuple[Any, str | None, str]] = {
    "shapes": (_Pairs, "data=32,3,224,224", "shape of an input, the batch first (N in batch)"),
    "type_dict": (_Pairs, "data=float16", "type of an input (default: float32)"),
    "ctx": (str, "DEVICE", "cpu, gpu, gpu(1) or any (default: gpu if MXNet has CUDA, else any)"),
    "json": (bool, None, "print JSON, sizes in bytes"),
    "verbose": (bool, None, "tell what is done"),
    "devices": (int, "N", "that share the batch (default: 1)"),
    "how": (WAYS, None, "recompute once (marks, the default), as often as it pays, or the faster"),
    "work": (float, "TIMES", "the most forward work of a step, in forward passes (default: any)"),
    "budget": (_budget, "MEMORY", "6GB, 6GiB, bytes, 60%% of that without a plan, or 'device'"),
    "budget_of": (("pool", "device"), None, "MXNet's pool (default), or parameters and all else"),
    "optimizer": (_optimizer, "NAME", "with --budget-of device: adam, or sgd,momentum=0.9"),
    "measure": (bool, None, "measure the time of operators on the device, once"),
    "patience": (float, "TIMES", "times the usual search (default: 1, or 0.05 under 16 MB)"),
    "points": (int, "N", "the most plans (default: 20)"),
    "steps": (int, "N", "training steps (default: 3)"),
    "output": (str, "FILE", "write the planned network (report: the page)"),
    "plot": (str, "FILE", "draw memory over the step (frontier: against time)"),
    "report": (str, "FILE", "write a page of the plan, and of samples a second against batch"),
    "check": (bool, None, "train the network and its plan on the device and compare them"),
    "plan": (bool, None, "plan it, and tell of each tensor why it is kept"),
    "or_plain": (bool, None, "train without a plan where none fits the budget, not stop"),
    "no_cache": (bool, None, "keep no plans for the next start, and take none"),
}
FLAGS = {"shapes": ["--shape"], "type_dict": ["--type"]}
FLAGS["output"] = ["-o", "--output"]
OWN: dict[str, Any] = dict.fromkeys(("json", "verbose", "check", "plan"), False)
OWN.update(dict.fromkeys(("output", "plot", "report")))
SCRIPTS = ("or_plain", "no_cache")
KEYWORDS = OPTIONS.keys() - OWN.keys() - {*SCRIPTS}  # of the package

SEARCH = ("measure", "patience")
LIMIT = ("budget", "budget_of", "optimizer")
BUDGET = (*LIMIT, *SEARCH)
PLANNING = ("how", "work", *BUDGET)
ENABLING = (*PLANNING, "report", "check", *SCRIPTS)  # options of ``run``

#: What carries out each verb, and its options beside those that all have.
VERBS: dict[str, tuple[Callable[[Any, Any], int], tuple[str, ...]]] = {
    "plan": (_plan, ("devices", *PLANNING, "output", "plot", "check")),
    "frontier": (_frontier, ("devices", *SEARCH, "how", "points", "plot")),
    "report": (_report, ("devices", *PLANNING, "points", "output")),
    "batch": (_batch, (*BUDGET, "output", "report")),
    "cost": (_cost, ("devices",)),
    "explain": (_explain, ("devices", *PLANNING, "plan")),
    "check": (_check, ("steps",)),
}
NET = "net-symbol.json --shape data=32,3,224,224"
EXAMPLES = {
    "plan": f"memonger plan {NET} --budget 6GB -o planned-symbol.json",
    "frontier": f"memonger frontier {NET} --plot frontier.png",
    "report": f"memonger report {NET} -o report.html",
    "batch": "memonger batch net-symbol.json --shape data=N,3,224,224 --budget 11GB",
    "cost": f"memonger cost {NET} --type data=float16",
    "explain": f"memonger explain {NET}",
    "check": "memonger check net-symbol.json planned-symbol.json --shape data=2,3,32,32",
}


class _Parser(argparse.ArgumentParser):
    """With mistakes in one line."""

    def error(self, message: str) -> Any:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(MISTAKE)


def _parser() -> argparse.ArgumentParser:
    """Make the parser of all verbs."""
    parser = _Parser(prog="memonger", description=memonger.__doc__)
    parser.add_argument("--version", action="version", version=memonger.__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, (run, options) in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=run.__doc__,
            description=run.__doc__,
            epilog="example:\n  " + EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,  # the example in one line
            argument_default=argparse.SUPPRESS,
        )
        verb.add_argument("network", help="a -symbol.json file")
        if name == "check":
            verb.add_argument("planned", help="the planned network's -symbol.json file")
        for option in ("shapes", "type_dict", "ctx", "json", "verbose", *options):
            required = (name, option) in (("batch", "budget"), ("report", "output"))
            _add(verb, option, required)
        verb.set_defaults(run=run, **OWN)  # of others the package knows them
    verb = verbs.add_parser(
        "run",
        help=_run.__doc__,
        description=_run.__doc__,
        epilog="example:\n  memonger run --budget 10GB train.py --its --own --options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    verb.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    for option in ENABLING:
        _add(verb, option)
    verb.set_defaults(module=False, or_plain=False, no_cache=False, check=False, measure=False)
    verb.add_argument("script", help="what Python would run")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="its own, whatever they are")
    return parser


def _flags(option: str) -> list[str]:
    return FLAGS.get(option, [f"--{option.replace('_', '-')}"])


def _add(verb: argparse.ArgumentParser, option: str, required: bool = False) -> None:
    """Add an option to a verb."""
    kind, metavar, about = OPTIONS[option]
    taken: dict[str, Any] = {"type": kind, "metavar": metavar}
    if kind is bool:
        taken = {"action": "store_true"}
    elif kind is _Pairs:
        taken = {"action": kind, "metavar": metavar}
    elif isinstance(kind, tuple):
        taken = {"choices": kind}
    verb.add_argument(*_flags(option), dest=option, help=about, required=required, **taken)
