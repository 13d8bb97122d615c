"""Each suite's episodes beside the suite's own stepping: ends, limits, observations, values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_environments import is_whole
from from_suites import (
    CHANNELS,
    Own,
    Seen,
    assert_same_jumanji_obs,
    brax_own,
    craftax_own,
    identifiers,
    jumanji_own,
    navix_own,
    needing,
    play_ours,
    play_own,
    random_actions,
    stack,
    xminigrid_own,
)
from helpers import assert_same, jit

from ppo_jax import (
    PPOConfig,
    collect_rollout,
    init_agent,
    make_batch,
    make_env,
    make_network,
)

# -------------------------------------------------------------------- environments, and how to look


def show_same(spec, ours, own):
    """Compare observations that we show as they are."""
    assert_same(ours, own, rtol=1e-4, atol=1e-4)


def show_grid(suite):
    """Return a function that compares grids of identifiers."""

    def compare(spec, ours, own):
        np.testing.assert_array_equal(identifiers(ours, CHANNELS[suite]), own)

    return compare


def brax(limit):
    from brax.envs import get_environment

    env = get_environment("inverted_pendulum", backend="positional")
    limits = {"max_steps": limit}
    return PPOConfig("brax/inverted_pendulum", env_params=limits), brax_own(env, limit), show_same


def playground(limit):
    from mujoco_playground import registry

    env = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    config = PPOConfig("playground/CartpoleBalance", env_params={"max_steps": limit})
    return config, brax_own(env, limit), show_same


def craftax(limit):
    from craftax.craftax_env import make_craftax_env_from_name

    name = "Craftax-Classic-Symbolic-v1"
    config = PPOConfig(f"craftax/{name}", env_params={"max_timesteps": limit})
    env = make_craftax_env_from_name(name, auto_reset=False)
    return config, craftax_own(env, limit), show_same


def connector(limit):
    from jumanji.environments import Connector
    from jumanji.environments.routing.connector.generator import RandomWalkGenerator

    return own_jumanji(Connector(RandomWalkGenerator(grid_size=5, num_agents=2), time_limit=limit))


def foraging(limit):
    from jumanji.environments import LevelBasedForaging
    from jumanji.environments.routing.lbf.generator import RandomGenerator

    generator = RandomGenerator(grid_size=6, fov=6, num_agents=2, num_food=1)
    return own_jumanji(LevelBasedForaging(generator, time_limit=limit))


def snake(limit):
    from jumanji.environments import Snake

    return own_jumanji(Snake(num_rows=4, num_cols=4))


def tetris(limit):
    """Return Tetris, where an action is one of 4 rotations times 10 columns, as 10 to a row."""
    from jumanji.environments import Tetris

    return own_jumanji(Tetris(), lambda action: jnp.stack([action // 10, action % 10]))


def own_jumanji(env, to_own=lambda action: action):
    return PPOConfig(env), jumanji_own(env, to_own), assert_same_jumanji_obs


def navix(limit):
    import navix

    name = "Navix-Empty-Random-5x5-v0"
    config = PPOConfig(f"navix/{name}", env_params={"max_steps": limit})
    return config, navix_own(navix.make(name, max_steps=limit)), show_grid("navix")


def xminigrid(limit):
    import xminigrid

    name = "MiniGrid-EmptyRandom-5x5"
    config = PPOConfig(f"xminigrid/{name}", env_params={"max_steps": limit})
    return config, xminigrid_own(*xminigrid.make(name, max_steps=limit)), show_grid("xminigrid")


LIMITED = [  # an environment, a time limit that some episodes reach, and steps to play
    needing("brax", brax, 12, 48, id="brax"),
    needing("playground", playground, 9, 32, id="playground"),
    needing("craftax", craftax, 200, 450, id="craftax"),
    needing("jumanji", connector, 6, 32, id="connector"),
    needing("jumanji", foraging, 25, 100, id="foraging"),
    needing("navix", navix, 25, 100, id="navix"),
    needing("xminigrid", xminigrid, 25, 100, id="xminigrid"),
]
UNLIMITED = [  # whose episodes all end themselves
    needing("jumanji", snake, None, 64, id="snake"),
    needing("jumanji", tetris, None, 64, id="tetris"),
]


@pytest.mark.parametrize("make, limit, n_steps", LIMITED + UNLIMITED)
def test_episodes_are_those_of_the_suite_step_by_step(make, limit, n_steps):
    n_envs = 12
    config, own, same_obs = make(limit)
    env = make_env(config)
    reset_key, start_key, step_key, action_key = jax.random.split(jax.random.key(7), 4)
    actions = random_actions(env.action_space, action_key, (n_steps, n_envs))
    keys = (
        jax.random.split(reset_key, n_envs),
        jax.random.split(start_key, n_envs),
        jax.random.split(step_key, (n_steps, n_envs)),
    )
    obs, outcome, starts = play_ours(env, *keys, actions)
    own_actions = np.clip(actions, -1, 1) if env.action_space.kind == "box" else actions
    seen = play_own(own, *keys, own_actions)

    np.testing.assert_array_equal(outcome.terminated, seen.terminated.astype(bool))
    np.testing.assert_array_equal(outcome.truncated, seen.truncated.astype(bool))
    np.testing.assert_allclose(outcome.reward, seen.reward, rtol=1e-4, atol=1e-5)
    assert_same(outcome.metrics, seen.metrics, rtol=1e-3, atol=1e-4)
    spec = getattr(env.env.env, "observation_spec", None)
    same_obs(spec, outcome.final_obs, seen.obs)

    # What is shown next is what the step led to, or with what the next episode begins.
    done = outcome.terminated | outcome.truncated
    for shown, final, start in zip(*map(jax.tree.leaves, (obs, outcome.final_obs, starts))):
        np.testing.assert_array_equal(shown[~done], final[~done])
        np.testing.assert_array_equal(shown[done], np.broadcast_to(start, shown.shape)[done])

    lengths = episode_lengths(done)
    cut, over = lengths[outcome.truncated[done]], lengths[outcome.terminated[done]]
    assert len(lengths) >= n_envs, "several whole episodes"
    assert set(cut) == ({limit} if limit else set()), "at the limit and nowhere else"
    if make is not playground:  # where only numbers that aren't finite end an episode
        assert len(over) and over.max() <= (limit or n_steps)


def episode_lengths(done):
    """Return the lengths of the episodes that end, in the order of (T, N) ends in a row."""
    lengths, since = [], np.zeros(done.shape[1], int)
    for row in done:
        since += 1
        lengths += since[row].tolist()
        since[row] = 0
    return np.array(lengths)


# --------------------------------------------------------------------- what the value is taught of


def without_wrapper(env):
    """Return the stepping of Brax and Playground on the state that an agent holds."""

    def go_on(key, state, action):
        state = env.step(state, jnp.clip(action, -1, 1))
        return state, Seen(state.obs, state.reward, state.done, 0 * state.done, {})

    return Own(env.reset, go_on)


CUT = [pytest.param(*case.values[:1], 5, marks=case.marks, id=case.id) for case in LIMITED]


@pytest.mark.parametrize("make, limit", CUT)
def test_a_step_that_is_cut_is_bootstrapped_from_the_suites_last_state(make, limit):
    """The policy acts; from the agent's states the suite itself is stepped with the same actions.

    Where the episode was cut, the value target is reward + gamma * the value of what the suite
    shows last, not of the next episode's first observation; where it ended itself, the reward.
    """
    config, own, same_obs = make(limit)
    sizes = dict(n_envs=8, n_steps=10, batch_size=None, net_arch=(16,))
    plain = dict(policy="mlp", normalize_obs=False, squash_output=False, use_sde=False)
    config = config.replace(gamma=0.9, log_std_init=0.0, **sizes, **plain)
    agent = jit(init_agent)(config, jax.random.key(1))
    moved, rollout = jit(collect_rollout)(config, agent, jax.random.key(2))
    batch = jit(make_batch)(config, moved, rollout)
    cut, over = np.asarray(rollout.truncated), np.asarray(rollout.terminated)
    assert not (cut & over).any() and not cut[: limit - 1].any() and cut[limit - 1].any()
    first = ~over[: limit - 1].any(axis=0)  # whose first episode reaches the limit
    assert (cut | over)[limit - 1][first].all()

    env = make_env(config)
    if make is not craftax:  # whose steps take random numbers that nobody is told
        if make in (brax, playground):
            own = without_wrapper(env.env.env)
        go_on, state, seen = jit(jax.vmap(own.go_on)), agent.env_states.inner, []
        for action in rollout.action[:limit]:
            keys = jax.random.key_data(jax.random.split(jax.random.key(0), config.n_envs))
            state, last = go_on(keys, state, action.reshape(config.n_envs, *env.action_space.shape))
            seen.append(last)
        spec = getattr(env.env.env, "observation_spec", None)
        ours = jax.tree.map(lambda x: x[:limit, first], rollout.final_obs)
        same_obs(spec, ours, jax.tree.map(lambda x: x[:, first], stack(seen).obs))

    network = make_network(config)
    value = jit(lambda obs: network.apply(agent.params, obs).value)
    final = jax.vmap(value)(rollout.final_obs)
    afterwards = value(jax.tree.map(lambda x: x[limit], rollout.obs))
    assert np.abs(final[limit - 1] - afterwards)[cut[limit - 1]].max() > 1e-3, "else it proves less"
    target = np.asarray(batch.value_target).reshape(cut.shape)
    bootstrapped = rollout.reward + 0.9 * final
    np.testing.assert_allclose(target[cut], bootstrapped[cut], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target[over], rollout.reward[over], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [needing("playground", playground)])
def test_numbers_that_are_not_finite_end_an_episode_of_playground(make):
    """Its `done` means just that, and NaN in an observation would spread to the weights."""
    config, _, _ = make(100)
    env = make_env(config)
    keys = jax.random.split(jax.random.key(0), 2)
    starts = jit(env.reset)(keys)
    data = starts[1].inner.data
    data = data.replace(qpos=data.qpos.at[0].set(jnp.nan))
    states = starts[1]._replace(inner=starts[1].inner.replace(data=data))
    (obs, _), outcome = jit(env.step)(keys, states, jnp.zeros((2, 1)), starts)
    assert outcome.terminated.tolist() == [True, False] and not outcome.truncated.any()
    for shown in (obs, outcome.final_obs, outcome.reward, outcome.metrics):
        assert is_whole(shown)
    np.testing.assert_array_equal(obs[0], starts[0][0])
