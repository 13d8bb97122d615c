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
from ppo_jax import PPOConfig, load_agents, main, train, train_population

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
        (["--total-timesteps", "1.5"], ["total_timesteps", "'1.5'", "whole number"]),
        (["--total-timesteps", "3e9"], ["total_timesteps", "3000000000", "2147483647"]),
        (["--n-envs", "many"], ["n_envs", "'many'", "whole number"]),
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
        (["--activation", "tan"], ["activation", "'tan'", "tanh", "relu"]),
        (["--lerning-rate", "1"], ["--lerning-rate", "--learning-rate"]),
        (["--run-dir", "/proc/none"], ["run_dir", "'/proc/none'", "can't be written"]),
        (["--eval", "nowhere"], ["nowhere", "config.json"]),
        (["--resume", "nowhere"], ["nowhere", "config.json"]),
        (["--config", "nowhere"], ["nowhere", "config"]),
        (["--verbose", "3"], ["verbose", "3", "[0, 1, 2]"]),
        (["--device", "abacus"], ["device", "'abacus'", "cpu"]),
        (["--env-params", "gravty=1"], ["env_params", "gravty", "gravity"]),
        (["--optimizer", "adamv"], ["optimizer", "'adamv'", "adam"]),
        (["--learning-rate", "linaer"], ["learning_rate", "'linaer'", "linear_3e-4"]),
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
    settings = json.loads((run / "config.json").read_text())
    assert settings["seed"] == 5 and settings["n_seeds"] == 3
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
    config, loaded = load_agents(run)
    assert config == CONFIG
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

    def save(path, *what, **run):
        if path == run_dir:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *what, **run)

    monkeypatch.setattr(ppo_jax, "save_agents", save)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main([*SMALL, "--run-dir", str(run_dir)]) == 1
    (rescue,) = tmp_path.glob("ppo_jax-*")
    assert str(rescue) in capsys.readouterr().err
    load_agents(rescue)


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
    load_agents(tmp_path / "run")


def test_help_into_a_closed_pipe_is_silent():
    command = f"{sys.executable} {ROOT / 'ppo_jax.py'} --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


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
    _, agents = load_agents(tmp_path / "run")
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
            if field.metadata["group"] == "python":
                continue
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


# What is carried from update to update is at its largest here.
FULL = dict(env="Pendulum-v1", policy="lstm", sub_traj_len=4, rnn_hidden_size=8, normalize_obs=True)
FULL |= dict(normalize_reward=True, learning_rate="linear_1e-3", n_envs=4, n_steps=8, n_epochs=1, total_timesteps=192)


def flags(settings):
    return [word for name, value in settings.items() for word in (f"--{name}", str(value)) if value is not True] + [
        f"--{name}" for name, value in settings.items() if value is True
    ]


def assert_same_agents(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def test_going_on_from_a_saved_run_is_the_run_that_never_stopped(tmp_path):
    """Bit for bit, in a process of its own: parameters, optimiser, statistics, memory, environments and keys."""
    config = PPOConfig(**FULL)
    whole, metrics = train_population(config, KEYS, lambda *_: None, 0.0)
    half, _ = train_population(config, KEYS, lambda steps, *_: steps >= 96, 0.0)
    assert half.n_updates.tolist() == [3] * 3
    ppo_jax.save_agents(tmp_path / "half", config, half)
    command = [sys.executable, ROOT / "ppo_jax.py", "--resume", tmp_path / "half", "--run-dir", tmp_path / "rest"]
    subprocess.run([*command, "--verbose", "0"], check=True)
    resumed_config, resumed = load_agents(tmp_path / "rest")
    assert resumed_config == config
    assert_same_agents(jax.device_get(whole), resumed)
    assert [int(row["timesteps"]) for row in read_rows(tmp_path / "rest")] == [128, 160, 192]
    np.testing.assert_allclose(
        [float(row["value_loss"]) for row in read_rows(tmp_path / "rest")], metrics["value_loss"].mean(axis=0)[3:]
    )


def test_going_on_with_steps_counted_from_zero():
    agents, _ = train_population(CONFIG, KEYS)
    with pytest.raises(ppo_jax.ConfigError, match="total_timesteps: 96 and 96 are done"):
        train_population(CONFIG, agents)
    _, metrics = train_population(CONFIG, agents, reset_num_timesteps=True)
    assert metrics["timesteps"].tolist() == [[32, 64, 96]] * 3
    _, metrics = train_population(CONFIG.replace(total_timesteps=160), agents)
    assert metrics["timesteps"].tolist() == [[128, 160]] * 3 and int(agents.n_updates[0]) == 3


def test_an_exception_in_a_callback_saves_what_was_learnt(tmp_path, monkeypatch):
    def fail(steps, metrics, agents):
        if steps == 64:
            raise RuntimeError("mine")

    whole, _ = train_population(CONFIG, KEYS, lambda steps, *_: steps >= 64, 0.0)
    with pytest.raises(RuntimeError, match="mine") as caught:
        train_population(CONFIG, KEYS, fail, 0.0, run_dir=tmp_path / "run")
    assert str(tmp_path / "run") in caught.value.__notes__[0]
    config, saved = load_agents(tmp_path / "run")
    assert config == CONFIG
    assert_same_agents(jax.device_get(whole), saved)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="mine"):
        train_population(CONFIG, KEYS, fail, 0.0)
    (rescue,) = tmp_path.glob("ppo_jax-*")
    assert_same_agents(saved, load_agents(rescue)[1])


def test_a_callback_from_python_and_its_exception_leave_a_run_folder(tmp_path):
    def fail(steps, metrics, agents):
        raise RuntimeError("mine")

    options = ppo_jax.RunOptions(n_seeds=3, run_dir=str(tmp_path / "run"), tensorboard_log=str(tmp_path / "tb"))
    with pytest.raises(RuntimeError, match="mine"):
        ppo_jax.run_training(CONFIG, options, fail)
    assert load_agents(tmp_path / "run")[1].n_updates.tolist() == [1, 1, 1]
    (events,) = (tmp_path / "tb").rglob("events*")
    assert events.stat().st_size > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_file_of_settings_and_flags_that_beat_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "env: Pendulum-v1\nn_envs: 8\ntotal_timesteps: 1e5\nlearning_rate: 1e-3\nn_seeds: 2\nnet_arch: [8, 4]\n"
    )
    config, options = ppo_jax.parse_arguments(["--config", str(file), "--n-envs", "16"])
    expected = PPOConfig("Pendulum-v1", n_envs=16, total_timesteps=100_000, learning_rate=1e-3, net_arch=(8, 4))
    assert config == expected and options.n_seeds == 2
    assert ppo_jax.parse_arguments(["--config", str(file), "--env", "CartPole-v1"])[0].env == "CartPole-v1"


@pytest.mark.parametrize(
    "text, words",
    [
        ("n_env: 8", ["n_env", "no setting", "n_envs"]),
        ("- 8", ["config", "names with values"]),
        ("a: [", ["config", "can't be read"]),
        (None, ["config", "can't be read"]),
        ("n_envs: many", ["n_envs", "'many'"]),
    ],
)
def test_a_mistake_in_a_file_of_settings_gets_one_line(text, words, tmp_path, capsys):
    if text:
        (tmp_path / "run.yaml").write_text(text)
    assert main(["--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words)


def test_the_written_config_starts_the_same_run_again(run, tmp_path):
    assert main(["--config", str(run / "config.json"), "--run-dir", str(tmp_path / "again"), *SMALL[-1:]]) == 0
    assert_same_agents(load_agents(run)[1], load_agents(tmp_path / "again")[1])
    assert (run / "metrics.csv").read_text() == (tmp_path / "again" / "metrics.csv").read_text()


def test_every_kind_of_setting_survives_its_file(tmp_path):
    config = PPOConfig(
        **FULL | dict(clip_range=(0.1, 0.3), clip_range_vf="cosine_0.2_0.5", optimizer="adamw", ent_coef="linear_0.1"),
        optimizer_kwargs={"weight_decay": 1e-4},
        env_params={"max_speed": 5.0},
        net_arch_vf=(),
    )
    ppo_jax.write_config(tmp_path, config)
    settings = ppo_jax.read_settings(tmp_path / "config.json")
    assert PPOConfig(**settings) == config
    assert ppo_jax.parse_arguments(["--config", str(tmp_path / "config.json")])[0] == config


def test_flags_take_schedules_and_named_values():
    argv = [
        "--env",
        "MemoryChain-bsuite",
        "--learning-rate",
        "linear_1e-3",
        "--clip-range",
        "0.1,0.3",
        "--policy",
        "gru",
    ]
    config, _ = ppo_jax.parse_arguments([*argv, "--policy", "gru", "--env-params", "memory_length=20"])
    assert config == PPOConfig(
        "MemoryChain-bsuite",
        learning_rate="linear_1e-3",
        clip_range=(0.1, 0.3),
        policy="gru",
        env_params={"memory_length": 20},
    )


def test_loggers_get_every_row(tmp_path, monkeypatch, capsys):
    class Wandb:
        logged, finished = [], 0

        def init(self, **given):
            self.given = given
            return self

        def log(self, scalars, step):
            self.logged.append((step, scalars))

        def finish(self):
            self.finished += 1

    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    arguments = ["--tensorboard-log", str(tmp_path / "tb"), "--wandb-project", "mine", "--run-name", "this"]
    arguments += ["--run-dir", str(tmp_path / "run"), "--log-interval", "2", "--verbose", "2"]
    assert main([*SMALL, *arguments, "--total-timesteps", "128"]) == 0
    rows = read_rows(tmp_path / "run")
    assert [int(row["timesteps"]) for row in rows] == [64, 128]
    assert [step for step, _ in wandb.logged] == [64, 128] and wandb.finished == 1
    assert wandb.given["project"] == "mine" and wandb.given["config"]["n_envs"] == 4
    np.testing.assert_allclose(wandb.logged[1][1]["value_loss"], float(rows[1]["value_loss"]))
    (events,) = (tmp_path / "tb" / "this").iterdir()
    assert b"ppo/explained_variance" in events.read_bytes()
    assert "policy_loss" in capsys.readouterr().out


@pytest.mark.parametrize("package, flag", [("tensorboardX", "--tensorboard-log"), ("wandb", "--wandb-project")])
def test_a_missing_logger_gets_one_line(package, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*SMALL, flag, "x", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"pip install {package}" in error
    assert not (tmp_path / "run").exists()


def test_verbose_0_prints_nothing_and_a_device_can_be_chosen(tmp_path, capfd):
    try:
        assert main([*SMALL, "--run-dir", str(tmp_path / "run"), "--verbose", "0", "--device", "cpu"]) == 0
    finally:
        jax.config.update("jax_default_device", None)
    assert capfd.readouterr() == ("", "")
    if jax.default_backend() == "cpu":
        assert main([*SMALL, "--device", "tpu"]) == 2
        assert "device: 'tpu'" in capfd.readouterr().err


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
