"""What agents see of each suite, and which actions a mask leaves them."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from from_suites import (
    CHANNELS,
    TINY,
    assert_same_jumanji_obs,
    identifiers,
    jumanji_own,
    navix_own,
    needing,
    play_ours,
    play_own,
    random_actions,
    xminigrid_own,
)
from helpers import jit

from ppo_jax import PPOConfig, collect_rollout, init_agent, make_env, make_network


def play_both(config, own, n_steps, n_envs=4):
    """Return the observations that random actions lead to, ours and the suite's (T, N, …)."""
    env = make_env(config)
    keys = jax.random.split(jax.random.key(3), n_envs)
    step_keys = jax.random.split(jax.random.key(4), (n_steps, n_envs))
    actions = random_actions(env.action_space, jax.random.key(5), (n_steps, n_envs))
    _, outcome, _ = play_ours(env, keys, keys, step_keys, actions)
    return outcome.final_obs, play_own(own, keys, keys, step_keys, actions).obs


GRIDS = [  # the tags or tiles that an environment shows besides floor, walls and, in Navix, players
    ("navix", "Navix-DoorKey-5x5-v0", {"DOOR", "KEY", "GOAL"}),
    ("navix", "Navix-GoToDoor-6x6-v0", {"DOOR"}),
    ("navix", "Navix-LavaGapS6-v0", {"LAVA", "GOAL"}),
    ("navix", "Navix-Dynamic-Obstacles-6x6-v0", {"BALL", "GOAL"}),
    ("xminigrid", "MiniGrid-DoorKey-5x5", {"DOOR_LOCKED", "KEY", "GOAL"}),
    ("xminigrid", "MiniGrid-Playground", {"DOOR_CLOSED", "BALL", "SQUARE", "PYRAMID", "STAR"}),
]


@pytest.mark.parametrize(
    "suite, name, things", [needing(suite, suite, *row, id=row[0]) for suite, *row in GRIDS]
)
def test_planes_stand_for_the_suites_identifiers(suite, name, things):
    if suite == "navix":
        from navix.entities import EntityIds as tags

        own = navix_own(importlib.import_module("navix").make(name))
    else:
        from xminigrid.core.constants import Tiles as tags

        own = xminigrid_own(*importlib.import_module("xminigrid").make(name))
    config = PPOConfig(f"{suite}/{name}")
    ours, own_obs = play_both(config, own, 30, n_envs=8)
    assert ours.dtype == bool and set(np.unique(own_obs[..., 0])) >= {
        int(getattr(tags, thing) if suite == "navix" else getattr(tags(), thing))
        for thing in things
    }
    np.testing.assert_array_equal(identifiers(ours, CHANNELS[suite]), own_obs)
    # To the network these are images, and not of 0 to 255.
    space = make_env(config).obs_spaces[""]
    assert space.side == min(ours.shape[-3:-1]) and not space.is_pixels


NESTED = (  # what is nested, of few and many values, of -1 and up, without bounds, of other widths
    "BinPack-v2",
    "Game2048-v1",
    "GraphColoring-v1",
    "JobShop-v0",
    "Maze-v0",
    "MultiCVRP-v0",
    "PacMan-v1",
)


@pytest.mark.parametrize("name", [needing("jumanji", name, id=name) for name in NESTED])
def test_dictionaries_hold_what_jumanji_shows(name):
    import jumanji

    env = jumanji.make(name)
    combined = name == "BinPack-v2"  # 40 spaces to put one of 20 items into
    own = jumanji_own(env, lambda x: jnp.stack([x // 20, x % 20]) if combined else x)
    ours, own_obs = play_both(PPOConfig(f"jumanji/{name}"), own, 4)
    assert_same_jumanji_obs(env.observation_spec, ours, own_obs)
    flat = ppo_paths(ours)
    assert {path for path in flat if "action_mask" not in path} == set(
        make_env(PPOConfig(f"jumanji/{name}")).obs_spaces
    )


def ppo_paths(obs):
    """Return the paths of a nested dictionary's leaves, as in a/b."""
    paths = set()
    for name, part in obs.items():
        below = ppo_paths(part) if isinstance(part, dict) else {""}
        paths |= {f"{name}/{path}".strip("/") for path in below}
    return paths


@pytest.mark.parametrize("name", [needing("craftax", "Craftax-Classic-Pixels-v1", id="pixels")])
def test_pixels_go_through_the_convolutions_as_craftax_draws_them(name):
    from craftax.craftax_env import make_craftax_env_from_name

    own = make_craftax_env_from_name(name, auto_reset=False)
    config = PPOConfig(f"craftax/{name}", **TINY)
    agent = jit(init_agent)(config, jax.random.key(0))
    drawn = jit(jax.vmap(own.get_obs))(agent.env_states.inner)
    np.testing.assert_allclose(agent.obs, drawn, rtol=1e-6)
    assert agent.obs.shape == (2, 63, 63, 3) and 0 <= agent.obs.min() < agent.obs.max() <= 1
    assert "conv_0" in agent.params["params"]["shared_encoder"]
    # What the network makes of them is not divided by 255 once more.
    values = make_network(config).apply(agent.params, jnp.stack([agent.obs[0], 0 * agent.obs[0]]))
    assert abs(float(values.value[0] - values.value[1])) > 0.01


# ------------------------------------------------------------------------------------------- masks


def allowed(mask, action, sizes):
    """Return whether a mask allows actions: numbers, several parts, or numbers of combinations."""
    if mask.shape[:-1] == action.shape:
        return np.take_along_axis(mask, action[..., None], axis=-1)[..., 0]
    if mask.shape[:-1] == (*action.shape[:-1], len(sizes)):
        return np.take_along_axis(mask, action[..., None], axis=-1)[..., 0].all(axis=-1)
    flat = mask.reshape((*action.shape, -1))  # row by row: the last part's number changes fastest
    return np.take_along_axis(flat, action[..., None], axis=-1)[..., 0]


MASKED = {  # by name: how many values the parts of an action have
    "Snake-v1": (4,),
    "Cleaner-v0": (4, 4, 4),
    "Connector-v3": (5,) * 10,
    "Minesweeper-v0": (10, 10),
    "Tetris-v0": (4, 10),
}


@pytest.mark.parametrize("name", [needing("jumanji", name, id=name) for name in MASKED])
def test_an_action_that_the_mask_forbids_is_never_taken(name):
    sizes = MASKED[name]
    config = PPOConfig(f"jumanji/{name}", **TINY | dict(n_envs=16, n_steps=32))
    agent = jit(init_agent)(config, jax.random.key(0))
    _, rollout = jit(collect_rollout)(config, agent, jax.random.key(1))
    mask, action = np.asarray(rollout.obs["action_mask"]), np.asarray(rollout.action)
    assert allowed(mask, action, sizes).all()
    space = make_env(config).action_space
    at_random = np.asarray(random_actions(space, jax.random.key(2), action.shape[:2]))
    assert not allowed(mask, at_random, sizes).all(), "the mask forbids something"
    assert len(np.unique(action)) > 2, "and leaves a choice"
    assert space.sizes == ((np.prod(sizes),) if name[:5] in ("Mines", "Tetri") else sizes)


@pytest.mark.parametrize("name", [needing("jumanji", "Minesweeper-v0", id="Minesweeper")])
def test_a_combination_is_the_pair_whose_place_in_the_mask_it_is(name):
    """Action 10 * row + column opens that cell and no other, as the next board shows."""
    config = PPOConfig(f"jumanji/{name}", **TINY | dict(n_envs=16))
    agent = jit(init_agent)(config, jax.random.key(0))
    _, rollout = jit(collect_rollout)(config, agent, jax.random.key(1))
    before, after = (
        np.asarray(obs["board"]).argmax(axis=-1) for obs in (rollout.obs, rollout.final_obs)
    )
    row, column = np.divmod(np.asarray(rollout.action), 10)
    opened = (np.arange(10)[:, None] == row[..., None, None]) & (
        np.arange(10) == column[..., None, None]
    )
    goes_on = ~np.asarray(rollout.terminated)  # a mine shows nothing
    np.testing.assert_array_equal((before != after)[goes_on], opened[goes_on])
    assert goes_on.sum() > 32
