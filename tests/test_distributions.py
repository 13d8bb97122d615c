"""Distributions against SciPy, and gSDE against Stable-Baselines3."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Still
from helpers import GOLDEN, jit
from scipy import integrate, special, stats

import ppo_jax
from ppo_jax import (
    Categorical,
    ConfigError,
    DiagonalGaussian,
    MultiCategorical,
    PPOConfig,
    Squashed,
    StateDependentGaussian,
)

RNG = np.random.default_rng(0)
# They count up to a constant only.
LOGITS = RNG.normal(scale=3, size=(5, 7, 4)).astype(np.float32) + 50
MEAN = RNG.normal(scale=2, size=(5, 7, 3)).astype(np.float32)
LOG_STD = np.array([-2.0, 0.3, 1.0], np.float32)
N_DRAWS = 20_000
LEAST_P = 1e-4


def test_categorical_log_prob_and_entropy():
    distribution = Categorical(jnp.asarray(LOGITS))
    log_p = special.log_softmax(LOGITS.astype(np.float64), axis=-1)
    for action in range(4):
        # The logits' own rounding, at 50, is 4e-6.
        log_prob = distribution.log_prob(jnp.full((5, 7), action))
        np.testing.assert_allclose(log_prob, log_p[..., action], atol=1e-5)
    entropy = stats.entropy(np.exp(log_p), axis=-1)
    np.testing.assert_allclose(distribution.entropy(), entropy, atol=1e-5)


def test_categorical_with_an_impossible_action():
    distribution = Categorical(jnp.array([0.0, -1e9, 0.0]))
    np.testing.assert_allclose(distribution.entropy(), math.log(2), rtol=1e-6)
    assert not np.any(distribution.sample(distribution.noise(jax.random.key(0), 1000)) == 1)


def test_categorical_samples_and_mode():
    distribution = Categorical(jnp.asarray(LOGITS[0]))
    drawn = distribution.sample(distribution.noise(jax.random.key(1), N_DRAWS))
    assert drawn.shape == (N_DRAWS, 7) and jnp.issubdtype(drawn.dtype, jnp.integer)
    for place, p in enumerate(special.softmax(LOGITS[0].astype(np.float64), axis=-1)):
        counts, often = np.bincount(drawn[:, place], minlength=4), p * N_DRAWS >= 5
        expected = p[often] / p[often].sum() * counts[often].sum()
        assert stats.chisquare(counts[often], expected).pvalue > LEAST_P
        rarely = stats.poisson.ppf(1 - LEAST_P, (p[~often] * N_DRAWS).sum())
        assert counts[~often].sum() <= rarely
    np.testing.assert_array_equal(distribution.mode(), LOGITS[0].argmax(-1))


def test_multi_categorical_is_a_product():
    rng, sizes = np.random.default_rng(0), (3, 2, 4)
    logits = rng.normal(size=(5, 9)).astype(np.float32)
    parts = [special.log_softmax(part, axis=-1) for part in np.split(logits, [3, 5], axis=-1)]
    action = np.stack([rng.integers(n, size=5) for n in sizes], axis=-1)
    log_prob = sum(part[np.arange(5), action[:, i]] for i, part in enumerate(parts))
    distribution = MultiCategorical(jnp.asarray(logits), sizes)
    np.testing.assert_allclose(distribution.log_prob(jnp.asarray(action)), log_prob, rtol=1e-5)
    entropy = sum(stats.entropy(np.exp(part), axis=-1) for part in parts)
    np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-5)
    mode = np.stack([part.argmax(-1) for part in parts], axis=-1)
    np.testing.assert_array_equal(distribution.mode(), mode)
    drawn = np.asarray(distribution.sample(distribution.noise(jax.random.key(0), 4000)))
    for i, part in enumerate(parts):
        for place in range(5):
            counts = np.bincount(drawn[:, place, i], minlength=sizes[i])
            expected = 4000 * special.softmax(part[place].astype(np.float64))
            assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_gaussian_log_prob_and_entropy():
    distribution = DiagonalGaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    std = np.exp(LOG_STD, dtype=np.float64)
    action = MEAN + RNG.normal(size=MEAN.shape).astype(np.float32)
    log_density = stats.norm.logpdf(action, MEAN, std).sum(-1)
    log_prob = distribution.log_prob(jnp.asarray(action))
    np.testing.assert_allclose(log_prob, log_density, rtol=1e-5, atol=1e-5)
    entropy = stats.multivariate_normal(np.zeros(3), np.diag(std**2)).entropy()
    np.testing.assert_allclose(distribution.entropy(), np.full((5, 7), entropy), rtol=1e-6)


def test_gaussian_samples_and_mode():
    distribution = DiagonalGaussian(jnp.asarray(MEAN[0, 0]), jnp.asarray(LOG_STD))
    drawn = np.asarray(distribution.sample(distribution.noise(jax.random.key(2), N_DRAWS)))
    for place in range(3):
        law = stats.norm(MEAN[0, 0, place], np.exp(LOG_STD[place]))
        assert stats.kstest(drawn[:, place], law.cdf).pvalue > LEAST_P
    # The dimensions are independent.
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 4 / math.sqrt(N_DRAWS)
    np.testing.assert_array_equal(distribution.mode(), MEAN[0, 0])


def test_gsde_is_that_of_stable_baselines3():
    with np.load(GOLDEN / "gsde.npz") as stored:
        golden = {name: jnp.asarray(stored[name]) for name in stored}
    log_std = golden["log_std"]
    distribution = StateDependentGaussian(golden["mean"], log_std, golden["latent"])
    found = {
        "action": distribution.sample(golden["noise_matrix"] / jnp.exp(log_std)),
        "log_prob": distribution.log_prob(golden["action"]),
        "entropy": distribution.entropy(),
    }
    for name, ours in found.items():
        np.testing.assert_allclose(ours, golden[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("squash_output", [False, True])
@pytest.mark.parametrize("freq, length", [(4, 4), (5, 5), (-1, 16)])
def test_gsde_keeps_its_noise_for_so_many_steps_in_each_environment(freq, length, squash_output):
    config = PPOConfig(env=Still(), n_envs=3, n_steps=16, use_sde=True, sde_sample_freq=freq)
    config = config.replace(squash_output=squash_output)
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    _, rollout = jit(ppo_jax.collect_rollout)(config, agent, jax.random.key(1))
    action = np.asarray(rollout.action)
    for t in range(16):
        np.testing.assert_array_equal(action[t], action[t - t % length])
    drawn = action[::length].reshape(-1, 2)
    assert len(np.unique(drawn[:, 0])) == len(drawn)


def test_squashed_gaussian_is_the_change_of_variables():
    """Of a = tanh(u), the density is that of u over da/du = 1 - a^2."""
    mean, log_std = np.array([[0.3, -1.0], [2.0, 0.0]]), np.array([-0.5, 0.4])
    given = (jnp.asarray(x, jnp.float32) for x in (mean, log_std))
    distribution = Squashed(DiagonalGaussian(*given))
    u = mean + np.exp(log_std) * np.array([[0.5, -1.0], [1.5, 0.1]])
    of_u = stats.norm.logpdf(u, mean, np.exp(log_std))
    expected = np.sum(of_u - np.log(1 - np.tanh(u) ** 2), axis=-1)
    log_prob = distribution.log_prob(jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)


def test_squashed_gaussian_is_finite_at_the_bounds():
    """Actions within 1e-6 of the bounds, and such as float32 can't tell from them."""

    def log_prob(mean, log_std, action):
        distribution = Squashed(DiagonalGaussian(mean, log_std))
        return jnp.sum(distribution.log_prob(action) + distribution.entropy(action))

    for u in (np.arctanh(1 - 1e-6), 10.0, 50.0):
        for sign in (-1, 1):
            given = jnp.zeros(1), jnp.zeros(1), jnp.full(1, sign * u)
            value, gradients = jax.value_and_grad(log_prob, (0, 1, 2))(*given)
            assert np.isfinite(value)
            assert all(np.isfinite(gradient).all() for gradient in gradients)


def squashed_entropy(mean, log_std):
    """By quadrature: that of the Gaussian plus the mean of the logarithm of the slope."""
    std = math.exp(log_std)

    def log_slope(u):
        return np.log1p(-(np.tanh(u) ** 2)) * stats.norm.pdf(u, mean, std)

    of_slope, _ = integrate.quad(log_slope, mean - 8 * std, mean + 8 * std)
    return stats.norm.entropy(0, std) + of_slope


def test_squashed_entropy_and_its_gradient_are_right_on_average():
    """200,000 samples of a term whose deviation is about 1: a standard error of 0.002, and of 0.01
    for the gradient.
    """
    mean, log_std, n = 0.4, -0.2, 200_000
    u = mean + math.exp(log_std) * jax.random.normal(jax.random.key(0), (n, 1))

    def estimate(mean, log_std):
        gaussian = DiagonalGaussian(jnp.full((n, 1), mean), jnp.full((1,), log_std))
        return jnp.mean(Squashed(gaussian).entropy(u))

    value, gradient = jax.value_and_grad(estimate, (0, 1))(mean, log_std)
    assert abs(value - squashed_entropy(mean, log_std)) < 0.01
    h = 1e-4
    by_mean = squashed_entropy(mean + h, log_std) - squashed_entropy(mean - h, log_std)
    by_std = squashed_entropy(mean, log_std + h) - squashed_entropy(mean, log_std - h)
    by_mean, by_std = by_mean / (2 * h), by_std / (2 * h)
    np.testing.assert_allclose(gradient, [by_mean, by_std], atol=0.02)
    assert abs(by_std) > 0.1


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(use_sde=True, sde_sample_freq=0), "sde_sample_freq: 0 .* -1 or"),
        (dict(use_sde=True), "use_sde: True needs continuous actions"),
        (dict(squash_output=True), "squash_output: True needs continuous actions"),
    ],
)
def test_settings_of_continuous_actions_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        ppo_jax.train(PPOConfig("CartPole-v1", **changes), jax.random.key(0))
