"""What is not finite: where it is told of, and that it spoils nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_environments import Endless, go_on, is_whole
from helpers import SMALL, assert_same, jit

import ppo_jax
from ppo_jax import PPOConfig, RunningStatistics, init_agent, train, update

KEYS = jax.random.split(jax.random.key(0), 3)
SPOILT = 1e6  # the advantage of a sample whose minibatch has no loss


def fragile(params, config, network, minibatch):
    """Return the loss of PPO; of a minibatch with a spoilt sample NaN, and an infinite KL."""
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    is_spoilt = jnp.any(minibatch.advantage == SPOILT)
    one = jnp.where(is_spoilt, jnp.nan, 1.0)
    report["approx_kl"] = jnp.where(is_spoilt, jnp.inf, report["approx_kl"])
    return loss * one, report | {"one": one}


def spoil_first(*arguments):
    """Return advantages and value targets, with one spoilt sample."""
    advantage, target = ppo_jax.compute_gae(*arguments)
    return advantage.at[0, 0].set(SPOILT), target


def spoil_all(reward, *rest):
    """Return infinite advantages, and value targets."""
    return jnp.full_like(reward, jnp.inf), reward


# ---------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("target_kl", [None, 1e3])
def test_a_minibatch_without_a_gradient_is_skipped(target_kl):
    """One of four in each epoch; a limit of the divergence does not end the update there."""
    parts = dict(loss_function=fragile, advantage_function=spoil_first)
    config = PPOConfig(**SMALL | dict(n_epochs=3, target_kl=target_kl) | parts)
    agent, metrics = jit(update)(config, init_agent(config, KEYS[0]))
    assert metrics["skipped_steps"] == 3 and metrics["optimizer_steps"] == 9
    assert metrics["one"] == 1 and np.isfinite(metrics["approx_kl"])
    assert is_whole(agent.params) and is_whole(agent.opt_state)
    assert agent.failing_since.tolist() == [0, 0, 1]


def test_what_is_skipped_might_as_well_not_be_there():
    """Weights, the optimiser's state and means are those of the other minibatches alone."""
    config = PPOConfig(**SMALL | dict(loss_function=fragile, n_epochs=2)).at(1.0)
    agent, rollout = jit(ppo_jax.collect_rollout)(config, init_agent(config, KEYS[0]), KEYS[1])
    batch = jit(ppo_jax.make_batch)(config, agent, rollout)
    batch = batch._replace(advantage=batch.advantage.at[5].set(SPOILT))
    minibatches = jnp.broadcast_to(jnp.arange(128).reshape(4, 32), (2, 4, 32))
    optimise = jit(ppo_jax.optimise)
    ours, metrics = optimise(config, agent, batch, minibatches)
    theirs, expected = optimise(config, agent, batch, minibatches[:, 1:])
    assert_same(ours.params, theirs.params, rtol=1e-5, atol=1e-7)
    assert_same(ours.opt_state, theirs.opt_state, rtol=1e-5, atol=1e-7)
    assert metrics.pop("skipped_steps") == 2 and expected.pop("skipped_steps") == 0
    assert_same(metrics, expected, rtol=1e-4, atol=1e-6)


def test_without_any_gradient_nothing_is_learnt():
    """Then no mean is known."""
    config = PPOConfig(**SMALL | dict(advantage_function=spoil_all, target_kl=0.01))
    before = init_agent(config, KEYS[0])
    agent, metrics = jit(update)(config, before)
    assert_same(agent.params, before.params)
    assert_same(agent.opt_state, before.opt_state)
    assert metrics["optimizer_steps"] == 0 and metrics["skipped_steps"] == 4
    assert np.isnan(metrics["policy_loss"]) and np.isnan(metrics["approx_kl"])


@pytest.mark.parametrize("changes", [{}, {"batch_size": 128}], ids=["minibatches", "one"])
def test_an_agent_that_diverges_leaves_the_others_as_they_are(changes):
    """With a learning rate that no weight survives the agent keeps those it began with."""
    config = PPOConfig(**SMALL | changes)

    def train_with(rate, key):
        agent, metrics = train(config.replace(learning_rate=rate), key)
        return agent.replace(key=jax.random.key_data(agent.key)), metrics

    train_all = jit(jax.vmap(train_with))
    agents, metrics = train_all(jnp.array([1e-3, 1e30, 1e-3]), KEYS)
    well = train_all(jnp.array([1e-3, 1e-3, 1e-3]), KEYS)
    for seed in (0, 2):
        ours = jax.tree.map(lambda x: x[seed], (agents, metrics))  # noqa: B023
        assert_same(ours, jax.tree.map(lambda x: x[seed], well))  # noqa: B023
    first = init_agent(config, KEYS[1]).params
    assert_same(jax.tree.map(lambda x: x[1], agents.params), first, atol=1e-6)
    assert agents.failing_since.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert metrics["optimizer_steps"][1].tolist() == [0, 0]
    assert (metrics["skipped_steps"][1] > 0).all()


# ------------------------------------------------------------------------------------- environments


def failing(what, value, first, last):
    """Return an environment without episodes' ends, whose steps first to last give this value."""

    def step(key, state, action):
        obs, new, reward, terminated = go_on(key, state, action)
        obs = obs / 100
        fails = (first <= state.time) & (state.time <= last)
        if what == "obs":
            obs = jnp.where(fails, value, obs)
        else:
            reward = jnp.where(fails, value, reward)
        return obs, new, reward, terminated

    return Endless(step=step)


@pytest.mark.parametrize(
    "what, value, first, last, expected",
    [  # of updates that take 16 steps each
        ("reward", jnp.nan, 20, 20, [[0, 0, 0], [0, 2, 2], [0, 0, 0], [0, 0, 0]]),
        ("reward", jnp.inf, 20, 20, [[0, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0]]),  # clipped to 10
        ("reward", jnp.nan, 20, 99, [[0, 0, 0], [0, 2, 2], [0, 2, 2], [0, 2, 2]]),
        ("obs", jnp.nan, 20, 20, [[0, 0, 0], [2, 0, 2], [0, 0, 0], [0, 0, 0]]),
        ("obs", jnp.nan, 31, 31, [[0, 0, 0], [2, 0, 2], [2, 0, 2], [0, 0, 0]]),  # between rollouts
    ],
)
def test_what_an_environment_does_is_told_as_its_own(what, value, first, last, expected):
    """And forgotten when it is over: statistics and weights have learnt from the rest alone."""
    settings = dict(env=failing(what, value, first, last), normalize_obs=True)
    config = PPOConfig(**SMALL | settings | dict(normalize_reward=True, net_arch=(4,)))
    agent = init_agent(config, KEYS[0])
    for since in expected:
        agent, metrics = UPDATE(config, agent)
        assert agent.failing_since.tolist() == since
        statistics = (agent.obs_statistics, agent.return_statistics, agent.discounted_return)
        assert is_whole((agent.params, agent.opt_state, statistics))
    counts = [int(x.count) for x in (agent.obs_statistics[""], agent.return_statistics)]
    n_failed = sum(any(since[:2]) for since in expected) * 128
    of_failed = {"reward": [512, 512 - n_failed], "obs": [512 - 128, 512]}
    assert counts == of_failed[what]
    assert (metrics["optimizer_steps"] == 4) == (expected[-1] == [0, 0, 0])


UPDATE = jit(update)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e30])
def test_statistics_take_in_nothing_that_is_not_finite(value):
    """Nor what is too large for a float when it is squared."""
    statistics = RunningStatistics(jnp.float32(5), jnp.ones(2), jnp.full(2, 3.0))
    samples = jnp.ones((4, 2)).at[2, 1].set(value)
    updated = ppo_jax.update_statistics(PPOConfig(), statistics, samples)
    assert_same(updated, statistics)
