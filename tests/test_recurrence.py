"""Policies with a memory: what training replays is what happened in the rollout."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, jit, rollout_and_batch

import ppo_jax
from ppo_jax import Categorical, ConfigError, PPOConfig


class Counting(nn.Module):
    """A memory of the user's: a GRU, and the steps of the episode so far counted down from 7."""

    @nn.compact
    def __call__(self, obs, memory):
        hidden, left = memory
        given = jnp.concatenate([obs, left[..., None]], axis=-1)
        hidden, latent = nn.GRUCell(8)(hidden, given)
        distribution = Categorical(nn.Dense(2)(latent))
        return distribution, nn.Dense(1)(latent)[..., 0], (hidden, left - 1)

    def initial_memory(self, n):
        return jnp.full((n, 8), 0.5), jnp.full(n, 7.0)


@pytest.mark.parametrize("policy", ["gru", "lstm", Counting()], ids=["gru", "lstm", "own"])
def test_replayed_windows_give_every_log_prob_and_value_back(policy):
    """Against a plain loop over steps, which forgets where the previous step ended an episode."""
    sizes = dict(n_envs=3, n_steps=64, sub_traj_len=16, net_arch=(8,))
    config = PPOConfig("CartPole-v1", policy=policy, **sizes)
    agent, rollout, batch, moved = jit(rollout_and_batch)(config, jax.random.key(2))
    network = ppo_jax.make_network(config)
    step = jit(lambda params, obs, memory: network.apply(params, obs, memory))
    done, memory = np.asarray(rollout.terminated | rollout.truncated), agent.memory
    assert done.reshape(4, 16, 3)[:, :-1].sum() >= 5, "no episode ended inside of a window"
    initial = network.initial_memory(3)
    log_probs, values, memories = [], [], []
    for t in range(64):
        memories.append(memory)
        distribution, value, memory = step(agent.params, rollout.obs[t], memory)
        log_probs.append(distribution.log_prob(rollout.action[t]))
        values.append(value)

        def begin(first, x):
            over = done[t].reshape((3,) + (1,) * (x.ndim - 1))  # noqa: B023
            return np.where(over, first, x)

        memory = jax.tree.map(begin, initial, memory)

    def windows(steps):
        return np.stack(steps).reshape(4, 16, 3).swapaxes(1, 2).ravel()

    np.testing.assert_allclose(np.ravel(batch.log_prob), windows(log_probs), atol=1e-5)
    np.testing.assert_allclose(np.ravel(batch.value), windows(values), atol=1e-5)
    assert_same(moved.memory, memory, atol=1e-5)
    firsts = jax.tree.map(lambda *x: np.concatenate(x), *memories[::16])
    assert_same(batch.memory, firsts, atol=1e-5)
    replay = jit(network.apply)
    distribution, value, _ = replay(agent.params, batch.obs, batch.memory, batch.is_first)
    np.testing.assert_allclose(distribution.log_prob(batch.action), batch.log_prob, atol=1e-5)
    np.testing.assert_allclose(value, batch.value, atol=1e-5)


@pytest.mark.parametrize("policy", ["gru", Counting()], ids=["gru", "own"])
def test_a_time_limits_value_is_that_of_the_memory_after_the_step(policy):
    """Against a plain call with the final observation and the memory that the step left."""
    sizes = dict(n_envs=4, n_steps=16, sub_traj_len=8, net_arch=(8,), gamma=0.9, gae_lambda=0.0)
    limit = {"max_steps_in_episode": 5}
    config = PPOConfig("CartPole-v1", policy=policy, env_params=limit, **sizes)
    agent, rollout, batch, _ = jit(rollout_and_batch)(config, jax.random.key(2))
    network = ppo_jax.make_network(config)

    @jit
    def after(params, obs, memory, final_obs):
        memory = network.apply(params, obs, memory).memory
        return network.apply(params, final_obs, memory).value

    target = np.asarray(batch.value_target).reshape(2, 4, 8).swapaxes(1, 2).reshape(16, 4)
    places = np.argwhere(rollout.truncated)
    assert len(places) >= 8
    for t in np.unique(places[:, 0]):
        memory = jax.tree.map(lambda x: x[t], rollout.memory)  # noqa: B023
        final_value = after(agent.params, rollout.obs[t], memory, rollout.final_obs[t])
        expected = rollout.reward[t] + 0.9 * final_value  # lambda is 0: one step and a value
        cut = np.asarray(rollout.truncated[t])
        np.testing.assert_allclose(target[t][cut], expected[cut], rtol=1e-5)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(sub_traj_len=7), "sub_traj_len: 7 .* n_steps = 128.* 4 and 8"),
        (
            dict(sub_traj_len=16, batch_size=40),
            "batch_size: 40 .* windows of sub_traj_len = 16.* 32 and 64",
        ),
    ],
)
def test_windows_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        PPOConfig(policy="gru", n_envs=64, n_steps=128, **changes)


def test_without_a_memory_windows_do_not_matter():
    assert PPOConfig(policy="mlp", n_steps=128, sub_traj_len=7).sequence_length == 1
