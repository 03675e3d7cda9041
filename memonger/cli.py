"""The command ``memonger``, for networks that are in a ``-symbol.json`` file.

Every verb is a public function of the package. Tables are for people, ``--json`` for programs. The
exit status is 0 where all is well, 1 where the answer is no (``check`` finds a difference, nothing
fits the budget), 2 for a mistake; one line on stderr tells which. What a search has found is
printed where it cannot be written too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
from typing import Any, Callable, Sequence

# Nothing here imports MXNet, which takes seconds, before a verb is carried out.
import memonger
from memonger.support import files
from memonger.support.errors import MB, BudgetError, MemongerError, in_words, said_by_mxnet
from memonger.support.interrupts import INTERRUPTED, MISTAKE, raise_interrupts

log = logging.getLogger("memonger")

OK, NO = 0, 1
HOW = ("marks", "schedule", "auto")
BATCH = "N"  # where the batch goes in a shape
PLANNING = ("how", "work", "budget", "budget_of", "optimizer", "measure", "patience")
DEFAULTS = {"how": "marks", "measure": False, "patience": 1.0}  # None for the others

UNSAVED = (
    "a schedule cannot be saved in a file that MXNet loads; leave out --output, or plan with "
    "--how marks"
)

EXAMPLES = {
    "plan": "memonger plan net-symbol.json --shape data=32,3,224,224 --budget 6GB "
    "-o planned-symbol.json",
    "cost": "memonger cost net-symbol.json --shape data=32,3,224,224 --type data=float16",
    "explain": "memonger explain net-symbol.json --shape data=32,3,224,224",
    "frontier": "memonger frontier net-symbol.json --shape data=32,3,224,224 --plot frontier.png",
    "batch": "memonger batch net-symbol.json --shape data=N,3,224,224 --budget 11GB",
    "check": "memonger check net-symbol.json planned-symbol.json --shape data=2,3,32,32",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        The exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names need not be of the terminal's letters
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        format="memonger: %(message)s", level=logging.INFO if options.verbose else logging.WARNING
    )
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has seen enough, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except MemongerError as error:
        return _complain(str(error), NO if isinstance(error, BudgetError) else MISTAKE)
    except RuntimeError as error:
        if type(error).__name__ != "MXNetError":
            raise

        return _complain("MXNet says: " + said_by_mxnet(error), MISTAKE)
    except MemoryError as error:
        return _complain(f"this machine has not memory enough: {error}", MISTAKE)
    except KeyboardInterrupt:
        return _complain(INTERRUPTED, MISTAKE)


def _complain(text: str, status: int) -> int:
    """Say in one line on stderr what is wrong; return the exit status."""
    sys.stdout.flush()
    print("memonger: " + " ".join(text.split()), file=sys.stderr)
    return status


# -- the verbs --------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    if options.how == "schedule" and options.output:
        raise MemongerError(UNSAVED)
    _check_files(options.output, options.plot)
    network = memonger.load(options.network)
    plan = _searched(memonger.plan, network, options, "devices", *PLANNING)
    try:
        plan = dataclasses.replace(plan, added_time=plan.predict_time(options.measure))
    except (MemongerError, KeyboardInterrupt) as error:  # the plan is known all the same
        log.warning("the time that it adds is not predicted: %s", error or "interrupted")
    found: Any = plan
    data = _figures(plan)
    report = None
    try:
        if options.check:
            report = _checked(network, plan)
            found = f"{plan}\n{'check':10} {report}"
            data["check"] = _as_data(report)
    except KeyboardInterrupt:
        raise MemongerError("interrupted before the plan was checked") from None
    finally:
        _tell(options, found, data, plan=plan)
    return OK if report is None or report else NO


def _searched(
    search: Callable[..., Any], network: Any, options: argparse.Namespace, *names: str
) -> Any:
    """What a search finds. All of it is imported by now; Ctrl-C ends it with what it has found."""
    raise_interrupts()
    return search(network, **_of(options, *names))


def _checked(network: Any, plan: Any) -> Any:
    """What ``check`` says of a plan, of the share of one device."""
    spec, ctx = plan.request.spec, plan.request.ctx
    return memonger.check(network, plan.symbol, spec.shapes, type_dict=spec.types, ctx=ctx)


def _frontier(options: argparse.Namespace) -> int:
    _check_files(None, options.plot)
    network = memonger.load(options.network)
    asked = ("devices", "how", "points", "measure", "patience")
    plans = _searched(memonger.frontier, network, options, *asked)
    _tell(options, plans, [_figures(plan) for plan in plans], picture=plans)
    return OK


def _batch(options: argparse.Namespace) -> int:
    _check_files(options.output)
    network = memonger.load(options.network)
    asked = ("budget", "budget_of", "optimizer", "measure", "patience")
    found = _searched(memonger.largest_batch, network, options, *asked)
    figures = {"batch": found.batch, "unplanned_batch": found.unplanned_batch}
    _tell(options, found, {**figures, "plan": _figures(found.plan)}, plan=found.plan)
    return OK


def _cost(options: argparse.Namespace) -> int:
    network = memonger.load(options.network)
    found = memonger.explain(network, **_of(options, "devices"))
    exact = not found.inexact
    pool = found.pool_bytes
    if not exact:  # what the replay does not know, a bind does, in whole MB
        if options.devices != 1:
            raise MemongerError("--devices: give one device's shapes for this network")
        pool = MB * memonger.get_cost(network, **_of(options))
    lines = [
        f"pool     {in_words(pool)}{'' if exact else ', bound, in whole MB'}",
        f"peak     {in_words(found.peak_bytes)} alive at once, in {found.peak}",
    ]
    figures = {"pool_bytes": pool, "peak_bytes": found.peak_bytes, "exact": exact}
    _tell(options, "\n".join(lines) if found.tensors or pool else found, figures)
    return OK


def _explain(options: argparse.Namespace) -> int:
    network = memonger.load(options.network)
    found: Any
    given = [name for name in PLANNING if getattr(options, name) != DEFAULTS.get(name)]
    if given and not options.plan:
        raise MemongerError(f"--{given[0].replace('_', '-')} is of a plan; give --plan too")
    if options.plan:
        found = _searched(memonger.plan, network, options, "devices", *PLANNING).explain()
    else:
        found = memonger.explain(network, **_of(options, "devices"))
    _tell(options, found, _as_data(found))
    return OK


def _check(options: argparse.Namespace) -> int:
    networks = memonger.load(options.network), memonger.load(options.planned)
    report = memonger.check(*networks, **_of(options, "steps"))
    _tell(options, report, {**_as_data(report), "equal": bool(report)})
    return OK if report else NO


# -- what goes in and out ---------------------------------------------------------------------


def _of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Keyword arguments of a function of the package: what all take, and those of these names."""
    from memonger.support.mxnet import mx

    ctx = None if options.device is None else mx.Context(*options.device)
    given = {"shapes": options.shapes, "type_dict": options.types, "ctx": ctx}
    return {**given, **{name: getattr(options, name) for name in names}}


def _check_files(output: str | None, plot: str | None = None) -> None:
    """That files can be written, before a long search is begun for them."""
    if output is not None:
        files.check_writable(output)
    if plot is not None:
        from memonger.api import plot as report

        report.check_picture(plot)
        if output is not None and os.path.realpath(output) == os.path.realpath(plot):
            raise MemongerError(f"--output and --plot are the same file, {plot!r}")


def _save(plan: Any, file: str) -> None:
    if plan.schedule is not None:
        raise MemongerError(UNSAVED)
    files.write(file, plan.symbol.tojson(remove_amp_cast=False).encode())


def _figures(plan: Any) -> dict[str, Any]:
    """A Plan without its symbol, as data."""
    fields = [field.name for field in dataclasses.fields(plan)]
    data = {name: getattr(plan, name) for name in fields if name not in ("symbol", "request")}
    data["schedule"] = None if plan.schedule is None else plan.schedule.events.tolist()
    return data


def _as_data(found: Any) -> dict[str, Any]:
    """A named tuple as a dict, and those in it too."""
    data = found._asdict()
    for name, value in data.items():
        if isinstance(value, tuple):
            data[name] = [_as_data(v) if hasattr(v, "_asdict") else v for v in value]
    return data


def _tell(
    options: argparse.Namespace, found: Any, data: Any, plan: Any = None, picture: Any = None
) -> None:
    """Print what was found, or with ``--json`` the data of it, and write the files.

    It is printed whether they can be written or not.
    """
    picture = picture or plan
    try:
        if getattr(options, "output", None) is not None:
            _save(plan, options.output)
        if getattr(options, "plot", None) is not None:
            picture.plot(options.plot)
    except KeyboardInterrupt:
        raise MemongerError("interrupted before all was written") from None
    finally:
        print(json.dumps(data, indent=2) if options.json else found)


# -- the options ------------------------------------------------------------------------------


class _Shapes(argparse.Action):
    """``--shape data=32,3,224,224``, any number of times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        example = f"data={BATCH if namespace.open else 32},3,224,224"
        name, shape = _pair(parser, values, option, example)
        sizes: list[int | None] = []
        for size in shape.strip("()").rstrip(",").split(","):
            if size.strip() == BATCH and namespace.open:
                sizes.append(None)
            elif re.match(r"\s*[0-9]{1,18}\s*$", size):
                sizes.append(int(size))
            else:
                parser.error(f"{option} {values}: sizes are whole numbers, as {example}")
        namespace.shapes = _added(parser, namespace.shapes, option, name, tuple(sizes))


class _Types(argparse.Action):
    """``--type data=float16``, any number of times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name, kind = _pair(parser, values, option, "data=float16")
        namespace.types = _added(parser, namespace.types, option, name, kind)


def _added(parser: Any, known: Any, option: str, name: str, value: Any) -> dict[str, Any]:
    if name in (known or {}):
        parser.error(f"{option} {name} is given twice")
    return {**(known or {}), name: value}


def _pair(parser: Any, text: str, option: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        parser.error(f"{option} {text}: it is written as {example}")
    return name, value


def _device(text: str) -> Any:
    """A device by name: 'cpu', 'gpu' or 'gpu(1)'."""
    kind, _, number = text.rstrip(")").partition("(")
    if kind not in ("cpu", "gpu") or not re.match("[0-9]{1,9}$", number or "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; there are cpu, gpu and gpu(1)")
    return kind, int(number or 0)


def _budget(text: str) -> Any:
    """A budget: an int or a float where it is a number, otherwise as it is."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _optimizer(text: str) -> Any:
    """An optimiser by name, or with its parameters: 'adam', 'sgd,momentum=0.9'."""
    name, *given = text.split(",")
    pairs = [pair.partition("=") for pair in given]
    try:
        parameters = {key: json.loads(value) for key, _, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: an optimizer is written as sgd,momentum=0.9"
        ) from None
    return (name, parameters) if parameters else name


class _Parser(argparse.ArgumentParser):
    """With mistakes in one line."""

    def error(self, message: str) -> Any:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(MISTAKE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="memonger", description=memonger.__doc__)
    parser.add_argument("--version", action="version", version=memonger.__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, what: str, run: Callable[[Any], int]) -> argparse.ArgumentParser:
        made = verbs.add_parser(
            name,
            help=what,
            description=what,
            epilog="example:\n  " + EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,  # the example in one line
        )
        made.add_argument("network", help="a -symbol.json file")
        made.set_defaults(run=run, shapes=None, types=None, open=name == "batch")
        return made

    def common(made: argparse.ArgumentParser, batch: str = "the batch first") -> None:
        made.add_argument(
            "--shape",
            action=_Shapes,
            metavar="NAME=N,N,..",
            help=f"shape of an input, {batch}; as often as there are inputs",
        )
        made.add_argument(
            "--type",
            action=_Types,
            metavar="NAME=TYPE",
            help="type of an input (default: float32)",
        )
        made.add_argument(
            "--device", type=_device, metavar="DEVICE", help="cpu or gpu(0); by default any"
        )
        made.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
        made.add_argument("--verbose", action="store_true", help="tell what is done")

    def split(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--devices", type=int, default=1, metavar="N", help="that share the batch (default: 1)"
        )

    def searching(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--measure",
            action="store_true",
            help="measure the time of operators on the device, once, instead of predicting it",
        )
        made.add_argument(
            "--patience",
            type=float,
            default=DEFAULTS["patience"],
            metavar="TIMES",
            help="times the usual search",
        )

    def bounded(made: argparse.ArgumentParser, required: bool = False) -> None:
        made.add_argument(
            "--budget",
            type=_budget,
            required=required,
            metavar="MEMORY",
            help="memory that may be taken: 6GB, 6GiB, bytes%s or 'device', what is free on the "
            "GPU of --device" % ("" if required else ", 60%% (of that without a plan)"),
        )
        made.add_argument(
            "--budget-of",
            choices=("pool", "device"),
            help="what it bounds: MXNet's pool, or parameters, gradients and the optimizer's state "
            "too (default: pool)",
        )
        made.add_argument(
            "--optimizer",
            type=_optimizer,
            metavar="NAME",
            help="whose state counts with --budget-of device: adam, or sgd,momentum=0.9",
        )
        searching(made)

    def planning(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            "--how",
            choices=HOW,
            default=DEFAULTS["how"],
            help="compute each result again once (marks), as often as it pays (schedule), or the "
            "faster of both within a budget (auto) (default: marks)",
        )
        made.add_argument(
            "--work",
            type=float,
            metavar="TIMES",
            help="the most forward work of a step, in forward passes (default: no limit)",
        )
        bounded(made)

    def output(made: argparse.ArgumentParser) -> None:
        made.add_argument("-o", "--output", metavar="FILE", help="write the planned network")

    made = verb("plan", "Plan a network and save it; plain MXNet loads and trains it.", _plan)
    common(made)
    split(made)
    planning(made)
    output(made)
    made.add_argument("--plot", metavar="FILE", help="draw memory over the training step")
    made.add_argument(
        "--check",
        action="store_true",
        help="train the network and its plan on the device and compare them bit for bit",
    )

    made = verb("frontier", "Tell the plans that no other beats in memory and time.", _frontier)
    common(made)
    split(made)
    searching(made)
    made.add_argument(
        "--how",
        choices=HOW,
        default="marks",
        help="plans of marks, schedules, or the best of both (default: marks)",
    )
    made.add_argument(
        "--points", type=int, default=20, metavar="N", help="the most plans (default: 20)"
    )
    made.add_argument("--plot", metavar="FILE", help="draw memory against time")

    made = verb("batch", "Tell the largest batch that fits, with a plan and without.", _batch)
    common(made, "N where the batch goes")
    bounded(made, required=True)
    output(made)

    made = verb("cost", "Tell the memory that a network takes in training as it is.", _cost)
    common(made)
    split(made)

    made = verb("explain", "Tell what makes up the memory of a network, or of a plan.", _explain)
    common(made)
    split(made)
    planning(made)
    made.add_argument(
        "--plan", action="store_true", help="plan it, and tell of each tensor why it is kept"
    )

    made = verb("check", "Train a network and its plan and compare them bit for bit.", _check)
    made.add_argument("planned", help="the planned network's -symbol.json file")
    common(made)
    made.add_argument(
        "--steps", type=int, default=3, metavar="N", help="training steps (default: 3)"
    )
    return parser
