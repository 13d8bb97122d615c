"""Environments made of two functions, and what such functions do wrong."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
from gymnax.environments import spaces
from gymnax.environments.environment import Environment, EnvParams

LINE = spaces.Box(0, 9, (1,))
TWO = spaces.Discrete(2)


@flax.struct.dataclass
class State:
    """The number of steps of an episode, and whatever else an environment keeps."""

    time: Any
    x: Any = 0


def begin(key):
    """Return the observation and the state with which an episode begins."""
    return jnp.zeros(1), State(jnp.int32(0))


def go_on(key, state, action):
    """Return the next observation and state, a reward of 1 and no end."""
    obs = jnp.full(1, state.time + 1, jnp.float32)
    return obs, State(state.time + 1), jnp.float32(1), jnp.array(False)


class Bare(Environment):
    """reset(key) gives obs, state; step(key, state, action) gives obs, state, reward, terminated.

    The time limit ends an episode after max_steps.
    """

    def __init__(self, obs_space=LINE, action_space=TWO, reset=begin, step=go_on, max_steps=4):
        self.obs_space, self.actions = obs_space, action_space
        self.first, self.then = reset, step
        self.max_steps = max_steps

    @property
    def default_params(self):
        return EnvParams(max_steps_in_episode=self.max_steps)

    def reset_env(self, key, params):
        return self.first(key)

    def step_env(self, key, state, action, params):
        return *self.then(key, state, action), {}

    def observation_space(self, params):
        return self.obs_space

    def action_space(self, params=None):
        return self.actions


class OwnStep(Bare):
    """An environment with a step of its own, which returns what its function returns."""

    def step(self, key, state, action, params):
        return self.then(key, state, action)


class BareStep(Bare):
    """An environment whose step_env returns what its function returns."""

    def step_env(self, key, state, action, params):
        return self.then(key, state, action)


class Endless(Bare):
    """An environment without a time limit."""

    def is_truncated(self, state, params):
        return jnp.array(False)


class Resets:
    """What has a reset and nothing else of gymnax's interface."""

    def reset(self, key, params):
        return jnp.zeros(1), State(jnp.int32(0))


def with_info(info):
    """Return a function for a step of six values, the last of which is `info`."""

    def step(key, state, action):
        return *go_on(key, state, action), jnp.array(False), info

    return step


def paying(reward):
    """Return a function for steps with this reward."""

    def step(key, state, action):
        obs, state, _, terminated = go_on(key, state, action)
        return obs, state, reward, terminated

    return step


def showing(obs):
    """Return a function for steps that show this."""

    def step(key, state, action):
        return obs, *go_on(key, state, action)[1:]

    return step


def growing(key, state, action):
    """Add 0.5 to a number that a reset makes an integer; it is the reward too."""
    x = state.x + 0.5
    return jnp.full(1, x, jnp.float32), State(state.time + 1, x), jnp.float32(x), jnp.array(False)


def spoiling(time):
    """Return a function for steps whose reward is NaN at this step of an episode."""

    def step(key, state, action):
        obs, state, reward, terminated = go_on(key, state, action)
        return obs, state, jnp.where(state.time == time, jnp.nan, reward), terminated

    return step


ONE_SIDED = spaces.Box(-jnp.inf, 1.0, (2,))


def adding(key, state, action):
    """Give the sum of the action's parts as the reward."""
    return *go_on(key, state, action)[:2], jnp.sum(action), jnp.array(False)


def is_whole(tree):
    """Tell whether all numbers of a tree are finite."""
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))
