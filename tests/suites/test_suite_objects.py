"""Suites' own objects in place of names, what of a suite is imported, and suites that aren't."""

import sys

import jax
import numpy as np
import pytest
from from_suites import MODULES, TINY, identifiers, needing
from helpers import assert_same, jit, run_python
from runs import UNCACHED, assert_one_line

import ppo_jax
from ppo_jax import (
    ConfigError,
    PPOConfig,
    collect_rollout,
    init_agent,
    main,
    make_env,
    make_network,
    make_policy,
)

SMALL = TINY | dict(n_steps=8, batch_size=16, total_timesteps=32)
CHEAP = {  # of each suite two environments that compile fast
    "brax": ("fast", "inverted_pendulum"),
    "playground": ("CartpoleBalance", "PendulumSwingup"),
    "craftax": ("Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1"),
    "jumanji": ("Snake-v1", "Tetris-v0"),
    "navix": ("Navix-Empty-5x5-v0", "Navix-DoorKey-5x5-v0"),
    "xminigrid": ("MiniGrid-Empty-5x5", "MiniGrid-MemoryS8"),
}
EACH = [needing(suite, suite, id=suite) for suite in MODULES]


def make_own(suite):
    """Return an object of a suite's, as its users make the first of its cheap environments."""
    name = CHEAP[suite][0]
    if suite == "brax":
        from brax.envs import get_environment

        return get_environment(name, backend="positional")
    if suite == "playground":
        from mujoco_playground import registry

        return registry.load(name, config_overrides={"impl": "jax"})
    if suite == "craftax":
        from craftax.craftax_env import make_craftax_env_from_name

        return make_craftax_env_from_name(name, auto_reset=False)
    if suite == "jumanji":
        import jumanji

        return jumanji.make(name)
    if suite == "navix":
        import navix

        return navix.make(name)
    import xminigrid

    return xminigrid.make(name)  # a pair of an environment and its parameters


# ------------------------------------------------------------------------------------- own objects


def play(config):
    """Return an untrained agent of a config's, and its rollout."""
    agent = jit(init_agent)(config, jax.random.key(0))
    return agent, jit(collect_rollout)(config, agent, jax.random.key(1))[1]


@pytest.mark.parametrize("suite", EACH)
def test_an_object_of_a_suite_is_played_as_its_name_is(suite):
    config = PPOConfig(make_own(suite), **SMALL)
    by_object, of_object = play(config)
    by_name, of_name = play(config.replace(env=f"{suite}/{CHEAP[suite][0]}"))  # without its preset
    assert_same(by_name.params, by_object.params)
    assert_same(of_name._asdict(), of_object._asdict())
    assert len(np.unique(of_object.action)) > 1


@pytest.mark.parametrize("suite", EACH)
def test_configs_with_the_same_object_share_a_compilation(suite):
    own, traces = make_own(suite), []

    @jax.jit
    def trace(config):
        traces.append(make_env(config).action_space.text)
        return config.gamma

    trace(PPOConfig(own, **TINY))
    trace(PPOConfig(own, gamma=0.5, **TINY))
    assert PPOConfig(own, **TINY) == PPOConfig(own, **TINY) and len(traces) == 1
    other = make_own(suite)
    assert PPOConfig(other, **TINY) != PPOConfig(own, **TINY)
    trace(PPOConfig(other, **TINY))
    assert len(traces) == 2


@pytest.mark.parametrize("suite", [needing("xminigrid", "xminigrid", id="xminigrid")])
def test_the_parameters_beside_an_object_count(suite):
    """Two configs with one environment and other parameters are two environments."""
    env, params = make_own(suite)
    config = PPOConfig((env, params), **SMALL)
    shorter = PPOConfig((env, params.replace(max_steps=3)), **SMALL)
    assert make_env(config).env_params.max_steps == params.max_steps
    assert make_env(shorter).env_params.max_steps == 3 and config != shorter
    assert PPOConfig((env, params), **SMALL) == config
    assert make_env(PPOConfig(env, **SMALL)).env_params.max_steps == env.default_params().max_steps


@pytest.mark.parametrize("suite", [needing("xminigrid", "xminigrid", id="xminigrid")])
def test_a_ruleset_makes_an_xland_environment_one_with_a_goal(suite):
    """The goal is to hold a ball that lies there, and whoever picks it up has reached it."""
    import xminigrid
    from xminigrid.core.constants import TILES_REGISTRY, Colors, Tiles
    from xminigrid.core.goals import AgentHoldGoal
    from xminigrid.core.rules import EmptyRule
    from xminigrid.types import RuleSet

    ball = TILES_REGISTRY[Tiles().BALL, Colors().RED]
    goal, rules = AgentHoldGoal(tile=ball).encode(), EmptyRule().encode()[None]
    ruleset = RuleSet(goal=goal, rules=rules, init_tiles=ball[None])
    env, params = xminigrid.make("XLand-MiniGrid-R1-9x9", height=5, width=5)
    with pytest.raises(ConfigError, match="ruleset"):
        PPOConfig((env, params))
    sizes = dict(n_envs=16, n_steps=64)
    _, rollout = play(PPOConfig((env, params.replace(ruleset=ruleset)), **sizes))
    assert rollout.terminated.any() and (rollout.action[rollout.terminated] == 3).all()
    assert (rollout.reward[rollout.terminated] > 0).all()


@pytest.mark.parametrize("suite", [needing("xminigrid", "xminigrid", id="xminigrid")])
def test_a_dictionary_of_a_wrapper_of_the_suites_is_shown(suite):
    from xminigrid.wrappers import DirectionObservationWrapper

    env, params = make_own(suite)
    config = PPOConfig((DirectionObservationWrapper(env), params), **TINY)
    own = env.reset(params, jax.random.PRNGKey(0))
    (obs, _) = make_env(config).reset(jax.random.key(0)[None])
    np.testing.assert_array_equal(identifiers(obs["img"][0], (13, 12)), own.observation)
    assert obs["direction"][0].tolist() == np.eye(4)[int(own.state.agent.direction)].tolist()


@pytest.mark.parametrize("suite", [needing("playground", "playground", id="playground")])
def test_a_privileged_state_is_the_value_functions_alone(suite):
    """With Playground's own names for it; the environments that have it need a network."""
    from mujoco_playground._src.dm_control_suite import cartpole

    class Privileged(cartpole.Balance):
        """CartpoleBalance whose policy doesn't see velocities."""

        def _get_obs(self, data, info):
            obs = super()._get_obs(data, info)
            return {"state": obs[:3], "privileged_state": obs}

    config = cartpole.default_config()
    config.impl = "jax"
    env = Privileged(swing_up=False, sparse=False, config=config)
    config = PPOConfig(env, value_obs="privileged_state", **TINY)
    agent = jit(init_agent)(config, jax.random.key(0))
    assert {path: x.shape for path, x in agent.obs.items()} == {
        "state": (2, 3),
        "privileged_state": (2, 5),
    }
    network = make_network(config)
    other = agent.obs | {"privileged_state": agent.obs["privileged_state"] + 1}
    one, two = (network.apply(agent.params, obs) for obs in (agent.obs, other))
    np.testing.assert_array_equal(one.distribution.mean, two.distribution.mean)
    assert np.abs(one.value - two.value).min() > 1e-4
    policy = make_policy(config, agent)
    np.testing.assert_array_equal(policy(agent.obs)[0], policy(other)[0])


@pytest.mark.parametrize("suite", [needing("brax", "brax", id="brax")])
def test_a_wrapper_that_hides_the_time_limit_does_not_pass_for_an_environment(suite):
    """What `brax.envs.create` returns ends episodes at its limit as if they were over, and resets.

    Refused, or taken without its wrappers: the pendulum is down when its angle exceeds 0.2.
    """
    from brax.envs import create

    env = create("inverted_pendulum", episode_length=4, backend="positional")
    try:
        PPOConfig(env)
    except ConfigError:
        return
    _, rollout = play(PPOConfig(env, n_envs=4, n_steps=32))
    is_down = np.abs(rollout.final_obs[..., 1]) > 0.2
    np.testing.assert_array_equal(rollout.terminated, is_down)
    assert is_down.any()


# ------------------------------------------------------------------------------ what gets imported


@pytest.mark.parametrize("suite", EACH)
def test_a_suite_is_imported_alone(suite):
    """What comes with it are modules that it imports itself: Playground trains with Brax's PPO."""
    code = """
import sys, ppo_jax
def suites():
    return set(sys.argv[2].split()) & {name.partition(".")[0] for name in sys.modules}
ppo_jax.PPOConfig("CartPole-v1")
assert not suites(), suites()
ppo_jax.make_env(ppo_jax.PPOConfig(sys.argv[1]))
print(*sorted(suites()))
"""
    name = f"{suite}/{CHEAP[suite][0]}"
    printed = run_python(code, name, " ".join(MODULES.values())).splitlines()[-1].split()
    assert set(printed) == {MODULES[suite]} | ({"brax"} if suite == "playground" else set())


@pytest.fixture
def without(monkeypatch):
    """A function that makes a suite one that isn't installed."""

    def uninstall(suite):
        for name in list(sys.modules):
            if name.partition(".")[0] == MODULES[suite]:
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, MODULES[suite], None)

    return uninstall


@pytest.mark.parametrize("suite", MODULES)
def test_a_suite_that_is_not_installed_gets_one_line(suite, without, tmp_path, monkeypatch, capsys):
    without(suite)
    name = f"{suite}/{CHEAP[suite][0]}"
    with pytest.raises(ConfigError, match=f"env: .*pip install {suite}") as refusal:
        PPOConfig(name)
    assert "\n" not in str(refusal.value)
    monkeypatch.chdir(tmp_path)
    assert main(["--env", name, UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, "env: ", f"pip install {suite}")
    assert not list(tmp_path.iterdir())


def test_the_others_are_listed_where_a_suite_is_not_installed(without, capsys):
    for suite in MODULES:
        without(suite)
    assert main(["--list-envs", UNCACHED]) == 0
    printed = capsys.readouterr()
    assert "CartPole-v1" in printed.out.splitlines() and "/" not in printed.out
    for suite in MODULES:
        assert f"pip install {suite}" in printed.err
        assert main(["--list-envs", suite, UNCACHED]) == 2
        assert_one_line(capsys.readouterr().err, f"pip install {suite}")


@pytest.mark.parametrize("suite", EACH)
def test_the_environments_of_a_suite_are_listed(suite, capsys):
    assert main(["--list-envs", suite, UNCACHED]) == 0
    listed = capsys.readouterr().out.split()
    assert listed == [f"{suite}/{name}" for name in ppo_jax.SUITES[suite].names()]
    assert f"{suite}/{CHEAP[suite][1]}" in listed


@pytest.mark.parametrize("suite", EACH)
def test_a_misspelt_name_is_answered_with_the_nearest(suite):
    name = CHEAP[suite][1]
    with pytest.raises(ConfigError, match=f"no environment of {suite}; did you mean .*{name}"):
        PPOConfig(f"{suite}/{name[:-1]}")
