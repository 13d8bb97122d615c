"""Populations: many agents at once, in chunks, with callbacks; going on with trained ones."""

import json
import os
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import jit
from runs import CONFIG, KEYS, assert_same_agents, finish, start

from ppo_jax import ConfigError, load_agents, train, train_population


@pytest.fixture(scope="module")
def whole():
    """Three agents, which two devices don't divide, trained without a callback."""
    agents, metrics = train_population(CONFIG, KEYS)
    return jax.device_get(agents), metrics


def stop_at(timesteps):
    """Return a callback that ends a run there."""
    return lambda steps, metrics, agents: steps >= timesteps


@pytest.fixture(scope="module")
def third():
    """Agents that have done a third of their run."""
    return train_population(CONFIG, KEYS, stop_at(32), 0.0)[0]


# ------------------------------------------------------------------------- chunks and callbacks


def test_chunks_and_callbacks_change_no_number(whole):
    agents, metrics = whole
    seen = []

    def look(steps, chunk, agents):
        seen.append((steps, chunk["timesteps"].tolist(), agents.n_updates.tolist()))

    parts, part_metrics = train_population(CONFIG, KEYS, look, 0.0)
    assert seen == [(32 * n, [[32 * n]] * 3, [n] * 3) for n in (1, 2, 3)]
    jax.tree.map(np.testing.assert_array_equal, metrics, part_metrics)
    assert_same_agents(agents, jax.device_get(parts))
    alone, alone_metrics = jit(jax.vmap(train, (None, 0)))(CONFIG, KEYS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        agents.params,
        alone.params,
    )
    assert {name: values.shape for name, values in metrics.items()} == {
        name: values.shape for name, values in alone_metrics.items()
    }
    assert all(isinstance(values, np.ndarray) for values in metrics.values())
    assert list(metrics)[:3] == ["timesteps", "return", "length"]
    assert list(metrics)[3:] == sorted(list(metrics)[3:])


def test_chunks_grow_towards_the_callbacks_pace():
    seen = []
    train_population(CONFIG, KEYS, lambda steps, *_: seen.append(steps), 1e9)
    assert seen == [32, 96]


def test_a_callback_ends_the_run():
    agents, metrics = train_population(CONFIG, KEYS, stop_at(64), 0.0)
    assert metrics["timesteps"].tolist() == [[32, 64]] * 3
    assert agents.n_updates.tolist() == [2, 2, 2]


@pytest.fixture(scope="module")
def raw():
    """A run from keys of the old kind, and how much was compiled at each of its chunks.

    No other test compiles for such keys.
    """
    compilations, seen = [], []

    def count(event, seconds, **about):
        if event.endswith("backend_compile_duration"):
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    keys = jax.random.split(jax.random.PRNGKey(5), 3)
    assert keys.dtype == np.uint32
    agents, metrics = train_population(CONFIG, keys, lambda *_: seen.append(len(compilations)), 0.0)
    return agents, metrics, seen


def test_the_second_chunk_compiles_nothing(raw):
    """What a chunk returns must be of the very types that it takes, weak ones included."""
    seen = raw[2]
    assert seen[0] > 0 and seen == [seen[0]] * 3


def test_keys_of_the_old_kind_do_as_well(raw, whole):
    jax.tree.map(np.testing.assert_array_equal, raw[1], whole[1])
    jax.tree.map(np.testing.assert_array_equal, raw[0].params, whole[0].params)


@pytest.mark.parametrize("progress_bar", [None, True])
def test_progress_is_shown_where_it_is_asked_for(progress_bar, capsys):
    train_population(CONFIG, KEYS, progress_bar=progress_bar)
    shown = "".join(capsys.readouterr())
    if not progress_bar:
        assert shown == ""
        return
    last = shown.strip().splitlines()[-1]
    assert last.startswith("100%") and "288 of 288" in last and "return" in last


# ------------------------------------------------------------------------------------------ sweeps


def test_a_population_sweeps_settings_along_with_its_keys():
    rates = np.array([1e-4, 1e-3, 1e-2], np.float32)
    agents, _ = train_population(CONFIG.replace(learning_rate=rates), KEYS)
    alone, _ = jit(train)(CONFIG.replace(learning_rate=rates[2]), KEYS[2])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[2], b, rtol=1e-4, atol=1e-5),
        agents.params,
        alone.params,
    )
    assert not np.allclose(*(jax.tree.leaves(agents.params)[1][i] for i in (1, 2)), atol=1e-4)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(learning_rate=[1e-3, 1e-2]), r"learning_rate: .* shape \(3,\)"),
        (dict(gamma=np.full((3, 3), 0.9)), r"gamma: .* shape \(3,\)"),
        (dict(ent_coef=["linear_1", "linear_2"]), r"ent_coef: .* shape \(3,\)"),
        (dict(clip_range=([0.1, 0.2], 0.3)), r"clip_range: .* shape \(3,\)"),
    ],
)
def test_a_sweep_of_another_length_is_refused(changes, words, third):
    for first in (KEYS, third):
        with pytest.raises(ConfigError, match=words):
            train_population(CONFIG.replace(**changes), first)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["new", "old"])
def test_one_key_is_refused(key):
    with pytest.raises(ConfigError, match=r"start: .* several keys.*split") as refusal:
        train_population(CONFIG, key)
    assert "\n" not in str(refusal.value)


# --------------------------------------------------------------------------------------- going on


def test_going_on_is_the_run_that_never_stopped(third, whole):
    before = jax.tree.map(jnp.copy, third)
    agents, metrics = train_population(CONFIG, third)
    assert_same_agents(jax.device_get(agents), whole[0])
    assert metrics["timesteps"].tolist() == [[64, 96]] * 3
    for name, values in metrics.items():
        np.testing.assert_array_equal(values, whole[1][name][:, 1:])
    assert_same_agents(third, before)  # the agents given are still there


def test_agents_that_have_done_their_steps_are_refused(whole):
    with pytest.raises(ConfigError, match=r"total_timesteps: 96 .* 96 .*done.*reset_num_timesteps"):
        train_population(CONFIG, whole[0])


def test_steps_are_counted_in_64_bits(whole):
    """Going on far beyond the steps that were planned at first, up to the last of 2 ** 33."""
    config = CONFIG.replace(total_timesteps=2**33)
    _, metrics = train_population(config, whole[0], stop_at(160), 0.0)
    assert metrics["timesteps"].tolist() == [[128, 160]] * 3
    last = whole[0].replace(n_updates=np.full(3, config.n_updates - 2, np.int32))
    seen = []
    agents, metrics = train_population(config, last, lambda steps, *_: seen.append(steps), 0.0)
    assert metrics["timesteps"].dtype == np.int64
    assert metrics["timesteps"].tolist() == [[2**33 - 32, 2**33]] * 3
    assert seen == [2**33 - 32, 2**33] and agents.n_updates.tolist() == [2**28] * 3


def test_a_new_run_keeps_what_was_learnt_and_nothing_else(whole):
    """Weights and the optimiser stay; environments, episodes under way and past ones do not."""
    seen = []

    def look(steps, metrics, agents):
        seen.append(jax.device_get(agents))

    _, metrics = train_population(CONFIG, whole[0], look, 0.0, reset_num_timesteps=True)
    assert metrics["timesteps"].tolist() == [[32, 64, 96]] * 3
    first = seen[0]
    assert first.n_updates.tolist() == [1] * 3
    old = whole[0]
    for before, after in zip(jax.tree.leaves(old.params), jax.tree.leaves(first.params)):
        assert 0 < np.abs(before - after).max() < 0.02  # as far as one update goes
    before, after = (optax.tree_utils.tree_get(x.opt_state, "count") for x in (old, first))
    np.testing.assert_array_equal(after - before, 4 * np.ones(3))
    assert np.max(old.env_states.time) > 8 >= np.max(first.env_states.time)
    assert (first.n_recent < old.n_recent).all() and np.max(first.recent_episodes[:, 1]) <= 8
    np.testing.assert_array_equal(first.episode_sums[:, 1], first.env_states.time)


UNSUITABLE = [
    (dict(n_envs=8), ["n_envs: 8", "4", "reset_num_timesteps"]),
    (dict(net_arch=(16,)), ["agents: ", "params|opt_state"]),
    (dict(net_arch=(64, 64, 64)), ["agents: ", "params|opt_state"]),
    (dict(normalize_obs=True), ["agents: ", "obs_statistics"]),
    (dict(optimizer="sgd"), ["agents: ", "opt_state"]),
    (dict(stats_window_size=7), ["agents: ", "recent_episodes", "100", "7"]),
    (dict(env="Acrobot-v1"), ["agents: ", "env_states|obs|params"]),
]


@pytest.mark.parametrize("changes, words", UNSUITABLE, ids=lambda x: ",".join(x).replace(": ", " "))
def test_agents_that_the_settings_do_not_suit_are_refused(changes, words, third):
    with pytest.raises(ConfigError, match=".*".join(words)) as refusal:
        train_population(CONFIG.replace(**changes), third)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_new_run_needs_networks_of_the_same_shape_too(place, third):
    with pytest.raises(ConfigError, match="agents: ") as refusal:
        train_population(CONFIG.replace(**UNSUITABLE[place][0]), third, reset_num_timesteps=True)
    assert "\n" not in str(refusal.value)


def test_steps_that_were_counted_by_other_rollouts_are_refused(third):
    with pytest.raises(ConfigError, match=r"n_steps: 16 .* 8.*reset_num_timesteps") as refusal:
        train_population(CONFIG.replace(n_steps=16), third)
    assert "\n" not in str(refusal.value)


def test_a_swept_initial_deviation_can_go_on():
    config = CONFIG.replace(env="MountainCarContinuous-v0", log_std_init=[0.0, 1.0, 2.0])
    agents, _ = train_population(config, KEYS, stop_at(32), 0.0)
    _, metrics = train_population(config, agents, stop_at(64), 0.0)
    assert metrics["timesteps"].tolist() == [[64]] * 3


# --------------------------------------------------------------------------------------- exceptions


def test_an_exception_in_a_callback_saves_what_was_learnt(tmp_path, monkeypatch):
    kept = []

    def fail(steps, metrics, agents):
        if steps == 64:
            kept.append(jax.device_get(agents))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        train_population(CONFIG, KEYS, fail, 0.0, run_dir=tmp_path / "run")
    assert str(tmp_path / "run") in caught.value.__notes__[0]
    config, saved = load_agents(tmp_path / "run")
    assert config == CONFIG and saved.n_updates.tolist() == [2] * 3
    assert_same_agents(kept[0], saved)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="mine") as caught:
        train_population(CONFIG, KEYS, fail, 0.0)
    (rescue,) = tmp_path.glob("ppo_jax-*")
    assert str(rescue) in caught.value.__notes__[0]
    assert_same_agents(saved, load_agents(rescue)[1])


# ------------------------------------------------------------------------------------------ devices


def test_devices_change_no_number(whole, tmp_path):
    """Three agents on two devices, a number that the user has set."""
    if jax.default_backend() != "cpu":
        pytest.skip("only numbers of CPUs are compared to the last bit")
    code = """
import sys, jax, ppo_jax, runs
ppo_jax.use_every_core()
assert jax.device_count() == 2
agents, _ = ppo_jax.train_population(runs.CONFIG, runs.KEYS)
ppo_jax.save_agents(sys.argv[1], runs.CONFIG, agents)
"""
    process = start(tmp_path / "run", folder=tmp_path, code=code, JAX_NUM_CPU_DEVICES="2")
    code, _, error = finish(process)
    assert code == 0, error
    assert_same_agents(whole[0], load_agents(tmp_path / "run")[1])


def test_the_devices_of_a_process_never_wait_for_each_other(tmp_path):
    """Copies between a CPU's devices hung, where two ran at a time: no program may have one."""
    code = """
import sys, jax, ppo_jax, runs
assert jax.device_count() == 2
config, folder = runs.CONFIG, sys.argv[1]
agents, _ = ppo_jax.train_population(config, runs.KEYS, lambda *now: now[0] >= 64, 0.0)
agents, _ = ppo_jax.train_population(config.replace(total_timesteps=128), agents)
assert ppo_jax.main([*runs.SMALL, "--n-seeds", "3", "--run-dir", folder]) == 0
assert ppo_jax.main(["--eval", folder, "--n-episodes", "2", "--max-steps", "9"]) == 0
"""
    xla = f"--xla_force_host_platform_device_count=2 --xla_dump_to={tmp_path}/programs"
    process = start(tmp_path / "run", folder=tmp_path, code=code, XLA_FLAGS=xla)
    code, _, error = finish(process)
    assert code == 0, error
    programs = list((tmp_path / "programs").glob("*after_optimizations.txt"))
    assert any("train_chunk" in path.name for path in programs)
    copy = re.compile("all-gather|all-reduce|all-to-all|collective-permute")
    assert [path.name for path in programs if copy.search(path.read_text())] == []


def test_every_core_is_a_device_from_before_jax_starts(tmp_path):
    code = "import jax, ppo_jax; ppo_jax.use_every_core(); print(jax.device_count())"
    nothing = dict(JAX_NUM_CPU_DEVICES=None, XLA_FLAGS=None, JAX_PLATFORMS="cpu")
    first = start(folder=tmp_path, code=code, **nothing)
    code = """
import json, os, jax, ppo_jax
counts = [jax.device_count()]
ppo_jax.use_every_core()
counts.append(jax.device_count())
del os.environ["XLA_FLAGS"]
try:
    ppo_jax.use_every_core()
except RuntimeError as error:
    print(json.dumps([counts, str(error)]))
"""
    xla = "--xla_force_host_platform_device_count=5"
    second = start(folder=tmp_path, code=code, **nothing | dict(XLA_FLAGS=xla))
    _, out, error = finish(first)
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert out == f"{n_cores}\n", error
    _, out, error = finish(second)
    counts, message = json.loads(out)
    assert counts == [5, 5] and message, error
