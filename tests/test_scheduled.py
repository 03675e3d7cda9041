"""Training by a schedule with MXNet's own Module, as the user's script does it: bit for bit."""

import copy
import pickle
from pathlib import Path
from typing import Any, Dict, List

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.scheduled import ScheduledSymbol, scheduled

from schedules import nested, work_of

S = mx.sym
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


def planned(loss: bool = True) -> ScheduledSymbol:
    symbol = net(loss)
    shapes = {"data": (BATCH, 3, 8, 8), **({"softmax_label": (BATCH,)} if loss else {})}
    return scheduled(symbol, nested(work_of(symbol, shapes), 4, 1, 0.8))


def parameters(symbol: Any) -> Dict[str, Any]:
    random = np.random.RandomState(1)
    shapes = zip(symbol.list_arguments(), symbol.infer_shape(data=(BATCH, 3, 8, 8))[0])
    return {
        name: mx.nd.array(random.normal(size=shape) * 0.3)
        for name, shape in shapes
        if name not in ("data", "softmax_label")
    }


def fitted(symbol: Any, handle: str = "pad", context: Any = None, **more: Any) -> Dict[str, Any]:
    """Parameters, auxiliary states, score and predictions after two epochs of Module.fit."""
    mx.random.seed(3)
    np.random.seed(3)
    data = mx.io.NDArrayIter(IMAGES, LABELS.astype("f"), BATCH, last_batch_handle=handle)
    module = mx.mod.Module(symbol, context=context or mx.cpu())
    module.fit(
        data,
        num_epoch=2,
        optimizer_params={"learning_rate": 0.05, "momentum": 0.9},
        arg_params=parameters(symbol),
        initializer=mx.init.One(),
        # Module reads BatchNorm's statistics before they are written.
        batch_end_callback=lambda _: mx.nd.waitall(),
        **more,
    )
    arguments, auxiliary = module.get_params()
    found = {name: array.asnumpy() for name, array in {**arguments, **auxiliary}.items()}
    data.reset()
    found["score"] = np.array(module.score(data, "acc")[0][1])
    data.reset()
    found["predictions"] = module.predict(data).asnumpy()
    return found


def same(one: Dict[str, Any], other: Dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    "more",
    [{}, {"handle": "roll_over"}, {"context": [mx.cpu(0), mx.cpu(1)]}, {"kvstore": None}],
    ids=["once", "roll over", "two contexts", "no kvstore"],
)
def test_fit(more: Any) -> None:
    same(fitted(net(), **more), fitted(planned(), **more))


def stepped(symbol: Any, loss: bool = True, **more: Any) -> Dict[str, Any]:
    """Outputs and gradients of steps with batches of several sizes, each followed by inference."""
    module = mx.mod.Module(symbol, label_names=["softmax_label"] if loss else None)
    label = [("softmax_label", (BATCH,))] if loss else None
    module.bind([("data", (BATCH, 3, 8, 8))], label, **more)
    module.init_params(mx.init.One(), arg_params=parameters(symbol), allow_missing=True)
    mx.random.seed(5)
    found: List[Any] = []

    def look() -> None:
        mx.nd.waitall()
        found.append(module.get_outputs()[0].asnumpy())
        group = module._exec_group
        found.extend(g[0].asnumpy() for g in group.grad_arrays if g[0] is not None)
        found.extend(a[0].asnumpy() for a in group.aux_arrays)
        if more.get("inputs_need_grad"):
            found.append(module.get_input_grads()[0].asnumpy())

    for size in (BATCH, BATCH, 8, BATCH):
        batch = mx.io.DataBatch(
            [mx.nd.array(IMAGES[:size])],
            [mx.nd.array(LABELS[:size])] if loss else None,
            provide_data=[("data", (size, 3, 8, 8))],
            provide_label=[("softmax_label", (size,))] if loss else None,
        )
        module.forward(batch, is_train=True)
        module.backward(None if loss else [module.get_outputs()[0] * 2 - 1])
        look()
        module.forward(batch, is_train=False)
        look()  # the gradients are still there
    return {str(k): array for k, array in enumerate(found)}


@pytest.mark.parametrize(
    "more",
    [{}, {"grad_req": "add"}, {"inputs_need_grad": True}, {"loss": False}],
    ids=["write", "add", "input gradients", "no loss"],
)
def test_steps(more: Any) -> None:
    loss = more.get("loss", True)
    same(stepped(net(loss), **more), stepped(planned(loss), **more))


def test_some_parameters_are_fixed() -> None:
    fixed = {"fixed_param_names": ["fc_weight", "fc_bias", "convolution0_weight"]}

    def gradients(symbol: Any) -> Dict[str, Any]:
        module = mx.mod.Module(symbol, **fixed)
        module.bind([("data", (BATCH, 3, 8, 8))], [("softmax_label", (BATCH,))])
        module.init_params(mx.init.One(), arg_params=parameters(symbol))
        mx.random.seed(1)
        batch = mx.io.DataBatch([mx.nd.array(IMAGES[:BATCH])], [mx.nd.array(LABELS[:BATCH])])
        module.forward_backward(batch)
        executor = module._exec_group.execs[0]
        assert executor.grad_dict["fc_weight"] is None
        return {n: g.asnumpy() for n, g in executor.grad_dict.items() if g is not None}

    same(gradients(net()), gradients(planned()))


def test_what_is_saved_is_the_network(tmp_path: Path) -> None:
    module = mx.mod.Module(planned())
    module.bind([("data", (BATCH, 3, 8, 8))], [("softmax_label", (BATCH,))])
    module.init_params()
    module.save_checkpoint(str(tmp_path / "net"), 1)
    loaded, _, _ = mx.model.load_checkpoint(str(tmp_path / "net"), 1)
    assert loaded.tojson() == net().tojson()
    assert not isinstance(loaded, ScheduledSymbol)


def test_copies_keep_the_schedule() -> None:
    symbol = planned()
    copies = [
        copy.copy(symbol),
        copy.deepcopy(symbol),
        pickle.loads(pickle.dumps(symbol)),
        symbol[0],
    ]
    for other in copies:
        assert isinstance(other, ScheduledSymbol)
        assert other.schedule is not None and symbol.schedule is not None
        assert np.array_equal(other.schedule.events, symbol.schedule.events)
        assert other.tojson() == symbol.tojson()


def test_monitor_sees_each_result_once() -> None:
    module = mx.mod.Module(planned())
    module.bind([("data", (BATCH, 3, 8, 8))], [("softmax_label", (BATCH,))])
    monitor = mx.mon.Monitor(1)
    module.install_monitor(monitor)
    module.init_params()
    monitor.tic()
    batch = mx.io.DataBatch([mx.nd.array(IMAGES[:BATCH])], [mx.nd.array(LABELS[:BATCH])])
    module.forward_backward(batch)
    names = [name for _, name, _ in monitor.toc() if name.endswith("_output")]
    assert len(names) == len(set(names))
    assert {n for n in net().get_internals().list_outputs() if n.endswith("_output")} <= set(names)


def test_backward_needs_its_forward() -> None:
    symbol = planned(loss=False)
    executor = symbol.simple_bind(mx.cpu(), data=(2, 3, 8, 8))
    with pytest.raises(memonger.MemongerError, match="call that first"):
        executor.backward()
    executor.forward(is_train=True)
    with pytest.raises(memonger.MemongerError, match="'fc_output' is no loss"):
        executor.backward()
