"""The settings that are off by default, each against its definition or against what another system computes."""

import functools
import math
import os
import pathlib

import flax
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.environments import spaces
from gymnax.environments.environment import Environment, EnvParams
from scipy import integrate, special, stats

import ppo_jax
from ppo_jax import (
    Categorical,
    ConfigError,
    DiagonalGaussian,
    MultiCategorical,
    PPOConfig,
    RunningStatistics,
    Schedule,
    Squashed,
    StateDependentGaussian,
    evaluate,
    train,
    train_population,
)

GOLDEN = pathlib.Path(os.environ.get("PPO_GOLDEN_DIR") or pathlib.Path(__file__).parent / "golden")
# What these tests cost is compiling, not running.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@flax.struct.dataclass
class MatchState:
    time: jax.Array
    target: jax.Array
    task: jax.Array


class Match(Environment):
    """Episodes of one step whose reward is the share of the action's parts that equal what the observation shows.

    obs: "array"; "dict", where it comes in three parts of three kinds; or "mask", where half of the actions can't be
    taken, which the reward would show by -1000. With two tasks the reward of one is a million times the other's.
    """

    def __init__(self, action_space, obs="array", n_tasks=1):
        self.actions, self.obs, self.n_tasks = action_space, obs, n_tasks
        self.sizes = ppo_jax.action_sizes(action_space) or (action_space.n,)

    @property
    def default_params(self):
        return EnvParams(max_steps_in_episode=1)

    def reset_env(self, key, params):
        target_key, task_key = jax.random.split(key)
        target = jax.random.randint(target_key, (len(self.sizes),), 0, jnp.array(self.sizes))
        state = MatchState(jnp.int32(0), target, jax.random.randint(task_key, (), 0, self.n_tasks))
        return self.show(state), state

    def show(self, state):
        shown = jnp.concatenate([jax.nn.one_hot(state.target[i], n) for i, n in enumerate(self.sizes)])
        shown = jnp.append(shown, state.task)
        if self.obs == "dict":
            image = jnp.broadcast_to(state.target[0], (5, 5, 1)).astype(jnp.uint8)
            return {"image": image, "task": state.task, "shown": 100 * shown}
        return {"shown": shown, "action_mask": self.mask(state)} if self.obs == "mask" else shown

    def mask(self, state):
        """Its half of the actions: those with the target's parity."""
        return (jnp.arange(self.sizes[0]) + state.target[0]) % 2 == 0

    def step_env(self, key, state, action, params):
        action = jnp.stack(jax.tree.leaves(action)).reshape(-1)
        reward = jnp.mean(action == state.target)
        if self.obs == "mask":
            reward = jnp.where(self.mask(state)[action[0]], reward, -1000.0)
        reward = reward * jnp.where(state.task == 1, 1e3, 1.0) / (1e3 if self.n_tasks > 1 else 1.0)
        return self.show(state), state, reward, jnp.array(True), {"task_id": state.task} if self.n_tasks > 1 else {}

    def action_space(self, params=None):
        return self.actions

    def observation_space(self, params):
        shown = spaces.Box(0, 100, (sum(self.sizes) + 1,), jnp.float32)
        if self.obs == "dict":
            parts = {"image": spaces.Box(0, 255, (5, 5, 1), jnp.uint8), "task": spaces.Discrete(self.n_tasks)}
            return spaces.Dict(parts | {"shown": shown})
        mask = spaces.Box(0, 1, (self.sizes[0],), jnp.bool_)
        return spaces.Dict({"shown": shown, "action_mask": mask}) if self.obs == "mask" else shown


ACTION_SPACES = {
    "multi-discrete": gymnasium.spaces.MultiDiscrete([3, 2, 4]),
    "multi-binary": gymnasium.spaces.MultiBinary(4),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2)]),
}
SMALL = dict(n_envs=8, n_steps=16, batch_size=32, n_epochs=1, total_timesteps=256, net_arch=(16,))
VARIANTS = {
    "gsde": dict(env="Pendulum-v1", use_sde=True, sde_sample_freq=5),
    "squashed": dict(env="Pendulum-v1", squash_output=True, log_std_init=1.0),
    "squashed gsde": dict(env="Pendulum-v1", use_sde=True, squash_output=True),
    "gru": dict(env="CartPole-v1", policy="gru", sub_traj_len=8),
    "lstm": dict(env="CartPole-v1", policy="lstm", sub_traj_len=4, share_features_extractor=False),
    "normalised": dict(env="Pendulum-v1", normalize_obs=True, normalize_reward=True),
    "normalised gru": dict(env="CartPole-v1", policy="gru", sub_traj_len=8, normalize_obs=True),
    "masked": dict(env=Match(spaces.Discrete(6), "mask")),
    "dict": dict(env=Match(spaces.Discrete(3), "dict"), normalize_obs=True, share_features_extractor=False),
    **{name: dict(env=Match(space)) for name, space in ACTION_SPACES.items()},
}


def rollout_and_batch(config, key):
    """An agent that has learnt, so that its statistics say something, its next rollout and batch, and it then."""
    agent, _ = ppo_jax.update(config, ppo_jax.init_agent(config, key))
    moved, rollout = ppo_jax.collect_rollout(config, agent, key)
    return agent, rollout, ppo_jax.make_batch(config, moved, rollout), moved


@pytest.mark.parametrize("name", VARIANTS)
def test_ratio_is_one_in_the_first_minibatch(name):
    config = PPOConfig(**SMALL | VARIANTS[name])

    def run(config, key):
        agent, _, batch, _ = rollout_and_batch(config, key)
        taken = jnp.arange(0, config.rollout_size // config.sequence_length, 3)
        minibatch = jax.tree.map(lambda x: x[taken], batch)
        if config.is_recurrent:
            memory = minibatch.memory
            minibatch = jax.tree.map(lambda x: x.swapaxes(0, 1), minibatch._replace(memory=None))
            minibatch = minibatch._replace(memory=memory)
        network = ppo_jax.make_network(config)
        given = (minibatch.obs, minibatch.memory, minibatch.starts) if config.is_recurrent else (minibatch.obs,)
        distribution, value, *_ = network.apply(agent.params, *given)
        ratio = jnp.exp(distribution.log_prob(minibatch.action) - minibatch.log_prob)
        return ratio, value - minibatch.value, jnp.std(minibatch.value)

    ratio, value_error, spread = jit(run)(config, jax.random.key(1))
    # Densities of continuous actions have logarithms of some tens, which float32 holds to a millionth.
    np.testing.assert_allclose(ratio, 1, atol=1e-5 if config.squash_output else 2e-6)
    np.testing.assert_allclose(value_error, 0, atol=1e-5)
    assert spread > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_plays(name):
    config = PPOConfig(**SMALL | VARIANTS[name])
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    for deterministic in (True, False):
        assert np.isfinite(evaluate(config, agent, jax.random.key(1), 2, deterministic)).all()


# ------------------------------------------------------------------------------------------------------ distributions


def test_gsde_is_that_of_stable_baselines3():
    with np.load(GOLDEN / "gsde.npz") as stored:
        golden = {name: jnp.asarray(stored[name]) for name in stored}
    distribution = StateDependentGaussian(golden["mean"], golden["latent"], golden["log_std"])
    noise = golden["noise_matrix"] / jnp.exp(golden["log_std"])
    np.testing.assert_allclose(distribution.sample(noise), golden["action"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution.log_prob(golden["action"]), golden["log_prob"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(None), golden["entropy"], rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("squash_output", [False, True])
@pytest.mark.parametrize("freq, length", [(4, 4), (5, 5), (-1, 16)])
def test_gsde_keeps_its_noise_for_so_many_steps_in_each_environment(freq, length, squash_output):
    config = PPOConfig(env=Still(), n_envs=3, n_steps=16, use_sde=True, sde_sample_freq=freq)
    config = config.replace(squash_output=squash_output)
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    action = np.asarray(jit(ppo_jax.collect_rollout)(config, agent, jax.random.key(1))[1].action)
    for t in range(16):
        np.testing.assert_array_equal(action[t], action[t - t % length])
    drawn = action[::length].reshape(-1, 2)
    assert len(np.unique(drawn[:, 0])) == len(drawn)


def test_squashed_gaussian_is_the_change_of_variables():
    """Of a = tanh(u), the density is that of u over da/du = 1 - a^2."""
    mean, log_std = np.array([[0.3, -1.0], [2.0, 0.0]]), np.array([-0.5, 0.4])
    distribution = Squashed(DiagonalGaussian(jnp.asarray(mean, jnp.float32), jnp.asarray(log_std, jnp.float32)))
    u = mean + np.exp(log_std) * np.array([[0.5, -1.0], [1.5, 0.1]])
    expected = np.sum(stats.norm.logpdf(u, mean, np.exp(log_std)) - np.log(1 - np.tanh(u) ** 2), axis=-1)
    np.testing.assert_allclose(distribution.log_prob(jnp.asarray(u, jnp.float32)), expected, rtol=1e-5)


def test_squashed_gaussian_is_finite_at_the_bounds():
    """Actions within 1e-6 of the bounds, and such as float32 can't tell from them."""

    def log_prob(mean, log_std, action):
        distribution = Squashed(DiagonalGaussian(mean, log_std))
        return jnp.sum(distribution.log_prob(action) + distribution.entropy(action))

    for u in (np.arctanh(1 - 1e-6), 10.0, 50.0):
        for sign in (-1, 1):
            given = jnp.zeros(1), jnp.zeros(1), jnp.full(1, sign * u)
            value, gradients = jax.value_and_grad(log_prob, (0, 1, 2))(*given)
            assert np.isfinite(value) and all(np.isfinite(gradient).all() for gradient in gradients)


def squashed_entropy(mean, log_std):
    """By quadrature: that of the Gaussian plus the mean of the logarithm of the slope."""
    log_slope = lambda u: np.log1p(-(np.tanh(u) ** 2)) * stats.norm.pdf(u, mean, math.exp(log_std))  # noqa: E731
    reach = 8 * math.exp(log_std)
    return stats.norm.entropy(0, math.exp(log_std)) + integrate.quad(log_slope, mean - reach, mean + reach)[0]


def test_squashed_entropy_and_its_gradient_are_right_on_average():
    """200,000 samples of a term whose deviation is about 1: a standard error of 0.002, and of 0.01 for the gradient."""
    mean, log_std, n = 0.4, -0.2, 200_000
    u = mean + math.exp(log_std) * jax.random.normal(jax.random.key(0), (n, 1))

    def estimate(mean, log_std):
        distribution = Squashed(DiagonalGaussian(jnp.full((n, 1), mean), jnp.full((1,), log_std)))
        return jnp.mean(distribution.entropy(u))

    value, gradient = jax.value_and_grad(estimate, (0, 1))(mean, log_std)
    assert abs(value - squashed_entropy(mean, log_std)) < 0.01
    h = 1e-4
    by_mean = (squashed_entropy(mean + h, log_std) - squashed_entropy(mean - h, log_std)) / (2 * h)
    by_std = (squashed_entropy(mean, log_std + h) - squashed_entropy(mean, log_std - h)) / (2 * h)
    np.testing.assert_allclose(gradient, [by_mean, by_std], atol=0.02)
    assert abs(by_std) > 0.1


def test_squashed_actions_reach_the_environment_within_its_bounds():
    space = spaces.Box(jnp.array([-2.0, 0.0]), jnp.array([1.0, 10.0]), (2,))
    action = ppo_jax.environment_action(space, jnp.array([[-50.0, 0.0], [0.0, 50.0]]), True)
    np.testing.assert_allclose(action, [[-2, 5], [-0.5, 10]], atol=1e-6)


def test_multi_categorical_is_a_product():
    rng, sizes = np.random.default_rng(0), (3, 2, 4)
    logits = rng.normal(size=(5, 9)).astype(np.float32)
    parts = [special.log_softmax(part, axis=-1) for part in np.split(logits, [3, 5], axis=-1)]
    action = np.stack([rng.integers(n, size=5) for n in sizes], axis=-1)
    log_prob = sum(part[np.arange(5), action[:, i]] for i, part in enumerate(parts))
    distribution = MultiCategorical(jnp.asarray(logits), sizes)
    np.testing.assert_allclose(distribution.log_prob(jnp.asarray(action)), log_prob, rtol=1e-5)
    np.testing.assert_allclose(
        distribution.entropy(None), sum(stats.entropy(np.exp(part), axis=-1) for part in parts), rtol=1e-5
    )
    drawn = np.asarray(distribution.sample(distribution.noise(jax.random.key(0), 4000)))
    for i, part in enumerate(parts):
        for place in range(5):
            counts = np.bincount(drawn[:, place, i], minlength=sizes[i])
            expected = 4000 * special.softmax(part[place].astype(np.float64))
            assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_masked_actions_have_no_probability_anywhere():
    config = PPOConfig(**SMALL | VARIANTS["masked"])

    def run(config, key):
        agent, rollout, batch, _ = rollout_and_batch(config, key)
        distribution, _ = ppo_jax.make_network(config).apply(agent.params, batch.obs)
        return rollout, batch.obs["action_mask"], distribution, distribution.entropy(None)

    rollout, mask, distribution, entropy = jit(run)(config, jax.random.key(0))
    assert rollout.reward.min() >= 0
    probability = special.softmax(np.asarray(distribution.logits), axis=-1)
    assert 0 < np.mean(mask) < 1 and not probability[~np.asarray(mask)].any()
    np.testing.assert_allclose(entropy, stats.entropy(probability, axis=-1), rtol=1e-4)


# --------------------------------------------------------------------------------------------------------- recurrence


@pytest.mark.parametrize("policy", ["gru", "lstm"])
def test_replayed_windows_give_every_log_prob_and_value_back(policy):
    """Against a plain loop over steps, which forgets where the previous step ended an episode."""
    config = PPOConfig("CartPole-v1", policy=policy, n_envs=3, n_steps=64, sub_traj_len=16, net_arch=(8,))
    agent, rollout, batch, moved = jit(rollout_and_batch)(config, jax.random.key(2))
    network = ppo_jax.make_network(config)
    step = jit(lambda params, obs, memory: network.apply(params, obs, memory))
    done, memory = np.asarray(rollout.terminated | rollout.truncated), agent.memory
    assert done.reshape(4, 16, 3)[:, :-1].sum() >= 5, "no episode ended inside of a window"
    log_probs, values = [], []
    for t in range(64):
        distribution, value, memory = step(agent.params, rollout.obs[t], memory)
        log_probs.append(distribution.log_prob(rollout.action[t]))
        values.append(value)
        memory = jax.tree.map(lambda x: x * (1 - done[t].astype(np.float32))[:, None], memory)  # noqa: B023

    def windows(steps):
        return np.stack(steps).reshape(4, 16, 3).swapaxes(1, 2).reshape(12, 16)

    np.testing.assert_allclose(batch.log_prob, windows(log_probs), atol=1e-5)
    np.testing.assert_allclose(batch.value, windows(values), atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), moved.memory, memory)
    by_time = jax.tree.map(lambda x: x.swapaxes(0, 1), (batch.obs, batch.starts))
    distribution, value, _ = jit(network.apply)(agent.params, by_time[0], batch.memory, by_time[1])
    np.testing.assert_allclose(distribution.log_prob(batch.action.swapaxes(0, 1)).T, batch.log_prob, atol=1e-5)
    np.testing.assert_allclose(value.T, batch.value, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ normalisation


@pytest.mark.parametrize("mean, deviation", [(0.0, 1.0), (1e4, 0.1), (-3e-3, 1e-4)])
def test_running_statistics_are_those_of_all_samples(mean, deviation):
    """Up to what float32 holds of the samples: 1e-7 of the mean, which at 1e4 is a hundredth of this deviation."""
    samples = np.random.default_rng(0).normal(mean, deviation, (200, 64, 3)).astype(np.float32)
    update = jit(ppo_jax.update_statistics)
    seen = RunningStatistics(jnp.float32(0), jnp.zeros(3), jnp.ones(3))
    for chunk in samples:
        seen = update(seen, chunk)
    exact = samples.reshape(-1, 3).astype(np.float64)
    assert seen.count == 200 * 64
    np.testing.assert_allclose(seen.mean, exact.mean(0), rtol=3e-7, atol=1e-3 * deviation)
    np.testing.assert_allclose(seen.variance, exact.var(0), rtol=0.02)


def test_running_statistics_stay_right_over_a_billion_samples():
    """A million updates of 1,024 samples, of mean 1000 and deviation 1: sums of squares would have lost all digits."""

    def step(i, seen):
        samples = 1000 + jax.random.normal(jax.random.fold_in(jax.random.key(0), i % 64), (1024,))
        return ppo_jax.update_statistics(seen, samples)

    start = RunningStatistics(jnp.float32(0), jnp.float32(0), jnp.float32(1))
    seen = jax.jit(lambda seen: jax.lax.fori_loop(0, 1000, step, seen))(start)
    seen = seen.replace(count=jnp.float32(1e9))
    seen = jax.jit(lambda seen: jax.lax.fori_loop(0, 1000, step, seen))(seen)
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
        return rollout.obs, first.obs_statistics, later.obs, ppo_jax.make_batch(config, moved, later).obs

    obs, seen, later, normalized = jit(run)(config, jax.random.key(0))
    obs = np.asarray(obs, np.float64).reshape(-1, 3)
    np.testing.assert_allclose(seen.mean, obs.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.variance, obs.var(0), rtol=1e-4)
    expected = np.clip((later.reshape(-1, 3) - obs.mean(0)) / np.sqrt(obs.var(0) + 1e-8), -10, 10)
    np.testing.assert_allclose(normalized, expected, rtol=1e-3, atol=1e-4)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    """VecNormalize's rule, over two rollouts; here the statistics are brought up to date once in a rollout."""
    config = PPOConfig(n_envs=2, n_steps=50, gamma=0.9, normalize_reward=True)
    agent, rng = jit(ppo_jax.init_agent)(config, jax.random.key(0)), np.random.default_rng(1)
    total, seen = np.zeros(2), []
    for _ in range(2):
        reward, ends = rng.normal(1, 3, size=(50, 2)).astype(np.float32), rng.random((2, 50, 2)) < 0.05
        given = ppo_jax.Rollout(None, None, jnp.asarray(reward), *jnp.asarray(ends), None)
        agent, rollout = ppo_jax.normalize_reward(config, agent, given)
        for t in range(50):
            total = 0.9 * total + reward[t]
            seen.append(total.copy())
            total[ends[:, t].any(0)] = 0
        np.testing.assert_allclose(rollout.reward, reward / np.std(seen), rtol=1e-4)


def test_reported_returns_stay_raw():
    config = PPOConfig("CartPole-v1", n_envs=4, n_steps=64, total_timesteps=512, n_epochs=1, normalize_reward=True)
    metrics = jit(train)(config, jax.random.key(0))[1]
    np.testing.assert_allclose(metrics["return"], metrics["length"], rtol=1e-5)


@pytest.mark.parametrize("n_tasks", [1, 3])
def test_advantages_are_standardised_within_each_task(n_tasks):
    rng = np.random.default_rng(0)
    task = rng.choice([5, -2, 70][:n_tasks], size=40)
    advantage = rng.normal(task, 1 + np.abs(task)).astype(np.float32)
    expected = np.empty(40)
    for name in np.unique(task):
        mine = advantage[task == name].astype(np.float64)
        expected[task == name] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(jit(ppo_jax.standardize)(advantage, task), expected, rtol=1e-4, atol=1e-5)
    if n_tasks == 1:
        np.testing.assert_allclose(jit(ppo_jax.standardize)(advantage), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    "given, at",
    [
        ("linear", lambda p: 3e-4 * p),
        ("linear_1e-3", lambda p: 1e-3 * p),
        ("linear_1e-3_0.1", lambda p: 1e-3 * (0.1 + 0.9 * p)),
        ("cosine_1e-3_0.1", lambda p: 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (1 - p))) / 2)),
        (lambda p: 0.5 * p**2, lambda p: 0.5 * p**2),
        ("2e-3", lambda p: 2e-3),
    ],
)
def test_schedules_follow_the_progress_remaining(given, at):
    config = PPOConfig(env="Acrobot-v1", learning_rate=3e-4).replace(learning_rate=given)
    if given == "linear":
        config = PPOConfig(env="Catch-bsuite", learning_rate=given)  # whose preset is the default, 3e-4
    for progress in (1.0, 0.75, 0.3, 0.0):
        np.testing.assert_allclose(config.at(progress).learning_rate, at(progress), rtol=1e-5, atol=1e-10)


def test_a_schedule_where_a_number_is_needed_is_refused():
    with pytest.raises(ConfigError, match=r"learning_rate: linear_0.001_0.0 is a schedule; config.at"):
        ppo_jax.make_optimizer(PPOConfig("CartPole-v1"))
    ppo_jax.make_optimizer(PPOConfig("CartPole-v1").at(1.0))


def test_linear_starts_from_the_preset():
    assert PPOConfig("CartPole-v1", learning_rate="linear").learning_rate == Schedule(1e-3, 0.0, "linear")
    assert PPOConfig("CartPole-v1", clip_range="linear").clip_range == Schedule(0.2, 0.0, "linear")
    assert PPOConfig(clip_range="0.1,linear_0.3").clip_range == (0.1, Schedule(0.3, 0.0, "linear"))


def test_schedules_end_with_the_steps_that_were_asked_for():
    """The rates of a run are those of runs of one update with a constant rate."""
    config = PPOConfig(**SMALL | dict(total_timesteps=256, learning_rate="linear_0.01_0.5", target_kl=1.0))
    agent, _ = jit(train)(config, jax.random.key(0))
    by_hand = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    for rate in (0.01 * 0.75, 0.01 * 0.5):
        by_hand, _ = jit(ppo_jax.update)(config.replace(learning_rate=rate), by_hand)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), agent.params, by_hand.params)


def test_a_schedule_is_swept_like_a_number():
    schedule = Schedule(jnp.array([1e-3, 1e-2]), 0.0, "linear")
    keys = jax.random.split(jax.random.key(0), 2)
    agents, _ = train_population(PPOConfig(**SMALL).replace(learning_rate=schedule), keys)
    alone, _ = jit(train)(PPOConfig(**SMALL | dict(learning_rate="linear_1e-2")), keys[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-5), agents.params, alone.params)


def test_an_asymmetric_clip_range_and_the_huber_loss():
    """By hand: ratios 0.5 and 2, advantages of both signs; errors within 1 and beyond."""
    ratio, advantage = np.array([0.5, 0.5, 2.0, 2.0]), np.array([1.0, -1.0, 2.0, -1.0])
    error = np.array([0.5, -0.5, 3.0, 1.0])

    class Fixed(nn.Module):
        def __call__(self, obs):
            return Categorical(jnp.log(jnp.asarray([[0.5, 0.5]] * 4))), jnp.zeros(4)

    config = PPOConfig(clip_range=(0.1, 0.3), vf_loss="huber", normalize_advantage=False, vf_coef=1.0)
    batch = ppo_jax.Batch(
        jnp.zeros(4), jnp.zeros(4, int), jnp.log(0.5 / ratio), jnp.zeros(4), jnp.asarray(advantage), jnp.asarray(error)
    )
    _, report = ppo_jax.ppo_loss({}, config, Fixed(), batch)
    surrogate = np.minimum(advantage * ratio, advantage * np.clip(ratio, 0.9, 1.3))
    np.testing.assert_allclose(report["policy_loss"], -surrogate.mean(), rtol=1e-5)
    np.testing.assert_allclose(report["value_loss"], np.mean([0.125, 0.125, 2.5, 0.5]), rtol=1e-5)
    assert report["clip_fraction"] == 1


# ------------------------------------------------------------------------------------------------------- environments


def test_frame_skip_adds_rewards_up_and_stops_at_an_episodes_end():
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    keys = jax.random.split(jax.random.key(0), 16)
    starts = ppo_jax.reset_envs(env, params, keys)
    states = starts[1].replace(theta=jnp.linspace(0.05, 0.2, 16), theta_dot=jnp.full(16, 1.0))
    action = jnp.zeros(16, int)
    new = ppo_jax.step_envs(env, params, keys, states, action, starts, frame_skip=4)
    for place in range(16):
        state, reward, terminated, n = jax.tree.map(lambda x: x[place], states), 0.0, False, 0  # noqa: B023
        while n < 4 and not terminated:
            obs, state, now, terminated, _ = env.step_env(keys[place], state, 0, params)
            reward, n = reward + now, n + 1
        assert new.reward[place] == reward and new.terminated[place] == terminated
        np.testing.assert_allclose(new.final_obs[place], obs, atol=1e-6)
    assert 0 < new.terminated.sum() < 16 and set(new.reward.tolist()) > {4.0}


def test_env_params_reach_the_environment_and_are_checked():
    config = PPOConfig("MemoryChain-bsuite", env_params={"memory_length": 20})
    assert ppo_jax.make_env(config)[1].memory_length == 20
    assert PPOConfig("MemoryChain-bsuite", env_params=["memory_length=20"]) == config
    with pytest.raises(ConfigError, match=r"env_params: .* has no memory_lenght; did you mean memory_length"):
        ppo_jax.make_env(config.replace(env_params={"memory_lenght": 20}))


@pytest.mark.parametrize("policy", ["nature_cnn", "cnn"])
def test_large_images_go_through_a_cnn(policy):
    encoder = ppo_jax.Encoder(spaces.Box(0, 255, (84, 84, 4), jnp.uint8), policy, nn.initializers.lecun_normal())
    images = jnp.zeros((2, 3, 84, 84, 4), jnp.uint8)
    params = jax.eval_shape(encoder.init, jax.random.key(0), images)
    assert jax.eval_shape(encoder.apply, params, images).shape == (2, 3, 512 if policy == "nature_cnn" else 128)
    if policy == "nature_cnn":  # the shapes of Stable-Baselines3's NatureCNN
        shapes = {name: leaf["kernel"].shape for name, leaf in params["params"].items()}
        assert shapes == {
            "conv_0": (8, 8, 4, 32),
            "conv_1": (4, 4, 32, 64),
            "conv_2": (3, 3, 64, 64),
            "features": (3136, 512),
        }


# ------------------------------------------------------------------------------------------------- parts of one's own


class Actor(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return Categorical(nn.Dense(2)(nn.tanh(nn.Dense(32)(obs))))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(obs)))[..., 0]


class Both(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return Actor()(obs), Critic()(obs)


def monte_carlo(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    return ppo_jax.compute_gae(reward, value, next_value, terminated, truncated, gamma, 1.0)


def twice(params, config, network, minibatch):
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return 2 * loss, report


@pytest.mark.parametrize("policy", [Both(), (Actor(), Critic())])
def test_modules_of_ones_own_learn(policy):
    config = PPOConfig("CartPole-v1", policy=policy, total_timesteps=60_000)
    metrics = jit(train)(config, jax.random.key(0))[1]
    assert metrics["return"][-1] > 100


def test_each_part_can_be_replaced():
    """Against the setting that does the same: lambda 1; by SGD, twice the learning rate."""
    base = SMALL | dict(optimizer="sgd", learning_rate=0.1, max_grad_norm=1e9, n_epochs=2)
    alike = [
        (dict(advantage_function=monte_carlo), dict(gae_lambda=1.0)),
        (dict(loss_function=twice), dict(learning_rate=0.2)),
        (dict(optimizer=optax.sgd), {}),
        (dict(optimizer=lambda rate: optax.sgd(rate, 0.5)), dict(optimizer_kwargs={"momentum": 0.5})),
        (dict(net_arch={"pi": [8], "vf": [4, 4]}), dict(net_arch=(8,), net_arch_vf=(4, 4))),
    ]
    for ours, theirs in alike:
        one, other = (jit(train)(PPOConfig(**base | changes), jax.random.key(0))[0] for changes in (ours, theirs))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one.params, other.params)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(policy="gru", sub_traj_len=7), "sub_traj_len: 7 .* n_steps = 128.* 4 and 8"),
        (
            dict(policy="gru", sub_traj_len=16, batch_size=40),
            "batch_size: 40 .* windows of sub_traj_len = 16.* 32 and 64",
        ),
        (dict(learning_rate="linar"), "learning_rate: 'linar' .* linear_3e-4"),
        (dict(clip_range_vf="linear"), "clip_range_vf: 'linear'"),
        (dict(clip_range=(0.1, 0.2, 0.3)), "clip_range: .* a pair"),
        (dict(clip_range=(0.1, -0.2)), "clip_range: .* above 0"),
        (dict(vf_loss="l1"), "vf_loss: 'l1' .* mse, huber"),
        (dict(optimizer="adm"), "optimizer: .*'adm'.* adam"),
        (dict(optimizer_kwargs=["lr"]), "optimizer_kwargs: 'lr' .* name=1"),
        (dict(use_sde=True, sde_sample_freq=0), "sde_sample_freq: 0 .* -1 or"),
        (dict(frame_skip=0), "frame_skip: 0 .* from 1"),
        (dict(policy="grru"), "policy: 'grru' .* gru"),
    ],
)
def test_a_mistake_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        PPOConfig(**dict(n_envs=64, n_steps=128) | changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(use_sde=True), "use_sde: True needs continuous actions"),
        (dict(squash_output=True), "squash_output: True needs continuous actions"),
        (dict(policy="nature_cnn"), "policy: 'nature_cnn' needs images .* 36 by 36"),
        (dict(optimizer_kwargs={"no_such": 1}), "optimizer_kwargs: .*no_such"),
    ],
)
def test_a_mistake_that_only_the_environment_shows_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        train(PPOConfig(**changes), jax.random.key(0))


def test_what_is_off_leaves_nothing_behind():
    agent = jax.eval_shape(ppo_jax.init_agent, PPOConfig(), jax.random.key(0))
    assert agent.memory is agent.obs_statistics is agent.discounted_return is agent.return_statistics is None
    _, rollout = jax.eval_shape(ppo_jax.collect_rollout, PPOConfig(), agent, jax.random.key(0))
    batch = jax.eval_shape(ppo_jax.make_batch, PPOConfig(), agent, rollout)
    assert rollout.task_id is rollout.memory is batch.task_id is batch.starts is batch.memory is None


# ----------------------------------------------------------------------------------------------------------- learning

BANDIT = dict(n_envs=64, n_steps=8, n_epochs=4, learning_rate=3e-3, net_arch=(64,), gamma=0.0, total_timesteps=60_000)


@pytest.mark.parametrize(
    "changes, right",
    [
        *((dict(env=Match(space)), 0.98) for space in ACTION_SPACES.values()),
        (dict(env=Match(spaces.Discrete(6), "mask")), 0.98),
        (dict(env=Match(spaces.Discrete(4), "dict"), normalize_obs=True), 0.98),
    ],
    ids=[*ACTION_SPACES, "mask", "dict"],
)
def test_learns(changes, right):
    """One step an episode, so the reward is the return, and 1 for an action that is right in all parts."""
    config = PPOConfig(**BANDIT | changes)
    agent, _ = jax.jit(train)(config, jax.random.key(0))
    assert evaluate(config, agent, jax.random.key(1), 500).mean() >= right


def test_learns_the_lesser_of_two_tasks_too():
    """Rewards a thousand times smaller vanish beside the others unless advantages are standardised by task."""
    changes = dict(env=Match(spaces.Discrete(4), n_tasks=2), advantage_function=reward_alone, vf_coef=0.0)
    config = PPOConfig(**BANDIT | changes)
    agent, _ = jax.jit(train)(config, jax.random.key(0))
    distribution, _ = ppo_jax.make_network(config).apply(agent.params, jnp.eye(5)[:4])
    assert np.mean(distribution.mode() == np.arange(4)) == 1


def reward_alone(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    return reward, reward
