"""Environments that several tests share."""

import flax
import gymnasium
import jax
import jax.numpy as jnp
from faulty_environments import Bare, State
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole
from gymnax.environments.environment import Environment, EnvParams, EnvState

import ppo_jax


class OwnStepCartPole(CartPole):
    """An environment with a step of its own, as wrappers have."""

    def step(self, key, state, action, params=None):
        return super().step(key, state, action, params)


def display(obs_space, action_space, show):
    """Return an environment of four steps whose observations are show(key, time)."""

    def reset(key):
        return show(key, 0), State(jnp.int32(0))

    def step(key, state, action):
        time = state.time + 1
        return show(key, time), State(time), jnp.float32(0), jnp.array(False)

    return Bare(obs_space, action_space, reset, step)


def echo(action_space):
    """Return an environment that shows the integers of the action which reached it in a row."""
    n_parts = len(ppo_jax.Space(action_space).sizes)

    def reset(key):
        return jnp.zeros(n_parts), State(jnp.int32(0))

    def step(key, state, action):
        parts = [jnp.ravel(part) for part in jax.tree.leaves(action)]
        shown = jnp.concatenate(parts).astype(jnp.float32)
        return shown, State(state.time + 1), jnp.float32(0), jnp.array(False)

    return Bare(spaces.Box(-9, 9, (n_parts,)), action_space, reset, step)


@flax.struct.dataclass
class LoopState:
    time: jax.Array
    terminates: jax.Array


class Loop(Environment):
    """Reward 1 at every step for ever: cut after 5 steps or, with the flag shown, ended there."""

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        terminated = state.terminates & (state.time >= 5)
        return self.show(state), state, jnp.float32(1.0), terminated, {}

    def reset_env(self, key, params):
        state = LoopState(jnp.int32(0), jax.random.bernoulli(key))
        return self.show(state), state

    def show(self, state):
        return jax.nn.one_hot(state.terminates.astype(int), 2)

    def is_truncated(self, state, params):
        return state.time >= 5

    def action_space(self, params):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(0.0, 1.0, (2,), jnp.float32)


class Mirror(Loop):
    """The reward is the action, whose bounds nothing here looks at."""

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, action[0], terminated, info

    def action_space(self, params):
        return spaces.Box(-2.0, 1.0, (1,), jnp.float32)


@flax.struct.dataclass
class MatchState:
    time: jax.Array
    target: jax.Array
    task: jax.Array


class Match(Environment):
    """Episodes of one step that pay the share of the action's parts that equal what is shown.

    obs: "array"; "dict", where the observation comes in three parts of three kinds; or "mask",
    where half of the actions cannot be taken, which the reward would show by -1000. With two tasks
    the reward of one is a thousand times the other's.
    """

    def __init__(self, action_space, obs="array", n_tasks=1):
        self.actions, self.obs, self.n_tasks = action_space, obs, n_tasks
        self.sizes = ppo_jax.Space(action_space).sizes

    @property
    def default_params(self):
        return EnvParams(max_steps_in_episode=1)

    def reset_env(self, key, params):
        target_key, task_key = jax.random.split(key)
        target = jax.random.randint(target_key, (len(self.sizes),), 0, jnp.array(self.sizes))
        task = jax.random.randint(task_key, (), 0, self.n_tasks)
        state = MatchState(jnp.int32(0), target, task)
        return self.show(state), state

    def show(self, state):
        hot = [jax.nn.one_hot(state.target[i], n) for i, n in enumerate(self.sizes)]
        shown = jnp.append(jnp.concatenate(hot), state.task)
        if self.obs == "dict":
            image = jnp.broadcast_to(state.target[0], (5, 5, 1)).astype(jnp.uint8)
            return {"image": image, "task": state.task, "shown": 100 * shown}
        if self.obs == "mask":
            return {"shown": shown, "action_mask": self.mask(state)}
        return shown

    def mask(self, state):
        """Return which half of the actions can be taken: those with the target's parity."""
        return (jnp.arange(self.sizes[0]) + state.target[0]) % 2 == 0

    def step_env(self, key, state, action, params):
        action = jnp.stack(jax.tree.leaves(action)).reshape(-1)
        reward = jnp.mean(action == state.target)
        if self.obs == "mask":
            reward = jnp.where(self.mask(state)[action[0]], reward, -1000.0)
        info = {}
        if self.n_tasks > 1:
            reward = reward * jnp.where(state.task == 1, 1.0, 1e-3)
            info = {"task_id": state.task}
        return self.show(state), state, reward, jnp.array(True), info

    def action_space(self, params=None):
        return self.actions

    def observation_space(self, params):
        shown = spaces.Box(0, 100, (sum(self.sizes) + 1,), jnp.float32)
        if self.obs == "dict":
            image = spaces.Box(0, 255, (5, 5, 1), jnp.uint8)
            task = spaces.Discrete(self.n_tasks)
            return spaces.Dict({"image": image, "task": task, "shown": shown})
        if self.obs == "mask":
            mask = spaces.Box(0, 1, (self.sizes[0],), jnp.bool_)
            return spaces.Dict({"shown": shown, "action_mask": mask})
        return shown


ACTION_SPACES = {
    "multi-discrete": gymnasium.spaces.MultiDiscrete([3, 2, 4]),
    "multi-binary": gymnasium.spaces.MultiBinary(4),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)]),
}


class Still(Environment):
    """Shows the same thing for ever."""

    def step_env(self, key, state, action, params):
        return jnp.ones(1), state, jnp.float32(0), jnp.array(False), {}

    def reset_env(self, key, params):
        return jnp.ones(1), MatchState(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (2,))

    def observation_space(self, params):
        return spaces.Box(0, 1, (1,))


class Countdown(Environment):
    """Three steps an episode; the reward is the action, clipped to the bounds."""

    @property
    def default_params(self):
        return EnvParams(max_steps_in_episode=3)

    def step_env(self, key, state, action, params):
        state = EnvState(time=state.time + 1)
        obs = jnp.full(1, state.time, jnp.float32)
        return obs, state, jnp.sum(action), jnp.array(False), {}

    def reset_env(self, key, params):
        return jnp.zeros(1), EnvState(time=0)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 0.5, (2,))

    def observation_space(self, params):
        return spaces.Box(0, 3, (1,))
