"""fedjax: `for_each_client` as in its fed_avg, with clipping where its documentation puts it, in `client_final`.

The noise is added to the sum with jax; fedjax has no differential privacy of its own.
"""

from __future__ import annotations

from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from confide.bench.protocol import serve
from confide.workloads import data

COHORT, CLIP, NOISE = 100, 0.5, 1.0


def perceptron(key: Any) -> Any:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (784, 128)) / 28.0,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(second, (128, 10)) / 11.3,
        "b2": jnp.zeros(10),
    }


def loss(weights: Any, batch: Any) -> Any:
    inner = jax.nn.relu(batch["x"] @ weights["w1"] + weights["b1"])
    chosen = jax.nn.log_softmax(inner @ weights["w2"] + weights["b2"])
    return -jnp.take_along_axis(chosen, batch["y"][:, None], axis=1).mean()


def main() -> None:
    fedjax.set_for_each_client_backend("jit")  # pmap fails in its second round with the jax versions that still run it
    features, labels = data.small_clients()
    clients = [fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}) for x, y in zip(features, labels, strict=True)]
    local, central = fedjax.optimizers.sgd(0.1), fedjax.optimizers.sgd(1.0)
    hyper = fedjax.ShuffleRepeatBatchHParams(batch_size=10, num_epochs=1)

    def client_init(shared: Any, key: Any) -> Any:
        return {"params": shared, "state": local.init(shared)}

    def client_step(step: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(step["params"], batch)
        state, params = local.apply(gradients, step["state"], step["params"])
        return {"params": params, "state": state}

    def client_final(shared: Any, step: Any) -> Any:
        delta = jax.tree_util.tree_map(lambda a, b: a - b, shared, step["params"])
        return fedjax.tree_util.tree_clip_by_global_norm(delta, CLIP)

    train = fedjax.for_each_client(client_init, client_step, client_final)

    @jax.jit
    def finish(total: Any, params: Any, state: Any, key: Any) -> Any:
        leaves, form = jax.tree_util.tree_flatten(total)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            (leaf + NOISE * CLIP * jax.random.normal(k, leaf.shape)) / COHORT
            for leaf, k in zip(leaves, keys, strict=True)
        ]
        return central.apply(jax.tree_util.tree_unflatten(form, noisy), state, params)

    held: dict[str, Any] = {"params": perceptron(jax.random.PRNGKey(0)), "key": jax.random.PRNGKey(1)}
    held["state"] = central.init(held["params"])
    draw = np.random.default_rng(0)

    def one_round() -> None:
        held["key"], noise, own = jax.random.split(held["key"], 3)
        cohort = draw.choice(len(clients), COHORT, replace=False).tolist()
        given = [(user, clients[user].shuffle_repeat_batch(hyper), own) for user in cohort]
        total = fedjax.tree_util.tree_zeros_like(held["params"])
        for _, delta in train(held["params"], given):
            total = fedjax.tree_util.tree_add(total, delta)
        held["state"], held["params"] = finish(total, held["params"], held["state"], noise)
        jax.block_until_ready(held["params"])

    serve(one_round)


if __name__ == "__main__":
    main()
