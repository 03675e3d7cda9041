"""One network, trained by Gluon or by Module, with a plan or without."""

import os
from typing import Any, Dict, Optional

import memonger
import mxnet as mx
import numpy as np
import train_gluon
from mxnet import autograd, gluon

Arrays = Dict[str, Any]
OPTIMIZER = ("adam", {"learning_rate": 0.001})
PLANS: Dict[str, Dict[str, Any]] = {
    "marks": {"how": "marks"},
    "schedule": {"how": "schedule", "work": 2.0},
}


def network(options: Any) -> Any:
    """Build and initialize the network, with equal weights in all workers."""
    mx.random.seed(7)
    np.random.seed(7)
    net = train_gluon.network(options.blocks, options.filters)
    # With all shapes known, nothing is computed before the kvstore has the weights: a convolution
    # leaves them in MKLDNN's blocks, which MXNet's kvstore (and Horovod) refuse.
    net.infer_shape(mx.nd.zeros(options.shape))
    net.initialize(mx.init.Xavier(), ctx=options.ctx)
    return net


class ByGluon:
    """Gluon's training loop."""

    def __init__(self, options: Any, store: Any) -> None:
        self.options, self.store, self.net = options, store, network(options)
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        if options.how == "none":
            self.net.hybridize()
        else:
            memonger.gluon.plan(self.net, ctx=options.ctx, **PLANS[options.how])

    @property
    def plan(self) -> Optional[memonger.Plan]:
        """The plan, once a step was run."""
        return None if self.options.how == "none" else memonger.gluon.plan_of(self.net)

    def start(self) -> None:
        """Give the weights to the kvstore."""
        how = {"kvstore": self.store, "update_on_kvstore": False}
        self.trainer = gluon.Trainer(self.net.collect_params(), *OPTIMIZER, **how)
        # MXNet takes the weights to begin with in the first step. A slow worker would get the
        # first gradients in their place; so all take them here, before there are gradients.
        self.trainer.save_states(os.devnull)
        mx.nd.waitall()
        self.store._barrier()

    def save_optimizer(self, path: str) -> None:
        """Write the state of the optimizer."""
        self.trainer.save_states(path)

    def load_optimizer(self, path: str) -> None:
        """Read the state of the optimizer."""
        self.trainer.load_states(path)

    def step(self, x: Any, y: Any) -> None:
        """Train with a batch."""
        with autograd.record():
            loss = self.loss(self.net(x), y)
        loss.backward()
        self.trainer.step(self.options.batch * self.store.num_workers)

    def states(self) -> Arrays:
        """Give the weights and running statistics."""
        return {name: p.data() for name, p in self.net.collect_params().items()}

    def set_states(self, states: Arrays) -> None:
        """Set the weights and running statistics."""
        for name, parameter in self.net.collect_params().items():
            parameter.set_data(states[name])

    def scores(self, images: Any) -> Any:
        """Compute the scores of the classes."""
        return self.net(mx.nd.array(images, ctx=self.options.ctx)).asnumpy()


class ByModule:
    """Module, of the same network."""

    def __init__(self, options: Any, store: Any) -> None:
        self.options, self.store, net = options, store, network(options)
        symbol = mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax")
        self.plan = None
        if options.how != "none":
            shapes = {"data": options.shape}
            self.plan = memonger.plan(symbol, shapes, ctx=options.ctx, **PLANS[options.how])
            symbol = self.plan.symbol
        self.module = mx.mod.Module(symbol, context=options.ctx)
        self.module.bind([("data", options.shape)], [("softmax_label", options.shape[:1])])
        self.set_states({name: p.data() for name, p in net.collect_params().items()})

    def start(self) -> None:
        """Give the weights to the kvstore."""
        # The workers update, which can then save the optimizer's state.
        os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
        self.module.init_optimizer(self.store, *OPTIMIZER)

    def save_optimizer(self, path: str) -> None:
        """Write the state of the optimizer."""
        # Module.save_optimizer_states leaves out the number of updates, which Adam computes with.
        with open(path, "wb") as file:
            file.write(self.module._updater.get_states(dump_optimizer=True))

    def load_optimizer(self, path: str) -> None:
        """Read the state of the optimizer."""
        self.module.load_optimizer_states(path)

    def step(self, x: Any, y: Any) -> None:
        """Train with a batch."""
        self.module.forward_backward(mx.io.DataBatch([x], [y]))
        self.module.update()

    def states(self) -> Arrays:
        """Give the weights and running statistics."""
        arguments, auxiliary = self.module.get_params()
        return {**arguments, **auxiliary}

    def set_states(self, states: Arrays) -> None:
        """Set the weights and running statistics."""
        self.module.init_params(arg_params=states, aux_params=states, force_init=True)

    def scores(self, images: Any) -> Any:
        """Compute the scores of the classes."""
        return self.module.predict(mx.io.NDArrayIter(images, None, self.options.batch)).asnumpy()


LOOPS: Dict[str, Any] = {"gluon": ByGluon, "module": ByModule}
