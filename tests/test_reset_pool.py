"""Starts of episodes, drawn one for each step or a pool of them for a rollout."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from gymnax.environments.environment import Environment
from helpers import assert_same, jit

from ppo_jax import ConfigError, PPOConfig, collect_rollout, init_agent, train


@flax.struct.dataclass
class NumberState:
    number: jax.Array  # of the episode, which no other has
    time: jax.Array


class Numbers(Environment):
    """Shows a number that was drawn when the episode began, and how long ago that was.

    An episode lasts as many steps as its length, or one of 1, 2 and 3 that goes with its number.
    """

    def __init__(self, length=None):
        self.length = length

    def reset_env(self, key, params):
        number = jax.random.randint(key, (), 0, 2**30)
        return self.show(NumberState(number, jnp.int32(0))), NumberState(number, jnp.int32(0))

    def show(self, state):
        return jnp.stack([state.number, state.time])

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        length = self.length or 1 + state.number % 3
        return self.show(state), state, jnp.float32(1), state.time >= length, {}

    def is_truncated(self, state, params):
        return jnp.array(False)

    def action_space(self, params):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(0, 2**30, (2,), jnp.int32)


class CostlyNumbers(Numbers):
    """Says that its resets take long, as the environments of suites do."""

    resets_cost_much = True


SIZES = dict(n_envs=8, n_steps=64, net_arch=(), batch_size=512, n_epochs=1, total_timesteps=512)


def rollouts(env, n=3, **settings):
    """Return the numbers of the episodes that begin in each of n rollouts one after the other.

    An agent's first episodes, which no rollout begins, are left out.
    """
    config = PPOConfig(env, **SIZES | settings)
    collect = jit(collect_rollout)
    agent, begun = jit(init_agent)(config, jax.random.key(0)), []
    for key in jax.random.split(jax.random.key(1), n):
        before = agent.obs[:, 0]
        agent, rollout = collect(config, agent, key)
        shown = np.concatenate([rollout.obs, agent.obs[None]])
        ended = np.concatenate([np.zeros((1, len(before)), bool), rollout.terminated])
        np.testing.assert_array_equal(shown[:-1, :, 0][~ended[1:]], shown[1:, :, 0][~ended[1:]])
        assert (shown[ended][:, 1] == 0).all() and (shown[1:][~ended[1:]][:, 1] > 0).all()
        begun.append(shown[ended][:, 0])
    return begun


def test_without_a_pool_every_episode_has_a_start_of_its_own():
    for settings in ({}, {"reset_pool": 0}):
        starts = np.concatenate(rollouts(Numbers(), **settings))
        assert len(starts) > 600 and len(set(starts.tolist())) == len(starts)


@pytest.mark.parametrize("size", [1, 5, 8, 40])
def test_episodes_begin_with_one_of_a_pool_that_is_new_in_each_rollout(size):
    pools = [set(starts.tolist()) for starts in rollouts(Numbers(), reset_pool=size)]
    assert all(1 <= len(pool) <= size for pool in pools)
    if size < 40:  # 250 episodes begin, so that each start of a small pool is used
        assert [len(pool) for pool in pools] == [size] * 3
    assert len(set.union(*pools)) == sum(map(len, pools)), "no start is used in two rollouts"


@pytest.mark.parametrize("length", [None, 1], ids=["at different times", "all at the same time"])
def test_a_pool_is_used_as_evenly_as_chance_uses_it(length):
    """As many different starts as draws of the pool at random give, and no start preferred."""
    size = 256
    for starts in rollouts(Numbers(length), reset_pool=size):
        n = len(starts)
        assert n > 200
        missed = size * (1 - 1 / size) ** n  # of the pool, on average
        _, used = np.unique(starts, return_counts=True)
        # The number of different starts has a variance below the mean number missed.
        spread = 5 * np.sqrt(missed + 1)
        assert size - missed - spread < len(used) <= size
        if length is None:
            assert len(used) < size - missed + spread
        # How often the starts were used: its variance is that of draws or less.
        counts = np.concatenate([used, np.zeros(size - len(used))])
        assert counts.var() < 1.5 * n / size and counts.max() < n / size + 7 * np.sqrt(n / size)


def test_each_environment_goes_its_own_way_through_the_pool():
    """Were all of them given the same start at the same time, they would play the same episode."""
    config = PPOConfig(Numbers(4), reset_pool=64, **SIZES)
    agent = jit(init_agent)(config, jax.random.key(0))
    _, rollout = jit(collect_rollout)(config, agent, jax.random.key(1))
    for shown in np.asarray(rollout.obs[4::4, :, 0]):
        assert len(set(shown.tolist())) == 8


def test_a_pool_is_as_large_as_there_are_environments_where_a_reset_costs_much():
    for starts in rollouts(CostlyNumbers()):
        assert len(set(starts.tolist())) == 8
    starts = np.concatenate(rollouts(CostlyNumbers(), reset_pool=0))
    assert len(set(starts.tolist())) == len(starts)


def test_the_first_episodes_of_an_agent_differ_whatever_the_pool():
    config = PPOConfig(Numbers(), **SIZES | {"reset_pool": 1})
    agent = jit(init_agent)(config, jax.random.key(0))
    assert len(set(agent.obs[:, 0].tolist())) == 8


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_gymnax_trains_as_before_with_no_pool(env):
    sizes = dict(n_envs=4, n_steps=32, total_timesteps=256, n_epochs=1, batch_size=64)
    unset, off = PPOConfig(env, **sizes), PPOConfig(env, reset_pool=0, **sizes)
    results = [jit(train)(config, jax.random.key(0)) for config in (unset, off)]
    agents, metrics = zip(*results)
    assert_same(*(agent.params for agent in agents))
    assert_same(*(agent.env_states for agent in agents))
    assert_same(*metrics)


class Keys(Numbers):
    """Shows the random bits that an episode began with, and those that the last step drew.

    As a step of many parts does, it splits its key first: those keys are its own.
    """

    def reset_env(self, key, params):
        bits = jax.random.bits(key, (1,))
        return jnp.concatenate([bits, jnp.zeros(4, jnp.uint32)]), NumberState(bits, jnp.int32(0))

    def step_env(self, key, state, action, params):
        bits = jax.vmap(jax.random.bits)(jax.random.split(key, 4))
        state = state.replace(time=state.time + 1)
        shown = jnp.concatenate([state.number, bits])
        return shown, state, jnp.float32(1), state.time >= 2, {}

    def observation_space(self, params):
        return spaces.Box(0, 2.0**32, (5,), jnp.uint32)


@pytest.mark.parametrize("size", [0, 4, 16])
def test_no_random_number_is_used_twice(size):
    config = PPOConfig(Keys(), **SIZES | {"reset_pool": size})
    agent = jit(init_agent)(config, jax.random.key(0))
    _, rollout = jit(collect_rollout)(config, agent, jax.random.key(1))
    starts = set(np.unique(rollout.obs[..., 0]).tolist())
    of_steps = np.asarray(rollout.final_obs[..., 1:]).ravel().tolist()
    assert len(set(of_steps)) == len(of_steps) == 4 * 64 * 8
    assert not starts & set(of_steps), "of a start and of a step"


@pytest.mark.parametrize("given", [-1, 1.5, "many"])
def test_a_pool_is_of_a_whole_number(given):
    with pytest.raises(ConfigError, match=r"reset_pool: .* whole number"):
        PPOConfig(reset_pool=given)
