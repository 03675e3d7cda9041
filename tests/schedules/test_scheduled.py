"""Training by a schedule with MXNet's own Module, as the user's script does it: bit for bit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Callable, Iterable

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
import pytest
from memonger.graph.operators.gradients import environment
from memonger.schedules.execution.symbol import scheduled

from drawn_schedules import nested, work_of
from more_networks import unrolled

S = mx.sym
#: MXNet 1.9.1 cannot simple_bind what it fuses for inference on the CPU: its new inputs have no
#: device (graph_executor.cc, in_arg_ctx_map).
NO_FUSION = {"MXNET_SUBGRAPH_BACKEND": "NONE"}
BATCH = 32
RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.normal(size=(72, 3, 8, 8)).astype("f")
LABELS = (IMAGES.mean((1, 2, 3)) * 200).astype(int) % 4


def net(loss: bool = True) -> Any:
    with mx.name.NameManager():
        x = S.Convolution(S.Variable("data"), kernel=(3, 3), pad=(1, 1), num_filter=6)
        for _ in range(4):
            y = S.Activation(S.BatchNorm(x, fix_gamma=False), act_type="relu")
            x = x + S.Convolution(y, kernel=(3, 3), pad=(1, 1), num_filter=6)
        x = S.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
        x = S.FullyConnected(S.Dropout(x, p=0.2), num_hidden=4, name="fc")
        return S.SoftmaxOutput(x, name="softmax") if loss else x


def planned(loss: bool = True) -> Any:
    return with_schedule(net(loss), loss)


def with_schedule(symbol: Any, loss: bool = True) -> Any:
    shapes: dict[str, Any] = {"data": (BATCH, 3, 8, 8)}
    if loss:
        shapes["softmax_label"] = (BATCH,)
    return scheduled(symbol, nested(work_of(symbol, shapes), 4, 1, 0.8))


def parameters(symbol: Any) -> dict[str, Any]:
    random = np.random.RandomState(1)
    shapes = zip(symbol.list_arguments(), symbol.infer_shape(data=(BATCH, 3, 8, 8))[0])
    return {
        name: mx.nd.array(random.normal(size=shape) * 0.3)
        for name, shape in shapes
        if name not in ("data", "softmax_label")
    }


class Batches(mx.io.DataIter):
    def __init__(self, batches: list[Any], *shapes: tuple[int, ...]) -> None:
        super().__init__(shapes[0][0])
        self.batches, self.default_bucket_key = batches, shapes[0][1]
        self.provide_data, self.provide_label = (
            [(name, shape)] for name, shape in zip(("data", "softmax_label"), shapes)
        )
        self.reset()

    def reset(self) -> None:
        self._left = list(self.batches)

    def next(self) -> Any:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


def batch_of(images: Any, labels: Any, key: Any = None) -> Any:
    return mx.io.DataBatch(
        [mx.nd.array(images)],
        None if labels is None else [mx.nd.array(labels)],
        pad=0,
        bucket_key=key,
        provide_data=[("data", images.shape)],
        provide_label=None if labels is None else [("softmax_label", labels.shape)],
    )


def first(size: int, labels: bool = True) -> Any:
    return batch_of(IMAGES[:size], LABELS[:size] if labels else None)


def sized(size: int) -> tuple[list[Any], list[Any]]:
    return [("data", (size, 3, 8, 8))], [("softmax_label", (size,))]


def module_of(symbol: Any, loss: bool = True, **more: Any) -> Any:
    module = mx.mod.Module(symbol, label_names=["softmax_label"] if loss else None)
    data, label = sized(BATCH)
    module.bind(data, label if loss else None, **more)
    module.init_params(mx.init.One(), arg_params=parameters(symbol), allow_missing=True)
    return module


def trained(module: Any) -> dict[str, Any]:
    arguments, states = module.get_params()
    return {name: array.asnumpy() for name, array in {**arguments, **states}.items()}


def numbered(arrays: Iterable[Any]) -> dict[str, Any]:
    return {str(k): array for k, array in enumerate(arrays)}


def seed() -> None:
    mx.random.seed(3)
    np.random.seed(3)


LEARNING = {"learning_rate": 0.05, "momentum": 0.9}


def fitted(
    symbol: Any, handle: str = "pad", context: Any = None, workload: Any = None, **more: Any
) -> dict[str, Any]:
    seed()
    labels = LABELS.astype("f")
    if handle == "partial":
        parts = [slice(k, k + BATCH) for k in range(0, len(IMAGES), BATCH)]
        batches = [batch_of(IMAGES[part], LABELS[part]) for part in parts]
        data = Batches(batches, (BATCH, 3, 8, 8), (BATCH,))
    else:
        data = mx.io.NDArrayIter(IMAGES, labels, BATCH, last_batch_handle=handle)
    module = mx.mod.Module(symbol, context=context or mx.cpu(), work_load_list=workload)
    if more.get("monitor"):
        more = {**more, "monitor": mx.mon.Monitor(1)}
    module.fit(
        data,
        num_epoch=2,
        arg_params=parameters(symbol),
        initializer=mx.init.One(),
        eval_data=mx.io.NDArrayIter(IMAGES, labels, 24),
        # Module reads BatchNorm's statistics before they are written.
        batch_end_callback=lambda _: mx.nd.waitall(),
        **{"optimizer_params": LEARNING, **more},
    )
    found = trained(module)
    data.reset()
    found["score"] = np.array(module.score(data, "acc")[0][1])
    data.reset()
    found["predictions"] = module.predict(data).asnumpy()
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


FITS: dict[str, Any] = {
    "once": {},
    "roll over": {"handle": "roll_over"},
    "partial batch": {"handle": "partial"},
    "uneven contexts": {"context": [mx.cpu(0), mx.cpu(1)], "workload": [1, 3]},
    "contexts, partial batch": {"context": [mx.cpu(0), mx.cpu(1)], "handle": "partial"},
    "kvstore device": {"context": [mx.cpu(0), mx.cpu(1)], "kvstore": "device"},
    "adam": {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}},
    "monitored": {"monitor": True},
}


@pytest.mark.parametrize("name", FITS)
def test_fit(name: str) -> None:
    same(fitted(net(), **FITS[name]), fitted(planned(), **FITS[name]))


def stepped(symbol: Any, loss: bool = True, **more: Any) -> dict[str, Any]:
    """Outputs and gradients of steps with batches of several sizes, each followed by inference."""
    module = module_of(symbol, loss, **more)
    mx.random.seed(5)
    found: list[Any] = []

    def look() -> None:
        mx.nd.waitall()
        group = module._exec_group
        arrays = [module.get_outputs()[0], *(a[0] for a in (*group.grad_arrays, *group.aux_arrays))]
        if more.get("inputs_need_grad"):
            arrays.append(module.get_input_grads()[0])
        found.extend(array.asnumpy() for array in arrays if array is not None)

    for size in (BATCH, BATCH, 8, BATCH):
        module.forward(first(size, loss), is_train=True)
        module.backward(None if loss else [module.get_outputs()[0] * 2 - 1])
        look()
        module.forward(first(size, loss), is_train=False)
        look()  # the gradients are still there
    return numbered(found)


MIXED = {"fc_weight": "add", "convolution1_weight": "write", "batchnorm2_gamma": "add"}
STEPPED: dict[str, Any] = {
    "write": {},
    "add": {"grad_req": "add"},
    "mixed": {"grad_req": MIXED},
    "input gradients": {"inputs_need_grad": True},
    "input gradients, added": {"inputs_need_grad": True, "grad_req": "add"},
    "no loss": {"loss": False},
    "no loss, added": {"loss": False, "grad_req": "add", "inputs_need_grad": True},
}


@pytest.mark.parametrize("name", STEPPED)
def test_steps(name: str) -> None:
    more = dict(STEPPED[name])
    loss = more.get("loss", True)
    if isinstance(more.get("grad_req"), dict):  # of the labels too, which get none
        more["grad_req"] = {n: MIXED.get(n, "null") for n in net().list_arguments()}
    same(stepped(net(loss), **more), stepped(planned(loss), **more))


# ---------------------------------------------------------------------- other modules


def planned_unrolled(steps: int) -> Any:
    symbol = unrolled(steps)
    work = work_of(symbol, {"data": (4, steps), "softmax_label": (4, steps)})
    return scheduled(symbol, nested(work, 3, steps, 0.8))


def sentences(*lengths: int) -> Batches:
    random, batches = np.random.RandomState(0), []
    for _ in range(8):
        steps = lengths[random.randint(len(lengths))]
        words = random.randint(0, 20, (4, steps))
        batches.append(batch_of(words, (words + 1) % 20, steps))
    return Batches(batches, *[(4, max(lengths))] * 2)


def fitted_buckets(network: Callable[[int], Any], request: str) -> dict[str, Any]:
    seed()
    data = sentences(4, 7, 12)
    module = mx.mod.BucketingModule(
        lambda key: (network(key), ["data"], ["softmax_label"]), default_bucket_key=12
    )
    module.bind(data.provide_data, data.provide_label, grad_req=request)
    module.fit(
        data,
        num_epoch=2,
        eval_metric=mx.metric.Perplexity(None),
        initializer=mx.init.Xavier(),
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
    )
    found = trained(module)
    found["score"] = np.array(module.score(data, mx.metric.Perplexity(None))[0][1])
    return found


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("chosen", [{4, 7, 12}, {12}, {4, 7}], ids=str)
def test_buckets(chosen: Any, request_: str) -> None:
    def network(steps: int) -> Any:
        return planned_unrolled(steps) if steps in chosen else unrolled(steps)

    same(fitted_buckets(unrolled, request_), fitted_buckets(network, request_))


def test_feed_forward(tmp_path: Path) -> None:
    """It calls bind; it is pickled with its plan, and saved without."""

    def run(symbol: Any) -> dict[str, Any]:
        seed()
        given = {"numpy_batch_size": BATCH, "arg_params": parameters(symbol), **LEARNING}
        model = mx.model.FeedForward(symbol, num_epoch=2, initializer=mx.init.Xavier(), **given)
        labels = LABELS.astype("f")
        model.fit(
            IMAGES, labels, eval_data=(IMAGES, labels), batch_end_callback=lambda _: mx.nd.waitall()
        )
        found = {n: a.asnumpy() for n, a in {**model.arg_params, **model.aux_params}.items()}
        again = pickle.loads(pickle.dumps(model))
        assert type(again.symbol) is type(symbol)
        model.save(str(tmp_path / "net"))
        loaded = mx.model.FeedForward.load(str(tmp_path / "net"), 2)
        assert type(loaded.symbol) is S.Symbol
        for name, one in (("predicted", model), ("pickled", again), ("loaded", loaded)):
            found[name] = one.predict(IMAGES)
        return found

    with environment(**NO_FUSION):
        same(run(net()), run(planned()))


# ---------------------------------------------------------------------- monitors

#: What nobody reads is not written: the gradients of data and labels; masks of inference.
UNWRITTEN = {"convolution0_backward_output0", "softmax_backward_output1"}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("inputs", [True, False], ids=["inputs too", "outputs"])
def test_monitor_is_told_what_it_is_told_of_the_network(inputs: bool, training: bool) -> None:
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
        found = sorted([*smaller, *((name, value) for _, name, value in monitor.toc())])
        ignored = UNWRITTEN if training else {"dropout0_mask"}
        found = [(name, None if name in ignored else value) for name, value in found]
        return sorted(set(found)) if inputs else found  # of a variable by each that reads it

    told = seen(planned())
    assert told == seen(net())
    assert len(told) > 100
