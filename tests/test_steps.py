"""Steps of many environments side by side: resets, bounds, repeats and actions as they arrive."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Countdown, Mirror, OwnStepCartPole, display, echo
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole
from helpers import SMALL, jit
from scipy import stats

import ppo_jax
from ppo_jax import ConfigError, PPOConfig, evaluate, make_env, train


@pytest.mark.parametrize("own_step", [False, True])
def test_steps_are_those_of_gymnax(own_step):
    """What gymnax's step_env gives, and where an episode ends a new one: its time 0, its
    observation a reset's.
    """
    limit = {"max_steps_in_episode": 12}
    env = make_env(PPOConfig(OwnStepCartPole() if own_step else CartPole(), env_params=limit))
    n_envs, n_steps = 64, 40

    def step(carry, key):
        _, states = carry
        key, action_key, start_key = jax.random.split(key, 3)
        keys, start_keys = jax.random.split(key, n_envs), jax.random.split(start_key, n_envs)
        action = jax.random.randint(action_key, (n_envs,), 0, 2)
        axes = (0, 0, 0, None)
        gymnaxs = jax.vmap(CartPole().step_env, axes)(keys, states, action, env.env_params)
        new, outcome = env.step(keys, states, action, env.reset(start_keys))
        return new, (states.time, new, outcome, gymnaxs)

    def run(key):
        start = env.reset(jax.random.split(key, n_envs))
        return jax.lax.scan(step, start, jax.random.split(key, n_steps))[1]

    # The options of our own jit round what is computed in two places in two ways.
    time, (shown, new), outcome, gymnaxs = jax.jit(run)(jax.random.key(0))
    obs, states, reward, terminated, _ = gymnaxs
    np.testing.assert_array_equal(outcome.terminated, terminated)
    np.testing.assert_array_equal(outcome.truncated, (states.time >= 12) & ~terminated)
    done = outcome.terminated | outcome.truncated
    assert outcome.terminated.sum() > 20 and outcome.truncated.sum() > 20
    assert np.any(terminated & (states.time >= 12)), "no step ended by both"
    np.testing.assert_array_equal(outcome.reward, reward)
    np.testing.assert_allclose(outcome.final_obs, obs, atol=1e-6)
    np.testing.assert_array_equal(shown[~done], outcome.final_obs[~done])
    np.testing.assert_array_equal(new.time, np.where(done, 0, time + 1))
    expected = np.stack([new.x, new.x_dot, new.theta, new.theta_dot], axis=-1)
    np.testing.assert_array_equal(shown, expected)
    starts = np.asarray(shown[done])
    assert stats.kstest(starts.ravel(), stats.uniform(-0.05, 0.1).cdf).pvalue > 1e-4
    assert len(np.unique(starts[:, 0])) == len(starts), "two episodes began alike"


@pytest.mark.parametrize("own_step", [False, True])
def test_frame_skip_adds_rewards_up_and_stops_at_an_episodes_end(own_step):
    alone = CartPole()
    config = PPOConfig(OwnStepCartPole() if own_step else alone, frame_skip=4)
    env = make_env(config)
    keys = jax.random.split(jax.random.key(0), 16)
    starts = env.reset(keys)
    states = starts[1].replace(theta=jnp.linspace(0.05, 0.2, 16), theta_dot=jnp.full(16, 1.0))
    (shown, new), outcome = jit(env.step)(keys, states, jnp.zeros(16, int), starts)
    for place in range(16):
        state = jax.tree.map(lambda x: x[place], states)  # noqa: B023
        reward, terminated, n = 0.0, False, 0
        while n < 4 and not terminated:
            obs, state, now, terminated, _ = alone.step_env(keys[place], state, 0, env.env_params)
            reward, n = reward + now, n + 1
        assert outcome.reward[place] == reward and outcome.terminated[place] == terminated
        np.testing.assert_allclose(outcome.final_obs[place], obs, atol=1e-6)
        assert new.time[place] == (0 if terminated else 4)
        if not terminated:
            np.testing.assert_allclose(shown[place], obs, atol=1e-6)
    assert 0 < outcome.terminated.sum() < 16 and set(outcome.reward.tolist()) > {4.0}


def test_actions_reach_the_environment_within_its_bounds():
    env, keys = make_env(PPOConfig(Mirror())), jax.random.split(jax.random.key(0), 4)
    starts = env.reset(keys)
    action = jnp.array([[-50.0], [-1.5], [0.5], [50.0]])
    _, outcome = env.step(keys, starts[1], action, starts)
    np.testing.assert_array_equal(outcome.reward, [-2.0, -1.5, 0.5, 1.0])


def test_squashed_actions_reach_the_environment_within_its_bounds():
    space = spaces.Box(jnp.array([-2.0, 0.0]), jnp.array([1.0, 10.0]), (2,))
    env = display(spaces.Box(0, 1, (1,)), space, lambda key, time: jnp.zeros(1))
    env = make_env(PPOConfig(env, squash_output=True))
    action = env.to_environment(jnp.array([[-50.0, 0.0], [0.0, 50.0]]))
    np.testing.assert_allclose(action, [[-2, 5], [-0.5, 10]], atol=1e-6)


def test_an_environment_of_ones_own_trains_and_its_bounds_hold():
    sizes = dict(n_envs=2, n_steps=6, total_timesteps=12, n_epochs=1)
    config = PPOConfig(env=Countdown(), log_std_init=5.0, **sizes)
    agent, metrics = jit(train)(config, jax.random.key(0))
    assert metrics["length"][-1] == 3
    returns = evaluate(config, agent, jax.random.key(1), 50, deterministic=False)
    assert returns.shape == (50,)
    assert -6 <= returns.min() < -2 and 1 < returns.max() <= 3


DISCRETE = gymnasium.spaces.Discrete
MULTI = gymnasium.spaces.MultiDiscrete
WITH_STARTS = {  # spaces of integers, and where each part's values begin
    "discrete": (DISCRETE(3, start=-1), [-1]),
    "multi-discrete": (MULTI([3, 2], start=[5, -4]), [5, -4]),
    "grid": (MULTI([[3, 2], [2, 4]], start=[[1, 0], [-3, 2]]), [1, 0, -3, 2]),
    "tuple": (gymnasium.spaces.Tuple([DISCRETE(3, start=2), DISCRETE(2)]), [2, 0]),
    "bits": (gymnasium.spaces.MultiBinary((2, 2)), [0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", WITH_STARTS)
def test_integers_reach_the_environment_from_their_start_on(name):
    """The environment shows the action that it was given."""
    space, starts = WITH_STARTS[name]
    config = PPOConfig(**SMALL | dict(env=echo(space)))
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    _, rollout = jit(ppo_jax.collect_rollout)(config, agent, jax.random.key(1))
    action = np.asarray(rollout.action).reshape(16, 8, -1)
    np.testing.assert_array_equal(rollout.final_obs, action + starts)
    sizes = ppo_jax.Space(space).sizes
    assert len(sizes) == len(starts)
    for part, size in enumerate(sizes):
        assert set(action[..., part].ravel().tolist()) == set(range(size))
    given = make_env(config).to_environment(rollout.action[0])
    for place in range(8):
        one = jax.tree.map(lambda x: np.asarray(x[place], space.dtype), given)  # noqa: B023
        assert space.contains(one), one


def test_an_action_is_repeated_once_at_least():
    with pytest.raises(ConfigError, match=r"frame_skip: 0 .* from 1"):
        PPOConfig(frame_skip=0)
