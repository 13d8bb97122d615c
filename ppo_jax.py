"""Proximal Policy Optimization in one file: environments, advantages and updates in one jitted JAX function.

    python ppo_jax.py --env CartPole-v1                                        # from a shell

    config = PPOConfig(env="CartPole-v1")                                      # from Python
    agents, metrics = jax.jit(jax.vmap(train, in_axes=(None, 0)))(config, jax.random.split(key, 8))

Rooms, in the order in which data flows: configuration, environments, distributions and networks, the algorithm,
evaluation, populations, reporting, command line. Each is usable without the ones below it. Rooms 1 to 5 need jax,
flax, optax, gymnax and chex alone.

Schulman et al., "Proximal Policy Optimization Algorithms", 2017, https://arxiv.org/abs/1707.06347
Where implementations differ this one does what Stable-Baselines3 does; tests/test_sb3_parity.py compares the numbers.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10.2",
#     "flax>=0.12.8",
#     "optax>=0.2.8",
#     "gymnax>=1.0.1",
#     "six>=1.17.0",
#     "chex>=0.1.92",
#     "orbax-checkpoint>=0.12.8",
#     "tyro>=1.0.17",
#     "rich>=15.0.0",
#     "matplotlib>=3.11.2",
#     "scipy>=1.17.1",
# ]
# ///

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import functools
import importlib
import io
import itertools
import json
import logging
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# XLA runs networks of this size on about one core, so on a CPU every core becomes a device of its own. It must be said
# before JAX starts, which importing gymnax does, and gives way to the user's JAX_NUM_CPU_DEVICES or XLA_FLAGS.
if jax.config.jax_num_cpu_devices < 1 and "device_count" not in os.environ.get("XLA_FLAGS", ""):
    with contextlib.suppress(RuntimeError):  # JAX has started already, with the devices that it has
        affinity = getattr(os, "sched_getaffinity", None)
        jax.config.update("jax_num_cpu_devices", len(affinity(0)) if affinity else os.cpu_count())


class LaterModule(types.ModuleType):
    """A module that is imported when something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


# gymnax imports two drawing libraries that take longer than all the rest together, and that nothing here draws with.
drawing = {name: LaterModule(name) for name in ("seaborn", "matplotlib.pyplot") if name not in sys.modules}
sys.modules.update(drawing)
import gymnax  # noqa: E402

for name in drawing:
    del sys.modules[name]

import chex  # noqa: E402
import flax  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from gymnax.environments import spaces  # noqa: E402
from gymnax.environments.environment import Environment  # noqa: E402

# ======================================================================================================================
# 1. Configuration
# ======================================================================================================================


class ConfigError(ValueError):
    """A setting that can't work; its one line names the field, the value and what would be right."""


def setting(default: Any, help: str, group: str, rule: str | None = None) -> Any:
    """Declare a setting: its default, what it is, its group on the command line and the RULES entry that it meets."""
    return dataclasses.field(default=default, metadata={"help": help, "group": group, "rule": rule})


def _numbers(value: Any, kind: type, holds: Callable[[np.ndarray], Any]) -> bool:
    array = np.asarray(value)
    return np.issubdtype(array.dtype, kind) and bool(np.all(np.isfinite(array) & holds(array)))


COUNT = "a whole number from 1 to 2147483647"
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda x: np.ndim(x) == 0 and _numbers(x, np.integer, lambda x: (x >= 1) & (x < 2**31)), COUNT),
    "sizes": (lambda x: isinstance(x, tuple) and all(RULES["size"][0](width) for width in x), f"each {COUNT}"),
    "switch": (lambda x: isinstance(x, bool | np.bool_), "True or False"),
    "fraction": (lambda x: _numbers(x, np.number, lambda x: (x >= 0) & (x <= 1)), "a number from 0 to 1"),
    "positive": (lambda x: _numbers(x, np.number, lambda x: x > 0), "a finite number above 0"),
    "coefficient": (lambda x: _numbers(x, np.number, lambda x: x >= 0), "a finite number, 0 or above"),
    "number": (lambda x: _numbers(x, np.number, lambda x: x == x), "a finite number"),
}
# Numbers that training only computes with are leaves of a config: they may be swept with `jax.vmap`, and a new value
# compiles nothing. All else decides shapes or code and is static.
TRACED_RULES = ("fraction", "positive", "coefficient", "number")


@dataclasses.dataclass(frozen=True, init=False)
class PPOConfig:
    """All that a training run depends on besides its key; a pytree whose numbers are leaves.

    A field that isn't given has the value of the environment's preset (`PRESETS`), or else the default below. Names are
    those of Stable-Baselines3. Raises `ConfigError` for a value that can't work.
    """

    env: str | Environment = setting(
        "CartPole-v1", "A gymnax environment: its name or, in Python, itself.", "environment"
    )
    total_timesteps: int = setting(
        1_000_000, "Steps of an agent; the last rollout is completed.", "environment", "size"
    )
    n_envs: int = setting(64, "Environments that an agent steps side by side.", "environment", "size")
    n_steps: int = setting(128, "Steps of each environment in a rollout.", "environment", "size")
    stats_window_size: int = setting(100, "Episodes that the reported return averages over.", "environment", "size")

    batch_size: int | None = setting(None, "Samples in a minibatch; None: a quarter of all.", "optimisation", "size")
    n_epochs: int = setting(4, "Passes over each rollout.", "optimisation", "size")
    learning_rate: float = setting(3e-4, "Step size of Adam.", "optimisation", "coefficient")
    anneal_learning_rate: bool = setting(False, "Let it fall linearly to 0 during the run.", "optimisation", "switch")
    max_grad_norm: float = setting(
        0.5, "Gradients of a larger global norm are scaled down.", "optimisation", "positive"
    )

    gamma: float = setting(0.99, "Discount of the reward one step later.", "objective", "fraction")
    gae_lambda: float = setting(0.95, "Advantages: 0 is one-step, 1 is Monte Carlo.", "objective", "fraction")
    clip_range: float = setting(0.2, "The ratio is clipped to 1 ± clip_range.", "objective", "positive")
    clip_range_vf: float | None = setting(None, "Largest change of a value; None: any.", "objective", "positive")
    normalize_advantage: bool = setting(True, "Standardise each minibatch's advantages.", "objective", "switch")
    ent_coef: float = setting(0.0, "Weight of the entropy bonus.", "objective", "coefficient")
    vf_coef: float = setting(0.5, "Weight of the value loss.", "objective", "coefficient")
    target_kl: float | None = setting(None, "An update ends above 1.5 times this KL.", "objective", "positive")

    policy: str = setting("auto", "mlp, cnn, or auto: a CNN for observations with three axes.", "network")
    net_arch: tuple[int, ...] = setting((64, 64), "Hidden layers, of policy and value each.", "network", "sizes")
    activation: str = setting("tanh", "tanh or relu, behind each layer of net_arch.", "network")
    ortho_init: bool = setting(True, "Draw orthogonal weights, else Flax's default.", "network", "switch")
    log_std_init: float = setting(0.0, "Logarithm of a Gaussian's initial deviation.", "network", "number")

    def __init__(self, env: str | Environment = "CartPole-v1", **given: Any):
        fields = dataclasses.fields(self)
        for name in given.keys() - {field.name for field in fields}:
            raise ConfigError(f"{name}: no such setting{closest(name, [field.name for field in fields])}")
        preset = PRESETS.get(env, {}) if isinstance(env, str) else {}
        values = {field.name: field.default for field in fields} | preset | {"env": env} | given
        for field in fields:
            value = values[field.name]
            if field.metadata["rule"] == "size" and isinstance(value, float) and value.is_integer():
                value = int(value)  # 1e6 is a count like any other
            if field.name in TRACED and type(value) is int:
                value = float(value)  # or 1 and 1.0 would be compiled apart
            object.__setattr__(self, field.name, tuple(value) if isinstance(value, list) else value)
        check_config(self)

    def replace(self, **changes: Any) -> PPOConfig:
        """Return a copy with some fields changed; the others stay, also where `env` is among the changes."""
        return dataclasses.replace(self, **changes)

    @property
    def rollout_size(self) -> int:
        """Samples in one rollout: n_envs * n_steps."""
        return self.n_envs * self.n_steps

    @property
    def minibatch_size(self) -> int:
        """Samples in one minibatch: batch_size, at most the rollout."""
        if self.batch_size is None:
            return self.rollout_size // next(parts for parts in (4, 3, 2, 1) if self.rollout_size % parts == 0)
        return min(self.batch_size, self.rollout_size)

    @property
    def n_minibatches(self) -> int:
        """Minibatches in one epoch."""
        return self.rollout_size // self.minibatch_size

    @property
    def n_updates(self) -> int:
        """Updates in a run of `train`: enough rollouts for total_timesteps, the last one completed."""
        return -(-self.total_timesteps // self.rollout_size)


TRACED = [field.name for field in dataclasses.fields(PPOConfig) if field.metadata["rule"] in TRACED_RULES]
STATIC = [field.name for field in dataclasses.fields(PPOConfig) if field.metadata["rule"] not in TRACED_RULES]


def _flatten_config(config: PPOConfig) -> tuple[list, tuple]:
    children = [(jax.tree_util.GetAttrKey(name), getattr(config, name)) for name in TRACED]
    return children, tuple(getattr(config, name) for name in STATIC)


def _unflatten_config(static: tuple, traced: list) -> PPOConfig:
    config = object.__new__(PPOConfig)  # past __init__: leaves may be tracers, axes or shapes here
    for name, value in zip(STATIC + TRACED, [*static, *traced]):
        object.__setattr__(config, name, value)
    return config


jax.tree_util.register_pytree_with_keys(PPOConfig, _flatten_config, _unflatten_config)


def closest(name: str, known: list[str]) -> str:
    """Return "; did you mean …?" with the known names nearest to `name`, or "" where none is near."""
    lower = {candidate.lower(): candidate for candidate in known}
    near = [lower[match] for match in difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def check_fields(owner: Any) -> None:
    """Raise `ConfigError` at the first `setting` that breaks its rule; traced values are passed over."""
    for field in dataclasses.fields(owner):
        value, rule = getattr(owner, field.name), field.metadata["rule"]
        optional = field.default is None and value is None
        if rule is None or optional or isinstance(value, jax.core.Tracer):
            continue
        holds, right = RULES[rule]
        if not holds(value):
            raise ConfigError(
                f"{field.name}: {value!r} won't do; it must be {right}{' or None' * (field.default is None)}"
            )


def check_config(config: PPOConfig) -> None:
    """Raise `ConfigError` at the first setting that can't work; traced values are passed over."""
    check_fields(config)
    if isinstance(config.env, str) and config.env not in gymnax.registered_envs:
        near = closest(config.env, gymnax.registered_envs) or f"; gymnax has {', '.join(gymnax.registered_envs)}"
        raise ConfigError(f"env: {config.env!r} is no environment of gymnax{near}")
    for name in ("reset", "step", "default_params", "observation_space", "action_space"):
        if not isinstance(config.env, str) and not hasattr(config.env, name):
            raise ConfigError(f"env: {config.env!r} has no {name}; it must be a name or have gymnax's interface")
    if config.rollout_size >= 2**30:  # twice that must fit the integers that `shuffle` computes with
        raise ConfigError(f"n_envs: {config.n_envs} times n_steps: {config.n_steps} must be below {2**30} samples")
    if config.rollout_size % config.minibatch_size:
        below = next(n for n in range(config.minibatch_size, 0, -1) if config.rollout_size % n == 0)
        above = next(n for n in range(config.minibatch_size, config.rollout_size + 1) if config.rollout_size % n == 0)
        raise ConfigError(
            f"batch_size: {config.batch_size} doesn't divide the rollout of n_envs * n_steps = {config.rollout_size} "
            f"samples; the nearest sizes that do are {below} and {above}"
        )
    for name, known in (("policy", ENCODERS), ("activation", ACTIVATIONS)):
        if getattr(config, name) not in known:
            raise ConfigError(f"{name}: {getattr(config, name)!r} is unknown; it must be one of {', '.join(known)}")


# What differs from the defaults above, by environment; those without an entry train with the defaults. CartPole's and
# Pendulum's settings were tuned until the tests of learning passed with room; the others are of usual sizes.
CARTPOLE = dict(total_timesteps=300_000, n_envs=32, n_steps=32, n_epochs=8, gamma=0.98, gae_lambda=0.9)
CARTPOLE |= dict(learning_rate=1e-3, anneal_learning_rate=True)
MINATAR = dict(total_timesteps=10_000_000, learning_rate=1e-3, anneal_learning_rate=True, ent_coef=0.01, net_arch=())
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": CARTPOLE,
    "Acrobot-v1": CARTPOLE | dict(total_timesteps=500_000, gamma=0.99, gae_lambda=0.95, ent_coef=0.01),
    "Pendulum-v1": CARTPOLE | dict(n_envs=16, n_steps=128, batch_size=256, n_epochs=10, gamma=0.9, gae_lambda=0.95),
    "Asterix-MinAtar": MINATAR,
    "Breakout-MinAtar": MINATAR,
    "Freeway-MinAtar": MINATAR,
    "Seaquest-MinAtar": MINATAR,
    "SpaceInvaders-MinAtar": MINATAR,
    "Pong-misc": MINATAR,
}


# ======================================================================================================================
# 2. Environments
# ======================================================================================================================


@functools.lru_cache(maxsize=64)
def _make_gymnax(name: str) -> tuple[Environment, Any]:
    try:
        with jax.ensure_compile_time_eval():  # some make arrays, which must outlive the trace that they are made in
            return gymnax.make(name)
    except OSError as error:
        raise ConfigError(
            f"env: {name!r} downloads its data when it is made, and that failed ({error}); it needs a network"
        ) from error


def make_env(config: PPOConfig) -> tuple[Environment, Any]:
    """Return the environment of a config and its parameters.

    Raises `ConfigError` where the environment can't be made, or has spaces that no policy here serves.
    """
    env, env_params = (
        _make_gymnax(config.env) if isinstance(config.env, str) else (config.env, config.env.default_params)
    )
    obs_space, action_space = env.observation_space(env_params), env.action_space(env_params)
    for role, space in (("observations", obs_space), ("actions", action_space)):
        if not isinstance(space, spaces.Discrete | spaces.Box):
            raise ConfigError(f"env: {config.env!r} has {role} in {space}; it must be a Discrete or a Box space")
    if config.policy == "cnn" and not is_image(obs_space):
        raise ConfigError(
            f"policy: 'cnn' needs images (height, width, channels) and {config.env!r} shows {obs_space}; use mlp"
        )
    return env, env_params


def is_image(obs_space: spaces.Space) -> bool:
    """Tell whether observations have the three axes of an image, large enough for a 3 x 3 filter."""
    return len(obs_space.shape) == 3 and min(obs_space.shape[:2]) >= 3


def reset_envs(env: Environment, env_params: Any, keys: jax.Array) -> tuple[chex.ArrayTree, chex.ArrayTree]:
    """Reset an environment for each key (N,): observations and states (N, …), of exact types, fit for a scan."""
    obs, states = jax.vmap(env.reset, in_axes=(0, None))(keys, env_params)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), (obs, states))


class Step(NamedTuple):
    """What a step of N environments gives: the first two are the next episode's where one has ended."""

    obs: chex.ArrayTree  # (N, …)
    states: chex.ArrayTree  # (N, …)
    reward: jax.Array  # (N,) float32
    terminated: jax.Array  # (N,) bool, the environment ended the episode
    truncated: jax.Array  # (N,) bool, the time limit did, and only it
    final_obs: chex.ArrayTree  # (N, …), what the step led to, before any reset


def step_envs(
    env: Environment, env_params: Any, keys: jax.Array, states: Any, action: jax.Array, starts: tuple[Any, Any]
) -> Step:
    """Step N environments; where an episode ends, the next one begins with the observation and state of `starts`.

    keys: (N,); states: (N, …); action: (N, …), clipped to a Box's bounds here; starts: what `reset_envs` returns. The
    step of gymnax draws a reset within, which takes longer than all the rest of a small environment's step. An
    environment that brings a step of its own keeps it.
    """
    action_space = env.action_space(env_params)
    if isinstance(action_space, spaces.Box):
        action = jnp.clip(action, action_space.low, action_space.high)
    if resets_itself(env):
        obs, new_states, reward, terminated, truncated, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            keys, states, action, env_params
        )
        final_obs = info["final_observation"]
    else:
        final_obs, stepped, reward, terminated, _ = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))(
            keys, states, action, env_params
        )
        truncated = jax.vmap(env.is_truncated, in_axes=(0, None))(stepped, env_params)
        done = terminated | truncated
        obs, new_states = jax.tree.map(
            lambda start, new: jnp.where(expand(done, start), start, new), starts, (final_obs, stepped)
        )
    new_states = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), states, new_states)
    return Step(obs, new_states, reward.astype(jnp.float32), terminated, truncated & ~terminated, final_obs)


def resets_itself(env: Environment) -> bool:
    """Tell whether an environment's step is its own rather than gymnax's."""
    return type(env).step is not Environment.step


def expand(mask: jax.Array, like: jax.Array) -> jax.Array:
    """Give `mask` trailing axes of size 1 until it broadcasts against `like`."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


# ======================================================================================================================
# 3. Distributions and networks
# ======================================================================================================================


@flax.struct.dataclass
class Categorical:
    """A distribution over the actions 0 … A - 1, given by unnormalised log-probabilities (…, A)."""

    logits: jax.Array

    @staticmethod
    def noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draw what `sample` needs: standard Gumbel noise of the logits' shape."""
        return jax.random.gumbel(key, shape)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions (…,) by the Gumbel-max trick."""
        return jnp.argmax(self.logits + noise, axis=-1)

    def mode(self) -> jax.Array:
        """Return the most probable actions (…,)."""
        return jnp.argmax(self.logits, axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-probability (…,) of actions (…,)."""
        log_probs = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]

    def entropy(self) -> jax.Array:
        """Return the entropy (…,) in nats."""
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


@flax.struct.dataclass
class DiagonalGaussian:
    """Independent normal distributions over the last axis: mean (…, *action shape), log_std (*action shape)."""

    mean: jax.Array
    log_std: jax.Array

    @staticmethod
    def noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draw what `sample` needs: standard normal noise of the mean's shape."""
        return jax.random.normal(key, shape)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions of the mean's shape."""
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """Return the most probable actions, the means."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-density (…,) of actions, the sum over the action's axes."""
        standard = (action - self.mean) * jnp.exp(-self.log_std)
        return self._sum(-0.5 * standard**2 - self.log_std - 0.5 * math.log(2 * math.pi))

    def entropy(self) -> jax.Array:
        """Return the entropy (…,) in nats, the sum over the action's axes."""
        return self._sum(jnp.broadcast_to(self.log_std + 0.5 * math.log(2 * math.pi * math.e), self.mean.shape))

    def _sum(self, terms: jax.Array) -> jax.Array:
        return jnp.sum(terms, axis=tuple(range(-self.log_std.ndim, 0)))


def orthogonal(scale: float) -> Callable:
    """Return Flax's orthogonal initialiser, safe under `jax.vmap` on a CPU.

    Vmapped, it becomes a batch of LAPACK factorisations, and several of those at once deadlock the thread pool of XLA
    on a CPU with few cores (seen with jax 0.10.2). There the seeds take turns; elsewhere the batch is the faster way.
    """
    plain = nn.initializers.orthogonal(scale)

    def initialise(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        draw = functools.partial(plain, shape=shape, dtype=dtype)
        return jax.lax.platform_dependent(key, cpu=jax.custom_batching.sequential_vmap(draw), default=draw)

    return initialise


ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu}
ENCODERS = ("auto", "mlp", "cnn")


def encode_mlp(obs: jax.Array, obs_shape: tuple[int, ...], kernel_init: Callable) -> jax.Array:
    """Flatten observations (…, *obs_shape) to features (…, F)."""
    return obs.reshape((*obs.shape[: obs.ndim - len(obs_shape)], -1))


class Conv3x3(nn.Module):
    """A convolution of 3 x 3 without padding, as one matrix product over shifted copies of the image.

    Same parameters and results as `nn.Conv`, whose gradient within a loop runs some thirty times slower on a CPU.
    """

    features: int
    stride: int
    kernel_init: Callable

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        height, width, channels = images.shape[-3:]
        kernel = self.param("kernel", self.kernel_init, (3, 3, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        down, right = ([slice(i, i + size - 2, self.stride) for i in range(3)] for size in (height, width))
        shifted = jnp.concatenate([images[..., rows, columns, :] for rows in down for columns in right], axis=-1)
        return shifted @ kernel.reshape(9 * channels, self.features) + bias


def encode_cnn(obs: jax.Array, obs_shape: tuple[int, ...], kernel_init: Callable) -> jax.Array:
    """Turn images (…, H, W, C) into 128 features: the network of MinAtar, with strided layers for larger images.

    Young and Tian, "MinAtar", 2019, https://arxiv.org/abs/1903.03176, section 3: 16 filters of 3 x 3, then 128 units.
    """
    features, layer = nn.relu(Conv3x3(16, 1, kernel_init, name="conv_0")(obs)), 1
    while min(features.shape[-3:-1]) > 12:
        features, layer = nn.relu(Conv3x3(16, 2, kernel_init, name=f"conv_{layer}")(features)), layer + 1
    features = features.reshape((*features.shape[:-3], -1))
    return nn.relu(nn.Dense(128, kernel_init=kernel_init, name="features")(features))


class ActorCritic(nn.Module):
    """A policy and a value function: observations (…, *obs_shape) to a distribution over actions and values (…,).

    The two share what the encoder gives and nothing behind it. Any Flax module with this signature can replace it.
    """

    obs_space: Any
    action_space: Any
    policy: str
    net_arch: tuple[int, ...]
    activation: str
    ortho_init: bool
    log_std_init: float

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        init = orthogonal if self.ortho_init else lambda scale: nn.linear.default_kernel_init
        if isinstance(self.obs_space, spaces.Discrete):
            obs, obs_shape = jax.nn.one_hot(obs, self.obs_space.n), (self.obs_space.n,)
        else:
            obs_shape = self.obs_space.shape
            obs = obs / 255 if obs.dtype == jnp.uint8 and is_image(self.obs_space) else obs.astype(jnp.float32)
        use_cnn = self.policy == "cnn" or (self.policy == "auto" and is_image(self.obs_space))
        features = (encode_cnn if use_cnn else encode_mlp)(obs, obs_shape, init(math.sqrt(2)))

        latents = []
        for head in ("policy", "value"):
            latent = features
            for layer, width in enumerate(self.net_arch):
                latent = nn.Dense(width, kernel_init=init(math.sqrt(2)), name=f"{head}_{layer}")(latent)
                latent = ACTIVATIONS[self.activation](latent)
            latents.append(latent)
        value = nn.Dense(1, kernel_init=init(1.0), name="value_out")(latents[1])[..., 0]

        if isinstance(self.action_space, spaces.Discrete):
            logits = nn.Dense(self.action_space.n, kernel_init=init(0.01), name="policy_out")(latents[0])
            return Categorical(logits), value
        shape = self.action_space.shape
        mean = nn.Dense(math.prod(shape), kernel_init=init(0.01), name="policy_out")(latents[0])
        log_std = self.param("log_std", nn.initializers.constant(self.log_std_init), shape)
        return DiagonalGaussian(mean.reshape(mean.shape[:-1] + shape), log_std), value


# ======================================================================================================================
# 4. The algorithm
# ======================================================================================================================


@flax.struct.dataclass
class Agent:
    """All that training carries from one update to the next; its size depends on neither run nor rollout length."""

    params: chex.ArrayTree
    opt_state: optax.OptState
    key: jax.Array
    n_updates: jax.Array  # () int32, updates done
    obs: chex.ArrayTree  # (N, …), what the environments show now
    env_states: chex.ArrayTree  # (N, …)
    episode_return: jax.Array  # (N,), reward so far in the episodes under way
    episode_length: jax.Array  # (N,)
    recent_returns: jax.Array  # (stats_window_size,), of the last finished episodes, the newest first, NaN where none
    recent_lengths: jax.Array  # (stats_window_size,)


class Rollout(NamedTuple):
    """What T steps of N environments gave; every array is (T, N, …)."""

    obs: chex.ArrayTree
    action: jax.Array  # as sampled, before any clipping to the bounds
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: chex.ArrayTree  # what the step led to, before any reset


class Batch(NamedTuple):
    """The samples that the loss is computed on; every array is (samples, …)."""

    obs: chex.ArrayTree
    action: jax.Array
    log_prob: jax.Array  # of the policy that acted
    value: jax.Array  # by the value function of that time
    advantage: jax.Array
    value_target: jax.Array


def make_network(config: PPOConfig) -> nn.Module:
    """Return the module that `params` belong to: observations to (distribution, values)."""
    env, env_params = make_env(config)
    return ActorCritic(
        env.observation_space(env_params),
        env.action_space(env_params),
        config.policy,
        config.net_arch,
        config.activation,
        config.ortho_init,
        config.log_std_init,
    )


def make_optimizer(config: PPOConfig, learning_rate: chex.Numeric) -> optax.GradientTransformation:
    """Return Adam with the epsilon of the PPO paper's authors' code, behind a clip of the gradient's global norm."""
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(learning_rate, eps=1e-5))


def init_agent(config: PPOConfig, key: jax.Array) -> Agent:
    """Return an untrained agent with its environments reset."""
    env, env_params = make_env(config)
    key, network_key, reset_key = jax.random.split(key, 3)
    obs, env_states = reset_envs(env, env_params, jax.random.split(reset_key, config.n_envs))
    params = make_network(config).init(network_key, obs)
    return Agent(
        params=params,
        opt_state=make_optimizer(config, config.learning_rate).init(params),
        key=key,
        n_updates=jnp.int32(0),
        obs=obs,
        env_states=env_states,
        episode_return=jnp.zeros(config.n_envs),
        episode_length=jnp.zeros(config.n_envs),
        recent_returns=jnp.full(config.stats_window_size, jnp.nan, jnp.float32),
        recent_lengths=jnp.full(config.stats_window_size, jnp.nan, jnp.float32),
    )


def collect_rollout(config: PPOConfig, agent: Agent, key: jax.Array) -> tuple[Agent, Rollout]:
    """Let the policy act for n_steps in each environment.

    Returns the agent with its environments moved on, and a rollout of (n_steps, n_envs, …) arrays. Random numbers are
    drawn in blocks outside of the scan over steps, where each operation is paid for n_steps times: all actions' noise
    at once, and the states that new episodes start from for START_STEPS steps at a time.
    """
    env, env_params = make_env(config)
    network = make_network(config)
    distribution = jax.eval_shape(network.apply, agent.params, agent.obs)[0]
    noise_key, env_key = jax.random.split(key)
    noises = distribution.noise(noise_key, (config.n_steps, *jax.tree.leaves(distribution)[0].shape))
    env_keys = jax.random.split(env_key, (config.n_steps, config.n_envs, 2))  # for the step and for the next start

    def step(carry: tuple[Any, Any], given: tuple[Any, Any, Any]) -> tuple[tuple[Any, Any], Rollout]:
        obs, env_states = carry
        noise, keys, starts = given
        action = network.apply(agent.params, obs)[0].sample(noise)
        new = step_envs(env, env_params, keys, env_states, action, starts)
        moment = Rollout(obs, action, new.reward, new.terminated, new.truncated, new.final_obs)
        return (new.obs, new.states), moment

    def block(carry: tuple[Any, Any], given: tuple[Any, Any]) -> tuple[tuple[Any, Any], Rollout]:
        noises, keys = given
        starts = jax.vmap(functools.partial(reset_envs, env, env_params))(keys[:, :, 1])
        return jax.lax.scan(step, carry, (noises, keys[:, :, 0], starts))

    length = next(steps for steps in range(START_STEPS, 0, -1) if config.n_steps % steps == 0)
    split = functools.partial(jax.tree.map, lambda x: x.reshape((-1, length, *x.shape[1:])))
    join = functools.partial(jax.tree.map, lambda x: x.reshape((-1, *x.shape[2:])))
    start = (agent.obs, agent.env_states)
    (obs, env_states), rollout = jax.lax.scan(block, start, split((noises, env_keys)))
    return agent.replace(obs=obs, env_states=env_states), join(rollout)


START_STEPS = 16


def compute_gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: chex.Numeric,
    gae_lambda: chex.Numeric,
) -> tuple[jax.Array, jax.Array]:
    """Return advantages and value targets, both (T, …), by generalised advantage estimation.

    All arrays are (T, …), time first. next_value: the value of what each step led to, where an episode ended that of
    its last observation. A termination alone makes it count for nothing; either end cuts the sum over later steps.

        delta_t = r_t + gamma * (1 - terminated_t) * next_value_t - value_t
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    Schulman et al., 2015, https://arxiv.org/abs/1506.02438, equation 16; Pardo et al., "Time Limits in Reinforcement
    Learning", 2018, https://arxiv.org/abs/1712.00378. The value target is A_t + value_t.
    """
    chex.assert_equal_shape([reward, value, next_value, terminated, truncated])
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * jnp.where(terminated | truncated, 0.0, 1.0)

    def step(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        advantage = now[0] + now[1] * later
        return advantage, advantage

    _, advantage = jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantage, advantage + value


def make_batch(config: PPOConfig, agent: Agent, rollout: Rollout) -> Batch:
    """Return a rollout's samples with log-probabilities, values, advantages and value targets, arrays (T * N, …).

    agent: as it is after the rollout, since the last step's value target needs the observations that follow it.
    """
    network = make_network(config)
    distribution, value = network.apply(agent.params, rollout.obs)
    _, last_value = network.apply(agent.params, agent.obs)
    next_value = jnp.concatenate([value[1:], last_value[None]])
    # Where an episode was cut, the next row shows the start of another one.
    next_value = jax.lax.cond(
        jnp.any(rollout.truncated),
        lambda: jnp.where(rollout.truncated, network.apply(agent.params, rollout.final_obs)[1], next_value),
        lambda: next_value,
    )
    advantage, value_target = compute_gae(
        rollout.reward,
        value,
        next_value,
        rollout.terminated,
        rollout.truncated,
        config.gamma,
        config.gae_lambda,
    )
    log_prob = distribution.log_prob(rollout.action)
    batch = Batch(rollout.obs, rollout.action, log_prob, value, advantage, value_target)
    return jax.tree.map(lambda x: x.reshape((config.rollout_size, *x.shape[2:])), batch)


def shuffle(key: jax.Array, positions: jax.Array, size: int) -> jax.Array:
    """Return where a pseudo-random permutation of 0 … size - 1 sends `positions`, integers in that range.

    A Feistel network on the pairs (left, right) of a grid that is just large enough: each round adds to one side a
    hash of the other, which can be undone, so it is a bijection for every key; what lands outside of the range is sent
    on until it is inside. `jax.random.permutation` sorts, which on a CPU takes longer than a minibatch's gradient.
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: the generalised Feistel cipher, cycle walking.
    """
    if size < 256:  # where a grid is too small to mix well and a sort is cheap
        return jnp.argsort(jax.random.bits(key, (size,), jnp.uint32))[positions]
    # A grid without a rest needs no walking; the rows of a usable one are neither few nor far fewer than the columns.
    root = math.isqrt(size)
    exact = next(rows for rows in range(root, 0, -1) if size % rows == 0)
    rows = exact if exact >= 16 and exact * 16 >= root else root
    columns = -(-size // rows)
    round_keys = jax.random.bits(key, (SHUFFLE_ROUNDS, 2, 2), jnp.uint32)

    def hashed(side: jax.Array, keys: jax.Array, modulus: int) -> jax.Array:
        mixed = (side + keys[0]) * jnp.uint32(0x9E3779B1)
        mixed = (mixed ^ (mixed >> 15) ^ keys[1]) * jnp.uint32(0x85EBCA77)
        return (mixed ^ (mixed >> 13)) % jnp.uint32(modulus)

    def permute(position: jax.Array) -> jax.Array:
        left, right = position // columns, position % columns
        for keys in round_keys:
            left = (left + hashed(right, keys[0], rows)) % rows
            right = (right + hashed(left, keys[1], columns)) % columns
        return left * columns + right

    position = permute(positions.astype(jnp.uint32))
    if rows * columns > size:
        position = jax.lax.while_loop(
            lambda position: jnp.any(position >= size),
            lambda position: jnp.where(position >= size, permute(position), position),
            position,
        )
    return position.astype(jnp.int32)


SHUFFLE_ROUNDS = 6


def ppo_loss(
    params: chex.ArrayTree, config: PPOConfig, network: nn.Module, minibatch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a minibatch, a scalar, and what is reported of it.

    policy loss + ent_coef * (-entropy) + vf_coef * value loss, as in Stable-Baselines3: the value loss is a mean
    squared error without a further 1/2 and, with clip_range_vf, of the clipped prediction alone. The clipped surrogate
    is equation 7 of https://arxiv.org/abs/1707.06347; approx_kl is (r - 1) - log r, http://joschu.net/blog/kl-approx.html
    """
    distribution, value = network.apply(params, minibatch.obs)
    log_ratio = distribution.log_prob(minibatch.action) - minibatch.log_prob
    ratio = jnp.exp(log_ratio)

    advantage = minibatch.advantage
    if config.normalize_advantage and advantage.size > 1:
        advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage, ddof=1) + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
    policy_loss = -jnp.mean(jnp.minimum(advantage * ratio, advantage * clipped_ratio))

    if config.clip_range_vf is not None:
        value = minibatch.value + jnp.clip(value - minibatch.value, -config.clip_range_vf, config.clip_range_vf)
    value_loss = jnp.mean(jnp.square(minibatch.value_target - value))

    entropy = jnp.mean(distribution.entropy())
    loss = policy_loss - config.ent_coef * entropy + config.vf_coef * value_loss
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": jnp.mean((ratio - 1) - log_ratio),
        "clip_fraction": jnp.mean(jnp.abs(ratio - 1) > config.clip_range),
    }


class Progress(NamedTuple):
    """The state of an update between two minibatches."""

    params: chex.ArrayTree
    opt_state: optax.OptState
    minibatch: jax.Array  # () int32, the next one, counted through all epochs; n_epochs * n_minibatches ends the update
    n_seen: jax.Array  # () int32, minibatches looked at, the one that stopped the update included
    sums: dict[str, jax.Array]  # of what ppo_loss reports; of approx_kl within the latest epoch alone


def optimise(
    config: PPOConfig, agent: Agent, batch: Batch, key: jax.Array, learning_rate: chex.Numeric
) -> tuple[Agent, dict[str, jax.Array]]:
    """Take the update's gradient steps: n_epochs passes over the batch, each in minibatches shuffled anew.

    batch: (T * N, …). With target_kl, the first minibatch whose approximate KL divergence is above 1.5 * target_kl
    takes no step and ends the update. Returns the agent and the minibatches' means of what `ppo_loss` reports (of
    approx_kl over the last epoch, as Stable-Baselines3 has it) and `optimizer_steps`, the number of steps taken.
    """
    network = make_network(config)
    optimizer = make_optimizer(config, learning_rate)
    epoch_keys = jax.random.split(key, config.n_epochs)
    n_minibatches = config.n_minibatches

    def unfinished(progress: Progress) -> jax.Array:
        return progress.minibatch < config.n_epochs * n_minibatches

    def step(progress: Progress) -> Progress:
        epoch, place = progress.minibatch // n_minibatches, progress.minibatch % n_minibatches
        positions = place * config.minibatch_size + jnp.arange(config.minibatch_size)
        samples = shuffle(epoch_keys[epoch], positions, config.rollout_size)
        minibatch = jax.tree.map(lambda x: x[samples], batch)
        gradients, report = jax.grad(ppo_loss, has_aux=True)(progress.params, config, network, minibatch)
        changes, opt_state = optimizer.update(gradients, progress.opt_state)
        params = optax.apply_updates(progress.params, changes)

        kept = progress.sums | {"approx_kl": jnp.where(place == 0, 0.0, progress.sums["approx_kl"])}
        sums = jax.tree.map(jnp.add, kept, report)
        following = Progress(params, opt_state, progress.minibatch + 1, progress.n_seen + 1, sums)
        if config.target_kl is None:
            return following
        too_far = report["approx_kl"] > 1.5 * config.target_kl
        held = following._replace(
            params=progress.params,
            opt_state=progress.opt_state,
            minibatch=jnp.full_like(progress.minibatch, config.n_epochs * n_minibatches),
        )
        return jax.tree.map(functools.partial(jnp.where, too_far), held, following)

    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    start = Progress(
        agent.params, agent.opt_state, jnp.int32(0), jnp.int32(0), {name: jnp.float32(0) for name in names}
    )
    end = jax.lax.while_loop(unfinished, step, start)
    n_last_epoch = (end.n_seen - 1) % n_minibatches + 1
    means = {name: total / (n_last_epoch if name == "approx_kl" else end.n_seen) for name, total in end.sums.items()}
    means["optimizer_steps"] = optimizer_steps(end.opt_state) - optimizer_steps(agent.opt_state)
    return agent.replace(params=end.params, opt_state=end.opt_state), means


def optimizer_steps(opt_state: optax.OptState) -> jax.Array:
    """Return the number of steps that an optimiser's state has seen, () int32."""
    return optax.tree_utils.tree_get(opt_state, "count")


def episode_statistics(config: PPOConfig, agent: Agent, rollout: Rollout) -> Agent:
    """Return the agent with the returns and lengths of the episodes that a rollout ended, and of those under way."""
    done = rollout.terminated | rollout.truncated

    def step(totals: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, done = now
        totals = totals + jnp.stack([reward, jnp.ones_like(reward)])
        return jnp.where(done, 0.0, totals), totals

    totals = jnp.stack([agent.episode_return, agent.episode_length])
    totals, all_totals = jax.lax.scan(step, totals, (rollout.reward, done))
    finished = jnp.cumsum(done.ravel())
    age = jnp.arange(config.stats_window_size)  # 0 is the newest
    latest = jnp.searchsorted(finished, finished[-1] - age)
    returns, lengths = all_totals[:, 0].ravel()[latest], all_totals[:, 1].ravel()[latest]
    is_new, before = age < finished[-1], age - finished[-1]
    return agent.replace(
        episode_return=totals[0],
        episode_length=totals[1],
        recent_returns=jnp.where(is_new, returns, agent.recent_returns[before]),
        recent_lengths=jnp.where(is_new, lengths, agent.recent_lengths[before]),
    )


def explained_variance(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Return 1 - Var[target - prediction] / Var[target]: 1 is perfect, 0 is a constant's; NaN without variance."""
    variance = jnp.var(target)
    return jnp.where(variance == 0, jnp.nan, 1 - jnp.var(target - prediction) / variance)


def update(config: PPOConfig, agent: Agent) -> tuple[Agent, dict[str, jax.Array]]:
    """Do one iteration of PPO: a rollout, advantages, epochs of minibatches. Returns the agent and scalar metrics."""
    key, rollout_key, shuffle_key = jax.random.split(agent.key, 3)
    agent, rollout = collect_rollout(config, agent.replace(key=key), rollout_key)
    agent = episode_statistics(config, agent, rollout)
    batch = make_batch(config, agent, rollout)

    timesteps = (agent.n_updates + 1) * config.rollout_size
    learning_rate = config.learning_rate
    if config.anneal_learning_rate:
        learning_rate = learning_rate * jnp.maximum(0.0, 1 - timesteps / config.total_timesteps)
    agent, losses = optimise(config, agent, batch, shuffle_key, learning_rate)
    return agent.replace(n_updates=agent.n_updates + 1), {
        "timesteps": timesteps,
        "return": jnp.nanmean(agent.recent_returns),
        "length": jnp.nanmean(agent.recent_lengths),
        "explained_variance": explained_variance(batch.value, batch.value_target),
        **losses,
    }


METRICS = (
    *("timesteps", "return", "length", "policy_loss", "value_loss", "entropy"),
    *("approx_kl", "clip_fraction", "explained_variance", "optimizer_steps"),
)


def train(config: PPOConfig, key: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
    """Train an agent from scratch: a pure function of a config and a key, to be jitted and vmapped over both.

    Returns the agent and metrics, arrays of shape (n_updates,): `timesteps` done; `return` and `length`, means over the
    last stats_window_size finished episodes (NaN before the first); `explained_variance` of the rollout's values; and
    what `optimise` reports. Raises `ConfigError` before anything compiles.
    """
    check_config(config)
    return train_updates(config, init_agent(config, key), config.n_updates, config.n_updates)


def train_updates(
    config: PPOConfig, agent: Agent, n_updates: chex.Numeric, capacity: int
) -> tuple[Agent, dict[str, jax.Array]]:
    """Train an agent for `n_updates` more, at most `capacity`.

    Returns the agent and metrics of shape (capacity,), of which the first n_updates are filled. Only capacity is
    static, so that one compilation serves for any number of updates.
    """
    metrics = {name: jnp.zeros(capacity, jnp.int32 if name == "timesteps" else jnp.float32) for name in METRICS}

    def step(i: jax.Array, carry: tuple[Agent, dict[str, jax.Array]]) -> tuple[Agent, dict[str, jax.Array]]:
        agent, now = update(config, carry[0])
        return agent, {name: carry[1][name].at[i].set(now[name]) for name in METRICS}

    return jax.lax.fori_loop(0, n_updates, step, (agent, metrics))


# ======================================================================================================================
# 5. Evaluation
# ======================================================================================================================


@functools.partial(jax.jit, static_argnames=("n_episodes", "deterministic"))
def evaluate(config: PPOConfig, agent: Agent, key: jax.Array, n_episodes: int, deterministic: bool = True) -> jax.Array:
    """Play `n_episodes` whole episodes side by side and return their undiscounted returns (n_episodes,).

    deterministic: take the most probable action; otherwise sample as in training. Ends when the last episode does.
    """
    env, env_params = make_env(config)
    network = make_network(config)
    reset_key, key = jax.random.split(key)
    starts = reset_envs(env, env_params, jax.random.split(reset_key, n_episodes))  # of later episodes too: none counts

    def playing(carry: tuple) -> jax.Array:
        return ~jnp.all(carry[4])

    def step(carry: tuple) -> tuple:
        key, obs, states, returns, over = carry
        key, noise_key, env_key = jax.random.split(key, 3)
        distribution = network.apply(agent.params, obs)[0]
        if deterministic:
            action = distribution.mode()
        else:
            action = distribution.sample(distribution.noise(noise_key, jax.tree.leaves(distribution)[0].shape))
        new = step_envs(env, env_params, jax.random.split(env_key, n_episodes), states, action, starts)
        returns = returns + jnp.where(over, 0.0, new.reward)
        return key, new.obs, new.states, returns, over | new.terminated | new.truncated

    start = (key, *starts, jnp.zeros(n_episodes), jnp.zeros(n_episodes, bool))
    return jax.lax.while_loop(playing, step, start)[3]


# ======================================================================================================================
# 6. Populations
# ======================================================================================================================

CHUNK_UPDATES = 128  # at most, in one call of the device: what bounds the metrics that it holds
ON_CPU = jax.default_backend() == "cpu"
# LLVM's later passes take a third of the compilation and make nothing faster here.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 1} if ON_CPU else None


def spread(function: Callable, config: PPOConfig, agents: chex.ArrayTree, *shared: Any) -> Any:
    """Call `function(config, agent, *shared)` for each agent, the agents split between the local devices.

    agents: a tree of arrays with a leading axis of agents, of any length; a leaf of the config may have that axis too.
    No device waits for another one before all are through. The agents of one device run side by side, but on a CPU one
    after the other: a core gains nothing from larger arrays, and what one agent needs stays in its cache.
    """
    n_agents = len(jax.tree.leaves(agents)[0])
    devices = jax.local_devices()[:n_agents]
    rows = np.arange(-(-n_agents // len(devices)) * len(devices)) % n_agents  # a last device without work repeats some
    each = (jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, n_agents), config), agents)
    if len(rows) > n_agents:
        each = jax.tree.map(lambda x: x[rows], each)

    def per_device(each: tuple[PPOConfig, Any], shared: tuple) -> Any:
        def one_agent(given: tuple[PPOConfig, Any]) -> Any:
            return function(*given, *shared)

        return jax.lax.map(one_agent, each) if ON_CPU else jax.vmap(one_agent)(each)

    mesh = jax.sharding.Mesh(np.array(devices), ("agents",))
    split, whole = jax.sharding.PartitionSpec("agents"), jax.sharding.PartitionSpec()
    results = jax.shard_map(per_device, mesh=mesh, in_specs=(split, whole), out_specs=split, check_vma=False)(
        each, shared
    )
    return jax.tree.map(lambda x: x[:n_agents], results) if len(rows) > n_agents else results


@functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
def init_population(config: PPOConfig, keys: jax.Array) -> Agent:
    """Return untrained agents, one for each key: every leaf of the result has a leading axis of agents."""
    return spread(init_agent, config, keys)


@functools.partial(jax.jit, donate_argnames="agents", static_argnames="capacity", compiler_options=COMPILER_OPTIONS)
def train_chunk(
    config: PPOConfig, agents: Agent, n_updates: jax.Array, capacity: int
) -> tuple[Agent, dict[str, jax.Array]]:
    """Do `n_updates` updates of every agent: `train_updates` on all devices. The agents passed in are used up."""
    return spread(functools.partial(train_updates, capacity=capacity), config, agents, n_updates)


def train_population(
    config: PPOConfig,
    keys: jax.Array,
    callback: Callable[[int, dict[str, np.ndarray], Agent], bool | None] | None = None,
    callback_seconds: float = 0.5,
) -> tuple[Agent, dict[str, np.ndarray]]:
    """Train an agent for each key, the agents spread over the local devices: `jax.vmap(train, (None, 0))`, but faster.

    keys: (S,). Leaves of the config may have a leading axis of S too: each agent then has its own value, so
    hyperparameters and seeds are swept in one compilation. The run goes in chunks of updates, so that what the devices
    hold doesn't grow with it; chunks change no number. callback(timesteps, metrics, agents) is called with the chunk's
    metrics (S, updates) about every `callback_seconds`, and ends the run where it returns true; agents are valid until
    it returns. Returns agents and metrics as `train` does, with a leading axis of S; the metrics are NumPy arrays.
    """
    check_config(config)
    for name in TRACED:
        value = getattr(config, name)
        if np.ndim(value) and np.shape(value) != (len(keys),):
            raise ConfigError(
                f"{name}: an array of shape {np.shape(value)}; for {len(keys)} keys it must be ({len(keys)},)"
            )
    agents = init_population(config, keys)
    capacity = min(config.n_updates, CHUNK_UPDATES)
    size = 1 if callback else capacity
    history, done, stop = [], 0, False
    while done < config.n_updates and not stop:
        n_updates = min(size, capacity, config.n_updates - done)
        start = time.perf_counter()
        agents, metrics = train_chunk(config, agents, jnp.int32(n_updates), capacity)
        history.append({name: np.asarray(values)[:, :n_updates] for name, values in metrics.items()})
        done += n_updates
        if callback:
            pace = callback_seconds / (time.perf_counter() - start)
            size = max(1, min(int(n_updates * pace), 2 * size))
            stop = callback(done * config.rollout_size, history[-1], agents)
    return agents, {name: np.concatenate([chunk[name] for chunk in history], axis=1) for name in METRICS}


# ======================================================================================================================
# 7. Reporting
# ======================================================================================================================


def save_agents(path: pathlib.Path, agents: Agent) -> None:
    """Write agents whole, from networks to keys, as an Orbax checkpoint; an older one goes once the new one stands."""
    import orbax.checkpoint as ocp

    tree = dict(vars(jax.device_get(agents.replace(key=jax.random.key_data(agents.key)))))
    fresh = path.with_name(path.name + ".new")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(fresh.absolute(), tree, force=True)
    if path.exists():
        shutil.rmtree(path)
    fresh.rename(path)


def load_agents(path: pathlib.Path, config: PPOConfig, n_agents: int) -> Agent:
    """Read what `save_agents` wrote; raises `ConfigError` where it is missing, damaged or of another shape."""
    import orbax.checkpoint as ocp

    if not path.is_dir():
        raise ConfigError(f"checkpoint: {path} doesn't exist; it must be the folder that a training run left")
    keys = jax.random.split(jax.random.key(0), n_agents)
    like = jax.eval_shape(lambda keys: jax.vmap(init_agent, (None, 0))(config, keys), keys)
    like = dict(vars(like.replace(key=jax.eval_shape(jax.random.key_data, like.key))))
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored, expected = (
                named_shapes(checkpointer.metadata(path.absolute()).item_metadata.tree),
                named_shapes(like),
            )
            for name in sorted(expected.keys() | stored.keys()):
                if stored.get(name) != expected.get(name):
                    difference = f"{stored.get(name, 'nothing')} as {name} where config.json says"
                    raise ConfigError(f"checkpoint: {path} holds {difference} {expected.get(name, 'nothing')}")
            # From a device they would be bound to it, and could not be spread over all.
            agents = Agent(**jax.device_get(checkpointer.restore(path.absolute(), like)))
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise all sorts of things for a damaged folder
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a task that Orbax left behind would log it once more
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"checkpoint: {path} is damaged ({reason}); it must be as the training run left it"
        ) from error
    return agents.replace(key=jax.random.wrap_key_data(agents.key))


def named_shapes(tree: chex.ArrayTree) -> dict[str, tuple]:
    """Return the shape of each leaf by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def write_config(run_dir: pathlib.Path, config: PPOConfig, seed: int, n_seeds: int) -> None:
    """Write config.json: every setting by name, the seed and the number of seeds."""
    settings = {"seed": seed, "n_seeds": n_seeds} | vars(config)
    (run_dir / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def read_config(run_dir: pathlib.Path) -> tuple[PPOConfig, int, int]:
    """Read what `write_config` wrote: config, seed and number of seeds; raises `ConfigError` where that can't be."""
    try:
        settings = json.loads((run_dir / "config.json").read_text())
        seed, n_seeds = settings.pop("seed"), settings.pop("n_seeds")
        return PPOConfig(**settings), seed, n_seeds
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{run_dir / 'config.json'}: {error}; it must be the file that a training run wrote"
        ) from error


def csv_rows(metrics: dict[str, np.ndarray]) -> list[list[Any]]:
    """Return metrics (S, updates) as rows, one an update: each metric's mean over seeds, then each seed's return."""
    means = [metrics["timesteps"][0], *(metrics[name].mean(axis=0) for name in METRICS if name != "timesteps")]
    return [list(row) for row in zip(*(column.tolist() for column in [*means, *metrics["return"]]))]


def csv_header(n_seeds: int) -> list[str]:
    """Return the names of `csv_rows`' columns."""
    return [*METRICS, *(f"return_seed_{i}" for i in range(n_seeds))]


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the mean of the middle half; Agarwal et al., 2021, https://arxiv.org/abs/2108.13264, section 4.3."""
    import scipy.stats

    return scipy.stats.trim_mean(values, 0.25, axis=axis)


def bootstrap_interval(values: np.ndarray, statistic: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % percentile bootstrap interval of a statistic over axis 0, with 2,000 resamples."""
    import scipy.stats

    rng = np.random.default_rng(0)
    result = scipy.stats.bootstrap(
        (values,), statistic, axis=0, n_resamples=2000, batch=50, method="percentile", rng=rng
    )
    return result.confidence_interval.low, result.confidence_interval.high


def summary_table(title: str, returns: np.ndarray) -> Any:
    """Return a rich table of each seed's return (S,), their mean, interquartile mean and its bootstrap interval."""
    from rich.table import Table

    table = Table("", "return", title=title, title_justify="left")
    shown = 16
    for seed, value in enumerate(returns[:shown]):
        table.add_row(f"seed {seed}", "no episode ended" if np.isnan(value) else f"{value:.2f}")
    if len(returns) > shown:
        table.add_row(f"… {len(returns) - shown} more", "")
    table.add_section()
    table.add_row("mean", f"{returns.mean():.2f}")
    table.add_row("interquartile mean", f"{interquartile_mean(returns):.2f}")
    if len(returns) > 1 and np.isfinite(returns).all():
        low, high = bootstrap_interval(returns, interquartile_mean)
        table.add_row("  95 % interval", f"{low:.2f} to {high:.2f}")
    return table


def plot_learning_curve(path: pathlib.Path, title: str, metrics: dict[str, np.ndarray]) -> None:
    """Draw the return against the steps done: every seed, their mean and its 95 % bootstrap interval."""
    from matplotlib.figure import Figure

    points = np.unique(np.linspace(0, metrics["timesteps"].shape[1] - 1, 200).astype(int))
    timesteps, returns = metrics["timesteps"][0, points], metrics["return"][:, points]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(timesteps, returns.T, color="C0", alpha=min(0.5, 8 / len(returns)), linewidth=0.8)
    known = np.isfinite(returns).all(axis=0)  # from when every seed has finished an episode
    axes.plot(
        timesteps[known], returns[:, known].mean(axis=0), color="C0", linewidth=2, label=f"mean of {len(returns)}"
    )
    if len(returns) > 1 and known.any():
        low, high = bootstrap_interval(returns[:, known], np.mean)
        axes.fill_between(timesteps[known], low, high, color="C0", alpha=0.2, linewidth=0, label="95 % interval")
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=150)


class RunReport:
    """What a training run shows on the terminal and writes to its folder while it runs; a callback of train_population.

    `interrupted` is set by Ctrl-C and ends the run at the next chunk, with all that was learnt. A file that can't be
    written is reported and doesn't end the run.
    """

    checkpoint_seconds = 60.0

    def __init__(self, run_dir: pathlib.Path, config: PPOConfig, n_seeds: int, console: Any):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.run_dir, self.config, self.n_seeds = run_dir, config, n_seeds
        self.total = config.n_updates * config.rollout_size
        self.interrupted = False
        self.started = self.saved = time.perf_counter()
        self.start_seconds, self.first_steps = 0.0, 0  # until the first update is done, and the steps that it took
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TimeElapsedColumn())
        self.progress = Progress(*columns, TextColumn("{task.fields[status]}"), console=console)
        self.task = self.progress.add_task("compiling", total=None, status="")

    def __call__(self, timesteps: int, metrics: dict[str, np.ndarray], agents: Agent) -> bool:
        now = time.perf_counter()
        if not self.first_steps:
            self.start_seconds, self.first_steps = now - self.started, timesteps
        try:
            self.show_progress(timesteps, metrics, now)
            self.append_metrics(metrics)
            if now - self.saved > self.checkpoint_seconds:
                save_agents(self.run_dir / "checkpoint", agents)
                self.saved = time.perf_counter()
        except Exception as error:  # a closed pipe, a full disk, for which Orbax has errors of its own
            with contextlib.suppress(OSError):
                print(f"ppo_jax: {self.run_dir}: {error}; training goes on", file=sys.stderr)
        return self.interrupted

    def interrupt(self, *_: Any) -> None:
        """Handle a signal: end the run at the next chunk, or the process where nothing has been learnt."""
        self.interrupted = True
        if not self.first_steps:
            self.progress.stop()
            shutil.rmtree(self.run_dir)
            print("ppo_jax: interrupted before the first update; nothing to save", file=sys.stderr, flush=True)
            os._exit(130)  # an exception from here could be lost in whatever JAX is doing, and the run go on

    def show_progress(self, timesteps: int, metrics: dict[str, np.ndarray], now: float) -> None:
        """Redraw the progress bar."""
        speed = self.steps_per_second(timesteps, now)
        status = f"{timesteps:,} steps  {speed:,.0f}/s  return {metrics['return'][:, -1].mean():.1f}"
        if speed:
            minutes, seconds = divmod(round((self.total - timesteps) * self.n_seeds / speed), 60)
            status += f"  left {minutes}:{seconds:02}"
        self.progress.update(self.task, description="training", total=self.total, completed=timesteps, status=status)

    def steps_per_second(self, timesteps: int, now: float) -> float:
        """Return the steps of all seeds together a second, compilation and the update that it ran with left out."""
        seconds = now - self.started - self.start_seconds
        return (timesteps - self.first_steps) * self.n_seeds / seconds if timesteps > self.first_steps else 0.0

    def append_metrics(self, metrics: dict[str, np.ndarray]) -> None:
        """Add a chunk's rows to metrics.csv."""
        with open(self.run_dir / "metrics.csv", "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(csv_header(self.n_seeds))
            writer.writerows(csv_rows(metrics))


# ======================================================================================================================
# 8. Command line
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What the command line decides besides a PPOConfig."""

    seed: int = setting(0, "Key of the run.", "run", "number")
    n_seeds: int = setting(4, "Agents to train side by side, each from a key of its own.", "run", "size")
    run_dir: str | None = setting(None, "New folder for the results; None: one under runs/, named by the time.", "run")
    eval: str | None = setting(None, "Play the agents of this run folder instead of training.", "run")
    n_episodes: int = setting(100, "Episodes that each agent plays with --eval.", "run", "size")
    compilation_cache: bool = setting(True, "Keep compiled programs in the user's cache folder.", "run", "switch")


def parse_arguments(argv: list[str]) -> tuple[PPOConfig, RunOptions]:
    """Turn command-line arguments into a config and run options; raises `ConfigError`, or exits after --help."""
    import tyro

    def parse_integer(text: str) -> int:
        if re.fullmatch(r"[+-]?\d+", text):
            return int(text)
        with contextlib.suppress(ValueError, OverflowError):
            if float(text).is_integer():
                return int(float(text))
        raise ValueError(f"{text!r} is no whole number")

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def integer_rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        return None if info.type is not int else tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda texts: parse_integer(texts[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )  # fmt: skip

    # The environment decides the other defaults, so it is looked at first.
    given = [arg.split("=", 1)[-1] for arg in argv if arg.startswith("--env=")]
    given += [after for arg, after in itertools.pairwise(argv) if arg == "--env"]
    defaults = vars(RunOptions()) | vars(PPOConfig(env=given[-1]) if given else PPOConfig())

    groups: dict[str, list] = {}
    for owner in (RunOptions, PPOConfig):
        hints = typing.get_type_hints(owner) | ({"env": str} if owner is PPOConfig else {})
        for field in dataclasses.fields(owner):
            annotated = typing.Annotated[hints[field.name], tyro.conf.arg(help=field.metadata["help"])]
            declared = dataclasses.field(default=defaults[field.name])
            groups.setdefault(field.metadata["group"], []).append((field.name, annotated, declared))
    grouped = [(group, dataclasses.make_dataclass(group, fields)) for group, fields in groups.items()]
    arguments = dataclasses.make_dataclass(
        "Arguments", [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in grouped]
    )
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            parsed = tyro.cli(
                arguments,
                args=argv,
                prog="ppo_jax.py",
                description="Train agents with proximal policy optimization, or play trained ones with --eval.",
                config=(tyro.conf.OmitArgPrefixes,),
                registry=registry,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        # The first line of tyro's box is its title; behind the message comes what --help shows too.
        lines = [line.strip(" │╭╮╰╯─") for line in shown.getvalue().splitlines()]
        message = re.split("Argument helptext|For full helptext", " ".join(line for line in lines[1:] if line))[0]
        raise ConfigError(message.strip()) from None
    values = {name: value for group, _ in grouped for name, value in vars(getattr(parsed, group)).items()}
    options = RunOptions(**{field.name: values.pop(field.name) for field in dataclasses.fields(RunOptions)})
    check_fields(options)
    return PPOConfig(**values), options


def new_run_dir(options: RunOptions, config: PPOConfig) -> pathlib.Path:
    """Create the run's folder; raises `ConfigError` where it can't be written or has something in it."""
    run_dir = pathlib.Path(options.run_dir or f"runs/{config.env}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise ConfigError(f"run_dir: {str(run_dir)!r} has something in it; it must be a new or an empty folder")
        write_config(run_dir, config, options.seed, options.n_seeds)
    except OSError as error:
        raise ConfigError(
            f"run_dir: {str(run_dir)!r} can't be written ({error.strerror}); it must be a folder of yours"
        ) from error
    return run_dir


def save_run(run_dir: pathlib.Path, config: PPOConfig, options: RunOptions, agents: Agent, metrics: dict) -> None:
    """Write all that a finished run leaves, what took longest to learn first."""
    save_agents(run_dir / "checkpoint", agents)
    write_config(run_dir, config, options.seed, options.n_seeds)
    with open(run_dir / "metrics.csv", "w", newline="") as file:
        csv.writer(file).writerows([csv_header(options.n_seeds), *csv_rows(metrics)])
    plot_learning_curve(run_dir / "learning_curve.png", f"PPO on {config.env}", metrics)


def save_or_rescue(run_dir: pathlib.Path, *results: Any) -> pathlib.Path:
    """Save a run in its folder or, where that fails, in a temporary one; returns the folder that has it all."""
    try:
        save_run(run_dir, *results)
    except Exception as error:
        rescue = pathlib.Path(tempfile.mkdtemp(prefix="ppo_jax-"))
        save_run(rescue, *results)
        print(f"ppo_jax: error: {run_dir} can't be written ({error}); everything is in {rescue}", file=sys.stderr)
        return rescue
    return run_dir


def run_training(config: PPOConfig, options: RunOptions) -> int:
    """Train, show progress and leave a run folder; returns the exit code."""
    from rich.console import Console

    make_env(config)
    run_dir = new_run_dir(options, config)
    console = Console()
    console.on_broken_pipe = lambda: setattr(console, "quiet", True)  # rich's own would exit, with what was learnt
    handlers = {}
    try:
        keys = jax.random.split(jax.random.key(options.seed), options.n_seeds)
        report = RunReport(run_dir, config, options.n_seeds, console)
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, report.interrupt)
        with report.progress:
            agents, metrics = train_population(config, keys, report)
        end = time.perf_counter()
        kept_in = save_or_rescue(run_dir, config, options, agents, metrics)
    except KeyboardInterrupt:
        shutil.rmtree(run_dir)  # which has nothing in it yet: the handler is not in place
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    title = f"{config.env}, last {config.stats_window_size} episodes of training"
    console.print(summary_table(title, metrics["return"][:, -1]))
    console.print(
        f"compile {report.start_seconds:.1f} s   run {end - report.started - report.start_seconds:.1f} s   "
        f"{report.steps_per_second(int(metrics['timesteps'][0, -1]), end):,.0f} steps/s"
    )
    console.print(f"results in {kept_in}; play them with: python ppo_jax.py --eval {kept_in}", soft_wrap=True)
    return 130 if report.interrupted else int(kept_in != run_dir)


def _evaluate_one(config: PPOConfig, agent_and_key: tuple[Agent, jax.Array], n_episodes: int) -> jax.Array:
    return evaluate(config, *agent_and_key, n_episodes)


def run_evaluation(options: RunOptions) -> int:
    """Play the agents of a run folder and print their returns; returns the exit code."""
    from rich.console import Console

    run_dir = pathlib.Path(options.eval)
    config, _, n_seeds = read_config(run_dir)
    agents = load_agents(run_dir / "checkpoint", config, n_seeds)
    keys = jax.random.split(jax.random.key(options.seed), n_seeds)
    play = functools.partial(_evaluate_one, n_episodes=options.n_episodes)
    returns = jax.jit(functools.partial(spread, play))(config, (agents, keys))
    title = f"{config.env}, mean of {options.n_episodes} episodes with the most probable actions"
    Console().print(summary_table(title, np.asarray(returns).mean(axis=1)))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a failure, 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        config, options = parse_arguments(sys.argv[1:] if argv is None else argv)
        if options.compilation_cache:
            cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
            jax.config.update("jax_compilation_cache_dir", str(cache / "ppo_jax"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        return run_evaluation(options) if options.eval else run_training(config, options)
    except ConfigError as error:
        print(f"ppo_jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ppo_jax: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
