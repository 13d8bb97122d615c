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
#     "pyyaml>=6.0.4",
#     "matplotlib>=3.11.2",
#     "scipy>=1.17.1",
# ]
# ///

from __future__ import annotations

import ast
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
    "period": (lambda x: x == -1 or RULES["size"][0](x), f"-1 or {COUNT}"),
    "switch": (lambda x: isinstance(x, bool | np.bool_), "True or False"),
    "fraction": (lambda x: _numbers(x, np.number, lambda x: (x >= 0) & (x <= 1)), "a number from 0 to 1"),
    "positive": (lambda x: _numbers(x, np.number, lambda x: x > 0), "a finite number above 0"),
    "coefficient": (lambda x: _numbers(x, np.number, lambda x: x >= 0), "a finite number, 0 or above"),
    "number": (lambda x: _numbers(x, np.number, lambda x: x == x), "a finite number"),
    "whole": (lambda x: np.ndim(x) == 0 and _numbers(x, np.integer, lambda x: x == x), "a whole number"),
    "arguments": (lambda x: isinstance(x, tuple), "names with values, as in name=1"),
}
# Numbers that training only computes with are leaves of a config: they may be swept with `jax.vmap`, a new value
# compiles nothing, and a schedule may stand in their place. All else decides shapes or code and is static.
TRACED_RULES = ("fraction", "positive", "coefficient", "number")
COUNT_RULES = ("size", "period", "whole")


@flax.struct.dataclass
class Schedule:
    """A number that moves from `initial` to `final_fraction` of it during a run."""

    initial: chex.Numeric
    final_fraction: chex.Numeric
    shape: str = flax.struct.field(pytree_node=False)  # "linear" or "cosine"

    def __call__(self, progress_remaining: chex.Numeric) -> chex.Numeric:
        """Return the number when this share of the run remains, 1 at its start and 0 at its end."""
        share = progress_remaining if self.shape == "linear" else (1 - jnp.cos(jnp.pi * progress_remaining)) / 2
        return self.initial * (self.final_fraction + (1 - self.final_fraction) * share)

    def __str__(self) -> str:
        return f"{self.shape}_{self.initial}_{self.final_fraction}"


def read_number(name: str, value: Any, preset: Any = None) -> Any:
    """Turn what stands for a number or a schedule into a float, an array of agents, a `Schedule` or a pair of them.

    value: what `PPOConfig` takes: numbers; "linear" or "cosine" (from the preset to 0), "linear_3e-4" (from 3e-4),
    "linear_3e-4_0.1" (to a tenth of it); "low,high" or a tuple, a pair; a function of the progress remaining.
    """
    if isinstance(value, str):
        kind, *numbers = value.strip().split("_")
        if "," in value and name == "clip_range":
            return tuple(read_number(name, part, preset) for part in value.split(","))
        with contextlib.suppress(ValueError):
            if kind not in ("linear", "cosine"):
                return float(value)
            initial, *final = [float(number) for number in numbers] or [getattr(preset, "initial", preset)]
            if len(final) < 2 and isinstance(initial, float):
                return Schedule(initial, *(final or [0.0]), kind)
        raise ConfigError(
            f"{name}: {value!r} won't do; it must be a number, linear, or like linear_3e-4 or cosine_3e-4_0.1"
        )
    if isinstance(value, tuple) and name == "clip_range":
        return tuple(read_number(name, part, preset) for part in value)
    if isinstance(value, list | tuple):
        return np.asarray(value)
    if callable(value) and not isinstance(value, Schedule | jax.tree_util.Partial):
        return jax.tree_util.Partial(value)  # a pytree, which a function isn't
    return float(value) if type(value) is int else value  # or 1 and 1.0 would be compiled apart


def read_count(value: Any) -> Any:
    """Return the integer that 1e6 or "1e6" is, and anything else as it is."""
    if isinstance(value, int):
        return value
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if isinstance(value, str) and value.strip("+-").isdigit():
            return int(value)
        return int(float(value)) if float(value).is_integer() else value
    return value


def read_arguments(name: str, value: Any) -> Any:
    """Turn {"name": 1} or ["name=1"] into a sorted tuple of pairs, which a static field must be."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        if not all("=" in item for item in value):
            raise ConfigError(f"{name}: {' '.join(value)!r} won't do; it must be names with values, as in name=1")
        value = dict(item.split("=", 1) for item in value)
    if not isinstance(value, dict):
        return value
    read = {}
    for key, item in value.items():
        read[key] = item
        with contextlib.suppress(ValueError, SyntaxError):
            read[key] = ast.literal_eval(item) if isinstance(item, str) else item
    return tuple(sorted((key, tuple(item) if isinstance(item, list) else item) for key, item in read.items()))


@dataclasses.dataclass(frozen=True, init=False)
class PPOConfig:
    """All that a training run depends on besides its key; a pytree whose numbers are leaves.

    A field that isn't given has the value of the environment's preset (`PRESETS`), or else the default below. Names are
    those of Stable-Baselines3. Raises `ConfigError` for a value that can't work.
    """

    env: str | Environment = setting(
        "CartPole-v1", "A gymnax environment: its name or, in Python, itself.", "environment"
    )
    env_params: tuple = setting((), "The environment's own parameters, as in name=1.", "environment", "arguments")
    total_timesteps: int = setting(
        1_000_000, "Steps of an agent; the last rollout is completed.", "environment", "size"
    )
    n_envs: int = setting(64, "Environments that an agent steps side by side.", "environment", "size")
    n_steps: int = setting(128, "Steps of each environment in a rollout.", "environment", "size")
    frame_skip: int = setting(1, "Times that each action is repeated; rewards add up.", "environment", "size")
    normalize_obs: bool = setting(False, "Standardise observations, by running statistics.", "environment", "switch")
    normalize_reward: bool = setting(False, "Scale rewards by their return's deviation.", "environment", "switch")
    stats_window_size: int = setting(100, "Episodes that the reported return averages over.", "environment", "size")

    batch_size: int | None = setting(None, "Samples in a minibatch; None: a quarter of all.", "optimisation", "size")
    n_epochs: int = setting(4, "Passes over each rollout.", "optimisation", "size")
    learning_rate: float = setting(3e-4, "Step size; or a schedule, as all numbers.", "optimisation", "coefficient")
    max_grad_norm: float = setting(
        0.5, "Gradients of a larger global norm are scaled down.", "optimisation", "positive"
    )
    optimizer: str | Callable = setting("adam", "An optimiser of optax by name; in Python, itself.", "optimisation")
    optimizer_kwargs: tuple = setting((), "Its arguments, as in weight_decay=1e-4.", "optimisation", "arguments")

    gamma: float = setting(0.99, "Discount of the reward one step later.", "objective", "fraction")
    gae_lambda: float = setting(0.95, "Advantages: 0 is one-step, 1 is Monte Carlo.", "objective", "fraction")
    clip_range: float = setting(0.2, "The ratio is clipped to 1 ± clip_range; or low,high.", "objective", "positive")
    clip_range_vf: float | None = setting(None, "Largest change of a value; None: any.", "objective", "positive")
    normalize_advantage: bool = setting(True, "Standardise each minibatch's advantages.", "objective", "switch")
    ent_coef: float = setting(0.0, "Weight of the entropy bonus.", "objective", "coefficient")
    vf_coef: float = setting(0.5, "Weight of the value loss.", "objective", "coefficient")
    vf_loss: str = setting("mse", "Value loss: mse, or huber, linear beyond an error of 1.", "objective")
    target_kl: float | None = setting(None, "An update ends above 1.5 times this KL.", "objective", "positive")
    loss_function: Callable | None = setting(None, "In place of ppo_loss.", "python")
    advantage_function: Callable | None = setting(None, "In place of compute_gae.", "python")

    policy: str | nn.Module = setting(
        "auto", "mlp, cnn, nature_cnn, gru, lstm; auto: a CNN for images, else mlp.", "network"
    )
    net_arch: tuple[int, ...] = setting((64, 64), "Hidden layers, of policy and value each.", "network", "sizes")
    net_arch_vf: tuple[int, ...] | None = setting(None, "Those of the value alone, if others.", "network", "sizes")
    activation: str = setting("tanh", "tanh, relu, elu, gelu or silu, behind each of these.", "network")
    share_features_extractor: bool = setting(True, "One CNN or RNN for policy and value.", "network", "switch")
    rnn_hidden_size: int = setting(64, "Units of a gru or lstm.", "network", "size")
    sub_traj_len: int = setting(16, "Steps that a gru or lstm is trained through at once.", "network", "size")
    ortho_init: bool = setting(True, "Draw orthogonal weights, else Flax's default.", "network", "switch")
    log_std_init: float = setting(0.0, "Logarithm of a Gaussian's initial deviation.", "network", "number")
    squash_output: bool = setting(False, "Squash Gaussian actions to their bounds by tanh.", "network", "switch")
    use_sde: bool = setting(False, "Explore by noise that depends on the state (gSDE).", "network", "switch")
    sde_sample_freq: int = setting(-1, "Steps after which its noise is drawn anew; -1: a rollout.", "network", "period")

    def __init__(self, env: str | Environment = "CartPole-v1", **given: Any):
        fields = dataclasses.fields(self)
        for name in given.keys() - {field.name for field in fields}:
            raise ConfigError(f"{name}: no such setting{closest(name, [field.name for field in fields])}")
        if isinstance(given.get("net_arch"), dict):  # as in Stable-Baselines3
            arch = given["net_arch"]
            given = {"net_arch_vf": tuple(arch.get("vf", ()))} | given | {"net_arch": tuple(arch.get("pi", ()))}
        preset = PRESETS.get(env, {}) if isinstance(env, str) else {}
        values = {field.name: field.default for field in fields} | preset | {"env": env} | given
        for field in fields:
            name, rule, value = field.name, field.metadata["rule"], values[field.name]
            if rule in TRACED_RULES:
                standing = preset.get(name, field.default)
                value = read_number(name, value, read_number(name, standing))
            elif rule == "arguments":
                value = read_arguments(name, value)
            elif rule in COUNT_RULES:
                value = read_count(value)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check_config(self)

    def at(self, progress_remaining: chex.Numeric) -> PPOConfig:
        """Return a copy with each schedule's number when this share of the run remains."""
        config = _unflatten_config(*reversed(_flatten_config(self)))
        for name in TRACED:
            now = jax.tree.map(
                lambda x: x(progress_remaining) if callable(x) else x, getattr(self, name), is_leaf=callable
            )
            object.__setattr__(config, name, now)
        return config

    def replace(self, **changes: Any) -> PPOConfig:
        """Return a copy with some fields changed; the others stay, also where `env` is among the changes."""
        return dataclasses.replace(self, **changes)

    @property
    def env_name(self) -> str:
        """The environment's name, or its class's."""
        return self.env if isinstance(self.env, str) else type(self.env).__name__

    @property
    def rollout_size(self) -> int:
        """Samples in one rollout: n_envs * n_steps."""
        return self.n_envs * self.n_steps

    @property
    def minibatch_size(self) -> int:
        """Samples in one minibatch: batch_size, at most the rollout."""
        if self.batch_size is None:
            n_sequences = self.rollout_size // self.sequence_length
            return self.rollout_size // next(parts for parts in (4, 3, 2, 1) if n_sequences % parts == 0)
        return min(self.batch_size, self.rollout_size)

    @property
    def n_minibatches(self) -> int:
        """Minibatches in one epoch."""
        return self.rollout_size // self.minibatch_size

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy remembers earlier steps."""
        return self.policy in RECURRENT

    @property
    def sequence_length(self) -> int:
        """Steps that stay together when a rollout is shuffled: sub_traj_len of a recurrent policy, else 1."""
        return self.sub_traj_len if self.is_recurrent else 1

    @property
    def noise_steps(self) -> int:
        """Steps for which the policy's noise is kept: sde_sample_freq of gSDE, else 1."""
        if not self.use_sde:
            return 1
        return self.n_steps if self.sde_sample_freq == -1 else self.sde_sample_freq

    @property
    def n_updates(self) -> int:
        """Updates in a run of `train`: enough rollouts for total_timesteps, the last one completed."""
        return -(-self.total_timesteps // self.rollout_size)


TRACED = [field.name for field in dataclasses.fields(PPOConfig) if field.metadata["rule"] in TRACED_RULES]
STATIC = [field.name for field in dataclasses.fields(PPOConfig) if field.metadata["rule"] not in TRACED_RULES]


def _flatten_config(config: PPOConfig) -> tuple[list, tuple]:
    return [getattr(config, name) for name in TRACED], tuple(getattr(config, name) for name in STATIC)


def _flatten_with_keys(config: PPOConfig) -> tuple[list, tuple]:
    traced, static = _flatten_config(config)
    return [(jax.tree_util.GetAttrKey(name), value) for name, value in zip(TRACED, traced)], static


def _unflatten_config(static: tuple, traced: list) -> PPOConfig:
    config = object.__new__(PPOConfig)  # past __init__: leaves may be tracers, axes or shapes here
    for name, value in zip(STATIC + TRACED, [*static, *traced]):
        object.__setattr__(config, name, value)
    return config


jax.tree_util.register_pytree_with_keys(PPOConfig, _flatten_with_keys, _unflatten_config, _flatten_config)


def closest(name: str, known: list[str]) -> str:
    """Return "; did you mean …?" with the known names nearest to `name`, or "" where none is near."""
    lower = {candidate.lower(): candidate for candidate in known}
    near = [lower[match] for match in difflib.get_close_matches(str(name).lower(), lower, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def check_fields(owner: Any) -> None:
    """Raise `ConfigError` at the first `setting` that breaks its rule; traced values are passed over."""
    for field in dataclasses.fields(owner):
        value, rule = getattr(owner, field.name), field.metadata["rule"]
        if rule is None or (field.default is None and value is None):
            continue
        holds, right = RULES[rule]
        for number in value if rule in TRACED_RULES and isinstance(value, tuple) else (value,):  # a pair
            number = getattr(number, "initial", number)
            unknown = isinstance(number, jax.core.Tracer | jax.tree_util.Partial)
            if not unknown and not holds(number):
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
    if isinstance(config.clip_range, tuple) and len(config.clip_range) != 2:
        raise ConfigError(f"clip_range: {config.clip_range} won't do; it must be a number or a pair, low and high")
    for name, known in (("policy", POLICIES), ("activation", (*ACTIVATIONS,)), ("vf_loss", ("mse", "huber"))):
        value = getattr(config, name)
        if value not in known and (isinstance(value, str) or name != "policy"):
            near = closest(value, known)
            raise ConfigError(f"{name}: {value!r} is unknown; it must be one of {', '.join(known)}{near}")
    if isinstance(config.optimizer, str) and not callable(getattr(optax, config.optimizer, None)):
        raise ConfigError(f"optimizer: optax has no {config.optimizer!r}{closest(config.optimizer, dir(optax))}")
    if config.n_steps % config.sequence_length:
        near = nearest_divisors(config.sub_traj_len, config.n_steps)
        raise ConfigError(
            f"sub_traj_len: {config.sub_traj_len} doesn't divide n_steps = {config.n_steps}; the nearest sizes that do "
            f"are {near}"
        )
    whole, part = config.rollout_size // config.sequence_length, config.minibatch_size / config.sequence_length
    if config.rollout_size % config.minibatch_size or part != int(part):
        near = nearest_divisors(part, whole, config.sequence_length)
        windows = f" in windows of sub_traj_len = {config.sub_traj_len} steps" * config.is_recurrent
        raise ConfigError(
            f"batch_size: {config.batch_size} doesn't divide the rollout of n_envs * n_steps = {config.rollout_size} "
            f"samples{windows}; the nearest sizes that do are {near}"
        )
    if config.use_sde and config.sde_sample_freq > config.n_steps:
        raise ConfigError(f"sde_sample_freq: {config.sde_sample_freq} is above n_steps = {config.n_steps}")


def nearest_divisors(wanted: float, whole: int, unit: int = 1) -> str:
    """Return the divisors of `whole` next to `wanted` from below and above, in words, times `unit`."""
    below = next(n for n in range(min(whole, max(1, math.floor(wanted))), 0, -1) if whole % n == 0)
    above = next((n for n in range(max(1, math.ceil(wanted)), whole + 1) if whole % n == 0), whole)
    return " and ".join(str(unit * n) for n in dict.fromkeys([below, above]))


# What differs from the defaults above, by environment; those without an entry train with the defaults. CartPole's and
# Pendulum's settings were tuned until the tests of learning passed with room; the others are of usual sizes.
CARTPOLE = dict(total_timesteps=300_000, n_envs=32, n_steps=32, n_epochs=8, gamma=0.98, gae_lambda=0.9)
CARTPOLE |= dict(learning_rate="linear_1e-3")
MINATAR = dict(total_timesteps=10_000_000, learning_rate="linear_1e-3", ent_coef=0.01, net_arch=())
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
    """Return the environment of a config and its parameters, with `env_params` put in.

    Raises `ConfigError` where it can't be made, has no such parameter, or has spaces that the policy can't serve.
    """
    env, env_params = (
        _make_gymnax(config.env) if isinstance(config.env, str) else (config.env, config.env.default_params)
    )
    for name, value in config.env_params:
        known = [field.name for field in dataclasses.fields(env_params)]
        if name not in known:
            raise ConfigError(
                f"env_params: {config.env!r} has no {name}{closest(name, known)}; it has {', '.join(known)}"
            )
        default = getattr(env_params, name)
        if isinstance(default, int | float):
            if not isinstance(value, int | float) or type(default)(value) != value:
                right = "a whole number" if isinstance(default, int) else "a number"
                raise ConfigError(f"env_params: {name}={value!r} won't do; it must be {right}, as {default} is")
            value = type(default)(value)
        env_params = dataclasses.replace(env_params, **{name: value})
    if isinstance(config.policy, str):
        check_spaces(config, env.observation_space(env_params), env.action_space(env_params))
    return env, env_params


def check_spaces(config: PPOConfig, obs_space: Any, action_space: Any) -> None:
    """Raise `ConfigError` where the policy can't serve an environment's spaces."""
    parts = leaf_spaces(obs_space).values()
    for space in parts:
        if not (is_discrete(space) or is_box(space) or action_sizes(space)):
            raise ConfigError(f"env: {config.env!r} has observations in {space}; it must be of Discrete and Box spaces")
        smallest = {"cnn": 3, "nature_cnn": 36}.get(config.policy, 0)
        if smallest and not is_image(space, smallest) and (len(parts) == 1 or is_image(space)):
            raise ConfigError(
                f"policy: {config.policy!r} needs images (height, width, channels) from {smallest} by {smallest} on, "
                f"and {config.env!r} shows {space}; use mlp"
            )
    if not (is_discrete(action_space) or is_box(action_space) or action_sizes(action_space)):
        raise ConfigError(
            f"env: {config.env!r} has actions in {action_space}; it must be a Discrete, Box, MultiDiscrete or "
            "MultiBinary space, or a Tuple of Discrete ones"
        )
    for name in ("squash_output", "use_sde"):
        if getattr(config, name) and not is_box(action_space):
            raise ConfigError(f"{name}: True needs continuous actions and {config.env!r} has {action_space}")
    if config.squash_output and not (np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()):
        raise ConfigError(f"squash_output: True needs finite bounds and {config.env!r} has {action_space}")


# Spaces are told apart by what they have, so that those of gymnasium serve too, which gymnax has fewer of.
def is_discrete(space: Any) -> bool:
    """Tell whether a space is of the integers from 0 to n - 1."""
    return hasattr(space, "n") and space.shape == ()


def is_box(space: Any) -> bool:
    """Tell whether a space is of real vectors between bounds."""
    return hasattr(space, "low") and hasattr(space, "high")


def action_sizes(space: Any) -> tuple[int, ...]:
    """Return the number of choices of each part of a MultiDiscrete, MultiBinary or Tuple of Discrete space, else ()."""
    if hasattr(space, "nvec"):
        return tuple(int(n) for n in np.ravel(space.nvec))
    if hasattr(space, "n") and space.shape:
        return (2,) * math.prod(space.shape)
    parts = getattr(space, "spaces", ())
    return tuple(int(part.n) for part in parts) if not isinstance(parts, dict) and all(map(is_discrete, parts)) else ()


def leaf_spaces(space: Any) -> dict[str, Any]:
    """Return the spaces that a Dict or Tuple is made of, by path, without an action mask; any other under ""."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        return {"": space}
    named = parts.items() if hasattr(parts, "items") else enumerate(parts)
    return {
        f"{name}/{path}" if path else str(name): leaf
        for name, part in named
        if name != "action_mask"
        for path, leaf in leaf_spaces(part).items()
    }


def is_image(space: Any, smallest: int = 3) -> bool:
    """Tell whether observations have the three axes of an image, large enough for a filter."""
    return is_box(space) and len(space.shape) == 3 and min(space.shape[:2]) >= smallest


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
    task_id: jax.Array | None  # (N,) int32, of an environment with several tasks


def step_envs(
    env: Environment,
    env_params: Any,
    keys: jax.Array,
    states: Any,
    action: jax.Array,
    starts: tuple[Any, Any],
    squash_output: bool = False,
    frame_skip: int = 1,
) -> Step:
    """Step N environments; where an episode ends, the next one begins with the observation and state of `starts`.

    keys: (N,); states: (N, …); action: (N, …), as a policy samples it; starts: what `reset_envs` returns. The step of
    gymnax draws a reset within, which takes longer than all the rest of a small environment's step. An environment
    that brings a step of its own keeps it. frame_skip: the action is repeated, up to the end of the episode.
    """
    action = environment_action(env.action_space(env_params), action, squash_output)
    moment = step_once(env, env_params, keys, states, action)
    for repeat in range(1, frame_skip):
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, repeat)
        later = step_once(env, env_params, keys, moment.states, action)
        later = later._replace(reward=moment.reward + later.reward)
        moment = choose(moment.terminated | moment.truncated, moment, later)
    if resets_itself(env):
        return moment
    done = moment.terminated | moment.truncated
    obs, states = choose(done, starts, (moment.final_obs, moment.states))
    return moment._replace(obs=obs, states=states)


def step_once(env: Environment, env_params: Any, keys: jax.Array, states: Any, action: chex.ArrayTree) -> Step:
    """Step N environments, which stay where they are at an episode's end unless their step is their own."""
    if resets_itself(env):
        obs, new_states, reward, terminated, truncated, info = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            keys, states, action, env_params
        )
        final_obs = info["final_observation"]
    else:
        obs, new_states, reward, terminated, info = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))(
            keys, states, action, env_params
        )
        final_obs = obs
        truncated = jax.vmap(env.is_truncated, in_axes=(0, None))(new_states, env_params)
    new_states = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), states, new_states)
    ends = terminated, truncated & ~terminated
    return Step(obs, new_states, reward.astype(jnp.float32), *ends, final_obs, info.get("task_id"))


def environment_action(action_space: Any, action: jax.Array, squash_output: bool = False) -> chex.ArrayTree:
    """Turn actions as a policy samples them, (N,) or (N, A), into those that the environment takes."""
    if is_box(action_space):
        low, high = jnp.asarray(action_space.low), jnp.asarray(action_space.high)
        action = action.reshape((*action.shape[:-1], *action_space.shape))
        if squash_output:
            action = low + (jnp.tanh(action) + 1) / 2 * (high - low)
        return jnp.clip(action, low, high)
    if hasattr(action_space, "spaces"):
        return tuple(action[..., i] for i in range(action.shape[-1]))
    return action.reshape((*action.shape[:1], *action_space.shape))


def resets_itself(env: Environment) -> bool:
    """Tell whether an environment's step is its own rather than gymnax's."""
    return type(env).step is not Environment.step


def choose(mask: jax.Array, yes: chex.ArrayTree, no: chex.ArrayTree) -> chex.ArrayTree:
    """Take each row (N, …) of two trees from the first where `mask` (N,) is true."""
    return jax.tree.map(lambda x, y: jnp.where(expand(mask, x), x, y), yes, no)


def expand(mask: jax.Array, like: jax.Array) -> jax.Array:
    """Give `mask` trailing axes of size 1 until it broadcasts against `like`."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


# ======================================================================================================================
# 3. Distributions and networks
# ======================================================================================================================


# Each has `noise` (what `sample` needs, drawn for `lead` samples at once), `sample`, `mode`, `log_prob` and `entropy`.
@flax.struct.dataclass
class Categorical:
    """A distribution over the actions 0 … A - 1, given by unnormalised log-probabilities (…, A)."""

    logits: jax.Array

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw standard Gumbel noise (*lead, …, A)."""
        return jax.random.gumbel(key, (*lead, *self.logits.shape))

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

    def entropy(self, action: jax.Array) -> jax.Array:
        """Return the entropy (…,) in nats; it doesn't depend on the action."""
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


@flax.struct.dataclass
class MultiCategorical:
    """Independent categorical distributions: logits (…, sum of sizes), actions (…, number of sizes)."""

    logits: jax.Array
    sizes: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw standard Gumbel noise (*lead, …, sum of sizes)."""
        return jax.random.gumbel(key, (*lead, *self.logits.shape))

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions by the Gumbel-max trick."""
        return MultiCategorical(self.logits + noise, self.sizes).mode()

    def mode(self) -> jax.Array:
        """Return the most probable actions."""
        return jnp.stack([part.mode() for part in self._parts()], axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-probability (…,) of actions, the sum over their parts."""
        return sum(part.log_prob(action[..., i]) for i, part in enumerate(self._parts()))

    def entropy(self, action: jax.Array) -> jax.Array:
        """Return the entropy (…,) in nats, the sum over the parts; it doesn't depend on the action."""
        return sum(part.entropy(action) for part in self._parts())

    def _parts(self) -> list[Categorical]:
        return [Categorical(part) for part in jnp.split(self.logits, np.cumsum(self.sizes)[:-1], axis=-1)]


@flax.struct.dataclass
class DiagonalGaussian:
    """Independent normal distributions: mean (…, A), log_std (A,) or (…, A)."""

    mean: jax.Array
    log_std: jax.Array

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw standard normal noise (*lead, …, A)."""
        return jax.random.normal(key, (*lead, *self.mean.shape))

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions (…, A)."""
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> jax.Array:
        """Return the most probable actions, the means."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-density (…,) of actions (…, A)."""
        standard = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * standard**2 - self.log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self, action: jax.Array) -> jax.Array:
        """Return the entropy (…,) in nats; it doesn't depend on the action."""
        terms = self.log_std + 0.5 * math.log(2 * math.pi * math.e)
        return jnp.sum(jnp.broadcast_to(terms, self.mean.shape), axis=-1)

    def marginal(self) -> DiagonalGaussian:
        """Return itself."""
        return self


@flax.struct.dataclass
class StateDependentGaussian:
    """Exploration by a matrix of noise that is kept for several steps: action = mean + features @ matrix.

    mean: (…, A); features: (…, F); log_std: (F, A), of the matrix's entries. Raffin et al., "Smooth Exploration for
    Robotic Reinforcement Learning", 2021, https://arxiv.org/abs/2005.05719; no gradient flows through the features'
    part in the deviation, as in Stable-Baselines3.
    """

    mean: jax.Array
    features: jax.Array
    log_std: jax.Array

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw standard normal noise (*lead, …, F, A)."""
        return jax.random.normal(key, (*lead, *self.mean.shape[:-1], *self.log_std.shape))

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions (…, A) for matrices (…, F, A)."""
        return self.mean + jnp.einsum("...f,...fa->...a", self.features, noise * jnp.exp(self.log_std))

    def mode(self) -> jax.Array:
        """Return the most probable actions, the means."""
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-density (…,) of actions (…, A), over all matrices."""
        return self.marginal().log_prob(action)

    def entropy(self, action: jax.Array) -> jax.Array:
        """Return the entropy (…,) in nats, over all matrices; it doesn't depend on the action."""
        return self.marginal().entropy(action)

    def marginal(self) -> DiagonalGaussian:
        """Return the distribution of an action, over all matrices: equation 10 of the paper."""
        variance = jax.lax.stop_gradient(self.features) ** 2 @ jnp.exp(2 * self.log_std)
        return DiagonalGaussian(self.mean, 0.5 * jnp.log(variance + 1e-6))


@flax.struct.dataclass
class Squashed:
    """The tanh of a Gaussian. Its actions are those before the tanh, which nothing is lost of at the bounds."""

    gaussian: DiagonalGaussian | StateDependentGaussian

    def noise(self, key: jax.Array, *lead: int) -> jax.Array:
        """Draw what the Gaussian needs."""
        return self.gaussian.noise(key, *lead)

    def sample(self, noise: jax.Array) -> jax.Array:
        """Return actions (…, A) before the tanh."""
        return self.gaussian.sample(noise)

    def mode(self) -> jax.Array:
        """Return the Gaussian's most probable actions, before the tanh."""
        return self.gaussian.mode()

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Return the log-density (…,) of tanh(action): Haarnoja et al., 2018, https://arxiv.org/abs/1801.01290, C."""
        return self.gaussian.log_prob(action) - self._log_slope(action)

    def entropy(self, action: jax.Array) -> jax.Array:
        """Return the Gaussian's entropy (…,) and, of the tanh's part, which has no closed form, a one-sample estimate.

        action: the sample. It is written as mean + deviation * noise, so that a gradient sees how it would move.
        """
        marginal = self.gaussian.marginal()
        noise = jax.lax.stop_gradient((action - marginal.mean) * jnp.exp(-marginal.log_std))
        return marginal.entropy(action) + self._log_slope(marginal.sample(noise))

    def _log_slope(self, action: jax.Array) -> jax.Array:
        """Return the sum of log(1 - tanh(action)^2), in a form that stays finite."""
        return jnp.sum(2 * (math.log(2) - action - jax.nn.softplus(-2 * action)), axis=-1)


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


ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "elu": nn.elu, "gelu": nn.gelu, "silu": nn.silu}
RECURRENT = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}
POLICIES = ("auto", "mlp", "cnn", "nature_cnn", *RECURRENT)


class Convolution(nn.Module):
    """A convolution without padding, as one matrix product over shifted copies of the image.

    Same parameters and results as `nn.Conv`, whose gradient within a loop runs some thirty times slower on a CPU.
    """

    features: int
    size: int
    stride: int
    kernel_init: Callable

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        size, channels = self.size, images.shape[-1]
        kernel = self.param("kernel", self.kernel_init, (size, size, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        down, right = (
            [slice(i, i + length - size + 1, self.stride) for i in range(size)] for length in images.shape[-3:-1]
        )
        shifted = jnp.concatenate([images[..., rows, columns, :] for rows in down for columns in right], axis=-1)
        return shifted @ kernel.reshape(-1, self.features) + bias


class Encoder(nn.Module):
    """Observations (…, *shape) of a space to features (…, F), of a Dict or Tuple to those of its parts in a row."""

    obs_space: Any
    policy: str
    kernel_init: Callable

    @nn.compact
    def __call__(self, obs: chex.ArrayTree) -> jax.Array:
        space = self.obs_space
        if hasattr(space, "spaces"):
            names = sorted(space.spaces.keys() - {"action_mask"}) if hasattr(space.spaces, "keys") else range(len(obs))
            parts = [
                Encoder(space.spaces[name], self.policy, self.kernel_init, name=str(name))(obs[name]) for name in names
            ]
            return jnp.concatenate(parts, axis=-1)
        if is_discrete(space):
            return jax.nn.one_hot(obs, space.n)
        if sizes := action_sizes(space):
            return jnp.concatenate([jax.nn.one_hot(obs[..., i], n) for i, n in enumerate(sizes)], axis=-1)
        obs = obs / 255 if obs.dtype == jnp.uint8 and is_image(space) else obs.astype(jnp.float32)
        if not is_image(space) or self.policy == "mlp":
            return obs.reshape((*obs.shape[: obs.ndim - len(space.shape)], -1))
        return (self.nature if self.policy == "nature_cnn" else self.minatar)(obs)

    def minatar(self, images: jax.Array) -> jax.Array:
        """Return 128 features (…, 128) of images: the network of MinAtar, with strided layers for larger ones.

        Young and Tian, "MinAtar", 2019, https://arxiv.org/abs/1903.03176, section 3: 16 filters of 3 x 3, 128 units.
        """
        features, layer = nn.relu(Convolution(16, 3, 1, self.kernel_init, name="conv_0")(images)), 1
        while min(features.shape[-3:-1]) > 12:
            features = nn.relu(Convolution(16, 3, 2, self.kernel_init, name=f"conv_{layer}")(features))
            layer += 1
        return self.dense(features, 128)

    def nature(self, images: jax.Array) -> jax.Array:
        """Return 512 features (…, 512) of images: Mnih et al., 2015, https://www.nature.com/articles/nature14236."""
        for layer, (features, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            images = nn.relu(Convolution(features, size, stride, self.kernel_init, name=f"conv_{layer}")(images))
        return self.dense(images, 512)

    def dense(self, images: jax.Array, width: int) -> jax.Array:
        """Return `width` features of images, through one layer."""
        flat = images.reshape((*images.shape[:-3], -1))
        return nn.relu(nn.Dense(width, kernel_init=self.kernel_init, name="features")(flat))


class Memory(nn.Module):
    """A GRU or LSTM cell: one step, or T of them where `starts` tells which begin an episode."""

    cell: str
    hidden_size: int

    @nn.compact
    def __call__(self, features: jax.Array, memory: Any, starts: jax.Array | None) -> tuple[jax.Array, Any]:
        cell = RECURRENT[self.cell](self.hidden_size, recurrent_kernel_init=orthogonal(1.0), name=self.cell)

        def step(cell: nn.Module, memory: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, Any]]:
            features, starts = now
            memory, output = cell(forget(memory, starts), features)
            return memory, (output, memory)

        if starts is None:
            memory, output = cell(memory, features)
            return output, memory
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(cell, memory, (features, starts))[1]


def forget(memory: chex.ArrayTree, starts: jax.Array) -> chex.ArrayTree:
    """Return a memory that is empty where an episode starts."""
    return jax.tree.map(lambda x: jnp.where(expand(starts, x), 0.0, x), memory)


class ActorCritic(nn.Module):
    """A policy and a value function: observations (…, *obs_shape) to a distribution over actions and values (…,).

    The two share what the encoder gives, unless the config says otherwise, and nothing behind it. A recurrent policy
    takes a memory too, for one step or, with `starts` (T, N), for observations (T, N, …), and returns the memory after
    each step. The entry "action_mask" (…, A) of a dictionary of observations is False for actions that can't be taken.
    """

    obs_space: Any
    action_space: Any
    config: PPOConfig

    @nn.compact
    def __call__(self, obs: chex.ArrayTree, memory: Any = None, starts: jax.Array | None = None) -> tuple:
        config = self.config
        init = orthogonal if config.ortho_init else lambda scale: nn.linear.default_kernel_init
        features, memories = [], []
        for name in ("shared",) if config.share_features_extractor else ("policy", "value"):
            encoder = Encoder(self.obs_space, config.policy, init(math.sqrt(2)), name=f"{name}_encoder")
            encoded = encoder(obs)
            if config.is_recurrent:
                cell = Memory(config.policy, config.rnn_hidden_size, name=f"{name}_memory")
                encoded, remembered = cell(encoded, memory[len(memories)], starts)
                memories.append(remembered)
            features.append(encoded)

        latents = []
        value_arch = config.net_arch if config.net_arch_vf is None else config.net_arch_vf
        for head, arch, latent in (("policy", config.net_arch, features[0]), ("value", value_arch, features[-1])):
            for layer, width in enumerate(arch):
                latent = nn.Dense(width, kernel_init=init(math.sqrt(2)), name=f"{head}_{layer}")(latent)
                latent = ACTIVATIONS[config.activation](latent)
            latents.append(latent)
        value = nn.Dense(1, kernel_init=init(1.0), name="value_out")(latents[1])[..., 0]
        if is_box(self.action_space):
            distribution = self.gaussian(latents[0], init(0.01))
        else:
            sizes = action_sizes(self.action_space)
            width = sum(sizes) or int(self.action_space.n)
            logits = nn.Dense(width, kernel_init=init(0.01), name="policy_out")(latents[0])
            if isinstance(obs, dict) and "action_mask" in obs:
                logits = jnp.where(obs["action_mask"], logits, IMPOSSIBLE)
            distribution = MultiCategorical(logits, sizes) if sizes else Categorical(logits)
        return (distribution, value, tuple(memories)) if config.is_recurrent else (distribution, value)

    def gaussian(
        self, latent: jax.Array, kernel_init: Callable
    ) -> DiagonalGaussian | StateDependentGaussian | Squashed:
        """Return the distribution over continuous actions."""
        config, width = self.config, math.prod(self.action_space.shape)
        mean = nn.Dense(width, kernel_init=kernel_init, name="policy_out")(latent)
        shape = (latent.shape[-1], width) if config.use_sde else (width,)
        log_std = self.param("log_std", nn.initializers.constant(config.log_std_init), shape)
        if config.use_sde:
            distribution = StateDependentGaussian(mean, latent, log_std)
        else:
            distribution = DiagonalGaussian(mean, log_std)
        return Squashed(distribution) if config.squash_output else distribution

    def empty_memory(self, n_envs: int) -> tuple:
        """Return what a recurrent policy remembers at the start of an episode, zeros (n_envs, …)."""
        config, zeros = self.config, jnp.zeros((n_envs, self.config.rnn_hidden_size))
        n_memories = 1 if config.share_features_extractor else 2
        return ((zeros, zeros) if config.policy == "lstm" else zeros,) * n_memories


IMPOSSIBLE = -1e9  # the logit of a masked action: e^-1e9 is 0, and 0 * -1e9 is a number


class SeparateModules(nn.Module):
    """Two Flax modules of the user's: observations to a distribution, and to values."""

    actor: nn.Module
    critic: nn.Module

    def __call__(self, obs: chex.ArrayTree) -> tuple[Any, jax.Array]:
        return self.actor(obs), self.critic(obs)


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
    # The following are None where the config doesn't ask for them, and then no part of the compiled program.
    memory: chex.ArrayTree | None  # (N, …), what a recurrent policy remembers
    obs_statistics: chex.ArrayTree | None  # of normalize_obs: RunningStatistics for each array of an observation
    discounted_return: jax.Array | None  # (N,), of normalize_reward
    return_statistics: RunningStatistics | None  # of discounted_return


class Rollout(NamedTuple):
    """What T steps of N environments gave; every array but the memory is (T, N, …)."""

    obs: chex.ArrayTree
    action: jax.Array  # as sampled, before any clipping to the bounds
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: chex.ArrayTree  # what the step led to, before any reset
    task_id: jax.Array | None = None  # of an environment with several tasks
    memory: chex.ArrayTree | None = None  # (N, …), of a recurrent policy before the first step


class Batch(NamedTuple):
    """The samples that the loss is computed on.

    Every array is (samples, …); of a recurrent policy (windows, sub_traj_len, …), in a minibatch time first.
    """

    obs: chex.ArrayTree  # as the network sees them, normalised if the config says so
    action: jax.Array
    log_prob: jax.Array  # of the policy that acted
    value: jax.Array  # by the value function of that time
    advantage: jax.Array
    value_target: jax.Array
    task_id: jax.Array | None = None
    starts: jax.Array | None = None  # of a recurrent policy: whether the step is the first of its episode
    memory: chex.ArrayTree | None = None  # (windows, …), of a recurrent policy at each window's start


@flax.struct.dataclass
class RunningStatistics:
    """Mean and variance (…) of all that was seen, and of how many samples it was."""

    count: jax.Array
    mean: jax.Array
    variance: jax.Array


def update_statistics(statistics: RunningStatistics, samples: jax.Array) -> RunningStatistics:
    """Take in samples (…, *mean's shape).

    Chan et al., 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", equation 2.1, with
    shares of the whole in place of counts, and differences from the mean so far in place of samples: float32 keeps its
    digits however many samples there are, and however far from 0.
    """
    difference = (samples - statistics.mean).reshape((-1, *statistics.mean.shape))
    count = statistics.count + len(difference)
    share = len(difference) / count
    shift = jnp.mean(difference, axis=0)
    variance = jnp.mean(jnp.square(difference - shift), axis=0)
    return RunningStatistics(
        count,
        statistics.mean + share * shift,
        statistics.variance + share * (variance - statistics.variance) + share * (1 - share) * jnp.square(shift),
    )


def is_normalized(leaf: jax.Array) -> bool:
    """Tell whether an array of observations is of real numbers, rather than of pixels, categories or a mask."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def take_in(obs: jax.Array, statistics: RunningStatistics) -> RunningStatistics:
    """Update the statistics of an array of observations (T, N, …), if it is normalised."""
    return update_statistics(statistics, obs) if is_normalized(obs) else statistics


def normalize_obs(statistics: chex.ArrayTree | None, obs: chex.ArrayTree) -> chex.ArrayTree:
    """Return observations standardised and clipped to ±10, as VecNormalize of Stable-Baselines3 does, or as given."""
    if statistics is None:
        return obs

    def normalized(x: jax.Array, seen: RunningStatistics) -> jax.Array:
        if not is_normalized(x):
            return x
        return jnp.clip((x - seen.mean) * jax.lax.rsqrt(seen.variance + 1e-8), -10.0, 10.0)

    return jax.tree.map(normalized, obs, statistics)


def normalize_reward(config: PPOConfig, agent: Agent, rollout: Rollout) -> tuple[Agent, Rollout]:
    """Divide a rollout's rewards by the standard deviation of the discounted return so far, and clip them to ±10.

    Engstrom et al., "Implementation Matters in Deep Policy Gradients", 2020, https://arxiv.org/abs/2005.12729, with
    the constants of Stable-Baselines3's VecNormalize. The returns that are reported stay raw.
    """

    def step(total: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = config.gamma * total + now[0]
        return jnp.where(now[1], 0.0, total), total

    done = rollout.terminated | rollout.truncated
    last, totals = jax.lax.scan(step, agent.discounted_return, (rollout.reward, done))
    seen = update_statistics(agent.return_statistics, totals)
    reward = jnp.clip(rollout.reward * jax.lax.rsqrt(seen.variance + 1e-8), -10.0, 10.0)
    return agent.replace(discounted_return=last, return_statistics=seen), rollout._replace(reward=reward)


def make_network(config: PPOConfig) -> nn.Module:
    """Return the module that `params` belong to: observations to (distribution, values)."""
    env, env_params = make_env(config)
    if isinstance(config.policy, nn.Module):
        return config.policy
    if isinstance(config.policy, tuple):
        return SeparateModules(*config.policy)
    return ActorCritic(env.observation_space(env_params), env.action_space(env_params), config)


def apply_network(network: nn.Module, params: chex.ArrayTree, obs: chex.ArrayTree, memory: Any = None) -> tuple:
    """Return distribution, values and memory after one step, for observations (…, *obs_shape) and a memory or None."""
    return network.apply(params, obs, memory) if memory is not None else (*network.apply(params, obs), None)


def make_optimizer(config: PPOConfig) -> optax.GradientTransformation:
    """Return the optimiser behind a clip of the global norm; Adam has the epsilon of the PPO authors' code."""
    if callable(config.learning_rate):  # which optax would take for a function of its own count
        raise ConfigError(f"learning_rate: {config.learning_rate} is a schedule; config.at(progress) has its number")
    arguments = {"eps": 1e-5} if config.optimizer == "adam" else {}
    optimizer = getattr(optax, config.optimizer) if isinstance(config.optimizer, str) else config.optimizer
    try:
        optimizer = optimizer(config.learning_rate, **arguments | dict(config.optimizer_kwargs))
    except TypeError as error:
        raise ConfigError(
            f"optimizer_kwargs: {dict(config.optimizer_kwargs)} for {config.optimizer}: {error}"
        ) from error
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)


def init_agent(config: PPOConfig, key: jax.Array) -> Agent:
    """Return an untrained agent with its environments reset."""
    config = config.at(1.0)
    env, env_params = make_env(config)
    key, network_key, reset_key = jax.random.split(key, 3)
    obs, env_states = reset_envs(env, env_params, jax.random.split(reset_key, config.n_envs))
    network = make_network(config)
    memory = network.empty_memory(config.n_envs) if config.is_recurrent else None
    params = network.init(network_key, obs) if memory is None else network.init(network_key, obs, memory)

    def unseen(x: jax.Array) -> RunningStatistics:
        shape = x.shape[1:] if is_normalized(x) else ()
        return RunningStatistics(jnp.float32(0), jnp.zeros(shape), jnp.ones(shape))

    return Agent(
        params=params,
        opt_state=make_optimizer(config).init(params),
        key=key,
        n_updates=jnp.int32(0),
        obs=obs,
        env_states=env_states,
        episode_return=jnp.zeros(config.n_envs),
        episode_length=jnp.zeros(config.n_envs),
        recent_returns=jnp.full(config.stats_window_size, jnp.nan, jnp.float32),
        recent_lengths=jnp.full(config.stats_window_size, jnp.nan, jnp.float32),
        memory=memory,
        obs_statistics=jax.tree.map(unseen, obs) if config.normalize_obs else None,
        discounted_return=jnp.zeros(config.n_envs) if config.normalize_reward else None,
        return_statistics=unseen(jnp.zeros(1)) if config.normalize_reward else None,
    )


def collect_rollout(config: PPOConfig, agent: Agent, key: jax.Array) -> tuple[Agent, Rollout]:
    """Let the policy act for n_steps in each environment.

    Returns the agent with its environments moved on, and a rollout of (n_steps, n_envs, …) arrays. Random numbers are
    drawn in blocks outside of the scan over steps, where each operation is paid for n_steps times: all actions' noise
    at once, and the states that new episodes start from for START_STEPS steps at a time.
    """
    env, env_params = make_env(config)
    network = make_network(config)
    distribution = jax.eval_shape(functools.partial(apply_network, network), agent.params, agent.obs, agent.memory)[0]
    noise_key, env_key = jax.random.split(key)
    noises = distribution.noise(noise_key, -(-config.n_steps // config.noise_steps))
    env_keys = jax.random.split(env_key, (config.n_steps, config.n_envs, 2))  # for the step and for the next start

    def step(carry: tuple[Any, Any, Any], given: tuple[Any, Any, Any]) -> tuple[tuple[Any, Any, Any], Rollout]:
        obs, env_states, memory = carry
        t, keys, starts = given
        seen = normalize_obs(agent.obs_statistics, obs)
        distribution, _, memory = apply_network(network, agent.params, seen, memory)
        action = distribution.sample(noises[t // config.noise_steps])
        new = step_envs(env, env_params, keys, env_states, action, starts, config.squash_output, config.frame_skip)
        moment = Rollout(obs, action, new.reward, new.terminated, new.truncated, new.final_obs, new.task_id)
        return (new.obs, new.states, forget(memory, new.terminated | new.truncated)), moment

    def block(carry: tuple[Any, Any, Any], given: tuple[Any, Any]) -> tuple[tuple[Any, Any, Any], Rollout]:
        times, keys = given
        starts = jax.vmap(functools.partial(reset_envs, env, env_params))(keys[:, :, 1])
        return jax.lax.scan(step, carry, (times, keys[:, :, 0], starts))

    length = next(steps for steps in range(START_STEPS, 0, -1) if config.n_steps % steps == 0)
    split = functools.partial(jax.tree.map, lambda x: x.reshape((-1, length, *x.shape[1:])))
    join = functools.partial(jax.tree.map, lambda x: x.reshape((-1, *x.shape[2:])))
    start = (agent.obs, agent.env_states, agent.memory)
    (obs, env_states, memory), rollout = jax.lax.scan(block, start, split((jnp.arange(config.n_steps), env_keys)))
    rollout = join(rollout)._replace(memory=agent.memory)
    return agent.replace(obs=obs, env_states=env_states, memory=memory), rollout


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

    agent: as it is after the rollout, since the last step's value target needs the observations that follow it. Of a
    recurrent policy, whose steps stay together, the arrays are (T * N / sub_traj_len, sub_traj_len, …).
    """
    network = make_network(config)
    see = functools.partial(normalize_obs, agent.obs_statistics)
    obs, starts, memories = see(rollout.obs), None, None
    if config.is_recurrent:
        done = rollout.terminated | rollout.truncated
        starts = jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]])  # rollout.memory is of the first step already
        distribution, value, memories = network.apply(agent.params, obs, rollout.memory, starts)
    else:
        distribution, value, _ = apply_network(network, agent.params, obs)
    last_value = apply_network(network, agent.params, see(agent.obs), agent.memory)[1]
    next_value = jnp.concatenate([value[1:], last_value[None]])
    # Where an episode was cut, the next row shows the start of another one.
    next_value = jax.lax.cond(
        jnp.any(rollout.truncated),
        lambda: jnp.where(
            rollout.truncated,
            apply_network(network, agent.params, see(rollout.final_obs), memories)[1],
            next_value,
        ),
        lambda: next_value,
    )
    advantage, value_target = (config.advantage_function or compute_gae)(
        rollout.reward,
        value,
        next_value,
        rollout.terminated,
        rollout.truncated,
        config.gamma,
        config.gae_lambda,
    )
    log_prob = distribution.log_prob(rollout.action)
    batch = Batch(obs, rollout.action, log_prob, value, advantage, value_target, rollout.task_id, starts)
    if not config.is_recurrent:
        return jax.tree.map(lambda x: x.reshape((config.rollout_size, *x.shape[2:])), batch)
    before = jax.tree.map(lambda first, x: jnp.concatenate([first[None], x[:-1]]), rollout.memory, memories)
    length = config.sub_traj_len
    windows = jax.tree.map(lambda x: x.reshape((-1, length, *x.shape[1:])).swapaxes(1, 2), batch)
    windows = windows._replace(memory=jax.tree.map(lambda x: x[::length], before))
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), windows)


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


def draw_minibatches(config: PPOConfig, key: jax.Array) -> jax.Array:
    """Return the samples of an update's minibatches, integers (n_epochs * n_minibatches, samples).

    Each epoch's are a partition of the rollout, shuffled anew; of a recurrent policy they count windows.
    """
    size = config.rollout_size // config.sequence_length
    keys = jax.random.split(key, config.n_epochs)
    orders = jax.vmap(shuffle, (0, None, None))(keys, jnp.arange(size), size)
    return orders.reshape((config.n_epochs * config.n_minibatches, -1))


def ppo_loss(
    params: chex.ArrayTree, config: PPOConfig, network: nn.Module, minibatch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a minibatch, a scalar, and what is reported of it.

    policy loss + ent_coef * (-entropy) + vf_coef * value loss, as in Stable-Baselines3: the value loss is a mean
    squared error without a further 1/2 and, with clip_range_vf, of the clipped prediction alone. The clipped surrogate
    is equation 7 of https://arxiv.org/abs/1707.06347; approx_kl is (r - 1) - log r, http://joschu.net/blog/kl-approx.html
    """
    if minibatch.memory is None:
        distribution, value = network.apply(params, minibatch.obs)
    else:
        distribution, value, _ = network.apply(params, minibatch.obs, minibatch.memory, minibatch.starts)
    log_ratio = distribution.log_prob(minibatch.action) - minibatch.log_prob
    ratio = jnp.exp(log_ratio)

    advantage = minibatch.advantage
    if config.normalize_advantage and advantage.size > 1:
        advantage = standardize(advantage, minibatch.task_id)
    below, above = config.clip_range if isinstance(config.clip_range, tuple) else (config.clip_range,) * 2
    clipped_ratio = jnp.clip(ratio, 1 - below, 1 + above)
    policy_loss = -jnp.mean(jnp.minimum(advantage * ratio, advantage * clipped_ratio))

    if config.clip_range_vf is not None:
        value = minibatch.value + jnp.clip(value - minibatch.value, -config.clip_range_vf, config.clip_range_vf)
    error = minibatch.value_target - value
    value_loss = jnp.mean(jnp.square(error) if config.vf_loss == "mse" else optax.losses.huber_loss(error))

    entropy = jnp.mean(distribution.entropy(minibatch.action))
    loss = policy_loss - config.ent_coef * entropy + config.vf_coef * value_loss
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": jnp.mean((ratio - 1) - log_ratio),
        "clip_fraction": jnp.mean(ratio != clipped_ratio),
    }


def standardize(advantage: jax.Array, task_id: jax.Array | None = None) -> jax.Array:
    """Return advantages minus their mean, over their unbiased standard deviation + 1e-8; within each task, if given."""
    if task_id is None:
        return (advantage - jnp.mean(advantage)) / (jnp.std(advantage, ddof=1) + 1e-8)
    size = advantage.size
    task = jnp.unique(task_id, size=size, return_inverse=True)[1].ravel()
    total = functools.partial(jax.ops.segment_sum, segment_ids=task, num_segments=size)
    count = total(jnp.ones(size))
    difference = advantage.ravel() - (total(advantage.ravel()) / jnp.maximum(count, 1))[task]
    deviation = jnp.sqrt(total(jnp.square(difference)) / jnp.maximum(count - 1, 1))
    return (difference / (deviation[task] + 1e-8)).reshape(advantage.shape)


class Progress(NamedTuple):
    """The state of an update between two minibatches."""

    params: chex.ArrayTree
    opt_state: optax.OptState
    minibatch: jax.Array  # () int32, the next one, counted through all epochs; n_epochs * n_minibatches ends the update
    n_seen: jax.Array  # () int32, minibatches looked at, the one that stopped the update included
    n_steps: jax.Array  # () int32, optimiser steps taken
    sums: dict[str, jax.Array]  # of what ppo_loss reports; of approx_kl within the latest epoch alone


def optimise(config: PPOConfig, agent: Agent, batch: Batch, key: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
    """Take the update's gradient steps: n_epochs passes over the batch, each in minibatches shuffled anew.

    batch: what `make_batch` returns. With target_kl, the first minibatch whose approximate KL divergence is above
    1.5 * target_kl takes no step and ends the update. Returns the agent and the minibatches' means of what `ppo_loss`
    reports (of approx_kl over the last epoch, as Stable-Baselines3 has it) and `optimizer_steps`, the number taken.
    """
    network = make_network(config)
    optimizer = make_optimizer(config)
    loss_function = config.loss_function or ppo_loss
    n_minibatches = config.n_minibatches
    minibatches = draw_minibatches(config, key)

    def unfinished(progress: Progress) -> jax.Array:
        return progress.minibatch < config.n_epochs * n_minibatches

    def step(progress: Progress) -> Progress:
        place = progress.minibatch % n_minibatches
        minibatch = jax.tree.map(lambda x: x[minibatches[progress.minibatch]], batch)
        if config.is_recurrent:
            by_time = jax.tree.map(lambda x: x.swapaxes(0, 1), minibatch._replace(memory=None))
            minibatch = by_time._replace(memory=minibatch.memory)
        gradients, report = jax.grad(loss_function, has_aux=True)(progress.params, config, network, minibatch)
        changes, opt_state = optimizer.update(gradients, progress.opt_state, progress.params)
        params = optax.apply_updates(progress.params, changes)

        kept = progress.sums | {"approx_kl": jnp.where(place == 0, 0.0, progress.sums["approx_kl"])}
        sums = jax.tree.map(jnp.add, kept, report)
        n_seen, n_steps = progress.n_seen + 1, progress.n_steps + 1
        following = Progress(params, opt_state, progress.minibatch + 1, n_seen, n_steps, sums)
        if config.target_kl is None:
            return following
        too_far = report["approx_kl"] > 1.5 * config.target_kl
        held = progress._replace(
            minibatch=jnp.full_like(progress.minibatch, config.n_epochs * n_minibatches), n_seen=n_seen, sums=sums
        )
        return jax.tree.map(functools.partial(jnp.where, too_far), held, following)

    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    none = jnp.int32(0)
    start = Progress(agent.params, agent.opt_state, none, none, none, {name: jnp.float32(0) for name in names})
    end = jax.lax.while_loop(unfinished, step, start)
    n_last_epoch = (end.n_seen - 1) % n_minibatches + 1
    means = {name: total / (n_last_epoch if name == "approx_kl" else end.n_seen) for name, total in end.sums.items()}
    return agent.replace(params=end.params, opt_state=end.opt_state), means | {"optimizer_steps": end.n_steps}


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
    timesteps = (agent.n_updates + 1) * config.rollout_size
    config = config.at(jnp.maximum(0.0, 1 - timesteps / config.total_timesteps))
    key, rollout_key, shuffle_key = jax.random.split(agent.key, 3)
    agent, rollout = collect_rollout(config, agent.replace(key=key), rollout_key)
    agent = episode_statistics(config, agent, rollout)
    if config.normalize_reward:
        agent, rollout = normalize_reward(config, agent, rollout)
    batch = make_batch(config, agent, rollout)
    agent, losses = optimise(config, agent, batch, shuffle_key)
    if config.normalize_obs:  # only now: rollout and update must see the same numbers
        agent = agent.replace(obs_statistics=jax.tree.map(take_in, rollout.obs, agent.obs_statistics))
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
    reset_key, noise_key, env_key = jax.random.split(key, 3)
    starts = reset_envs(env, env_params, jax.random.split(reset_key, n_episodes))  # of later episodes too: none counts
    memory = network.empty_memory(n_episodes) if config.is_recurrent else None

    def playing(carry: tuple) -> jax.Array:
        return ~jnp.all(carry[-1])

    def step(carry: tuple) -> tuple:
        t, obs, states, memory, returns, over = carry
        seen = normalize_obs(agent.obs_statistics, obs)
        distribution, _, memory = apply_network(network, agent.params, seen, memory)
        if deterministic:
            action = distribution.mode()
        else:
            action = distribution.sample(distribution.noise(jax.random.fold_in(noise_key, t // config.noise_steps)))
        keys = jax.random.split(jax.random.fold_in(env_key, t), n_episodes)
        new = step_envs(env, env_params, keys, states, action, starts, config.squash_output, config.frame_skip)
        returns = returns + jnp.where(over, 0.0, new.reward)
        return t + 1, new.obs, new.states, memory, returns, over | new.terminated | new.truncated

    start = (jnp.int32(0), *starts, memory, jnp.zeros(n_episodes), jnp.zeros(n_episodes, bool))
    return jax.lax.while_loop(playing, step, start)[-2]


# ======================================================================================================================
# 6. Populations
# ======================================================================================================================

CHUNK_UPDATES = 128  # at most, in one call of the device: what bounds the metrics that it holds
# On a CPU LLVM's later passes take a third of the compilation and make nothing faster here.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None


def spread(function: Callable, config: PPOConfig, agents: chex.ArrayTree, *shared: Any) -> Any:
    """Call `function(config, agent, *shared)` for each agent, the agents split between the local devices.

    agents: a tree of arrays with a leading axis of agents, of any length; a leaf of the config may have that axis too.
    No device waits for another one before all are through. The agents of one device run side by side, but on a CPU one
    after the other: a core gains nothing from larger arrays, and what one agent needs stays in its cache.
    """
    n_agents = len(jax.tree.leaves(agents)[0])
    chosen = jax.config.jax_default_device  # where the user, or --device, has chosen one
    devices = jax.local_devices(backend=chosen and chosen.platform)[:n_agents]
    rows = np.arange(-(-n_agents // len(devices)) * len(devices)) % n_agents  # a last device without work repeats some
    each = (jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, n_agents), config), agents)
    if len(rows) > n_agents:
        each = jax.tree.map(lambda x: x[rows], each)

    def per_device(each: tuple[PPOConfig, Any], shared: tuple) -> Any:
        def one_agent(given: tuple[PPOConfig, Any]) -> Any:
            return function(*given, *shared)

        return jax.lax.map(one_agent, each) if devices[0].platform == "cpu" else jax.vmap(one_agent)(each)

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
    start: jax.Array | Agent,
    callback: Callable[[int, dict[str, np.ndarray], Agent], bool | None] | None = None,
    callback_seconds: float = 0.5,
    run_dir: pathlib.Path | None = None,
    reset_num_timesteps: bool = False,
) -> tuple[Agent, dict[str, np.ndarray]]:
    """Train an agent for each key, the agents spread over the local devices: `jax.vmap(train, (None, 0))`, but faster.

    start: keys (S,), or agents of an earlier run, which go on to config.total_timesteps in all, or with
    reset_num_timesteps for as many more. Leaves of the config may have a leading axis of S too: each agent then has its
    own value, so hyperparameters and seeds are swept in one compilation. The run goes in chunks of updates, so that
    what the devices hold doesn't grow with it; chunks change no number. callback(timesteps, metrics, agents) is called
    with the chunk's metrics (S, updates) about every `callback_seconds`, and ends the run where it returns true; agents
    are valid until it returns. Returns agents and metrics as `train` does, with a leading axis of S; the metrics are
    NumPy arrays. On any exception what was learnt is saved in run_dir, or else in a temporary folder that the
    exception names. Raises `ConfigError` for leaves of another length and where nothing is left to train.
    """
    check_config(config)
    continued = isinstance(start, Agent)
    n_agents = len(start.key if continued else start)
    for name in TRACED:
        for value in jax.tree.leaves(getattr(config, name)):
            if np.ndim(value) and np.shape(value) != (n_agents,):
                raise ConfigError(
                    f"{name}: an array of shape {np.shape(value)}; for {n_agents} keys it must be ({n_agents},)"
                )
    if continued:  # copies, since chunks use up what they are given
        n_updates = jnp.zeros(n_agents, jnp.int32) if reset_num_timesteps else start.n_updates
        agents = jax.tree.map(jnp.copy, start.replace(n_updates=n_updates))
        check_unfinished(config, agents)
    else:
        agents = init_population(config, start)
    done = int(agents.n_updates[0])
    capacity = min(config.n_updates, CHUNK_UPDATES)
    size = 1 if callback else capacity
    history, stop = [], False
    try:
        while done < config.n_updates and not stop:
            n_updates = min(size, capacity, config.n_updates - done)
            begin = time.perf_counter()
            agents, metrics = train_chunk(config, agents, jnp.int32(n_updates), capacity)
            history.append({name: np.asarray(values)[:, :n_updates] for name, values in metrics.items()})
            done += n_updates
            if callback:
                pace = callback_seconds / (time.perf_counter() - begin)
                size = max(1, min(int(n_updates * pace), 2 * size))
                stop = callback(done * config.rollout_size, history[-1], agents)
    except BaseException as error:
        if history and not agents.n_updates.is_deleted():  # as they are where the device failed within a chunk
            folder = pathlib.Path(run_dir or tempfile.mkdtemp(prefix="ppo_jax-"))
            save_agents(folder, config, agents)
            error.add_note(f"What was learnt is in {folder}; load_agents reads it.")
        raise
    return agents, {name: np.concatenate([chunk[name] for chunk in history], axis=1) for name in METRICS}


def check_unfinished(config: PPOConfig, agents: Agent) -> None:
    """Raise `ConfigError` where agents (S, …) have done all that the config asks for."""
    done = int(agents.n_updates[0]) * config.rollout_size
    if done >= config.total_timesteps:
        raise ConfigError(
            f"total_timesteps: {config.total_timesteps} and {done} are done; it must be above these, or "
            "reset_num_timesteps be set"
        )


def save_agents(run_dir: str | pathlib.Path, config: PPOConfig, agents: Agent, **run: Any) -> None:
    """Write agents whole, from networks to keys, and config.json with `run`, what else there is to say of the run.

    run_dir: a folder, made if there is none. The agents become an Orbax checkpoint in it; an older one goes once the
    new one stands.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(run_dir).absolute() / "checkpoint"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_config(path.parent, config, n_seeds=len(agents.key), **run)
    fresh = path.with_name("checkpoint.new")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(fresh, jax.device_get(named_leaves(agents)), force=True)
    if path.exists():
        shutil.rmtree(path)
    fresh.rename(path)


def load_agents(run_dir: str | pathlib.Path, config: PPOConfig | None = None) -> tuple[PPOConfig, Agent]:
    """Read what `save_agents` wrote: a config and agents, on the host.

    config: where it can't be read, because it holds objects of the user's. Raises `ConfigError` where something is
    missing, damaged or of another shape.
    """
    import orbax.checkpoint as ocp

    settings = read_settings(pathlib.Path(run_dir) / "config.json")
    if config is None:
        fields = [field.name for field in dataclasses.fields(PPOConfig)]
        config = PPOConfig(**{name: value for name, value in settings.items() if name in fields})
    path = pathlib.Path(run_dir).absolute() / "checkpoint"
    if not path.is_dir() or "n_seeds" not in settings:
        raise ConfigError(f"checkpoint: {path} with a config.json beside it must be what a training run left")
    keys = jax.random.split(jax.random.key(0), settings["n_seeds"])
    agents = jax.eval_shape(lambda keys: jax.vmap(init_agent, (None, 0))(config, keys), keys)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    expected = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for name, x in jax.eval_shape(named_leaves, agents).items()
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = dict(checkpointer.metadata(path).item_metadata.tree)
            for name in sorted(expected.keys() | stored.keys()):
                has, needs = (tuple(of[name].shape) if name in of else "nothing" for of in (stored, expected))
                if has != needs:
                    raise ConfigError(f"checkpoint: {path} holds {has} as {name} where config.json says {needs}")
            # From a device they would be bound to it, and could not be spread over all.
            restored = jax.device_get(checkpointer.restore(path, expected))
    except ConfigError:
        raise
    except Exception as error:  # Orbax and TensorStore raise all sorts of things for a damaged folder
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a task that Orbax left behind would log it once more
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"checkpoint: {path} is damaged ({reason}); it must be as the training run left it"
        ) from error

    def stored_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> Any:
        value = restored[leaf_name(path)]
        return jax.random.wrap_key_data(value) if is_key(leaf) else value

    return config, jax.tree_util.tree_map_with_path(stored_leaf, agents)


def named_leaves(tree: chex.ArrayTree) -> dict[str, jax.Array]:
    """Return each leaf by its path, keys as integers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path): jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in leaves}


def leaf_name(path: tuple) -> str:
    """Return a leaf's path in words."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_key(leaf: jax.Array) -> bool:
    """Tell whether an array is of keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def write_config(run_dir: pathlib.Path, config: PPOConfig, **run: Any) -> None:
    """Write config.json: what else there is to say of the run, and every setting by name."""
    settings = {name: plain_setting(value) for name, value in vars(config).items()}
    settings |= {name: dict(getattr(config, name)) for name in ("env_params", "optimizer_kwargs")}
    fresh = run_dir / "config.json.new"  # a full disk must not cost the one that is there
    fresh.write_text(json.dumps(run | settings, indent=2, default=str) + "\n")
    fresh.replace(run_dir / "config.json")


def plain_setting(value: Any) -> Any:
    """Return a setting as JSON can hold it and `PPOConfig` takes it, or the name of an object of the user's."""
    if isinstance(value, tuple) and value and isinstance(value[0], Schedule | float):
        return ",".join(str(part) for part in value)  # a pair of clip ranges
    if isinstance(value, str | int | float | tuple | None):
        return value
    return np.asarray(value).tolist() if isinstance(value, np.ndarray | np.generic | jax.Array) else str(value)


def read_settings(path: pathlib.Path) -> dict[str, Any]:
    """Read a file of settings, JSON or YAML; raises `ConfigError` where it can't be read."""
    import yaml

    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config: {path} can't be read ({reason}); it must be JSON or YAML") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"config: {path} holds {settings!r}; it must hold names with values, as in n_envs: 8")
    return settings


# ======================================================================================================================
# 7. Reporting
# ======================================================================================================================


def csv_rows(metrics: dict[str, np.ndarray], every: int = 1) -> list[list[Any]]:
    """Return metrics (S, updates) as rows, one an update: each metric's mean over seeds, then each seed's return.

    every: only those rows whose steps it divides.
    """
    means = [metrics["timesteps"][0], *(metrics[name].mean(axis=0) for name in METRICS if name != "timesteps")]
    rows = zip(*(column.tolist() for column in [*means, *metrics["return"]]))
    return [list(row) for row in rows if row[0] % every == 0]


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


class TensorBoardLog:
    """Scalars for TensorBoard, means over the seeds; raises `ConfigError` where tensorboardX isn't installed."""

    def __init__(self, folder: pathlib.Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("tensorboard_log: needs a package; pip install tensorboardX") from error
        self.writer = SummaryWriter(str(folder))

    def write(self, timesteps: int, scalars: dict[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in scalars.items():
            self.writer.add_scalar(f"ppo/{name}", value, timesteps)

    def close(self) -> None:
        """Write what is still held back."""
        self.writer.close()


class WandbLog:
    """The same for Weights & Biases, offline with WANDB_MODE=offline; raises `ConfigError` where it can't start."""

    def __init__(self, project: str, name: str, folder: pathlib.Path):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("wandb_project: needs a package; pip install wandb") from error
        settings = json.loads((folder / "config.json").read_text())
        try:
            self.run = wandb.init(project=project, name=name, dir=str(folder), config=settings)
        except Exception as error:  # no network, no key
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"wandb_project: {project!r} can't be reached ({reason}); WANDB_MODE=offline works"
            ) from error

    def write(self, timesteps: int, scalars: dict[str, float]) -> None:
        """Add a point to each curve."""
        self.run.log(scalars, step=timesteps)

    def close(self) -> None:
        """Write what is still held back."""
        self.run.finish()


class RunReport:
    """What a training run shows on the terminal and writes to its folder while it runs; a callback of train_population.

    `interrupted` is set by Ctrl-C and ends the run at the next chunk, with all that was learnt. A file that can't be
    written is reported and doesn't end the run. `callback` is the user's, called after all that.
    """

    checkpoint_seconds = 60.0

    def __init__(
        self,
        run_dir: pathlib.Path,
        config: PPOConfig,
        options: RunOptions,
        console: Any,
        callback: Callable | None = None,
    ):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.run_dir, self.config, self.options, self.n_seeds = run_dir, config, options, options.n_seeds
        self.callback = callback
        self.total = config.n_updates * config.rollout_size
        self.interrupted = False
        self.started = self.saved = time.perf_counter()
        self.start_seconds, self.first_steps = 0.0, 0  # until the first update is done, and the steps done then
        self.logs: list[Any] = []
        name = options.run_name or run_dir.name
        if options.tensorboard_log:
            self.logs.append(TensorBoardLog(pathlib.Path(options.tensorboard_log) / name))
        if options.wandb_project:
            self.logs.append(WandbLog(options.wandb_project, name, run_dir))
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TimeElapsedColumn())
        shown = options.verbose > 0 and options.progress_bar
        self.progress = Progress(*columns, TextColumn("{task.fields[status]}"), console=console, disable=not shown)
        self.task = self.progress.add_task("compiling", total=None, status="")

    def __call__(self, timesteps: int, metrics: dict[str, np.ndarray], agents: Agent) -> bool:
        now = time.perf_counter()
        if not self.first_steps:
            self.start_seconds, self.first_steps = now - self.started, timesteps
        try:
            self.show_progress(timesteps, metrics, now)
            self.append_metrics(metrics)
            if now - self.saved > self.checkpoint_seconds:
                save_agents(self.run_dir, self.config, agents, seed=self.options.seed)
                self.saved = time.perf_counter()
        except Exception as error:  # a closed pipe, a full disk, for which Orbax has errors of its own
            with contextlib.suppress(OSError):
                print(f"ppo_jax: {self.run_dir}: {error}; training goes on", file=sys.stderr)
        stop = self.callback(timesteps, metrics, agents) if self.callback else False
        return bool(self.interrupted or stop)

    def close(self) -> None:
        """Close the loggers."""
        for log in self.logs:
            log.close()

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
        if self.options.verbose > 1:
            means = "  ".join(f"{name} {metrics[name][:, -1].mean():.4g}" for name in METRICS)
            self.progress.console.print(means, soft_wrap=True)
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
        """Add a chunk's rows to metrics.csv and to the loggers."""
        rows = csv_rows(metrics, self.config.rollout_size * self.options.log_interval)
        with open(self.run_dir / "metrics.csv", "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(csv_header(self.n_seeds))
            writer.writerows(rows)
        for row in rows:
            known = {name: value for name, value in zip(METRICS[1:], row[1:]) if math.isfinite(value)}
            for log in self.logs:
                log.write(row[0], known)


# ======================================================================================================================
# 8. Command line
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What the command line decides besides a PPOConfig; raises `ConfigError` for a value that can't work."""

    seed: int = setting(0, "Key of the run.", "run", "whole")
    n_seeds: int = setting(4, "Agents to train side by side, each from a key of its own.", "run", "size")
    run_dir: str | None = setting(None, "New folder for the results; None: one under runs/, by run_name.", "run")
    run_name: str | None = setting(None, "Name of the run in all logs; None: environment and time.", "run")
    config: str | None = setting(None, "A file of settings, YAML or JSON; flags beat it.", "run")
    resume: str | None = setting(None, "Go on with the agents of this run folder, to total_timesteps.", "run")
    reset_num_timesteps: bool = setting(False, "With --resume: count steps and schedules from 0.", "run", "switch")
    eval: str | None = setting(None, "Play the agents of this run folder instead of training.", "run")
    n_episodes: int = setting(100, "Episodes that each agent plays with --eval.", "run", "size")
    verbose: int = setting(1, "0: nothing but errors, 1: progress and results, 2: all metrics.", "run", "whole")
    progress_bar: bool = setting(True, "Show progress while training.", "run", "switch")
    log_interval: int = setting(1, "Updates from one row of the logs to the next.", "run", "size")
    tensorboard_log: str | None = setting(None, "Folder of TensorBoard's logs; needs tensorboardX.", "run")
    wandb_project: str | None = setting(None, "Project in Weights & Biases; needs wandb.", "run")
    device: str = setting("auto", "Kind of device: auto, cpu, gpu or tpu.", "run")
    compilation_cache: bool = setting(True, "Keep compiled programs in the user's cache folder.", "run", "switch")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.metadata["rule"] in COUNT_RULES:
                object.__setattr__(self, field.name, read_count(getattr(self, field.name)))
        check_fields(self)
        for name, known in (("verbose", [0, 1, 2]), ("device", ["auto", "cpu", "gpu", "tpu"])):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is unknown; it must be one of {known}")


def parse_arguments(argv: list[str]) -> tuple[PPOConfig, RunOptions]:
    """Turn command-line arguments into a config and run options; raises `ConfigError`, or exits after --help."""
    import tyro

    # A file, the run to go on with and the environment decide the other defaults, so they are looked at first.
    settings = {}
    for name in ("resume", "config"):
        if given := given_value(argv, name):
            settings |= read_settings(pathlib.Path(given) / "config.json" if name == "resume" else pathlib.Path(given))
    known = [field.name for owner in (RunOptions, PPOConfig) for field in dataclasses.fields(owner)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"config: {name} is no setting{closest(name, known)}")
    run = {field.name: settings.pop(field.name) for field in dataclasses.fields(RunOptions) if field.name in settings}
    settings["env"] = given_value(argv, "env") or settings.get("env", "CartPole-v1")
    options, config = RunOptions(**run), PPOConfig(**settings)
    defaults = vars(options) | vars(config)

    groups: dict[str, list] = {}
    for owner in (RunOptions, PPOConfig):
        hints = typing.get_type_hints(owner) | (
            {"env": str, "policy": str, "optimizer": str} if owner is PPOConfig else {}
        )
        for field in dataclasses.fields(owner):
            hint, default = hints[field.name], defaults[field.name]
            if field.metadata["group"] == "python" or (np.ndim(default) and not isinstance(default, tuple)):
                continue
            if field.metadata["rule"] in TRACED_RULES + COUNT_RULES:
                hint |= str  # a schedule, or 1e6
                default = default if isinstance(default, int | float | None) else plain_setting(default)
            if field.metadata["rule"] == "arguments":
                hint, default = tuple[str, ...], tuple(f"{key}={value}" for key, value in default)
            annotated = typing.Annotated[hint, tyro.conf.arg(help=field.metadata["help"])]
            groups.setdefault(field.metadata["group"], []).append(
                (field.name, annotated, dataclasses.field(default=default))
            )
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
    return PPOConfig(**settings | values), options


def given_value(argv: list[str], name: str) -> str | None:
    """Return what follows a flag among the arguments, the last one of it."""
    flags = (f"--{name}", f"--{name.replace('_', '-')}")
    given = [arg.split("=", 1)[1] for arg in argv if arg.startswith(tuple(f"{flag}=" for flag in flags))]
    given += [after for arg, after in itertools.pairwise(argv) if arg in flags]
    return given[-1] if given else None


def new_run_dir(options: RunOptions, config: PPOConfig) -> pathlib.Path:
    """Create the run's folder; raises `ConfigError` where it can't be written or has something in it."""
    name = options.run_name or f"{config.env_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = pathlib.Path(options.run_dir or f"runs/{name}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise ConfigError(f"run_dir: {str(run_dir)!r} has something in it; it must be a new or an empty folder")
        write_config(run_dir, config, seed=options.seed, n_seeds=options.n_seeds)
    except OSError as error:
        raise ConfigError(
            f"run_dir: {str(run_dir)!r} can't be written ({error.strerror}); it must be a folder of yours"
        ) from error
    return run_dir


def save_run(run_dir: pathlib.Path, config: PPOConfig, options: RunOptions, agents: Agent, metrics: dict) -> None:
    """Write all that a finished run leaves, what took longest to learn first."""
    save_agents(run_dir, config, agents, seed=options.seed)
    with open(run_dir / "metrics.csv", "w", newline="") as file:
        rows = csv_rows(metrics, config.rollout_size * options.log_interval)
        csv.writer(file).writerows([csv_header(options.n_seeds), *rows])
    plot_learning_curve(run_dir / "learning_curve.png", f"PPO on {config.env_name}", metrics)


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


def run_training(config: PPOConfig, options: RunOptions, callback: Callable | None = None) -> int:
    """Train, show progress and leave a run folder; returns the exit code.

    callback: as `train_population` takes it. What it raises comes through, once what was learnt is saved.
    """
    from rich.console import Console

    make_env(config)
    start = jax.random.split(jax.random.key(options.seed), options.n_seeds)
    if options.resume:
        _, start = load_agents(options.resume, config)
        if len(start.key) != options.n_seeds:
            raise ConfigError(
                f"n_seeds: {options.n_seeds}, and {options.resume} has {len(start.key)} agents to go on with"
            )
        if not options.reset_num_timesteps:
            check_unfinished(config, start)
    run_dir = new_run_dir(options, config)
    console = Console(quiet=options.verbose == 0)
    console.on_broken_pipe = lambda: setattr(console, "quiet", True)  # rich's own would exit, with what was learnt
    handlers, report = {}, None
    try:
        report = RunReport(run_dir, config, options, console, callback)
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, report.interrupt)
        with report.progress:
            agents, metrics = train_population(
                config, start, report, run_dir=run_dir, reset_num_timesteps=options.reset_num_timesteps
            )
        end = time.perf_counter()
        kept_in = save_or_rescue(run_dir, config, options, agents, metrics)
    except (KeyboardInterrupt, ConfigError):  # before the handler is in place, or of a logger: nothing is learnt
        if not (run_dir / "checkpoint").exists():
            shutil.rmtree(run_dir)
        raise
    finally:
        if report:
            report.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    title = f"{config.env_name}, last {config.stats_window_size} episodes of training"
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
    config, agents = load_agents(run_dir)
    keys = jax.random.split(jax.random.key(options.seed), len(agents.key))
    play = functools.partial(_evaluate_one, n_episodes=options.n_episodes)
    returns = jax.jit(functools.partial(spread, play))(config, (agents, keys))
    title = f"{config.env_name}, mean of {options.n_episodes} episodes with the most probable actions"
    Console().print(summary_table(title, np.asarray(returns).mean(axis=1)))
    return 0


def choose_device(kind: str) -> None:
    """Make the devices of a kind those that JAX uses; raises `ConfigError` where there is none."""
    try:
        jax.config.update("jax_default_device", jax.local_devices(backend=kind)[0])
    except RuntimeError:
        found = sorted({device.platform for device in jax.local_devices()})
        raise ConfigError(f"device: {kind!r} isn't here; it must be auto or {found}") from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a failure, 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        config, options = parse_arguments(sys.argv[1:] if argv is None else argv)
        if options.device != "auto":
            choose_device(options.device)
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
    except BrokenPipeError:  # of --help into a pager that has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
