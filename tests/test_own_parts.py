"""Parts of the user's own in place of ours: losses, advantages, optimisers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SMALL, assert_same, jit

import ppo_jax
from ppo_jax import ConfigError, PPOConfig, train


def monte_carlo(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    return ppo_jax.compute_gae(reward, value, next_value, terminated, truncated, gamma, 1.0)


def twice(params, config, network, minibatch):
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return 2 * loss, report


def sgd_with_momentum(rate):
    return optax.sgd(rate, 0.5)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (dict(advantage_function=monte_carlo), dict(gae_lambda=1.0)),
        (dict(loss_function=twice), dict(learning_rate=0.2)),
        (dict(optimizer=optax.sgd), {}),
        (dict(optimizer=sgd_with_momentum), dict(optimizer_kwargs={"momentum": 0.5})),
        (dict(net_arch={"pi": [8], "vf": [4, 4]}), dict(net_arch=(8,), net_arch_vf=(4, 4))),
    ],
    ids=["advantage", "loss", "optimiser", "arguments", "arch"],
)
def test_each_part_can_be_replaced(ours, theirs):
    """Against the setting that does the same: lambda 1; by SGD, twice the learning rate."""
    base = SMALL | dict(optimizer="sgd", learning_rate=0.1, max_grad_norm=1e9, n_epochs=2)
    one, other = (
        jit(train)(PPOConfig(**base | changes), jax.random.key(0))[0] for changes in (ours, theirs)
    )
    assert_same(one.params, other.params, atol=1e-5)


def with_norm(params, config, network, minibatch):
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss, report | {"norm": optax.tree.norm(params), "fifty": jnp.float32(50)}


def bare(params, config, network, minibatch):
    loss, _ = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss, {}


def test_a_loss_may_report_more():
    """Each number is a mean over minibatches, in the metrics beside ours; the agent is the same."""
    config = PPOConfig(**SMALL | dict(n_epochs=2))
    agent, ours = jit(train)(config, jax.random.key(0))
    other, metrics = jit(train)(config.replace(loss_function=with_norm), jax.random.key(0))
    assert set(metrics) == set(ours) | {"norm", "fifty"}
    np.testing.assert_allclose(metrics["fifty"], [50, 50], rtol=1e-6)
    last = optax.tree.norm(agent.params)
    np.testing.assert_allclose(metrics["norm"], last, rtol=0.1)
    assert metrics["norm"].shape == (2,)
    assert_same(agent.params, other.params, atol=1e-6)


def test_a_loss_may_report_less():
    config = PPOConfig(**SMALL | dict(loss_function=bare))
    _, metrics = jit(train)(config, jax.random.key(0))
    names = {"timesteps", "return", "length", "explained_variance"}
    assert set(metrics) == names | {"optimizer_steps", "skipped_steps"}
    np.testing.assert_array_equal(metrics["optimizer_steps"], [4, 4])


def vector(params, config, network, minibatch):
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss, report | {"advantages": minibatch.advantage}


def alone(params, config, network, minibatch):
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss, report["approx_kl"]


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(loss_function=bare, target_kl=0.01), "must report approx_kl"),
        (dict(loss_function=vector), "a dictionary of scalars"),
        (dict(loss_function=alone), "a dictionary of scalars"),
    ],
    ids=["kl", "vector", "alone"],
)
def test_a_report_that_cannot_be_used_is_refused(changes, words):
    with pytest.raises(ConfigError, match=f"loss_function: .*{words}"):
        train(PPOConfig(**SMALL | changes), jax.random.key(0))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(vf_loss="l1"), "vf_loss: 'l1' .* mse, huber"),
        (dict(optimizer="adm"), "optimizer: .*'adm'.* adam"),
        (dict(optimizer_kwargs=["lr"]), "optimizer_kwargs: .*'lr'.* name=1"),
        (dict(optimizer_kwargs={"no_such": 1}), "optimizer_kwargs: .*no_such"),
        (dict(loss_function="mine"), "loss_function: 'mine' .* a function"),
        (dict(advantage_function=3), "advantage_function: 3 .* a function"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused(changes, words):
    """An optimiser's arguments are found out when it is made."""
    with pytest.raises(ConfigError, match=words):
        train(PPOConfig(**SMALL | changes), jax.random.key(0))
