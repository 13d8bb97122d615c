"""Distributions against SciPy, initial weights against their definition."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import ppo_jax
from ppo_jax import Categorical, DiagonalGaussian

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(scale=3, size=(5, 7, 4)).astype(np.float32) + 50  # they count up to a constant only
MEAN = RNG.normal(scale=2, size=(5, 7, 3)).astype(np.float32)
LOG_STD = np.array([-2.0, 0.3, 1.0], np.float32)
N_DRAWS = 20_000
LEAST_P = 1e-4


def test_categorical_log_prob_and_entropy():
    distribution, log_p = Categorical(jnp.asarray(LOGITS)), special.log_softmax(LOGITS.astype(np.float64), axis=-1)
    for action in range(4):
        # The logits' own rounding, at 50, is 4e-6.
        np.testing.assert_allclose(distribution.log_prob(jnp.full((5, 7), action)), log_p[..., action], atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(None), stats.entropy(np.exp(log_p), axis=-1), atol=1e-5)


def test_categorical_with_an_impossible_action():
    distribution = Categorical(jnp.array([0.0, -1e9, 0.0]))
    np.testing.assert_allclose(distribution.entropy(None), math.log(2), rtol=1e-6)
    assert not np.any(distribution.sample(distribution.noise(jax.random.key(0), 1000)) == 1)


def test_categorical_samples_and_mode():
    distribution = Categorical(jnp.asarray(LOGITS[0]))
    drawn = distribution.sample(distribution.noise(jax.random.key(1), N_DRAWS))
    assert drawn.shape == (N_DRAWS, 7) and jnp.issubdtype(drawn.dtype, jnp.integer)
    for place, p in enumerate(special.softmax(LOGITS[0].astype(np.float64), axis=-1)):
        counts, often = np.bincount(drawn[:, place], minlength=4), p * N_DRAWS >= 5
        assert stats.chisquare(counts[often], p[often] / p[often].sum() * counts[often].sum()).pvalue > LEAST_P
        assert counts[~often].sum() <= stats.poisson.ppf(1 - LEAST_P, (p[~often] * N_DRAWS).sum())
    np.testing.assert_array_equal(distribution.mode(), LOGITS[0].argmax(-1))


def test_gaussian_log_prob_and_entropy():
    distribution = DiagonalGaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    action, std = MEAN + RNG.normal(size=MEAN.shape).astype(np.float32), np.exp(LOG_STD, dtype=np.float64)
    log_density = stats.norm.logpdf(action, MEAN, std).sum(-1)
    np.testing.assert_allclose(distribution.log_prob(jnp.asarray(action)), log_density, rtol=1e-5, atol=1e-5)
    entropy = stats.multivariate_normal(np.zeros(3), np.diag(std**2)).entropy()
    np.testing.assert_allclose(distribution.entropy(None), np.full((5, 7), entropy), rtol=1e-6)


def test_gaussian_samples_and_mode():
    distribution = DiagonalGaussian(jnp.asarray(MEAN[0, 0]), jnp.asarray(LOG_STD))
    drawn = np.asarray(distribution.sample(distribution.noise(jax.random.key(2), N_DRAWS)))
    for place in range(3):
        law = stats.norm(MEAN[0, 0, place], np.exp(LOG_STD[place]))
        assert stats.kstest(drawn[:, place], law.cdf).pvalue > LEAST_P
    # The dimensions are independent.
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 4 / math.sqrt(N_DRAWS)
    np.testing.assert_array_equal(distribution.mode(), MEAN[0, 0])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 3, 2, 5)])
@pytest.mark.parametrize("scale", [0.01, math.sqrt(2)])
def test_orthogonal_is_orthonormal_times_scale(shape, scale):
    """As a matrix whose columns are the outputs: the shorter of its two sides is orthonormal."""
    weights = np.asarray(ppo_jax.orthogonal(scale)(jax.random.key(3), shape), np.float64).reshape(-1, shape[-1])
    gram = weights.T @ weights if weights.shape[0] >= weights.shape[1] else weights @ weights.T
    np.testing.assert_allclose(gram / scale**2, np.eye(len(gram)), atol=1e-5)


def test_orthogonal_under_vmap_is_orthogonal_alone():
    draw, keys = ppo_jax.orthogonal(math.sqrt(2)), jax.random.split(jax.random.key(4), 3)
    together = jax.jit(jax.vmap(lambda key: draw(key, (6, 4))))(keys)
    for key, weights in zip(keys, together):
        np.testing.assert_allclose(weights, draw(key, (6, 4)), atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 0.1


@pytest.mark.parametrize(("env", "log_std_init"), [("CartPole-v1", 0.0), ("Pendulum-v1", -0.7)])
def test_initial_weights_are_those_of_the_reference(env, log_std_init):
    """Stable-Baselines3: gain sqrt(2) in hidden layers, 0.01 for the policy's last and 1 for the value's, biases 0."""
    config = ppo_jax.PPOConfig(env, n_envs=2, log_std_init=log_std_init)
    network = ppo_jax.make_network(config)
    params = jax.jit(network.init, compiler_options={"xla_backend_optimization_level": 0})(
        jax.random.key(5), jnp.zeros(network.obs_space.shape)
    )["params"]
    if env == "Pendulum-v1":
        np.testing.assert_allclose(params.pop("log_std"), [log_std_init])
    hidden = {f"{head}_{layer}": math.sqrt(2) for head in ("policy", "value") for layer in (0, 1)}
    gains = hidden | {"policy_out": 0.01, "value_out": 1.0}
    assert set(params) == set(gains)
    for name, gain in gains.items():
        singular = np.linalg.svd(np.asarray(params[name]["kernel"]), compute_uv=False)
        np.testing.assert_allclose(singular, np.full_like(singular, gain), rtol=1e-4, err_msg=name)
        assert not np.any(params[name]["bias"]), name
