"""The command ``memonger``, for scripts, and for networks that are in a ``-symbol.json`` file.

Every verb but ``run`` is a public function of the package. The exit status is 0 if all is well, 1
if ``check`` finds a difference or nothing fits the budget, 2 for a mistake, which one line on
stderr names, and 130 after Ctrl-C; the line says what was written. The result of a search is
printed even if its files cannot be written.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import logging
import os
import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from itertools import combinations
from typing import Any, Callable, Iterator, NoReturn, Sequence

# Nothing here imports MXNet, which takes seconds, before a verb is carried out.
import memonger
from memonger import BudgetError, MemongerError
from memonger.solve.limits import OPTIONS, flag_of, options_of, read_amount, variable_of
from memonger.support import files
from memonger.support.errors import INTERRUPTED, MISTAKE, STOPPED, mxnet_message
from memonger.support.types import Json, Keywords, Symbol

log = logging.getLogger("memonger")

OK, NO = 0, 1
OPEN_SHAPE = re.compile(r"(.*=)([\d,() ]*N[\d,() N]*)")  # whose batch is to be found
LEAST_BYTES = 10**6  # of a budget that is written without a unit
UNSAVED = "a schedule cannot be saved for MXNet; leave out --output, or plan with --how marks"


def main(arguments: Sequence[str] | None = None, begin: Callable[[], object] = lambda: None) -> int:
    """Run the command with these arguments, by default those of the process; return its status.

    ``begin`` is called when all is imported: from then on a KeyboardInterrupt ends it well.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.verb == "run":
        return _run(options, begin)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # for names in letters that the terminal lacks
            stream.reconfigure(errors="backslashreplace")
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(format="memonger: %(message)s", level=level)
    status = MISTAKE
    try:
        with _waiting("memonger: importing MXNet"):
            _check_places(options)
            network = memonger.load(options.network)
            memonger.frontier  # noqa: B018  imports all that a verb needs
        begin()
        status = options.run(network, options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except MemongerError as error:
        text, status = str(error), NO if isinstance(error, BudgetError) else MISTAKE
    except MemoryError as error:
        text = f"out of host memory: {error}"
    except KeyboardInterrupt as stop:
        text, status = str(stop) or INTERRUPTED, STOPPED
    except Exception as error:
        if type(error).__name__ != "MXNetError":
            raise
        text = "MXNet says: " + mxnet_message(error)
    sys.stdout.flush()
    print("memonger: " + " ".join(text.split()), file=sys.stderr)
    return status


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show a text on a terminal while the user waits; what is written next takes its place."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(text), end="\r", file=sys.stderr, flush=True)


def _run(options: Namespace, begin: Callable[[], object]) -> int:
    """Run a script that trains, with plans for all that it binds; it needs no change."""
    from memonger.scripts.legacy_names import LegacyNames
    from memonger.scripts.run import prepare

    keywords = {name: value for name, value in vars(options).items() if name in ENABLING}
    if keywords.pop("no_cache", False):
        keywords["cache"] = False
    has_legacy_names = not keywords.pop("no_legacy_names", False)
    command = shlex.join(["memonger", *options.words])
    try:
        start = prepare(options.script, options.arguments, options.module, keywords, command)
    except MemongerError as error:
        print(f"memonger: {error}", file=sys.stderr)
        return MISTAKE
    begin()
    supplied = LegacyNames() if has_legacy_names else ""
    try:
        start()
    finally:
        if str(supplied):
            print(f"memonger: {supplied}", file=sys.stderr)
    return OK


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse the arguments; variables such as MEMONGER_BUDGET hold options of ``run`` too."""
    words, parser = [*arguments], _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how a word may go on
        with contextlib.suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)
    if not words:
        parser.error(f"a verb is needed: run, {', '.join(VERBS)}")
    for option in ENABLING if words[:1] == ["run"] else ():
        flag, value = flag_of(option), os.environ.get(variable_of(option), "")
        is_switch = COMMAND[option][0] is bool
        if value and not (is_switch and value == "0"):
            words.insert(1, flag if is_switch else f"{flag}={value}")
    return parser.parse_args(words, Namespace(words=words))


def _check_places(options: Namespace) -> None:
    """Check that all files can be written, before a long search."""
    if options.output is not None:
        files.check_writable(options.output)
    if options.plot is not None:
        from memonger.show.plot import check_picture

        check_picture(options.plot)
    page = options.output if options.run is _report else options.report
    if page is not None:
        from memonger.show.report import check_report

        check_report(page)
    places = {name: getattr(options, name) for name in FILES if getattr(options, name) is not None}
    for name, file in places.items():
        if os.path.realpath(file) == os.path.realpath(options.network):
            remedy = "give another file; memonger.unplan takes a plan out of a network"
            raise MemongerError(f"--{name} is the network itself, {file!r}; {remedy}")
    for (one, file), (other, same) in combinations(places.items(), 2):
        if os.path.realpath(file) == os.path.realpath(same):
            raise MemongerError(f"--{one} and --{other} are the same file, {same!r}")


def _plan(network: Symbol, options: Namespace) -> int:
    """Plan a network and save it; plain MXNet loads and trains it."""
    keywords, report = _keywords(options), None
    plan = memonger.plan(network, **keywords)
    try:
        if options.check:
            spec, ctx = plan.request.spec, plan.request.ctx  # of the share of one device
            report = memonger.check(
                network, plan.symbol, spec.shapes, type_dict=spec.types, ctx=ctx
            )
    except KeyboardInterrupt:
        where = f"; it is written to {options.output!r}" if options.output is not None else ""
        raise KeyboardInterrupt(f"interrupted before the plan was checked{where}") from None
    finally:
        text, data = str(plan), _as_data(plan)
        if report is not None:
            text, data["check"] = f"{text}\n{'check':10} {report}", _as_data(report)
        _deliver(options, text, plan, data)
    return OK if report is None or report else NO


def _frontier(network: Symbol, options: Namespace) -> int:
    """List the Pareto-optimal plans in memory and time."""
    plans = memonger.frontier(network, **_keywords(options))
    return _deliver(options, plans, plans)


def _report(network: Symbol, options: Namespace) -> int:
    """Write an HTML page of a plan, beside the Pareto-optimal plans."""
    keywords = _keywords(options)

    def without(*names: str) -> Keywords:
        return {k: v for k, v in keywords.items() if k not in names}

    stopped = KeyboardInterrupt(f"interrupted before {options.output!r} was written")
    frontier = memonger.frontier(network, **without("work", "slower_than", *LIMIT))
    if frontier.interrupted:
        raise stopped
    others = [*frontier]
    plan = memonger.plan(network, **without("points"))
    if "mirror_stage" in network.tojson():  # marks for the original's planner
        usual = without("how", "work", "slower_than", "points", *LIMIT)
        others.append(memonger.plan(network, planner="chen2016", **usual))
    limit = {k: v for k, v in keywords.items() if k in LIMIT and v != "knee"}
    try:
        if plan.interrupted:
            raise KeyboardInterrupt
        plan.report(options.output, others=others, network=options.network, **limit)
    except KeyboardInterrupt:
        raise stopped from None
    finally:
        print(json.dumps(_as_data(plan), indent=2) if options.json else plan)
    return OK


def _batch(network: Symbol, options: Namespace) -> int:
    """Find the largest batch that fits the budget, with a plan and without."""
    largest = memonger.largest_batch(network, **_keywords(options))
    try:
        if options.report is not None:
            largest.report(options.report, network=options.network)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted before {options.report!r} was written") from None
    finally:
        _deliver(options, largest, largest.plan)
    if not options.json and options.output is None:
        print(f"next       {_next_command(options, largest.batch)}")
    return OK


def _next_command(options: Namespace, batch: int) -> str:
    """Write the command that plans the network of ``memonger batch`` at the batch that it found."""
    words = ["memonger", "plan"]
    for word in options.words[1:]:
        shape = OPEN_SHAPE.fullmatch(word)
        if word == options.report:
            words.pop()  # its flag
        elif word.partition("=")[2] != options.report:
            words.append(shape[1] + shape[2].replace("N", str(batch)) if shape else word)
    if str(getattr(options, "ctx", "")).startswith("gpu") and not hasattr(options, "budget_of"):
        words += ["--budget-of", "device"]  # the default of ``batch`` alone
    return shlex.join(words)


def _explain(network: Symbol, options: Namespace) -> int:
    """List the tensors of the peak, or what a plan does with each tensor."""
    explanation: memonger.PlanExplanation | memonger.Explanation
    plan = None
    if options.plan:
        plan = memonger.plan(network, **_keywords(options))
        explanation = plan.explain()
    else:
        for name in OPTIONS:
            if name in vars(options) and name not in EXPLAINED:
                raise MemongerError(f"{flag_of(name)} is for a plan; give --plan too")
        explanation = memonger.explain(network, **_keywords(options))
    text = explanation.details() if options.details else str(explanation)
    return _deliver(options, text, plan, _as_data(explanation))


def _check(network: Symbol, options: Namespace) -> int:
    """Train a network and its plan, and compare all bits."""
    planned = memonger.load(options.planned)
    try:
        report = memonger.check(network, planned, **_keywords(options))
    except KeyboardInterrupt as stop:
        text = str(stop) or "interrupted before the networks were compared"
        raise KeyboardInterrupt(text) from None
    _deliver(options, report, data={**_as_data(report), "equal": bool(report)})
    return OK if report else NO


def _keywords(options: Namespace) -> Keywords:
    """Return the options that were given, as keyword arguments of the package's function."""
    keywords = {name: value for name, value in vars(options).items() if name in OF_FUNCTIONS}
    if "ctx" in keywords:
        from memonger.graph.inputs import parse_devices

        keywords["ctx"] = parse_devices(keywords["ctx"])
    if options.run in (_plan, _batch) and options.output is not None:  # a file keeps marks
        keywords = {"how": "marks", **keywords}
        if keywords["how"] != "marks":
            raise MemongerError(UNSAVED)
    return {"shapes": None, **keywords}


def _as_data(result: object) -> Json:
    """Return a named tuple as a dict, and a Plan without its symbol, and those in them too."""
    if isinstance(result, memonger.Plan):
        from memonger.show.record import as_data

        schedule = result.schedule and result.schedule.operations.tolist()
        return {**as_data(result), "schedule": schedule}
    if isinstance(result, memonger.LargestBatch):
        names = ("batch", "plan", "unplanned_batch")
        return {name: _as_data(getattr(result, name)) for name in names}
    if hasattr(result, "_asdict"):
        return {name: _as_data(value) for name, value in result._asdict().items()}
    return [_as_data(value) for value in result] if isinstance(result, tuple) else result


def _deliver(  # type: ignore[misc]  # a Frontier has no schedule, and its verb no --output
    options: Namespace, result: object, plan: Any = None, data: Json = None
) -> int:
    """Write the files; whether that succeeds or not, print the result, or its data as JSON."""
    try:
        if options.output is not None:
            from memonger.support.symbols import json_of

            if plan.schedule is not None:
                raise MemongerError(UNSAVED)
            files.write(options.output, json_of(plan.symbol).encode())
        if options.plot is not None:
            plan.plot(options.plot)
        if plan is not None and plan.interrupted:
            written = [repr(file) for file in (options.output, options.plot) if file is not None]
            where = f"written to {' and '.join(written)}" if written else "printed"
            raise KeyboardInterrupt(f"interrupted; the best that was found is {where}")
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(stop) or "interrupted before all was written") from None
    finally:
        if options.json:
            result = json.dumps(_as_data(result) if data is None else data, indent=2)
        print(result)
    return OK


class _Pairs(argparse.Action):
    """Read ``--shape data=32,3,224,224`` or ``--type data=float16``, any number of times."""

    def __call__(
        self, parser: ArgumentParser, options: Namespace, values: object, option: str | None = None
    ) -> None:
        name, _, value = str(values).partition("=")
        pairs = vars(options).setdefault(self.dest, {})
        if name in pairs:
            parser.error(f"{option} {name} is given twice")
        if not (name and value):
            parser.error(f"{option} {values}: it is written as {self.metavar}")
        pairs[name] = value
        if self.dest == "shapes":
            sizes = [size.strip() for size in value.strip("()").rstrip(",").split(",")]
            if not all(re.fullmatch("N|[0-9]{1,18}", size) for size in sizes):
                parser.error(f"{option} {values}: sizes are whole numbers, as in {self.metavar}")
            pairs[name] = tuple(None if size == "N" else int(size) for size in sizes)


def _budget(text: str) -> int | float | str:
    """Read a budget: an int or a float where it is a number, otherwise as it is."""
    with contextlib.suppress(ValueError):
        if int(text) < LEAST_BYTES:  # most likely a unit was forgotten
            raise argparse.ArgumentTypeError(f"{text} needs a unit: {text}MB, {text}B, or 60%")
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    if text.strip().lower() not in ("device", "knee"):
        try:
            read_amount(text)
        except MemongerError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _optimizer(text: str) -> tuple[str, dict[str, Json]]:
    """Read an optimiser by name, or with its parameters: 'adam', 'sgd,momentum=0.9'."""
    name, *parameters = text.split(",")
    pairs = (parameter.partition("=") for parameter in parameters)
    try:
        return name, {key: json.loads(value) for key, _, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: an optimizer is written as sgd,momentum=0.9"
        ) from None


READERS = {"budget": _budget, "optimizer": _optimizer}  # of texts that no type of Python reads

#: The options of the command, with those that `plan` lacks: those of `run` are last.
COMMAND = {
    **OPTIONS,
    "shapes": (dict, "data=32,3,224,224", "shape of an input, the batch first"),
    "json": (bool, None, "print JSON, sizes in bytes"),
    "verbose": (bool, None, "log what is done"),
    "points": (int, "N", "the most plans (default: 20)"),
    "steps": (int, "N", "training steps (default: 3)"),
    "output": (str, "FILE", "write the planned network"),
    "plot": (str, "FILE", "draw memory over the step"),
    "report": (str, "FILE", "write a page of the plan, and of samples a second against batch"),
    "check": (bool, None, "train the network and its plan on the device and compare them"),
    "plan": (bool, None, "plan it, and explain why each tensor is kept"),
    "details": (bool, None, "list each tensor, not groups"),
    "or_plain": (bool, None, "train without a plan where none fits the budget, not stop"),
    "no_cache": (bool, None, "store no plans for the next start, and use none"),
    "no_legacy_names": (bool, None, "supply no names that NumPy or Python has removed"),
}
WITH_FILES = (
    "schedule: recompute as often as it pays; marks: at most once, and files keep them; auto "
    "(default): schedule where possible, marks with --output"
)
OF_GPU = (
    "what the budget limits: MXNet's pool, or the whole device (default on a GPU, and with "
    "--optimizer)"
)
#: What an option means for a verb where that is not what `COMMAND` says.
TEXTS = {
    ("plan", "how"): WITH_FILES,
    ("frontier", "plot"): "draw memory against time",
    ("report", "output"): "write the page",
    ("batch", "shapes"): "shape of an input, the batch, which is to be found, as N",
    ("batch", "how"): WITH_FILES,
    ("batch", "budget"): "6GB, 6GiB, bytes, or device: what is free on the GPU",
    ("batch", "budget_of"): OF_GPU,
    ("check", "ctx"): "where both train: cpu (default), gpu or gpu(1)",
    ("run", "budget_of"): OF_GPU,
    ("run", "optimizer"): "optimizer whose state counts too, where it is not the script's own: "
    "adam, or sgd,momentum=0.9",
    ("run", "report"): "write a page of the largest network at the end",
    ("run", "check"): "train each network and its plan for three steps first, and compare them",
}
ACTIONS: dict[object, object] = {dict: _Pairs, list: "append"}
SWITCHES = ("json", "verbose", "check", "plan", "details")
FILES = ("output", "plot", "report")
OF_FUNCTIONS = {*OPTIONS, "shapes", "points", "steps"}  # keywords of the package's functions

LIMIT = ("budget", "budget_of", "optimizer")
ENABLING = (
    *options_of("enable"),
    "report",
    "check",
    "or_plain",
    "no_cache",
    "no_legacy_names",
)  # options of ``run``
EXPLAINED = ("type_dict", "ctx", "devices")  # options of a network without a plan

#: The function of each verb, and its options beside those that all have.
VERBS: dict[str, tuple[Callable[[Symbol, Namespace], int], tuple[str, ...]]] = {
    "plan": (_plan, (*options_of("plan"), "output", "plot", "check")),
    "frontier": (_frontier, (*options_of("frontier"), "points", "plot")),
    "report": (_report, (*options_of("plan"), "points", "output")),
    "batch": (_batch, (*options_of("largest_batch"), "output", "report")),
    "explain": (_explain, (*options_of("plan"), "plan", "details")),
    "check": (_check, ("type_dict", "ctx", "steps")),
}
NET = "net-symbol.json --shape data=32,3,224,224"
EXAMPLES = {
    "plan": f"memonger plan {NET} --budget 6GB -o planned-symbol.json",
    "frontier": f"memonger frontier {NET} --plot frontier.png",
    "report": f"memonger report {NET} -o report.html",
    "batch": "memonger batch net-symbol.json --shape data=N,3,224,224 --budget 11GB",
    "explain": f"memonger explain {NET}",
    "check": "memonger check net-symbol.json planned-symbol.json --shape data=2,3,32,32",
}


class _Parser(ArgumentParser):
    """A parser that reports mistakes in one line."""

    def parse_known_args(  # type: ignore[override]  # its overloads
        self, args: Sequence[str], namespace: Namespace | None
    ) -> tuple[Namespace, list[str]]:
        """Refuse an unknown option before argparse tells of one that is missing."""
        has_others = any(a.nargs in (argparse.PARSER, argparse.REMAINDER) for a in self._actions)
        flags, words = self._option_string_actions, iter(args)
        for word in words:
            name, is_whole, _ = word.partition("=")
            if word == "--" or (has_others and (word == "-" or word[:1] != "-")):
                break  # what follows is a verb's, or the script's
            known = [flags[flag] for flag in flags if flag.startswith(name)]
            if name.startswith("--") and not known:
                near = difflib.get_close_matches(name, flags, 1)
                said = f" (did you mean {near[0]}?)" if near else ""
                self.error(f"unrecognized arguments: {name}{said}")
            if known and not is_whole and flags.get(name, known[0]).nargs != 0:
                next(words, None)  # its value
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(MISTAKE)


def _parser() -> ArgumentParser:
    parser = _Parser(prog="memonger", description=memonger.__doc__)
    parser.add_argument("--version", action="version", version=memonger.__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)

    def add(name: str, text: str | None, example: str) -> ArgumentParser:
        return verbs.add_parser(
            name,
            help=text,
            description=text,
            epilog="example:\n  " + example,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # the example in one line
            argument_default=argparse.SUPPRESS,
        )

    for name, (run, options) in VERBS.items():
        verb = add(name, run.__doc__, EXAMPLES[name])
        verb.add_argument("network", help="a -symbol.json file")
        if name == "check":
            verb.add_argument("planned", help="the planned network's -symbol.json file")
        for option in ("shapes", *options, "json", "verbose"):
            required = (name, option) in (("batch", "budget"), ("report", "output"))
            _add(verb, option, required)
        # Functions of the package have defaults for the other options.
        verb.set_defaults(run=run, **dict.fromkeys(SWITCHES, False), **dict.fromkeys(FILES))
    verb = add("run", _run.__doc__, "memonger run --budget 10GB train.py --its --own --options")
    verb.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    for option in ENABLING:
        _add(verb, option)
    verb.set_defaults(module=False)
    verb.add_argument("script", help="what Python would run")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="its own, whatever they are")
    return parser


def _add(verb: ArgumentParser, option: str, required: bool = False) -> None:
    kind, metavar, text = COMMAND[option]
    text = TEXTS.get((verb.prog.split()[-1], option), text)
    settings: dict[str, Any] = {"action": "store_true"}  # type: ignore[misc]  # as argparse says
    if isinstance(kind, tuple):
        settings = {"choices": kind}
    elif kind is not bool:
        reader = {"type": READERS.get(option, kind)}
        settings = {"action": ACTIONS[kind]} if kind in ACTIONS else reader
        settings["metavar"] = metavar
    flags = ["-o", "--output"] if option == "output" else [flag_of(option)]
    verb.add_argument(*flags, dest=option, help=text, required=required, **settings)
