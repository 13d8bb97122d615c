"""Agents get good at what they are trained for."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import ACTION_SPACES, Match
from gymnax.environments import spaces
from helpers import jit

import ppo_jax
from ppo_jax import (
    Categorical,
    PPOConfig,
    evaluate,
    interquartile_mean,
    train,
    train_population,
)


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


@pytest.mark.parametrize(
    "policy, low, high", [("gru", 0.95, 1), ("lstm", 0.95, 1), ("mlp", -0.2, 0.2)]
)
def test_only_a_policy_with_a_memory_recalls_what_it_saw_20_steps_ago(policy, low, high):
    """The bit that is shown first is asked for at the end: 1 for a right answer, -1 for a wrong
    one.
    """
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
    play = jax.vmap(evaluate, in_axes=(None, 0, None, None))
    means = play(config, agents, jax.random.key(2), 500).mean(axis=1)
    assert low <= means.min() and means.max() <= high


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


@pytest.mark.parametrize("policy", [Both(), (Actor(), Critic())], ids=["both", "pair"])
def test_modules_of_ones_own_learn(policy):
    config = PPOConfig("CartPole-v1", policy=policy, total_timesteps=60_000)
    metrics = jit(train)(config, jax.random.key(0))[1]
    assert metrics["return"][-1] > 100


BANDIT = dict(
    n_envs=64,
    n_steps=8,
    n_epochs=4,
    learning_rate=3e-3,
    net_arch=(64,),
    gamma=0.0,
    total_timesteps=60_000,
)


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
    """One step an episode, so the reward is the return, and 1 for an action that is right in all
    parts.
    """
    config = PPOConfig(**BANDIT | changes)
    agent, _ = jax.jit(train)(config, jax.random.key(0))
    assert evaluate(config, agent, jax.random.key(1), 500).mean() >= right


def reward_alone(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    return reward, reward


def test_learns_the_lesser_of_two_tasks_too():
    """Rewards a thousand times smaller vanish beside the others unless advantages are standardised
    by task.
    """
    env = Match(spaces.Discrete(4), n_tasks=2)
    config = PPOConfig(**BANDIT | dict(env=env, advantage_function=reward_alone, vf_coef=0.0))
    agent, _ = jax.jit(train)(config, jax.random.key(0))
    output = ppo_jax.make_network(config).apply(agent.params, jnp.eye(5)[:4])
    assert np.mean(output.distribution.mode() == np.arange(4)) == 1
