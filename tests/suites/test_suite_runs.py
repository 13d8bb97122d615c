"""Small runs of each suite's environments, and what they report of episodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_environments import is_whole
from from_suites import needing, play_ours
from helpers import assert_same, jit
from runs import UNCACHED, flags, read_rows
from test_suite_objects import CHEAP, SMALL

from ppo_jax import PPOConfig, evaluate, init_agent, main, make_env, make_network, train

# ---------------------------------------------------------------------------------------- training

NAMES = [f"{suite}/{name}" for suite, names in CHEAP.items() for name in names]


LIMITS = {  # by suite: parameters with which all episodes end soon, if only by the limit
    "craftax": {"max_timesteps": 9},
    "jumanji": {},
}


@pytest.mark.parametrize("name", [needing(n.partition("/")[0], n, id=n) for n in NAMES])
def test_two_environments_of_each_suite_train_and_are_evaluated(name):
    limits = LIMITS.get(name.partition("/")[0], {"max_steps": 9})
    config = PPOConfig(name, env_params=limits, **SMALL)
    agent, metrics = jit(train)(config, jax.random.key(0))
    assert is_whole(agent.params) and metrics["timesteps"].tolist() == [16, 32]
    for reported in ("policy_loss", "value_loss", "entropy", "approx_kl"):
        assert np.isfinite(metrics[reported]).all()
    assert metrics["optimizer_steps"].tolist() == [1, 1] and agent.failing_since.tolist() == [0] * 3
    play = jit(functools.partial(evaluate, n_episodes=2, deterministic=False))
    returns = play(config, agent, jax.random.key(1))
    assert returns.shape == (2,) and is_whole(returns)
    if limits:
        assert metrics["length"].tolist()[1] <= 9


@pytest.mark.parametrize("suite", [needing(suite, suite, id=suite) for suite in ("brax", "navix")])
def test_agents_that_train_side_by_side_are_those_that_train_alone(suite):
    config = PPOConfig(f"{suite}/{CHEAP[suite][0]}", **SMALL)
    keys = jax.random.split(jax.random.key(5), 2)
    agents, _ = jit(jax.vmap(train, in_axes=(None, 0)))(config, keys)
    alone, _ = jit(train)(config, keys[1])
    second = jax.tree.map(lambda x: x[1], (agents.params, agents.obs))
    assert_same(second, (alone.params, alone.obs), rtol=1e-3, atol=1e-4)


# ----------------------------------------------------------------------------- metrics of episodes


@pytest.mark.parametrize("name", [needing("brax", "reacher", id="brax")])
def test_reward_parts_are_means_over_episodes_of_the_suites_sums(name):
    """One update of `train` is one episode of each environment, which Brax alone steps here too.

    Noise that is next to nothing makes the actions those of the untrained network.
    """
    from brax.envs import get_environment

    sizes = dict(n_envs=4, n_steps=6, total_timesteps=24, n_epochs=1, batch_size=24)
    plain = dict(policy="mlp", normalize_obs=False, squash_output=False, use_sde=False)
    settings = sizes | plain | dict(env_params={"max_steps": 6}, log_std_init=-30.0)
    config = PPOConfig(f"brax/{name}", **settings)
    _, metrics = jit(train)(config, jax.random.key(3))

    agent = jit(init_agent)(config, jax.random.key(3))
    network, env = make_network(config), get_environment(name, backend="positional")

    @jit
    @jax.vmap
    def go_on(state):
        mean = network.apply(agent.params, state.obs[None]).distribution.mean[0]
        return env.step(state, jnp.clip(mean, -1, 1))

    state, sums = agent.env_states.inner, {"reward": 0.0}
    for _ in range(6):
        state = go_on(state)
        for part, x in (state.metrics | {"reward": state.reward}).items():
            sums[part] = sums.get(part, 0.0) + np.asarray(x, float)
    assert set(sums) == {"reward", "reward_dist", "reward_ctrl"}
    np.testing.assert_allclose(metrics["return"], [sums["reward"].mean()], rtol=1e-4)
    np.testing.assert_allclose(metrics["length"], [6])
    for part in ("reward_dist", "reward_ctrl"):
        assert sums[part].std() > 0
        np.testing.assert_allclose(metrics[f"episode/{part}"], [sums[part].mean()], rtol=1e-4)


@pytest.mark.parametrize("name", [needing("craftax", "Craftax-Classic-Symbolic-v1", id="craftax")])
def test_achievements_are_the_shares_of_episodes_in_percent(name):
    """Of Craftax's own states when episodes end: in how many was an achievement reached?"""
    from craftax.craftax_classic.constants import Achievement

    limits = {"max_timesteps": 60}
    env, n_envs = make_env(PPOConfig(f"craftax/{name}", env_params=limits)), 16
    keys = jax.random.split(jax.random.key(0), n_envs)
    step_keys = jax.random.split(jax.random.key(1), (60, n_envs))
    actions = jax.random.randint(jax.random.key(2), (60, n_envs), 0, 17)
    _, outcome, _ = play_ours(env, keys, keys, step_keys, actions)
    assert set(env.metrics) == {f"Achievements/{one.name.lower()}" for one in Achievement}

    own, params, raw = env.env.env, env.env_params, jax.random.key_data
    _, state = jit(jax.vmap(own.reset_env, (0, None)))(raw(keys), params)
    go_on, achieved = jit(jax.vmap(own.step_env, (0, 0, 0, None))), []
    for step in range(60):
        _, state, *_ = go_on(raw(step_keys[step]), state, actions[step], params)
        achieved.append(np.asarray(state.achievements))
    end = (outcome.truncated | outcome.terminated).argmax(axis=0)  # of the first episodes
    assert (end == 59).any() and (end < 59).any(), "at the limit, and by a zombie"
    achieved = np.stack(achieved)[end, np.arange(n_envs)]
    reported = 0
    for one in Achievement:
        of_steps = outcome.metrics[f"Achievements/{one.name.lower()}"]
        of_episodes = np.cumsum(of_steps, axis=0)[end, np.arange(n_envs)]
        np.testing.assert_allclose(of_episodes, 100 * achieved[:, one.value])
        reported += 0 < of_episodes.mean() < 100
    assert reported >= 3, "some achievements, of some episodes"


@pytest.mark.parametrize("name", [needing("brax", "reacher", id="brax")])
def test_what_a_suite_reports_arrives_in_the_table(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = dict(n_seeds=1, n_envs=4, n_steps=6, n_epochs=1, batch_size=24, total_timesteps=48)
    given = ["--env", f"brax/{name}", "--env-params", "max_steps=6", "--run-dir", "run", UNCACHED]
    assert main([*given, *flags(sizes), "--net-arch"]) == 0
    rows = read_rows("run")
    assert [float(row["length"]) for row in rows] == [6, 6]
    for row in rows:
        parts = [float(row[f"episode/{part}"]) for part in ("reward_dist", "reward_ctrl")]
        # Brax pays their sum, and both are negative.
        assert max(parts) < 0
        np.testing.assert_allclose(sum(parts), float(row["return"]), rtol=1e-4)


@pytest.mark.parametrize("name", [needing("jumanji", "Game2048-v1", id="2048")])
def test_what_jumanji_says_at_an_episodes_end_is_reported_once(name):
    """The highest tile of 2048 grows from step to step; its sum would be no tile."""
    settings = SMALL | dict(n_envs=4, n_steps=512, batch_size=None, total_timesteps=2048)
    _, metrics = jit(train)(PPOConfig(f"jumanji/{name}", **settings), jax.random.key(0))
    tile = float(metrics["episode/highest_tile"][-1])
    assert 16 <= tile <= 1024 and float(metrics["length"][-1]) > 50
    assert_same(metrics["timesteps"], [2048])
