"""Presets of suites learn what two cores can learn in a minute."""

import functools

import jax
import numpy as np
import pytest
from from_suites import needing
from helpers import jit

from ppo_jax import PPOConfig, evaluate, train_population

LEARNT = [  # an environment, steps, and the mean return that each agent must reach
    needing("navix", "navix/Navix-Empty-8x8-v0", 300_000, 0.95, id="navix"),
    needing("brax", "brax/inverted_pendulum", 400_000, 950, id="brax"),
]


@pytest.mark.parametrize("name, total_timesteps, least", LEARNT)
def test_two_seeds_of_the_preset_solve(name, total_timesteps, least):
    """The greatest return of both is known: 1 at the goal, and 1,000 steps upright."""
    config = PPOConfig(name, total_timesteps=total_timesteps)
    agents, _ = train_population(config, jax.random.split(jax.random.key(3), 2))
    play = jit(functools.partial(evaluate, n_episodes=50))
    for number in range(2):
        agent = jax.tree.map(lambda x, number=number: jax.device_get(x)[number], agents)
        returns = play(config, agent, jax.random.key(7))
        assert np.mean(returns) >= least, returns
