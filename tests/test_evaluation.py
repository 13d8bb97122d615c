"""Evaluation: whole episodes of trained agents, and policies to use elsewhere."""

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_environments import Bare, Endless, State, go_on
from gymnax.environments import spaces
from helpers import jit
from runs import SIZES

import ppo_jax
from ppo_jax import ConfigError, PPOConfig, RunningStatistics, evaluate, make_policy

# ---------------------------------------------------------------------------------------- episodes


def untrained(config, key=0):
    return jit(ppo_jax.init_agent)(config, jax.random.key(key))


def start_anywhere(key):
    """Begin an episode at a number of its own, which it shows."""
    x = jax.random.randint(key, (), 1, 6)
    return jnp.full(1, x, jnp.float32), State(jnp.int32(0), x)


def count_down(key, state, action):
    """End the episode by a termination after x steps, each of which pays 1."""
    obs, after, reward, _ = go_on(key, state, action)
    return obs, after.replace(x=state.x), reward, after.time == state.x


def test_returns_are_those_of_the_first_episode_of_each_place():
    """Of 1 to 5 steps by termination, or 4 by the time limit; later episodes count for nothing."""
    config = PPOConfig(env=Bare(reset=start_anywhere, step=count_down), **SIZES)
    returns = evaluate(config, untrained(config), jax.random.key(1), 64)
    assert returns.shape == (64,) and set(returns.tolist()) == {1.0, 2.0, 3.0, 4.0}
    again = evaluate(config, untrained(config), jax.random.key(1), 64)
    np.testing.assert_array_equal(returns, again)


def test_episodes_that_never_end_have_no_return():
    def step(key, state, action):
        obs, after, reward, terminated = count_down(key, state, action)
        return obs, after, reward, terminated & (state.x < 3)

    config = PPOConfig(env=Endless(reset=start_anywhere, step=step), **SIZES)
    returns = np.asarray(evaluate(config, untrained(config), jax.random.key(1), 64, max_steps=50))
    known = np.isfinite(returns)
    assert 0 < known.sum() < 64 and np.isnan(returns[~known]).all()
    assert set(returns[known].tolist()) == {1.0, 2.0}


def test_a_limit_may_cut_an_episode_that_would_end():
    config = PPOConfig(env=Bare(max_steps=4), **SIZES)
    agent = untrained(config)
    for max_steps, expected in ((4, 4.0), (3, np.nan)):
        returns = evaluate(config, agent, jax.random.key(1), 2, max_steps=max_steps)
        np.testing.assert_array_equal(returns, [expected] * 2)


@pytest.fixture(scope="module")
def two():
    """A config and two untrained agents."""
    config = PPOConfig(**SIZES)
    init = jit(jax.vmap(ppo_jax.init_agent, (None, 0)))
    return config, init(config, jax.random.split(jax.random.key(0)))


def test_several_agents_are_refused_in_one_line(two):
    with pytest.raises(ConfigError, match=r"agent.* one.*vmap") as refusal:
        evaluate(*two, jax.random.key(0), 3)
    assert "\n" not in str(refusal.value)
    play = jax.vmap(evaluate, in_axes=(None, 0, 0, None))
    assert play(*two, jax.random.split(jax.random.key(0)), 3).shape == (2, 3)


def test_no_policy_is_made_of_several_agents(two):
    with pytest.raises(ConfigError, match=r"agent.* one") as refusal:
        make_policy(*two)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------------------------------- policies

SEEN = spaces.Box(-9, 9, (3,))


def paid_for(show, pay):
    """Return functions of an environment that shows show(x) and pays pay(action).

    x: three numbers that change by the action; every episode begins alike.
    """

    def reset(key):
        x = jnp.array([0.5, -1.0, 2.0])
        return show(x), State(jnp.int32(0), x)

    def step(key, state, action):
        x = jnp.roll(state.x, 1) * 1.1 + 0.1 * pay(action)
        return show(x), State(state.time + 1, x), pay(action), jnp.array(False)

    return dict(reset=reset, step=step)


def sum_of_parts(action):
    """Return a number in which every part of an action shows."""
    parts = [jnp.ravel(part) for part in jax.tree.leaves(action)]
    return jnp.sum(jnp.concatenate(parts) * jnp.array([1.0, 0.37])[: sum(x.size for x in parts)])


def as_it_is(x):
    return x


def with_a_mask(x):
    """Show the numbers, and a mask that leaves two of four actions."""
    return {"seen": x, "action_mask": (jnp.arange(4) + (x[0] > 0.4)) % 2 == 0}


MASKED = spaces.Dict({"seen": SEEN, "action_mask": spaces.Box(0, 1, (4,), jnp.bool_)})
BOX = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([0.5, 3.0], np.float32), (2,))
PAIR = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)])


def playing(action_space, show=as_it_is, obs_space=SEEN):
    return Bare(obs_space, action_space, **paid_for(show, sum_of_parts), max_steps=6)


# The noise of one step is what the only step of a rollout draws.
ONE_STEP = dict(n_envs=4, n_steps=1, n_epochs=1, batch_size=4, net_arch=(8,), total_timesteps=4)
POLICIES = {
    "normalised, squashed, gru": dict(
        env=playing(BOX), normalize_obs=True, squash_output=True, policy="gru", sub_traj_len=1
    ),
    "clipped": dict(env=playing(BOX), log_std_init=2.0),
    "clipped, gsde": dict(env=playing(BOX), use_sde=True),
    "masked, normalised, lstm": dict(
        env=playing(spaces.Discrete(4), with_a_mask, MASKED),
        normalize_obs=True,
        policy="lstm",
        sub_traj_len=1,
    ),
    "tuple": dict(env=playing(PAIR)),
}


def experienced(config):
    """Return an agent with statistics, and weights large enough for its actions to differ."""
    agent = untrained(config)
    params = jax.tree.map(lambda x: 3 * x, agent.params)
    statistics = agent.obs_statistics
    if statistics:
        known = RunningStatistics(
            jnp.float32(9), jnp.array([0.1, -0.2, 0.3]), jnp.array([2.0, 0.5, 4.0])
        )
        statistics = {path: known for path in statistics}
    return agent.replace(params=params, obs_statistics=statistics)


def random_obs(config, n):
    """Return different observations of n environments, for all four places of them."""
    x = jax.random.normal(jax.random.key(3), (n, 3))
    show = with_a_mask if hasattr(config.env.obs_space, "spaces") else as_it_is
    return jax.vmap(show)(x)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_acts_as_the_agent_does_in_its_rollouts(name):
    config = PPOConfig(**ONE_STEP | POLICIES[name])
    agent = experienced(config).replace(obs=random_obs(config, 4))
    if config.is_recurrent:
        memory = jax.tree.map(lambda x: x + jnp.arange(4.0)[:, None] / 9, agent.memory)
        agent = agent.replace(memory=memory)
    moved, rollout = jit(ppo_jax.collect_rollout)(config, agent, jax.random.key(7))
    taken = ppo_jax.make_env(config).to_environment(rollout.action[0])
    noise_key, _ = jax.random.split(jax.random.key(7))
    policy = make_policy(config, agent)
    obs = jax.device_get(agent.obs)
    action, memory = policy(obs, noise_key, agent.memory)
    assert jax.tree.structure(action) == jax.tree.structure(taken)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), action, taken)
    if config.is_recurrent:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), memory, moved.memory)
    else:
        assert memory is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_plays_the_return_that_evaluate_tells(name):
    """One observation at a time, with the memory passed along; and a batch of all at once."""
    config = PPOConfig(**ONE_STEP | POLICIES[name])
    agent, env = experienced(config), config.env
    told = float(evaluate(config, agent, jax.random.key(0), 1)[0])
    policy, params = make_policy(config, agent), env.default_params
    obs, state = env.reset(jax.random.key(1), params)
    total, memory, shown, actions = 0.0, None, [], []
    for _ in range(6):
        action, memory = policy(jax.device_get(obs), memory=memory)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(action))
        if hasattr(env.actions, "low"):
            assert action.shape == (2,)
            assert (action >= env.actions.low).all() and (action <= env.actions.high).all()
        shown.append(obs)
        actions.append(action)
        if "masked" in name:
            assert obs["action_mask"][action]
        obs, state, reward, _, _ = env.step_env(jax.random.key(1), state, action, params)
        total += float(reward)
    np.testing.assert_allclose(total, told, rtol=1e-5, atol=1e-6)
    if not config.is_recurrent:
        batch = jax.tree.map(lambda *x: np.stack(x), *shown)
        together, _ = policy(batch)
        apart = jax.tree.map(lambda *x: np.stack(x), *actions)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), together, apart)
    else:  # each row of a batch has a memory of its own
        batch = jax.tree.map(lambda *x: np.stack(x), *shown[:2])
        _, memories = policy(batch)
        _, first = policy(jax.device_get(shown[0]))
        together, _ = policy(batch, memory=memories)
        alone, _ = policy(jax.device_get(shown[0]), memory=first)
        np.testing.assert_allclose(jax.tree.map(lambda x: x[0], together), alone, rtol=1e-5)


def test_a_policy_samples_with_a_key_and_not_without():
    config = PPOConfig(**SIZES)
    policy = make_policy(config, untrained(config))
    obs = [0.1, 0.2, 0.3, 0.4]
    assert len({int(policy(obs)[0]) for _ in range(5)}) == 1
    drawn = [int(policy(obs, key)[0]) for key in jax.random.split(jax.random.key(0), 40)]
    assert set(drawn) == {0, 1} and drawn == [
        int(policy(np.array(obs), key)[0]) for key in jax.random.split(jax.random.key(0), 40)
    ]
    assert policy(np.zeros((3, 4)))[0].shape == (3,)


def test_sampled_actions_differ_and_the_most_probable_ones_do_not():
    """Episodes begin alike here, and go on alike with the same actions."""
    config = PPOConfig(**ONE_STEP | POLICIES["clipped"])
    agent = experienced(config)
    probable, sampled = (
        np.asarray(evaluate(config, agent, jax.random.key(1), 20, deterministic))
        for deterministic in (True, False)
    )
    assert len(set(probable.tolist())) == 1 and len(set(sampled.tolist())) > 10
    assert sampled.min() < probable[0] < sampled.max()


@pytest.fixture(scope="module")
def cartpole():
    """A config and an agent that has learnt to hold the pole."""
    config = PPOConfig("CartPole-v1", total_timesteps=150_000)
    agent, metrics = jax.jit(ppo_jax.train)(config, jax.random.key(0))
    assert metrics["return"][-1] > 300
    return config, agent


def test_a_policy_plays_gymnasiums_cartpole(cartpole):
    """Trained in gymnax's, it is given what gymnasium shows and gives what gymnasium takes."""
    policy = make_policy(*cartpole)
    env = gymnasium.make("CartPole-v1")
    returns = []
    for seed in range(3):
        obs, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action, _ = policy(obs)
            assert env.action_space.contains(action[()])
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        returns.append(total)
    assert np.mean(returns) >= 400, returns


def test_evaluate_plays_what_gymnax_plays(cartpole):
    """An episode played by hand in gymnax, from every start, lasts as long on average."""
    config, agent = cartpole
    config = config.replace(env_params={"max_steps_in_episode": 60})
    agent = agent.replace(params=jax.tree.map(lambda x: -x, agent.params))  # which drops the pole
    told = evaluate(config, agent, jax.random.key(2), 500)
    env, params = gymnax.make("CartPole-v1")
    policy = make_policy(config, agent)
    obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(3), 500), params)
    step = jax.jit(jax.vmap(env.step_env, (0, 0, 0, None)))
    over, total = np.zeros(500, bool), np.zeros(500)
    keys = jax.random.split(jax.random.key(4), 500)
    for _ in range(60):
        action, _ = policy(jax.device_get(obs))
        obs, state, reward, terminated, _ = step(keys, state, action, params)
        total += np.where(over, 0, reward)
        over |= np.asarray(terminated)
    error = np.std(total) / np.sqrt(500) + np.std(told) / np.sqrt(500)
    assert abs(np.mean(total) - np.mean(told)) < 4 * error + 1e-6
    assert 5 < np.mean(told) < 60
