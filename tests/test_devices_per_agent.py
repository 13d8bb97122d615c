"""One agent whose environments and minibatches are split between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Match
from faulty_environments import is_whole
from gymnax.environments import spaces
from helpers import SMALL, VARIANTS, assert_same, jit, run_python

import ppo_jax
from ppo_jax import ConfigError, PPOConfig, init_agent, train, train_population, update

KEY = jax.random.key(0)
CASES = {
    "mlp": dict(env="Pendulum-v1", normalize_obs=True, normalize_reward=True, target_kl=5e-5),
    "gru": VARIANTS["gru"],
    "tasks": dict(env=Match(spaces.Discrete(3), n_tasks=2)),
}


def config_of(name):
    """Return the config of a case, for an agent on two devices."""
    return PPOConfig(**SMALL | CASES[name] | dict(n_epochs=3, devices_per_agent=2))


def side_by_side(function):
    """Return a function of a config and of arrays (2, …), one row for each of two devices.

    Both are on the same device here, with the axis that a mesh has otherwise.
    """

    def on_both(config, *rows):
        def on_one(*row):
            return function(config, *row)

        return jax.vmap(on_one, axis_name="devices")(*rows)

    return jit(on_both)


def both(tree):
    """Return a tree once for each of two devices."""
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def first(tree):
    """Return what the first of two devices has."""
    return jax.tree.map(lambda x: x[0], tree)


def join(tree, axis):
    """Join the shares of two devices (2, …) along an axis of theirs."""
    return jax.tree.map(lambda x: jnp.concatenate([x[0], x[1]], axis), tree)


# ------------------------------------------------------------------------------ two are like one


@pytest.fixture(scope="module", params=CASES)
def halves(request):
    """A config, agents after a rollout on two devices, that rollout, and the agents before."""
    config = config_of(request.param).at(1.0)
    agents = side_by_side(init_agent)(config, both(KEY))
    moved, rollout = side_by_side(ppo_jax.collect_rollout)(config, agents, both(KEY))
    return config, moved, rollout, agents


def test_devices_draw_numbers_of_their_own(halves):
    """Weights and key are the same, environments and actions are not."""
    config, _, rollout, agents = halves
    for part in (agents.params, jax.random.key_data(agents.key)):
        assert_same(part, both(first(part)))
    assert not np.array_equal(*agents.obs) and not np.array_equal(*rollout.action)
    minibatches = side_by_side(ppo_jax.draw_minibatches)(config, both(KEY))
    assert not np.array_equal(*minibatches)


def test_minibatches_in_two_halves_teach_what_whole_ones_do(halves):
    config, agents, rollout, _ = halves
    batch = side_by_side(ppo_jax.make_batch)(config, agents, rollout)
    minibatches = side_by_side(ppo_jax.draw_minibatches)(config, both(KEY))
    optimise = side_by_side(ppo_jax.optimise)
    ours, metrics = optimise(config, agents, batch, minibatches)
    n_sequences = minibatches[0, 0].size
    whole = jnp.concatenate([minibatches[0], minibatches[1] + n_sequences], axis=-1)
    alone = config.replace(devices_per_agent=1)
    optimise = jit(ppo_jax.optimise)
    theirs, expected = optimise(alone, first(agents), join(batch, 0), whole)
    expected = both((theirs.params, expected))
    assert_same((ours.params, metrics), expected, rtol=1e-3, atol=1e-5)
    if config.target_kl is not None:
        assert 1 < metrics["optimizer_steps"][0] < 12


def test_statistics_are_of_both_halves(halves):
    """Of observations, rewards and episodes."""
    config, moved, rollout, _ = halves

    def take_in(config, agent, rollout):
        agent = ppo_jax.count_episodes(config, agent, rollout)
        agent, _ = ppo_jax.normalize_reward(config, agent, rollout)
        agent = ppo_jax.observe(config, agent, rollout)
        numbers = (agent.obs_statistics, agent.return_statistics, agent.n_recent)
        return *numbers, agent.recent_episodes, ppo_jax.mean_episode(agent)

    ours = side_by_side(take_in)(config, moved, rollout)
    alone = config.replace(devices_per_agent=1)
    whole = first(moved).replace(episode_sums=join(moved.episode_sums, 1))
    if config.normalize_reward:
        whole = whole.replace(discounted_return=join(moved.discounted_return, 0))
    theirs = jit(take_in)(alone, whole, join(rollout, 1))
    assert_same(ours, both(theirs), rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_on_one_device_is_not_finite_for_the_agent(halves):
    config, agents, rollout, _ = halves
    batch = side_by_side(ppo_jax.make_batch)(config, agents, rollout)
    batch = batch._replace(advantage=batch.advantage.at[1, 5].set(jnp.nan))
    minibatches = side_by_side(ppo_jax.draw_minibatches)(config, both(KEY))
    optimise = side_by_side(ppo_jax.optimise)
    ours, metrics = optimise(config.replace(target_kl=None), agents, batch, minibatches)
    assert metrics["skipped_steps"].tolist() == [3, 3]  # once in each epoch
    assert_same(ours.params, both(first(ours.params)))
    assert is_whole(ours.params)
    rollout = rollout._replace(reward=rollout.reward.at[1, 0, 0].set(jnp.nan))
    find = side_by_side(ppo_jax.find_failures)
    found = find(config, agents, rollout, metrics, jnp.array([7, 7]))
    assert found.tolist() == [[0, 7, 7], [0, 7, 7]]


# ----------------------------------------------------------------------------------------- devices


def compare(name):
    """Assert that a run on two devices is that of two side by side, up to rounding."""
    config = config_of(name)
    agents, metrics = side_by_side(train)(config, both(KEY))
    found, found_metrics = train_population(config, KEY[None])
    names = sorted(found_metrics)
    assert names == sorted(metrics)
    for name in names:
        ours, theirs = found_metrics[name][0], metrics[name]
        assert_same(ours, theirs[0], rtol=1e-3, atol=1e-5)
        assert_same(ours, theirs[1], rtol=1e-3, atol=1e-5)
    found, agents = (plain(x) for x in (found, agents))
    assert found.keys() == agents.keys()
    for name, ours in found.items():
        ours, theirs = ours[0], agents[name]
        if ours.shape != theirs[0].shape:
            theirs = [np.concatenate(list(theirs), axis=int(name == "episode_sums"))]
        np.testing.assert_allclose(ours, theirs[0], rtol=1e-3, atol=1e-4, err_msg=name)


def plain(agents):
    """Return the leaves of agents by path, on the host."""
    return jax.device_get(ppo_jax.plain_leaves(agents))


def run_on(n_devices, code, *arguments):
    """Run code after an import of this module in a process with so many devices."""
    code = f"import sys\nfrom {__name__} import *\n{code}"
    return run_python(code, *arguments, JAX_NUM_CPU_DEVICES=str(n_devices), JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("name", CASES)
def test_two_devices_are_two_side_by_side(name):
    run_on(2, f"assert jax.device_count() == 2\ncompare({name!r})")


def test_three_agents_on_two_devices_each_learn_and_go_on(tmp_path):
    """In a mesh of two places, one of which has two agents; in chunks, and from a file on as many
    devices or on one.
    """
    run_on(
        4,
        """
config = PPOConfig("CartPole-v1", total_timesteps=20_480, devices_per_agent=2)
keys = jax.random.split(KEY, 3)
steps = []
agents, metrics = train_population(config, keys, lambda *chunk: steps.append(chunk[0]), 0.0)
assert len(steps) == 20 and metrics["timesteps"][0, -1] == 20_480
assert (metrics["return"][:, -1] > 2 * metrics["return"][:, 0]).all()
_, whole = train_population(config, keys)
np.testing.assert_array_equal(metrics["return"], whole["return"])
ppo_jax.save_agents(sys.argv[1], config, agents)
config, agents = ppo_jax.load_agents(sys.argv[1])
for n_devices in (1, 2):
    longer = config.replace(total_timesteps=22_528, devices_per_agent=n_devices)
    _, more = train_population(longer, agents)
    assert more["timesteps"][0].tolist() == [21_504, 22_528]
    assert (more["return"] > 2 * metrics["return"][:, :1]).all()
""",
        str(tmp_path),
    )


def test_on_one_device_nothing_is_exchanged():
    config = PPOConfig(**SMALL | VARIANTS["normalised"] | dict(target_kl=0.01))
    agent = jax.eval_shape(init_agent, config, KEY)
    text = jax.jit(update).lower(config, agent).as_text()
    for word in ("all_reduce", "all_gather", "partition_id", "replica_id", "devices"):
        assert word not in text, word


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(n_envs=6, devices_per_agent=4), "devices_per_agent: 4 .* divisor of n_envs = 6.*3"),
        (dict(n_envs=4, devices_per_agent=4, batch_size=2), "batch_size: 2 .* 4 devices.* 4 "),
        (
            dict(n_envs=4, devices_per_agent=2, batch_size=16, policy="gru"),
            "batch_size: 16 .* 2 devices.* 32",
        ),
    ],
)
def test_what_does_not_divide_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        PPOConfig(**dict(n_steps=16) | settings)
    assert "\n" not in str(refusal.value)


def test_more_devices_than_there_are_are_refused():
    config = PPOConfig(n_envs=4096, n_steps=8, devices_per_agent=4096)
    with pytest.raises(ConfigError, match=r"devices_per_agent: 4096 .* at most the \d+ devices"):
        train_population(config, KEY[None])
