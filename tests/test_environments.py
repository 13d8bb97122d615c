"""Environments: gymnax's by name, the user's own, and what is refused of them."""

import re
import subprocess
import sys
import urllib.error

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_environments import (
    ONE_SIDED,
    Bare,
    BareStep,
    OwnStep,
    Resets,
    State,
    adding,
    begin,
    go_on,
    growing,
    is_whole,
    paying,
    showing,
    with_info,
)
from gymnax.environments import spaces
from helpers import jit
from runs import PROGRAM, SMALL, UNCACHED, assert_one_line

import ppo_jax
from ppo_jax import (
    PRESETS,
    ConfigError,
    PPOConfig,
    evaluate,
    find_preset,
    init_agent,
    main,
    make_env,
    train,
)

NAMES = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]  # needs a network
CONTINUOUS = (
    "Pendulum-v1",
    "MountainCarContinuous-v0",
    "Reacher-misc",
    "Swimmer-misc",
    "PointRobot-misc",
)
TINY = dict(n_envs=2, n_steps=4, batch_size=4, n_epochs=1, total_timesteps=8)


# ----------------------------------------------------------------------------------- gymnax's own


def test_there_are_26_environments():
    assert len(gymnax.registered_envs) == 26


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_trains_with_its_preset(name):
    """With the preset's policy and settings, at a size that compiles and runs in two seconds."""
    agent, metrics = jit(train)(PPOConfig(env=name, **TINY), jax.random.key(0))
    assert int(metrics["timesteps"][-1]) == 8
    for reported in ("policy_loss", "value_loss", "entropy", "approx_kl"):
        assert np.isfinite(metrics[reported]).all()
    assert is_whole(agent.params)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_a_valid_config(name):
    config = PPOConfig(env=name)
    assert config.env == name and make_env(config).action_space is not None
    assert config.rollout_size % config.minibatch_size == 0


def test_presets_name_environments_or_suites():
    of_suites = {name for name in PRESETS if name.partition("/")[0] in ppo_jax.SUITES}
    assert PRESETS.keys() - of_suites <= set(gymnax.registered_envs)
    assert find_preset("brax/inverted_pendulum") is PRESETS["brax/inverted_pendulum"]
    assert find_preset("brax/ant") is PRESETS["brax"]
    assert find_preset("DeepSea-bsuite") == find_preset("mine/Corridor") == {}


@pytest.mark.parametrize("squash_output", [False, True])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_extreme_actions_reach_the_bounds(name, squash_output):
    """Also where gymnax makes the bounds of JAX arrays, under the trace that asks first."""
    ppo_jax.bind_env.cache_clear()
    config = PPOConfig(env=name, squash_output=squash_output, **TINY)
    jax.eval_shape(init_agent, config, jax.random.key(0))
    env = make_env(config)
    shape, size = env.action_space.shape, int(np.prod(env.action_space.shape))
    action = env.to_environment(jnp.array([[-1e6] * size, [1e6] * size]))
    for given, bound in zip(action, (env.action_space.low, env.action_space.high)):
        np.testing.assert_allclose(given, np.broadcast_to(bound, shape), rtol=1e-6)


def test_an_environment_may_be_made_while_jax_traces():
    """Breakout makes arrays when it is made, and these outlive the trace that asks first."""
    ppo_jax.bind_env.cache_clear()
    config = PPOConfig(env="Breakout-MinAtar", n_envs=2)
    for key in jax.random.split(jax.random.key(0)):
        jax.eval_shape(init_agent, config, key)
    obs, _ = make_env(config).reset(jax.random.split(jax.random.key(0), 2))
    assert obs.shape == (2, 10, 10, 4)


def test_an_environment_that_cannot_load_its_data_is_refused(tmp_path, monkeypatch, capsys):
    from gymnax.utils import load_mnist

    def no_network(*arguments, **named):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(load_mnist, "_download", no_network)
    monkeypatch.chdir(tmp_path)
    assert main(["--env", "MNISTBandit-bsuite", UNCACHED]) == 2
    words = ("env", "'MNISTBandit-bsuite'", "network", "no route to host")
    assert_one_line(capsys.readouterr().err, *words)
    assert not list(tmp_path.iterdir())


def test_drawing_libraries_work_after_a_config_was_made():
    """Importing gymnax skips them; gymnax 1.0.1 also lacks six in a plain install of it."""
    code = """
import sys, ppo_jax
ppo_jax.PPOConfig()
assert "gymnax" in sys.modules and "pandas" not in sys.modules  # which seaborn needs
import six, seaborn, matplotlib.pyplot as plt
axes = seaborn.lineplot(x=[0, 1], y=[1, 2])
print(plt.figure.__name__, seaborn.__name__, len(plt.gca().lines), axes is plt.gca())
"""
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, text=True, cwd=PROGRAM.parent)
    assert printed == "figure seaborn 1 True\n"


# ------------------------------------------------------------------------- parameters by their name


@pytest.mark.parametrize(
    "given", [{"max_speed": 5, "g": 1.5}, ["max_speed=5", "g=1.5"], (("g", 1.5), ("max_speed", 5))]
)
def test_env_params_reach_the_environment_with_its_types(given):
    """A whole number does for a real one."""
    params = make_env(PPOConfig("Pendulum-v1", env_params=given)).env_params
    assert (params.max_speed, params.g, params.m) == (5.0, 1.5, 1.0)
    assert type(params.max_speed) is float and params.max_steps_in_episode == 200


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"max_sped": 5},
            "env_params: 'Pendulum-v1' has no max_sped; did you mean max_speed.*m, l",
        ),
        ({"max_speed": "fast"}, "env_params: 'max_speed=fast' .* a number such as 8.0"),
        ({"max_speed": [1, 2]}, "env_params: 'max_speed=.* a number such as 8.0"),
        ({"max_steps_in_episode": 1.5}, "env_params: 'max_steps_in_episode=1.5' .* such as 200"),
    ],
)
def test_env_params_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        make_env(PPOConfig("Pendulum-v1", env_params=given))


def test_env_params_change_what_is_played():
    config = PPOConfig(env=Bare(max_steps=7), env_params={"max_steps_in_episode": 3})
    assert play(config).tolist() == [3.0] * 3
    assert play(config.replace(env_params=())).tolist() == [7.0] * 3


def play(config, n_episodes=3):
    """Return the returns of an untrained agent."""
    agent = jit(init_agent)(config, jax.random.key(0))
    return evaluate(config, agent, jax.random.key(1), n_episodes)


# ----------------------------------------------------------------------------- those of the user's


def test_a_state_that_grows_from_an_integer_to_a_float_keeps_its_halves():
    config = PPOConfig(env=Bare(step=growing), net_arch=(8,), **TINY)
    assert play(config).tolist() == [0.5 + 1 + 1.5 + 2] * 3
    agent, metrics = jit(train)(config, jax.random.key(0))
    assert float(metrics["return"][-1]) == 5 and agent.env_states.x.dtype == jnp.float32


def test_bounds_on_one_side_clip_on_that_side():
    env = Bare(action_space=ONE_SIDED, step=adding)
    action = make_env(PPOConfig(env=env)).to_environment(jnp.array([[-1e6, 1e6]]))
    assert action.tolist() == [[-1e6, 1.0]]
    agent, _ = jit(train)(PPOConfig(env=env, **TINY), jax.random.key(0))
    assert is_whole(agent.params)


@pytest.mark.parametrize("high", [jnp.inf, np.array([1.0, np.inf], np.float32)])
def test_bounds_on_one_side_cannot_be_squashed_to(high):
    env = Bare(action_space=spaces.Box(-1.0, high, (2,)))
    with pytest.raises(ConfigError, match=r"squash_output: True needs finite bounds; .*inf"):
        make_env(PPOConfig(env=env, squash_output=True))
    with pytest.raises(ConfigError, match="squash_output: True needs continuous actions"):
        make_env(PPOConfig(env=Bare(), squash_output=True))


@pytest.mark.parametrize(
    "env, words",
    [
        (Bare, r"env: <class .*Bare'> .* an object, as Bare\(\)"),
        (object(), "env: <object .* has no reset"),
        (Resets(), "env: <.*Resets .* has no step"),
        (None, "env: None .* has no reset"),
        (["CartPole-v1"], "env: .*CartPole-v1.* has no reset"),
        ("", "env: '' is no environment of gymnax; gymnax has CartPole-v1.*FrozenLake-misc"),
        ("bricks/ant", "env: 'bricks/ant' .* suite"),
        ("cartpole", "env: 'cartpole' is no environment of gymnax; did you mean CartPole-v1"),
    ],
    ids=["class", "object", "no step", "None", "list", "empty", "no suite", "misspelt"],
)
def test_what_is_no_environment_is_refused(env, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        PPOConfig(env=env)
    assert "\n" not in str(refusal.value)


FAULTS = {  # by what is wrong: the environment, and words of the refusal
    "unserved actions": (
        Bare(action_space=spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))])),
        "actions in Tuple",
    ),
    "unserved observations": (
        Bare(obs_space=spaces.Dict({"a": spaces.Dict({"b": object()})})),
        "observations",
    ),
    "four values of step_env": (
        BareStep(step=go_on),
        "a step returns observation, state, reward, terminated, info, not 4 values",
    ),
    "five values of a step of its own": (
        OwnStep(step=lambda *given: (*go_on(*given), {})),
        "a step returns .* terminated, truncated, info, not 5 values",
    ),
    "no final observation": (
        OwnStep(step=with_info({})),
        "info\\['final_observation'\\]",
    ),
    "other structure": (Bare(step=showing({"a": jnp.zeros(1)})), "reset and step give .* alike"),
    "other shape": (Bare(step=showing(jnp.zeros(2))), "reset and step give .* alike"),
    "other state": (
        Bare(reset=lambda key: (jnp.zeros(1), State(jnp.int32(0), (0, 0)))),
        "reset and step give .* alike",
    ),
    "three values of a reset": (
        Bare(reset=lambda key: (*begin(key), {})),
        "interface",
    ),
    "no state": (Bare(reset=lambda key: jnp.zeros(1)), "interface"),
    "no info": (OwnStep(step=with_info(None)), ""),
    "observations unlike their space": (
        Bare(reset=lambda key: ({"a": jnp.zeros(1)}, begin(key)[1]), step=showing({"a": 1.0})),
        "",
    ),
    "end of one axis": (
        Bare(step=lambda *given: (*go_on(*given)[:3], jnp.zeros(1, bool))),
        "",
    ),
    "vector reward": (Bare(step=paying(jnp.ones(2))), r"a reward is a scalar, not of \(2,\)"),
    "reward of one axis": (Bare(step=paying(jnp.ones(1))), r"a reward is a scalar, not of \(1,\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_environment_is_named_in_one_line(fault):
    env, words = FAULTS[fault]
    with pytest.raises(ConfigError, match=f"env: .*{words}") as refusal:
        train(PPOConfig(env=env), jax.random.key(0))
    assert "\n" not in str(refusal.value)


def test_a_step_of_its_own_is_taken_as_it_is():
    """Its reset within the step stays, and so does the observation before that."""

    def step(key, state, action):
        obs, after, reward, terminated = go_on(key, state, action)
        done = after.time == 3
        fresh = State(jnp.where(done, 0, after.time))
        shown = jnp.where(done, 9.0, obs)  # what no reset of the product's would show
        return shown, fresh, reward, terminated | done, done, {"final_observation": obs}

    config = PPOConfig(env=OwnStep(step=step), **TINY)
    agent = jit(init_agent)(config, jax.random.key(0))
    agent, rollout = jit(ppo_jax.collect_rollout)(config, agent, jax.random.key(1))
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 9] and agent.obs.tolist() == [[1.0]] * 2
    assert rollout.final_obs[:, 0, 0].tolist() == [1, 2, 3, 1]
    assert rollout.terminated[:, 0].tolist() == [False, False, True, False]
    assert not rollout.truncated.any(), "a termination is no time limit"


@pytest.mark.parametrize("kind", [bool, int, float, jnp.int32, jnp.float32, jnp.bool_])
def test_rewards_and_ends_may_be_numbers_of_any_kind(kind):
    """As brax's ends are: 1.0 and 0.0."""
    config = PPOConfig(env=Bare(step=ending_after_two(kind)), net_arch=(), **TINY)
    assert play(config).tolist() == [4.0] * 3
    agent, metrics = jax.eval_shape(train, config, jax.random.key(0))
    assert agent.n_recent.shape == () and metrics["return"].dtype == jnp.float32


def ending_after_two(kind):
    """Return a function for steps that pay 2; the second terminates the episode."""

    def step(key, state, action):
        obs, after, _, _ = go_on(key, state, action)
        return obs, after, 2, (after.time == 2).astype(kind)

    return step


# -------------------------------------------------------------------------------- module and class

OWN = """
from faulty_environments import Bare

class Three(Bare):
    def __init__(self):
        super().__init__(max_steps=3)

class Needs(Bare):
    def __init__(self, size):
        super().__init__()

five = Bare(max_steps=5)
number = 5
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A working folder with a module of the user's."""
    (tmp_path / "own_environments.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_environments", raising=False)
    return tmp_path


def test_an_environment_of_the_working_folder_trains_plays_and_goes_on(own, capsys):
    name = "own_environments:Three"
    small = [*SMALL, "--n-seeds", "1", "--net-arch", "--total-timesteps", "64"]
    assert main([*small, "--env", name, "--run-dir", "run"]) == 0
    printed = capsys.readouterr().out
    assert "python ppo_jax.py --eval run" in printed
    assert ppo_jax.load_agents("run")[0].env == name
    assert main(["--eval", "run", "--n-episodes", "2", UNCACHED]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"seed 0 +3\.00\n", printed) and "own_environments-Three" in printed
    more = ["--total-timesteps", "96", "--run-dir", "more", UNCACHED]
    assert main(["--resume", "run", *more]) == 0
    config, agents = ppo_jax.load_agents("more")
    assert config.env == name and agents.n_updates.tolist() == [3]
    assert own.as_posix() not in sys.path


def test_an_object_of_a_module_is_an_environment_too(own):
    config = PPOConfig(env="own_environments:five", **TINY)
    assert play(config).tolist() == [5.0] * 3


@pytest.mark.parametrize(
    "name, words",
    [
        ("no_such_module:Three", ["No module named 'no_such_module'"]),
        ("own_environments:Four", ["has no attribute 'Four'"]),
        ("own_environments:", []),
        (":Three", []),
        ("own_environments:Needs", ["size"]),
        ("own_environments:number", ["has no reset"]),
        ("json:dumps", []),
    ],
)
def test_what_cannot_be_imported_as_an_environment_gets_one_line(name, words, own, capsys):
    assert main([*SMALL, "--env", name]) == 2
    assert_one_line(capsys.readouterr().err, "env: ", repr(name), *words)
    assert not (own / "runs").exists()
