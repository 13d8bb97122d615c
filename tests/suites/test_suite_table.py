"""Every environment of every suite: what each has, and that it trains or says what it needs."""

import re
import subprocess

import jax
import numpy as np
import pytest
from from_suites import CHANNELS, MODULES, TINY, needing, read_table, rows

from ppo_jax import PRESETS, SUITES, ConfigError, PPOConfig, init_agent, make_env, update


@pytest.mark.parametrize("suite", [needing(suite, suite, id=suite) for suite in MODULES])
def test_the_table_lists_what_the_suite_has(suite):
    listed = [row.name for row in read_table() if row.suite == suite]
    assert sorted(SUITES[suite].names()) == sorted(listed) and len(set(listed)) == len(listed)
    presets = {name.partition("/")[2] for name in PRESETS if name.startswith(f"{suite}/")}
    assert presets <= set(listed)


def test_the_suites_are_those_of_the_table():
    assert {prefix for prefix in SUITES if prefix} == {row.suite for row in read_table()}


def size_of(word):
    """Return the shape that a word of the table stands for, as in 7x7x2."""
    return () if word == "scalar" else tuple(map(int, word.split("x")))


def shown_shape(suite, words):
    """Return the shape of what an agent sees of an observation in the table."""
    shape, kind = size_of(words[0]), words[1]
    if kind == "of":  # a grid of identifiers, as planes
        counts = tuple(map(int, words[2:]))
        assert counts == CHANNELS[suite] and len(counts) == shape[-1]
        return (*shape[:-1], sum(counts))
    if ".." in kind:
        low, high = map(int, kind.split(".."))
        if 3 <= high - low + 1 <= 64:  # one-hot
            return (*shape, high - low + 1)
    return shape


def shown_shapes(row):
    """Return the shapes of what an agent sees, by path, without the mask."""
    shapes = {}
    for part in row.observation.split("; "):
        words = r"(?:(\S+) )?(\S+) (real|int|bool|\S+\.\.\S+|of .*)"
        name, shape, kind = re.fullmatch(words, part).groups()
        shapes[name or ""] = shown_shape(row.suite, [shape, *kind.split()])
    shapes.pop("action_mask", None)
    return shapes


def assert_actions_of_the_table(space, action):
    kind, *sizes = action.split()
    if kind == "box":
        assert space.kind == "box" and tuple(space.shape) == size_of(sizes[0])
        assert (space.low == -1).all() and (space.high == 1).all()
    elif kind == "parts":
        assert space.kind == "integers" and space.sizes == tuple(map(int, sizes))
    else:  # one number, of an action or of a combination
        assert kind in ("discrete", "together")
        assert space.kind == "integer" and space.sizes == (np.prod([int(n) for n in sizes]),)


def time_limit(env):
    """Return the steps after which an environment's episodes end, as text, "" where it has none."""
    params = env.env_params
    for name in ("max_steps", "max_timesteps"):
        if hasattr(params, name):
            return str(getattr(params, name))
    return str(getattr(env.env.env, "time_limit", ""))


@pytest.mark.parametrize("row", rows())
def test_an_environment_is_as_the_table_says_and_traces_an_update(row):
    config = PPOConfig(row.env, **TINY)
    agent = jax.eval_shape(init_agent, config, jax.random.key(0))
    after, metrics = jax.eval_shape(update, config, agent)
    before, after = (list(map(np.shape, jax.tree.leaves(x.env_states))) for x in (agent, after))
    assert before == after and metrics["return"].shape == ()
    env = make_env(config)
    assert {f"episode/{name}" for name in env.metrics} <= set(metrics)
    shapes = {path: tuple(space.shape) for path, space in env.obs_spaces.items()}
    assert shapes == shown_shapes(row)
    assert_actions_of_the_table(env.action_space, row.action)
    assert time_limit(env) == row.limit


WORDS = {  # by what an environment needs: how the refusal says it
    "network": "needs a network",
    "positional": "positional",
    "ruleset": "ruleset",
}


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Let downloads fail at once, and forget what was downloaded before.

    Not `pytest.importorskip`: a suite's test is skipped anyway where the suite isn't installed.
    """

    def fail(*arguments, **named):
        raise subprocess.CalledProcessError(128, ["git", "clone"])

    try:
        from mujoco_playground._src import mjx_env

        for name in ("EXTERNAL_DEPS_PATH", "MENAGERIE_PATH"):
            monkeypatch.setattr(mjx_env, name, type(mjx_env.MENAGERIE_PATH)(tmp_path / name))
        monkeypatch.setattr(mjx_env, "_clone_with_progress", fail)
    except ModuleNotFoundError:
        pass
    try:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    except ModuleNotFoundError:
        pass


@pytest.mark.parametrize("row", rows(can_be_made=False))
def test_an_environment_that_cannot_be_made_says_what_it_needs(row, no_network):
    with pytest.raises(ConfigError, match=WORDS[row.needs]) as refusal:
        make_env(PPOConfig(row.env, **TINY))
    assert str(refusal.value).startswith("env: ") and "\n" not in str(refusal.value)
