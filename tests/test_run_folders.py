"""Run folders: what a run leaves, whole or not at all, and how it is read back."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from children import FORK, claim, save_for_ever
from faulty_environments import Bare, State
from helpers import jit
from runs import (
    CONFIG,
    FULL,
    KEYS,
    SIZES,
    SMALL,
    UNCACHED,
    alone,
    assert_one_line,
    assert_same_agents,
    assert_same_configs,
    claim_run,
    finish,
    read_rows,
    start,
)

import ppo_jax
from ppo_jax import (
    Categorical,
    ConfigError,
    PPOConfig,
    RunOptions,
    init_agent,
    load_agents,
    main,
    save_agents,
    train_population,
)


@pytest.fixture(scope="module")
def agents():
    """Three trained agents of CONFIG."""
    return jax.device_get(train_population(CONFIG, KEYS)[0])


@pytest.fixture(scope="module")
def one(agents):
    """The second of them."""
    return jax.tree.map(lambda x: x[1], agents)


def checkpoints(run_dir):
    """Return the names of the checkpoints in a run folder."""
    return sorted(path.name for path in (run_dir / "checkpoint").iterdir())


# ------------------------------------------------------------------------------- saving and loading


def test_several_agents_come_back_to_the_last_bit(agents, tmp_path):
    save_agents(tmp_path / "new" / "run", CONFIG, agents)
    config, loaded = load_agents(tmp_path / "new" / "run")
    assert config == CONFIG
    assert_same_agents(loaded, agents)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(loaded.params))
    settings = json.loads((tmp_path / "new" / "run" / "config.json").read_text())
    assert settings["n_seeds"] == 3 and settings["n_envs"] == 4


@pytest.mark.parametrize("keys", [KEYS, KEYS[0]], ids=["several", "one"])
def test_a_state_with_an_empty_array_comes_back(keys, tmp_path):
    def reset(key):
        return jnp.zeros(1), State(jnp.int32(0), jnp.zeros((0, 3)))  # as contacts in physics

    def step(key, state, action):
        state = state.replace(time=state.time + 1)
        return jnp.zeros(1), state, jnp.float32(1), jnp.array(False)

    config = CONFIG.replace(env=Bare(reset=reset, step=step))
    begin = init_agent if keys.ndim == 0 else jax.vmap(init_agent, (None, 0))
    agents = begin(config, keys)
    save_agents(tmp_path, config, agents)
    loaded = load_agents(tmp_path, env=config.env)[1]
    assert_same_agents(loaded, agents)
    assert loaded.env_states.x.shape[-2:] == (0, 3)


def test_one_agent_comes_back_as_one(one, tmp_path):
    save_agents(tmp_path, CONFIG, one)
    config, loaded = load_agents(str(tmp_path))
    assert config == CONFIG and loaded.n_updates.ndim == 0
    assert_same_agents(loaded, one)
    returns = ppo_jax.evaluate(config, loaded, jax.random.key(0), 2)
    assert returns.shape == (2,) and np.isfinite(returns).all()


def test_one_saved_agent_plays_and_goes_on_from_the_command_line(one, tmp_path, capsys):
    for _ in range(2):
        save_agents(tmp_path / "one", CONFIG, one)
    assert main(["--eval", str(tmp_path / "one"), "--n-episodes", "2", UNCACHED]) == 0
    assert "seed 0" in capsys.readouterr().out
    again = ["--resume", tmp_path / "one", "--run-dir", tmp_path / "on", "--n-seeds", "1"]
    again += ["--total-timesteps", "128", "--verbose", "0", UNCACHED]
    assert main(list(map(str, again))) == 0
    assert load_agents(tmp_path / "on")[1].n_updates.tolist() == [4]


def test_two_checkpoints_are_kept(agents, one, tmp_path):
    for n_saved in range(1, 5):
        agents = agents.replace(n_updates=np.full(3, n_saved, np.int32))
        save_agents(tmp_path, CONFIG, agents)
        assert len(checkpoints(tmp_path)) == min(n_saved, 2)
        assert load_agents(tmp_path)[1].n_updates.tolist() == [n_saved] * 3
    shutil.rmtree(tmp_path / "checkpoint" / checkpoints(tmp_path)[-1])
    assert load_agents(tmp_path)[1].n_updates.tolist() == [3] * 3


def test_a_sweep_comes_back_with_its_agents(agents, tmp_path):
    rates = np.array([1e-3, 1e-2, 1e-1])
    schedule = ppo_jax.Schedule(rates, 0.0, "linear")
    config = CONFIG.replace(learning_rate=schedule, gamma=[0.9, 0.95, 0.99])
    save_agents(tmp_path, config, agents)
    loaded, _ = load_agents(tmp_path)
    assert_same_configs(loaded.at(0.5), config.at(0.5))
    np.testing.assert_allclose(loaded.at(0.5).learning_rate, rates / 2)
    for wrong in (CONFIG.replace(gamma=[0.9, 0.95]), CONFIG.replace(learning_rate=rates[:2])):
        with pytest.raises(ConfigError, match=r"(gamma|learning_rate): .* \(3,\)"):
            save_agents(tmp_path, wrong, agents)


class Net(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return Categorical(nn.Dense(2)(obs)), nn.Dense(1)(obs)[..., 0]


def halved(params, config, network, minibatch):
    """A loss of the user's, with one number more to report."""
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss / 2, report | {"half": loss / 2}


def falling(left):
    """A schedule of the user's."""
    return 1e-3 * left


OBJECTS = dict(env=Bare(), policy=Net(), loss_function=halved, learning_rate=falling)
OBJECTS |= dict(optimizer=optax.sgd, advantage_function=ppo_jax.compute_gae)


def test_objects_are_asked_for_and_taken(tmp_path):
    config = PPOConfig(**SIZES | OBJECTS)
    agent = jax.device_get(jit(ppo_jax.init_agent)(config, jax.random.key(0)))
    save_agents(tmp_path, config, agent)
    given = {}
    for _ in OBJECTS:
        with pytest.raises(ConfigError, match=r"no file can hold.*load_agents") as refusal:
            load_agents(tmp_path, **given)
        name = str(refusal.value).split(":")[0]
        assert name in OBJECTS.keys() - given.keys() and f"{name}=" in str(refusal.value)
        given[name] = OBJECTS[name]
    loaded, same = load_agents(tmp_path, **given)
    assert given == OBJECTS
    assert_same_configs(loaded, config)
    assert_same_agents(same, agent)
    again, same = load_agents(tmp_path, config)
    assert again is config
    assert_same_agents(same, agent)


def test_a_run_with_objects_says_how_to_play_it_and_goes_on(tmp_path, capsys):
    config = PPOConfig(**SIZES | OBJECTS)
    first = tmp_path / "first"

    def stop(steps, metrics, agents):
        return steps == 32

    options = RunOptions(n_seeds=2, run_dir=str(first), seed=3)
    assert ppo_jax.run_training(alone(config), options, stop) == 0
    out = capsys.readouterr().out
    assert "load_agents(" in out and "env=" in out and "--eval" not in out
    assert "half" in read_rows(first)[0]
    assert main(["--eval", str(first), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, "no file can hold", "load_agents")
    more = RunOptions(n_seeds=2, run_dir=str(tmp_path / "more"), resume=str(first), verbose=0)
    assert ppo_jax.run_training(alone(config), more) == 0
    _, agents = load_agents(tmp_path / "more", config)
    assert agents.n_updates.tolist() == [3, 3]
    whole, _ = train_population(config, jax.random.split(jax.random.key(3), 2))
    assert_same_agents(jax.device_get(whole), agents)


# ------------------------------------------------------------------------------------------- damage


@pytest.fixture
def copy(agents, tmp_path):
    """A run folder to do harm to."""
    save_agents(tmp_path / "copy", CONFIG, agents)
    return tmp_path / "copy"


def remove(folder):
    shutil.rmtree(folder / "checkpoint")


def empty(folder):
    for path in (folder / "checkpoint").iterdir():
        shutil.rmtree(path)


def truncate(folder):
    paths = list(folder.glob("checkpoint/**/d/*"))
    assert paths
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_data(folder):
    for path in folder.glob("checkpoint/**/d/*"):
        path.unlink()


def rename(folder):
    """What a crash left of an older program."""
    (folder / "checkpoint").rename(folder / "checkpoint.new")


def settings_file(folder):
    """Return the file of a checkpoint that holds the settings."""
    (path,) = folder.glob("checkpoint/*/settings/metadata")
    return path


def change(**settings):
    def damage(folder):
        file = settings_file(folder)
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return damage


DAMAGES = {
    "missing": (remove, ["checkpoint", "config.json"]),
    "empty": (empty, ["checkpoint"]),
    "truncated": (truncate, ["checkpoint"]),
    "without data": (lose_data, ["checkpoint"]),
    "renamed": (rename, ["checkpoint.new"]),
    "other shape": (change(net_arch=[32]), ["checkpoint", "policy_0"]),
    "other width": (change(policy="gru", sub_traj_len=4), ["checkpoint"]),
    "other number": (change(n_rows=[2]), ["checkpoint", "3"]),
    "one": (change(n_rows=[], n_agents=None), ["checkpoint", "3"]),
    "other environment": (change(env="Acrobot-v1"), ["checkpoint"]),
    "nowhere": (change(env="Nowhere-v1"), ["env", "Nowhere-v1"]),
    "no number": (change(gamma="many"), ["gamma", "many"]),
    "no json": (lambda x: settings_file(x).write_text('{"seed": 0, "n_envs"'), ["checkpoint"]),
    "no settings": (lambda x: settings_file(x).unlink(), ["checkpoint"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_gets_one_line(name, copy, capsys):
    damage, words = DAMAGES[name]
    damage(copy)
    assert main(["--eval", str(copy), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, *words)
    with pytest.raises(ConfigError):
        load_agents(copy)


@pytest.mark.parametrize("text", ["", '{"n_seeds": 3, "n_envs"', '{"env": "Nowhere-v1"}', None])
def test_a_checkpoint_needs_no_other_file(text, copy, agents, capsys):
    """config.json is for people; what becomes of it harms no agent."""
    (copy / "config.json").unlink()
    if text is not None:
        (copy / "config.json").write_text(text)
    config, loaded = load_agents(copy)
    assert config == CONFIG
    assert_same_agents(loaded, agents)
    assert main(["--eval", str(copy), "--n-episodes", "2", UNCACHED]) == 0
    assert "seed 2" in capsys.readouterr().out


def test_damage_gets_one_line_from_a_process_of_its_own_too(copy):
    """Where nothing catches what the libraries print as they end; of two kinds of damage."""
    code = """
import sys, ppo_jax
print([ppo_jax.main(["--eval", folder, "--no-compilation-cache"]) for folder in sys.argv[1:]])
"""
    other = shutil.copytree(copy, copy.parent / "other")
    truncate(copy)
    change(n_rows=[2])(other)
    status, out, error = finish(start(copy, other, code=code, folder=copy.parent))
    assert status == 0 and out == "[2, 2]\n"
    lines = error.splitlines(keepends=True)
    assert len(lines) == 2, error
    for line in lines:
        assert_one_line(line, "ppo_jax: error: checkpoint")


# ----------------------------------------------------------------------- kills, full disks, claims


def test_a_kill_while_saving_costs_no_checkpoint(agents, tmp_path):
    """What was saved for certain, or the one after, is there whole; five times in one folder."""
    run_dir, rng = tmp_path / "run", np.random.default_rng(0)
    plain = agents.replace(key=np.asarray(jax.random.key_data(agents.key)))
    saved = FORK.Value("i", 0)
    for delay in rng.uniform(0, 0.3, 5):
        before = saved.value
        process = FORK.Process(target=save_for_ever, args=(run_dir, CONFIG, plain, saved))
        process.start()
        deadline = time.monotonic() + 100
        while saved.value == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        assert process.is_alive() and saved.value > before
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        config, loaded = load_agents(run_dir)
        assert config == CONFIG
        loaded = loaded.replace(key=jax.random.key_data(loaded.key))
        counts = {float(x) for leaf in jax.tree.leaves(loaded) for x in np.ravel(leaf)}
        counts -= {1.0} if max(counts) > 1 else set()  # of bools, which count no further
        assert len(counts) == 1
        assert max(counts) in (saved.value, saved.value + 1)
        saved.value = int(max(counts))


@contextlib.contextmanager
def full_disk(size=1200):
    """Let no file grow beyond this size in bytes, of which a checkpoint's files need more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 500, 1200, 3000])
def test_a_full_disk_costs_no_checkpoint(size, agents, tmp_path):
    """At whichever of the files it is found to be full: config.json has some 900 bytes."""
    save_agents(tmp_path, CONFIG, agents)
    later = agents.replace(n_updates=np.full(3, 9, np.int32))
    with full_disk(size), pytest.raises(Exception, match=r"."):
        save_agents(tmp_path, CONFIG, later)
    assert_same_agents(load_agents(tmp_path)[1], agents)
    save_agents(tmp_path, CONFIG, later)  # when there is room again
    assert_same_agents(load_agents(tmp_path)[1], later)


def test_a_disk_that_fills_up_while_training_ends_in_exit_code_1(tmp_path, capsys):
    """The last checkpoint from before stays; the run says its results and what was not written."""
    config = CONFIG.replace(total_timesteps=512)
    run_dir, before = tmp_path / "run", []
    with contextlib.ExitStack() as disk:

        def fill(steps, metrics, agents):
            if len(before) < 2:  # the first checkpoint is due after the second chunk
                before.append(steps)
            elif len(before) == 2:
                before.append(steps)
                disk.enter_context(full_disk())

        options = RunOptions(n_seeds=3, seed=5, run_dir=str(run_dir), checkpoint_seconds=1e-9)
        assert ppo_jax.run_training(alone(config), options, fill) == 1
    out, error = capsys.readouterr()
    assert str(run_dir) in error and "training goes on" in error and "can't be written" in error
    assert "Traceback" not in error
    assert "seed 0" in out  # what was learnt is told, written or not
    found, saved = load_agents(run_dir)
    assert found == config and saved.n_updates.tolist() == [before[1] // 32] * 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved.params))


def test_a_disk_that_was_full_from_the_start_leaves_no_rescue_folder(tmp_path, monkeypatch, capsys):
    def save(*what, **run):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ppo_jax, "save_checkpoint", save)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main([*SMALL, "--run-dir", str(tmp_path / "full")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_metrics_that_cannot_be_written_do_not_end_the_run(tmp_path, monkeypatch, capsys):
    failures = iter([OSError(errno.ENOSPC, "No space left on device")])
    write = ppo_jax.RunReport.write_rows

    def fail_once(self, *what):
        for failure in failures:
            raise failure
        write(self, *what)

    monkeypatch.setattr(ppo_jax.RunReport, "write_rows", fail_once)
    assert main([*SMALL, "--run-dir", str(tmp_path / "run")]) == 0
    assert "No space left" in capsys.readouterr().err
    rows = [(row["timesteps"], row["seed"]) for row in read_rows(tmp_path / "run")]
    assert rows == [(steps, seed) for steps in ("32", "64", "96") for seed in "012"]


def test_two_runs_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = time.strftime("%Y%m%d-%H%M%S")
    monkeypatch.setattr(time, "strftime", lambda *given: now)
    folders = [claim_run(RunOptions(seed=seed), CONFIG) for seed in range(3)]
    assert len(set(folders)) == 3
    for seed, folder in enumerate(folders):
        assert folder.parent == pathlib.Path("runs") and f"CartPole-v1-{now}" in folder.name
        assert json.loads((folder / "config.json").read_text())["seed"] == seed
    named = RunOptions(run_name="mine")
    for _ in range(2):  # to begin, and to go on
        assert claim_run(named, CONFIG) == pathlib.Path("runs/mine")
    with pytest.raises(ConfigError, match=r"seed: 3 .* 0 as in runs/mine, or run_dir another"):
        claim_run(RunOptions(run_name="mine", seed=3), CONFIG)
    with pytest.raises(ConfigError, match=r"gamma: 0.5 .* 0.98 as in runs/mine"):
        claim_run(named, CONFIG.replace(gamma=0.5))


def test_a_folder_in_which_a_run_trains_is_refused(tmp_path, capsys):
    run_dir, codes = tmp_path / "run", []

    def meanwhile(steps, metrics, agents):
        codes.append(main([*SMALL, "--run-dir", str(run_dir)]))

    options = RunOptions(n_seeds=3, seed=5, run_dir=str(run_dir), verbose=0)
    assert ppo_jax.run_training(alone(CONFIG), options, meanwhile) == 0
    assert codes and set(codes) == {2}
    for line in capsys.readouterr().err.splitlines(keepends=True):
        assert_one_line(line, "run_dir", str(run_dir), "no other process")
    assert main([*SMALL, "--run-dir", str(run_dir)]) == 0  # it is over


@pytest.mark.parametrize("name", ["mine", None])
def test_a_folder_goes_to_one_of_many_that_ask_at_once(name, tmp_path):
    n_processes, n_folders = 6, 20 if name else 3
    together, results = FORK.Barrier(n_processes), FORK.Queue()
    given = (str(tmp_path), name, n_folders, together, results)
    processes = [FORK.Process(target=claim, args=given) for _ in range(n_processes)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=100) for _ in processes]
    for process in processes:
        process.join()
    if name:
        for number, found in enumerate(zip(*answers)):
            assert sorted(filter(None, found)) == [f"mine-{number}"]
    else:
        found = [folder for answer in answers for folder in answer]
        assert None not in found and len(set(found)) == n_processes * n_folders
    for path in {path for answer in answers for path in answer if path}:
        assert json.loads((tmp_path / path / "config.json").read_text())["seed"] == 0


def test_an_empty_folder_is_taken_and_a_used_one_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert claim_run(RunOptions(run_dir=str(tmp_path / "mine")), CONFIG)
    before = (tmp_path / "mine" / "config.json").read_bytes()
    assert main([*SMALL, "--run-dir", str(tmp_path / "mine")]) == 2
    assert_one_line(capsys.readouterr().err, "seed", "5", "0 as in", "run_dir", "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
    assert (tmp_path / "mine" / "config.json").read_bytes() == before


# ---------------------------------------------------------------------------- going on and failing


def test_going_on_from_a_saved_run_is_the_run_that_never_stopped(tmp_path):
    """Bit for bit, in a process of its own: parameters, optimiser, statistics, memory,
    environments and keys.
    """
    config = PPOConfig(**FULL)
    half = []

    def look(steps, metrics, agents):
        if steps == 96:
            half.append(jax.device_get(agents))

    whole, metrics = train_population(config, KEYS, look, 0.0)
    assert half[0].n_updates.tolist() == [3] * 3
    save_agents(tmp_path / "half", config, half[0])
    more = ["--resume", tmp_path / "half", "--run-dir", tmp_path / "rest", "--verbose", "0"]
    code, _, error = finish(start(*more, UNCACHED, folder=tmp_path))
    assert code == 0, error
    resumed_config, resumed = load_agents(tmp_path / "rest")
    assert resumed_config == config
    assert_same_agents(jax.device_get(whole), resumed)
    rows = read_rows(tmp_path / "rest")
    assert [int(row["timesteps"]) for row in rows] == [128] * 3 + [160] * 3 + [192] * 3
    for name in ("value_loss", "return"):
        found = np.float32([row[name] for row in rows]).reshape((3, 3))
        np.testing.assert_array_equal(found, metrics[name][:, 3:].T)


@pytest.mark.parametrize("stop", [32, 64])
def test_the_same_command_goes_on_where_it_stopped(stop, tmp_path, capsys):
    """As if it had never stopped; once it is finished, it says so. At 32, no row is to be cut."""
    config = CONFIG.replace(total_timesteps=512)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = dict(n_seeds=3, seed=5, verbose=0)
    assert ppo_jax.run_training(alone(config), RunOptions(**options, run_dir=str(whole))) == 0
    options = RunOptions(**options | dict(run_dir=str(parts), verbose=1))
    code = ppo_jax.run_training(alone(config), options, lambda steps, *_: steps >= stop)
    assert code == 0
    assert len(read_rows(parts)) < len(read_rows(whole)) == 3 * 16
    if stop > 32:  # of a run that was killed after its last checkpoint: these come again
        with open(parts / "metrics.csv", "a") as file:
            file.write("0,0,480" + ",1.5" * (len(read_rows(parts)[0]) - 3) + "\n0,1,4")
    assert ppo_jax.run_training(alone(config), options) == 0
    capsys.readouterr()
    for name in ("metrics.csv", "agents.csv"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert_same_agents(load_agents(parts)[1], load_agents(whole)[1])
    before = (parts / "metrics.csv").read_bytes()
    assert ppo_jax.run_training(alone(config), options) == 0
    out = capsys.readouterr().out
    assert "finished already" in out and "seed 2" in out
    assert (parts / "metrics.csv").read_bytes() == before


def test_a_callback_from_python_and_its_exception_leave_a_run_folder(tmp_path):
    def fail(steps, metrics, agents):
        raise RuntimeError("mine")

    logs = str(tmp_path / "tb")
    options = RunOptions(n_seeds=3, seed=5, run_dir=str(tmp_path / "run"), tensorboard_log=logs)
    with pytest.raises(RuntimeError, match="mine"):
        ppo_jax.run_training(alone(CONFIG), options, fail)
    assert load_agents(tmp_path / "run")[1].n_updates.tolist() == [1, 1, 1]
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["seed"] == 5 and settings["n_seeds"] == 3
    (events,) = (tmp_path / "tb").rglob("events*")
    assert events.stat().st_size > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_mistake_that_shows_late_leaves_no_folder(tmp_path, monkeypatch, capsys):
    """Nothing was learnt yet; but what a logger has written there is not the product's."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL, "--run-name", "mine", "--wandb-project", "x"]
    assert main(arguments) == 2
    assert_one_line(capsys.readouterr().err, "wandb_project")
    assert not (tmp_path / "runs" / "mine").exists()
    assert main([*arguments, "--tensorboard-log", "runs"]) == 2
    assert_one_line(capsys.readouterr().err, "wandb_project")
    assert not (tmp_path / "runs" / "mine" / "config.json").exists()
