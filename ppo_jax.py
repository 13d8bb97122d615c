"""Proximal Policy Optimization in one file, from the environment's step to the update, under jit.

    python ppo_jax.py --env CartPole-v1                           # from a shell

    config = PPOConfig(env="CartPole-v1")                         # from Python
    keys = jax.random.split(jax.random.key(0), 8)
    agents, metrics = jax.jit(jax.vmap(train, in_axes=(None, 0)))(config, keys)

 1 Settings         PPOConfig, Schedule
 2 The algorithm    collect_rollout, compute_gae, make_batch, ppo_loss, optimise, update, train
 3 Networks         ActorCritic, Encoder, Memory, UserNetwork
 4 Distributions    Categorical, MultiCategorical, DiagonalGaussian, gSDE, Squashed
 5 Environments     make_env, VectorEnv, Space
 6 Parts            optimiser, statistics, shapes, the permutation, the convolution
 7 Reading          settings as they are given, checked and kept; presets
 8 Evaluation       evaluate, make_policy
 9 Suites           Brax, MuJoCo Playground, Craftax, Jumanji, Navix, XLand-MiniGrid
10 Populations     11 Run folders     12 Reporting     13 Command line

Sections 1 to 7 train by themselves, with jax, flax, optax, gymnax and chex: cut the file below
them. Where implementations of PPO differ, this one does what Stable-Baselines3 does, except where
a docstring says otherwise; defaults are its own.
Schulman et al., "Proximal Policy Optimization Algorithms", 2017, https://arxiv.org/abs/1707.06347
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.7.1", "flax>=0.10.0", "optax>=0.1.8", "gymnax>=1.0.1", "six>=1.4.0", "chex>=0.1.84",
#     "orbax-checkpoint>=0.11.22", "tqdm>=4.60.0", "pyyaml>=6.0", "matplotlib>=3.9.0",
#     "scipy>=1.15.0", "pandas>=2.2.2",
# ]
# ///

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import difflib
import functools
import importlib
import itertools
import json
import logging
import math
import operator
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

# ==================================================================================================
# 1. Settings
# ==================================================================================================


def static(default, kind, help):
    """Declare a setting that decides shapes or code; section 7 says what a kind allows."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


def traced(default, kind, help):
    """Declare a number that can be swept in one compilation, and be a `Schedule`."""
    metadata = {"kind": kind, "help": help, "traced": True}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, init=False)
class PPOConfig:
    """All that a training run depends on besides its key; a pytree whose numbers are leaves.

    A field that is not given has the value of the environment's preset (`PRESETS`), or else the
    default below. Names are those of Stable-Baselines3. Raises `ConfigError` for a value that
    cannot work.
    """

    # Environment
    env: Any = static(
        "CartPole-v1", "env", "Environment: a name (--list-envs prints all), or module:Class."
    )
    env_params: tuple = static((), "arguments", "Parameters of the environment, as in name=1.")
    total_timesteps: int = static(1_000_000, "total", "Steps to train one agent for.")
    n_envs: int = static(64, "size", "Copies of the environment that one agent steps.")
    devices_per_agent: int = static(1, "size", "Devices between which an agent's copies are split.")
    n_steps: int = static(128, "size", "Steps of each copy in a rollout, between two updates.")
    frame_skip: int = static(1, "size", "Repeats of each action; rewards add up, as one step.")
    reset_pool: int | None = static(
        None,
        "count",
        "Starts drawn for a rollout, shared by its episodes; 0: one drawn for each step; None: 0"
        " where a reset is cheap, else n_envs.",
    )
    normalize_obs: bool = static(False, "switch", "Standardise observations as seen so far.")
    normalize_reward: bool = static(False, "switch", "Divide rewards by the deviation of returns.")
    stats_window_size: int = static(100, "size", "Finished episodes that returns are means of.")
    # Optimisation
    batch_size: int | None = static(None, "size", "Samples in a minibatch; None: rollout / 4.")
    n_epochs: int = static(4, "size", "Passes over the samples of each rollout.")
    learning_rate: float = traced(3e-4, "coefficient", "Step size of the optimiser.")
    max_grad_norm: float = traced(0.5, "positive", "Largest global norm of a gradient.")
    optimizer: Any = static("adam", "object", "Optimiser: the name of a function in optax.")
    optimizer_kwargs: tuple = static((), "arguments", "Optimiser's arguments, as in b1=0.8.")
    # Objective
    gamma: float = traced(0.99, "fraction", "Discount factor of rewards, per step.")
    gae_lambda: float = traced(0.95, "fraction", "Lambda of GAE; 0: one-step TD, 1: Monte Carlo.")
    clip_range: float = traced(0.2, "positive", "Clip the ratio to 1 ± this; a,b: 1 - a to 1 + b.")
    clip_range_vf: float | None = traced(
        None, "positive", "Clip values to the old ones ± this; None: no."
    )
    normalize_advantage: bool = static(True, "switch", "Standardise each minibatch's advantages.")
    ent_coef: float = traced(0.0, "coefficient", "Weight of the entropy bonus in the loss.")
    vf_coef: float = traced(0.5, "coefficient", "Weight of the value loss in the loss.")
    vf_loss: str = static("mse", "vf_loss", "Value loss: mse or huber.")
    target_kl: float | None = traced(
        None, "positive", "Stop an update when approx_kl exceeds 1.5 times this; None: never."
    )
    loss_function: Callable | None = static(None, "function", "In place of ppo_loss.")
    advantage_function: Callable | None = static(None, "function", "In place of compute_gae.")
    # Network
    policy: Any = static(
        "auto",
        "object",
        "Network: mlp, cnn, nature_cnn, gru or lstm; auto: cnn for images, else mlp.",
    )
    net_arch: tuple = static((64, 64), "sizes", "Units of each hidden layer.")
    net_arch_vf: tuple | None = static(
        None, "sizes", "Units of the value network's hidden layers; None: as net_arch."
    )
    activation: str = static("tanh", "activation", "Activation: tanh, relu, elu, gelu or silu.")
    share_features_extractor: bool = static(
        True, "switch", "Let policy and value network share one CNN or RNN."
    )
    value_obs: tuple = static(
        (), "names", "Parts of the observations that the value network alone sees."
    )
    rnn_hidden_size: int = static(64, "size", "Units of a gru or lstm.")
    sub_traj_len: int = static(16, "size", "Length of sequences that a gru or lstm is trained on.")
    ortho_init: bool = static(True, "switch", "Draw orthogonal initial weights.")
    log_std_init: float = traced(0.0, "number", "Initial log standard deviation of actions.")
    squash_output: bool = static(False, "switch", "Squash continuous actions by tanh.")
    use_sde: bool = static(False, "switch", "Explore by state-dependent noise (gSDE).")
    sde_sample_freq: int = static(-1, "period", "gSDE: steps between draws; -1: one per rollout.")

    def __init__(self, env="CartPole-v1", **given):
        preset = find_preset(env) if isinstance(env, str) else {}
        read_settings(self, {"env": env, **given}, preset)
        check_config(self)

    def at(self, progress_remaining):
        """Return a copy with each schedule's number when this fraction of the run remains."""

        def evaluated(value):
            return value(progress_remaining) if callable(value) else value

        return jax.tree.map(evaluated, self, is_leaf=callable)

    def replace(self, **changes):
        """Return a copy with some fields changed; the others stay, whatever the preset."""
        return dataclasses.replace(self, **changes)

    @property
    def envs_per_device(self):
        """Copies of the environment that one device steps for one agent."""
        return self.n_envs // self.devices_per_agent

    @property
    def rollout_size(self):
        """Samples in one rollout."""
        return self.n_envs * self.n_steps

    @property
    def n_updates(self):
        """Updates in a run, for which its steps are rounded up to whole rollouts."""
        return -(-self.total_timesteps // self.rollout_size)

    @property
    def is_recurrent(self):
        """Whether the policy has a memory of earlier steps."""
        return self.policy in RECURRENT or hasattr(self.policy, "initial_memory")

    @property
    def sequence_length(self):
        """Steps that stay together when a rollout is shuffled; 1 without a memory."""
        return self.sub_traj_len if self.is_recurrent else 1

    @property
    def n_minibatches(self):
        """Minibatches in one epoch."""
        if self.batch_size is not None:
            return max(1, self.rollout_size // self.batch_size)
        n_sequences = self.envs_per_device * self.n_steps // self.sequence_length
        return next(parts for parts in (4, 3, 2, 1) if n_sequences % parts == 0)

    @property
    def minibatch_size(self):
        """Samples in one minibatch; the whole rollout where batch_size is larger."""
        return self.rollout_size // self.n_minibatches

    @property
    def noise_steps(self):
        """Steps for which one draw of the policy's noise is kept; 1 without gSDE."""
        if not self.use_sde:
            return 1
        return self.n_steps if self.sde_sample_freq == -1 else self.sde_sample_freq


@flax.struct.dataclass
class Schedule:
    """A number that goes with the progress of a run from `initial` to a fraction of that."""

    initial: chex.Numeric
    final_fraction: chex.Numeric
    shape: str = flax.struct.field(pytree_node=False)  # linear or cosine

    def __call__(self, progress_remaining):
        """Return the number when this fraction of the run remains, from 1 down to 0."""
        height = progress_remaining
        if self.shape == "cosine":
            height = (1 - jnp.cos(jnp.pi * progress_remaining)) / 2
        return self.initial * (self.final_fraction + (1 - self.final_fraction) * height)

    def __str__(self):
        return f"{self.shape}_{self.initial}_{self.final_fraction}"


class ConfigError(ValueError):
    """A setting that cannot work: the message names it, its value and what would be right."""


# ==================================================================================================
# 2. The algorithm
# ==================================================================================================


@flax.struct.dataclass
class Agent:
    """All that training carries from one update to the next. N: environments of the agent."""

    params: chex.ArrayTree
    opt_state: optax.OptState
    key: jax.Array
    n_updates: jax.Array  # () int32, updates done
    obs: chex.ArrayTree  # (N, …), what the environments show now
    env_states: chex.ArrayTree  # (N, …)
    memory: chex.ArrayTree | None  # (N, …), of a recurrent policy
    # (2 + M, N), return, length and M metrics of the environment so far, of episodes under way
    episode_sums: jax.Array
    recent_episodes: jax.Array  # (2 + M, stats_window_size), of finished ones, the newest first
    n_recent: jax.Array  # () int32, how many of these are known
    obs_statistics: dict[str, RunningStatistics] | None  # of normalize_obs, by path
    return_statistics: RunningStatistics | None  # of normalize_reward
    discounted_return: jax.Array | None  # (N,), of normalize_reward
    # The update since which observations, rewards, gradients are not all finite; 0: they are.
    failing_since: jax.Array  # (3,) int32
    n_steps: int = flax.struct.field(pytree_node=False)  # of a rollout, which n_updates counts

    def __repr__(self):
        n_numbers = sum(np.size(leaf) for leaf in jax.tree.leaves(self.params))
        return f"Agent(n_updates={self.n_updates}, {n_numbers:,} parameters)"


class Rollout(NamedTuple):
    """What T steps of N environments gave; every array is (T, N, …)."""

    obs: chex.ArrayTree
    action: jax.Array  # as sampled, before a tanh and the clip to the bounds
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: chex.ArrayTree  # what the step led to, before any reset
    task_id: jax.Array | None = None  # of an environment with several tasks
    metrics: dict[str, jax.Array] | None = None  # that the environment reports
    memory: chex.ArrayTree | None = None  # of a recurrent policy, before the step


class Batch(NamedTuple):
    """B samples in sequences of L steps; every array but the memory is (B, …).

    The steps of a sequence stand in a row. L is sub_traj_len for a policy with a memory, and 1 for
    any other.
    """

    obs: chex.ArrayTree  # as the network sees it: normalised if the config says so
    action: jax.Array
    log_prob: jax.Array  # under the policy that acted
    value: jax.Array  # by the value function of that time
    advantage: jax.Array
    value_target: jax.Array
    task_id: jax.Array | None = None
    is_first: jax.Array | None = None  # whether memory is emptied before the step
    memory: chex.ArrayTree | None = None  # (B / L, …), before the first step of each sequence


def collect_rollout(config, agent, key):
    """Let the policy act for n_steps in each environment.

    Returns the agent with its environments moved on, and a rollout of (n_steps, n_envs, …) arrays.
    Random numbers are drawn outside of the scan over steps, where every operation is paid for
    n_steps times: all noise of the actions at once, the starts of new episodes in blocks of steps.
    """
    env = make_env(config)
    network = make_network(config)
    policy = functools.partial(act, network, agent)
    noise_key, env_key = jax.random.split(own_key(config, key))
    n_draws = -(-config.n_steps // config.noise_steps)
    distribution = jax.eval_shape(policy, agent.obs, agent.memory).distribution
    noise = distribution.noise(noise_key, n_draws)
    keys = jax.random.split(env_key, (2, config.n_steps, config.envs_per_device))
    pool = draw_pool(config, env, env_key)

    def step(carry, inputs):
        obs, env_states, memory = carry
        draw, keys, starts = inputs
        output = policy(obs, memory)
        action = output.distribution.sample(noise[draw])
        new, outcome = env.step(keys, env_states, action, starts, pool)
        row = Rollout(obs, action, *outcome, memory)
        memory = forget(network, output.memory, outcome.terminated | outcome.truncated)
        return (*new, memory), row

    def block(carry, inputs):
        draw, step_keys, start_keys = inputs
        starts = draw_starts(env, pool, start_keys)
        return jax.lax.scan(step, carry, (draw, step_keys, starts))

    draw = jnp.arange(config.n_steps) // config.noise_steps
    blocks = split_axis((draw, *keys), config.n_steps // block_length(config.n_steps))
    carry = (agent.obs, agent.env_states, agent.memory)
    carry, rollout = jax.lax.scan(block, carry, blocks)
    obs, env_states, memory = carry
    agent = agent.replace(obs=obs, env_states=env_states, memory=memory)
    return agent, merge_axes(rollout)


def compute_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """Return advantages and value targets, both (T, …), by generalised advantage estimation.

    All arrays are (T, …), time first. next_value: value of the next observation; at an episode's
    end, of its final observation. Where terminated, next_value counts as 0; where terminated or
    truncated, the sum over later steps ends.

        delta_t = r_t + gamma * (1 - terminated_t) * next_value_t - value_t
        A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}

    Schulman et al., 2015, https://arxiv.org/abs/1506.02438, equation 16; Pardo et al., "Time Limits
    in Reinforcement Learning", 2018, https://arxiv.org/abs/1712.00378. The value target is
    A_t + value_t.
    """
    chex.assert_equal_shape([reward, value, next_value, terminated, truncated])
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * jnp.where(terminated | truncated, 0.0, 1.0)

    def step(next_advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * next_advantage
        return advantage, advantage

    end = jnp.zeros_like(delta[0])
    _, advantage = jax.lax.scan(step, end, (delta, decay), reverse=True)
    return advantage, advantage + value


def make_batch(config, agent, rollout):
    """Return the Batch of a rollout: log-probabilities, values, advantages and value targets.

    agent: as it is after the rollout; the last value target needs the observations that follow.
    One minibatch after the other goes through the network, so memory stays that of a minibatch.
    """
    network = make_network(config)
    length = config.sequence_length
    rollout = rollout._replace(obs=normalize_obs(agent.obs_statistics, rollout.obs))
    samples = to_samples(rollout, length)
    memory = jax.tree.map(lambda x: x[::length], samples.memory)
    is_first = None
    if config.is_recurrent:
        done = rollout.terminated | rollout.truncated
        # The memory before row 0 is empty already where an episode begins.
        is_first = jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]])
        is_first = to_samples(is_first, length)

    def evaluate_part(part):
        obs, action, is_first, memory = part
        output = network.apply(agent.params, obs, memory, is_first)
        return output.distribution.log_prob(action), output.value, output.memory

    parts = (samples.obs, samples.action, is_first, memory)
    parts = jax.lax.map(evaluate_part, split_axis(parts, config.n_minibatches))
    log_prob, value, next_memory = merge_axes(parts)
    final_value = final_values(network, agent, samples, next_memory, config.n_minibatches)

    value, final_value = from_samples((value, final_value), length, config.envs_per_device)
    last_value = act(network, agent, agent.obs, agent.memory).value
    next_value = jnp.concatenate([value[1:], last_value[None]])
    next_value = jnp.where(rollout.truncated, final_value, next_value)
    advantage_function = config.advantage_function or compute_gae
    ends = (rollout.terminated, rollout.truncated)
    advantage, value_target = advantage_function(
        rollout.reward, value, next_value, *ends, config.gamma, config.gae_lambda
    )
    estimates = to_samples((value, advantage, value_target), length)
    more = (samples.task_id, is_first, memory)
    return Batch(samples.obs, samples.action, log_prob, *estimates, *more)


def ppo_loss(params, config, network, minibatch):
    """Return the loss of a minibatch, a scalar, and a dictionary of scalars to report.

    policy loss + ent_coef * (-entropy) + vf_coef * value loss, as in Stable-Baselines3: the value
    loss is a mean squared error without a further 1/2 and, with clip_range_vf, of the clipped
    prediction alone. The clipped surrogate is equation 7 of https://arxiv.org/abs/1707.06347;
    approx_kl is the mean of (r - 1) - log r, http://joschu.net/blog/kl-approx.html
    """
    output = network.apply(params, minibatch.obs, minibatch.memory, minibatch.is_first)
    log_ratio = output.distribution.log_prob(minibatch.action) - minibatch.log_prob
    ratio = jnp.exp(log_ratio)

    # policy loss
    advantage = minibatch.advantage
    if config.normalize_advantage:
        of_all_devices = gather(config, (advantage, minibatch.task_id))
        advantage = own_part(config, standardize(*of_all_devices))
    low, high = clip_bounds(config.clip_range)
    clipped_ratio = jnp.clip(ratio, low, high)
    policy_loss = -jnp.mean(jnp.minimum(advantage * ratio, advantage * clipped_ratio))

    # value loss
    value = output.value
    if config.clip_range_vf is not None:
        change = value - minibatch.value
        value = minibatch.value + jnp.clip(change, -config.clip_range_vf, config.clip_range_vf)
    value_loss = jnp.mean(VALUE_LOSSES[config.vf_loss](minibatch.value_target - value))

    # entropy bonus
    entropy = jnp.mean(output.distribution.entropy(minibatch.action))
    loss = policy_loss - config.ent_coef * entropy + config.vf_coef * value_loss
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": jnp.mean((ratio - 1) - log_ratio),
        "clip_fraction": jnp.mean(ratio != clipped_ratio),
    }


class Progress(NamedTuple):
    """The state of an update between two minibatches."""

    params: chex.ArrayTree
    opt_state: optax.OptState
    n_seen: jax.Array  # () int32, minibatches looked at in this update
    stopped: jax.Array  # () bool, whether the last of these was too far from the old policy
    is_finite: jax.Array  # (minibatches,) bool, of each one's gradient; False where not seen
    reports: dict[str, jax.Array]  # what the loss reported of each minibatch; 0 where not seen


def optimise(config, agent, batch, minibatches):
    """Take a gradient step for each minibatch of each epoch, up to the KL stop.

    batch: what `make_batch` returns. minibatches: what `draw_minibatches` returns. With target_kl,
    the first minibatch whose approx_kl exceeds 1.5 * target_kl takes no step and ends the update.
    A minibatch whose gradient is not finite is skipped: it changes nothing and counts in no mean.
    Returns the agent, the means over minibatches of what the loss reports (of approx_kl over the
    last epoch, as in Stable-Baselines3), and the numbers of steps taken and skipped.
    """
    network = make_network(config)
    optimizer = make_optimizer(config)
    loss_function = config.loss_function or ppo_loss
    n_minibatches = minibatches.shape[1]
    minibatches = merge_axes(minibatches)

    def loss(params, index):
        minibatch = take_sequences(batch, minibatches[index], config.sequence_length)
        return loss_function(params, config, network, minibatch)

    def unfinished(progress):
        return (progress.n_seen < len(minibatches)) & ~progress.stopped

    def step(progress):
        params, opt_state, n_seen, stopped, is_finite, reports = progress
        gradients, report = average(config, jax.grad(loss, has_aux=True)(params, n_seen))
        changes, new_opt_state = optimizer.update(gradients, opt_state, params)
        new = (optax.apply_updates(params, changes), new_opt_state)
        usable = has_norm(gradients)
        is_finite = is_finite.at[n_seen].set(usable)
        if config.target_kl is not None:
            stopped = usable & (report["approx_kl"] > 1.5 * config.target_kl)
        new = choose(usable & ~stopped, new, (params, opt_state))
        return Progress(*new, n_seen + 1, stopped, is_finite, write_row(reports, report, n_seen))

    _, report = jax.eval_shape(loss, agent.params, 0)
    check_report(config, report)
    reports = zero_rows(report, len(minibatches))
    nothing = (jnp.int32(0), jnp.array(False), jnp.zeros(len(minibatches), bool), reports)
    start = Progress(agent.params, agent.opt_state, *nothing)
    end = jax.lax.while_loop(unfinished, step, start)
    # Weights overflow where a step is huge, as with a learning rate of 1e30: nothing of it stays.
    has_overflowed = ~has_norm(end.params)
    end = choose(has_overflowed, start._replace(n_seen=end.n_seen), end)

    means = jax.tree.map(lambda x: jnp.mean(x, where=end.is_finite), end.reports)
    if "approx_kl" in means:
        epoch = jnp.arange(len(minibatches)) // n_minibatches
        in_last_epoch = end.is_finite & (epoch == (end.n_seen - 1) // n_minibatches)
        means["approx_kl"] = jnp.mean(end.reports["approx_kl"], where=in_last_epoch)
    n_finite = jnp.sum(end.is_finite)
    means["optimizer_steps"] = n_finite - end.stopped
    means["skipped_steps"] = end.n_seen - n_finite
    return agent.replace(params=end.params, opt_state=end.opt_state), means


def update(config, agent):
    """Do one iteration of PPO; returns the agent and a dictionary of scalar metrics.

    With devices_per_agent, each device calls this with its share of the environments, within a
    mapped axis "devices"; all of them get the same weights and metrics.
    """
    n_updates = agent.n_updates + 1
    # As in Stable-Baselines3, progress counts this rollout: the last update has 0 left.
    fraction_done = n_updates * (config.rollout_size / config.total_timesteps)
    config = config.at(jnp.maximum(0.0, 1 - fraction_done))
    key, rollout_key, shuffle_key = jax.random.split(agent.key, 3)
    agent, rollout = collect_rollout(config, agent.replace(key=key), rollout_key)
    raw = rollout  # with rewards as they came
    agent = count_episodes(config, agent, rollout)
    agent, rollout = normalize_reward(config, agent, rollout)
    batch = make_batch(config, agent, rollout)
    minibatches = draw_minibatches(config, shuffle_key)
    agent, report = optimise(config, agent, batch, minibatches)
    agent = observe(config, agent, rollout)  # only now: rollout and update see the same numbers
    values = gather(config, (batch.value, batch.value_target))
    failing_since = find_failures(config, agent, raw, report, n_updates)
    return agent.replace(n_updates=n_updates, failing_since=failing_since), {
        "timesteps": count_timesteps(config, n_updates),
        **episode_metrics(agent, rollout),
        "explained_variance": explained_variance(*values),
        **report,
    }


def init_agent(config, key):
    """Return an untrained agent with its environments reset."""
    config = config.at(1.0)
    env = make_env(config)
    network = make_network(config)
    key, network_key, reset_key = jax.random.split(key, 3)
    reset_keys = jax.random.split(own_key(config, reset_key), config.envs_per_device)
    obs, env_states = env.reset(reset_keys)
    memory = network.initial_memory(config.envs_per_device)
    params = network.init(network_key, obs, memory)
    return Agent(
        params=params,
        opt_state=make_optimizer(config).init(params),
        key=key,
        n_updates=jnp.int32(0),
        obs=obs,
        env_states=env_states,
        memory=memory,
        episode_sums=jnp.zeros((2 + len(env.metrics), config.envs_per_device), jnp.float32),
        recent_episodes=jnp.zeros((2 + len(env.metrics), config.stats_window_size), jnp.float32),
        n_recent=jnp.int32(0),
        **init_statistics(config, env),
        failing_since=jnp.zeros(3, jnp.int32),
        n_steps=config.n_steps,
    )


def train(config, key):
    """Train an agent from scratch: a pure function of a config and a key, for jit and vmap.

    Returns the agent and metrics, arrays of shape (n_updates,): `timesteps` done; `return` and
    `length`, means over the latest stats_window_size finished episodes (NaN before the first), and
    `episode/name`, such means of what the environment reports of each episode;
    `explained_variance` of the rollout's values; `optimizer_steps` and `skipped_steps`, for a
    gradient that is not finite; and what the loss reports. Raises `ConfigError` before anything
    compiles.
    """
    return train_updates(config, init_agent(config, key), config.n_updates, config.n_updates)


def train_updates(config, agent, n_updates, capacity):
    """Train an agent for n_updates more, at most `capacity`.

    Returns the agent and metrics of shape (capacity,), of which the first n_updates are filled.
    Only capacity is static, so that one compilation serves for any number of updates.
    """
    update_once = jax.jit(update)  # traced once, for the metrics' names and for the loop
    _, row = jax.eval_shape(update_once, config, agent)

    def step(i, carry):
        agent, metrics = carry
        agent, row = update_once(config, agent)
        return agent, write_row(metrics, row, i)

    return jax.lax.fori_loop(0, n_updates, step, (agent, zero_rows(row, capacity)))


# ==================================================================================================
# 3. Networks
# ==================================================================================================


class Output(NamedTuple):
    """What a network returns for observations (…, *obs_shape)."""

    distribution: Distribution  # over actions
    value: jax.Array  # (…,)
    memory: chex.ArrayTree | None = None  # (…, …), after the step


def make_network(config):
    """Return the Flax module that `Agent.params` belong to.

    The module maps observations (B, …) and a memory (B, …) or None to an `Output`. Given is_first
    (B,) too, the B steps are those of n sequences in a row, and the memory (n, …) is that before
    each sequence. The method `initial_memory(n)` returns the memory of n episodes that begin.
    """
    env = make_env(config)
    if isinstance(config.policy, str):
        return ActorCritic(env.obs_spaces, env.action_space, config)
    return UserNetwork(env.obs_spaces, env.action_space, config.policy)


class ActorCritic(nn.Module):
    """A policy and a value network, which share the encoder and the GRU or LSTM at most.

    The observations' entry "action_mask" (…, A), if any, is 0 for actions that cannot be taken.
    """

    obs_spaces: dict[str, Space]
    action_space: Space
    config: PPOConfig  # its section "Network", which is static

    @nn.compact
    def __call__(self, obs, memory=None, is_first=None):
        config = self.config
        features, new_memory = [], {}
        for name in self.encoders():
            init = self.kernel_init(math.sqrt(2))
            encoder = Encoder(self.seen(name), config.policy, init, name=f"{name}_encoder")
            latent = encoder(obs)
            if config.policy in RECURRENT:
                cell = Memory(config.policy, config.rnn_hidden_size, name=f"{name}_memory")
                latent, new_memory[name] = cell(latent, memory[name], is_first)
            features.append(latent)
        policy_latent = self.hidden("policy", config.net_arch, features[0])
        net_arch_vf = config.net_arch if config.net_arch_vf is None else config.net_arch_vf
        value_latent = self.hidden("value", net_arch_vf, features[-1])
        value = self.dense("value_out", 1, 1.0)(value_latent)[..., 0]
        distribution = self.distribution(policy_latent, find_mask(obs))
        return Output(distribution, value, new_memory or None)

    def encoders(self):
        """Return the names of the encoders: one for both networks, or one for each."""
        if self.config.share_features_extractor and not self.config.value_obs:
            return ("shared",)
        return ("policy", "value")

    def seen(self, name):
        """Return the spaces of those observations that an encoder sees."""
        hidden = self.config.value_obs if name == "policy" else ()
        spaces = self.obs_spaces
        return {path: spaces[path] for path in spaces if path.split("/")[0] not in hidden}

    def hidden(self, head, widths, latent):
        """Return what the hidden layers of a head make of features (…, F)."""
        for layer, width in enumerate(widths):
            latent = self.dense(f"{head}_{layer}", width, math.sqrt(2))(latent)
            latent = ACTIVATIONS[self.config.activation](latent)
        return latent

    def distribution(self, latent, mask):
        """Return the distribution over actions."""
        space = self.action_space
        are_bits = space.kind == "bits" and mask is None  # which have a logit each
        width = sum(space.sizes)
        if are_bits or space.kind == "box":
            width = math.prod(space.shape)
        out = self.dense("policy_out", width, 0.01)(latent)
        if space.kind == "box":
            return self.gaussian(latent, out)
        if are_bits:  # as in Stable-Baselines3
            out = jnp.stack([jnp.zeros_like(out), out], axis=-1)
            out = out.reshape((*latent.shape[:-1], -1))
        if mask is not None:
            out = jnp.where(mask.reshape(out.shape) > 0, out, IMPOSSIBLE)
        if space.kind == "integer":
            return Categorical(out)
        return MultiCategorical(out, space.sizes)

    def gaussian(self, latent, mean):
        """Return the distribution over continuous actions with these means (…, A)."""
        config, width = self.config, mean.shape[-1]
        init = nn.initializers.constant(config.log_std_init)
        if config.use_sde:
            log_std = self.param("log_std", init, (latent.shape[-1], width), jnp.float32)
            distribution = StateDependentGaussian(mean, log_std, latent)
        else:
            log_std = self.param("log_std", init, (width,), jnp.float32)
            distribution = DiagonalGaussian(mean, log_std)
        if config.squash_output:
            return Squashed(distribution)
        return distribution

    def dense(self, name, width, gain):
        """Return a layer."""
        return nn.Dense(width, kernel_init=self.kernel_init(gain), name=name)

    def kernel_init(self, gain):
        """Return the initialiser of a layer's weights."""
        return orthogonal(gain) if self.config.ortho_init else nn.linear.default_kernel_init

    def initial_memory(self, n_envs):
        """Return the memory of n_envs episodes that begin."""
        if self.config.policy not in RECURRENT:
            return None
        memory = jnp.zeros((n_envs, self.config.rnn_hidden_size), jnp.float32)
        if self.config.policy == "lstm":
            memory = (memory, memory)
        return dict.fromkeys(self.encoders(), memory)


class Encoder(nn.Module):
    """Features (…, F) of observations; those of a Dict's or Tuple's parts in a row."""

    obs_spaces: dict[str, Space]
    policy: str
    kernel_init: Callable

    @nn.compact
    def __call__(self, obs):
        if "" not in self.obs_spaces:
            leaves, features = named_leaves(obs), []
            for path, space in self.obs_spaces.items():
                encoder = Encoder({"": space}, self.policy, self.kernel_init, name=path)
                features.append(encoder(leaves[path]))
            return jnp.concatenate(features, axis=-1)
        space = self.obs_spaces[""]
        batch = batch_shape(obs, self.obs_spaces)
        if space.sizes:
            digits = (obs - space.low).reshape((*batch, -1))
            hot = []
            for i, size in enumerate(space.sizes):
                hot.append(jax.nn.one_hot(digits[..., i], size, dtype=jnp.float32))
            return jnp.concatenate(hot, axis=-1)
        obs = obs.astype(jnp.float32)
        if space.is_pixels:
            obs = obs / 255
        if space.side >= 3 and self.policy != "mlp":
            obs = self.convolve(obs)
        return obs.reshape((*batch, -1))

    def convolve(self, images):
        """Return features (…, F) of images (…, height, width, channels).

        nature_cnn: Mnih et al., 2015, https://doi.org/10.1038/nature14236. Others: Young and Tian,
        "MinAtar", 2019, https://arxiv.org/abs/1903.03176, plus strided layers for larger images.
        """
        layers, width = [(16, 3, 1)], 128  # filters, size, stride
        side = min(images.shape[-3:-1]) - 2
        while side > 12:
            layers.append((16, 3, 2))
            side = (side - 1) // 2
        if self.policy == "nature_cnn":
            layers, width = [(32, 8, 4), (64, 4, 2), (64, 3, 1)], 512
        for i, layer in enumerate(layers):
            images = Convolution(*layer, self.kernel_init, name=f"conv_{i}")(images)
            images = nn.relu(images)
        flat = images.reshape((*images.shape[:-3], -1))  # (…, height * width * channels)
        return nn.relu(nn.Dense(width, kernel_init=self.kernel_init, name="features")(flat))


class Memory(nn.Module):
    """A GRU or LSTM: one step of each of B environments, or the B steps of n sequences in a row.

    features: (B, F). memory: (B, …); with is_first (B,), that before each sequence, (n, …).
    """

    cell: str
    hidden_size: int

    @nn.compact
    def __call__(self, features, memory, is_first):
        options = dict(recurrent_kernel_init=orthogonal(1.0), name=self.cell)
        cell = RECURRENT[self.cell](self.hidden_size, **options)
        if is_first is None:
            memory, output = cell(memory, features)
            return output, memory

        def step(cell, memory, inputs):
            features, is_first = inputs
            empty = jax.tree.map(jnp.zeros_like, memory)
            memory, output = cell(choose(is_first, empty, memory), features)
            return memory, (output, memory)

        return scan_sequences(step, cell, memory, (features, is_first))


class UserNetwork(nn.Module):
    """A Flax module of the user's, or a pair of an actor and a critic, checked.

    The module maps observations to a distribution and values; with a method `initial_memory(n)` it
    maps observations and a memory to these and the memory after the step.
    """

    obs_spaces: dict[str, Space]
    action_space: Space
    module: Any

    def __call__(self, obs, memory=None, is_first=None):
        if isinstance(self.module, tuple):
            actor, critic = self.module
            result = (actor(obs), critic(obs))
        elif memory is None:
            result = self.module(obs)
        else:
            if is_first is not None:
                memory = self.memories(obs, memory, is_first)
            result = self.module(obs, memory)
        n_results = 2 if memory is None else 3
        check_output(result, n_results, batch_shape(obs, self.obs_spaces), self.action_space)
        return Output(*result)

    def memories(self, obs, memory, is_first):
        """Return the memory (B, …) before each step of sequences, for that before each of them."""

        def step(module, memory, inputs):
            obs, is_first = inputs
            memory = forget(module, memory, is_first)
            _, _, next_memory = module(obs, memory)
            return next_memory, memory

        return scan_sequences(step, self.module, memory, (obs, is_first))

    def initial_memory(self, n_envs):
        """Return the memory of n_envs episodes that begin."""
        if hasattr(self.module, "initial_memory"):
            return self.module.initial_memory(n_envs)
        return None


def scan_sequences(step, module, memory, inputs):
    """Return what step(module, memory, inputs) gives for B steps; memory: before n sequences."""
    inputs = split_axis(inputs, len(jax.tree.leaves(memory)[0]))
    weights = dict(variable_broadcast="params", split_rngs={"params": False})
    _, outputs = nn.scan(step, in_axes=1, out_axes=1, **weights)(module, memory, inputs)
    return merge_axes(outputs)


def act(network, agent, obs, memory):
    """Return the network's output for observations (N, …) as the environment shows them."""
    return network.apply(agent.params, normalize_obs(agent.obs_statistics, obs), memory)


def final_values(network, agent, samples, memory, n_parts):
    """Return values (B,) of the samples' final observations; 0 if none reached a time limit.

    memory: (B, …), after each step. n_parts: how many go through the network one after the other.
    """

    def value_of(part):
        obs, memory = part
        return act(network, agent, obs, memory).value

    def compute():
        parts = split_axis((samples.final_obs, memory), n_parts)
        return jax.lax.map(value_of, parts).ravel()

    zeros = jnp.zeros_like(samples.reward)
    return jax.lax.cond(jnp.any(samples.truncated), compute, lambda: zeros)


def forget(network, memory, done):
    """Return a memory (N, …) that is the initial one where an episode ended."""
    if memory is None:
        return None
    return choose(done, network.initial_memory(len(done)), memory)


def find_mask(obs):
    """Return the entry "action_mask" of a dictionary of observations, at any depth, or None."""
    for path, leaf in named_leaves(obs).items():
        if path.split("/")[-1] == "action_mask":
            return leaf
    return None


IMPOSSIBLE = -1e9  # the logit of a masked action: e^-1e9 is 0, and 0 * -1e9 is a number
ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu, "elu": nn.elu, "gelu": nn.gelu, "silu": nn.silu}
RECURRENT = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}
POLICIES = ("auto", "mlp", "cnn", "nature_cnn", "gru", "lstm")


# ==================================================================================================
# 4. Distributions
# ==================================================================================================


class Distribution:
    """A distribution over actions, for a batch of any shape (…).

    noise(key, n): random numbers for n draws, (n, …, …). sample(noise): the actions of one draw.
    mode(): the most probable actions; of `Squashed`, those of the Gaussian.
    log_prob(action): log-probabilities or log-densities (…,).
    entropy(action): in nats, (…,); only `Squashed` needs the actions, for an estimate.
    """


@flax.struct.dataclass
class Categorical(Distribution):
    """The actions 0 … A - 1, given by unnormalised log-probabilities (…, A)."""

    logits: jax.Array

    def noise(self, key, n):
        return jax.random.gumbel(key, (n, *self.logits.shape))

    def sample(self, noise):  # the Gumbel-max trick
        return self.replace(logits=self.logits + noise).mode()

    def mode(self):
        return jnp.argmax(self.logits, axis=-1)

    def log_prob(self, action):
        log_probs = jax.nn.log_softmax(self.logits)
        return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]

    def entropy(self, action=None):
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


@flax.struct.dataclass
class MultiCategorical(Categorical):
    """Independent categorical parts: logits (…, sum of sizes), actions (…, number of sizes)."""

    sizes: tuple = flax.struct.field(pytree_node=False)

    def mode(self):
        return jnp.stack([part.mode() for part in self.parts()], axis=-1)

    def log_prob(self, action):
        return sum(part.log_prob(action[..., i]) for i, part in enumerate(self.parts()))

    def entropy(self, action=None):
        return sum(part.entropy() for part in self.parts())

    def parts(self):
        """Return the Categorical of each part."""
        ends = np.cumsum(self.sizes)[:-1]
        return [Categorical(logits) for logits in jnp.split(self.logits, ends, axis=-1)]


@flax.struct.dataclass
class DiagonalGaussian(Distribution):
    """Independent normal distributions: mean (…, A), log_std (A,) or (…, A)."""

    mean: jax.Array
    log_std: jax.Array

    def noise(self, key, n):
        return jax.random.normal(key, (n, *self.mean.shape))

    def sample(self, noise):
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self):
        return self.mean

    def log_prob(self, action):
        log_std = self.marginal_log_std()
        standard = (action - self.mean) * jnp.exp(-log_std)
        terms = 0.5 * standard**2 + log_std + 0.5 * math.log(2 * math.pi)
        return -jnp.sum(terms, axis=-1)

    def entropy(self, action=None):
        terms = self.marginal_log_std() + 0.5 * math.log(2 * math.pi * math.e)
        return jnp.sum(jnp.broadcast_to(terms, self.mean.shape), axis=-1)

    def marginal_log_std(self):
        """Return the log standard deviation of one action."""
        return self.log_std


@flax.struct.dataclass
class StateDependentGaussian(DiagonalGaussian):
    """gSDE: action = mean + features @ matrix, with a matrix of noise kept for several steps.

    mean: (…, A). log_std: (F, A), of the matrix's entries. features: (…, F); as in
    Stable-Baselines3, no gradient flows through them in the deviation. Raffin et al., "Smooth
    Exploration for Robotic Reinforcement Learning", 2021, https://arxiv.org/abs/2005.05719.
    """

    features: jax.Array

    def noise(self, key, n):
        batch = self.mean.shape[:-1]
        return jax.random.normal(key, (n, *batch, *self.log_std.shape))

    def sample(self, noise):
        matrix = noise * jnp.exp(self.log_std)  # (…, F, A)
        return self.mean + jnp.einsum("...f,...fa->...a", self.features, matrix)

    def marginal_log_std(self):
        """Return the log standard deviation over all matrices: equation 10 of the paper."""
        variance = jax.lax.stop_gradient(self.features) ** 2 @ jnp.exp(2 * self.log_std)
        return 0.5 * jnp.log(variance + 1e-6)


@flax.struct.dataclass
class Squashed(Distribution):
    """The tanh of a Gaussian. Its actions are those before the tanh: exact at the bounds too.

    The log-density of tanh(action) is that of Haarnoja et al., 2018, appendix C,
    https://arxiv.org/abs/1801.01290. The entropy is the Gaussian's plus a one-sample estimate of
    the tanh's part, which has no closed form: E[log(1 - tanh(u)^2)], reparametrised.
    """

    gaussian: DiagonalGaussian

    def noise(self, key, n):
        return self.gaussian.noise(key, n)

    def sample(self, noise):
        return self.gaussian.sample(noise)

    def mode(self):
        return self.gaussian.mode()

    def log_prob(self, action):
        return self.gaussian.log_prob(action) - log_tanh_slope(action)

    def entropy(self, action):
        mean, log_std = self.gaussian.mean, self.gaussian.marginal_log_std()
        noise = jax.lax.stop_gradient((action - mean) * jnp.exp(-log_std))
        return self.gaussian.entropy() + log_tanh_slope(mean + jnp.exp(log_std) * noise)


def log_tanh_slope(action):
    """Return the sum of log(1 - tanh(action)^2) over the last axis, in a form that stays finite."""
    return jnp.sum(2 * (math.log(2) - action - jax.nn.softplus(-2 * action)), axis=-1)


# ==================================================================================================
# 5. Environments
# ==================================================================================================


class Outcome(NamedTuple):
    """What a step of N environments gave, besides the next observations and states."""

    reward: jax.Array  # (N,) float32
    terminated: jax.Array  # (N,) bool, the environment ended the episode
    truncated: jax.Array  # (N,) bool, the time limit alone ended the episode
    final_obs: chex.ArrayTree  # (N, …), what the step led to, before any reset
    task_id: jax.Array | None  # (N,), info["task_id"] of an environment with several tasks
    metrics: dict[str, jax.Array]  # (N,), info["metrics"], which add up over an episode


@dataclasses.dataclass(frozen=True, eq=False)
class VectorEnv:
    """Copies of an environment side by side, with its parameters, actions, resets and repeats."""

    env: Any  # with gymnax 1.0's interface
    env_params: Any
    obs_spaces: dict[str, Space]  # by path as in a/b; "" where there is one
    action_space: Space
    squash_output: bool
    frame_skip: int
    types: Any = None  # of an observation and a state in a loop over steps; None: as they come
    metrics: tuple = ()  # names of what the environment reports of each step

    def reset(self, keys):
        """Return the observations and states (N, …) with which episodes begin. keys: (N,)."""
        return self.cast(jax.vmap(self.env.reset, in_axes=(0, None))(keys, self.env_params))

    def step(self, keys, states, action, starts, pool=None):
        """Step N environments; returns the next (observations, states) and an Outcome.

        action: (N, …), as a policy samples it. starts: what `reset` returns, for episodes to begin
        with; gymnax's own step draws them each time, which takes longer than the rest of the step.
        Or the place in a pool (P + N, …) from which N such starts are taken.
        """
        action = self.to_environment(action)
        new, outcome = self.step_once(keys, states, action)
        for repeat in range(1, self.frame_skip):
            keys = jax.vmap(side_key, in_axes=(0, None))(keys, repeat)
            later, more = self.step_once(keys, new[1], action)
            sums = jax.tree.map(jnp.add, outcome.metrics, more.metrics)
            more = more._replace(reward=outcome.reward + more.reward, metrics=sums)
            done = outcome.terminated | outcome.truncated
            new, outcome = choose(done, (new, outcome), (later, more))
        if self.resets_itself:
            return new, outcome
        done = outcome.terminated | outcome.truncated
        if pool is None:
            return choose(done, starts, new), outcome

        def begin(new):
            take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=len(done))
            return choose(done, jax.tree.map(lambda x: take(x, starts), pool), new)

        return jax.lax.cond(jnp.any(done), begin, lambda new: new, new), outcome

    def step_once(self, keys, states, action):
        """Step N environments once, without resets unless the environment's own step resets."""
        step, right = self.env.step_env, "observation, state, reward, terminated, info"
        if self.resets_itself:
            step, right = self.env.step, right.replace("info", "truncated, info")
        result = jax.vmap(step, in_axes=(0, 0, 0, None))(keys, states, action, self.env_params)
        if len(result) != len(right.split(",")):
            refuse("env", self.env, f"such that a step returns {right}, not {len(result)} values")
        obs, states, reward, terminated, *_, info = result
        if self.resets_itself:
            if "final_observation" not in info:
                right = "such that a step that resets has info['final_observation']"
                refuse("env", self.env, right)
            truncated, final_obs = result[4], info["final_observation"]
        else:
            truncated = jax.vmap(self.env.is_truncated, (0, None))(states, self.env_params)
            final_obs = obs
        terminated = terminated.astype(bool)
        truncated = truncated.astype(bool) & ~terminated
        final_obs, _ = self.cast((final_obs, states))
        reward = reward.astype(jnp.float32)
        metrics = named_leaves(info.get("metrics", {}))
        metrics = {name: metrics[name].astype(jnp.float32) for name in sorted(metrics)}
        more = (info.get("task_id"), metrics)
        return self.cast((obs, states)), Outcome(reward, terminated, truncated, final_obs, *more)

    @property
    def resets_itself(self):
        """Whether the environment has a step of its own rather than gymnax's."""
        step = getattr(type(self.env), "step", None)
        return step is not None and step.__module__ != "gymnax.environments.environment"

    def to_environment(self, action):
        """Turn actions as a policy samples them, (N,) or (N, A), into the environment's."""
        space = self.action_space
        action = action.reshape((*action.shape[:1], *space.shape))
        if space.kind == "box":
            if self.squash_output:
                action = space.low + (jnp.tanh(action) + 1) / 2 * (space.high - space.low)
            return jnp.clip(action, space.low, space.high)
        action = action + space.low
        if space.kind == "tuple":
            return tuple(jnp.moveaxis(action, -1, 0))
        return action

    def cast(self, tree):
        """Give observations and states the types that they keep in a loop over steps."""
        types = tree if self.types is None else self.types
        return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), tree, types)


def make_env(config):
    """Return the VectorEnv of a config; raises `ConfigError` where they do not go together."""
    env = bind_env(config.env, config.env_params, config.squash_output, config.frame_skip)
    check_policy(config, env)
    return env


@functools.lru_cache(maxsize=64)
def bind_env(name, params, squash_output, frame_skip):
    """Make an environment, from its name or itself, once for each set of arguments."""
    with jax.ensure_compile_time_eval():  # arrays made here outlive the trace that asks first
        env = make_by_name(name) if isinstance(name, str) else name
        is_suite = hasattr(env, "resets_cost_much")
        env_params = replace_params(name, env.default_params, params)
        if not is_suite:
            obs_spaces = read_obs_space(env.observation_space(env_params))
        action_space = Space(env.action_space(env_params), "actions")
    if is_suite:  # which traces a reset for this, and above that would run by single operations
        obs_spaces = read_obs_space(env.observation_space(env_params))
    env = VectorEnv(env, env_params, obs_spaces, action_space, squash_output, frame_skip)
    types, metrics = loop_types(name, env)
    return dataclasses.replace(env, types=types, metrics=tuple(metrics))


def make_by_name(name):
    """Return the environment of a name: suite/name, module:Class or one of gymnax's."""
    if ":" in name:
        return make_object(name)
    suite, _, rest = name.rpartition("/")
    try:
        return SUITES[suite].make(rest)
    except ConfigError:
        raise
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"env: {name!r} needs a network connection to download its data ({error})"
        ) from error
    except Exception as error:  # whatever the suite raises
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"env: {name!r} can't be made here ({one_line(why)})") from error


class Suite(NamedTuple):
    """Environments whose names have the same prefix, as in suite/name."""

    make: Callable  # from such a name, without the prefix, to the environment
    names: Callable  # () to the names
    package: str | None = None  # in which the suite's own objects are defined
    adapt: Callable | None = None  # from such an object to an environment of gymnax's interface


SUITES = {  # by prefix
    "": Suite(lambda name: import_gymnax().make(name)[0], lambda: import_gymnax().registered_envs)
}


def make_object(path):
    """Return the environment of module:name, an object or what makes one without arguments."""
    module, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        env = getattr(importlib.import_module(module), name)
        if isinstance(env, type | types.FunctionType):
            env = env()
    except Exception as error:  # whatever the user's module raises
        refuse("env", path, f"module:Class that can be made ({type(error).__name__}: {error})")
    finally:
        sys.path.pop(0)
    env = adapt(env)
    check_env(env, path)
    return env


def adapt(env):
    """Return a suite's own object, or a pair of it and its parameters, with gymnax's interface."""
    of_suite = env[0] if isinstance(env, tuple) and env else env
    packages = [kind.__module__.partition(".")[0] for kind in type(of_suite).__mro__]
    for suite in SUITES.values():
        if suite.package in packages:
            return suite.adapt(env)
    return env


def replace_params(env, env_params, given):
    """Return an environment's parameters with those replaced that are given, as (name, value)."""
    for name, value in given:
        known = fields_of(env_params)
        if name not in known:
            near = closest(name, known)
            raise ConfigError(f"env_params: {env!r} has no {name}{near}; it has {', '.join(known)}")
        default = getattr(env_params, name)
        if isinstance(default, float) and isinstance(value, int):
            value = float(value)
        if isinstance(default, int | float) and type(value) is not type(default):
            refuse("env_params", f"{name}={value}", f"a number such as {default}")
        env_params = dataclasses.replace(env_params, **{name: value})
    return env_params


def loop_types(name, env):
    """Return the types that suit observations and states of a reset and a step, and the metrics.

    Of the types of a reset and of a step, the wider ones.
    """

    def shapes_of(tree):
        return {path: jnp.shape(leaf) for path, leaf in named_leaves(tree).items()}

    def reset_and_step():
        keys = jax.random.split(jax.random.key(0), 1)
        kind = jnp.int32 if env.action_space.sizes else jnp.float32
        action = jnp.zeros((1, math.prod(env.action_space.shape)), kind)
        start = env.reset(keys)
        for _ in range(2):  # wider states may give wider observations
            after, outcome = env.step_once(keys, start[1], env.to_environment(action))
            scalars = dict(zip(("a reward", "terminated", "truncated"), outcome))
            for what, value in (scalars | outcome.metrics).items():
                if value.shape != (1,):
                    refuse("env", name, f"such that {what} is a scalar, not of {value.shape[1:]}")
            last = (outcome.final_obs, after[1])
            if not shapes_of(start) == shapes_of(after) == shapes_of(last):
                refuse("env", name, "such that reset and step give observations and states alike")
            start = choose(outcome.terminated, start, after)
        return start, outcome.metrics

    try:
        types, metrics = jax.eval_shape(reset_and_step)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        refuse("env", name, f"of gymnax's interface ({error})")
    shown = named_leaves(types[0])
    for path, space in env.obs_spaces.items():
        if path not in shown or shown[path].shape[1:] != tuple(space.shape):
            refuse("env", name, f"such that observations are in its observation_space {space.text}")
    return types, metrics


class Space:
    """What gymnax or gymnasium says of a space of values, in one form; attributes tell its kind.

    kind: box, integer, integers, bits, or tuple (of integers). sizes: how many values each integer
    can have; () of a box. low: the least values. high: the greatest, of a box. side: the shorter
    side of an image (height, width, channels), else 0. is_pixels: whether an image's values are
    bytes from 0 to 255. text: the space as its library writes it.
    """

    def __init__(self, space, what="observations"):
        parts = getattr(space, "spaces", ())
        self.text = str(space)
        self.shape = getattr(space, "shape", None)
        self.low = np.asarray(getattr(space, "start", 0), np.int32)
        self.sizes = ()
        self.side = 0
        self.is_pixels = False
        if hasattr(space, "low") and hasattr(space, "high"):
            self.kind = "box"
            self.low = np.asarray(space.low, np.float32)
            self.high = np.asarray(space.high, np.float32)
            if len(self.shape) == 3:
                self.side = min(self.shape[:2])
                are_bytes = space.dtype == np.uint8 and self.high.max() == 255
                self.is_pixels = self.side >= 3 and are_bytes
        elif is_integer(space):
            self.kind = "integer"
            self.sizes = (int(space.n),)
        elif hasattr(space, "n"):
            self.kind = "bits"
            self.sizes = (2,) * math.prod(self.shape)
        elif hasattr(space, "nvec"):
            self.kind = "integers"
            self.sizes = tuple(np.ravel(space.nvec).tolist())
        elif parts and all(map(is_integer, parts)):
            self.kind = "tuple"
            self.shape = (len(parts),)
            self.sizes = tuple(int(part.n) for part in parts)
            self.low = np.array([getattr(part, "start", 0) for part in parts], np.int32)
        else:
            kinds = "Discrete, Box, MultiDiscrete or MultiBinary, or a Tuple of Discrete actions"
            raise ConfigError(f"env: it has {what} in {space}; they must be in {kinds}")


def is_integer(space):
    """Tell whether a space of a library's is of one integer."""
    return hasattr(space, "n") and space.shape == ()


def read_obs_space(space, path=""):
    """Return the Spaces of a Dict's or Tuple's parts by path, as in a/b, without action masks."""
    parts, leaves = getattr(space, "spaces", {}), {}
    if not isinstance(parts, dict):
        parts = dict(enumerate(parts))
    for name in sorted(parts):
        if name != "action_mask":
            leaves |= read_obs_space(parts[name], f"{path}/{name}".strip("/"))
    return leaves or {path: Space(space)}


def batch_shape(obs, spaces):
    """Return the leading axes (…) of observations (…, *shape) of spaces by path."""
    path, space = next(iter(spaces.items()))
    leaf = named_leaves(obs)[path]
    return leaf.shape[: leaf.ndim - len(space.shape)]


# ==================================================================================================
# 6. Parts
# ==================================================================================================


def make_optimizer(config):
    """Return the optimiser behind a clip of the global norm; Adam has PPO's epsilon of 1e-5."""
    if callable(config.learning_rate):
        refuse("learning_rate", config.learning_rate, "a number here, as from config.at(progress)")
    arguments = dict(config.optimizer_kwargs)
    optimizer = config.optimizer
    if optimizer == "adam":
        arguments = {"eps": 1e-5} | arguments
    if isinstance(optimizer, str):
        optimizer = getattr(optax, optimizer)
    try:
        optimizer = optimizer(config.learning_rate, **arguments)
    except TypeError as error:
        refuse("optimizer_kwargs", arguments, f"arguments of {config.optimizer} ({error})")
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)


VALUE_LOSSES = {"mse": jnp.square, "huber": optax.losses.huber_loss}


def clip_bounds(clip_range):
    """Return the bounds of the ratio, for one clip range or for a pair below and above 1."""
    if not isinstance(clip_range, tuple):
        clip_range = (clip_range, clip_range)
    below, above = clip_range
    return 1 - below, 1 + above


def standardize(advantage, task_id=None):
    """Return advantages minus their mean, over their unbiased standard deviation + 1e-8.

    task_id: of the advantages' shape, to do so within each task; a task's only sample is kept.
    """
    if task_id is None:
        return (advantage - jnp.mean(advantage)) / (jnp.std(advantage, ddof=1) + 1e-8)
    flat = advantage.ravel()
    task = jnp.unique(task_id, size=flat.size, return_inverse=True)[1].ravel()

    def total(samples):
        return jax.ops.segment_sum(samples, task, flat.size)[task]

    count = total(jnp.ones_like(flat))
    difference = flat - total(flat) / count
    deviation = jnp.sqrt(total(jnp.square(difference)) / jnp.maximum(count - 1, 1))
    standard = jnp.where(count > 1, difference / (deviation + 1e-8), flat)
    return standard.reshape(advantage.shape)


def explained_variance(prediction, target):
    """Return 1 - Var[target - prediction] / Var[target]: 1 is perfect; NaN without variance."""
    variance = jnp.var(target)
    residual = jnp.var(target - prediction)
    return jnp.where(variance == 0, unknown(), 1 - residual / jnp.where(variance == 0, 1, variance))


def unknown():
    """Return the number for "not known": NaN, or 0 under JAX_DEBUG_NANS, which stops at a NaN."""
    return 0.0 if jax.config.jax_debug_nans else math.nan


# With devices_per_agent, the devices of an agent meet here; with one device nothing happens.


def average(config, tree):
    """Return the mean of each array over an agent's devices."""
    if config.devices_per_agent == 1:
        return tree
    return jax.lax.pmean(tree, "devices")


def gather(config, tree):
    """Join the arrays (…, N) of an agent's devices along the last axis."""
    if config.devices_per_agent == 1:
        return tree

    def join(x):
        return jax.lax.all_gather(x, "devices", axis=x.ndim - 1, tiled=True)

    return jax.tree.map(join, tree)


def own_part(config, x):
    """Return this device's part (N,) of an array that `gather` joined."""
    if config.devices_per_agent == 1:
        return x
    return split_axis(x, config.devices_per_agent)[jax.lax.axis_index("devices")]


def own_key(config, key):
    """Return a random key that no other of an agent's devices has."""
    if config.devices_per_agent == 1:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index("devices"))


def side_key(key, number):
    """Return a random key that `jax.random.split` doesn't make of the same key.

    `fold_in` alone would: fold_in(key, 1) is the second of split(key, 2).
    """
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1) - number)


def count_timesteps(config, n_updates):
    """Return the steps of n_updates updates; in a run beyond 31 bits as a float, which rounds."""
    kind = jnp.int32
    if config.n_updates * config.rollout_size >= 2**31:
        kind = jnp.float32
    return n_updates * jnp.asarray(config.rollout_size, kind)


def count_episodes(config, agent, rollout):
    """Return the agent with the returns and lengths of the episodes that a rollout ended."""
    done = rollout.terminated | rollout.truncated
    per_step = [rollout.reward, jnp.ones_like(rollout.reward)]
    per_step += (rollout.metrics or {}).values()
    per_step = jnp.stack(per_step, axis=1)  # (T, 2 + M, N)
    sums, episode_sums = discounted_sum(per_step, done[:, None], agent.episode_sums, 1.0)
    sums, done = gather(config, (sums, done))
    n_ended = jnp.cumsum(done.ravel(), dtype=jnp.int32)
    window = agent.recent_episodes.shape[1]
    age = jnp.arange(window)  # 0 is the newest
    n_new = n_ended[-1]
    places = jnp.searchsorted(n_ended, n_new - age)
    new = sums.swapaxes(0, 1).reshape((len(episode_sums), -1))[:, places]
    old = agent.recent_episodes[:, age - n_new]
    return agent.replace(
        episode_sums=episode_sums,
        recent_episodes=jnp.where(age < n_new, new, old),
        n_recent=jnp.minimum(agent.n_recent + n_new, window),
    )


def episode_metrics(agent, rollout):
    """Return what `mean_episode` does, by name."""
    names = [f"episode/{name}" for name in rollout.metrics]
    return dict(zip(["return", "length", *names], mean_episode(agent)))


def mean_episode(agent):
    """Return the means over recent episodes of return, length and metrics; NaN before the first."""
    means = jnp.sum(agent.recent_episodes, axis=1) / jnp.maximum(agent.n_recent, 1)
    return jnp.where(agent.n_recent > 0, means, unknown())


def find_failures(config, agent, rollout, report, n_updates):
    """Return the agent's `failing_since` after an update. rollout: with rewards as they came."""
    obs_is_finite = all_finite((rollout.obs, rollout.final_obs))
    reward_is_finite = all_finite(rollout.reward)
    is_finite = jnp.stack([obs_is_finite, reward_is_finite, report["skipped_steps"] == 0])
    if config.devices_per_agent > 1:
        is_finite = average(config, is_finite.astype(jnp.float32)) == 1  # on all of them
    since = jnp.where(agent.failing_since > 0, agent.failing_since, n_updates)
    return jnp.where(is_finite, 0, since)


def all_finite(tree):
    """Tell whether all numbers of a tree are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def has_norm(tree):
    """Tell whether a tree's global norm is finite, which costs little where the norm is needed."""
    return jnp.isfinite(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


def discounted_sum(values, done, start, discount):
    """Return each step's sum since its episode began: total_t = value_t + discount * total_{t-1}.

    values, done: (T, …); start: (…), the sum before the first step. Returns the sums (T, …) and
    the sum to go on with (…), which is 0 where the last step ended an episode.
    """

    def step(total, inputs):
        value, done = inputs
        total = value + discount * total
        return jnp.where(done, 0.0, total), total

    rest, totals = jax.lax.scan(step, start, (values, done))
    return totals, rest


@flax.struct.dataclass
class RunningStatistics:
    """Mean and variance (…) of all samples so far, and their number."""

    count: jax.Array
    mean: jax.Array
    variance: jax.Array


def update_statistics(config, statistics, samples):
    """Take in samples (…, *mean's shape), as many from each of an agent's devices.

    Chan et al., 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    equation 2.1, with fractions of the whole in place of counts, and differences from the mean so
    far in place of samples: float32 keeps its digits, however many samples and however large.
    Samples that are not finite would stay in the mean for ever: nothing is taken in with them.
    """
    difference = (samples - statistics.mean).astype(jnp.float32)
    difference = difference.reshape((-1, *statistics.mean.shape))
    n_new = len(difference) * config.devices_per_agent
    count = statistics.count + n_new
    new = n_new / count  # the fraction of all samples that is new
    shift = average(config, jnp.mean(difference, axis=0))
    variance = average(config, jnp.mean(jnp.square(difference - shift), axis=0))
    variance = variance - statistics.variance
    variance = statistics.variance + new * variance + new * (1 - new) * jnp.square(shift)
    updated = RunningStatistics(count, statistics.mean + new * shift, variance)
    return choose(all_finite(updated), updated, statistics)


def init_statistics(config, env):
    """Return the fields of an `Agent` for normalize_obs (pixels stay) and normalize_reward."""

    def nothing(shape):
        zeros = jnp.zeros(shape, jnp.float32)
        return RunningStatistics(jnp.float32(0), zeros, zeros + 1)

    fields = dict(obs_statistics=None, return_statistics=None, discounted_return=None)
    if config.normalize_obs:
        fields["obs_statistics"] = {}
        for path, space in env.obs_spaces.items():
            if space.kind == "box" and not space.is_pixels:
                fields["obs_statistics"][path] = nothing(space.shape)
    if config.normalize_reward:
        fields["return_statistics"] = nothing(())
        fields["discounted_return"] = jnp.zeros(config.envs_per_device, jnp.float32)
    return fields


def observe(config, agent, rollout):
    """Return the agent with a rollout's observations in its statistics, if the agent has any."""
    if agent.obs_statistics is None:
        return agent
    obs, statistics = named_leaves(rollout.obs), {}
    for path, known in agent.obs_statistics.items():
        statistics[path] = update_statistics(config, known, obs[path])
    return agent.replace(obs_statistics=statistics)


def normalize_obs(statistics, obs):
    """Return observations standardised and clipped to ±10, as Stable-Baselines3's VecNormalize."""
    if not statistics:
        return obs

    def normalize(path, x):
        known = statistics.get(path_name(path))
        if known is None:
            return x
        return jnp.clip((x - known.mean) * jax.lax.rsqrt(known.variance + 1e-8), -10.0, 10.0)

    return jax.tree_util.tree_map_with_path(normalize, obs)


def normalize_reward(config, agent, rollout):
    """Divide a rollout's rewards by the deviation of discounted returns so far, clipped to ±10.

    Engstrom et al., "Implementation Matters in Deep Policy Gradients", 2020,
    https://arxiv.org/abs/2005.12729, with the constants of Stable-Baselines3's VecNormalize. The
    reported returns stay raw. Returns agent and rollout, unchanged without normalize_reward.
    """
    if agent.return_statistics is None:
        return agent, rollout
    done = rollout.terminated | rollout.truncated
    totals, rest = discounted_sum(rollout.reward, done, agent.discounted_return, config.gamma)
    statistics = update_statistics(config, agent.return_statistics, totals)
    reward = rollout.reward * jax.lax.rsqrt(statistics.variance + 1e-8)
    rest = jnp.where(jnp.isfinite(rest), rest, 0.0)
    agent = agent.replace(discounted_return=rest, return_statistics=statistics)
    return agent, rollout._replace(reward=jnp.clip(reward, -10.0, 10.0))


def choose(mask, yes, no):
    """Take each row (*mask's shape, …) of two trees from the first one where `mask` is true."""

    def choose_rows(x, y):
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, y)

    return jax.tree.map(choose_rows, yes, no)


def split_axis(tree, n_parts):
    """Split the first axis of each array into parts: (n_parts * B, …) to (n_parts, B, …)."""
    return jax.tree.map(lambda x: x.reshape((n_parts, -1, *x.shape[1:])), tree)


def merge_axes(tree):
    """Join the first two axes of each array: (A, B, …) to (A * B, …)."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), tree)


def to_samples(tree, length):
    """Lay arrays (T, N, …) of a rollout out as samples (T * N, …), sequence after sequence."""

    def lay_out(x):
        windows = x.reshape((-1, length, *x.shape[1:]))  # (T / length, length, N, …)
        return windows.swapaxes(1, 2).reshape((-1, *x.shape[2:]))

    return jax.tree.map(lay_out, tree)


def from_samples(tree, length, n_envs):
    """Undo `to_samples`: (T * N, …) to (T, N, …)."""

    def lay_out(x):
        windows = x.reshape((-1, n_envs, length, *x.shape[1:]))  # (T / length, N, length, …)
        return windows.swapaxes(1, 2).reshape((-1, n_envs, *x.shape[1:]))

    return jax.tree.map(lay_out, tree)


def take_sequences(batch, indices, length):
    """Return the minibatch of some sequences. indices: (n,), of sequences of `length` steps."""
    samples = (indices[:, None] * length + jnp.arange(length)).ravel()
    taken = jax.tree.map(lambda x: x[samples], batch._replace(memory=None))
    return taken._replace(memory=jax.tree.map(lambda x: x[indices], batch.memory))


def zero_rows(row, n):
    """Return a table of n rows, arrays (n, …), for a row of arrays or shapes (…)."""
    return jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), row)


def write_row(table, row, place):
    """Return a table (n, …) with one row replaced."""
    return jax.tree.map(lambda rows, x: rows.at[place].set(x), table, row)


def path_name(path):
    """Return the path of a leaf in a tree, as in a/b."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree):
    """Return the leaves of a tree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


# Faster or safer stand-ins: a docstring begins with the plain code that its function replaces.


def import_gymnax():
    """`import gymnax`, but its drawing libraries only when used: 0.2 instead of 1.3 seconds."""
    late = {"seaborn", "matplotlib.pyplot"} - sys.modules.keys()
    sys.modules.update({name: LateModule(name) for name in late})
    try:
        return importlib.import_module("gymnax")
    finally:
        for name in late:
            del sys.modules[name]


class LateModule(types.ModuleType):
    """A module that is imported when something in it is asked for."""

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.__name__), name)


def draw_pool(config, env, key):
    """Return the starts that a rollout's new episodes share, or None if each has its own.

    The starts: (P + N, …), the last N of which are the first ones again.
    """
    size = config.reset_pool
    if size is None:
        size = config.n_envs * getattr(env.env, "resets_cost_much", False)
    if size == 0:
        return None
    size = -(-size // config.devices_per_agent)
    places = np.arange(size + config.envs_per_device) % size
    starts = env.reset(jax.random.split(side_key(key, 0), size))
    return jax.tree.map(lambda x: x[places], starts)


def draw_starts(env, pool, keys):
    """Return with what episodes may begin that T steps of N environments end. keys: (T, N).

    Observations and states (T, N, …); or, for a pool, places (T,) from which N starts are taken.
    """
    if pool is None:
        return jax.vmap(env.reset)(keys)
    size = len(jax.tree.leaves(pool)[0]) - keys.shape[1]
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, size))(keys[:, 0])


def block_length(n_steps):
    """n_steps, but a divisor near 16: starts for all steps would take as much as the rollout."""
    return min(divisors(n_steps), key=lambda size: abs(math.log(size / 16)))


def draw_minibatches(config, key):
    """Return indices of sequences (n_epochs, n_minibatches, …), each epoch a fresh partition."""
    n_sequences = config.envs_per_device * config.n_steps // config.sequence_length
    keys = jax.random.split(own_key(config, key), config.n_epochs)
    orders = jax.vmap(shuffle, in_axes=(0, None))(keys, n_sequences)
    return orders.reshape((config.n_epochs, config.n_minibatches, -1))


def shuffle(key, size):
    """`jax.random.permutation(key, size)`, which on a CPU takes longer than a gradient.

    A Feistel network on the pairs (row, column) of a grid that is just large enough: each round
    adds to one of the two a hash of the other, which can be undone, so it is a bijection. What
    lands outside of the range is sent on until it is inside: Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002.
    """
    if size < 256:  # where a grid is too small to mix well and a sort is cheap
        return jnp.argsort(jax.random.bits(key, (size,), jnp.uint32))
    # A grid without a rest needs no walking; rows are neither few nor far fewer than columns.
    root = math.isqrt(size)
    n_rows = next(n for n in range(root, 0, -1) if size % n == 0)
    if n_rows < 16 or n_rows * 16 < root:
        n_rows = root
    n_columns = -(-size // n_rows)
    round_keys = jax.random.bits(key, (6, 2, 2), jnp.uint32)

    def mix(side, keys):
        mixed = (side + keys[0]) * jnp.uint32(0x9E3779B1)
        mixed = (mixed ^ (mixed >> 15) ^ keys[1]) * jnp.uint32(0x85EBCA77)
        return mixed ^ (mixed >> 13)

    def permute(position):
        row, column = position // n_columns, position % n_columns
        for row_keys, column_keys in round_keys:
            row = (row + mix(column, row_keys) % n_rows) % n_rows
            column = (column + mix(row, column_keys) % n_columns) % n_columns
        return row * n_columns + column

    def walk(position):
        return jnp.where(position >= size, permute(position), position)

    position = permute(jnp.arange(size, dtype=jnp.uint32))
    if n_rows * n_columns > size:
        position = jax.lax.while_loop(lambda x: jnp.any(x >= size), walk, position)
    return position.astype(jnp.int32)


class Convolution(nn.Module):
    """`nn.Conv` without padding, faster: in a loop on a CPU its gradient takes 30 times as long."""

    features: int
    size: int
    stride: int
    kernel_init: Callable

    @nn.compact
    def __call__(self, images):
        size, channels = self.size, images.shape[-1]
        shape = (size, size, channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        height, width = images.shape[-3:-1]
        shifted = []
        for row in range(size):
            rows = slice(row, row + height - size + 1, self.stride)
            for column in range(size):
                columns = slice(column, column + width - size + 1, self.stride)
                shifted.append(images[..., rows, columns, :])
        return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(-1, self.features) + bias


def orthogonal(scale):
    """`nn.initializers.orthogonal(scale)`, safe under `jax.vmap` on a CPU.

    Vmapped, it is a batch of LAPACK factorisations; several at once deadlock XLA's thread pool on a
    CPU with few cores (seen with jax 0.10.2). There, they take turns.
    """
    plain = nn.initializers.orthogonal(scale)

    def initialise(key, shape, dtype=jnp.float32):
        draw = functools.partial(plain, shape=shape, dtype=dtype)
        in_turn = jax.custom_batching.sequential_vmap(draw)
        return jax.lax.platform_dependent(key, cpu=in_turn, default=draw)

    return initialise


# ==================================================================================================
# 7. Reading and checking settings
# ==================================================================================================


def read_settings(owner, given, preset):
    """Set each field of a settings object from what was given, a preset or the default."""
    fields = fields_of(owner)
    for name in given:
        if name not in fields:
            raise ConfigError(f"{name}: no such setting{closest(name, fields)}")
    arch = given.get("net_arch")
    if isinstance(arch, dict):  # as in Stable-Baselines3
        if set(arch) != {"pi", "vf"}:
            refuse("net_arch", arch, "widths, or a dictionary with pi and vf")
        given = given | {"net_arch": arch["pi"], "net_arch_vf": arch["vf"]}
    for name, field in fields.items():
        standing = preset.get(name, field.default)
        value = read_setting(field, given.get(name, standing), standing)
        object.__setattr__(owner, name, value)


def fields_of(owner):
    """Return the fields of a dataclass by name."""
    return {field.name: field for field in dataclasses.fields(owner)}


def pick(known, names):
    """Return the entries of a dictionary that have one of these names, in the names' order."""
    return {name: known[name] for name in names if name in known}


def read_setting(field, value, standing):
    """Return a setting as it is kept; standing: the value of the preset or the default."""
    kind = field.metadata["kind"]
    if field.default is None and str(value).lower() == "none":
        return None
    try:
        if kind in NUMBERS:
            value = read_number(field.name, value, standing)
            check_number(field.name, value, *NUMBERS[kind])
            return value
        return READERS[kind](field.name, value)
    except ConfigError as error:
        if field.default is None:
            raise ConfigError(f"{error}, or None") from None
        raise


def read_word(text):
    """Return the number (1e6 is an integer), switch or None that a text spells, or else itself."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if isinstance(text, str):
        if text.lower() in words:
            return words[text.lower()]
        with contextlib.suppress(ValueError):
            return int(text)
        with contextlib.suppress(ValueError):
            text = float(text)
    if isinstance(text, np.generic):
        text = text.item()
    if isinstance(text, float) and text.is_integer():
        return int(text)
    return text


def read_whole(low, high, name, value):
    """Return a whole number from low to high."""
    number = read_word(value)
    if type(number) is not int or not low <= number <= high:
        refuse(name, value, f"a whole number from {low} to {high}")
    return number


def read_switch(name, value):
    """Return True or False."""
    switch = read_word(value)
    if not isinstance(switch, bool):
        refuse(name, value, "True or False")
    return switch


def read_choice(choices, name, value):
    """Return one of some choices."""
    choice = read_word(value)
    if choice not in choices:
        known = ", ".join(map(str, choices))
        refuse(name, value, f"one of {known}{closest(value, choices)}")
    return choice


def read_wholes(low, name, value):
    """Return whole numbers from `low` on, as a tuple."""
    if not isinstance(value, list | tuple):
        value = (value,)
    return tuple(read_whole(low, 2**31 - 1, name, number) for number in value)


def read_arguments(name, value):
    """Return names with values as a sorted tuple of pairs, from a dictionary or from name=value."""
    pairs, arguments = value, {}
    if isinstance(value, str):
        pairs = [value]
    elif isinstance(value, dict):
        pairs = value.items()
    try:
        for pair in pairs:
            key, item = pair.split("=", 1) if isinstance(pair, str) else pair
            arguments[key] = read_word(read_object(key, item))
    except (TypeError, ValueError):
        shown = " ".join(map(str, np.ravel(value)))
        refuse(name, shown, "names with values, as in name=1")
    return tuple(sorted(arguments.items()))


def read_names(name, value):
    """Return names as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def read_text(name, value):
    """Return a text, with ~ for the user's home expanded."""
    if not isinstance(value, str | os.PathLike):
        refuse(name, value, "a text")
    return os.path.expanduser(value)


def read_function(name, value):
    """Return a function."""
    if not callable(value):
        refuse(name, value, "a function")
    return value


def read_object(name, value):
    """Return an object or a name; a list as a tuple, which can be hashed."""
    return tuple(value) if isinstance(value, list) else value


def read_env(name, value):
    """Return an environment or its name."""
    return value if isinstance(value, str) else adapt(value)


def read_suite(name, value):
    """Return the prefix of a suite, gymnax or all."""
    return read_choice(("all", "gymnax", *filter(None, SUITES)), name, value)


READERS = {  # kind of a static setting: how it is read
    "size": functools.partial(read_whole, 1, 2**31 - 1),
    "total": functools.partial(read_whole, 1, 10**18),
    "seed": functools.partial(read_whole, 0, 2**32 - 1),
    "count": functools.partial(read_whole, 0, 2**31 - 1),
    "period": functools.partial(read_whole, -1, 2**31 - 1),
    "activation": functools.partial(read_choice, tuple(ACTIVATIONS)),
    "vf_loss": functools.partial(read_choice, tuple(VALUE_LOSSES)),
    "verbose": functools.partial(read_choice, (0, 1, 2)),
    "device": functools.partial(read_choice, ("auto", "cpu", "gpu", "tpu")),
    "switch": read_switch,
    "sizes": functools.partial(read_wholes, 1),
    "arguments": read_arguments,
    "text": read_text,
    "function": read_function,
    "names": read_names,
    "numbers": functools.partial(read_wholes, 0),
    "env": read_env,
    "suite": read_suite,
    "object": read_object,
}
NUMBERS = {  # kind of a traced setting: the least and the greatest number, and both in words
    "fraction": (0, 1, "a number from 0 to 1"),
    "coefficient": (0, sys.float_info.max, "a finite number, 0 or above"),
    "positive": (1e-45, sys.float_info.max, "a finite number above 0"),
    "number": (-sys.float_info.max, sys.float_info.max, "a finite number"),
}


def read_number(name, value, standing):
    """Return a float, an array with a number for each agent, a `Schedule`, or a pair of these.

    value: a number; a text; a list, one value for each agent; a tuple, the clip ranges below and
    above 1; or a function of the fraction of the run that remains.
    """
    if isinstance(value, str):
        return read_number_text(name, value, standing)
    if isinstance(value, tuple) and name == "clip_range":
        if len(value) != 2:
            refuse(name, value, "a number, or a pair of numbers for below and above 1")
        return tuple(read_number(name, part, standing) for part in value)
    if isinstance(value, list | tuple):
        parts = [read_number(name, part, standing) for part in value]
        if not parts or len(set(map(jax.tree.structure, parts))) > 1:
            refuse(name, value, "numbers, or schedules of one shape")
        return jax.tree.map(lambda *numbers: np.stack(numbers), *parts)
    if callable(value) and not isinstance(value, Schedule | jax.tree_util.Partial):
        if getattr(value, "__module__", "").startswith("optax"):
            refuse(name, value, "a function of the fraction that remains; optax's count steps")
        return jax.tree_util.Partial(value)  # a pytree, which a function is not
    return float(value) if type(value) is int and abs(value) < 1e300 else value


def read_number_text(name, text, standing):
    """Return a number; of low,high a pair; of linear, linear_3e-4 or cosine_3e-4_0.1 a schedule."""
    if "," in text and name == "clip_range":
        return read_number(name, tuple(text.split(",")), standing)
    shape, *numbers = map(read_word, text.strip().split("_"))
    if shape in ("linear", "cosine") and len(numbers) <= 2:
        if not numbers:
            standing = read_number(name, standing, None)
            numbers = [getattr(standing, "initial", standing)]
        initial, final_fraction = (*numbers, 0.0)[:2]
        if isinstance(initial, int | float):
            return Schedule(float(initial), float(final_fraction), shape)
    if numbers or not isinstance(shape, int | float):
        refuse(name, text, "a number, linear, or like linear_3e-4 or cosine_3e-4_0.1")
    return float(shape)


def check_number(name, value, low, high, right):
    """Refuse a number that is not from low to high; of a schedule, in three places."""
    if isinstance(value, tuple):
        for part in value:
            check_number(name, part, low, high, right)
    elif callable(value):
        check_number(name, value(1.0), low, high, right)
        for progress in (0.5, 0.0):  # a schedule may fall to 0
            check_number(name, value(progress), min(low, 0.0), high, f"{right} at all times")
    elif not isinstance(value, jax.core.Tracer):  # whose number is not known
        numbers = np.asarray(value)
        is_number = numbers.dtype.kind in "iuf"
        if not is_number or not np.all((numbers >= low) & (numbers.astype(float) <= high)):
            refuse(name, value, right)


def check_config(config):
    """Refuse the first setting that cannot work, by itself or with another one."""
    check_env(config.env)
    for name in STATIC:
        value = getattr(config, name)
        try:
            hash(value)
        except TypeError:
            refuse(name, value, "hashable: a tuple in place of each list among its fields")
    policy = modules = config.policy
    if not isinstance(policy, tuple) or len(policy) != 2:
        modules = (policy,)
    are_modules = all(isinstance(module, nn.Module) for module in modules)
    if not are_modules and policy not in POLICIES:
        right = f"one of {', '.join(POLICIES)}, or a Flax Linen module as in Net(), or two of these"
        refuse("policy", policy, right + closest(policy, POLICIES))
    if not callable(getattr(optax, str(config.optimizer), config.optimizer)):
        near = closest(config.optimizer, dir(optax))
        refuse("optimizer", config.optimizer, f"an optimiser of optax{near}")
    size, length = config.rollout_size, config.sequence_length
    if size >= 2**30:  # twice that must fit the integers that `shuffle` computes with
        refuse("n_envs", config.n_envs, f"below {2**30} when multiplied with {config.n_steps=}")
    if config.n_updates >= 2**31:
        refuse("total_timesteps", config.total_timesteps, f"below {2**31} rollouts of {size}")
    if config.n_steps % length:
        near = nearest_divisors(length, config.n_steps)
        refuse("sub_traj_len", length, f"a divisor of n_steps = {config.n_steps}, as {near}")
    n_devices = config.devices_per_agent
    if config.n_envs % n_devices:
        near = nearest_divisors(n_devices, config.n_envs)
        refuse("devices_per_agent", n_devices, f"a divisor of n_envs = {config.n_envs}, as {near}")
    batch_size = min(config.batch_size or config.minibatch_size, size)
    unit = length * n_devices
    if size % batch_size or batch_size % unit:
        near = nearest_divisors(batch_size / unit, size // unit, unit)
        windows = f" in windows of sub_traj_len = {length}" * config.is_recurrent
        windows += f" on each of {n_devices} devices" * (n_devices > 1)
        right = f"a divisor of the rollout of n_envs * n_steps = {size} samples{windows}, as {near}"
        refuse("batch_size", batch_size, right)
    if batch_size == 1 and config.normalize_advantage:
        refuse("batch_size", 1, "at least 2, or normalize_advantage False")
    if not 0 < config.noise_steps <= config.n_steps:
        right = f"-1 or a whole number from 1 to n_steps = {config.n_steps}"
        refuse("sde_sample_freq", config.sde_sample_freq, right)


def check_env(env, name=None):
    """Refuse what is no environment and no name of one."""
    if isinstance(env, type):
        refuse("env", env, f"an object, as {env.__name__}()")
    if not isinstance(env, str):
        for part in ("reset", "step", "default_params", "observation_space", "action_space"):
            if not hasattr(env, part) and not (part == "step" and hasattr(env, "step_env")):
                right = f"a name or have gymnax's interface; it has no {part}"
                refuse("env", name or env, right)
    elif ":" not in env:
        suite, _, rest = env.rpartition("/")
        if suite not in SUITES:
            suites = "".join(f", {known}/name" for known in SUITES if known)
            refuse("env", env, f"a name in gymnax, or module:Class{suites}; there is no such suite")
        known = SUITES[suite].names()
        if rest not in known:
            suite = suite or "gymnax"
            near = closest(rest, known) or f"; {suite} has {', '.join(known)}"
            raise ConfigError(f"env: {env!r} is no environment of {suite}{near}")


def check_policy(config, env):
    """Refuse a policy whose settings do not suit the environment's spaces."""
    space = env.action_space
    shown = f"{config.env!r} has {space.text}"
    for name in ("squash_output", "use_sde"):
        if getattr(config, name) and space.sizes:
            raise ConfigError(f"{name}: True needs continuous actions; {shown}")
    if config.squash_output and not np.isfinite(np.subtract(space.high, space.low)).all():
        raise ConfigError(f"squash_output: True needs finite bounds; {shown}")
    known = {path.split("/")[0] for path in env.obs_spaces} - {""}
    if config.value_obs and not isinstance(config.policy, str):
        refuse("value_obs", config.value_obs, "left out with a policy of your own, which sees all")
    if config.value_obs and not known > set(config.value_obs):
        right = f"some but not all of {sorted(known)}, the parts of what {config.env!r} shows"
        refuse("value_obs", config.value_obs, right)
    smallest = {"cnn": 3, "nature_cnn": 36}.get(config.policy, 0)
    for part in env.obs_spaces.values():
        if part.side < smallest and (len(env.obs_spaces) == 1 or part.side >= 3):
            needs = f"images (height, width, channels) from {smallest} by {smallest} on"
            shown = f"{config.env!r} shows {part.text}; use mlp"
            raise ConfigError(f"policy: {config.policy!r} needs {needs}; {shown}")


def check_output(result, n_results, batch, action_space):
    """Refuse a module of the user's that returns what PPO cannot use."""
    if not isinstance(result, tuple) or len(result) != n_results:
        right = "a distribution and values, and with a memory the memory after the step"
        found = jax.tree.map(jnp.shape, result)
        raise ConfigError(f"policy: the module returns arrays {found}; it must return {right}")
    distribution, value = result[:2]
    if not hasattr(distribution, "log_prob"):
        found = type(distribution).__name__
        raise ConfigError(f"policy: {found} is no distribution; return Categorical(logits) or such")
    shape = getattr(value, "shape", None)
    if shape != batch:
        right = f"of shape {shape}; it must be {batch}, as [..., 0] of a Dense(1)"
        raise ConfigError(f"policy: the module returns values {right}")
    shape = batch
    if action_space.kind != "integer":
        shape = (*batch, math.prod(action_space.shape))
    found = jax.eval_shape(distribution.mode).shape
    n_choices = sum(action_space.sizes)
    logits = getattr(distribution, "logits", jnp.zeros(n_choices))
    if found != shape or logits.shape[-1] != n_choices:
        found = f"actions of shape {found} among {logits.shape[-1]}"
        raise ConfigError(f"policy: the module gives {found}; it must serve {action_space.text}")


def check_report(config, report):
    """Refuse a loss of the user's that reports what cannot be used."""
    if not isinstance(report, dict) or any(x.shape for x in report.values()):
        raise ConfigError("loss_function: it must return a scalar and a dictionary of scalars")
    if config.target_kl is not None and "approx_kl" not in report:
        raise ConfigError("loss_function: it must report approx_kl, which target_kl is a limit of")


def refuse(name, value, right):
    """Raise the `ConfigError` for a value, with what would be right."""
    raise ConfigError(f"{name}: {one_line(repr(value))} won't do; it must be {right}")


def one_line(text):
    """Return a text with each run of spaces and line ends as one space."""
    return " ".join(str(text).split())


def closest(name, known):
    """Return "; did you mean …?" with the known names nearest to `name`, or "" for none."""
    name = str(name).lower()
    lower = {str(candidate).lower(): str(candidate) for candidate in known}
    near = [lower[match] for match in difflib.get_close_matches(name, lower)]
    for ours, others in ELSEWHERE.items():
        if name in others.split() and ours in known:
            near = [ours]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest_divisors(wanted, whole, unit=1):
    """Return the divisors of `whole` next to `wanted` on both sides, in words, times `unit`."""
    known = divisors(whole)
    place = np.searchsorted(known, wanted)
    below, above = np.take(known, [place - 1, place], mode="clip")
    return f"{unit * below} and {unit * above}"


def divisors(whole):
    """Return the divisors of a whole number, the least first."""
    return [n for n in range(1, whole + 1) if whole % n == 0]


ELSEWHERE = {  # names of the same settings in other libraries
    "env": "env_id env_name",
    "total_timesteps": "total_steps num_timesteps total_frames",
    "n_envs": "num_envs num_env",
    "n_steps": "num_steps unroll_length frames_per_batch",
    "batch_size": "num_minibatches n_minibatches minibatch_size mini_batch_size",
    "n_epochs": "update_epochs num_epochs ppo_epochs",
    "learning_rate": "lr anneal_lr anneal_learning_rate",
    "gae_lambda": "lambda lmbda lam",
    "clip_range": "clip_eps clip_coef clip_epsilon",
    "ent_coef": "entropy_coeff entropy_cost",
    "n_seeds": "num_seeds seeds",
}
# What differs from the defaults, by environment. CartPole's and Pendulum's settings were tuned
# until the tests of learning passed with room; the others are of usual sizes.
CARTPOLE = dict(total_timesteps=300_000, n_envs=32, n_steps=32, n_epochs=8)
CARTPOLE |= dict(gamma=0.98, gae_lambda=0.9, learning_rate="linear_1e-3")
ACROBOT = dict(total_timesteps=500_000, gamma=0.99, gae_lambda=0.95, ent_coef=0.01)
PENDULUM = dict(n_envs=16, n_steps=128, batch_size=256, n_epochs=10, gamma=0.9, gae_lambda=0.95)
IMAGES = dict(total_timesteps=10_000_000, learning_rate="linear_1e-3", ent_coef=0.01, net_arch=())
PRESETS = {
    "CartPole-v1": CARTPOLE,
    "Acrobot-v1": CARTPOLE | ACROBOT,
    "Pendulum-v1": CARTPOLE | PENDULUM,
    "Asterix-MinAtar": IMAGES,
    "Breakout-MinAtar": IMAGES,
    "Freeway-MinAtar": IMAGES,
    "Seaquest-MinAtar": IMAGES,
    "SpaceInvaders-MinAtar": IMAGES,
    "Pong-misc": IMAGES,
}

# Suites: sizes and coefficients with which each suite's own PPO has been published, for GPUs. Those
# of single environments were tried on two cores.
BRAX = dict(total_timesteps=50_000_000, n_envs=2048, n_steps=10, batch_size=640)
BRAX |= dict(learning_rate="linear_3e-4", normalize_obs=True, normalize_reward=True)
PLAYGROUND = dict(total_timesteps=30_000_000, n_envs=2048, n_steps=64, batch_size=4096)
PLAYGROUND |= dict(n_epochs=16, normalize_obs=True, normalize_reward=True)
CRAFTAX = dict(total_timesteps=10_000_000, n_envs=1024, n_steps=64, batch_size=8192, ent_coef=0.01)
CRAFTAX |= dict(learning_rate="linear_2e-4", gae_lambda=0.8, max_grad_norm=1.0)
CRAFTAX |= dict(net_arch=(512, 512, 512), rnn_hidden_size=512)
GRIDS = dict(n_steps=64, learning_rate="linear_1e-3", ent_coef=0.01, gamma=0.97)
JUMANJI = GRIDS | dict(gamma=0.99, normalize_obs=True, normalize_reward=True)
ONE_JOINT = dict(n_envs=64, batch_size=512, learning_rate="linear_1e-3")
PRESETS |= {
    "brax": BRAX,
    "brax/inverted_pendulum": BRAX | ONE_JOINT | dict(total_timesteps=400_000, n_steps=32),
    "playground": PLAYGROUND,
    "playground/CartpoleBalance": PLAYGROUND
    | ONE_JOINT
    | dict(total_timesteps=2_000_000, n_epochs=8),
    "craftax": CRAFTAX,
    "craftax/Craftax-Classic-Symbolic-v1": CRAFTAX
    | dict(total_timesteps=1_000_000, n_envs=64, batch_size=512, net_arch=(256, 256))
    | dict(learning_rate="linear_5e-4"),
    "jumanji": JUMANJI,
    "jumanji/Snake-v1": GRIDS | dict(gamma=0.99, policy="cnn", net_arch=()),
    "navix": GRIDS | dict(policy="mlp"),
    "xminigrid": GRIDS | dict(policy="gru", net_arch=(64,)),
}


def find_preset(name):
    """Return the preset of an environment, or else that of its suite."""
    return PRESETS.get(name) or PRESETS.get(name.rpartition("/")[0], {})


TRACED = [field.name for field in dataclasses.fields(PPOConfig) if "traced" in field.metadata]
STATIC = [name for name in fields_of(PPOConfig) if name not in TRACED]


def flatten_config(config):
    """Return a config's leaves, and what belongs to the program."""
    leaves = [getattr(config, name) for name in TRACED]
    return leaves, tuple(getattr(config, name) for name in STATIC)


def unflatten_config(program, leaves):
    """Return a config past its checks: leaves may be tracers, axes or shapes here."""
    config = object.__new__(PPOConfig)
    for name, value in zip(STATIC + TRACED, (*program, *leaves)):
        object.__setattr__(config, name, value)
    return config


jax.tree_util.register_pytree_node(PPOConfig, flatten_config, unflatten_config)


# ==================================================================================================
# 8. Evaluation
# ==================================================================================================


@functools.partial(jax.jit, static_argnames=("n_episodes", "deterministic"))
def evaluate(config, agent, key, n_episodes, deterministic=True, max_steps=100_000):
    """Play whole episodes side by side and return their undiscounted returns, (n_episodes,).

    deterministic: take the most probable action instead of a sample. An episode that has not ended
    after max_steps steps has the return NaN.
    """
    check_one(agent)
    if n_episodes < 1:
        refuse("n_episodes", n_episodes, "a whole number from 1 on")
    env = make_env(config)
    network = make_network(config)
    reset_key, noise_key, env_key = jax.random.split(key, 3)
    starts = env.reset(jax.random.split(reset_key, n_episodes))  # no later episode counts

    def playing(carry):
        t, _, _, _, over = carry
        return ~jnp.all(over) & (t < max_steps)

    def step(carry):
        t, (obs, env_states), memory, returns, over = carry
        distribution, _, memory = act(network, agent, obs, memory)
        action = distribution.mode()
        if not deterministic:
            draw_key = jax.random.fold_in(noise_key, t // config.noise_steps)
            action = distribution.sample(distribution.noise(draw_key, 1)[0])
        keys = jax.random.split(jax.random.fold_in(env_key, t), n_episodes)
        new, outcome = env.step(keys, env_states, action, starts)
        returns = returns + jnp.where(over, 0.0, outcome.reward)
        return t + 1, new, memory, returns, over | outcome.terminated | outcome.truncated

    memory = network.initial_memory(n_episodes)
    nothing = jnp.zeros(n_episodes, jnp.float32)
    carry = (jnp.int32(0), starts, memory, nothing, nothing > 0)
    _, _, _, returns, over = jax.lax.while_loop(playing, step, carry)
    return jnp.where(over, returns, unknown())


def check_one(agent):
    """Refuse several agents in place of one."""
    if agent.n_updates.ndim:
        right = "one, as jax.tree.map(lambda x: x[0], agents); jax.vmap(evaluate) plays several"
        refuse("agent", agent, right)


def make_policy(config, agent):
    """Return `policy(obs, key=None, memory=None)`, which gives an action and the memory after it.

    obs: one observation or a batch (B, …), as the environment shows them; gymnasium's too; with or
    without the parts of value_obs. key: to sample the action; None: the most probable one. memory:
    what the call before returned; None when an episode begins. Actions are NumPy arrays as the
    environment takes them.
    """
    check_one(agent)
    env = make_env(config)
    network = make_network(config)

    @jax.jit
    def act_on_batch(obs, key, memory):
        distribution, _, memory = act(network, agent, obs, memory)
        action = distribution.mode()
        if key is not None:
            action = distribution.sample(distribution.noise(key, 1)[0])
        return env.to_environment(action), memory

    def policy(obs, key=None, memory=None):
        obs = jax.tree.map(np.asarray, obs, is_leaf=lambda x: isinstance(x, list))
        seen = named_leaves(obs)
        batch = batch_shape(obs, pick(env.obs_spaces, seen))
        if not batch:
            obs = jax.tree.map(lambda x: x[None], obs)
        size = batch or (1,)
        for name in config.value_obs:  # for the value, which is not asked for
            parts = env.types[0][name]
            zeros = jax.tree.map(lambda x: np.zeros((*size, *x.shape[1:]), x.dtype), parts)
            obs = {name: zeros} | obs
        if memory is None:
            memory = network.initial_memory(*size)
        action, memory = act_on_batch(obs, key, memory)
        if not batch:
            action = jax.tree.map(lambda x: x[0], action)
        return jax.device_get(action), memory

    return policy


# ==================================================================================================
# 9. Suites
# ==================================================================================================


class SuiteState(NamedTuple):
    """The state of an environment of a suite, with what gymnax's interface asks of a state."""

    inner: Any  # the suite's own state
    n_steps: jax.Array  # () int32, since the episode began
    truncated: jax.Array  # () bool


@flax.struct.dataclass
class TimeLimit:
    """The parameters of environments that know no time limit themselves."""

    max_steps: int  # of an episode


@flax.struct.dataclass
class NoParams:
    """The parameters of environments without any."""


class SuiteEnv:
    """An environment of a suite with gymnax's interface; each subclass adapts those of one suite.

    A subclass has `start(key, params)`, which returns the suite's own state and the observation,
    and `advance(key, inner, action, params, n_steps)`, which also returns the reward, terminated,
    truncated, and a dictionary of numbers whose sums over episodes are reported.
    """

    resets_cost_much = True  # as much as many steps
    default_params = NoParams()

    def __init__(self, env):
        layer = self.env = env
        while layer is not None:
            name = type(layer).__name__
            if re.search("(?<!No)AutoReset|Vmap|Episode", name):
                right = f"{name} begins episodes or ends them by itself; leave this wrapper out"
                raise ConfigError(f"env: {right}")
            layer = vars(layer).get("env", vars(layer).get("_env"))

    def __repr__(self):
        return f"{type(self.env).__name__}()"

    def __hash__(self):
        return id(self.env)

    def __eq__(self, other):
        return isinstance(other, SuiteEnv) and self.env is other.env

    @functools.partial(jax.jit, static_argnums=0)  # traced once, for all that call it
    def reset(self, key, params):
        """Return the observation and the state with which an episode begins."""
        inner, obs = self.start(old_key(key), params)
        return obs, SuiteState(inner, jnp.int32(0), jnp.array(False))

    @functools.partial(jax.jit, static_argnums=0)
    def step_env(self, key, state, action, params):
        """Return what gymnax's step_env does."""
        n_steps = state.n_steps + 1
        result = self.advance(old_key(key), state.inner, action, params, n_steps)
        inner, obs, reward, terminated, truncated, metrics = result
        state = SuiteState(inner, n_steps, truncated)
        return obs, state, reward, terminated, {"metrics": metrics}

    def is_truncated(self, state, params):
        """Tell whether the time limit was reached."""
        return state.truncated

    def observation_space(self, params):
        """Return the space of observations, known by their shapes and types."""
        return space_of(jax.eval_shape(self.reset, jax.random.key(0), params)[0])


class BraxEnv(SuiteEnv):
    """Brax, https://github.com/google/brax."""

    def __init__(self, env, max_steps=1000):
        super().__init__(env)
        self.default_params = TimeLimit(max_steps)

    def start(self, key, params):
        """Begin an episode."""
        inner = self.env.reset(key)
        return inner, inner.obs

    def advance(self, key, inner, action, params, n_steps):
        """Do a step; without the suite's wrappers, `done` is no time limit."""
        inner = self.env.step(inner, action)
        ends = (inner.done > 0.5, n_steps >= params.max_steps)
        return inner, inner.obs, inner.reward, *ends, inner.metrics

    def action_space(self, params):
        """Return the space of actions."""
        from gymnasium import spaces

        return spaces.Box(-1.0, 1.0, (self.env.action_size,))


class PlaygroundEnv(BraxEnv):
    """MuJoCo Playground, https://github.com/google-deepmind/mujoco_playground."""

    def __init__(self, env):
        super().__init__(env, env._config.episode_length)

    def advance(self, key, inner, action, params, n_steps):
        """Do a step; one that leads to numbers that are not finite ends the episode."""
        inner, obs, reward, *more = super().advance(key, inner, action, params, n_steps)
        clean = functools.partial(jnp.nan_to_num, posinf=0.0, neginf=0.0)
        return inner, *jax.tree.map(clean, (obs, reward)), *jax.tree.map(clean, more)


class CraftaxEnv(SuiteEnv):
    """Craftax, https://github.com/MichaelTMatthews/Craftax."""

    def __init__(self, env):
        super().__init__(env)
        self.default_params = env.default_params

    def start(self, key, params):
        """Begin an episode."""
        obs, inner = self.env.reset_env(key, params)
        return inner, obs

    def advance(self, key, inner, action, params, n_steps):
        """Do a step; achievements are told when an episode ends, in percent."""
        obs, inner, reward, _, info = self.env.step_env(key, inner, action, params)
        endless = params.replace(max_timesteps=np.iinfo(np.int32).max)
        ends = (self.env.is_terminal(inner, endless), inner.timestep >= params.max_timesteps)
        metrics = {name: x for name, x in info.items() if name.startswith("Achievements/")}
        return inner, obs, reward, *ends, metrics

    def action_space(self, params):
        """Return the space of actions."""
        return self.env.action_space(params)


class JumanjiEnv(SuiteEnv):
    """Jumanji, https://github.com/instadeepai/jumanji; the rewards of several agents add up."""

    def __init__(self, env):
        if env.reward_spec.shape:
            env = importlib.import_module("jumanji.wrappers").MultiToSingleWrapper(env)
        super().__init__(env)
        spec = env.action_spec
        mask = getattr(env.observation_spec, "action_mask", None)
        self.sizes = tuple(np.ravel(getattr(spec, "num_values", ())).tolist())
        # Whether the mask tells which combinations of an action's parts are allowed.
        self.is_combined = mask is not None and len(self.sizes) > 1 and mask.shape == self.sizes
        if mask is not None and spec.shape and not self.is_combined:
            self.sizes = (mask.shape[1],) * mask.shape[0]

    def start(self, key, params):
        """Begin an episode."""
        inner, timestep = self.env.reset(key)
        return inner, encode(self.env.observation_spec, timestep.observation)

    def advance(self, key, inner, action, params, n_steps):
        """Do a step; what the suite's `extras` are when an episode ends is reported."""
        if self.is_combined:
            action = jnp.stack(jnp.unravel_index(action, self.sizes))
        inner, timestep = self.env.step(inner, action.astype(self.env.action_spec.dtype))
        obs = encode(self.env.observation_spec, timestep.observation)
        is_last, is_over = timestep.last(), timestep.discount == 0
        extras = named_leaves(timestep.extras)
        metrics = {name: jnp.where(is_last, x, 0.0) for name, x in extras.items()}
        return inner, obs, timestep.reward, is_last & is_over, is_last & ~is_over, metrics

    def action_space(self, params):
        """Return the space of actions."""
        from gymnasium import spaces

        spec = self.env.action_spec
        if not self.sizes:
            low, high = np.broadcast_arrays(spec.minimum, spec.maximum, np.empty(spec.shape))[:2]
            return spaces.Box(low, high)
        if self.is_combined or not spec.shape:
            return spaces.Discrete(math.prod(self.sizes))
        return spaces.MultiDiscrete(self.sizes)


def encode(spec, x):
    """Return observations of Jumanji as a network takes them.

    Integers of few values become one-hot vectors, those of many a number from 0 to 1.
    """
    parts = {name: part for name, part in vars(spec).items() if hasattr(part, "validate")}
    if parts:
        return {name: encode(part, getattr(x, name)) for name, part in parts.items()}
    x = jnp.asarray(x, spec.dtype)
    if not jnp.issubdtype(spec.dtype, jnp.integer) or not hasattr(spec, "maximum"):
        return x
    low, high = int(np.asarray(spec.minimum).min()), int(np.asarray(spec.maximum).max())
    if 1 < high - low < 64:
        return planes((x - low)[..., None], [high - low + 1])
    return (x - jnp.float32(low)) / (high - low)


class NavixEnv(SuiteEnv):
    """Navix, https://github.com/epignatelli/navix."""

    def __init__(self, env):
        super().__init__(env)
        self.default_params = TimeLimit(env.max_steps)

    def start(self, key, params):
        """Begin an episode."""
        inner = self.env.reset(key)
        return inner, self.show(inner)

    def advance(self, key, inner, action, params, n_steps):
        """Do a step, without the suite's own reset."""
        env = self.env.replace(max_steps=params.max_steps)
        inner = env._step(inner, action)
        ends = (inner.is_termination(), inner.is_truncation())
        return inner, self.show(inner), inner.reward, *ends, {}

    def show(self, inner):
        """Return an observation, a grid of identifiers as planes of zeros and ones."""
        if self.env.observation_fn.__name__.startswith("symbolic"):
            return planes(inner.observation, [11, 6, 4])  # tags, colours, states
        return inner.observation

    def action_space(self, params):
        """Return the space of actions."""
        from gymnasium import spaces

        return spaces.Discrete(len(self.env.action_set))


class MiniGridEnv(SuiteEnv):
    """XLand-MiniGrid, https://github.com/dunnolab/xland-minigrid. env: what its `make` returns."""

    def __init__(self, env):
        self.given = None  # parameters beside the environment
        if isinstance(env, tuple):
            self.given = env[1]
        else:
            env = (env, env.default_params())
        super().__init__(env[0])
        self.default_params = env[1]
        rules = getattr(env[1], "ruleset", None)
        if rules is not None and not np.any(np.asarray(rules.goal)):
            right = "a ruleset: env=(env, params), as xminigrid.make gives them, with one in params"
            raise ConfigError(f"env: {self!r} has no goal without {right}")

    def __hash__(self):
        return id(self.env)

    def __eq__(self, other):
        return super().__eq__(other) and self.given is other.given

    def start(self, key, params):
        """Begin an episode."""
        inner = self.env.reset(params, key)
        return inner, self.show(inner)

    def advance(self, key, inner, action, params, n_steps):
        """Do a step."""
        inner = self.env.step(params, inner, action)
        is_last, is_over = inner.last(), inner.discount == 0
        return inner, self.show(inner), inner.reward, is_last & is_over, is_last & ~is_over, {}

    def show(self, inner):
        """Return an observation, grids of identifiers as planes of zeros and ones."""

        def show_part(x):
            if x.ndim == 3 and x.shape[-1] == 2:
                return planes(x, [13, 12])  # tiles and colours
            return x

        return jax.tree.map(show_part, inner.observation)

    def action_space(self, params):
        """Return the space of actions."""
        from gymnasium import spaces

        return spaces.Discrete(self.env.num_actions(params))


def planes(identifiers, sizes):
    """Return one-hot vectors (…, sum(sizes)) of identifiers (…, len(sizes)), as booleans."""
    parts = []
    for i, size in enumerate(sizes):
        parts.append(jax.nn.one_hot(identifiers[..., i], size, dtype=bool))
    return jnp.concatenate(parts, axis=-1)


def space_of(obs):
    """Return the space of observations whose shapes and types are given."""
    from gymnasium import spaces

    if isinstance(obs, Mapping):
        return spaces.Dict({name: space_of(part) for name, part in obs.items()})
    bounds = {jnp.bool_: (0, 1), jnp.uint8: (0, 255)}
    low, high = bounds.get(obs.dtype.type, (-np.inf, np.inf))
    return spaces.Box(low, high, obs.shape, obs.dtype)


def old_key(key):
    """Return a random key as integers, for suites that know no others."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)
    return key


def suite_of(module, project, adapt, make, names):
    """Return the Suite of a module that is imported when one of its environments is asked for.

    project: what pip calls it. make: from the module and a name to the suite's own object. names:
    from the module to those that can be made.
    """

    def load():
        try:
            return importlib.import_module(module)
        except Exception as error:  # whatever a suite does that does not fit what is installed
            why = one_line(f"{type(error).__name__}: {error}")
            why = f"{module} can't be imported ({why}); pip install {project}"
            raise ConfigError(f"env: {why}") from error

    return Suite(
        make=lambda name: adapt(make(load(), name)),
        names=lambda: sorted(names(load())),
        package=module.partition(".")[0],
        adapt=adapt,
    )


CRAFTAX = ("Symbolic-v1", "Pixels-v1", "Classic-Symbolic-v1", "Classic-Pixels-v1")
SUITES |= {
    "brax": suite_of(
        "brax.envs",
        "brax",
        BraxEnv,
        make=lambda brax, name: brax.get_environment(name, backend="positional"),
        names=lambda brax: brax._envs,
    ),
    "playground": suite_of(
        "mujoco_playground",
        "playground",
        PlaygroundEnv,
        make=lambda module, name: module.registry.load(name, config_overrides={"impl": "jax"}),
        names=lambda module: module.registry.ALL_ENVS,
    ),
    "craftax": suite_of(
        "craftax.craftax_env",
        "craftax",
        CraftaxEnv,
        make=lambda craftax, name: craftax.make_craftax_env_from_name(name, auto_reset=False),
        names=lambda craftax: [f"Craftax-{kind}" for kind in CRAFTAX],
    ),
    "jumanji": suite_of(
        "jumanji",
        "jumanji",
        JumanjiEnv,
        make=lambda jumanji, name: jumanji.make(name),
        names=lambda jumanji: jumanji.registered_environments(),
    ),
    "navix": suite_of(
        "navix",
        "navix",
        NavixEnv,
        make=lambda navix, name: navix.make(name),
        names=lambda navix: navix.registry(),
    ),
    "xminigrid": suite_of(
        "xminigrid",
        "xminigrid",
        MiniGridEnv,
        make=lambda xminigrid, name: xminigrid.make(name),
        names=lambda xminigrid: xminigrid.registered_environments(),
    ),
}


# ==================================================================================================
# 10. Populations
# ==================================================================================================


class Population(NamedTuple):
    """Agents that one compiled program trains: what `train_population` takes, and their names."""

    config: PPOConfig  # a number in which agents differ is an array (S,)
    keys: jax.Array  # (S,)
    rows: list[dict]  # of each agent: `setting`, `seed` within it, and the swept settings


def grid(config, n_seeds=1, seed=0, n_samples=None, **values):
    """Return populations that train n_seeds agents for each combination of settings' values.

    values: a list for each swept setting. n_samples: train this many combinations, drawn at random;
    a text such as uniform_0.9_0.999 or log_uniform_1e-5_1e-2 then stands for all numbers between.
    seed: of the draws and of the agents' keys, which are the same for all settings.

    Numbers share one population, and with it one compiled program. Settings that decide shapes or
    code have a population for each combination. Raises `ConfigError` for a value that cannot work.

        for population in grid(config, learning_rate=[1e-4, 1e-3], n_seeds=8):
            agents, metrics = train_population(population)
    """
    for name in values:
        if name not in fields_of(PPOConfig):
            raise ConfigError(f"{name}: no such setting{closest(name, fields_of(PPOConfig))}")
    values = pick(values, fields_of(PPOConfig))
    settings = list_settings(config.replace, values, n_samples, seed)
    return make_populations(settings, n_seeds, seed)


def list_settings(make_config, values, n_samples=None, seed=0):
    """Return pairs of the chosen values and a config: all combinations, or n_samples drawn ones."""
    for name, choices in values.items():
        if not isinstance(choices, list) or not choices:
            refuse(name, choices, "a value, or a list of several")
    is_random = [name for name in values if any(map(find_range, values[name]))]
    if n_samples is None:
        for name in is_random:
            refuse(name, values[name], "numbers, or n_samples be set to draw some from a range")
        combinations = itertools.product(*values.values())
    else:
        if not is_random and all(len(choices) == 1 for choices in values.values()):
            refuse("n_samples", n_samples, "left out where no setting has several values")
        generator = np.random.default_rng(seed)
        combinations = []
        for _ in range(n_samples):
            combinations.append([draw_value(generator, *item) for item in values.items()])
    settings = []
    for combination in combinations:
        chosen = dict(zip(values, combination))
        settings.append((chosen, make_config(**chosen)))
    return settings


def find_range(value):
    """Match a text such as uniform_0.9_0.999 or log_uniform_1e-5_1e-2."""
    return re.fullmatch(r"(log_)?uniform_([^_]+)_([^_]+)", str(value))


def draw_value(generator, name, choices):
    """Return one of the choices at random; of a range, a number in it with four digits."""
    choice = choices[generator.integers(len(choices))]
    found = find_range(choice)
    if not found:
        return choice
    low, high = read_word(found[2]), read_word(found[3])
    are_numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if name not in TRACED or not are_numbers or not low < high or (found[1] and low <= 0):
        right = "of a setting that is a number, and like uniform_0.9_0.999 or log_uniform_1e-5_1e-2"
        refuse(name, choice, right)
    if found[1]:
        return float(f"{math.exp(generator.uniform(math.log(low), math.log(high))):.4g}")
    return float(f"{generator.uniform(low, high):.4g}")


def make_populations(settings, n_seeds, seed, evolve=()):
    """Return populations of pairs of chosen values and a config, those of one program together.

    evolve: names of numbers whose values are what agents of one setting begin with; each setting
    is a population of its own then.
    """
    n_keys = n_seeds * len(settings) if evolve else n_seeds
    keys = jax.random.split(jax.random.key(seed), n_keys)
    groups, known = {}, {}
    for chosen, config in settings:
        names = [name for name in chosen if name not in evolve]
        shown = {name: plain_setting(name, getattr(config, name)) for name in names}
        shown = {name: "None" if value is None else value for name, value in shown.items()}
        number, agents = known.setdefault(str(shown), (len(known), []))
        if agents and not evolve:
            continue  # given twice
        program = jax.tree.structure(config)
        if evolve:
            program = (number, program)
        for _ in range(n_seeds):
            row = {"setting": number, "seed": len(agents), **shown}
            agents.append(row)
            groups.setdefault(program, []).append((config, row))
    populations = []
    for group in groups.values():
        configs, rows = zip(*group)
        config = jax.tree.map(stack_numbers, *configs)
        seeds = np.array([row["seed"] for row in rows])
        populations.append(Population(config, keys[seeds], list(rows)))
    return populations


def stack_numbers(*numbers):
    """Return an array of numbers, or the number if all are the same."""
    return numbers[0] if len(set(map(float, numbers))) == 1 else np.float32(numbers)


def use_every_core():
    """Make every CPU core a device of its own, for `train_population`; call it before JAX starts.

    XLA runs networks of this size on about one core. A number that the user has set stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices < 1 and "device_count" not in flags:
        n_cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):
            n_cores = len(os.sched_getaffinity(0))
        jax.config.update("jax_num_cpu_devices", n_cores)


CHUNK_UPDATES = 128  # at most, in one call of the device, which holds their metrics
FIRST_METRICS = ("timesteps", "return", "length")  # the others follow by name


def train_population(
    config,
    start=None,
    callback=None,
    callback_seconds=0.5,
    run_dir=None,
    reset_num_timesteps=False,
    progress_bar=None,
    memory_limit=None,
    evolve=(),
    evolve_every=None,
):
    """Train an agent for each key on all devices: `jax.vmap(train, (None, 0))`, but faster.

    config, start: a config, of which a number may be an array (S,): each agent then has its own;
    and keys (S,), or agents of an earlier run, which go on to config.total_timesteps in all. Or a
    population of `grid` in place of both.
    callback: called as callback(timesteps, metrics, agents) between chunks of updates, about every
    callback_seconds, with the chunk's metrics (S, updates); ends the run where it returns true. The
    agents are valid until the callback returns.
    run_dir: the folder for what was learnt before an exception; None: a new temporary one.
    reset_num_timesteps: let agents of an earlier run begin a new one, environments reset.
    progress_bar: show progress; None: in a notebook alone.
    memory_limit: bytes that training may take on each device; None: what a GPU has. Agents that do
    not fit at once take turns.
    evolve: names of numbers that the population finds by itself (`exchange`), every evolve_every
    updates (None: twenty times in a run). The metrics hold these numbers too.

    Returns agents and metrics (NumPy) as `train` does, with a leading axis of S; with several
    processes, this process's agents. Chunks and turns change no number.
    """
    if isinstance(config, Population):
        config, start, _ = config
    n_agents = check_start(config, start, reset_num_timesteps)
    n_done = count_updates(start, reset_num_timesteps)
    bar = make_bar(progress_bar, config, n_agents, n_done)
    if bar.disable and callback is None:
        callback_seconds = math.inf
    options = dict(restart=reset_num_timesteps, memory_limit=memory_limit)
    options |= dict(evolve=evolve, evolve_every=evolve_every)
    chunks = train_chunks(config, start, n_agents, callback_seconds, **options)
    history, agents = [], None
    try:
        for config, agents, metrics in chunks:
            history.append(metrics)
            show_progress(bar, config, metrics)
            timesteps = int(metrics["timesteps"][0, -1])
            if callback and callback(timesteps, metrics, agents):
                break
    except BaseException as error:
        if history and not agents.n_updates.is_deleted():  # as they are where a chunk failed
            folder = run_dir or tempfile.mkdtemp(prefix="ppo_jax-")
            save_agents(folder, config, agents)
            error.add_note(f"What was learnt is in {folder}; load_agents reads it.")
        raise
    finally:
        bar.close()
    metrics = jax.tree.map(lambda *chunks: np.concatenate(chunks, axis=1), *history)
    return agents, pick(metrics, history[0])


def train_chunks(
    config, start, n_agents, seconds, restart=False, memory_limit=None, evolve=(), evolve_every=None
):
    """Train a population as `train_population` says; yield its state after each chunk of updates.

    The state: the config, in which `evolve` changes numbers; agents (S, …), valid until the next
    chunk; the chunk's metrics (S, updates). seconds: what a chunk is to take, about.
    """
    evolve = tuple(evolve)
    check_evolving(config, evolve)
    train = training_program(config, evolve, n_agents)
    turns = plan_turns(train, config, n_agents, memory_limit)
    if evolve and turns.shape[1] < n_agents:
        refuse("evolve", evolve, "left out where agents take turns, or several processes train")
    states = first_states(config, start, restart, turns, n_agents)
    done = count_updates(start, restart)
    generation = evolve_every or max(1, config.n_updates // 20)
    capacity = longest_chunk(config)
    size = capacity if math.isinf(seconds) else 1
    while done < config.n_updates:
        n_updates = min(size, capacity, config.n_updates - done)
        if evolve:
            n_updates = min(n_updates, generation - done % generation)
        limits = (jnp.int32(n_updates), done > 0 and done % generation == 0)
        done += n_updates
        begin = time.perf_counter()
        reports = []
        for turn, state in enumerate(states):
            states[turn], report = take_turn(train, state, limits, evolve, len(states) > 1)
            reports.append(report)
        metrics = jax.tree.map(lambda *parts: np.concatenate(parts), *reports)
        duration, metrics = from_processes((np.array([time.perf_counter() - begin]), metrics))
        if size < capacity:
            size = max(1, min(int(n_updates * seconds / duration.max()), 2 * size))
        metrics = {name: x[:n_agents, :n_updates] for name, x in metrics.items()}
        updates = np.arange(done - n_updates + 1, done + 1, dtype=np.int64)
        timesteps = np.broadcast_to(updates * config.rollout_size, metrics["return"].shape)
        metrics["timesteps"] = timesteps
        if evolve:
            config = trim(states[0][0], n_agents)
        yield config, join_turns(states, n_agents), pick(metrics, FIRST_METRICS) | metrics


def longest_chunk(config):
    """Return the most updates in one call of the device."""
    return min(config.n_updates, CHUNK_UPDATES)


def training_program(config, evolve, n_agents):
    """Return `train_chunk` for the compiler."""
    options = dict(capacity=longest_chunk(config), evolve=tuple(evolve), n_agents=n_agents)
    return compiled(train_chunk, donate=(1,), **options)


def train_chunk(config, agents, n_updates, is_generation, capacity, evolve, n_agents):
    """Train all agents (rows, …) for n_updates; when a generation begins, let them evolve first."""
    if evolve:
        change = functools.partial(exchange, evolve, n_agents)
        config, agents = jax.lax.cond(is_generation, change, lambda *same: same, config, agents)
    train = functools.partial(train_updates, capacity=capacity)
    agents, metrics = spread(train, config, agents, n_updates)
    return config, agents, metrics


def take_turn(train, state, limits, evolve, moves):
    """Train agents for a chunk; returns their state and metrics (rows, capacity), on the host.

    state: config and agents. limits: of `train_chunk`. moves: whether the agents' place is the host
    and they are on the devices for this chunk alone.
    """
    if moves:
        state = jax.device_put(state, places_of(state))
    *state, metrics = train(*state, *limits)
    metrics = jax.tree.map(np.asarray, metrics)
    for name in evolve:
        numbers = np.asarray(base_number(getattr(state[0], name)))
        metrics[name] = np.broadcast_to(numbers[:, None], metrics["return"].shape)
    if moves:
        state = put_on_host(state)
    return state, metrics


def exchange(names, n_agents, config, agents):
    """Let the worst fifth copy what agents of the best fifth learnt, and change numbers for each.

    A copy's number is 0.8 or 1.2 times that of its source; of a fraction such as gamma, its
    distance from 1 is. names: of these numbers. Rows from n_agents on repeat the first ones.
    Jaderberg et al., "Population Based Training of Neural Networks", 2017,
    https://arxiv.org/abs/1711.09846
    """
    episode_return = jax.vmap(mean_episode)(agents)[:n_agents, 0]
    order = jnp.argsort(jnp.where(jnp.isnan(episode_return), -jnp.inf, episode_return))
    n_copies = max(1, n_agents // 5)
    key = side_key(agents.key[0], agents.n_updates[0].astype(jnp.uint32))
    source_key, *keys = jax.random.split(key, 1 + len(names))
    best = jax.random.choice(source_key, order[-n_copies:], (n_copies,))
    source = jnp.arange(n_agents).at[order[:n_copies]].set(best)
    is_copy = source != jnp.arange(n_agents)
    repeats = jnp.arange(len(agents.n_updates)) % n_agents
    copied = learnt(agents) | pick(vars(agents), ("recent_episodes", "n_recent"))
    agents = agents.replace(**jax.tree.map(lambda x: x[source[repeats]], copied))
    changes = {}
    for name, key in zip(names, keys):
        factor = jnp.where(jax.random.bernoulli(key, shape=(n_agents,)), 1.2, 0.8)
        factor = jnp.where(is_copy, factor, 1.0)[repeats]
        value = jax.tree.map(lambda x: x[source[repeats]], getattr(config, name))
        changes[name] = change_number(name, value, factor)
    state = (config.replace(**changes), agents)
    return jax.lax.with_sharding_constraint(state, places_of(state))


def base_number(value):
    """Return a number, or that from which a schedule starts."""
    return value.initial if isinstance(value, Schedule) else value


def change_number(name, value, factor):
    """Return a setting's value times a factor; of a fraction, its distance from 1 is."""
    if isinstance(value, Schedule):
        return value.replace(initial=change_number(name, value.initial, factor))
    if fields_of(PPOConfig)[name].metadata["kind"] == "fraction":
        return 1 - jnp.minimum(1, (1 - value) * factor)
    return value * factor


def check_evolving(config, names):
    """Refuse to evolve what is not a number of every agent."""
    for name in names:
        value = getattr(config, name, None)
        if name not in TRACED or isinstance(value, tuple | jax.tree_util.Partial | None):
            known = ", ".join(name for name in TRACED if getattr(config, name) is not None)
            refuse("evolve", name, f"a number or a schedule among {known}")
        kind = fields_of(PPOConfig)[name].metadata["kind"]
        if np.any(np.equal(base_number(value), 1 if kind == "fraction" else 0)):
            refuse(name, base_number(value), "another one to begin with, for evolve multiplies it")


def check_start(config, start, restart):
    """Return the number of agents of keys or of an earlier run, checked against the config."""
    if isinstance(start, Agent):
        if not start.n_updates.ndim:
            refuse("start", start, "several agents, as jax.vmap(train) gives them")
        n_agents = len(start.n_updates)
        check_resumable(config, start, restart)
    else:
        n_axes = 2  # of keys of the old kind
        if hasattr(start, "dtype") and jnp.issubdtype(start.dtype, jax.dtypes.prng_key):
            n_axes = 1
        if np.ndim(start) < n_axes or not len(start):
            refuse("start", start, "several keys, as jax.random.split(key, 4) gives them")
        n_agents = len(start)
    check_swept(config, n_agents)
    return n_agents


def check_swept(config, n_agents):
    """Refuse a config with a number that is an array of another length."""
    right = f"a number, or an array of shape ({n_agents},) for these agents"
    for name in TRACED:
        for value in jax.tree.leaves(getattr(config, name)):
            if np.shape(value) not in ((), (n_agents,)):
                refuse(name, value, right)


def check_resumable(config, agents, restart):
    """Refuse agents (S, …) that cannot go on, or begin anew, with a config."""
    needed = empty_agent(config)
    if restart:
        agents, needed = learnt(agents), learnt(needed)
    else:
        if agents.n_steps != config.n_steps:
            right = f"{agents.n_steps}, by which steps were counted, or reset_num_timesteps be set"
            refuse("n_steps", config.n_steps, right)
        n_envs = agents.episode_sums.shape[-1]
        if n_envs != config.n_envs:
            right = f"{n_envs}, as the agents have, or reset_num_timesteps be set"
            refuse("n_envs", config.n_envs, right)
        done = count_updates(agents, restart) * config.rollout_size
        if done >= config.total_timesteps:
            right = f"above the {done} that are done, or reset_num_timesteps be set"
            refuse("total_timesteps", config.total_timesteps, right)
    needed = {name: leaf.shape for name, leaf in named_leaves(needed).items()}
    found = {name: leaf.shape[1:] for name, leaf in named_leaves(agents).items()}
    for name in sorted(needed.keys() | found.keys()):
        if needed.get(name) != found.get(name):
            shapes = f"{found.get(name)}, and the settings need {needed.get(name)}"
            raise ConfigError(f"agents: {name} is of shape {shapes}")


def learnt(agent):
    """Return what an agent keeps when it begins a new run, fields by name."""
    return pick(vars(agent), ("params", "opt_state", "obs_statistics", "return_statistics"))


def empty_agent(config):
    """Return one of a config's agents with shapes and dtypes in place of arrays."""
    first = jax.tree.map(lambda leaf: np.ravel(leaf)[0], config)  # of each swept number
    first = first.replace(devices_per_agent=1)  # the shapes are those of all devices together
    return jax.eval_shape(init_agent, first, jax.random.key(0))


def count_updates(start, restart):
    """Return the updates that agents (S, …) have done; 0 for keys and for a new run."""
    if restart or not isinstance(start, Agent):
        return 0
    return int(jax.device_get(start.n_updates)[0])


def begin_agent(config, start, restart):
    """Return the agent of a key, or a copy of an agent; restart: with its environments reset."""
    if not isinstance(start, Agent):
        return init_agent(config, start)
    if restart:
        return init_agent(config, start.key).replace(**learnt(start))
    return start


def plan_turns(train, config, n_agents, memory_limit):
    """Return which agents this process trains: rows (turns, agents at a time), some repeated.

    train: what `compiled` returns. memory_limit: bytes for each device; None: what it has, if JAX
    knows. The program tells what it takes; one program serves for all turns.
    """
    n_processes = jax.process_count()
    n_local = -(-n_agents // n_processes)
    mesh = make_mesh(config, n_local)
    n_places = mesh.shape["agents"]
    n_rows = whole_rows(mesh, n_local)
    memory = mesh.devices[0, 0].memory_stats()
    if memory_limit is None and memory:
        memory_limit = memory["bytes_limit"] - memory["bytes_in_use"]
        memory_limit = from_processes(np.array([memory_limit], np.float32)).min()
    fits = memory_limit is None
    while not fits:
        needed = memory_of(train, config, n_rows)
        fits = needed <= memory_limit
        if not fits and n_rows == n_places:
            right = f"at least {needed}, the bytes that one agent takes"
            refuse("memory_limit", memory_limit, right)
        if not fits:
            fewer = int(n_rows * memory_limit / needed) // n_places * n_places
            n_rows = max(n_places, min(fewer, n_rows - n_places))
    n_turns = -(-n_local // n_rows)
    rows = np.arange(n_processes * n_turns * n_rows) % n_agents
    return rows.reshape((n_processes, n_turns, n_rows))[jax.process_index()]


def memory_of(train, config, n_rows):
    """Return the bytes on one device that training n_rows agents takes, and compile it for them."""

    def shape_of(leaf):
        return jax.ShapeDtypeStruct((n_rows, *leaf.shape), leaf.dtype)

    numbers = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), config)
    state = jax.tree.map(shape_of, (numbers, empty_agent(config)))
    places = jax.tree.broadcast(places_of(state), state)
    inputs = jax.tree.map(lambda x, place: x.update(sharding=place), state, places)
    memory = train.lower(*inputs, jnp.int32(1), False).compile().memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return arrays + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def first_states(config, start, restart, turns, n_agents):
    """Return the config and the agents of each turn, as training begins."""
    begin = on_every_device(begin_agent, restart=restart)
    states = []
    for rows in turns:
        state = (take_agents(config, rows, n_agents), take_rows(start, rows))
        state = jax.device_put(state, places_of(state))
        state = (state[0], begin(*state))
        if len(turns) > 1:
            state = put_on_host(state)
        states.append(state)
    return states


def take_agents(config, rows, n_agents):
    """Return the config of some of n_agents, its numbers as arrays (rows,)."""
    return jax.tree.map(lambda x: np.broadcast_to(np.float32(x), n_agents)[rows], config)


def take_rows(tree, rows):
    """Return rows of arrays (S, …), in the host's memory.

    Not from device to device: two such copies at a time can wait for each other for ever on a CPU
    that has as many devices as cores (jax 0.10.2).
    """
    return jax.tree.map(operator.itemgetter(rows), put_on_host(tree))


def join_turns(states, n_agents):
    """Return the agents of all turns, without those that a row was repeated for."""
    agents = [agents for _, agents in states]
    if len(agents) == 1:
        return trim(agents[0], n_agents)
    return trim(jax.tree.map(lambda *parts: jnp.concatenate(parts), *agents), n_agents)


def trim(tree, n_agents):
    """Return the first rows of arrays (rows, …) that have more than n_agents."""
    if len(jax.tree.leaves(tree)[0]) <= n_agents:
        return tree
    return take_rows(tree, slice(n_agents))


def make_mesh(config, n_agents):
    """Return a mesh of this process's devices: places for agents, each of devices_per_agent."""
    chosen = jax.config.jax_default_device  # by --device, or by the user
    devices = jax.local_devices(backend=chosen and chosen.platform)
    n_places = min(n_agents, len(devices) // config.devices_per_agent)
    if not n_places:
        right = f"at most the {len(devices)} devices of a process"
        refuse("devices_per_agent", config.devices_per_agent, right)
    devices = np.array(devices[: n_places * config.devices_per_agent])
    return jax.sharding.Mesh(devices.reshape((n_places, -1)), ("agents", "devices"))


def whole_rows(mesh, n_agents):
    """Return the rows of n_agents, as many on each device: one without work repeats some."""
    n_places = mesh.shape["agents"]
    return -(-n_agents // n_places) * n_places


def split_rows(config, tree):
    """Return how arrays (S, …) are split over a mesh: by agents, and by environments if of these.

    The fields of an `Agent` in the tree that have an axis of environments are named here.
    """
    spec = jax.sharding.PartitionSpec
    if config.devices_per_agent == 1:
        return spec("agents")

    def is_agent(part):
        return isinstance(part, Agent)

    def split(part):
        if not is_agent(part):
            return spec("agents")
        specs = dict.fromkeys(vars(part), spec("agents")) | {"n_steps": part.n_steps}
        for name in ("obs", "env_states", "memory", "discounted_return"):
            specs[name] = spec("agents", "devices")
        specs["episode_sums"] = spec("agents", None, "devices")
        return Agent(**specs)

    return jax.tree.map(split, tree, is_leaf=is_agent)


def places_of(state):
    """Return the shardings of a config and agents (rows, …) that are trained together."""
    config, agents = state
    mesh = make_mesh(config, len(jax.tree.leaves(agents)[0]))
    to_sharding = functools.partial(jax.sharding.NamedSharding, mesh)
    return jax.tree.map(to_sharding, split_rows(config, state))


def put_on_host(tree):
    """Return arrays in the host's memory."""
    return jax.device_put(tree, jax.local_devices(backend="cpu")[0])


def from_processes(tree):
    """Return arrays (rows, …) with the rows of all processes, on the host."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


@functools.cache
def compiled(function, donate=(), **static):
    """Return a function, with some arguments fixed, for the compiler."""
    options = {}
    if jax.default_backend() == "cpu":
        # LLVM's later passes take a third of the compilation and make nothing faster here.
        options["xla_backend_optimization_level"] = 1
    function = functools.partial(function, **static)
    return jax.jit(function, donate_argnums=donate, compiler_options=options)


@functools.cache
def on_every_device(function, **static):
    """Return `spread` of a function of a config and an agent, compiled."""
    return compiled(functools.partial(spread, functools.partial(function, **static)))


def spread(function, config, agents, *shared):
    """Call `function(config, agent, *shared)` for each agent, agents split between local devices.

    agents: (S, …), as many for each device; a leaf of the config may have that axis too. The agents
    of one device run side by side, but on a CPU one after the other: what one agent needs stays in
    the core's cache. With devices_per_agent, that many devices in a row call the function for the
    same agents.
    """
    n_agents = len(jax.tree.leaves(agents)[0])
    mesh = make_mesh(config, n_agents)
    rows = (jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, n_agents), config), agents)

    def on_device(rows, shared):
        def one_agent(row):
            return function(*row, *shared)

        if mesh.devices[0, 0].platform == "cpu":
            return jax.lax.map(one_agent, rows)
        return jax.vmap(one_agent)(rows)

    result = None
    if config.devices_per_agent > 1:  # the fields of the result, which one device tells too
        of_one, agent = jax.tree.map(lambda x: x[0], rows)
        result = jax.eval_shape(function, of_one.replace(devices_per_agent=1), agent, *shared)
    specs = dict(in_specs=(split_rows(config, rows), jax.sharding.PartitionSpec()))
    specs["out_specs"] = split_rows(config, result)
    return jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)(rows, shared)


# ==================================================================================================
# 11. Run folders
# ==================================================================================================


def save_agents(run_dir, config, agents):
    """Write agents whole, from networks to keys, and config.json for people to read.

    agents: one, or several with a leading axis. The last two checkpoints are kept; each of them is
    there whole or not at all.
    """
    if jax.process_count() > 1:
        raise ConfigError("save_agents: each process has some of the agents; one must hold all")
    n_agents = len(agents.n_updates) if agents.n_updates.ndim else None
    check_swept(config, n_agents)
    folder = pathlib.Path(run_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not is_run_folder(folder):
        write_config(folder, {"n_seeds": n_agents} | plain_settings(config))
    save_checkpoint(folder, config, agents, n_agents)


def save_checkpoint(folder, config, agents, n_agents):
    """Write a checkpoint of agents and their config; of several processes, each writes its agents.

    n_agents: None for one without a leading axis.
    """
    leaves = plain_leaves(agents)
    if jax.process_count() > 1:
        n_parts = math.gcd(len(leaves["n_updates"]), jax.local_device_count())
        devices = [jax.local_devices(process_index=p)[:n_parts] for p in range(jax.process_count())]
        mesh = jax.sharding.Mesh(np.ravel(devices), ("agents",))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("agents"))
        to_global = functools.partial(jax.make_array_from_process_local_data, place)
        leaves = jax.tree.map(to_global, leaves)
    else:
        leaves = jax.device_get(leaves)
    sizes = {"n_agents": n_agents, "n_rows": np.shape(leaves["n_updates"])}
    ocp, manager = open_checkpoints(folder, create=True)
    items = dict(agents=ocp.args.StandardSave(leaves))
    settings = json.loads(json.dumps(sizes | plain_settings(config), default=str))
    items["settings"] = ocp.args.JsonSave(settings)
    with manager:
        number = (manager.latest_step() or 0) + 1
        manager.save(number, args=ocp.args.Composite(**items))


def load_agents(run_dir, config=None, **objects):
    """Read what was saved last in a folder: a config and agents, on the host.

    config: in place of the one that was saved. objects: settings that a file cannot hold, such as
    env, policy or loss_function. Raises `ConfigError` where something is missing or damaged.
    """
    folder = pathlib.Path(run_dir).expanduser().absolute()
    if not has_checkpoint(folder):
        found = "nothing"
        if folder.is_dir():
            found = ", ".join(sorted(os.listdir(folder))) or found
        right = "a checkpoint, as a run leaves it in its folder or in program-0 of a sweep's"
        raise ConfigError(f"checkpoint: {folder} holds {found}; it must hold {right}")
    # Of a damaged checkpoint TensorStore's threads would each print a traceback, also later.
    hook, sys.unraisablehook = sys.unraisablehook, lambda *_: None  # and stays so on damage
    try:
        ocp, manager = open_checkpoints(folder)
        with manager:
            number = manager.latest_step()
            items = ocp.args.Composite(settings=ocp.args.JsonRestore())
            settings = manager.restore(number, args=items)["settings"]
            if config is None:
                settings |= objects
                check_objects(folder, settings)
                config = PPOConfig(**pick(settings, fields_of(PPOConfig)))
            agent = empty_agent(config)
            # On one device here; else the arrays are bound to the devices that saved them.
            place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            expected = {}
            for name, leaf in jax.eval_shape(plain_leaves, agent).items():
                shape = (*settings["n_rows"], *leaf.shape)
                expected[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)
            items = ocp.args.Composite(agents=ocp.args.StandardRestore(expected))
            leaves = jax.device_get(manager.restore(number, args=items)["agents"])
    except ConfigError:
        sys.unraisablehook = hook
        raise
    except Exception as error:  # Orbax and TensorStore raise all sorts of things here
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a task would log it once more
        message = f"checkpoint: {folder}/checkpoint is damaged, or not of these settings"
        raise ConfigError(f"{message} ({one_line(error)[:300]})") from error
    sys.unraisablehook = hook

    def stored_leaf(path, leaf):
        value = leaves.get(path_name(path))
        if value is None:  # an empty array
            value = np.zeros((*settings["n_rows"], *leaf.shape), leaf.dtype)
        if settings["n_agents"] is not None:
            value = value[: settings["n_agents"]]  # several processes save the same number each
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            value = jax.random.wrap_key_data(value)
        return value

    return config, jax.tree_util.tree_map_with_path(stored_leaf, agent)


def load_population(run_dir, **objects):
    """Do what `load_agents` does, but give agents a leading axis, also a single one."""
    config, agents = load_agents(run_dir, **objects)
    if not agents.n_updates.ndim:
        agents = jax.tree.map(lambda x: x[None], agents)
    return config, agents


def has_checkpoint(folder):
    """Tell whether a folder has a whole checkpoint."""
    return any(path.name.isdigit() for path in (folder / "checkpoint").glob("*"))


def open_checkpoints(folder, create=False):
    """Return Orbax and its manager of a run folder's checkpoints, which keeps the last two."""
    import orbax.checkpoint as ocp

    folder = (folder / "checkpoint").absolute()
    if create:
        folder.mkdir(parents=True, exist_ok=True)
    # Processes that are named wait for each other through JAX's coordinator. Else they wait by a
    # sum over all devices, which hung where a CPU has as many devices as cores (jax 0.10.2).
    processes = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        processes.active_processes = set(range(jax.process_count()))
    options = dict(max_to_keep=2, create=False, enable_async_checkpointing=False)
    options = ocp.CheckpointManagerOptions(**options, multiprocessing_options=processes)
    handlers = dict(
        agents=ocp.StandardCheckpointHandler(multiprocessing_options=processes),
        settings=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
    )
    return ocp, ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def plain_leaves(tree):
    """Return the leaves of a tree by path, typed random keys as integers, without empty arrays."""
    leaves = {}
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.size:  # Orbax refuses others
            leaves[name] = leaf
    return leaves


def write_config(folder, settings):
    """Write config.json, whole or not at all."""
    replace_text(folder / "config.json", json.dumps(settings, indent=2, default=str) + "\n")


def replace_text(path, text):
    """Write a file whole or not at all: a full disk must not cost the one that is there."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def is_run_folder(folder):
    """Tell whether a run from the command line made a folder."""
    return (folder / "config.json").exists() and "seed" in read_file(folder / "config.json")


def plain_settings(config):
    """Return every setting by name, as JSON holds it."""
    return {name: plain_setting(name, value) for name, value in vars(config).items()}


def plain_setting(name, value):
    """Return a setting as JSON holds it and `PPOConfig` takes it; for an object {"object": …}."""
    if name in TRACED and value is not None:
        return plain_number(value)
    if name in ("env_params", "optimizer_kwargs"):
        return dict(value)
    is_widths = isinstance(value, tuple) and all(isinstance(width, int) for width in value)
    if is_widths:
        return list(value)
    if isinstance(value, str | int | None):
        return value
    return {"object": str(value)}


def plain_number(value):
    """Return a number, a schedule, a pair or a sweep of these as JSON holds it."""
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(value) if np.ndim(leaf)]
    if sizes:
        swept = jax.tree.map(lambda leaf: np.broadcast_to(leaf, sizes[0]), value)
        rows = []
        for row in range(sizes[0]):
            rows.append(plain_number(jax.tree.map(operator.itemgetter(row), swept)))
        return rows
    if isinstance(value, tuple):
        return ",".join(str(plain_number(part)) for part in value)
    if isinstance(value, Schedule):
        return str(value)
    if callable(value):
        return {"object": str(value.func)}
    return float(value)


def objects_in(settings):
    """Return the names of stored settings that stand for an object, which no file can hold."""
    return [name for name, x in settings.items() if isinstance(x, dict) and "object" in x]


def check_objects(source, settings):
    """Refuse stored settings with an object that nobody gave."""
    for name in objects_in(settings):
        what = f"{settings[name]['object']}, which no file can hold"
        call = f"load_agents(…, {name}=…)"
        raise ConfigError(f"{name}: {source} was trained with {what}; give it to {call}")


def read_file(path):
    """Read a file of settings, JSON or YAML; raises `ConfigError` where that fails."""
    import yaml

    try:
        settings = yaml.safe_load(pathlib.Path(path).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"config: {path} can't be read as JSON or YAML ({one_line(error)})"
        raise ConfigError(message) from error
    if not isinstance(settings, dict):
        refuse("config", settings, f"names with values in {path}, as in n_envs: 8")
    return settings


# ==================================================================================================
# 12. Reporting
# ==================================================================================================


def make_bar(shown, config, n_agents, n_updates):
    """Return a progress bar of agents' steps; in a log file, a line every ten seconds.

    shown: None in a notebook alone. n_updates: those that each agent has done already.
    """
    import tqdm

    ipython = sys.modules.get("IPython")  # which some suites import in a shell too
    in_notebook = ipython is not None and ipython.get_ipython() is not None
    if shown is None:
        shown = in_notebook
    size = n_agents * config.rollout_size
    options = dict(total=config.n_updates * size, initial=n_updates * size)
    options |= dict(unit=" steps", unit_scale=True, disable=not shown)
    if not sys.stderr.isatty() and not in_notebook:
        options |= dict(mininterval=10, maxinterval=math.inf)
        options["bar_format"] = "{l_bar}{n_fmt} of {total_fmt}{postfix}\n"
    return tqdm.tqdm(**options)


def show_progress(bar, config, metrics):
    """Move a progress bar on by a chunk's metrics (S, updates): the steps of all agents."""
    mean_return = known_mean(metrics["return"][:, -1])
    bar.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
    move_bar(bar, metrics["return"].size * config.rollout_size)


def move_bar(bar, n_steps):
    """Count steps, which tqdm does for a bar that is shown alone."""
    bar.update(n_steps)
    if bar.disable:
        bar.n += n_steps


def known_mean(values, axis=None):
    """Return the mean of the values that are not NaN; NaN where all are."""
    known = ~np.isnan(values)
    mean = np.where(known, values, 0.0).sum(axis) / np.maximum(known.sum(axis), 1)
    return np.where(known.any(axis), mean, np.nan)


def interquartile_mean(values, axis=-1):
    """Return the mean of the middle half: Agarwal et al., 2021, https://arxiv.org/abs/2108.13264"""
    import scipy.stats

    return scipy.stats.trim_mean(values, 0.25, axis=axis)


def bootstrap_interval(values, statistic):
    """Return the 95 % percentile bootstrap interval of a statistic over axis 0."""
    import scipy.stats

    options = dict(n_resamples=2000, batch=50, method="percentile", rng=np.random.default_rng(0))
    return scipy.stats.bootstrap((values,), statistic, axis=0, **options).confidence_interval


class RunReport:
    """What a run shows and writes while its populations train, one after the other."""

    def __init__(self, run_dir, options, populations, loggers, callback=None):
        self.run_dir, self.options, self.callback = run_dir, options, callback
        self.loggers, self.n_settings = loggers, 1
        n_rows = total = 0
        for config, keys, rows in populations:
            n_rows += len(keys) * config.n_updates
            total += len(keys) * config.n_updates * config.rollout_size
            self.n_settings = max(self.n_settings, 1 + rows[-1]["setting"])
        self.interval = options.log_interval or math.ceil(n_rows / 100_000)
        self.bar = make_bar(options.verbose > 0 and options.progress_bar, config, len(keys), 0)
        self.bar.total = total
        self.signal = None  # the number of the signal that ended the run
        self.is_over, self.error = False, None
        self.started = time.perf_counter()
        self.compiled = None  # when the first update was done
        self.n_steps = 0  # of all agents, since then
        self.header, self.unwritten = [], []  # rows of metrics.csv that wait for a full disk
        self.agents = []  # a row for each agent

    def begin(self, population, folder, n_done):
        """Take up a population, of whose updates an earlier run has done some."""
        self.population, self.folder, self.due = population, folder, None
        self.has_saved = has_checkpoint(folder)
        timesteps = n_done * population.config.rollout_size
        move_bar(self.bar, timesteps * len(population.keys))
        path = self.run_dir / "metrics.csv"
        if jax.process_index() == 0 and path.exists():
            cut_metrics(path, {str(row["setting"]) for row in population.rows}, timesteps)

    def __call__(self, config, agents, metrics):
        """Write a chunk's metrics, and sometimes the agents; returns whether the run is to end."""
        now = time.perf_counter()
        if self.compiled is None:
            self.compiled = now
        else:
            self.n_steps += metrics["return"].size * config.rollout_size
        if self.due is None:  # a run may be killed soon
            self.due = now + min(5.0, self.options.checkpoint_seconds)
        show_progress(self.bar, config, metrics)
        try:
            self.add_rows(metrics)
            self.write_rows()
        except Exception as error:  # a full disk, or a logger's
            complain(f"{self.run_dir}: {error}; training goes on")
        timesteps = int(metrics["timesteps"][0, -1])
        stop = self.callback and self.callback(timesteps, metrics, agents)
        flags = from_processes(np.array([[self.signal or 0, bool(stop), now > self.due]]))
        self.signal, stop, is_due = flags.max(axis=0).tolist()  # all processes do the same
        self.is_over = bool(self.signal or stop)
        if is_due and not self.is_over:
            try:
                self.save(config, agents)
            except Exception as error:  # Orbax has errors of its own for a full disk
                if jax.process_count() > 1:  # which can't go on each by itself
                    raise
                complain(f"{self.run_dir}: {error}; training goes on")
        return self.is_over

    def add_rows(self, metrics):
        """Take up a chunk's rows of metrics.csv and give means over seeds to the loggers."""
        config, _, rows = self.population
        update = metrics["timesteps"][0] // config.rollout_size
        shown = np.flatnonzero((update % self.interval == 0) | (update == config.n_updates))
        for place in shown:
            for agent, row in enumerate(rows):
                values = [values[agent, place].item() for values in metrics.values()]
                self.unwritten.append([row["setting"], row["seed"], *values])
        self.header = ["setting", "seed", *metrics]
        for place in shown:
            self.log(metrics, place)

    def write_rows(self):
        """Add the rows that are not yet written to metrics.csv."""
        path = self.run_dir / "metrics.csv"
        if jax.process_index() == 0:
            size = path.stat().st_size if path.exists() else 0
            try:
                with open(path, "a", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    if size == 0:
                        writer.writerow(self.header)
                    writer.writerows(self.unwritten)
            except OSError:  # a full disk took a part, which is to come again
                if path.exists():
                    os.truncate(path, size)
                raise
        self.unwritten = []

    def log(self, metrics, place):
        """Give the loggers, and with verbose 2 the screen, means over the seeds of each setting."""
        setting = np.array([row["setting"] for row in self.population.rows])
        for number in np.unique(setting):
            scalars = {}
            for name, values in metrics.items():
                values = values[setting == number, place]
                scalars[name] = known_mean(values).item()
                if name == "return" and 1 < len(values) <= 16:
                    scalars |= {f"return_seed_{seed}": x.item() for seed, x in enumerate(values)}
            if self.options.verbose > 1:
                print(*(f"{name} {x:.4g}" for name, x in scalars.items()), sep="  ", flush=True)
            timesteps = int(scalars.pop("timesteps"))
            prefix = ""
            if self.n_settings > 1:
                prefix = f"setting_{number}/"
            scalars = {prefix + name: x for name, x in scalars.items() if math.isfinite(x)}
            for log in self.loggers:
                log(timesteps, scalars)

    def save(self, config, agents):
        """Save the agents, but not over a good checkpoint when all of them have diverged."""
        self.due = time.perf_counter() + self.options.checkpoint_seconds
        if not is_failing(agents).all() or not self.has_saved:
            save_checkpoint(self.folder, config, agents, len(self.population.keys))
            self.has_saved = True

    def end(self, config, agents, program):
        """Save a population's agents for the last time, and take down what became of each."""
        try:
            if self.due:
                self.save(config, agents)
        except Exception as error:
            self.error = error
        returns = jax.vmap(mean_episode)(agents)[:, 0]
        returns, since_when = from_processes((returns, agents.failing_since))
        for row, episode_return, since in zip(self.population.rows, returns, since_when):
            row = {"agent": len(self.agents), "program": program, **row}
            row["return"] = episode_return
            failing = np.flatnonzero(since)
            if len(failing):
                first = failing[np.argmin(since[failing])]
                row["diverged_at"] = int(since[first]) * config.rollout_size
                row["diverged_in"] = ("observation", "reward", "loss")[first]
            self.agents.append(row)


def cut_metrics(path, settings, timesteps):
    """Take from metrics.csv the settings' rows after timesteps: they come again.

    A process that was killed while it wrote left a part of a line, which goes too.
    """
    header, *lines = path.read_text().splitlines(keepends=True) or [""]
    kept = []
    if header.endswith("\n"):
        kept.append(header)
    for line in lines:
        if not line.endswith("\n"):
            continue
        setting, _, steps, *_ = line.split(",")
        if setting not in settings or int(steps) <= timesteps:
            kept.append(line)
    replace_text(path, "".join(kept))


def is_failing(agents):
    """Return for each agent (S,) whether numbers in its last update were not finite."""
    return np.any(from_processes(agents.failing_since), axis=1)


def agent_results(agents, metrics, options):
    """Return the table of agents.csv, a row for each agent.

    agents: what is known of each. metrics: the table of metrics.csv, of which the area under the
    learning curve is the mean return over the run.
    """
    import pandas

    curves = dict(list(metrics.groupby(["setting", "seed"])))
    rows = []
    for row in agents:
        curve = curves.get((row["setting"], row["seed"]), metrics[:0])  # stopped before a row
        row = row | {"area": curve["return"].mean()}
        if options.threshold is not None:
            reached = curve["timesteps"][curve["return"] >= options.threshold]
            row["steps_to_threshold"] = reached.min()
        for name in options.evolve:  # steps:number, for each new one
            is_new = curve[name] != curve[name].shift()
            changes = zip(curve["timesteps"][is_new], curve[name][is_new])
            row[name] = " ".join(f"{steps}:{number:.4g}" for steps, number in changes)
        failure = {"diverged_at": row.pop("diverged_at", None)}
        failure["diverged_in"] = row.pop("diverged_in", None)
        rows.append(row | failure)
    return pandas.DataFrame(rows)


def setting_results(agents, names):
    """Return a table with a row for each setting, the best first, of seeds that did not diverge.

    agents: the table of agents.csv. names: of the swept settings. The return is an interquartile
    mean, from low to high its 95 % interval; best: whether it overlaps that of the first row.
    """
    import pandas

    rows = []
    for number, group in agents.groupby("setting"):
        healthy = group[group["diverged_at"].isna()]
        row = {"setting": number, **pick(group.iloc[0], names)}
        returns = healthy["return"].dropna().to_numpy()
        row |= dict.fromkeys(("return", "low", "high"), math.nan)
        if len(returns):
            row["return"] = interquartile_mean(returns)
        if len(returns) > 1:
            row["low"], row["high"] = bootstrap_interval(returns, interquartile_mean)
        row["area"] = healthy["area"].mean()
        if "steps_to_threshold" in group:
            steps = healthy["steps_to_threshold"]
            row |= {"steps to threshold": steps.mean(), "reached": f"{steps.count()}/{len(group)}"}
        rows.append(row | {"diverged": len(group) - len(healthy)})
    table = pandas.DataFrame(rows).sort_values("return", ascending=False, ignore_index=True)
    table["best"] = (table["high"] >= table["low"][0]) | (table.index == 0)
    return table


def sweep_table(title, settings):
    """Return what `setting_results` returns as text, at most 20 rows of it."""
    table = settings[:20].copy()
    for name in table.select_dtypes("float").columns:
        table[name] = table[name].map("{:.4g}".format)
    interval = table.pop("low") + " to " + table.pop("high")
    interval = interval.replace("nan to nan", "")  # of a single seed
    table.insert(table.columns.get_loc("return") + 1, "95 % interval", interval)
    table["best"] = table.pop("best").map({True: "*", False: ""})
    lines = [title, table.to_string(index=False)]
    if any(interval):
        lines.append("*: can't be told from the best one, as the 95 % intervals overlap")
    if len(settings) > 20:
        lines.append(f"{len(settings) - 20} more settings are in agents.csv")
    return "\n".join(lines)


def summary_table(title, returns, has_diverged, agents=()):
    """Return a table, in text, of each seed's return (S,) and statistics over the known ones.

    agents: numbers to tell the rows by, in place of seeds.
    """
    rows = []
    for seed, value in enumerate(returns[:16]):
        text = f"{value:.2f}"
        if has_diverged[seed]:
            text = "diverged"
        elif np.isnan(value):
            text = "no episode ended"
        name = f"seed {seed}"
        if len(agents):
            name = f"agent {agents[seed]}"
        rows.append((name, text))
    if len(returns) > 16:
        rows.append((f"{len(returns) - 16} more", ""))
    known = returns[np.isfinite(returns) & ~has_diverged]
    if len(known):
        rows.append((f"mean of {len(known)}", f"{known.mean():.2f}"))
        rows.append(("interquartile mean", f"{interquartile_mean(known):.2f}"))
    if len(known) > 1:
        low, high = bootstrap_interval(known, interquartile_mean)
        rows.append(("95 % interval", f"{low:.2f} to {high:.2f}"))
    width = max(len(text) for _, text in rows)
    lines = [f"  {name:<20} {text:>{width}}" for name, text in rows]
    return "\n".join([title, *lines])


def new_figure(title, n_panels=1):
    """Return a figure and its panels in a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 + 3.5 * (n_panels - 1), 4.5), layout="constrained")
    panels = figure.subplots(1, n_panels, squeeze=False, sharey=True)[0]
    figure.suptitle(title)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure, panels


def plot_learning_curves(path, title, metrics, settings, names):
    """Draw the return against the steps: each setting's mean over seeds and its 95 % interval.

    metrics: the table of metrics.csv. settings: what `setting_results` returns, of which the best
    eight have a colour. names: of the swept settings; without any, each seed has a line too.
    """
    figure, [axes] = new_figure(title)
    for rank, row in settings[::-1].iterrows():
        rows = metrics[metrics["setting"] == row["setting"]]
        if rows.empty:
            continue  # the run was stopped before the first one
        curves = rows.pivot(index="timesteps", columns="seed", values="return")
        curves = curves.iloc[np.unique(np.linspace(0, len(curves) - 1, 200).astype(int))]
        mean, n_seeds, color = curves.mean(axis=1), curves.shape[1], f"C{rank}"
        if rank >= 8:
            axes.plot(mean, color="0.8", linewidth=0.8)
            continue
        label = ", ".join(f"{name} {row[name]}" for name in names) or f"mean of {n_seeds}"
        axes.plot(mean, color=color, linewidth=2, label=label)
        if not names:
            axes.plot(curves, color=color, alpha=min(0.5, 8 / n_seeds), linewidth=0.8)
        known = curves.dropna()  # from when every seed has finished an episode
        if n_seeds > 1 and len(known):
            low, high = bootstrap_interval(known.to_numpy().T, np.mean)
            axes.fill_between(known.index, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="steps of one agent", ylabel="return")
    lines, labels = axes.get_legend_handles_labels()
    axes.legend(lines[::-1], labels[::-1], title="95 % intervals", loc="best", frameon=False)
    figure.savefig(path, dpi=150)


def plot_sweep(path, title, settings, names):
    """Draw the settings' returns over each swept setting; of a grid of two, a heat map.

    settings: what `setting_results` returns. names: of the swept settings.
    """
    import pandas

    settings = settings.copy()
    label = "return: interquartile mean over seeds"
    for name in names:
        if not pandas.api.types.is_numeric_dtype(settings[name]):
            settings[name] = settings[name].astype(str)
    n_values = [settings[name].nunique() for name in names]
    if len(names) == 2 and math.prod(n_values) == len(settings):
        table = settings.pivot(index=names[0], columns=names[1], values="return")
        figure, [axes] = new_figure(title)
        image = axes.imshow(table, aspect="auto", origin="lower", cmap="viridis")
        figure.colorbar(image, label=label)
        axes.grid(visible=False)
        axes.set(xlabel=names[1], ylabel=names[0])
        axes.set_xticks(range(n_values[1]), table.columns)
        axes.set_yticks(range(n_values[0]), table.index)
        for place, value in np.ndenumerate(table):
            style = dict(ha="center", va="center", backgroundcolor="white")
            axes.text(*place[::-1], f"{value:.4g}", **style)
    else:
        figure, panels = new_figure(title, len(names))
        panels[0].set(ylabel=f"{label}, 95 % interval")
        for axes, name in zip(panels, names):
            values, middle = settings[name], settings["return"]
            errors = np.array([middle - settings["low"], settings["high"] - middle])
            axes.errorbar(values, middle, errors.clip(0), fmt="o", capsize=3)  # not -1e-5
            axes.set(xlabel=name)
            is_number = values.dtype != object and pandas.api.types.is_numeric_dtype(values)
            if is_number and 0 < 20 * values.min() <= values.max():
                axes.set_xscale("log")
    figure.savefig(path, dpi=150)


def open_loggers(options, run_dir, stack):
    """Return the options' loggers, functions of (timesteps, scalars); stack: closes their files."""
    name = options.run_name or run_dir.name
    loggers = []
    if options.tensorboard_log:
        tensorboardX = import_logger("tensorboardX", "tensorboard_log")
        folder = os.path.join(options.tensorboard_log, name)
        try:
            writer = stack.enter_context(tensorboardX.SummaryWriter(folder))
        except OSError as error:
            refuse("tensorboard_log", folder, f"a folder that can be written ({error.strerror})")

        def log_to_tensorboard(timesteps, scalars):
            for name, value in scalars.items():
                writer.add_scalar(f"ppo/{name}", value, timesteps)

        loggers.append(log_to_tensorboard)
    if options.wandb_project:
        wandb = import_logger("wandb", "wandb_project")
        settings = read_file(run_dir / "config.json")
        about = dict(project=options.wandb_project, name=name, dir=str(run_dir), config=settings)
        try:
            run = wandb.init(**about)
        except Exception as error:  # no network, no key
            right = f"within reach ({error}), or WANDB_MODE=offline be set"
            refuse("wandb_project", options.wandb_project, right)
        stack.callback(run.finish)
        run.define_metric("*", step_metric="timesteps")  # which may begin anew, unlike wandb's own
        loggers.append(lambda timesteps, scalars: run.log(scalars | {"timesteps": timesteps}))
    return loggers


def import_logger(package, setting):
    """Import a package; raises `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{setting}: needs a package; pip install {package}") from error


# ==================================================================================================
# 13. Command line
# ==================================================================================================


@dataclasses.dataclass(frozen=True, init=False)
class RunOptions:
    """What the command line decides besides a PPOConfig."""

    seed: int = static(0, "seed", "Random seed of the run.")
    n_seeds: int = static(4, "size", "Agents to train for each setting, each with its own key.")
    n_samples: int | None = static(
        None,
        "size",
        "Settings to draw at random from several values; None: train each combination.",
    )
    evolve: tuple = static(
        (),
        "names",
        "Settings to tune while training: the worst agents copy the best and change these.",
    )
    evolve_every: int | None = static(
        None, "size", "With --evolve: updates between two exchanges; None: a twentieth of the run."
    )
    threshold: float | None = static(
        None, "number", "Also report after how many steps the return first reached this."
    )
    run_dir: str | None = static(
        None, "text", "Folder for results, new or of the same run; None: runs/ and the run's name."
    )
    run_name: str | None = static(None, "text", "Run's name; None: environment and time.")
    config: str | None = static(None, "text", "File of settings, YAML or JSON; flags win over it.")
    resume: str = static(
        "auto",
        "text",
        "Folder of a run whose agents train on in run_dir; auto: those in run_dir, if any.",
    )
    reset_num_timesteps: bool = static(
        False, "switch", "With --resume: count steps from 0, reset environments."
    )
    list_envs: str | None = static(
        None, "suite", "Print the names of environments, of one suite or of all; train nothing."
    )
    eval: str | None = static(None, "text", "Folder of a run: play its agents, train nothing.")
    agent: tuple = static(
        (), "numbers", "With --eval: numbers of agents to play; none: those of the best setting."
    )
    n_episodes: int = static(100, "size", "With --eval: episodes that each agent plays.")
    max_steps: int = static(
        100_000,
        "size",
        "With --eval: steps after which an unfinished episode is left out of the mean.",
    )
    verbose: int = static(
        1, "verbose", "0: errors only; 1: also progress and results; 2: also metrics."
    )
    progress_bar: bool = static(True, "switch", "Show progress while training.")
    checkpoint_seconds: float = static(60.0, "positive", "Seconds between checkpoints.")
    log_interval: int | None = static(
        None, "size", "Updates between rows of metrics; None: 1, more for over 100,000 rows."
    )
    tensorboard_log: str | None = static(
        None, "text", "Folder for TensorBoard's logs; needs tensorboardX."
    )
    wandb_project: str | None = static(None, "text", "Project in Weights & Biases; needs wandb.")
    device: str = static("auto", "device", "Device to run on: auto, cpu, gpu or tpu.")
    memory_limit: int | None = static(
        None, "total", "Bytes to take on each device; None: what a GPU has, no limit on a CPU."
    )
    distributed: bool = static(
        False,
        "switch",
        "Share the agents with the other processes of a SLURM, Open MPI or Kubernetes job.",
    )
    coordinator: str | None = static(
        None, "text", "Address host:port of process 0, where --distributed can't find it."
    )
    n_processes: int | None = static(None, "size", "With --coordinator: number of processes.")
    process_id: int | None = static(None, "seed", "With --coordinator: this process, from 0 on.")
    compilation_cache: bool = static(True, "switch", "Keep compiled programs for the next run.")

    def __init__(self, **given):
        read_settings(self, given, {})


GROUPS = {  # of flags, by the first one of each
    "seed": "run options",
    "env": "environment options",
    "batch_size": "optimisation options",
    "gamma": "objective options",
    "policy": "network options",
}


def make_parser(defaults):
    """Return a parser with a flag for each setting. defaults: values to show in --help."""
    about = "Train agents with Proximal Policy Optimization, or play trained ones with --eval."
    more = (
        "Defaults are those of the environment that --env names. A setting with [X ...] takes"
        " several values, and all combinations are trained: --learning-rate 1e-4 1e-3. A layout"
        " among several has commas: --net-arch 64,64 256. With --n-samples 20, settings are drawn"
        " at random instead, also from a range: --gamma uniform_0.9_0.999 --learning-rate"
        " log_uniform_1e-5_1e-2. learning_rate, max_grad_norm and the numbers of the objective may"
        " follow a schedule: linear_3e-4 falls from 3e-4 to 0 over the run, cosine_3e-4_0.1 falls"
        " to a tenth of it."
    )
    options = dict(usage="python ppo_jax.py [--flag value] …", add_help=False)
    options |= dict(allow_abbrev=False, exit_on_error=False)
    parser = argparse.ArgumentParser(description=about, epilog=more, **options)
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # -1e-3 too, as in Python 3.14
    group, of_agent = parser, fields_of(PPOConfig)
    for name, field in flag_fields().items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        default = defaults.get(name)
        if isinstance(default, tuple):
            default = re.sub(r"[(),']", "", str(default)) or "none"
        help = f"{field.metadata['help']} (default: {default})"
        options = dict(help=help, default=argparse.SUPPRESS, metavar="X")
        flags = [f"--{name.replace('_', '-')}"]
        if name in of_agent or field.metadata["kind"] in ("names", "numbers"):
            options["nargs"] = "*"
        if name == "list_envs":
            options |= dict(nargs="?", const="all")
        if field.metadata["kind"] == "switch":
            flags.append(flags[0].replace("--", "--no-"))
            options |= dict(action=SwitchFlag, nargs=options.get("nargs", 0))
        group.add_argument(*flags, **options)
    parser.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    return parser


class SwitchFlag(argparse.Action):
    """A flag that is on as --name, off as --no-name, and takes words as in --name true false."""

    def __call__(self, parser, namespace, words, option_string=None):
        if option_string.startswith("--no-"):
            if words:
                raise argparse.ArgumentError(self, f"takes no value; got {words[0]}")
            words = [False]
        words = words or [True]
        setattr(namespace, self.dest, words if self.nargs == "*" else words[0])


def flag_fields():
    """Return the settings that have a flag, by name: all but functions."""
    fields = fields_of(RunOptions) | fields_of(PPOConfig)
    return {name: field for name, field in fields.items() if field.metadata["kind"] != "function"}


def parse_arguments(argv):
    """Return the settings to train and the run options that arguments give; --help exits.

    The settings: pairs of the values that are swept, by name, and a config.
    """
    try:
        argv = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), x) for x in argv]
        given, others = make_parser({}).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    for word in others:
        if not word.startswith("-") and word != argv[0]:
            raise ConfigError(f"{word}: the flag before it takes one value")
        near = closest(word.strip("-").replace("-", "_"), flag_fields())
        near = re.sub("( mean| or) ", r"\1 --", near).replace("_", "-")
        raise ConfigError(f"{word}: no such flag{near}")
    given = vars(given)
    show_help = given.pop("help")
    stored = {}
    if given.get("resume", "auto") != "auto":
        stored |= read_file(pathlib.Path(given["resume"], "config.json"))
    if "config" in given:
        stored |= read_file(given["config"])
    of_run, of_agent = fields_of(RunOptions), fields_of(PPOConfig)
    for name in stored:
        if name not in of_run | of_agent:
            raise ConfigError(f"config: {name} is no setting{closest(name, flag_fields())}")
    stored |= given
    if stored.get("n_seeds", 1) is None:  # of a single agent that was saved from Python
        stored["n_seeds"] = 1
    check_objects("the run", stored)
    options = RunOptions(**pick(stored, of_run))
    if options.coordinator is None and (options.n_processes or options.process_id is not None):
        refuse(
            "coordinator", None, "host:port of process 0, where n_processes or process_id is given"
        )
    is_distributed = options.distributed or options.coordinator is not None
    if is_distributed and not show_help:
        join_processes(options)  # before gymnax is imported, which starts JAX
    alone, swept = {}, {}
    for name, value in pick(stored, of_agent).items():
        values = several_values(of_agent[name].metadata["kind"], value)
        if len(values) == 1 and not find_range(values[0]):
            alone[name] = values[0]
        else:
            swept[name] = values
    if show_help:
        first = {name: values[0] for name, values in swept.items() if name == "env"}
        config = PPOConfig(**alone | first)
        make_parser(vars(options) | vars(config)).print_help()
        raise SystemExit(0)
    make_config = functools.partial(PPOConfig, **alone)
    settings = list_settings(make_config, swept, options.n_samples, options.seed)
    return settings, options, describe_run(settings, options, swept)


def join_processes(options):
    """Let JAX find the other processes of a job, or those that the options name."""
    known = (options.coordinator, options.n_processes, options.process_id)
    try:
        jax.distributed.initialize(*known, heartbeat_timeout_seconds=30)
    except (RuntimeError, ValueError) as error:
        right = f"set within a job, or with coordinator, n_processes and process_id ({error})"
        refuse("distributed", True, right)
    if jax.process_index() > 0:
        object.__setattr__(options, "verbose", 0)
    filter_errors()


ERROR_FILTER = """
import re, sys
for line in sys.stdin:
    if "JAX distributed service detected fatal errors" in line:
        print("ppo_jax: error: another process ended; the last checkpoint is whole",
              file=sys.stderr)
        break
    if not re.match(r"[EWI]\\d{4} |\\d+$|The tasks have|Additional GRPC|:UNKNOWN:", line):
        print(line, end="", file=sys.stderr, flush=True)
sys.stdin.read()
"""


def filter_errors():
    """Say in one line that another process ended, where JAX's runtime aborts with its stack."""
    command = [sys.executable, "-c", ERROR_FILTER]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.dup2(reader.stdin.fileno(), 2)


def several_values(kind, given):
    """Return the values of a setting as a list, from the words of a flag or from a file.

    A list is several values; but for a layout or arguments it is one, unless its entries are lists,
    have commas, or give an argument twice: [64, 64] is one value, ["64,64", 256] are two.
    """
    if not isinstance(given, list):
        return [given]
    if kind not in ("sizes", "arguments", "names"):
        return given
    words = [entry for entry in given if isinstance(entry, str)]
    names = [word.split("=")[0] for word in words]
    is_nested = any(isinstance(entry, list | dict) for entry in given)
    is_repeated = kind == "arguments" and len(set(names)) < len(names)
    if not is_nested and not is_repeated and "," not in "".join(words):
        return [given]
    values = []
    for entry in given:
        if isinstance(entry, str) and entry.lower() != "none":
            entry = [part for part in entry.split(",") if part]
        values.append(entry)
    return values


def describe_run(settings, options, swept):
    """Return what config.json says of a run: its options and each setting's value or values.

    settings, swept: as in `parse_arguments`. A setting that follows from a swept environment is
    left out.
    """
    names = ("seed", "n_seeds", "n_samples", "evolve", "evolve_every", "threshold", "log_interval")
    described = {name: getattr(options, name) for name in names}
    described["evolve"] = list(options.evolve)
    for name in fields_of(PPOConfig):
        values = []
        for _, config in settings:
            value = plain_setting(name, getattr(config, name))
            if value not in values:
                values.append(value)
        if name in swept and options.n_samples:
            described[name] = swept[name]  # what is drawn from
        elif name in swept:
            described[name] = values
        elif len(values) == 1:
            described[name] = values[0]
    return described


def open_run_dir(options, config, described, stack):
    """Return the run's folder, for this process alone: new, or that of the same run.

    described: what config.json is to say. stack: ends the claim on the folder.
    """
    name = options.run_name or f"{env_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = wanted = pathlib.Path(options.run_dir or f"runs/{name}")
    for number in itertools.count(2):
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            is_free = claim_folder(run_dir, stack)
            if is_free and not os.listdir(run_dir):
                write_config(run_dir, described)
                return run_dir
        except OSError as error:
            right = f"a folder of yours; it can't be written ({error.strerror})"
            refuse("run_dir", str(run_dir), right)
        is_named = options.run_dir or options.run_name
        if is_named and not is_free:
            refuse("run_dir", str(run_dir), "a folder in which no other process trains")
        if is_named and not is_run_folder(run_dir):
            refuse("run_dir", str(run_dir), "new or empty: there is something in it")
        if is_named:
            check_same_run(run_dir, described)
            return run_dir
        run_dir = wanted.with_name(f"{wanted.name}-{number}")


def claim_folder(folder, stack):
    """Claim a folder until the stack is closed; returns False where another process has it."""
    try:
        import fcntl
    except ImportError:  # on Windows
        return True
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return not isinstance(error, BlockingIOError)  # a file system without locks
    stack.callback(os.close, handle)
    return True


def check_same_run(run_dir, described):
    """Refuse to go on in the folder of a run with other settings."""
    stored = read_file(run_dir / "config.json")
    described = json.loads(json.dumps(described, default=str))
    for name in described:
        if name not in objects_in(described) and stored.get(name) != described[name]:
            right = f"{stored.get(name)!r} as in {run_dir}, or run_dir another folder"
            refuse(name, described[name], right)


def env_name(config):
    """Return a config's environment by name, fit for a folder."""
    name = config.env if isinstance(config.env, str) else type(config.env).__name__
    return re.sub(r"[^\w.-]", "-", name)


def share_text(text):
    """Return process 0's text in every process."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    letters = np.zeros(4096, np.uint8)
    letters[: len(text.encode())] = list(text.encode())
    return bytes(multihost_utils.broadcast_one_to_all(letters)).rstrip(b"\0").decode()


def program_folder(run_dir, number, n_programs):
    """Return the folder of a population's checkpoints: the run's, or one for each program."""
    return pathlib.Path(run_dir) if n_programs == 1 else pathlib.Path(run_dir, f"program-{number}")


def run_training(settings, options, callback=None, described=None):
    """Train, show progress and leave a run folder; returns the exit code.

    settings: pairs of the values that are swept, by name, and a config. callback: as
    `train_population` has it. described: what config.json says.
    """
    populations = make_populations(settings, options.n_seeds, options.seed, options.evolve)
    for config, *_ in populations:
        make_env(config)
        check_evolving(config, options.evolve)
    if options.resume != "auto":
        source = program_folder(options.resume, 0, len(populations))
        find_start(populations[0], source, options, is_own=False)
    described = described or describe_run(settings, options, settings[0][0])
    with contextlib.ExitStack() as stack:
        run_dir = None
        if jax.process_index() == 0:
            run_dir = open_run_dir(options, settings[0][1], described, stack)
        run_dir = pathlib.Path(share_text(str(run_dir)))
        is_new = not (run_dir / "metrics.csv").exists()
        try:
            loggers = []
            if jax.process_index() == 0:
                loggers = open_loggers(options, run_dir, stack)
            report = RunReport(run_dir, options, populations, loggers, callback)
            stack.callback(report.bar.close)
            catch_signals(report, stack)
            for number in range(len(populations)):
                run_population(report, populations, number)
                if report.is_over:
                    break
        except (KeyboardInterrupt, ConfigError):
            is_empty = is_new and not (run_dir / "metrics.csv").exists()
            if is_empty and jax.process_index() == 0:  # nothing was learnt
                (run_dir / "config.json").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # a logger's files stay
                    run_dir.rmdir()
            raise
        return finish_run(report, settings)


def find_start(population, folder, options, is_own):
    """Return the config and the keys or agents with which a population begins.

    folder: of a checkpoint, if there is one; the agents go on from it. is_own: whether this very
    run saved it.
    """
    config, keys, _ = population
    if not has_checkpoint(folder) and options.resume == "auto":
        return config, keys
    objects = pick(vars(config), objects_in(plain_settings(config)))
    stored, agents = load_population(folder, **objects)
    config = config.replace(**pick(vars(stored), options.evolve))
    if len(agents.n_updates) != len(keys):
        n_agents, n_given = len(agents.n_updates), len(keys)
        refuse("n_seeds", options.n_seeds, f"such that {n_agents} agents go on, not {n_given}")
    if not is_own or count_updates(agents, restart=False) < config.n_updates:
        check_resumable(config, agents, options.reset_num_timesteps and not is_own)
    return config, agents


def run_population(report, populations, number):
    """Train one of the populations, from its last checkpoint on if there is one.

    The next population's program is compiled meanwhile.
    """
    options, run_dir = report.options, report.run_dir
    population = populations[number]
    source = folder = program_folder(run_dir, number, len(populations))
    is_own = options.resume == "auto" or has_checkpoint(folder)
    restart = options.reset_num_timesteps and not is_own
    if not is_own:
        source = program_folder(options.resume, number, len(populations))
        earlier = pathlib.Path(options.resume, "metrics.csv")
        evolved = read_file(earlier.with_name("config.json")).get("evolve", [])
        is_same = report.n_settings == 1 and evolved == list(options.evolve)
        is_first = number == 0 and jax.process_index() == 0
        if is_same and is_first and not restart and earlier.exists():
            (run_dir / "metrics.csv").write_text(earlier.read_text())
    config, start = find_start(population, source, options, is_own)
    n_done = count_updates(start, restart)
    report.begin(population, folder, n_done)
    if n_done == config.n_updates:
        report.end(config, start, number)
        return
    if number + 1 < len(populations):
        job = (populations[number + 1], options)
        threading.Thread(target=compile_ahead, args=job, daemon=True).start()
    chunks = train_chunks(
        config,
        start,
        len(population.keys),
        seconds=0.5,
        restart=restart,
        memory_limit=options.memory_limit,
        evolve=options.evolve,
        evolve_every=options.evolve_every,
    )
    agents = None
    try:
        for config, agents, metrics in chunks:
            if report(config, agents, metrics):
                break
    except BaseException as error:
        is_alone = jax.process_count() == 1
        if is_alone and agents is not None and not agents.n_updates.is_deleted():
            report.save(config, agents)
            error.add_note(f"What was learnt is in {run_dir}; load_agents reads it.")
        raise
    report.end(config, agents, number)


def compile_ahead(population, options):
    """Compile what `train_chunks` is going to run for a population, while another one trains."""
    config, keys, _ = population
    with contextlib.suppress(Exception):  # which shows again when the population's turn comes
        train = training_program(config, options.evolve, len(keys))
        plan_turns(train, config, len(keys), options.memory_limit or sys.maxsize)


def catch_signals(report, stack):
    """End the run at the next chunk on Ctrl-C or SIGTERM; at once while nothing is learnt yet."""
    if threading.current_thread() is not threading.main_thread():
        return  # which alone gets signals

    def interrupt(number, frame):
        report.signal = number
        signal.signal(number, signal.SIG_DFL)
        if report.compiled is None:
            raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        stack.callback(signal.signal, number, signal.signal(number, interrupt))


def finish_run(report, settings):
    """Write and print what a run leaves; returns the exit code."""
    options, run_dir = report.options, report.run_dir
    config = settings[0][1]
    names = [name for name in settings[0][0] if name not in options.evolve]
    report.bar.close()
    code = 0
    if report.signal:
        code = 128 + report.signal
    if jax.process_index() > 0:
        return code
    has_diverged = np.array(["diverged_at" in row for row in report.agents])
    try:
        if report.error:
            raise report.error
        report.write_rows()
        table = write_results(report, config, names)
    except Exception as error:
        complain(f"error: {run_dir} can't be written ({error}); its last checkpoint is whole")
        code = 1
        returns = np.array([row["return"] for row in report.agents])
        table = summary_table("last returns of training", returns, has_diverged)
    for row in report.agents:
        if "diverged_at" in row:
            where = f"at step {row['diverged_at']:,}: {row['diverged_in']} not finite"
            complain(f"agent {row['agent']} (setting {row['setting']}) diverged {where}")
    if has_diverged.all():
        complain("error: all agents diverged: a reward, an observation or a loss was not finite")
        code = 3
    if options.verbose:
        print(table)
        print_end(report, config)
    return code


def write_results(report, config, names):
    """Write agents.csv and the pictures of a run; returns the table of its results as text."""
    import pandas

    run_dir, title = report.run_dir, "PPO"
    if "env" not in names:
        title = f"PPO on {env_name(config)}"
    if config.frame_skip > 1:
        title += f", steps of up to {config.frame_skip} frames"
    metrics = pandas.read_csv(run_dir / "metrics.csv")
    agents = agent_results(report.agents, metrics, report.options)
    agents.to_csv(run_dir / "agents.csv", index=False)
    results = setting_results(agents, names)
    plot_learning_curves(run_dir / "learning_curve.png", title, metrics, results, names)
    title += f", last {config.stats_window_size} episodes of training"
    if names:
        plot_sweep(run_dir / "sweep.png", title, results, names)
        return sweep_table(title, results)
    return summary_table(title, agents["return"].to_numpy(), agents["diverged_at"].notna())


def print_end(report, config):
    """Print how fast a run was and what can be done with it."""
    run_dir, bar = report.run_dir, report.bar
    if report.compiled is None:
        print(f"{run_dir} was finished already: nothing was left to train")
    else:
        seconds = time.perf_counter() - report.compiled
        speed = f"{report.n_steps / seconds:,.0f} steps/s"
        if config.frame_skip > 1:
            speed += f" of up to {config.frame_skip} frames each"
        compile_seconds = report.compiled - report.started
        print(f"compile {compile_seconds:.1f} s   run {seconds:.1f} s   {speed}")
    if report.signal:
        print(f"interrupted at {bar.n:,} of {bar.total:,} steps; to go on:")
        words = ["--config", f"{run_dir}/config.json", "--run-dir", str(run_dir)]
        if report.options.resume != "auto":
            words += ["--resume", report.options.resume]
        print("python ppo_jax.py", shlex.join(words))
    objects = objects_in(plain_settings(config))
    if objects:
        print(f"results in {run_dir}; load_agents(…, {objects[0]}=…) reads its agents")
    else:
        print(f"results in {run_dir}; play them with: python ppo_jax.py --eval {run_dir}")


def run_evaluation(options):
    """Play agents of a run folder and print their returns; returns the exit code."""
    import pandas

    run_dir = pathlib.Path(options.eval).expanduser()
    folder, rows, which = run_dir, None, ""
    if (run_dir / "agents.csv").exists():
        table = pandas.read_csv(run_dir / "agents.csv")
        rows = table[table["setting"] == setting_results(table, ())["setting"][0]]
        if len(rows) < len(table):
            which = f", setting {rows['setting'].iloc[0]}"
        if options.agent:
            rows = table[table["agent"].isin(options.agent)]
            which = f", agent {' '.join(map(str, options.agent))}"
        if len(rows) < len(set(options.agent)):
            refuse("agent", options.agent, f"below {len(table)}, the agents in {run_dir}")
        if rows["program"].nunique() > 1:
            refuse("agent", options.agent, "such that one program trained all of them")
        folder = run_dir / f"program-{rows['program'].iloc[0]}"
        if not folder.exists():
            folder = run_dir
        firsts = table.groupby("program")["agent"].transform("min")
        rows = (rows["agent"] - firsts[rows.index]).to_numpy()
    config, agents = load_population(folder)
    config = config.replace(devices_per_agent=1)  # each agent plays on one
    if rows is None:
        rows = np.arange(len(agents.n_updates))
    places = np.resize(rows, whole_rows(make_mesh(config, len(rows)), len(rows)))
    state = (take_agents(config, places, len(agents.n_updates)), take_rows(agents, places))
    state = jax.device_put(state, places_of(state))
    limits = dict(n_episodes=options.n_episodes, max_steps=options.max_steps)
    play = on_every_device(evaluate, **limits)  # all agents the same episodes
    returns = np.asarray(play(*state, jax.random.key(options.seed)))[: len(rows)]
    episodes = f"mean of {options.n_episodes} episodes, most probable actions"
    title = f"{env_name(config)}{which}, {episodes}"
    returns_known = known_mean(returns, axis=1)
    print(summary_table(title, returns_known, is_failing(agents)[rows], sorted(options.agent)))
    n_unknown = np.isnan(returns).sum()
    if n_unknown:
        print(f"{n_unknown} episodes did not end within {options.max_steps:,} steps (--max-steps)")
    return 0


def list_environments(which):
    """Print the names of a suite's environments, or of all suites'; returns the exit code."""
    for prefix, suite in SUITES.items():
        if which not in ("all", prefix or "gymnax"):
            continue
        try:
            names = suite.names()
        except ConfigError as error:  # not installed
            if which != "all":
                raise
            complain(str(error))
            continue
        for name in names:
            print(f"{prefix}/{name}".strip("/"))
    return 0


class QuietStream:
    """A stream of text that may be closed: what nobody reads is dropped, and nothing fails."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def isatty(self):
        """Tell whether the stream is a terminal."""
        return self.stream is not None and self.stream.isatty()

    def write(self, text):
        """Write a text."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.stream.write(text)

    def flush(self):
        """Write what is held back."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.stream.flush()


def complain(message):
    """Print one line on the standard error."""
    print(f"ppo_jax: {one_line(message)}", file=sys.stderr, flush=True)


def choose_device(kind):
    """Make JAX use a kind of device; raises `ConfigError` where there is none."""
    try:
        jax.config.update("jax_default_device", jax.local_devices(backend=kind)[0])
    except RuntimeError:
        refuse("device", kind, f"auto or {jax.default_backend()} on this machine")


def main(argv=None):
    """Run the command line; returns the exit code.

    0: all is well. 1: results could not be written, or another process ended. 2: a user's mistake.
    3: all agents diverged. 130: Ctrl-C. 143: SIGTERM.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started, with the devices that it has
        use_every_core()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for terminals that know ASCII alone
    out, err = QuietStream(sys.stdout), QuietStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return run_command(sys.argv[1:] if argv is None else argv)
        finally:
            out.flush()


def run_command(argv):
    """Train or play, as the arguments say; returns the exit code of `main`."""
    try:
        settings, options, described = parse_arguments(argv)
        if options.device != "auto":
            choose_device(options.device)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if options.compilation_cache and not cache.startswith("~"):  # without a home
            jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "ppo_jax"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        if options.list_envs is not None:
            return list_environments(options.list_envs)
        if options.eval is not None:
            return run_evaluation(options)
        return run_training(settings, options, described=described)
    except ConfigError as error:
        complain(f"error: {error}")
        return 2
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        complain(f"error: another process ended ({error}); the last checkpoint is whole")
        return 1
    except KeyboardInterrupt as stop:
        complain("interrupted")
        return 128 + (stop.args or (signal.SIGINT,))[0]


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as stop:  # of --help
        code = stop.code
    os._exit(code)  # at once, or the threads of a damaged checkpoint would have their say
