"""Train one network by several workers, which all recompute by the same plan.

The workers add up their gradients with MXNet's distributed kvstore. Without ``--local`` this is one
process of a job, and the DMLC_* variables say which; ``--local 2`` starts a whole job on this
machine. Every worker plans by itself; after the first step they make sure that all have the same
plan. Where a process of the job dies, the others stop with a message (exit status 75). Start the
job again with ``--resume``, and it ends with the same bits as if nothing had happened (but of
``dist_async``, no two runs of which are equal).
"""

import os

# Read by MXNet when it is loaded. On the CPU it is not repeatable with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PS_HEARTBEAT_INTERVAL", "1")  # seconds; without it no death is seen
os.environ.setdefault("PS_HEARTBEAT_TIMEOUT", "20")
# In a scheduler or server, ``import mxnet`` does not return. Without its role it does (`serve`).
ROLE = os.environ.pop("DMLC_ROLE", "")

import argparse
import hashlib
import shutil
import sys
import tempfile
import traceback
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import jobs
import memonger
import mxnet as mx
import numpy as np
import train_gluon
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision
from train_digits import TRAINING_IMAGES, digits

Arrays = Dict[str, Any]
OPTIMIZER = ("adam", {"learning_rate": 0.001})
PLANS: Dict[str, Dict[str, Any]] = {
    "marks": {"how": "marks"},
    "schedule": {"how": "schedule", "work": 2.0},
}


def network(options: argparse.Namespace) -> Any:
    """Build and initialize the network, with equal weights in all workers."""
    mx.random.seed(7)
    np.random.seed(7)
    if options.synthetic:
        net = vision.resnet50_v1(prefix="net_")
    else:
        net = train_gluon.network(options.blocks, options.filters)
    # With all shapes known, nothing is computed before the kvstore has the weights: a convolution
    # leaves them in MKLDNN's blocks, which MXNet's kvstore (and Horovod) refuse.
    net.infer_shape(mx.nd.zeros(options.shape))
    net.initialize(mx.init.Xavier(), ctx=options.ctx)
    return net


class ByGluon:
    """Gluon's training loop."""

    def __init__(self, options: argparse.Namespace, store: Any) -> None:
        self.options, self.store, self.net = options, store, network(options)
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.batch = options.batch * (store.num_workers if options.sync else 1)
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
        how = {"kvstore": self.store, "update_on_kvstore": not self.options.sync}
        self.trainer = gluon.Trainer(self.net.collect_params(), *OPTIMIZER, **how)
        if self.options.sync:
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
        self.trainer.step(self.batch)

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

    def __init__(self, options: argparse.Namespace, store: Any) -> None:
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
        # A synchronous job updates in the workers, which can then save the optimizer's state.
        os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0" if self.options.sync else "1"
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


def same_plan(store: Any, key: Any, plan: Any) -> None:
    """Make sure that this worker has the plan of worker 0; the digest goes over the kvstore."""
    operations = [] if plan.schedule is None else plan.schedule.operations.tolist()
    digest = hashlib.sha256(f"{plan.symbol.tojson()}{operations}".encode()).digest()
    mine = mx.nd.array(list(digest))
    first = mx.nd.zeros_like(mine)
    store.broadcast(key, mine, out=first)
    if (mine != first).asnumpy().any():
        raise SystemExit(
            f"worker {store.rank} has another plan than worker 0. Give all workers the same "
            "options, and the same versions of memonger and MXNet, on the same kind of device"
        )


def batches(options: argparse.Namespace, store: Any, epoch: int) -> Iterator[Tuple[Any, Any]]:
    """Yield this worker's part of an epoch; its order follows from the epoch alone."""
    part = 0 if options.same_data else store.rank
    if options.synthetic:
        draw = np.random.RandomState([epoch, part])
        for _ in range(options.batches):
            yield draw.uniform(size=options.shape), draw.randint(0, 1000, options.batch)
        return
    images, labels = digits()
    order = np.random.RandomState(epoch).permutation(TRAINING_IMAGES)[part :: store.num_workers]
    for k in range(TRAINING_IMAGES // store.num_workers // options.batch):
        chosen = order[k * options.batch : (k + 1) * options.batch]
        yield images[chosen], labels[chosen]


def average(store: Any, key: Any, training: Any, new: bool) -> None:
    """Give all workers the mean of their running statistics; their weights are equal already."""
    mx.nd.waitall()
    states = training.states()
    names = sorted(name for name in states if "running" in name)
    flat = mx.nd.array(np.concatenate([states[name].asnumpy() for name in names]))
    if new:
        store.init(key, mx.nd.zeros_like(flat))
    store.pushpull(key, flat, out=flat)
    for name in names:
        size = states[name].size
        states[name], flat = flat[:size] / store.num_workers, flat[size:]
    training.set_states(states)


def saved(folder: str) -> List[int]:
    """List the epochs after which there is a checkpoint in this folder."""
    if not os.path.isdir(folder):
        return []
    return sorted(int(name[6:]) for name in os.listdir(folder) if name.startswith("epoch-"))


def save(options: argparse.Namespace, training: Any, epoch: int) -> None:
    """Write a checkpoint, which is there as a whole or not at all, and keep the one before."""
    folder = options.checkpoints
    part = tempfile.mkdtemp(dir=folder)
    mx.nd.save(os.path.join(part, "net.params"), training.states())
    if options.sync:  # otherwise the optimizer is in the servers, which MXNet cannot ask for it
        training.save_optimizer(os.path.join(part, "optimizer.states"))
    try:
        os.rename(part, os.path.join(folder, f"epoch-{epoch}"))
    except OSError:  # workers that share the folder write the same
        shutil.rmtree(part)
    for old in saved(folder)[:-2]:
        shutil.rmtree(os.path.join(folder, f"epoch-{old}"), ignore_errors=True)


def begin(store: Any, key: Any, options: argparse.Namespace) -> int:
    """Tell the epoch to begin with: that of the latest checkpoint that all workers have.

    Of ``dist_async`` it is that of worker 0, which alone writes checkpoints.
    """
    if not options.checkpoints:
        return 0
    os.makedirs(options.checkpoints, exist_ok=True)
    mine = max(saved(options.checkpoints), default=0)
    latest = mx.nd.zeros(store.num_workers)
    if not options.sync:  # the servers add up nothing; but all can read what worker 0 has put in
        store.broadcast(key, latest + mine, out=latest)
        first = int(latest[0].asscalar())
        if first != mine:
            raise SystemExit(
                f"worker {store.rank} sees the checkpoint of epoch {mine}, worker 0 that of epoch "
                f"{first}. With dist_async, all workers must share the folder of checkpoints"
            )
        return first
    store.init(key, latest)
    latest[store.rank] = mine
    store.pushpull(key, latest, out=latest)  # the sum of what all have put in
    epochs = latest.asnumpy().astype(int)
    if epochs.max() - epochs.min() > 1:  # a crash leaves them one apart at most
        raise SystemExit(f"worker {epochs.argmin()} lacks the checkpoint of epoch {epochs.max()}")
    return int(epochs.min())


def train(options: argparse.Namespace, store: Any) -> None:
    """Train as one of the workers."""
    names = ("digest", "epochs", "statistics")
    # Module's keys are strings, a Trainer's are numbers; MXNet fails from 215,000 on.
    digest, epochs, statistics = names if options.api == "module" else range(100_000, 100_003)
    training: Any = (ByGluon if options.api == "gluon" else ByModule)(options, store)
    first = begin(store, epochs, options)
    folder = os.path.join(options.checkpoints, f"epoch-{first}")
    if first:
        training.set_states(mx.nd.load(os.path.join(folder, "net.params")))
    training.start()
    if first and options.sync:
        training.load_optimizer(os.path.join(folder, "optimizer.states"))
    for epoch in range(first, options.epochs):
        print(f"worker {store.rank}, process {os.getpid()}: epoch {epoch}", flush=True)
        # MXNet tells nobody the state of its random numbers; so it is set anew in each epoch.
        mx.random.seed(1 + epoch * store.num_workers + (0 if options.same_data else store.rank))
        for k, (x, y) in enumerate(batches(options, store, epoch)):
            training.step(*(mx.nd.array(each, ctx=options.ctx) for each in (x, y)))
            if k == 0 and epoch == first and training.plan is not None:
                same_plan(store, digest, training.plan)
        if options.sync:
            average(store, statistics, training, epoch == first)
        if options.checkpoints and (options.sync or store.rank == 0):
            save(options, training, epoch + 1)
    report(options, store, training)


def report(options: argparse.Namespace, store: Any, training: Any) -> None:
    """Print the plan, a digest of the parameters, and the accuracy."""
    mx.nd.waitall()
    if training.plan is not None and store.rank == 0:
        print(training.plan)
    found = hashlib.sha256()
    for _, array in sorted(training.states().items()):
        found.update(array.asnumpy().tobytes())
    text = f"worker {store.rank}: parameters {found.hexdigest()}"
    if not options.synthetic:
        images, labels = (each[TRAINING_IMAGES:] for each in digits())
        accuracy = (training.scores(images).argmax(axis=1) == labels).mean()
        text += f", accuracy {accuracy:.4f}"
    print(text, flush=True)


def serve(options: argparse.Namespace) -> None:
    """Do what this process is for, to the end of the job."""
    os.environ["DMLC_ROLE"] = ROLE
    # Of a worker this returns when all processes of the job are there.
    store = mx.kv.create(options.kvstore)
    with jobs.watched(store, ROLE):
        try:
            if ROLE == "worker":
                train(options, store)
                store._barrier()
            else:
                mx.kvstore.kvstore_server.KVStoreServer(store).run()
        except BaseException as error:
            if isinstance(error, SystemExit):
                print(error, file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
            os._exit(1)  # an exit by Python would wait for the others


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the example; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--api", choices=("gluon", "module"), default="gluon")
    add("--kvstore", choices=("dist_sync", "dist_async", "dist_device_sync"), default="dist_sync")
    add("--how", choices=(*PLANS, "none"), default="marks", help="how to plan")
    add("--synthetic", action="store_true", help="ResNet-50 and random images of ImageNet's size")
    for name, default, what in (
        ("--blocks", 8, "residual blocks"),
        ("--filters", 16, "filters of every convolution"),
        ("--batch", 50, "images in a worker's batch"),
        ("--epochs", 4, "times that all images are shown"),
        ("--batches", 4, "batches of a worker in an epoch of --synthetic"),
        ("--local", 0, "start a job on this machine, with so many workers"),
        ("--servers", 1, "servers that --local starts"),
        ("--gpu", None, "the GPU of this worker (default: the CPU)"),
    ):
        add(name, type=int, default=default, metavar="N", help=what)
    add("--checkpoints", default="", metavar="FOLDER", help="write one after each epoch")
    add("--resume", action="store_true", help="go on from the latest checkpoint, if any")
    add("--same-data", action="store_true", help="the same batches for all, to compare bits")
    options = parser.parse_args(given)
    options.sync = options.kvstore != "dist_async"
    if options.checkpoints and saved(options.checkpoints) and not options.resume:
        parser.error(f"{options.checkpoints} has checkpoints; give --resume or another folder")
    options.shape = (options.batch, *((3, 224, 224) if options.synthetic else (1, 8, 8)))
    options.ctx = mx.cpu() if options.gpu is None else mx.gpu(options.gpu)
    if ROLE:
        serve(options)
        return 0
    if not options.local:
        parser.error("start a job with --local N, or set DMLC_ROLE and the other DMLC_ variables")
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), *given]
    patience = 2 * int(os.environ["PS_HEARTBEAT_TIMEOUT"]) + 10  # until all have stopped
    try:
        codes = jobs.run(command, options.local, options.servers, patience)
    except KeyboardInterrupt:
        return 130
    return jobs.STOPPED if jobs.STOPPED in codes else int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
