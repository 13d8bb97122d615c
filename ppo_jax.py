"""Proximal Policy Optimization in one file, from the environment's step to the update, under jit.

    python ppo_jax.py --env CartPole-v1                           # from a shell

    config = PPOConfig(env="CartPole-v1")                         # from Python
    keys = jax.random.split(jax.random.key(0), 8)
    agents, metrics = jax.jit(jax.vmap(train, in_axes=(None, 0)))(config, keys)

 1 Settings         PPOConfig, Schedule
 2 The algorithm    collect_rollout, compute_gae, make_batch, ppo_loss, optimise, update, train
 3 Networks         ActorCritic, Encoder, Memory, UserNetwork
 4 Distributions    Categorical, MultiCategorical, DiagonalGaussian, gSDE, Squashed
 5 Environments     make_env, VectorEnv, spaces
 6 Parts            optimiser, statistics, shapes, the permutation, the convolution
 7 Reading          settings as they are given, checked and kept; presets
 8 Evaluation       evaluate, make_policy
 9 Populations     10 Run folders     11 Reporting     12 Command line

Sections 1 to 7 train by themselves, with jax, flax, optax, gymnax and chex: cut the file below
them. Where implementations of PPO differ, this one does what Stable-Baselines3 does, except where
a docstring says otherwise; defaults are its own.
Schulman et al., "Proximal Policy Optimization Algorithms", 2017, https://arxiv.org/abs/1707.06347
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.7.1",
#     "flax>=0.10.0",
#     "optax>=0.1.8",
#     "gymnax>=1.0.1",
#     "six>=1.4.0",
#     "chex>=0.1.84",
#     "orbax-checkpoint>=0.11.22",
#     "tqdm>=4.60.0",
#     "pyyaml>=6.0",
#     "matplotlib>=3.9.0",
#     "scipy>=1.15.0",
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
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
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
    env: Any = static("CartPole-v1", "object", "Environment: a name in gymnax, or module:Class.")
    env_params: tuple = static((), "arguments", "Parameters of the environment, as in name=1.")
    total_timesteps: int = static(1_000_000, "total", "Steps to train one agent for.")
    n_envs: int = static(64, "size", "Copies of the environment that one agent steps.")
    n_steps: int = static(128, "size", "Steps of each copy in a rollout, between two updates.")
    frame_skip: int = static(1, "size", "Repeats of each action; rewards add up, as one step.")
    normalize_obs: bool = static(False, "switch", "Standardise observations as seen so far.")
    normalize_reward: bool = static(False, "switch", "Divide rewards by the deviation of returns.")
    stats_window_size: int = static(100, "size", "Latest episodes whose mean return is shown.")
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
    clip_range: float = traced(
        0.2, "positive", "Clip the ratio to 1 ± this; a,b: from 1 - a to 1 + b."
    )
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
    rnn_hidden_size: int = static(64, "size", "Units of a gru or lstm.")
    sub_traj_len: int = static(16, "size", "Length of sequences that a gru or lstm is trained on.")
    ortho_init: bool = static(True, "switch", "Draw orthogonal initial weights.")
    log_std_init: float = traced(0.0, "number", "Initial log standard deviation of actions.")
    squash_output: bool = static(False, "switch", "Squash continuous actions by tanh.")
    use_sde: bool = static(False, "switch", "Explore by state-dependent noise (gSDE).")
    sde_sample_freq: int = static(-1, "period", "gSDE: steps between draws; -1: one per rollout.")

    def __init__(self, env="CartPole-v1", **given):
        preset = PRESETS.get(env, {}) if isinstance(env, str) else {}
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
        n_sequences = self.rollout_size // self.sequence_length
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
    episode_sums: jax.Array  # (2, N), return and length so far of the episodes under way
    recent_episodes: jax.Array  # (2, stats_window_size), of finished ones, the newest first
    n_recent: jax.Array  # () int32, how many of these are known
    obs_statistics: dict[str, RunningStatistics] | None  # of normalize_obs, by path
    return_statistics: RunningStatistics | None  # of normalize_reward
    discounted_return: jax.Array | None  # (N,), of normalize_reward
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
    noise_key, env_key = jax.random.split(key)
    n_draws = -(-config.n_steps // config.noise_steps)
    distribution = jax.eval_shape(policy, agent.obs, agent.memory).distribution
    noise = distribution.noise(noise_key, n_draws)
    keys = jax.random.split(env_key, (2, config.n_steps, config.n_envs))

    def step(carry, inputs):
        obs, env_states, memory = carry
        draw, keys, starts = inputs
        output = policy(obs, memory)
        action = output.distribution.sample(noise[draw])
        new, outcome = env.step(keys, env_states, action, starts)
        row = Rollout(obs, action, *outcome, memory)
        memory = forget(network, output.memory, outcome.terminated | outcome.truncated)
        return (*new, memory), row

    def block(carry, inputs):
        draw, step_keys, start_keys = inputs
        starts = jax.vmap(env.reset)(start_keys)
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

    value, final_value = from_samples((value, final_value), length, config.n_envs)
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
        advantage = standardize(advantage, minibatch.task_id)
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
    reports: dict[str, jax.Array]  # what the loss reported of each minibatch; 0 where not seen


def optimise(config, agent, batch, minibatches):
    """Take a gradient step for each minibatch of each epoch, up to the KL stop.

    batch: what `make_batch` returns. minibatches: what `draw_minibatches` returns. With target_kl,
    the first minibatch whose approx_kl exceeds 1.5 * target_kl takes no step and ends the update.
    Returns the agent, the means over minibatches of what the loss reports (of approx_kl over the
    last epoch, as in Stable-Baselines3) and `optimizer_steps`, the number of steps taken.
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
        params, opt_state, n_seen, stopped, reports = progress
        gradients, report = jax.grad(loss, has_aux=True)(params, n_seen)
        changes, new_opt_state = optimizer.update(gradients, opt_state, params)
        new = (optax.apply_updates(params, changes), new_opt_state)
        if config.target_kl is not None:
            stopped = report["approx_kl"] > 1.5 * config.target_kl
            new = choose(stopped, (params, opt_state), new)
        return Progress(*new, n_seen + 1, stopped, write_row(reports, report, n_seen))

    _, report = jax.eval_shape(loss, agent.params, 0)
    check_report(config, report)
    reports = zero_rows(report, len(minibatches))
    nothing = (jnp.int32(0), jnp.array(False), reports)
    end = jax.lax.while_loop(unfinished, step, Progress(agent.params, agent.opt_state, *nothing))

    means = jax.tree.map(lambda x: jnp.sum(x) / end.n_seen, end.reports)
    if "approx_kl" in means:
        index = jnp.arange(len(minibatches))
        in_last_epoch = index // n_minibatches == (end.n_seen - 1) // n_minibatches
        in_last_epoch &= index < end.n_seen
        means["approx_kl"] = jnp.mean(end.reports["approx_kl"], where=in_last_epoch)
    means["optimizer_steps"] = end.n_seen - end.stopped
    return agent.replace(params=end.params, opt_state=end.opt_state), means


def update(config, agent):
    """Do one iteration of PPO; returns the agent and a dictionary of scalar metrics."""
    n_updates = agent.n_updates + 1
    # As in Stable-Baselines3, progress counts this rollout: the last update has 0 left.
    fraction_done = n_updates * (config.rollout_size / config.total_timesteps)
    config = config.at(jnp.maximum(0.0, 1 - fraction_done))
    key, rollout_key, shuffle_key = jax.random.split(agent.key, 3)
    agent, rollout = collect_rollout(config, agent.replace(key=key), rollout_key)
    agent = count_episodes(agent, rollout)
    agent, rollout = normalize_reward(config, agent, rollout)
    batch = make_batch(config, agent, rollout)
    minibatches = draw_minibatches(config, shuffle_key)
    agent, report = optimise(config, agent, batch, minibatches)
    agent = observe(agent, rollout)  # only now: rollout and update must see the same numbers
    episode_return, episode_length = mean_episode(agent)
    return agent.replace(n_updates=n_updates), {
        "timesteps": count_timesteps(config, n_updates),
        "return": episode_return,
        "length": episode_length,
        "explained_variance": explained_variance(batch.value, batch.value_target),
        **report,
    }


def init_agent(config, key):
    """Return an untrained agent with its environments reset."""
    config = config.at(1.0)
    env = make_env(config)
    network = make_network(config)
    key, network_key, reset_key = jax.random.split(key, 3)
    obs, env_states = env.reset(jax.random.split(reset_key, config.n_envs))
    memory = network.initial_memory(config.n_envs)
    params = network.init(network_key, obs, memory)
    return Agent(
        params=params,
        opt_state=make_optimizer(config).init(params),
        key=key,
        n_updates=jnp.int32(0),
        obs=obs,
        env_states=env_states,
        memory=memory,
        episode_sums=jnp.zeros((2, config.n_envs), jnp.float32),
        recent_episodes=jnp.zeros((2, config.stats_window_size), jnp.float32),
        n_recent=jnp.int32(0),
        **init_statistics(config, env),
        n_steps=config.n_steps,
    )


def train(config, key):
    """Train an agent from scratch: a pure function of a config and a key, for jit and vmap.

    Returns the agent and metrics, arrays of shape (n_updates,): `timesteps` done; `return` and
    `length`, means over the latest stats_window_size finished episodes (NaN before the first);
    `explained_variance` of the rollout's values; `optimizer_steps`; and what the loss reports.
    Raises `ConfigError` before anything compiles.
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
    if not isinstance(config.policy, str):
        return UserNetwork(env.obs_space, env.action_space, config.policy)
    settings = pick(vars(config), fields_of(ActorCritic))
    return ActorCritic(env.obs_space, env.action_space, **settings)


class ActorCritic(nn.Module):
    """A policy and a value network, which share the encoder and the GRU or LSTM at most.

    The observations' entry "action_mask" (…, A), if any, is 0 for actions that cannot be taken.
    """

    obs_space: Any
    action_space: Any
    # Settings of PPOConfig, by name.
    policy: str
    net_arch: tuple
    net_arch_vf: tuple | None
    activation: str
    share_features_extractor: bool
    rnn_hidden_size: int
    ortho_init: bool
    log_std_init: float
    squash_output: bool
    use_sde: bool

    @nn.compact
    def __call__(self, obs, memory=None, is_first=None):
        features, new_memory = [], {}
        for name in self.encoders():
            init = self.kernel_init(math.sqrt(2))
            encoder = Encoder(self.obs_space, self.policy, init, name=f"{name}_encoder")
            latent = encoder(obs)
            if self.policy in RECURRENT:
                cell = Memory(self.policy, self.rnn_hidden_size, name=f"{name}_memory")
                latent, new_memory[name] = cell(latent, memory[name], is_first)
            features.append(latent)
        policy_latent = self.hidden("policy", self.net_arch, features[0])
        net_arch_vf = self.net_arch if self.net_arch_vf is None else self.net_arch_vf
        value_latent = self.hidden("value", net_arch_vf, features[-1])
        value = self.dense("value_out", 1, 1.0)(value_latent)[..., 0]
        distribution = self.distribution(policy_latent, find_mask(obs))
        return Output(distribution, value, new_memory or None)

    def encoders(self):
        """Return the names of the encoders: one for both networks, or one for each."""
        return ("shared",) if self.share_features_extractor else ("policy", "value")

    def hidden(self, head, widths, latent):
        """Return what the hidden layers of a head make of features (…, F)."""
        for layer, width in enumerate(widths):
            latent = self.dense(f"{head}_{layer}", width, math.sqrt(2))(latent)
            latent = ACTIVATIONS[self.activation](latent)
        return latent

    def distribution(self, latent, mask):
        """Return the distribution over actions."""
        space = self.action_space
        if is_box(space):
            return self.gaussian(latent)
        sizes = action_sizes(space)
        if is_binary(space) and mask is None:  # one logit a bit, as in Stable-Baselines3
            logits = self.dense("policy_out", len(sizes), 0.01)(latent)
            logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)
            logits = logits.reshape((*latent.shape[:-1], -1))
        else:
            logits = self.dense("policy_out", sum(sizes), 0.01)(latent)
        if mask is not None:
            logits = jnp.where(mask.reshape(logits.shape) > 0, logits, IMPOSSIBLE)
        if is_discrete(space):
            return Categorical(logits)
        return MultiCategorical(logits, sizes)

    def gaussian(self, latent):
        """Return the distribution over continuous actions."""
        width = math.prod(self.action_space.shape)
        mean = self.dense("policy_out", width, 0.01)(latent)
        init = nn.initializers.constant(self.log_std_init)
        if self.use_sde:
            log_std = self.param("log_std", init, (latent.shape[-1], width), jnp.float32)
            distribution = StateDependentGaussian(mean, latent, log_std)
        else:
            log_std = self.param("log_std", init, (width,), jnp.float32)
            distribution = DiagonalGaussian(mean, log_std)
        if self.squash_output:
            return Squashed(distribution)
        return distribution

    def dense(self, name, width, gain):
        """Return a layer."""
        return nn.Dense(width, kernel_init=self.kernel_init(gain), name=name)

    def kernel_init(self, gain):
        """Return the initialiser of a layer's weights."""
        return orthogonal(gain) if self.ortho_init else nn.linear.default_kernel_init

    def initial_memory(self, n_envs):
        """Return the memory of n_envs episodes that begin."""
        if self.policy not in RECURRENT:
            return None
        memory = jnp.zeros((n_envs, self.rnn_hidden_size), jnp.float32)
        if self.policy == "lstm":
            memory = (memory, memory)
        return dict.fromkeys(self.encoders(), memory)


class Encoder(nn.Module):
    """Features (…, F) of observations (…, *shape) of a space; those of a Dict's parts in a row."""

    obs_space: Any
    policy: str
    kernel_init: Callable

    @nn.compact
    def __call__(self, obs):
        space = self.obs_space
        parts = named_parts(space)
        if parts:
            features = []
            for name, part in parts.items():
                encoder = Encoder(part, self.policy, self.kernel_init, name=str(name))
                features.append(encoder(obs[name]))
            return jnp.concatenate(features, axis=-1)
        batch, sizes = batch_shape(obs, space), action_sizes(space)
        if sizes:
            digits = (obs - first_values(space)).reshape((*batch, -1))
            hot = [
                jax.nn.one_hot(digits[..., i], n, dtype=jnp.float32) for i, n in enumerate(sizes)
            ]
            return jnp.concatenate(hot, axis=-1)
        obs = obs.astype(jnp.float32)
        if is_pixels(space):
            obs = obs / 255
        if is_image(space) and self.policy != "mlp":
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

    obs_space: Any
    action_space: Any
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
        check_output(result, n_results, batch_shape(obs, self.obs_space), self.action_space)
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
    if not isinstance(obs, dict):
        return None
    masks = [obs.get("action_mask"), *map(find_mask, obs.values())]
    return next((mask for mask in masks if mask is not None), None)


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
        standard = (action - self.mean) * jnp.exp(-self.log_std)
        terms = 0.5 * standard**2 + self.log_std + 0.5 * math.log(2 * math.pi)
        return -jnp.sum(terms, axis=-1)

    def entropy(self, action=None):
        terms = self.log_std + 0.5 * math.log(2 * math.pi * math.e)
        return jnp.sum(jnp.broadcast_to(terms, self.mean.shape), axis=-1)

    def marginal(self):
        """Return the distribution of one action, as a DiagonalGaussian."""
        return self


@flax.struct.dataclass
class StateDependentGaussian(Distribution):
    """gSDE: action = mean + features @ matrix, with a matrix of noise kept for several steps.

    Raffin et al., "Smooth Exploration for Robotic Reinforcement Learning", 2021,
    https://arxiv.org/abs/2005.05719. No gradient flows through the features in the deviation, as in
    Stable-Baselines3.
    """

    mean: jax.Array  # (…, A)
    features: jax.Array  # (…, F)
    log_std: jax.Array  # (F, A), of the matrix's entries

    def noise(self, key, n):
        batch = self.mean.shape[:-1]
        return jax.random.normal(key, (n, *batch, *self.log_std.shape))

    def sample(self, noise):
        matrix = noise * jnp.exp(self.log_std)  # (…, F, A)
        return self.mean + jnp.einsum("...f,...fa->...a", self.features, matrix)

    def mode(self):
        return self.mean

    def log_prob(self, action):
        return self.marginal().log_prob(action)

    def entropy(self, action=None):
        return self.marginal().entropy()

    def marginal(self):
        """Return the distribution of one action, over all matrices: equation 10 of the paper."""
        features = jax.lax.stop_gradient(self.features)
        variance = features**2 @ jnp.exp(2 * self.log_std)
        return DiagonalGaussian(self.mean, 0.5 * jnp.log(variance + 1e-6))


@flax.struct.dataclass
class Squashed(Distribution):
    """The tanh of a Gaussian. Its actions are those before the tanh: exact at the bounds too.

    The log-density of tanh(action) is that of Haarnoja et al., 2018, appendix C,
    https://arxiv.org/abs/1801.01290. The entropy is the Gaussian's plus a one-sample estimate of
    the tanh's part, which has no closed form: E[log(1 - tanh(u)^2)], reparametrised.
    """

    gaussian: DiagonalGaussian | StateDependentGaussian

    def noise(self, key, n):
        return self.gaussian.noise(key, n)

    def sample(self, noise):
        return self.gaussian.sample(noise)

    def mode(self):
        return self.gaussian.mode()

    def log_prob(self, action):
        return self.gaussian.log_prob(action) - log_tanh_slope(action)

    def entropy(self, action):
        marginal = self.gaussian.marginal()
        noise = (action - marginal.mean) * jnp.exp(-marginal.log_std)
        action = marginal.sample(jax.lax.stop_gradient(noise))
        return marginal.entropy() + log_tanh_slope(action)


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


@dataclasses.dataclass(frozen=True, eq=False)
class VectorEnv:
    """Copies of an environment side by side, with its parameters, actions, resets and repeats."""

    env: Any  # with gymnax 1.0's interface
    env_params: Any
    obs_space: Any
    action_space: Any
    squash_output: bool
    frame_skip: int
    types: Any = None  # of an observation and a state in a loop over steps; None: as they come

    def reset(self, keys):
        """Return the observations and states (N, …) with which episodes begin. keys: (N,)."""
        return self.cast(jax.vmap(self.env.reset, in_axes=(0, None))(keys, self.env_params))

    def step(self, keys, states, action, starts):
        """Step N environments; returns the next (observations, states) and an Outcome.

        action: (N, …), as a policy samples it. starts: what `reset` returns, for episodes to begin
        with; gymnax's own step draws them each time, which takes longer than the rest of the step.
        """
        action = self.to_environment(action)
        new, outcome = self.step_once(keys, states, action)
        for repeat in range(1, self.frame_skip):
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, repeat)
            later, more = self.step_once(keys, new[1], action)
            more = more._replace(reward=outcome.reward + more.reward)
            done = outcome.terminated | outcome.truncated
            new, outcome = choose(done, (new, outcome), (later, more))
        if not self.resets_itself:
            new = choose(outcome.terminated | outcome.truncated, starts, new)
        return new, outcome

    def step_once(self, keys, states, action):
        """Step N environments once, without resets unless the environment's own step resets."""
        step = self.env.step if self.resets_itself else self.env.step_env
        result = jax.vmap(step, in_axes=(0, 0, 0, None))(keys, states, action, self.env_params)
        check_step(self.env, result, self.resets_itself)
        obs, states, reward, terminated, *_, info = result
        if self.resets_itself:
            truncated, final_obs = result[4], info["final_observation"]
        else:
            truncated = jax.vmap(self.env.is_truncated, (0, None))(states, self.env_params)
            final_obs = obs
        terminated = terminated.astype(bool)
        truncated = truncated.astype(bool) & ~terminated
        final_obs, _ = self.cast((final_obs, states))
        reward = reward.astype(jnp.float32)
        outcome = Outcome(reward, terminated, truncated, final_obs, info.get("task_id"))
        return self.cast((obs, states)), outcome

    @property
    def resets_itself(self):
        """Whether the environment's step is its own rather than gymnax's."""
        return type(self.env).step.__module__ != "gymnax.environments.environment"

    def to_environment(self, action):
        """Turn actions as a policy samples them, (N,) or (N, A), into the environment's."""
        space = self.action_space
        if hasattr(space, "spaces"):
            return tuple(jnp.moveaxis(action + first_values(space), -1, 0))
        action = action.reshape((*action.shape[:1], *space.shape))
        if not is_box(space):
            return action + first_values(space)
        low = jnp.asarray(space.low, action.dtype)
        high = jnp.asarray(space.high, action.dtype)
        if self.squash_output:
            action = low + (jnp.tanh(action) + 1) / 2 * (high - low)
        return jnp.clip(action, low, high)

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
        if isinstance(name, str):
            env, env_params = make_by_name(name)
        else:
            env, env_params = name, name.default_params
        env_params = replace_params(name, env_params, params)
        obs_space = env.observation_space(env_params)
        action_space = env.action_space(env_params)
    check_spaces(name, obs_space, action_space)
    env = VectorEnv(env, env_params, obs_space, action_space, squash_output, frame_skip)
    return dataclasses.replace(env, types=loop_types(name, env))


def make_by_name(name):
    """Return the environment and the parameters of a name: suite/name, module:Class or gymnax's."""
    if ":" in name:
        env = make_object(name)
        return env, env.default_params
    suite, _, rest = name.rpartition("/")
    try:
        return SUITES[suite](rest)
    except OSError as error:
        raise ConfigError(
            f"env: {name!r} needs a network connection to download its data ({error})"
        ) from error


SUITES = {"": lambda name: import_gymnax().make(name)}  # by the prefix in suite/name


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
    check_env(env, path)
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
    """Return the types that suit observations and states of a reset and a step: the wider ones."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    kind = jnp.float32 if is_box(env.action_space) else jnp.int32
    action = jax.ShapeDtypeStruct((1, *action_shape(env.action_space)), kind)

    def step_from(start, keys, action):
        return env.step_once(keys, start[1], env.to_environment(action))

    def wider(first, second):
        if first.dtype == second.dtype:
            return first
        return jax.ShapeDtypeStruct(first.shape, jnp.promote_types(first.dtype, second.dtype))

    try:
        start = jax.eval_shape(env.reset, keys)
        for _ in range(2):  # wider states may give wider observations
            after, outcome = jax.eval_shape(step_from, start, keys, action)
            shapes = jax.tree.map(jnp.shape, start)
            last = (outcome.final_obs, after[1])
            if jax.tree.map(jnp.shape, (after, last)) != (shapes, shapes):
                refuse("env", name, "such that reset and step give observations and states alike")
            start = jax.tree.map(wider, start, after)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        refuse("env", name, f"of gymnax's interface ({error})")
    for what, value in zip(("a reward", "terminated", "truncated"), outcome):
        if value.shape != (1,):
            refuse("env", name, f"such that {what} is a scalar, not of {value.shape[1:]}")
    shown = named_leaves(start[0])
    for path, space in leaf_spaces(env.obs_space).items():
        if path not in shown or shown[path].shape[1:] != tuple(space.shape):
            refuse("env", name, f"such that observations are in its observation_space {space}")
    return start


# Spaces are told apart by their attributes, so that gymnax's and gymnasium's both serve.
def is_discrete(space):
    """Tell whether a space is of n integers in a row."""
    return hasattr(space, "n") and space.shape == ()


def is_binary(space):
    """Tell whether a space is of bits, as gymnasium's MultiBinary."""
    return hasattr(space, "n") and space.shape != ()


def is_box(space):
    """Tell whether a space is of arrays between bounds."""
    return hasattr(space, "low") and hasattr(space, "high")


def is_image(space, smallest=3):
    """Tell whether a space has the three axes of an image, large enough for a filter."""
    return is_box(space) and len(space.shape) == 3 and min(space.shape[:2]) >= smallest


def is_pixels(space):
    """Tell whether a space is of images of bytes from 0 to 255."""
    return is_image(space) and space.dtype == np.uint8 and np.max(space.high) == 255


def action_sizes(space):
    """Return the number of choices of each part of a space of integers; () for any other space."""
    if is_discrete(space):
        return (int(space.n),)
    if is_binary(space):
        return (2,) * math.prod(space.shape)
    if hasattr(space, "nvec"):
        return tuple(np.ravel(space.nvec).tolist())
    parts = getattr(space, "spaces", ())
    if isinstance(parts, dict) or not all(map(is_discrete, parts)):
        return ()
    return tuple(int(part.n) for part in parts)


def first_values(space):
    """Return the smallest integer of each part of a space of integers: 0, or its `start`."""
    if hasattr(space, "spaces"):
        return np.array([first_values(part) for part in space.spaces])
    return np.asarray(getattr(space, "start", 0), np.int32)


def action_shape(space):
    """Return the shape of one action as a policy samples it."""
    if is_discrete(space):
        return ()
    if is_box(space):
        return (math.prod(space.shape),)
    return (len(action_sizes(space)),)


def named_parts(space):
    """Return the parts of a Dict or Tuple space by name or place, without an action mask."""
    parts = getattr(space, "spaces", {})
    if not isinstance(parts, dict):
        return dict(enumerate(parts))
    return {name: parts[name] for name in sorted(parts) if name != "action_mask"}


def leaf_spaces(space, path=""):
    """Return the spaces that a Dict or Tuple is made of, by path as in a/b; "" for any other."""
    leaves = {}
    for name, part in named_parts(space).items():
        leaves |= leaf_spaces(part, f"{path}/{name}".strip("/"))
    return leaves or {path: space}


def batch_shape(obs, space):
    """Return the leading axes (…) of observations (…, *shape) of a space."""
    for name, part in named_parts(space).items():
        return batch_shape(obs[name], part)
    return obs.shape[: obs.ndim - len(space.shape)]


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


def count_timesteps(config, n_updates):
    """Return the steps of n_updates updates; in a run beyond 31 bits as a float, which rounds."""
    kind = jnp.int32
    if config.n_updates * config.rollout_size >= 2**31:
        kind = jnp.float32
    return n_updates * jnp.asarray(config.rollout_size, kind)


def count_episodes(agent, rollout):
    """Return the agent with the returns and lengths of the episodes that a rollout ended."""
    done = rollout.terminated | rollout.truncated
    per_step = jnp.stack([rollout.reward, jnp.ones_like(rollout.reward)], axis=1)  # (T, 2, N)
    sums, episode_sums = discounted_sum(per_step, done[:, None], agent.episode_sums, 1.0)
    n_ended = jnp.cumsum(done.ravel(), dtype=jnp.int32)
    window = agent.recent_episodes.shape[1]
    age = jnp.arange(window)  # 0 is the newest
    n_new = n_ended[-1]
    new = sums.swapaxes(0, 1).reshape((2, -1))[:, jnp.searchsorted(n_ended, n_new - age)]
    old = agent.recent_episodes[:, age - n_new]
    return agent.replace(
        episode_sums=episode_sums,
        recent_episodes=jnp.where(age < n_new, new, old),
        n_recent=jnp.minimum(agent.n_recent + n_new, window),
    )


def mean_episode(agent):
    """Return the mean return and length, (2,), of recent episodes; NaN before the first ended."""
    means = jnp.sum(agent.recent_episodes, axis=1) / jnp.maximum(agent.n_recent, 1)
    return jnp.where(agent.n_recent > 0, means, unknown())


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


def update_statistics(statistics, samples):
    """Take in samples (…, *mean's shape).

    Chan et al., 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
    equation 2.1, with fractions of the whole in place of counts, and differences from the mean so
    far in place of samples: float32 keeps its digits, however many samples and however large.
    """
    difference = (samples - statistics.mean).astype(jnp.float32)
    difference = difference.reshape((-1, *statistics.mean.shape))
    count = statistics.count + len(difference)
    new = len(difference) / count  # the fraction of all samples that is new
    shift = jnp.mean(difference, axis=0)
    variance = jnp.mean(jnp.square(difference - shift), axis=0) - statistics.variance
    variance = statistics.variance + new * variance + new * (1 - new) * jnp.square(shift)
    return RunningStatistics(count, statistics.mean + new * shift, variance)


def init_statistics(config, env):
    """Return the fields of an `Agent` for normalize_obs (pixels stay) and normalize_reward."""

    def nothing(shape):
        zeros = jnp.zeros(shape, jnp.float32)
        return RunningStatistics(jnp.float32(0), zeros, zeros + 1)

    fields = dict(obs_statistics=None, return_statistics=None, discounted_return=None)
    if config.normalize_obs:
        fields["obs_statistics"] = {}
        for path, space in leaf_spaces(env.obs_space).items():
            if is_box(space) and not is_pixels(space):
                fields["obs_statistics"][path] = nothing(space.shape)
    if config.normalize_reward:
        fields["return_statistics"] = nothing(())
        fields["discounted_return"] = jnp.zeros(config.n_envs, jnp.float32)
    return fields


def observe(agent, rollout):
    """Return the agent with a rollout's observations in its statistics, if the agent has any."""
    if agent.obs_statistics is None:
        return agent
    obs, statistics = named_leaves(rollout.obs), {}
    for path, known in agent.obs_statistics.items():
        statistics[path] = update_statistics(known, obs[path])
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
    statistics = update_statistics(agent.return_statistics, totals)
    reward = rollout.reward * jax.lax.rsqrt(statistics.variance + 1e-8)
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
    names = ["seaborn", "matplotlib.pyplot"]
    names = [name for name in names if name not in sys.modules and "gymnax" not in sys.modules]
    for name in names:
        sys.modules[name] = LateModule(name)
    try:
        return importlib.import_module("gymnax")
    finally:
        for name in names:
            del sys.modules[name]


class LateModule(types.ModuleType):
    """A module that is imported when something in it is asked for."""

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.__name__), name)


def block_length(n_steps):
    """n_steps, but a divisor near 16: starts for all steps would take as much as the rollout."""
    return min(divisors(n_steps), key=lambda size: abs(math.log(size / 16)))


def draw_minibatches(config, key):
    """Return indices of sequences (n_epochs, n_minibatches, …), each epoch a fresh partition."""
    n_sequences = config.rollout_size // config.sequence_length
    keys = jax.random.split(key, config.n_epochs)
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


def read_sizes(name, value):
    """Return the widths of layers, as a tuple."""
    if not isinstance(value, list | tuple):
        value = (value,)
    return tuple(read_whole(1, 2**31 - 1, name, width) for width in value)


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


READERS = {  # kind of a static setting: how it is read
    "size": functools.partial(read_whole, 1, 2**31 - 1),
    "total": functools.partial(read_whole, 1, 10**18),
    "seed": functools.partial(read_whole, 0, 2**32 - 1),
    "period": functools.partial(read_whole, -1, 2**31 - 1),
    "activation": functools.partial(read_choice, tuple(ACTIVATIONS)),
    "vf_loss": functools.partial(read_choice, tuple(VALUE_LOSSES)),
    "verbose": functools.partial(read_choice, (0, 1, 2)),
    "device": functools.partial(read_choice, ("auto", "cpu", "gpu", "tpu")),
    "switch": read_switch,
    "sizes": read_sizes,
    "arguments": read_arguments,
    "text": read_text,
    "function": read_function,
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
    batch_size = min(config.batch_size or config.minibatch_size, size)
    if size % batch_size or batch_size % length:
        near = nearest_divisors(batch_size / length, size // length, length)
        windows = f" in windows of sub_traj_len = {length}" * config.is_recurrent
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
            if not hasattr(env, part):
                right = f"a name or have gymnax's interface; it has no {part}"
                refuse("env", name or env, right)
    elif ":" not in env:
        suite, slash, rest = env.rpartition("/")
        if suite not in SUITES:
            suites = "".join(f", {known}/name" for known in SUITES if known)
            refuse("env", env, f"a name in gymnax, or module:Class{suites}; there is no such suite")
        known = import_gymnax().registered_envs
        if not slash and rest not in known:
            near = closest(rest, known) or f"; gymnax has {', '.join(known)}"
            raise ConfigError(f"env: {env!r} is no environment of gymnax{near}")


def check_spaces(name, obs_space, action_space):
    """Refuse an environment whose spaces no network can serve."""
    for space in (*leaf_spaces(obs_space).values(), action_space):
        if not is_box(space) and not action_sizes(space):
            kinds = "Discrete, Box, MultiDiscrete or MultiBinary, or a Tuple of Discrete actions"
            which = "actions" if space is action_space else "observations"
            raise ConfigError(f"env: {name!r} has {which} in {space}; it must be {kinds}")


def check_policy(config, env):
    """Refuse a policy whose settings do not suit the environment's spaces."""
    space = env.action_space
    for name in ("squash_output", "use_sde"):
        if getattr(config, name) and not is_box(space):
            raise ConfigError(f"{name}: True needs continuous actions; {config.env!r} has {space}")
    if config.squash_output and not np.isfinite(np.subtract(space.high, space.low)).all():
        raise ConfigError(f"squash_output: True needs finite bounds; {config.env!r} has {space}")
    smallest = {"cnn": 3, "nature_cnn": 36}.get(config.policy)
    parts = leaf_spaces(env.obs_space).values()
    for part in parts:
        is_suited = smallest is None or is_image(part, smallest)
        if not is_suited and (len(parts) == 1 or is_image(part)):
            needs = f"images (height, width, channels) from {smallest} by {smallest} on"
            shown = f"{config.env!r} shows {part}; use mlp"
            raise ConfigError(f"policy: {config.policy!r} needs {needs}; {shown}")


def check_step(env, result, resets_itself):
    """Refuse an environment whose step does not return what gymnax's interface says."""
    right = "observation, state, reward, terminated, info"
    if resets_itself:
        right = "observation, state, reward, terminated, truncated, info"
    if len(result) != len(right.split(",")):
        refuse("env", env, f"such that a step returns {right}, not {len(result)} values")
    if resets_itself and "final_observation" not in result[-1]:
        refuse("env", env, "such that a step that resets has info['final_observation']")


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
    shape = (*batch, *action_shape(action_space))
    found = jax.eval_shape(distribution.mode).shape
    n_choices = sum(action_sizes(action_space))
    logits = getattr(distribution, "logits", jnp.zeros(n_choices))
    if found != shape or logits.shape[-1] != n_choices:
        found = f"actions of shape {found} among {logits.shape[-1]}"
        raise ConfigError(f"policy: the module gives {found}; it must serve {action_space}")


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

    obs: one observation or a batch (B, …), as the environment shows them; gymnasium's too. key: to
    sample the action; None: the most probable one. memory: what the call before returned; None when
    an episode begins. Actions are NumPy arrays as the environment takes them.
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
        batch = batch_shape(obs, env.obs_space)
        if not batch:
            obs = jax.tree.map(lambda x: x[None], obs)
        if memory is None:
            memory = network.initial_memory(*batch or (1,))
        action, memory = act_on_batch(obs, key, memory)
        if not batch:
            action = jax.tree.map(lambda x: x[0], action)
        return jax.device_get(action), memory

    return policy


# ==================================================================================================
# 9. Populations
# ==================================================================================================


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
    start,
    callback=None,
    callback_seconds=0.5,
    run_dir=None,
    reset_num_timesteps=False,
    progress_bar=None,
):
    """Train an agent for each key on all local devices: `jax.vmap(train, (None, 0))`, but faster.

    start: keys (S,), or agents of an earlier run, which go on to config.total_timesteps in all. A
    number in the config may be an array (S,): each agent then has its own.
    callback: called as callback(timesteps, metrics, agents) between chunks of updates, about every
    callback_seconds, with the chunk's metrics (S, updates); ends the run where it returns true. The
    agents are valid until the callback returns.
    run_dir: the folder for what was learnt before an exception; None: a new temporary one.
    reset_num_timesteps: let agents of an earlier run begin a new one, environments reset.
    progress_bar: show progress; None: in a notebook alone.

    Returns agents and metrics (NumPy) as `train` does, with a leading axis of S. Chunks change no
    number, and bound the memory of a long run.
    """
    agents = first_agents(config, start, reset_num_timesteps)
    done = int(agents.n_updates[0])
    capacity = min(config.n_updates, CHUNK_UPDATES)
    train_chunk = on_every_device(train_updates, donate=(1,), capacity=capacity)
    bar = make_bar(config, done, progress_bar)
    size = 1
    if bar.disable and callback is None:
        size = capacity
    history, stop = [], False
    try:
        while done < config.n_updates and not stop:
            n_updates = min(size, capacity, config.n_updates - done)
            begin = time.perf_counter()
            agents, metrics = train_chunk(config, agents, jnp.int32(n_updates))
            metrics = to_host(config, metrics, done, n_updates)
            history.append(metrics)
            done += n_updates
            pace = callback_seconds / (time.perf_counter() - begin)
            if size < capacity:
                size = max(1, min(int(n_updates * pace), 2 * size))
            timesteps = done * config.rollout_size
            mean_return = known_mean(metrics["return"][:, -1])
            bar.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
            bar.update(timesteps - bar.n)
            if callback:
                stop = callback(timesteps, metrics, agents)
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


def first_agents(config, start, reset_num_timesteps):
    """Return the agents (S, …) of keys or of an earlier run, checked against the config."""
    if isinstance(start, Agent):
        check_swept(config, len(start.n_updates))
        check_resumable(config, start, reset_num_timesteps)
        return on_every_device(continue_agent, restart=reset_num_timesteps)(config, start)
    is_typed = jnp.issubdtype(start.dtype, jax.dtypes.prng_key)
    if start.ndim < (1 if is_typed else 2) or not len(start):
        refuse("start", start, "several keys, as jax.random.split(key, 4) gives them")
    check_swept(config, len(start))
    return init_population(config, start)


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
        done = int(agents.n_updates[0]) * config.rollout_size
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
    return jax.eval_shape(init_agent, first, jax.random.key(0))


def continue_agent(config, agent, restart):
    """Return a copy of an agent; restart: at the start of a new run, its environments reset."""
    if restart:
        return init_agent(config, agent.key).replace(**learnt(agent))
    return agent


def to_host(config, metrics, done, n_updates):
    """Return a chunk's metrics (S, n_updates) as NumPy arrays, with steps counted in 64 bits."""
    metrics = jax.tree.map(lambda x: np.asarray(x)[:, :n_updates], metrics)
    timesteps = np.arange(done + 1, done + n_updates + 1, dtype=np.int64) * config.rollout_size
    metrics["timesteps"] = np.broadcast_to(timesteps, metrics["return"].shape)
    return pick(metrics, FIRST_METRICS) | metrics


def init_population(config, keys):
    """Return untrained agents, one for each key (S,), with a leading axis of S."""
    return on_every_device(init_agent)(config, keys)


@functools.cache
def on_every_device(function, donate=(), **static):
    """Return `spread` of a function of a config and an agent, compiled."""
    options = {}
    if jax.default_backend() == "cpu":
        # LLVM's later passes take a third of the compilation and make nothing faster here.
        options["xla_backend_optimization_level"] = 1
    run = functools.partial(spread, functools.partial(function, **static))
    return jax.jit(run, donate_argnums=donate, compiler_options=options)


def spread(function, config, agents, *shared):
    """Call `function(config, agent, *shared)` for each agent, agents split between local devices.

    agents: (S, …); a leaf of the config may have that axis too. The agents of one device run side
    by side, but on a CPU one after the other: what one agent needs stays in the core's cache.
    """
    n_agents = len(jax.tree.leaves(agents)[0])
    chosen = jax.config.jax_default_device  # by --device, or by the user
    devices = jax.local_devices(backend=chosen and chosen.platform)[:n_agents]
    n_rows = -(-n_agents // len(devices)) * len(devices)  # a device without work repeats some
    rows = (jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, n_agents), config), agents)
    if n_rows > n_agents:
        rows = jax.tree.map(lambda x: x[np.arange(n_rows) % n_agents], rows)

    def on_device(rows, shared):
        def one_agent(row):
            return function(*row, *shared)

        if devices[0].platform == "cpu":
            return jax.lax.map(one_agent, rows)
        return jax.vmap(one_agent)(rows)

    mesh = jax.sharding.Mesh(np.array(devices), ("agents",))
    split, whole = jax.sharding.PartitionSpec("agents"), jax.sharding.PartitionSpec()
    specs = dict(in_specs=(split, whole), out_specs=split)
    results = jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)(rows, shared)
    if n_rows > n_agents:
        results = jax.tree.map(lambda x: x[:n_agents], results)
    return results


# ==================================================================================================
# 10. Run folders
# ==================================================================================================


def save_agents(run_dir, config, agents, **run):
    """Write agents whole, from networks to keys, and config.json.

    agents: one, or several with a leading axis. run: more entries of config.json. The last two
    checkpoints are kept; each of them is there whole or not at all.
    """
    n_seeds = len(agents.n_updates) if agents.n_updates.ndim else None
    check_swept(config, n_seeds)
    folder = pathlib.Path(run_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config, n_seeds=n_seeds, **run)
    ocp, manager = open_checkpoints(folder, create=True)
    with manager:
        number = (manager.latest_step() or 0) + 1
        manager.save(number, args=ocp.args.StandardSave(jax.device_get(plain_leaves(agents))))


def load_agents(run_dir, config=None, **objects):
    """Read what `save_agents` wrote last: a config and agents, on the host.

    config: in place of the one in config.json. objects: settings that a file cannot hold, such as
    env, policy or loss_function. Raises `ConfigError` where something is missing or damaged.
    """
    folder = pathlib.Path(run_dir).expanduser().absolute()
    settings = read_file(folder / "config.json") | objects
    if config is None:
        check_objects(folder, settings)
        config = PPOConfig(**pick(settings, fields_of(PPOConfig)))
    if not (folder / "checkpoint").is_dir() or "n_seeds" not in settings:
        found = ", ".join(sorted(os.listdir(folder)))
        raise ConfigError(f"checkpoint: {folder} holds {found}; it must hold what a run left")
    lead = () if settings["n_seeds"] is None else (settings["n_seeds"],)
    agent = empty_agent(config)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    expected = {}
    for name, leaf in jax.eval_shape(plain_leaves, agent).items():
        shape = (*lead, *leaf.shape)
        expected[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=place)
    ocp, manager = open_checkpoints(folder)
    # Of a damaged checkpoint TensorStore's threads would each print a traceback, also later.
    hook, sys.unraisablehook = sys.unraisablehook, lambda *_: None  # and stays so on damage
    try:
        with manager:
            saved = ocp.args.StandardRestore(expected)
            leaves = manager.restore(manager.latest_step(), args=saved)
    except Exception as error:  # Orbax and TensorStore raise all sorts of things here
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # a task would log it once more
        message = f"checkpoint: {folder}/checkpoint is damaged, or not of config.json's settings"
        raise ConfigError(f"{message} ({one_line(error)[:300]})") from error
    sys.unraisablehook = hook
    leaves = jax.device_get(leaves)  # on a device they would be bound to it

    def stored_leaf(path, leaf):
        value = leaves[path_name(path)]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            value = jax.random.wrap_key_data(value)
        return value

    return config, jax.tree_util.tree_map_with_path(stored_leaf, agent)


def open_checkpoints(folder, create=False):
    """Return Orbax and its manager of a run folder's checkpoints, which keeps the last two."""
    import orbax.checkpoint as ocp

    options = dict(max_to_keep=2, create=create, enable_async_checkpointing=False)
    options = ocp.CheckpointManagerOptions(**options)
    handler = ocp.StandardCheckpointHandler()
    return ocp, ocp.CheckpointManager(folder / "checkpoint", options=options, item_handlers=handler)


def plain_leaves(tree):
    """Return the leaves of a tree by path, typed random keys as integers."""
    leaves = named_leaves(tree)
    for name, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[name] = jax.random.key_data(leaf)
    return leaves


def write_config(folder, config, **run):
    """Write config.json: every setting by name, after the entries that describe the run."""
    settings = run | {name: plain_setting(name, value) for name, value in vars(config).items()}
    stored = folder / "config.json"
    is_rescue = "seed" not in run and stored.exists() and stored.stat().st_size
    if is_rescue:  # a run that an exception ended keeps its seed
        settings = {"seed": read_file(stored).get("seed", 0)} | settings
    fresh = folder / "config.json.new"  # a full disk must not cost the file that is there
    fresh.write_text(json.dumps(settings, indent=2, default=str) + "\n")
    fresh.replace(stored)


def plain_setting(name, value):
    """Return a setting as JSON holds it and `PPOConfig` takes it; for an object {"object": …}."""
    if name in TRACED and value is not None:
        return plain_number(value)
    if name in ("env_params", "optimizer_kwargs"):
        return dict(value)
    is_widths = isinstance(value, tuple) and all(isinstance(width, int) for width in value)
    if is_widths or isinstance(value, str | int | None):
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


def load_population(run_dir, config=None):
    """Load agents with a leading axis, also of one agent; objects are taken from a config."""
    stored = read_file(pathlib.Path(run_dir, "config.json"))
    known = vars(config) if config else {}
    config, agents = load_agents(run_dir, **pick(known, objects_in(stored)))
    if not agents.n_updates.ndim:
        agents = jax.tree.map(lambda x: x[None], agents)
    return config, agents


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
# 11. Reporting
# ==================================================================================================


def make_bar(config, n_updates, shown):
    """Return a progress bar; in a log file, a line every ten seconds. shown: None in a notebook."""
    import tqdm

    in_notebook = "ipykernel" in sys.modules
    if shown is None:
        shown = in_notebook
    options = dict(unit=" steps", unit_scale=True, disable=not shown)
    if not sys.stderr.isatty() and not in_notebook:
        options |= dict(mininterval=10, bar_format="{l_bar}{n_fmt} of {total_fmt}{postfix}\n")
    size = config.rollout_size
    return tqdm.tqdm(total=config.n_updates * size, initial=n_updates * size, **options)


class RunReport:
    """A callback of `train_population` that writes a run's folder, then calls the user's."""

    checkpoint_seconds = 60.0

    def __init__(self, run_dir, config, options, loggers, callback=None):
        self.run_dir, self.config, self.options = run_dir, config, options
        self.loggers, self.callback = loggers, callback
        self.interrupted = False
        self.started = self.saved = time.perf_counter()
        self.compiled = None  # when the first update was done

    def __call__(self, timesteps, metrics, agents):
        """Write a chunk's metrics, and sometimes the agents; returns whether the run is to end."""
        if self.compiled is None:
            self.compiled, self.first_steps = time.perf_counter(), timesteps
        try:
            if self.options.verbose > 1:
                words = [f"{name} {known_mean(x[:, -1]):.4g}" for name, x in metrics.items()]
                print(*words, sep="  ", flush=True)
            self.write_metrics(metrics, "a")
            if time.perf_counter() - self.saved > self.checkpoint_seconds:
                self.save(agents)
        except Exception as error:  # a full disk, for which Orbax has errors of its own
            complain(f"{self.run_dir}: {error}; training goes on")
        stop = self.callback and self.callback(timesteps, metrics, agents)
        return bool(self.interrupted or stop)

    def write_metrics(self, metrics, mode):
        """Write rows of metrics.csv anew ("w"), or behind the others and to the loggers ("a")."""
        every = self.config.rollout_size * self.options.log_interval
        header, rows = metric_rows(metrics, every)
        with open(self.run_dir / "metrics.csv", mode, newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(header)
            writer.writerows(rows)
        if mode == "w":
            return
        for row in rows:
            scalars = {name: x for name, x in zip(header[1:], row[1:]) if math.isfinite(x)}
            for log in self.loggers:
                log(row[0], scalars)

    def save(self, agents):
        """Save the agents, but not over a good checkpoint when all of them have diverged."""
        self.saved = time.perf_counter()
        if are_finite(agents).any() or not (self.run_dir / "checkpoint").exists():
            save_agents(self.run_dir, self.config, agents, seed=self.options.seed)


def metric_rows(metrics, every=1):
    """Return a header and a row for each update: means over agents, then each agent's return.

    metrics: (S, updates). every: only those rows whose steps it divides. More than 16 agents have
    the least and the greatest return in place of a column each.
    """
    columns = {name: known_mean(values, axis=0) for name, values in metrics.items()}
    columns["timesteps"] = metrics["timesteps"][0]
    returns = metrics["return"]
    if len(returns) > 16:
        least, greatest = np.fmin.reduce(returns), np.fmax.reduce(returns)  # NaN are passed over
        columns |= {"return_min": least, "return_max": greatest}
    else:
        columns |= {f"return_seed_{i}": values for i, values in enumerate(returns)}
    rows = zip(*(column.tolist() for column in columns.values()))
    return list(columns), [row for row in rows if row[0] % every == 0]


def known_mean(values, axis=None):
    """Return the mean of the values that are not NaN; NaN where all are."""
    known = ~np.isnan(values)
    mean = np.where(known, values, 0.0).sum(axis) / np.maximum(known.sum(axis), 1)
    return np.where(known.any(axis), mean, np.nan)


def are_finite(agents):
    """Return for each agent (S,) whether all of its weights are finite."""
    leaves = jax.tree.leaves(jax.device_get(agents.params))
    return np.all([np.isfinite(x.reshape(len(x), -1)).all(axis=1) for x in leaves], axis=0)


def interquartile_mean(values, axis=-1):
    """Return the mean of the middle half: Agarwal et al., 2021, https://arxiv.org/abs/2108.13264"""
    import scipy.stats

    return scipy.stats.trim_mean(values, 0.25, axis=axis)


def bootstrap_interval(values, statistic):
    """Return the 95 % percentile bootstrap interval of a statistic over axis 0."""
    import scipy.stats

    options = dict(n_resamples=2000, batch=50, method="percentile", rng=np.random.default_rng(0))
    return scipy.stats.bootstrap((values,), statistic, axis=0, **options).confidence_interval


def summary_table(title, returns, has_diverged):
    """Return a table, in text, of each seed's return (S,) and statistics over the known ones."""
    rows = []
    for seed, value in enumerate(returns[:16]):
        text = f"{value:.2f}"
        if has_diverged[seed]:
            text = "diverged"
        elif np.isnan(value):
            text = "no episode ended"
        rows.append((f"seed {seed}", text))
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


def plot_learning_curve(path, config, metrics):
    """Draw the return against the steps: every seed, their mean and its 95 % bootstrap interval."""
    from matplotlib.figure import Figure

    n_points = metrics["timesteps"].shape[1]
    points = np.unique(np.linspace(0, n_points - 1, 200).astype(int))
    timesteps, returns = metrics["timesteps"][0, points], metrics["return"][:, points]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(timesteps, returns.T, color="C0", alpha=min(0.5, 8 / len(returns)), linewidth=0.8)
    mean = known_mean(returns, axis=0)
    axes.plot(timesteps, mean, color="C0", linewidth=2, label=f"mean of {len(returns)}")
    known = np.isfinite(returns).all(axis=0)  # from when every seed has finished an episode
    if len(returns) > 1 and known.any():
        low, high = bootstrap_interval(returns[:, known], np.mean)
        style = dict(color="C0", alpha=0.2, linewidth=0, label="95 % interval")
        axes.fill_between(timesteps[known], low, high, **style)
    steps = "environment steps"
    if config.frame_skip > 1:
        steps = f"steps of up to {config.frame_skip} frames"
    axes.set(title=f"PPO on {env_name(config)}", xlabel=steps, ylabel="return")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
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
        loggers.append(lambda timesteps, scalars: run.log(scalars, step=timesteps))
    return loggers


def import_logger(package, setting):
    """Import a package; raises `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{setting}: needs a package; pip install {package}") from error


# ==================================================================================================
# 12. Command line
# ==================================================================================================


@dataclasses.dataclass(frozen=True, init=False)
class RunOptions:
    """What the command line decides besides a PPOConfig."""

    seed: int = static(0, "seed", "Random seed of the run.")
    n_seeds: int = static(4, "size", "Agents to train side by side, each with its own random key.")
    run_dir: str | None = static(
        None, "text", "Folder for results, new or empty; None: runs/ and the run's name."
    )
    run_name: str | None = static(None, "text", "Run's name; None: environment and time.")
    config: str | None = static(None, "text", "File of settings, YAML or JSON; flags win over it.")
    resume: str | None = static(
        None, "text", "Folder of a run to continue, up to total_timesteps in all."
    )
    reset_num_timesteps: bool = static(
        False, "switch", "With --resume: count steps from 0, reset environments."
    )
    eval: str | None = static(None, "text", "Folder of a run: play its agents, train nothing.")
    n_episodes: int = static(100, "size", "With --eval: episodes that each agent plays.")
    max_steps: int = static(
        100_000, "size", "With --eval: leave out an episode not over after so many steps."
    )
    verbose: int = static(
        1, "verbose", "0: errors only; 1: also progress and results; 2: also metrics."
    )
    progress_bar: bool = static(True, "switch", "Show progress while training.")
    log_interval: int = static(1, "size", "Write a row of metrics every so many updates.")
    tensorboard_log: str | None = static(
        None, "text", "Folder for TensorBoard's logs; needs tensorboardX."
    )
    wandb_project: str | None = static(None, "text", "Project in Weights & Biases; needs wandb.")
    device: str = static("auto", "device", "Device to run on: auto, cpu, gpu or tpu.")
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
        "Defaults are those of the environment that --env names. learning_rate, max_grad_norm and"
        " the numbers of the objective may follow a schedule: linear_3e-4 falls from 3e-4 to 0"
        " over the run, cosine_3e-4_0.1 falls to a tenth of it."
    )
    options = dict(usage="python ppo_jax.py [--flag value] …", add_help=False)
    options |= dict(allow_abbrev=False, exit_on_error=False)
    parser = argparse.ArgumentParser(description=about, epilog=more, **options)
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # -1e-3 too, as in Python 3.14
    group = parser
    for name, field in flag_fields().items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        default = defaults.get(name)
        if isinstance(default, tuple):
            default = re.sub(r"[(),']", "", str(default)) or "none"
        help = f"{field.metadata['help']} (default: {default})"
        options = dict(help=help, default=argparse.SUPPRESS)
        kind = field.metadata["kind"]
        if kind == "switch":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= dict(metavar="X", nargs={"sizes": "*", "arguments": "*"}.get(kind))
        group.add_argument(f"--{name.replace('_', '-')}", **options)
    parser.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    return parser


def flag_fields():
    """Return the settings that have a flag, by name: all but functions."""
    fields = fields_of(RunOptions) | fields_of(PPOConfig)
    return {name: field for name, field in fields.items() if field.metadata["kind"] != "function"}


def parse_arguments(argv):
    """Turn command-line arguments into a config and run options; --help shows these and exits."""
    try:
        argv = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), x) for x in argv]
        given, others = make_parser({}).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    for word in others:
        near = closest(word.strip("-").replace("-", "_"), flag_fields())
        near = re.sub("( mean| or) ", r"\1 --", near).replace("_", "-")
        raise ConfigError(f"{word}: no such flag{near}")
    given = vars(given)
    show_help = given.pop("help")
    settings = {}
    if "resume" in given:
        settings |= read_file(pathlib.Path(given["resume"], "config.json"))
    if "config" in given:
        settings |= read_file(given["config"])
    of_run, of_agent = fields_of(RunOptions), fields_of(PPOConfig)
    for name in settings:
        if name not in of_run | of_agent:
            raise ConfigError(f"config: {name} is no setting{closest(name, flag_fields())}")
    settings |= given
    if settings.get("n_seeds", 1) is None:  # of a single agent that was saved from Python
        settings["n_seeds"] = 1
    check_objects("the run", settings)
    options = RunOptions(**pick(settings, of_run))
    config = PPOConfig(**pick(settings, of_agent))
    if show_help:
        make_parser(vars(options) | vars(config)).print_help()
        raise SystemExit(0)
    return config, options


def new_run_dir(options, config):
    """Create the run's folder, new or empty and for this run alone, with its config.json."""
    name = options.run_name or f"{env_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = wanted = pathlib.Path(options.run_dir or f"runs/{name}")
    try:
        for number in itertools.count(2):
            run_dir.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # where another process was faster
                if not any(run_dir.iterdir()):
                    (run_dir / "config.json").touch(exist_ok=False)
                    break
            if options.run_dir or options.run_name:
                refuse("run_dir", str(run_dir), "new or empty: there is something in it")
            run_dir = wanted.with_name(f"{wanted.name}-{number}")
        write_config(run_dir, config, seed=options.seed, n_seeds=options.n_seeds)
    except OSError as error:
        right = f"a folder of yours; it can't be written ({error.strerror})"
        refuse("run_dir", str(run_dir), right)
    return run_dir


def env_name(config):
    """Return a config's environment by name, fit for a folder."""
    name = config.env if isinstance(config.env, str) else type(config.env).__name__
    return re.sub(r"[^\w.-]", "-", name)


def run_training(config, options, callback=None):
    """Train, show progress and leave a run folder; returns the exit code."""
    make_env(config)
    start = jax.random.split(jax.random.key(options.seed), options.n_seeds)
    reset = options.reset_num_timesteps
    if options.resume is not None:
        _, start = load_population(options.resume, config)
        n_agents = len(start.n_updates)
        if n_agents != options.n_seeds:
            refuse("n_seeds", options.n_seeds, f"{n_agents}, the agents in {options.resume}")
        check_resumable(config, start, reset)
    run_dir = new_run_dir(options, config)
    shown = options.verbose > 0 and options.progress_bar
    more = dict(run_dir=run_dir, reset_num_timesteps=reset, progress_bar=shown)
    with contextlib.ExitStack() as stack:
        try:
            loggers = open_loggers(options, run_dir, stack)
            report = RunReport(run_dir, config, options, loggers, callback)
            catch_signals(report, stack)
            agents, metrics = train_population(config, start, report, **more)
        except (KeyboardInterrupt, ConfigError):
            if not (run_dir / "checkpoint").exists():  # nothing was learnt
                (run_dir / "config.json").unlink()
                with contextlib.suppress(OSError):  # a logger's files stay
                    run_dir.rmdir()
            raise
        return finish_run(report, agents, metrics)


def catch_signals(report, stack):
    """End the run at the next chunk on Ctrl-C or SIGTERM; at once while nothing is learnt yet."""
    if threading.current_thread() is not threading.main_thread():
        return  # which alone gets signals

    def interrupt(number, frame):
        report.interrupted = True
        signal.signal(number, signal.SIG_DFL)
        if report.compiled is None:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        stack.callback(signal.signal, number, signal.signal(number, interrupt))


def finish_run(report, agents, metrics):
    """Write and print what a run leaves; returns the exit code."""
    config, options, run_dir = report.config, report.options, report.run_dir
    seconds = time.perf_counter() - report.compiled
    steps = (int(metrics["timesteps"][0, -1]) - report.first_steps) * options.n_seeds
    has_diverged = ~are_finite(agents)
    code = 0
    if report.interrupted:
        code = 130
    try:
        report.save(agents)
        report.write_metrics(metrics, "w")
        plot_learning_curve(run_dir / "learning_curve.png", config, metrics)
    except Exception as error:
        complain(f"error: {run_dir} can't be written ({error}); its last checkpoint is whole")
        code = 1
    if has_diverged.all():
        complain("error: all agents diverged: a reward, an observation or a loss was not finite")
        code = 3
    if options.verbose:
        title = f"{env_name(config)}, last {config.stats_window_size} episodes of training"
        print(summary_table(title, metrics["return"][:, -1], has_diverged))
        compile_seconds = report.compiled - report.started
        speed = f"{steps / seconds:,.0f} steps/s"
        if config.frame_skip > 1:
            speed += f" of up to {config.frame_skip} frames each"
        print(f"compile {compile_seconds:.1f} s   run {seconds:.1f} s   {speed}")
        try:
            check_objects(run_dir, read_file(run_dir / "config.json"))
            print(f"results in {run_dir}; play them with: python ppo_jax.py --eval {run_dir}")
        except ConfigError as error:
            print(f"results in {run_dir}; {error}")
    return code


def run_evaluation(options):
    """Play the agents of a run folder and print their returns; returns the exit code."""
    config, agents = load_population(options.eval)
    limits = dict(n_episodes=options.n_episodes, max_steps=options.max_steps)
    play = on_every_device(evaluate, **limits)  # all agents the same episodes
    returns = np.asarray(play(config, agents, jax.random.key(options.seed)))
    title = f"{env_name(config)}, mean of {options.n_episodes} episodes, most probable actions"
    print(summary_table(title, known_mean(returns, axis=1), ~are_finite(agents)))
    n_unknown = np.isnan(returns).sum()
    if n_unknown:
        print(f"{n_unknown} episodes did not end within {options.max_steps:,} steps (--max-steps)")
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

    0, 1: results could not be written, 2: a user's mistake, 3: all agents diverged, 130: Ctrl-C.
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
        config, options = parse_arguments(argv)
        if options.device != "auto":
            choose_device(options.device)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if options.compilation_cache and not cache.startswith("~"):  # without a home
            jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "ppo_jax"))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        if options.eval is not None:
            return run_evaluation(options)
        return run_training(config, options)
    except ConfigError as error:
        complain(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit as stop:  # of --help
        code = stop.code
    os._exit(code)  # at once, or the threads of a damaged checkpoint would have their say
