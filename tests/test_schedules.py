"""Numbers that change as a run goes on, and the count of steps that they follow."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SMALL, assert_same, jit

import ppo_jax
from ppo_jax import ConfigError, PPOConfig, Schedule, train, train_population


@pytest.mark.filterwarnings("error")
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
    if given == "linear":  # of an environment whose preset is the default, 3e-4
        config = PPOConfig(env="Catch-bsuite", learning_rate=given)
    for progress in (1.0, 0.75, 0.3, 0.0):
        found = config.at(progress).learning_rate
        np.testing.assert_allclose(found, at(progress), rtol=1e-5, atol=1e-10)


def test_a_schedule_where_a_number_is_needed_is_refused():
    with pytest.raises(ConfigError, match=r"learning_rate: .* a number here, as from config.at"):
        ppo_jax.make_optimizer(PPOConfig("CartPole-v1"))
    ppo_jax.make_optimizer(PPOConfig("CartPole-v1").at(1.0))


def test_a_schedule_that_counts_steps_is_refused():
    """A function here is given the fraction of the run that remains."""
    with pytest.raises(ConfigError, match=r"learning_rate: .* fraction that remains"):
        PPOConfig(learning_rate=optax.linear_schedule(1e-3, 0.0, 12))


def test_linear_starts_from_the_preset():
    config = PPOConfig("CartPole-v1", learning_rate="linear", clip_range="linear")
    assert config.learning_rate == Schedule(1e-3, 0.0, "linear")
    assert config.clip_range == Schedule(0.2, 0.0, "linear")
    pair = PPOConfig(clip_range="0.1,linear_0.3").clip_range
    assert pair == (0.1, Schedule(0.3, 0.0, "linear"))


def test_schedules_end_with_the_steps_that_were_asked_for():
    """The rates of a run are those of runs of one update with a constant rate."""
    changes = dict(total_timesteps=256, learning_rate="linear_0.01_0.5", target_kl=1.0)
    config = PPOConfig(**SMALL | changes)
    agent, _ = jit(train)(config, jax.random.key(0))
    by_hand = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    for rate in (0.01 * 0.75, 0.01 * 0.5):
        by_hand, _ = jit(ppo_jax.update)(config.replace(learning_rate=rate), by_hand)
    assert_same(agent.params, by_hand.params, atol=1e-6)


def test_a_schedule_is_swept_like_a_number():
    schedule = Schedule(jnp.array([1e-3, 1e-2]), 0.0, "linear")
    keys = jax.random.split(jax.random.key(0), 2)
    swept = PPOConfig(**SMALL).replace(learning_rate=schedule)
    agents, _ = train_population(swept, keys)
    alone, _ = jit(train)(PPOConfig(**SMALL | dict(learning_rate="linear_1e-2")), keys[1])
    second = jax.tree.map(lambda x: x[1], agents.params)
    assert_same(second, alone.params, atol=1e-5)


def reporting(params, config, network, minibatch):
    """Return the loss, and as a report the learning rate that the update is done with."""
    loss, _ = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss, {"rate": config.learning_rate}


@pytest.mark.parametrize("total_timesteps", [2**31 - 1, 2**40])
def test_a_run_may_have_more_steps_than_31_bits_hold(total_timesteps):
    """The last rollout is completed beyond total_timesteps; the rate doesn't rise up to there."""
    sizes = dict(n_envs=64, n_steps=128, n_epochs=1, net_arch=(8,))
    changes = dict(total_timesteps=total_timesteps, learning_rate="linear_1e-3")
    config = PPOConfig("CartPole-v1", loss_function=reporting, **changes, **sizes)
    update = jit(ppo_jax.update)
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    last = config.n_updates
    rates = []
    for n_updates in (1, last // 2, last - 1, last):
        before = agent.replace(n_updates=jnp.int32(n_updates - 1))
        after, metrics = update(config, before)
        assert after.n_updates == n_updates
        np.testing.assert_allclose(metrics["timesteps"], n_updates * 8192, rtol=1e-6)
        rates.append(float(metrics["rate"]))
    assert rates == sorted(rates, reverse=True)
    np.testing.assert_allclose(rates, [1e-3, 5e-4, 0, 0], rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(learning_rate="linar"), "learning_rate: 'linar' .* linear_3e-4"),
        (dict(clip_range_vf="linear"), "clip_range_vf: 'linear'"),
        (dict(clip_range=(0.1, 0.2, 0.3)), "clip_range: .* a pair"),
        (dict(clip_range=(0.1, -0.2)), "clip_range: .* above 0"),
        (dict(learning_rate=lambda progress: progress - 0.5), "learning_rate: .* 0 or above"),
    ],
)
def test_what_is_no_number_and_no_schedule_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        PPOConfig(n_envs=64, n_steps=128, **changes)
