"""Does it learn in other suites, and how fast are their environments behind one interface?

Each environment is trained with its preset on all cores, and each agent plays its most probable
actions; beside it a policy that draws among the allowed actions at random. With --speed: steps per
second of the suite's own step alone, of ours with starts for new episodes, and of training.
"""

import argparse
import functools
import statistics
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from throughput import ROOT, machine, write

sys.path.insert(0, str(ROOT))
import ppo_jax

ppo_jax.use_every_core()

TARGETS = {  # environments that two cores can learn: the mean return that is asked for
    "navix/Navix-Empty-8x8-v0": 0.95,
    "navix/Navix-DoorKey-5x5-v0": 0.95,
    "xminigrid/MiniGrid-Empty-8x8": 0.95,
    "xminigrid/MiniGrid-DoorKey-5x5": 0.95,
    "brax/inverted_pendulum": 950,
    "brax/reacher": None,
    "playground/CartpoleBalance": 900,
    "jumanji/Snake-v1": None,
    "jumanji/Game2048-v1": None,
    "craftax/Craftax-Classic-Symbolic-v1": None,
}
SPEED = [  # one environment of each suite
    "brax/inverted_pendulum",
    "playground/CartpoleBalance",
    "craftax/Craftax-Classic-Symbolic-v1",
    "jumanji/Snake-v1",
    "navix/Navix-DoorKey-8x8-v0",
    "xminigrid/MiniGrid-DoorKey-5x5",
]


class Random(nn.Module):
    """A policy that draws uniformly among the allowed actions; of a box, from a normal one."""

    space: ppo_jax.Space

    def __call__(self, obs):
        n_envs = len(jax.tree.leaves(obs)[0])
        value = jnp.zeros(n_envs)
        if not self.space.sizes:
            zeros = jnp.zeros((n_envs, int(np.prod(self.space.shape))))
            return ppo_jax.DiagonalGaussian(zeros, zeros[0]), value
        logits = jnp.zeros((n_envs, sum(self.space.sizes)))
        mask = ppo_jax.find_mask(obs)
        if mask is not None:
            logits = jnp.where(mask.reshape(logits.shape), 0.0, ppo_jax.IMPOSSIBLE)
        if self.space.kind == "integer":
            return ppo_jax.Categorical(logits), value
        return ppo_jax.MultiCategorical(logits, self.space.sizes), value


def play(config, agents, n_episodes, deterministic=True):
    """Return the mean return (S,) of each agent's episodes."""
    means = []
    for number in range(len(agents.n_updates)):
        agent = jax.tree.map(lambda x, number=number: jax.device_get(x)[number], agents)
        key = jax.random.key(1000 + number)
        returns = ppo_jax.evaluate(config, agent, key, n_episodes, deterministic)
        means.append(float(jnp.nanmean(returns)))
    return means


def learn(name, n_seeds, n_episodes):
    """Train and evaluate the preset of an environment; returns a row of the table."""
    config = ppo_jax.PPOConfig(name)
    keys = jax.random.split(jax.random.key(0), n_seeds)
    begin = time.perf_counter()
    agents, _ = ppo_jax.train_population(config, keys)
    seconds = time.perf_counter() - begin
    policy = Random(ppo_jax.make_env(config).action_space)
    random = config.replace(policy=policy, value_obs=())
    random_agent = jax.tree.map(lambda x: x[None], ppo_jax.init_agent(random, keys[0]))
    means = np.array(play(config, agents, n_episodes))
    low, high = ppo_jax.bootstrap_interval(means, np.mean)
    return {
        "environment": name,
        "steps": config.total_timesteps,
        "seeds": n_seeds,
        "seconds": seconds,
        "mean": means.mean(),
        "low": float(low),
        "high": float(high),
        "least": means.min(),
        "random": play(random, random_agent, n_episodes, deterministic=False)[0],
        "asked": TARGETS[name],
    }


def stepping(config, kind):
    """Return a compiled function of a key that steps all environments of a config n_steps times.

    kind: alone, the suite's step without a new episode ever; pool or fresh, as in a rollout.
    """
    config = config.replace(reset_pool=0 if kind == "fresh" else config.reset_pool)
    env, shape = ppo_jax.make_env(config), (config.n_steps, config.n_envs)
    space = env.action_space

    def draw_actions(key):
        size = (*shape, int(np.prod(space.shape)))
        if space.sizes:
            return jax.random.randint(key, size, 0, jnp.array(space.sizes))
        return jax.random.uniform(key, size, minval=-1.0, maxval=1.0)

    def run(key):
        keys = jax.random.split(key, (2, *shape))
        start, pool = env.reset(keys[0, 0]), None
        if kind == "pool":
            pool = ppo_jax.draw_pool(config, env, key)

        def step(carry, inputs):
            action, step_keys, starts = inputs
            if kind == "alone":
                return env.step_once(step_keys, carry[1], env.to_environment(action))
            return env.step(step_keys, carry[1], action, starts, pool)

        def block(carry, inputs):
            actions, step_keys, start_keys = inputs
            starts = actions
            if kind != "alone":
                starts = ppo_jax.draw_starts(env, pool, start_keys)
            return jax.lax.scan(step, carry, (actions, step_keys, starts))

        n_blocks = config.n_steps // ppo_jax.block_length(config.n_steps)
        blocks = ppo_jax.split_axis((draw_actions(key), *keys), n_blocks)
        _, outcome = jax.lax.scan(block, start, blocks)
        return outcome.reward.sum()

    return jax.jit(run)


def speed(name, n_pairs):
    """Return a row of steps per second, and the median ratios within alternating runs."""
    sizes = dict(n_envs=64, n_steps=128, batch_size=2048, total_timesteps=64 * 128)
    config = ppo_jax.PPOConfig(name, **sizes, policy="mlp", net_arch=(64, 64))
    functions = {kind: stepping(config, kind) for kind in ("alone", "pool", "fresh")}
    functions["training"] = jax.jit(functools.partial(ppo_jax.train, config))
    seconds = {kind: [] for kind in functions}
    for number in range(n_pairs + 1):
        for kind, function in functions.items():
            begin = time.perf_counter()
            jax.block_until_ready(function(jax.random.key(number)))
            if number:  # the first call compiles
                seconds[kind].append(time.perf_counter() - begin)
    row = {"environment": name}
    for kind in functions:
        row[kind] = config.rollout_size / statistics.median(seconds[kind])
    row["pool / alone"] = statistics.median(np.divide(seconds["pool"], seconds["alone"]))
    row["fresh / pool"] = statistics.median(np.divide(seconds["fresh"], seconds["pool"]))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", nargs="+", help="environments; default: all of the table")
    parser.add_argument("--n-seeds", type=int, default=4)
    parser.add_argument("--n-episodes", type=int, default=100)
    parser.add_argument("--speed", action="store_true", help="measure speed, train nothing")
    parser.add_argument("--pairs", type=int, default=5, help="with --speed: runs of each")
    parser.add_argument("--out", help="JSON file for the results")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.envs or (SPEED if arguments.speed else TARGETS):
        if arguments.speed:
            rows.append(speed(name, arguments.pairs))
        else:
            rows.append(learn(name, arguments.n_seeds, arguments.n_episodes))
        if len(rows) == 1:
            print("|", " | ".join(rows[0]), "|\n|" + " --- |" * len(rows[0]))
        shown = [f"{x:,.4g}" if isinstance(x, float) else str(x) for x in rows[-1].values()]
        print("|", " | ".join(shown), "|", flush=True)
        if arguments.out:
            write(arguments.out, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
