"""Running statistics, what is normalised by them, and the means over episodes."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import display
from gymnax.environments import spaces
from helpers import SMALL, VARIANTS, jit, rollout_and_batch

import ppo_jax
from ppo_jax import PPOConfig, Rollout, RunningStatistics, train


@pytest.mark.parametrize("mean, deviation", [(0.0, 1.0), (1e4, 0.1), (-3e-3, 1e-4)])
def test_running_statistics_are_those_of_all_samples(mean, deviation):
    """Up to what float32 holds of the samples: 1e-7 of the mean, which at 1e4 is a hundredth of
    this deviation.
    """
    samples = np.random.default_rng(0).normal(mean, deviation, (200, 64, 3)).astype(np.float32)
    update = jit(functools.partial(ppo_jax.update_statistics, PPOConfig()))
    seen = RunningStatistics(jnp.float32(0), jnp.zeros(3), jnp.ones(3))
    for chunk in samples:
        seen = update(seen, chunk)
    exact = samples.reshape(-1, 3).astype(np.float64)
    assert seen.count == 200 * 64
    np.testing.assert_allclose(seen.mean, exact.mean(0), rtol=3e-7, atol=1e-3 * deviation)
    np.testing.assert_allclose(seen.variance, exact.var(0), rtol=0.02)


def test_running_statistics_stay_right_over_a_billion_samples():
    """A million updates of 1,024 samples, of mean 1000 and deviation 1: sums of squares would have
    lost all digits.
    """

    def step(i, seen):
        key = jax.random.fold_in(jax.random.key(0), i % 64)
        return ppo_jax.update_statistics(PPOConfig(), seen, 1000 + jax.random.normal(key, (1024,)))

    @jax.jit
    def a_thousand(seen):
        return jax.lax.fori_loop(0, 1000, step, seen)

    seen = a_thousand(RunningStatistics(jnp.float32(0), jnp.float32(0), jnp.float32(1)))
    seen = a_thousand(seen.replace(count=jnp.float32(1e9)))
    assert seen.count == 1e9 + 1000 * 1024
    np.testing.assert_allclose(seen.mean, 1000, atol=0.02)
    np.testing.assert_allclose(seen.variance, 1, atol=0.02)


def test_observations_are_normalised_by_what_was_seen_before():
    config = PPOConfig(**SMALL | VARIANTS["normalised"])

    def run(config, key):
        agent = ppo_jax.init_agent(config, key)
        first, _ = ppo_jax.update(config, agent)
        _, rollout = ppo_jax.collect_rollout(config, agent, jax.random.split(agent.key, 3)[1])
        moved, later = ppo_jax.collect_rollout(config, first, key)
        normalised = ppo_jax.make_batch(config, moved, later).obs
        return rollout.obs, first.obs_statistics, later.obs, normalised

    obs, statistics, later, normalised = jit(run)(config, jax.random.key(0))
    obs = np.asarray(obs, np.float64).reshape(-1, 3)
    assert set(statistics) == {""}
    seen = statistics[""]
    np.testing.assert_allclose(seen.mean, obs.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.variance, obs.var(0), rtol=1e-4)
    expected = (later.reshape(-1, 3) - obs.mean(0)) / np.sqrt(obs.var(0) + 1e-8)
    expected = np.clip(expected, -10, 10)
    normalised = np.reshape(normalised, (-1, 3))
    np.testing.assert_allclose(normalised, expected, rtol=1e-3, atol=1e-4)


def reporting(params, config, network, minibatch):
    """Return the loss, and as a report the observations' mean."""
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss, report | {"mean": jnp.mean(minibatch.obs)}


def test_an_update_sees_what_its_rollout_saw():
    """The statistics take a rollout in only after the update: the first one is of raw numbers."""
    changes = dict(batch_size=128, loss_function=reporting)
    config = PPOConfig(**SMALL | VARIANTS["normalised"] | changes)

    def run(config, key):
        agent = ppo_jax.init_agent(config, key)
        first, metrics = ppo_jax.update(config, agent)
        _, rollout = ppo_jax.collect_rollout(config, first, jax.random.split(first.key, 3)[1])
        normalised = ppo_jax.normalize_obs(first.obs_statistics, rollout.obs)
        means = first.obs_statistics[""].mean.mean(), normalised.mean()
        return (metrics["mean"], ppo_jax.update(config, first)[1]["mean"]), means

    found, expected = jit(run)(config, jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert abs(expected[0] - expected[1]) > 0.01


PARTS = {  # name: a space, and whether its observations are normalised
    "array": (spaces.Box(-50, 50, (2,)), True),
    "grid": (spaces.Box(0, 10, (7, 7, 3), jnp.uint8), True),
    "counts": (gymnasium.spaces.Box(0, 200, (3,), np.int32), True),
    "pixels": (spaces.Box(0, 255, (5, 5, 1), jnp.uint8), False),
    "kind": (spaces.Discrete(3), False),
    "kinds": (gymnasium.spaces.MultiDiscrete([3, 4], start=[0, 2]), False),
    "bits": (gymnasium.spaces.MultiBinary(3), False),
}


def draw(key, space):
    """Return an observation of a space."""
    if hasattr(space, "low"):
        low, high = np.min(space.low), np.max(space.high)
        return jax.random.randint(key, space.shape, int(low), int(high) + 1).astype(space.dtype)
    sizes = np.reshape(ppo_jax.Space(space).sizes, space.shape)
    return jax.random.randint(key, space.shape, 0, sizes) + ppo_jax.Space(space).low


def show(key, time):
    inner = {name: draw(key, space) for name, (space, _) in PARTS.items()}
    mask = jax.random.bernoulli(key, 0.5, (4,)).at[0].set(True).astype(jnp.float32)
    return {"inner": inner | {"action_mask": mask}, "outer": jax.random.normal(key, (2,))}


def test_boxes_are_normalised_but_no_pixels_categories_and_masks():
    """Boxes of integers too."""
    inner = {name: space for name, (space, _) in PARTS.items()}
    inner["action_mask"] = spaces.Box(0, 1, (4,))
    space = spaces.Dict({"inner": spaces.Dict(inner), "outer": spaces.Box(-9, 9, (2,))})
    env = display(space, spaces.Discrete(4), show)
    config = PPOConfig(**SMALL | dict(env=env, policy="mlp", normalize_obs=True))
    agent, rollout, batch, _ = jit(rollout_and_batch)(config, jax.random.key(0))
    wanted = {f"inner/{name}" for name, (_, is_normalised) in PARTS.items() if is_normalised}
    assert set(agent.obs_statistics) == wanted | {"outer"}
    shown, found = ppo_jax.named_leaves(rollout.obs), ppo_jax.named_leaves(batch.obs)
    assert set(shown) == set(found) == {f"inner/{name}" for name in inner} | {"outer"}
    for name, ours in found.items():
        raw = np.asarray(shown[name]).reshape(ours.shape)
        if name in agent.obs_statistics:
            seen = agent.obs_statistics[name]
            raw = np.clip((raw - seen.mean) / np.sqrt(seen.variance + 1e-8), -10, 10)
            assert np.all(np.asarray(seen.variance) > 0), name
            assert 0.5 < np.std(ours) < 2, name
        else:
            assert ours.dtype == shown[name].dtype, name
        np.testing.assert_allclose(ours, raw, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", [jnp.float32, jnp.int32, jnp.bool_])
def test_a_normalised_run_never_takes_a_masked_action(kind):
    """By turns, the even actions and the odd ones can be taken."""

    def show(key, time):
        mask = ((jnp.arange(4) + time) % 2 == 0).astype(kind)
        return {"seen": jnp.full(1, time, jnp.float32), "action_mask": mask}

    mask = spaces.Box(0, 1, (4,), kind)
    space = spaces.Dict({"seen": spaces.Box(0, 9, (1,)), "action_mask": mask})
    env = display(space, spaces.Discrete(4), show)
    config = PPOConfig(**SMALL | dict(env=env, normalize_obs=True, learning_rate=0.01))
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    collect, update = jit(ppo_jax.collect_rollout), jit(ppo_jax.update)
    for _ in range(4):
        _, rollout = collect(config, agent, jax.random.key(1))
        mask, action = np.asarray(rollout.obs["action_mask"]), np.asarray(rollout.action)
        assert 0 < mask.mean() < 1
        assert np.take_along_axis(mask, action[..., None], -1).all()
        agent, _ = update(config, agent)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    """VecNormalize's rule, over two rollouts; here the statistics are brought up to date once in a
    rollout.
    """
    config = PPOConfig(n_envs=2, n_steps=50, gamma=0.9, normalize_reward=True)
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    rng = np.random.default_rng(1)
    total, seen = np.zeros(2), []
    for _ in range(2):
        reward = rng.normal(1, 3, size=(50, 2)).astype(np.float32)
        ends = rng.random((2, 50, 2)) < 0.05
        given = Rollout(None, None, jnp.asarray(reward), *jnp.asarray(ends), None)
        agent, rollout = ppo_jax.normalize_reward(config, agent, given)
        for t in range(50):
            total = 0.9 * total + reward[t]
            seen.append(total.copy())
            total[ends[:, t].any(0)] = 0
        np.testing.assert_allclose(rollout.reward, reward / np.std(seen), rtol=1e-4)


def test_reported_returns_stay_raw():
    sizes = dict(n_envs=4, n_steps=64, total_timesteps=512, n_epochs=1)
    config = PPOConfig("CartPole-v1", normalize_reward=True, **sizes)
    metrics = jit(train)(config, jax.random.key(0))[1]
    np.testing.assert_allclose(metrics["return"], metrics["length"], rtol=1e-5)


@pytest.mark.parametrize("chance", [0.02, 0.5])
def test_episode_statistics_are_those_of_a_plain_loop(chance):
    """Over several rollouts, with both fewer and more finished episodes than the window."""
    config = PPOConfig(n_envs=3, n_steps=10, stats_window_size=6)
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    assert np.isnan(ppo_jax.mean_episode(agent)).all()
    rng = np.random.default_rng(3)
    running, finished = [[0.0, 0] for _ in range(3)], []
    for _ in range(8):
        reward = rng.normal(size=(10, 3)).astype(np.float32)
        ends = rng.random((2, 10, 3)) < chance / 2
        agent = COUNT_EPISODES(config, agent, Rollout(None, None, reward, *ends, None))
        for t, place in np.ndindex(10, 3):
            running[place][0] += reward[t, place]
            running[place][1] += 1
            if ends[:, t, place].any():
                finished.append(running[place])
                running[place] = [0.0, 0]
        window = np.zeros((6, 2))
        newest = finished[::-1][:6]
        window[: len(newest)] = np.reshape(newest, (-1, 2))
        assert agent.n_recent == len(newest)
        returns, lengths = agent.recent_episodes
        np.testing.assert_allclose(returns, window[:, 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(lengths, window[:, 1])
        totals = np.transpose(running)
        np.testing.assert_allclose(agent.episode_sums, totals, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(agent.episode_sums[1], totals[1])
        mean = np.mean(newest, axis=0) if newest else [np.nan, np.nan]
        np.testing.assert_allclose(ppo_jax.mean_episode(agent), mean, rtol=1e-5, atol=1e-5)
    assert (len(finished) < 6) == (chance < 0.1)


COUNT_EPISODES = jit(ppo_jax.count_episodes)


@pytest.mark.parametrize("n_tasks", [1, 3])
def test_advantages_are_standardised_within_each_task(n_tasks):
    rng = np.random.default_rng(0)
    task = rng.choice([5, -2, 70][:n_tasks], size=40)
    advantage = rng.normal(task, 1 + np.abs(task)).astype(np.float32)
    expected = np.empty(40)
    for name in np.unique(task):
        mine = advantage[task == name].astype(np.float64)
        expected[task == name] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-8)
    standardize = jit(ppo_jax.standardize)
    np.testing.assert_allclose(standardize(advantage, task), expected, rtol=1e-4, atol=1e-5)
    in_sequences = standardize(advantage.reshape(10, 4), task.reshape(10, 4))
    np.testing.assert_allclose(in_sequences.ravel(), expected, rtol=1e-4, atol=1e-5)
    if n_tasks == 1:
        np.testing.assert_allclose(standardize(advantage), expected, rtol=1e-4, atol=1e-5)


def test_the_only_sample_of_a_task_keeps_its_advantage():
    """It has no deviation; that it is good or bad is known all the same."""
    task = jnp.array([4, 7, 4, 4, -1])
    advantage = jnp.array([1.0, -3.0, 2.0, 3.0, 5.0])
    standard = jit(ppo_jax.standardize)(advantage, task)
    np.testing.assert_allclose(standard, [-1, -3, 0, 1, 5], atol=1e-6)
