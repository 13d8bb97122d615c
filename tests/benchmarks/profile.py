"""Where an update's time goes, beside the least that its parts could take.

Each part is a compiled function of its own, timed in turn with the others; medians count. The parts are those of
`ppo_jax.update`; what they sum up to differs from the whole, which XLA compiles as one.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder: it would hide the standard profile

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import ppo_jax  # noqa: E402


def environment_steps(config, agent, key):
    """Step the environments n_steps times with one action and one start: the rollout's floor."""
    env, env_params = ppo_jax.make_env(config)
    action = jax.vmap(env.action_space(env_params).sample)(jax.random.split(key, config.n_envs))
    starts = (agent.obs, agent.env_states)

    def step(states, keys):
        new = ppo_jax.step_envs(env, env_params, keys, states, action, starts)
        return new.states, (new.obs, new.reward)

    return jax.lax.scan(step, agent.env_states, jax.random.split(key, (config.n_steps, config.n_envs)))


def each_minibatch(config, carry, body):
    """Run `body(i, carry)` as often as there are minibatches in an update."""
    return jax.lax.fori_loop(0, config.n_epochs * config.n_minibatches, body, carry)


def slices(config, batch, i):
    """The minibatch i of a batch that isn't shuffled."""
    start = i % config.n_minibatches * config.minibatch_size
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, config.minibatch_size), batch)


def shuffles(config, agent, batch, key):
    """Draw all minibatches' indices and gather them."""
    minibatches = ppo_jax.draw_minibatches(config, key)

    def body(i, total):
        return total + sum(jnp.sum(x[minibatches[i]].astype(jnp.float32)) for x in jax.tree.leaves(batch))

    return each_minibatch(config, jnp.float32(0), body)


def gradients(config, agent, batch, key):
    """Compute all minibatches' gradients and take none of the steps."""
    network = ppo_jax.make_network(config)

    def body(i, params):
        loss, _ = jax.grad(ppo_jax.ppo_loss, has_aux=True)(params, config, network, slices(config, batch, i))
        return jax.tree.map(lambda x, g: x + 1e-9 * g, params, loss)

    return each_minibatch(config, agent.params, body)


def optimiser_steps(config, agent, batch, key):
    """Take all steps with a gradient that is there already."""
    optimizer = ppo_jax.make_optimizer(config)

    def body(i, carry):
        changes, opt_state = optimizer.update(carry[0], carry[1])
        return optax.apply_updates(carry[0], changes), opt_state

    return each_minibatch(config, (agent.params, agent.opt_state), body)


def matrix_products(config, agent, batch, key):
    """The three products of each layer and minibatch, forward and both backward: the gradients' floor."""
    kernels = [x for x in jax.tree.leaves(agent.params) if x.ndim == 2]

    def body(i, total):
        for kernel in kernels:
            rows = jnp.full((config.minibatch_size, kernel.shape[0]), total)
            out = rows @ kernel
            total = total + 1e-9 * ((out @ kernel.T)[0, 0] + (rows.T @ out)[0, 0])
        return total

    return each_minibatch(config, jnp.float32(0), body)


def main():
    """Parse the arguments, time the parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--n-envs", type=int, default=64)
    parser.add_argument("--n-steps", type=int, default=128)
    parser.add_argument("--policy", default="mlp")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="JSON to write")
    arguments = parser.parse_args()

    config = ppo_jax.PPOConfig(
        env=arguments.env,
        n_envs=arguments.n_envs,
        n_steps=arguments.n_steps,
        policy=arguments.policy,
        learning_rate=2.5e-4,
        **dict(n_epochs=4, batch_size=None, net_arch=(64, 64), total_timesteps=arguments.n_envs * arguments.n_steps),
    )
    key = jax.random.key(0)
    agent, _ = jax.jit(ppo_jax.train)(config, key)
    moved_on, rollout = jax.jit(ppo_jax.collect_rollout)(config, agent, key)
    batch = jax.jit(ppo_jax.make_batch)(config, moved_on, rollout)
    value = rollout.reward
    parts = {
        "update, whole": (ppo_jax.update, (config, agent)),
        "rollout": (ppo_jax.collect_rollout, (config, agent, key)),
        "  floor: environment steps": (environment_steps, (config, agent, key)),
        "episode statistics": (ppo_jax.episode_statistics, (config, agent, rollout)),
        "values, log-probabilities, advantages": (ppo_jax.make_batch, (config, moved_on, rollout)),
        "  of these, advantages": (
            ppo_jax.compute_gae,
            (rollout.reward, value, value, rollout.terminated, rollout.truncated, 0.99, 0.95),
        ),
        "optimise, whole": (ppo_jax.optimise, (config, agent, batch, key)),
        "  shuffling and gathering": (shuffles, (config, agent, batch, key)),
        "  gradients": (gradients, (config, agent, batch, key)),
        "    floor: matrix products": (matrix_products, (config, agent, batch, key)),
        "  optimiser": (optimiser_steps, (config, agent, batch, key)),
    }
    compiled = {name: (jax.jit(function), inputs) for name, (function, inputs) in parts.items()}
    times = {name: [] for name in parts}
    for _ in range(arguments.repeats + 1):
        for name, (function, inputs) in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}

    layers = [x.shape for x in jax.tree.leaves(agent.params) if x.ndim == 2]
    flops = 6 * sum(math.prod(shape) for shape in layers) * config.rollout_size * config.n_epochs
    print(f"{config.env}, {config.n_envs} x {config.n_steps}, {flops / 1e9:.1f} GFLOP of matrix products an update")
    for name, milliseconds in medians.items():
        print(f"{name:40} {milliseconds:8.2f} ms {milliseconds / medians['update, whole']:6.0%}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"config": str(config), "milliseconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
