"""What an agent comes to is decided by its own key and config: not by what runs beside it, nor by
when, nor by how JAX is set.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jit, run_python

import ppo_jax
from ppo_jax import PPOConfig

SIZES = dict(total_timesteps=256, n_envs=4, n_steps=16, batch_size=16, n_epochs=2, net_arch=(16,))
CONFIG = PPOConfig("CartPole-v1", learning_rate=3e-4, **SIZES)  # a schedule is another program
KEYS = jax.random.split(jax.random.key(0), 4)
RATES = jnp.array([1e-4, 3e-4, 1e-3, 3e-3])

N_TRACES = []


@jit
def train(config, key):
    N_TRACES.append(1)
    return ppo_jax.train(config, key)


def train_at(rate, key):
    return ppo_jax.train(CONFIG.replace(learning_rate=rate), key)


@functools.cache
def sweep():
    """Return agents and metrics of four keys, each with a learning rate of its own."""
    return jit(jax.vmap(train_at))(RATES, KEYS)


def numbers(agent_and_metrics):
    agent, metrics = agent_and_metrics
    agent = agent.replace(key=jax.random.key_data(agent.key))
    return [np.asarray(x) for x in jax.tree.leaves((agent, metrics))]


@pytest.mark.parametrize("place", range(4))
def test_an_agent_of_a_sweep_is_the_agent_alone(place):
    """Batched matrix products round otherwise in the last bits. Over 32 steps of Adam that stays
    below 1e-4, as long as no action flips; with one, the states of CartPole and so the agents would
    be others altogether.
    """
    alone = train(CONFIG.replace(learning_rate=float(RATES[place])), KEYS[place])
    together = jax.tree.map(lambda x: x[place], sweep())
    for ours, theirs in zip(numbers(together), numbers(alone)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_agents_of_a_sweep_differ():
    kernels = sweep()[0].params["params"]["policy_out"]["kernel"]
    for place in range(4):
        difference = np.abs(kernels[place] - np.delete(kernels, place, axis=0))
        assert np.all(difference.max(axis=(1, 2)) > 1e-3)


def test_same_key_same_bits():
    first, second = (numbers(train(CONFIG, jax.random.key(7))) for _ in range(2))
    other = numbers(train(CONFIG, jax.random.key(8)))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(first, second))
    assert any(x.tobytes() != y.tobytes() for x, y in zip(first, other))


def test_other_numbers_compile_nothing():
    """All that training only computes with may change without a new trace; what decides shapes may
    not.
    """
    train(CONFIG.replace(learning_rate=1e-5), KEYS[0])
    before = len(N_TRACES), train._cache_size()
    names = ("learning_rate", "gamma", "gae_lambda", "clip_range", "ent_coef")
    for number in (2e-5, 4e-5, 8e-5):
        changes = dict.fromkeys(names, number)
        changes |= dict(vf_coef=1 - number, max_grad_norm=number)
        train(CONFIG.replace(**changes), KEYS[0])
    assert (len(N_TRACES), train._cache_size()) == before == (1, 1)


ENDLESS = """
import jax
import ppo_jax

config = ppo_jax.PPOConfig(total_timesteps=64, n_envs=4, n_steps=16, n_epochs=1)
train = jax.vmap(ppo_jax.train, in_axes=(None, 0))
train = jax.jit(train, compiler_options={"xla_backend_optimization_level": 0})
for seed in range(200):
    jax.block_until_ready(train(config, jax.random.split(jax.random.key(seed), 8)))
print("through")
"""


def test_a_vmapped_run_in_a_loop_does_not_hang():
    """Batches of orthogonal draws deadlock XLA on a CPU with few cores, soonest where JAX sees it
    as one device.

    What may never end runs in a process of its own.
    """
    one_device = dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
    assert run_python(ENDLESS, timeout=150, **one_device) == "through\n"


HEALTHY = """
import jax
import numpy as np
from helpers import SMALL, VARIANTS, jit
from ppo_jax import PPOConfig, evaluate, train

for changes in (
    dict(env="CartPole-v1"),
    dict(env="Pendulum-v1"),
    VARIANTS["gru"],
    VARIANTS["masked"],
    VARIANTS["squashed"],
    VARIANTS["normalised"],
    VARIANTS["dict"],
):
    config = PPOConfig(**SMALL | changes)
    agent, metrics = jit(train)(config, jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.params))
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl"):
        assert np.isfinite(metrics[name]).all(), name
    print(metrics["timesteps"].tolist())
assert np.isfinite(evaluate(config, agent, jax.random.key(1), 2)).all()
"""


@pytest.mark.parametrize("switch", ["JAX_DEBUG_NANS", "JAX_ENABLE_X64"])
def test_a_healthy_run_passes_under_a_switch_of_jax(switch):
    """No NaN arises, as where no episode ended yet. A switch counts for a whole process."""
    lines = run_python(HEALTHY, **{switch: "1"}).splitlines()
    assert len(lines) == 7
    assert set(lines) == {"[128, 256]"}
