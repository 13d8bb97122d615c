import pathlib
import subprocess
import sys
import tomllib

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from gymnax.environments.environment import Environment, EnvParams, EnvState

import ppo_jax
from ppo_jax import (
    PRESETS,
    ConfigError,
    Convolution,
    PPOConfig,
    evaluate,
    init_agent,
    make_env,
    make_network,
    reset_envs,
    train,
)

ROOT = pathlib.Path(__file__).parent.parent
NAMES = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]  # which downloads its data


def test_there_are_26_environments():
    assert len(gymnax.registered_envs) == 26


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_trains_with_its_preset(name):
    """With the preset's policy and settings, at a size that compiles and runs in a second or two."""
    config = PPOConfig(env=name, n_envs=2, n_steps=4, batch_size=4, n_epochs=1, total_timesteps=8)
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all that this test does
    try:
        agent, metrics = jax.jit(train)(config, jax.random.key(0))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert int(metrics["timesteps"][-1]) == 8
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl"):
        assert np.isfinite(metrics[name]).all()
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.params))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_a_valid_config(name):
    config = PPOConfig(env=name)
    make_env(config)
    assert config.rollout_size % config.minibatch_size == 0


def test_presets_name_environments():
    assert set(PRESETS) <= set(gymnax.registered_envs)


@pytest.mark.parametrize(
    "name, layer", [("Breakout-MinAtar", "conv_0"), ("Pong-misc", "conv_1"), ("Catch-bsuite", None)]
)
def test_images_get_a_cnn_and_all_else_an_mlp(name, layer):
    params = jax.eval_shape(init_agent, PPOConfig(env=name, n_envs=1), jax.random.key(0)).params["params"]
    params = params.get("shared_encoder", {})
    assert (layer in params) if layer else not any(key.startswith("conv") for key in params)


def test_an_image_can_go_through_the_mlp():
    params = jax.eval_shape(
        init_agent, PPOConfig(env="Breakout-MinAtar", policy="mlp", net_arch=(8,)), jax.random.key(0)
    )
    assert params.params["params"]["policy_0"]["kernel"].shape == (400, 8)


def test_integer_observations_are_one_hot():
    config = PPOConfig(env="FrozenLake-misc", n_envs=3, net_arch=())
    agent = init_agent(config, jax.random.key(0))
    kernel = jax.random.normal(jax.random.key(1), (16, 4))
    params = agent.params["params"] | {"policy_out": {"kernel": kernel, "bias": jnp.zeros(4)}}
    distribution, _ = make_network(config).apply({"params": params}, jnp.array([0, 5, 15]))
    np.testing.assert_allclose(distribution.logits, kernel[jnp.array([0, 5, 15])], rtol=1e-6)


class Unserved(Environment):
    """An environment with a space that no policy serves."""

    def action_space(self, params=None):
        return spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))])

    def observation_space(self, params):
        return spaces.Box(0, 1, (1,))


def test_a_space_that_no_policy_serves_is_refused():
    with pytest.raises(ConfigError, match="actions in Tuple"):
        make_env(PPOConfig(env=Unserved()))


def test_an_object_that_is_no_environment_is_refused():
    with pytest.raises(ConfigError, match=r"env: <object .* has no reset"):
        PPOConfig(env=object())


class Countdown(Environment):
    """Three steps an episode; the reward is the action, clipped to the bounds."""

    @property
    def default_params(self):
        return EnvParams(max_steps_in_episode=3)

    def step_env(self, key, state, action, params):
        state = EnvState(time=state.time + 1)
        return jnp.full(1, state.time, jnp.float32), state, jnp.sum(action), jnp.array(False), {}

    def reset_env(self, key, params):
        return jnp.zeros(1), EnvState(time=0)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 0.5, (2,))

    def observation_space(self, params):
        return spaces.Box(0, 3, (1,))


def test_an_environment_of_ones_own_trains_and_its_bounds_hold():
    config = PPOConfig(env=Countdown(), n_envs=2, n_steps=6, total_timesteps=12, n_epochs=1, log_std_init=5.0)
    agent, metrics = jax.jit(train)(config, jax.random.key(0))
    assert metrics["length"][-1] == 3
    returns = evaluate(config, agent, jax.random.key(1), 50, deterministic=False)
    assert returns.shape == (50,)
    assert -6 <= returns.min() < -2 and 1 < returns.max() <= 3


def test_the_two_lists_of_dependencies_agree():
    comments = (ROOT / "ppo_jax.py").read_text().split("# /// script\n")[1].split("# ///")[0]
    script = tomllib.loads("".join(line.removeprefix("# ").removeprefix("#") for line in comments.splitlines(True)))
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    runtime, tests = (part.split() for part in "\n".join(lines).strip().split("\n\n"))
    assert script["dependencies"] == runtime
    assert "pytest" in tests[0]
    assert script["requires-python"] == ">=3.11"


def test_gymnax_comes_with_all_that_it_imports():
    """A plain install of gymnax 1.0.1 lacks six; the drawing libraries that importing it skips are still there."""
    code = "import ppo_jax, six, seaborn, matplotlib.pyplot as plt; print(plt.figure.__name__, seaborn.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "figure seaborn\n"


def test_an_environment_may_be_made_while_jax_traces():
    """Breakout makes arrays when it is made, and these must outlive the trace that first asks for it."""
    ppo_jax._make_gymnax.cache_clear()
    config = PPOConfig(env="Breakout-MinAtar", n_envs=2)
    for key in jax.random.split(jax.random.key(0)):
        jax.eval_shape(init_agent, config, key)
    reset_envs(*make_env(config), jax.random.split(jax.random.key(0), 2))


def test_the_convolution_is_flaxs():
    images = jax.random.normal(jax.random.key(0), (5, 10, 9, 4))
    for stride in (1, 2):
        ours = Convolution(7, 3, stride, nn.initializers.lecun_normal())
        params = ours.init(jax.random.key(1), images)
        flaxs = nn.Conv(7, (3, 3), strides=stride, padding="VALID")
        np.testing.assert_allclose(ours.apply(params, images), flaxs.apply(params, images), rtol=1e-4, atol=1e-5)
