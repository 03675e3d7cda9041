#!/bin/bash
# Expected: learning_rate=0.5 with lr_scheduler=CosineScheduler(max_update=8) starts at 0.5 and falls along a cosine; with
# warm-up it rises to 0.5 first. MXNet even warns that the scheduler's rate "has been overwritten" by learning_rate.
# (Guess: as the warning says.)
# Seen: CosineScheduler and PolyScheduler go on from their own default, 0.01: 0.01, 0.0096, ... The 0.5 has no effect at all.
# FactorScheduler takes 0.5, but warms up to 0.01 and then jumps to 0.5: 0, 0.0033, 0.0067, 0.5.
# MXNet 1.9.1.
# Hurts: large-batch recipes: a network that trains 50 times too slowly, or with a warm-up that is none. Give base_lr to the
# scheduler, the same as learning_rate.
# Source: Optimizer.__init__ sets base_lr alone (python/mxnet/optimizer/optimizer.py); base_lr_orig and warmup_final_lr keep
# the old value (python/mxnet/lr_scheduler.py).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.8 3.9 3.10 3.11; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs one of Python 3.8, 3.9, 3.10, 3.11" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile mxnet==1.9.1 numpy==1.23.5 graphviz==0.8.4 'requests<3'
venv/bin/python - <<'EOF'
import warnings

import mxnet as mx

warnings.simplefilter("ignore")
print("mxnet", mx.__version__)


def rates(scheduler):
    mx.optimizer.create("sgd", learning_rate=0.5, lr_scheduler=scheduler)
    return [round(float(scheduler(update)), 4) for update in range(6)]


schedulers = mx.lr_scheduler
seen = {
    "cosine": rates(schedulers.CosineScheduler(max_update=8)),
    "cosine with base_lr": rates(schedulers.CosineScheduler(max_update=8, base_lr=0.5)),
    "polynomial": rates(schedulers.PolyScheduler(max_update=8)),
    "factor, warm-up": rates(schedulers.FactorScheduler(step=100, warmup_steps=3)),
    "factor, warm-up, base_lr": rates(schedulers.FactorScheduler(step=100, warmup_steps=3, base_lr=0.5)),
}
for name, values in seen.items():
    print(name, values)
assert seen["cosine"][:2] == [0.01, 0.0096] and seen["polynomial"][0] == 0.01
assert seen["cosine with base_lr"][0] == 0.5
assert seen["factor, warm-up"][:4] == [0, 0.0033, 0.0067, 0.5]
assert seen["factor, warm-up, base_lr"][2:4] == [0.3333, 0.5]
EOF
