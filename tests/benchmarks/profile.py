"""Where an update's time goes, beside the least that its parts could take.

Each part is a compiled function of its own, timed in turn with the others; medians count. The parts
are those of `ppo_jax.update`; their sum differs from the whole, which XLA compiles as one.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

# In place of this folder, which would hide Python's own `profile`.
sys.path[0] = str(Path(__file__).resolve().parents[2])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import ppo_jax  # noqa: E402


def environment_steps(config, agent, action, key):
    """Step the environments n_steps times with one action and one start: the rollout's floor."""
    env = ppo_jax.make_env(config)
    starts = (agent.obs, agent.env_states)

    def step(states, keys):
        (obs, states), outcome = env.step(keys, states, action, starts)
        return states, (obs, outcome.reward)

    keys = jax.random.split(key, (config.n_steps, config.n_envs))
    return jax.lax.scan(step, agent.env_states, keys)


def each_minibatch(config, carry, body):
    """Run `body(i, carry)` as often as there are minibatches in an update."""
    return jax.lax.fori_loop(0, config.n_epochs * config.n_minibatches, body, carry)


def unshuffled(config, batch, i):
    """The minibatch i of a batch in the order of the rollout."""
    parts = ppo_jax.split_axis(batch, config.n_minibatches)
    return jax.tree.map(lambda x: x[i % config.n_minibatches], parts)


def shuffle_and_optimise(config, agent, batch, key):
    """Draw the minibatches and take a step for each."""
    return ppo_jax.optimise(config, agent, batch, ppo_jax.draw_minibatches(config, key))


def shuffle_and_gather(config, agent, batch, key):
    """Draw the minibatches and gather their samples, whose sum keeps XLA from leaving them out."""
    minibatches = ppo_jax.merge_axes(ppo_jax.draw_minibatches(config, key))

    def body(i, total):
        minibatch = ppo_jax.take_sequences(batch, minibatches[i], config.sequence_length)
        return total + sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(minibatch))

    return each_minibatch(config, jnp.float32(0), body)


def gradients(config, agent, batch, key):
    """Compute all minibatches' gradients and take none of the steps."""
    network = ppo_jax.make_network(config)
    gradient = jax.grad(ppo_jax.ppo_loss, has_aux=True)

    def body(i, params):
        changes, _ = gradient(params, config, network, unshuffled(config, batch, i))
        return jax.tree.map(lambda x, g: x + 1e-9 * g, params, changes)

    return each_minibatch(config, agent.params, body)


def optimiser_steps(config, agent, batch, key):
    """Take all steps with a gradient that is there already."""
    optimizer = ppo_jax.make_optimizer(config)

    def body(i, carry):
        params, opt_state = carry
        changes, opt_state = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    return each_minibatch(config, (agent.params, agent.opt_state), body)


def kernels_of(params):
    """The matrices of all layers."""
    return [x for x in jax.tree.leaves(params) if x.ndim == 2]


def matrix_products(config, agent, batch, key):
    """Each layer's products in each minibatch, one forward and two back: the gradients' floor."""

    def body(i, total):
        for kernel in kernels_of(agent.params):
            rows = jnp.full((config.minibatch_size, kernel.shape[0]), total)
            out = rows @ kernel
            total = total + 1e-9 * ((out @ kernel.T)[0, 0] + (rows.T @ out)[0, 0])
        return total

    return each_minibatch(config, jnp.float32(0), body)


def parts_of_update(config):
    """The functions to time, by name, each with its arguments; an indented one is part of another.

    The agent is trained for one update.
    """
    key = jax.random.key(0)
    agent, _ = jax.jit(ppo_jax.train)(config, key)
    moved_on, rollout = jax.jit(ppo_jax.collect_rollout)(config, agent, key)
    batch = jax.jit(ppo_jax.make_batch)(config, moved_on, rollout)
    reward, ends = rollout.reward, (rollout.terminated, rollout.truncated)
    to_learn = (config, agent, batch, key)
    environments = (config, agent, rollout.action[0], key)
    estimates = (reward, reward, reward, *ends, 0.99, 0.95)  # rewards in place of values
    return {
        "update, whole": (ppo_jax.update, (config, agent)),
        "rollout": (ppo_jax.collect_rollout, (config, agent, key)),
        "  floor: environment steps": (environment_steps, environments),
        "episode statistics": (ppo_jax.count_episodes, (agent, rollout)),
        "values, log-probabilities, advantages": (ppo_jax.make_batch, (config, moved_on, rollout)),
        "  of these, advantages": (ppo_jax.compute_gae, estimates),
        "optimise, whole": (shuffle_and_optimise, to_learn),
        "  shuffling and gathering": (shuffle_and_gather, to_learn),
        "  gradients": (gradients, to_learn),
        "    floor: matrix products": (matrix_products, to_learn),
        "  optimiser": (optimiser_steps, to_learn),
    }


def median_milliseconds(parts, repeats):
    """Compile all parts, then run them in turn; the first round doesn't count."""
    compiled = {name: (jax.jit(function), inputs) for name, (function, inputs) in parts.items()}
    times = {name: [] for name in parts}
    for _ in range(repeats + 1):
        for name, (function, inputs) in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*inputs))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--env", default="CartPole-v1")
    add("--n-envs", type=int, default=64)
    add("--n-steps", type=int, default=128)
    add("--policy", default="mlp")
    add("--repeats", type=int, default=15)
    add("--out", type=Path, default=None, help="JSON to write")
    return parser.parse_args()


def main():
    """Time the parts and print them."""
    args = parse()
    ppo_jax.use_every_core()  # as the command line does
    config = ppo_jax.PPOConfig(
        env=args.env,
        n_envs=args.n_envs,
        n_steps=args.n_steps,
        policy=args.policy,
        learning_rate=2.5e-4,
        n_epochs=4,
        batch_size=None,
        net_arch=(64, 64),
        total_timesteps=args.n_envs * args.n_steps,
    )
    parts = parts_of_update(config)
    medians = median_milliseconds(parts, args.repeats)
    _, agent = parts["update, whole"][1]
    n_weights = sum(math.prod(kernel.shape) for kernel in kernels_of(agent.params))
    gflop = 6 * n_weights * config.rollout_size * config.n_epochs / 1e9
    print(f"{config.env}, {config.n_envs} x {config.n_steps}, ", end="")
    print(f"{gflop:.1f} GFLOP of matrix products an update")
    for name, milliseconds in medians.items():
        print(f"{name:40} {milliseconds:8.2f} ms {milliseconds / medians['update, whole']:6.0%}")
    if args.out:
        report = {"config": str(config), "milliseconds": medians}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
