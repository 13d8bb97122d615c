"""What tests let processes of their own do, which are forked from one that has ppo_jax imported."""

import contextlib
import itertools
import multiprocessing
import os
import time

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["ppo_jax"])  # which starts nothing of JAX's


class Nowhere:
    """An environment for runs that are never trained."""

    reset = step = default_params = observation_space = action_space = None


def save_for_ever(run_dir, config, agents, saved):
    """Save agents whose every number is a count, one checkpoint after the other.

    saved: a shared integer, the last count that was saved for certain.
    """
    import jax
    import numpy as np

    import ppo_jax

    for count in itertools.count(saved.value + 1):
        agents = jax.tree.map(lambda x: np.full_like(x, count), agents)  # noqa: B023
        ppo_jax.save_agents(run_dir, config, agents)
        saved.value = count


def claim(folder, name, n_folders, together, results):
    """Ask for run folders at the same moments as others; put what was given, or None.

    Each folder is kept until all have got an answer.

    name: of a folder to insist on, with its number; None: such as belong to one second.
    """
    import ppo_jax

    os.chdir(folder)
    list_folder = os.listdir

    def list_slowly(path):
        """See the same files as others do, as on a slow disk."""
        found = list_folder(path)
        time.sleep(0.01)
        return found

    os.listdir = list_slowly
    now = time.strftime("%Y%m%d-%H%M%S")
    time.strftime = lambda *given: now
    config = ppo_jax.PPOConfig(env=Nowhere())
    given = []
    with contextlib.ExitStack() as stack:
        for number in range(n_folders):
            options = ppo_jax.RunOptions(run_dir=name and f"{name}-{number}")
            described = ppo_jax.describe_run([({}, config)], options, {})
            together.wait()
            try:
                given.append(str(ppo_jax.open_run_dir(options, config, described, stack)))
            except ppo_jax.ConfigError as refusal:
                assert "no other process" in str(refusal)
                given.append(None)
        results.put(given)
        together.wait()
