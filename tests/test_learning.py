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


@pytest.mark.parametrize("policy, low, high", [("gru", 0.95, 1), ("lstm", 0.95, 1), ("mlp", -0.2, 0.2)])
def test_only_a_policy_with_a_memory_recalls_what_it_saw_20_steps_ago(policy, low, high):
    """The bit that is shown first is asked for at the end: 1 for a right answer, -1 for a wrong one."""
    config = PPOConfig(
        "MemoryChain-bsuite",
        env_params={"memory_length": 20},
        policy=policy,
        n_steps=64,
        sub_traj_len=64,
        rnn_hidden_size=32,
        net_arch=(32,) if policy == "mlp" else (),
        n_epochs=8,
        learning_rate="linear_3e-3",
        ent_coef=0.03,
        total_timesteps=250_000,
    )
    agents, _ = train_population(config, jax.random.split(jax.random.key(1), 2))
    returns = jax.vmap(evaluate, in_axes=(None, 0, None, None))(config, agents, jax.random.key(2), 500)
    assert low <= returns.mean(axis=1).min() and returns.mean(axis=1).max() <= high
