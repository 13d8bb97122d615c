"""The pseudo-random permutation: a bijection for every size and key, and not to be told from a
uniform one.
"""

import functools
import math

import jax
import numpy as np
import pytest
from helpers import jit
from scipy import stats

import ppo_jax

# Keys are fixed, so every p-value is too; among the hundred or so here a fair shuffle has one this
# low once in 1,000.
LEAST_P = 1e-5


@functools.cache
def permutations(size, n_keys):
    """Return permutations (n_keys, size), each of a key of its own; the keys are split from one, as
    epochs' are.
    """
    keys = jax.random.split(jax.random.key(size), n_keys)
    return np.asarray(jit(jax.vmap(lambda key: ppo_jax.shuffle(key, size)))(keys))


def uniform_p(counts):
    return stats.chisquare(np.ravel(counts)).pvalue


def assert_bijection(permutations, size):
    assert permutations.dtype == np.int32
    in_order = np.broadcast_to(np.arange(size), permutations.shape)
    np.testing.assert_array_equal(np.sort(permutations), in_order)


def test_bijection_for_small_sizes():
    sizes = (1, 2, 3, 7, 16, 63, 64, 255)

    def draw(key):
        return [ppo_jax.shuffle(key, size) for size in sizes]

    keys = jax.random.split(jax.random.key(0), 20)
    for size, drawn in zip(sizes, jit(jax.vmap(draw))(keys)):
        assert_bijection(drawn, size)


LARGER = [97, 106, 111, 256, 257, 384, 1000, 4111, 4112, 5000, 8191, 8192, 131072]


@pytest.mark.parametrize("size", LARGER)
def test_bijection_for_larger_sizes(size):
    """Primes, twice a prime, squares of no power of two, rollouts as they are common."""
    assert_bijection(permutations(size, 8), size)


@pytest.mark.parametrize("policy", ["mlp", "gru"])
def test_minibatches_are_parts_of_one_permutation(policy):
    """Every epoch is a partition of the rollout's sequences, and another one than the last."""
    sizes = dict(n_envs=8, n_steps=64, batch_size=128, n_epochs=3, sub_traj_len=4)
    config = ppo_jax.PPOConfig("CartPole-v1", policy=policy, **sizes)
    drawn = np.asarray(jit(ppo_jax.draw_minibatches)(config, jax.random.key(0)))
    n_sequences = 512 if policy == "mlp" else 128
    assert drawn.shape == (3, 4, n_sequences // 4)
    epochs = drawn.reshape((3, n_sequences))
    assert_bijection(epochs, n_sequences)
    assert len(np.unique(epochs, axis=0)) == 3


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_is_equally_likely(size):
    drawn = permutations(size, 60_000) @ size ** np.arange(size)
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == math.factorial(size)
    assert uniform_p(counts) > LEAST_P


@pytest.mark.parametrize(
    ("size", "n_keys"), [(6, 100_000), (12, 100_000), (97, 20_000), (384, 4_000)]
)
def test_every_sample_is_equally_likely_at_every_position(size, n_keys):
    drawn = permutations(size, n_keys)
    counts = np.stack([np.bincount(column, minlength=size) for column in drawn.T])
    statistic = np.sum(np.square(counts - n_keys / size) / (n_keys / size))
    assert stats.chi2.sf(statistic, (size - 1) ** 2) > LEAST_P


@pytest.mark.parametrize("size", [6, 12])
def test_pairs_of_positions_get_every_pair_of_samples(size):
    drawn = permutations(size, 100_000)
    p_values = {}
    for first in range(size):
        for second in range(first):
            pairs = np.bincount(drawn[:, first] * size + drawn[:, second], minlength=size**2)
            pairs = pairs.reshape(size, size)
            assert not np.diag(pairs).any()
            p_values[first, second] = uniform_p(pairs[~np.eye(size, dtype=bool)])
    worst = min(p_values, key=p_values.get)
    assert p_values[worst] > LEAST_P, worst


@pytest.mark.parametrize("size", [7, 24, 97, 106, 111, 128, 384, 1000, 4112])
def test_neighbours_do_not_stay_neighbours(size):
    """The distance of what two positions get is uniform; rotations and grids that mix too little
    keep some of it.
    """
    drawn = permutations(size, 1_000_000 // size)
    columns = math.ceil(size / math.isqrt(size))
    for lag in sorted({1, 2, columns, size // 2}):
        distance = (drawn[:, lag:] - drawn[:, :-lag]) % size
        assert uniform_p(np.bincount(distance.ravel(), minlength=size)[1:]) > LEAST_P, lag


@pytest.mark.parametrize("size", [7, 97, 384, 1000])
def test_no_serial_correlation(size):
    """Neighbours in a permutation of n correlate by -1 / (n - 1), with a variance near 1 / n over
    the keys.
    """
    n_keys = 1_000_000 // size
    standard = (permutations(size, n_keys) - (size - 1) / 2) / math.sqrt((size**2 - 1) / 12)
    correlation = np.mean(standard[:, 1:] * standard[:, :-1], axis=1)
    error = np.std(correlation) / math.sqrt(n_keys)
    assert 2 * stats.norm.sf(abs(correlation.mean() + 1 / (size - 1)) / error) > LEAST_P


@pytest.mark.parametrize("size", [7, 97, 384, 1000])
def test_successive_epochs_are_independent(size):
    """A position's samples in two epochs are any two: as often the same as apart by any other
    distance.
    """
    n_keys = 1_000_000 // size
    drawn = permutations(size, n_keys)
    distance = (drawn[1:] - drawn[:-1]) % size
    assert uniform_p(np.bincount(distance.ravel(), minlength=size)) > LEAST_P
    standard = (drawn - (size - 1) / 2) / math.sqrt((size**2 - 1) / 12)
    correlation = np.mean(standard[1:] * standard[:-1], axis=1)
    # Independent permutations correlate by 0 with variance 1 / (n - 1).
    z = abs(correlation.mean()) * math.sqrt((size - 1) * (n_keys - 1))
    assert 2 * stats.norm.sf(z) > LEAST_P


@pytest.mark.parametrize("n_envs", [8, 64, 128])
def test_minibatches_mix_environments(n_envs):
    """How often an environment is in a minibatch is hypergeometric, although the rollout is laid
    out in a grid.
    """
    size, minibatch, n_keys = 8192, 2048, 300
    environment = permutations(size, n_keys)[:, :minibatch] % n_envs
    counts = np.stack([np.bincount(row, minlength=n_envs) for row in environment])
    expected = stats.hypergeom(size, size // n_envs, minibatch)
    # The counts of a minibatch add up, so all but one are free.
    n_free = n_keys * (n_envs - 1)
    spread = np.sum(np.square(counts - expected.mean())) / expected.var() * (n_envs - 1) / n_envs
    p = 2 * min(stats.chi2.cdf(spread, n_free), stats.chi2.sf(spread, n_free))
    assert p > LEAST_P
