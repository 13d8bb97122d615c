"""What the suites themselves say and do: the table of all environments, and their own stepping."""

import csv
import importlib.util
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jit

MODULES = {  # by suite: what it is imported as
    "brax": "brax",
    "playground": "mujoco_playground",
    "craftax": "craftax",
    "jumanji": "jumanji",
    "navix": "navix",
    "xminigrid": "xminigrid",
}
# Sizes that go with whatever else a preset says.
TINY = dict(n_envs=2, n_steps=4, batch_size=4, n_epochs=1, total_timesteps=8, net_arch=(8,))
TINY |= dict(sub_traj_len=4)
# How many identifiers each channel of a grid has: navix.entities and navix.rendering.registry
# (tags, colours; doors have three states and players four directions), xminigrid.core.constants.
CHANNELS = {"navix": (11, 6, 4), "xminigrid": (13, 12)}


def needing(suite, *values, **options):
    """Return a parameter of a test, which is skipped where a suite isn't installed."""
    is_missing = importlib.util.find_spec(MODULES[suite]) is None
    mark = pytest.mark.skipif(is_missing, reason=f"{suite} isn't installed")
    return pytest.param(*values, marks=mark, **options)


# --------------------------------------------------------------------------------------- the table


class Row(NamedTuple):
    """An environment, as its suite describes it; the last column is what one can't have here.

    observation: a shape and what it holds, or several with names: `real`, `int`, `bool`, `0..9`,
    or `of 11 6 4` for a grid with so many identifiers in each channel. action: `discrete n`,
    `box n`, `parts n m`, each to be chosen, or `together n m`, with a mask over all combinations.
    limit: of an episode's steps, where there is one.
    """

    suite: str
    name: str
    observation: str
    action: str
    limit: str
    needs: str

    @property
    def env(self):
        """The environment's name with the suite's before it."""
        return f"{self.suite}/{self.name}"


def read_table():
    """Return the rows of table.csv."""
    with open(pathlib.Path(__file__).with_name("table.csv"), newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def rows(suites=tuple(MODULES), can_be_made=True):
    """Return the table's rows as parameters of a test."""
    chosen = []
    for row in read_table():
        if row.suite in suites and can_be_made == (not row.needs):
            chosen.append(needing(row.suite, row, id=row.env))
    return chosen


# ------------------------------------------------------------------------------------ own stepping


class Own(NamedTuple):
    """An environment as its suite steps it. Keys are as `jax.random.PRNGKey` makes them."""

    begin: Any  # from a key to a state
    go_on: Any  # from a key, a state and an action to a state and what was Seen


class Seen(NamedTuple):
    """What a suite says of a step."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    metrics: Any


def brax_own(env, limit):
    """Return the stepping of Brax and of Playground, both of which train behind this wrapper."""
    from brax.envs.wrappers.training import EpisodeWrapper

    env = EpisodeWrapper(env, limit, action_repeat=1)

    def go_on(key, state, action):
        state = env.step(state, action)
        is_cut = state.info["truncation"]
        ends = (state.done - is_cut, is_cut)
        return state, Seen(state.obs, state.reward, *ends, state.metrics)

    return Own(env.reset, go_on)


def craftax_own(env, limit):
    """Return Craftax's stepping, which tells that an episode ended and not why.

    It was cut if the player is still alive; lava hardly ever coincides with the limit.
    """
    params = env.default_params.replace(max_timesteps=limit)

    def go_on(key, state, action):
        obs, state, reward, done, info = env.step_env(key, state, action, params)
        is_cut = done & (state.timestep >= limit) & (state.player_health > 0)
        metrics = {name: x for name, x in info.items() if name.startswith("Achievements/")}
        return state, Seen(obs, reward, done & ~is_cut, is_cut, metrics)

    return Own(lambda key: env.reset_env(key, params)[1], go_on)


def jumanji_own(env, to_own):
    """Return Jumanji's stepping, where a discount above 0 tells that an episode was cut.

    to_own: from an action as a policy chooses it to the environment's.
    """

    def go_on(key, state, action):
        state, timestep = env.step(state, to_own(action).astype(env.action_spec.dtype))
        done, is_cut = timestep.last(), jnp.any(timestep.discount > 0)
        metrics = {name: done * x for name, x in timestep.extras.items()}
        reward = jnp.sum(timestep.reward)
        return state, Seen(timestep.observation, reward, done & ~is_cut, done & is_cut, metrics)

    return Own(lambda key: env.reset(key)[0], go_on)


def navix_own(env):
    """Return Navix's stepping, up to an episode's end."""

    def go_on(key, timestep, action):
        timestep = env.step(timestep, action)
        ends = (timestep.step_type == 2, timestep.step_type == 1)
        return timestep, Seen(timestep.observation, timestep.reward, *ends, {})

    return Own(env.reset, go_on)


def xminigrid_own(env, params):
    """Return XLand-MiniGrid's stepping."""

    def go_on(key, timestep, action):
        timestep = env.step(params, timestep, action)
        ends = (timestep.discount == 0, timestep.last() & (timestep.discount == 1))
        return timestep, Seen(timestep.observation, timestep.reward, *ends, {})

    return Own(lambda key: env.reset(params, key), go_on)


def play_own(own, reset_keys, start_keys, keys, actions):
    """Step N environments T times; returns what was seen of each step, (T, N, …).

    reset_keys: (N,), for the first episodes. start_keys: (N,), for all later ones. keys: (T, N).
    """
    begin, go_on = jit(jax.vmap(own.begin)), jit(jax.vmap(own.go_on))
    raw = jax.random.key_data
    starts, state, steps = begin(raw(start_keys)), begin(raw(reset_keys)), []
    for t in range(len(actions)):
        state, seen = go_on(raw(keys[t]), state, actions[t])
        steps.append(jax.device_get(seen))
        done = (steps[-1].terminated + steps[-1].truncated) > 0
        if done.any():
            state = take_rows(done, starts, state)
    return stack(steps)


def random_actions(space, key, shape):
    """Return actions as a policy may sample them, some of them out of bounds."""
    if space.kind == "box":
        return jax.random.uniform(key, (*shape, *space.shape), minval=-1.3, maxval=1.3)
    return jax.random.randint(key, (*shape, *space.shape), 0, jnp.array(space.sizes))


def play_ours(env, reset_keys, start_keys, keys, actions):
    """Step N environments as `play_own` does; returns what is shown next, outcomes, and starts.

    Resets are compiled apart, as they are there: among other operations, their numbers are rounded
    otherwise, and now and then Craftax has a stone where it had a tree.
    """
    reset = jit(env.reset)
    starts = reset(start_keys)

    @jit
    def play(begin, starts, keys, actions):
        def step(carry, inputs):
            keys, actions = inputs
            carry, outcome = env.step(keys, carry[1], actions, starts)
            return carry, (carry[0], outcome)

        return jax.lax.scan(step, begin, (keys, actions))[1]

    return *jax.device_get(play(reset(reset_keys), starts, keys, actions)), starts[0]


def take_rows(mask, yes, no):
    """Return two trees' rows, each from the first one where the mask is true."""

    def take(x, y):
        return jnp.where(mask.reshape(-1, *[1] * (y.ndim - 1)), x, y).astype(y.dtype)

    return jax.tree.map(take, yes, no)


def stack(trees):
    """Return trees of arrays as one, with an axis for them in front."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


# ------------------------------------------------------------------------------------ observations


def identifiers(planes, counts):
    """Return the identifiers (…, len(counts)) that planes (…, sum(counts)) of 0 and 1 stand for."""
    planes = np.asarray(planes, int)
    channels = np.split(planes, np.cumsum(counts)[:-1], axis=-1)
    for channel in channels:
        np.testing.assert_array_equal(channel.sum(axis=-1), 1)
    return np.stack([channel.argmax(axis=-1) for channel in channels], axis=-1)


def assert_same_jumanji_obs(spec, ours, own):
    """Assert that what we show of Jumanji's observations can be turned back into them.

    Integers of 3 to 64 values are one-hot vectors, those of other numbers of values from 0 to 1.
    """
    import jumanji

    parts = {name: x for name, x in vars(spec).items() if isinstance(x, jumanji.specs.Spec)}
    if parts:
        assert set(ours) == set(parts)
        for name, part in parts.items():
            assert_same_jumanji_obs(part, ours[name], getattr(own, name))
        return
    own = np.asarray(own, float)
    if np.issubdtype(spec.dtype, np.integer) and hasattr(spec, "minimum"):
        low, high = int(np.min(spec.minimum)), int(np.max(spec.maximum))
        if 3 <= high - low + 1 <= 64:
            ours = identifiers(ours, [high - low + 1])[..., 0] + low
        else:
            ours = np.asarray(ours) * (high - low) + low
    np.testing.assert_allclose(np.asarray(ours, float), own, rtol=1e-5, atol=1e-4)
