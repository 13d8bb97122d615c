"""Small runs, and what the tests of settings, folders and the command line share."""

import contextlib
import csv
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

import ppo_jax
from ppo_jax import PPOConfig

HERE = pathlib.Path(__file__).parent
PROGRAM = pathlib.Path(ppo_jax.__file__)

# One size for all that run within a process, so that JAX compiles it once.
SIZES = dict(n_envs=4, n_steps=8, n_epochs=1, total_timesteps=96, net_arch=())
CONFIG = PPOConfig(**SIZES)
KEYS = jax.random.split(jax.random.key(5), 3)
SMALL = ["--n-envs", "4", "--n-steps", "8", "--n-epochs", "1", "--total-timesteps", "9.6e1"]
UNCACHED = "--no-compilation-cache"
SMALL += ["--net-arch", "--n-seeds", "3", "--seed", "5", UNCACHED]

# What is carried from update to update is at its largest here.
FULL = dict(env="Pendulum-v1", policy="lstm", sub_traj_len=4, rnn_hidden_size=8)
FULL |= dict(normalize_obs=True, normalize_reward=True, learning_rate="linear_1e-3")
FULL |= dict(n_envs=4, n_steps=8, n_epochs=1, total_timesteps=192, net_arch=(8,))


def start(*arguments, folder, code=None, **environment):
    """Start the program, or a piece of code, in a process of its own; returns the process.

    environment: variables to set; None takes one away.
    """
    path = os.pathsep.join([str(PROGRAM.parent), str(HERE)])
    variables = os.environ | {"PYTHONPATH": path} | environment
    variables = {name: value for name, value in variables.items() if value is not None}
    program = ["-u", PROGRAM] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *map(str, [*program, *arguments])],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=300):
    """Wait for a process; returns its exit code and what it printed on both streams."""
    out, error = process.communicate(timeout=timeout)
    return process.returncode, out, error


def read_rows(run_dir, name="metrics.csv"):
    """Return the rows of a run's metrics.csv, or of another table, by column."""
    with open(pathlib.Path(run_dir) / name, newline="") as file:
        return list(csv.DictReader(file))


def alone(config):
    """Return the settings, as `run_training` takes them, of a run without a sweep."""
    return [({}, config)]


def parse_one(argv):
    """Return the config and the run options that arguments without a sweep give."""
    [(chosen, config)], options, _ = ppo_jax.parse_arguments(argv)
    assert chosen == {}
    return config, options


def claim_run(options, config):
    """Return the folder of a run without a sweep; it is free for others afterwards."""
    described = ppo_jax.describe_run(alone(config), options, {})
    with contextlib.ExitStack() as stack:
        return ppo_jax.open_run_dir(options, config, described, stack)


def flags(settings):
    """Return the flags that stand for settings."""
    words = []
    for name, value in settings.items():
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def assert_one_line(text, *words):
    """Assert that a program said one line, with these words in it."""
    assert text.count("\n") == 1 and text.endswith("\n"), text
    for word in words:
        assert word in text, text


def assert_same_agents(ours, theirs):
    """Assert that agents are alike to the last bit, random keys included."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def assert_same_configs(ours, theirs):
    """Assert that two configs are alike, swept numbers and schedules included."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(one, other, rtol=1e-6)
