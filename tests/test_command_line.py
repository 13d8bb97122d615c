import csv
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest

import ppo_jax
from ppo_jax import PPOConfig, load_agents, main, read_config, train, train_population

ROOT = pathlib.Path(__file__).parent.parent
# One size for all that run within this process, so that JAX compiles it once.
CONFIG = PPOConfig(n_envs=4, n_steps=8, n_epochs=1, total_timesteps=96)
SMALL = ["--n-envs", "4", "--n-steps", "8", "--n-epochs", "1", "--total-timesteps", "9.6e1", "--n-seeds", "3"]
SMALL += ["--seed", "5", "--no-compilation-cache"]
KEYS = jax.random.split(jax.random.key(5), 3)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--env", "CartPol-v1"], ["env", "'CartPol-v1'", "CartPole-v1"]),
        (["--env", "zzzzzzzz"], ["env", "'zzzzzzzz'", "Pendulum-v1"]),
        (["--env", "MNISTBandit-bsuite"], ["env", "'MNISTBandit-bsuite'", "network"]),
        (["--batch-size", "100"], ["batch_size", "100", "n_envs * n_steps = 1024", "64", "128"]),
        (["--n-envs", "0"], ["n_envs", "0", "from 1"]),
        (["--n-steps", "-3"], ["n_steps", "-3", "from 1"]),
        (["--n-seeds", "0"], ["n_seeds", "0", "from 1"]),
        (["--total-timesteps", "1.5"], ["total-timesteps", "'1.5'", "whole number"]),
        (["--total-timesteps", "3e9"], ["total_timesteps", "3000000000", "2147483647"]),
        (["--n-envs", "many"], ["n-envs", "'many'", "whole number"]),
        (["--gamma", "nan"], ["gamma", "nan", "from 0 to 1"]),
        (["--gae-lambda", "1.1"], ["gae_lambda", "1.1", "from 0 to 1"]),
        (["--learning-rate", "-1e-3"], ["learning_rate", "-0.001", "0 or above"]),
        (["--learning-rate", "inf"], ["learning_rate", "inf", "finite"]),
        (["--ent-coef", "-0.1"], ["ent_coef", "-0.1", "0 or above"]),
        (["--clip-range", "0"], ["clip_range", "0.0", "above 0"]),
        (["--target-kl", "0"], ["target_kl", "0.0", "above 0", "None"]),
        (["--net-arch", "64", "0"], ["net_arch", "(64, 0)", "from 1"]),
        (["--policy", "ccn"], ["policy", "'ccn'", "mlp", "cnn"]),
        (["--policy", "cnn"], ["policy", "'cnn'", "images", "mlp"]),
        (["--activation", "gelu"], ["activation", "'gelu'", "tanh", "relu"]),
        (["--lerning-rate", "1"], ["--lerning-rate", "--learning-rate"]),
        (["--run-dir", "/proc/none"], ["run_dir", "'/proc/none'", "can't be written"]),
        (["--eval", "nowhere"], ["nowhere", "config.json"]),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three seeds and three updates."""
    run_dir = tmp_path_factory.mktemp("run") / "three"
    assert main([*SMALL, "--run-dir", str(run_dir)]) == 0
    return run_dir


def test_a_run_leaves_its_config_metrics_curve_and_agents(run):
    assert read_config(run) == (CONFIG, 5, 3)
    agents, metrics = jax.jit(jax.vmap(train, (None, 0)))(CONFIG, KEYS)
    rows = read_rows(run)
    assert [int(row["timesteps"]) for row in rows] == [32, 64, 96]
    for name in ppo_jax.METRICS:
        expected = np.asarray(metrics[name]).mean(axis=0)
        np.testing.assert_allclose([float(row[name]) for row in rows], expected, rtol=1e-4, atol=1e-6)
    for seed in range(3):
        np.testing.assert_allclose(
            [float(row[f"return_seed_{seed}"]) for row in rows], metrics["return"][seed], rtol=1e-5
        )
    loaded = load_agents(run / "checkpoint", CONFIG, 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        (loaded.params, loaded.env_states),
        (agents.params, agents.env_states),
    )
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_eval_prints_each_seeds_return(run, capsys):
    assert main(["--eval", str(run), "--n-episodes", "3", "--no-compilation-cache"]) == 0
    printed = capsys.readouterr().out
    for words in ("seed 0", "seed 2", "interquartile mean", "95 % interval"):
        assert words in printed


def test_a_used_folder_is_refused_and_left_alone(run, capsys):
    before = sorted(path.name for path in run.iterdir())
    assert main([*SMALL, "--run-dir", str(run)]) == 2
    assert "run_dir" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == before


def read_rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("damage", ["missing", "truncated", "other shape"])
def test_a_damaged_checkpoint_gets_one_line(damage, run, tmp_path, capsys):
    copy = pathlib.Path(shutil.copytree(run, tmp_path / "copy"))
    if damage == "missing":
        shutil.rmtree(copy / "checkpoint")
    elif damage == "truncated":
        for path in copy.glob("checkpoint/**/d/*"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        settings = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(settings | {"net_arch": [32]}))
    assert main(["--eval", str(copy), "--no-compilation-cache"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "checkpoint" in error


def test_a_config_that_is_no_json_gets_one_line(run, tmp_path, capsys):
    copy = pathlib.Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "config.json").write_text('{"seed": 0, "n_envs"')
    assert main(["--eval", str(copy)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, capsys):
    run_dir, real = tmp_path / "full", ppo_jax.save_agents

    def save(path, agents):
        if run_dir in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, agents)

    monkeypatch.setattr(ppo_jax, "save_agents", save)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main([*SMALL, "--run-dir", str(run_dir)]) == 1
    (rescue,) = tmp_path.glob("ppo_jax-*")
    assert str(rescue) in capsys.readouterr().err
    load_agents(rescue / "checkpoint", read_config(rescue)[0], 3)


def test_metrics_that_cannot_be_written_do_not_end_the_run(tmp_path, monkeypatch, capsys):
    failures = iter([OSError(errno.ENOSPC, "No space left on device")])
    append = ppo_jax.RunReport.append_metrics

    def fail_once(self, metrics):
        for failure in failures:
            raise failure
        append(self, metrics)

    monkeypatch.setattr(ppo_jax.RunReport, "append_metrics", fail_once)
    assert main([*SMALL, "--run-dir", str(tmp_path / "run")]) == 0
    assert "No space left" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "run")) == 3


def test_a_closed_pipe_loses_nothing(tmp_path):
    command = f"{sys.executable} {ROOT / 'ppo_jax.py'} {' '.join(SMALL)} --run-dir {tmp_path / 'run'} | true"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    load_agents(tmp_path / "run" / "checkpoint", CONFIG, 3)


def test_ctrl_c_saves_what_was_learnt(tmp_path):
    command = [
        sys.executable,
        "-u",
        ROOT / "ppo_jax.py",
        *SMALL,
        "--total-timesteps",
        "1e9",
        "--run-dir",
        tmp_path / "run",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "run" / "metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    agents = load_agents(tmp_path / "run" / "checkpoint", read_config(tmp_path / "run")[0], 3)
    assert int(agents.n_updates[0]) * 32 == int(read_rows(tmp_path / "run")[-1]["timesteps"])


def test_ctrl_c_before_the_first_update_leaves_no_folder(tmp_path):
    command = [sys.executable, "-u", ROOT / "ppo_jax.py", *SMALL, "--run-dir", tmp_path / "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "config.json").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 130
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "run").exists()


def test_help_explains_every_setting_with_the_environments_default(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--env", "Pendulum-v1", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for owner in (PPOConfig, ppo_jax.RunOptions):
        for field in ppo_jax.dataclasses.fields(owner):
            assert f"--{field.name.replace('_', '-')}" in text
            assert field.metadata["help"] in text
    assert f"(default: {PPOConfig(env='Pendulum-v1').gamma})" in text
    for group in ("run", "environment", "optimisation", "objective", "network"):
        assert f"{group} options" in text


def test_chunks_and_callbacks_change_no_number():
    whole, whole_metrics = train_population(CONFIG, KEYS)  # three agents, which two devices don't divide
    seen = []
    parts, part_metrics = train_population(CONFIG, KEYS, lambda steps, metrics, agents: seen.append(steps), 0.0)
    assert seen == [32, 64, 96]
    jax.tree.map(np.testing.assert_array_equal, whole_metrics, part_metrics)
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)
    alone, alone_metrics = jax.jit(jax.vmap(train, (None, 0)))(CONFIG, KEYS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole.params, alone.params)
    assert {name: values.shape for name, values in whole_metrics.items()} == {
        name: values.shape for name, values in alone_metrics.items()
    }


def test_the_second_chunk_compiles_nothing():
    """What a chunk returns must be of the very types that it takes, weak ones included."""
    compilations, seen = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(event) if event.endswith("backend_compile_duration") else None
    )
    config = CONFIG.replace(stats_window_size=7)  # which no other test has compiled
    train_population(config, KEYS[:2], lambda *_: seen.append(len(compilations)), 0.0)
    assert seen[0] > 0 and seen == [seen[0]] * 3


def test_a_callback_ends_the_run():
    agents, metrics = train_population(CONFIG, KEYS, lambda steps, metrics, agents: steps >= 64, 0.0)
    assert metrics["timesteps"].tolist() == [[32, 64]] * 3
    assert agents.n_updates.tolist() == [2, 2, 2]


def test_a_population_sweeps_settings_along_with_its_keys():
    rates = np.array([1e-4, 1e-3, 1e-2], np.float32)
    agents, _ = train_population(CONFIG.replace(learning_rate=rates), KEYS)
    alone, _ = jax.jit(train)(CONFIG.replace(learning_rate=rates[2]), KEYS[2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[2], b, rtol=1e-4, atol=1e-5), agents.params, alone.params)
    with pytest.raises(ppo_jax.ConfigError, match="learning_rate"):
        train_population(CONFIG.replace(learning_rate=rates[:2]), KEYS)


def test_importing_works_without_what_the_command_line_needs(tmp_path):
    """jax, flax, optax, gymnax, chex and what they need are enough to import and to train."""
    code = (
        "import sys\n"
        "sys.modules['tyro'] = None\n"
        "import jax, ppo_jax\n"
        "config = ppo_jax.PPOConfig(n_envs=2, n_steps=4, total_timesteps=8, n_epochs=1)\n"
        "print(jax.jit(ppo_jax.train)(config, jax.random.key(0))[1]['timesteps'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True) == "[8]\n"
