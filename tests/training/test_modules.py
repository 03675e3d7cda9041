"""MXNet's own ways of training: with marks or a schedule, equal bit for bit to without."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any, Callable, Iterable

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.support.mxnet import environment
from memonger.schedules.execution.symbol import scheduled

from drawn_schedules import nested, work_of
from modules import BATCH, IMAGES, LABELS, LEARNING, SHAPES, Batches, after_batch, batch_of, first
from modules import fit, fitted_buckets, module_of, net, parameters, planned, same, seed, sentences
from modules import sized, trained, with_marks, with_schedule
from zoo import unrolled
from planned import marked

S = mx.sym
pytestmark = pytest.mark.filterwarnings("ignore")  # FeedForward is deprecated, and says so
#: MXNet 1.9.1 cannot simple_bind what it fuses for inference on the CPU: its new inputs have no
#: device (graph_executor.cc, in_arg_ctx_map).
NO_FUSION = {"MXNET_SUBGRAPH_BACKEND": "NONE"}
Build = Callable[..., Any]


def numbered(arrays: Iterable[Any]) -> dict[str, Any]:
    return {str(k): array for k, array in enumerate(arrays)}


def images(handle: str = "pad") -> Any:
    if handle == "pad":
        return mx.io.NDArrayIter(IMAGES, LABELS, BATCH)
    parts = [slice(k, k + BATCH) for k in range(0, len(IMAGES), BATCH)]
    return Batches([batch_of(IMAGES[p], LABELS[p]) for p in parts], *SHAPES.values())


def fitted(
    build: Build, handle: str = "pad", devices: int = 1, module: Any = (), **more: Any
) -> dict[str, Any]:
    symbol, data = build(), images(handle)
    if isinstance(more.get("monitor"), bool):
        more["monitor"] = mx.mon.Monitor(1)
    trainer = mx.mod.Module(symbol, context=[mx.cpu(k) for k in range(devices)], **dict(module))
    evaluated = mx.io.NDArrayIter(IMAGES, LABELS, 24)
    fit(trainer, data, initializer=mx.init.One(), eval_data=evaluated, **more)
    arrays = trained(trainer)
    data.reset()
    arrays["score"] = np.array(trainer.score(data, "acc")[0][1])
    data.reset()
    arrays["predictions"] = trainer.predict(data).asnumpy()
    return arrays


def frozen(which: Callable[[str], bool], build: Build) -> dict[str, Any]:
    """Train what was planned as if all were trained, with some frozen (grad_req 'null')."""
    values = parameters(net())
    fixed = [name for name in values if which(name)]
    arrays = fitted(build, module={"fixed_param_names": fixed})
    assert fixed and all(np.array_equal(arrays[name], values[name].asnumpy()) for name in fixed)
    return arrays


def steps(build: Build, loss: bool = True, **more: Any) -> dict[str, Any]:
    """Take steps with batches of several sizes, each followed by inference."""
    if isinstance(more.get("grad_req"), dict):  # of the labels too, which get none
        more["grad_req"] = {n: MIXED.get(n, "null") for n in net().list_arguments()}
    module = module_of(build(loss), **more)
    mx.random.seed(5)
    results: list[Any] = []

    def look() -> None:
        mx.nd.waitall()
        group = module._exec_group
        arrays = [module.get_outputs()[0], *(a[0] for a in (*group.grad_arrays, *group.aux_arrays))]
        if more.get("inputs_need_grad"):
            arrays.append(module.get_input_grads()[0])
        results.extend(array.asnumpy() for array in arrays if array is not None)

    for size in (BATCH, BATCH, 8, BATCH):
        module.forward(first(size, loss), is_train=True)
        module.backward(None if loss else [module.get_outputs()[0] * 2 - 1])
        look()
        module.forward(first(size, loss), is_train=False)
        look()  # the gradients are still there
    return numbered(results)


def evaluated(between: Callable[[Any], None], build: Build) -> dict[str, Any]:
    """Do something between ``backward`` and ``update``, which may use the memory of gradients."""
    module = module_of(build())
    mx.random.seed(3)
    for _ in range(2):
        module.forward_backward(first(BATCH))
        mx.nd.waitall()  # nothing that reads the statistics waits until they have moved
        between(module)
        mx.nd.waitall()  # a prediction that still waits would draw masks when training goes on
        module.update()
    return trained(module)


def shared(build: Build) -> dict[str, Any]:
    """Let a second Module take the memory and parameters of the first, and train them in turn."""
    symbol = build()
    whole = module_of(symbol)
    smaller = module_of(symbol, 8, shared_module=whole)
    mx.random.seed(4)
    for module, size in ((whole, BATCH), (smaller, 8)) * 3:
        module.forward_backward(first(size))
        module.update()
        mx.nd.waitall()
    return trained(smaller)


def feed_forward(build: Build) -> dict[str, Any]:
    """Train a FeedForward: it calls bind, is pickled with its plan, and saved as a plain symbol."""
    seed()
    symbol = build()
    options = {"numpy_batch_size": BATCH, "arg_params": parameters(symbol), **LEARNING}
    model = mx.model.FeedForward(symbol, num_epoch=2, initializer=mx.init.Xavier(), **options)
    model.fit(IMAGES, LABELS, eval_data=(IMAGES, LABELS), batch_end_callback=after_batch)
    arrays = {n: a.asnumpy() for n, a in {**model.arg_params, **model.aux_params}.items()}
    pickled = pickle.loads(pickle.dumps(model))
    assert type(pickled.symbol) is type(symbol)
    model.save("net")
    loaded = mx.model.FeedForward.load("net", 2)
    assert type(loaded.symbol) is S.Symbol
    for name, one in (("predicted", model), ("pickled", pickled), ("loaded", loaded)):
        arrays[name] = one.predict(IMAGES)
    return arrays


def resumed(build: Build) -> dict[str, Any]:
    """Train two epochs, or one, a checkpoint and one more: with a plan and without, all the same.

    Marks are saved; a network with a schedule is saved without, and planned anew.
    """
    symbol = build()
    whole = fit(mx.mod.Module(net()), images())
    fit(mx.mod.Module(symbol), images(), num_epoch=1).save_checkpoint("net", 1, True)
    loaded = mx.mod.Module.load("net", 1, load_optimizer_states=True)
    assert type(loaded.symbol) is S.Symbol and marked(loaded.symbol) == marked(symbol)
    assert memonger.unplan(loaded.symbol).tojson() == net().tojson()
    plain, arguments, states = mx.model.load_checkpoint("net", 1)
    module = mx.mod.Module(with_schedule(plain) if type(symbol) is not S.Symbol else plain)
    module.bind(*sized(BATCH))
    module.init_params(arg_params=arguments, aux_params=states)
    module.init_optimizer(optimizer_params=LEARNING)
    module.load_optimizer_states("net-0001.states")
    mx.random.seed(2)  # what the last batch of the first epoch left
    for k, batch in enumerate(images()):
        module.forward_backward(batch)
        module.update()
        mx.nd.waitall()
        mx.random.seed(100 + k)
    same(trained(whole), trained(module))
    return trained(module)


def score(module: Any) -> None:
    for size in (BATCH, 5, 7, BATCH):
        module.forward(first(size), is_train=False)


MIXED = {"fc_weight": "add", "convolution1_weight": "write", "batchnorm2_gamma": "add"}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fit": (fitted, {}),
    "partial batch": (fitted, {"handle": "partial"}),
    "uneven devices": (fitted, {"devices": 2, "module": {"work_load_list": [1, 3]}}),
    "devices, partial batch": (fitted, {"devices": 2, "handle": "partial"}),
    "kvstore device": (fitted, {"devices": 2, "kvstore": "device"}),
    "adam": (fitted, {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}}),
    "monitored": (fitted, {"monitor": True}),
    "body frozen": (functools.partial(frozen, lambda name: name[:2] != "fc"), {}),
    "biases frozen": (functools.partial(frozen, lambda name: name.endswith("bias")), {}),
    "write": (steps, {}),
    "add": (steps, {"grad_req": "add"}),
    "mixed": (steps, {"grad_req": MIXED}),
    "input gradients": (steps, {"inputs_need_grad": True}),
    "input gradients, added": (steps, {"inputs_need_grad": True, "grad_req": "add"}),
    "no loss": (steps, {"loss": False}),
    "no loss, added": (steps, {"loss": False, "grad_req": "add", "inputs_need_grad": True}),
    "scored between": (functools.partial(evaluated, score), {}),
    "reshaped between": (
        functools.partial(evaluated, lambda module: module.reshape(*sized(5))),
        {},
    ),
    "shared Module": (shared, {}),
    "FeedForward": (feed_forward, {}),
    "resumed": (resumed, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_changes_no_bit_of_a_training(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train, options = WAYS[way]
    with environment(**NO_FUSION if train not in (fitted, steps) else {}):
        usual = train(net, **options)
        for build in (with_marks, planned):
            same(usual, train(build, **options))


# ---------------------------------------------------------------------- buckets


def planned_unrolled(steps: int) -> Any:
    symbol = unrolled(steps)
    work = work_of(symbol, {"data": (4, steps), "softmax_label": (4, steps)})
    return scheduled(symbol, nested(work, 3, steps, 0.8))


def marked_unrolled(steps: int) -> Any:
    planned = memonger.search_plan(unrolled(steps), data=(4, steps), softmax_label=(4, steps))
    assert marked(planned)
    return planned


@functools.lru_cache(None)
def fitted_unrolled(request: str) -> dict[str, Any]:
    return fitted_buckets(unrolled, request)


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize(
    "planned, chosen",
    [(marked_unrolled, {3, 5, 8}), (planned_unrolled, {3, 5, 8}), (planned_unrolled, {3, 5})],
)
def test_a_plan_changes_no_bit_of_buckets(planned: Any, chosen: Any, request_: str) -> None:
    def network(steps: int) -> Any:
        return planned(steps) if steps in chosen else unrolled(steps)

    same(fitted_unrolled(request_), fitted_buckets(network, request_))


def test_a_plan_changes_no_bit_of_buckets_of_feed_forward() -> None:
    def run(network: Callable[[int], Any]) -> dict[str, Any]:
        seed()
        model = mx.model.FeedForward(network, num_epoch=2, initializer=mx.init.Xavier())
        model.fit(sentences(5), eval_metric=mx.metric.Perplexity(None))
        return {name: array.asnumpy() for name, array in model.arg_params.items()}

    expected = run(unrolled)
    for network in (planned_unrolled, marked_unrolled):
        same(expected, run(network))


# ---------------------------------------------------------------------- monitors

#: What nobody reads is not written: the gradients of data and labels; masks of inference.
UNWRITTEN = {"convolution0_backward_output0", "softmax_backward_output1"}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("inputs", [True, False], ids=["inputs too", "outputs"])
def test_a_schedule_tells_a_monitor_what_the_network_tells(inputs: bool, training: bool) -> None:
    def seen(symbol: Any) -> list[Any]:
        mx.random.seed(1)
        module = module_of(symbol)
        monitor = mx.mon.Monitor(1, monitor_all=inputs)
        module.install_monitor(monitor)
        monitor.tic()
        module.forward(first(8))  # reshaped
        smaller = [(name, value) for _, name, value in monitor.toc()]
        monitor.tic()
        module.forward(first(BATCH), is_train=training)
        if training:
            module.backward()
        records = sorted([*smaller, *((name, value) for _, name, value in monitor.toc())])
        ignored = UNWRITTEN if training else {"dropout0_mask", "dropout1_mask"}
        records = [(name, None if name in ignored else value) for name, value in records]
        return sorted(set(records)) if inputs else records  # of a variable by each that reads it

    usual = seen(net())
    assert seen(planned()) == usual
    assert len(usual) > 100
