"""What several tests share besides environments."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
from environments import ACTION_SPACES, Match
from gymnax.environments import spaces

import ppo_jax

ROOT = pathlib.Path(ppo_jax.__file__).parent
GOLDEN = pathlib.Path(os.environ.get("PPO_GOLDEN_DIR") or pathlib.Path(__file__).parent / "golden")

# What most tests cost is compiling, which takes half of the time like this.
OPTIONS = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # newer ones have no such option
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
jit = functools.partial(jax.jit, compiler_options=OPTIONS)

SMALL = dict(n_envs=8, n_steps=16, batch_size=32, n_epochs=1, total_timesteps=256, net_arch=(16,))
VARIANTS = {
    "gsde": dict(env="Pendulum-v1", use_sde=True, sde_sample_freq=5),
    "squashed": dict(env="Pendulum-v1", squash_output=True, log_std_init=1.0),
    "squashed gsde": dict(env="Pendulum-v1", use_sde=True, squash_output=True),
    "gru": dict(env="CartPole-v1", policy="gru", sub_traj_len=8),
    "lstm": dict(env="CartPole-v1", policy="lstm", sub_traj_len=4, share_features_extractor=False),
    "normalised": dict(env="Pendulum-v1", normalize_obs=True, normalize_reward=True),
    "normalised gru": dict(env="CartPole-v1", policy="gru", sub_traj_len=8, normalize_obs=True),
    "masked": dict(env=Match(spaces.Discrete(6), "mask")),
    "dict": dict(
        env=Match(spaces.Discrete(3), "dict"), normalize_obs=True, share_features_extractor=False
    ),
    **{name: dict(env=Match(space)) for name, space in ACTION_SPACES.items()},
}


def rollout_and_batch(config, key):
    """Return an agent that has learnt, its next rollout and batch, and the agent after these.

    It has learnt so that its statistics say something.
    """
    agent, _ = ppo_jax.update(config, ppo_jax.init_agent(config, key))
    moved, rollout = ppo_jax.collect_rollout(config, agent, key)
    return agent, rollout, ppo_jax.make_batch(config, moved, rollout), moved


def assert_same(first, second, **tolerances):
    """Assert that two trees have the same arrays, up to tolerances of assert_allclose."""

    def assert_same_leaf(x, y):
        np.testing.assert_allclose(x, y, **tolerances)

    jax.tree.map(assert_same_leaf, first, second)


def run_python(code, *arguments, timeout=300, **environment):
    """Run code in a Python process of its own, which finds ppo_jax; return what it printed."""
    path = os.pathsep.join([str(ROOT), str(pathlib.Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
