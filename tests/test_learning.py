import jax
import numpy as np
import pytest

from ppo_jax import PPOConfig, evaluate, interquartile_mean, train_population


@pytest.mark.parametrize("name, right", [("CartPole-v1", 495), ("Pendulum-v1", -200)])
def test_ten_seeds_of_the_preset_solve(name, right):
    """The thresholds are those that the environments are called solved at; CartPole ends at 500."""
    config = PPOConfig(env=name)
    if name == "CartPole-v1":
        assert config.n_updates * config.rollout_size <= 500_000
    keys = jax.random.split(jax.random.key(1), 10)
    agents, _ = train_population(config, keys)
    returns = jax.vmap(evaluate, in_axes=(None, 0, 0, None))(config, agents, keys, 32)
    assert interquartile_mean(np.asarray(returns).mean(axis=1)) >= right
