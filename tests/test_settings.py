"""Settings: read from flags, files and Python, refused where they cannot work, kept in a file."""

import dataclasses
import json
import re

import jax
import numpy as np
import optax
import pytest
from faulty_environments import Bare
from runs import (
    CONFIG,
    FULL,
    UNCACHED,
    assert_one_line,
    assert_same_configs,
    claim_run,
    flags,
    parse_one,
)

import ppo_jax
from ppo_jax import ConfigError, PPOConfig, RunOptions, Schedule, main, parse_arguments, train

# ------------------------------------------------------------------------------- refused as flags


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--env", "CartPol-v1"], ["env", "'CartPol-v1'", "CartPole-v1"]),
        (["--env", "zzzzzzzz"], ["env", "'zzzzzzzz'", "Pendulum-v1"]),
        (["--batch-size", "100"], ["batch_size", "100", "n_envs * n_steps = 1024", "64", "128"]),
        (["--n-envs", "0"], ["n_envs", "0", "from 1"]),
        (["--n-steps", "-3"], ["n_steps", "-3", "from 1"]),
        (["--n-seeds", "0"], ["n_seeds", "0", "from 1"]),
        (["--total-timesteps", "1.5"], ["total_timesteps", "1.5", "whole number"]),
        (["--total-timesteps", "1e400"], ["total_timesteps", "whole number"]),
        (["--total-timesteps", "1e17"], ["total_timesteps", "100000000000000000", "rollouts"]),
        (["--n-envs", "2147483648"], ["n_envs", "2147483648", "2147483647"]),
        (["--n-envs", "many"], ["n_envs", "'many'", "whole number"]),
        (["--seed", "4294967296"], ["seed", "4294967296", "4294967295"]),
        (["--seed", str(2**63)], ["seed", str(2**63), "4294967295"]),
        (["--seed", "-1"], ["seed", "-1", "from 0"]),
        (["--gamma", "nan"], ["gamma", "nan", "from 0 to 1"]),
        (["--gae-lambda", "1.1"], ["gae_lambda", "1.1", "from 0 to 1"]),
        (["--learning-rate", "-1e-3"], ["learning_rate", "-0.001", "0 or above"]),
        (["--learning-rate", "inf"], ["learning_rate", "inf", "finite"]),
        (["--learning-rate", "linear_1e-3_-0.5"], ["learning_rate", "0 or above"]),
        (["--ent-coef", "-0.1"], ["ent_coef", "-0.1", "0 or above"]),
        (["--clip-range", "0"], ["clip_range", "0.0", "above 0"]),
        (["--clip-range", "0.1,0.2,0.3"], ["clip_range", "a pair"]),
        (["--target-kl", "0"], ["target_kl", "0.0", "above 0", "None"]),
        (["--net-arch", "64", "0"], ["net_arch", "0", "from 1"]),
        (["--policy", "ccn"], ["policy", "'ccn'", "mlp", "cnn"]),
        (["--policy", "cnn"], ["policy", "'cnn'", "images", "mlp"]),
        (["--activation", "tan"], ["activation", "'tan'", "tanh", "relu"]),
        (["--lerning-rate", "1"], ["--lerning-rate", "--learning-rate"]),
        (["--lr", "1"], ["--lr", "--learning-rate"]),
        (["--num-minibatches", "4"], ["--num-minibatches", "--batch-size"]),
        (["--anneal-lr", "true"], ["--anneal-lr", "--learning-rate"]),
        (["--n-env", "8"], ["--n-env", "--n-envs"]),  # which argparse would take for --n-envs
        (["--n-envs"], ["n_envs", "[]", "value"]),
        (["--n-envs", "8", "0"], ["n_envs", "0", "from 1"]),
        (["--gamma", "0.9", "1.1"], ["gamma", "1.1", "from 0 to 1"]),
        (["--net-arch", "64,x", "8"], ["net_arch", "'x'", "whole number"]),
        (["--no-use-sde", "true"], ["--no-use-sde", "no value", "true"]),
        (["--use-sde", "maybe"], ["use_sde", "'maybe'", "True or False"]),
        (["--n-seeds", "2", "3"], ["3", "one value"]),
        (["train"], ["train", "no such flag"]),
        (["--run-dir", "/proc/none"], ["run_dir", "/proc/none", "can't be written"]),
        (["--eval", "nowhere"], ["nowhere", "checkpoint"]),
        (["--resume", "nowhere"], ["nowhere", "config.json"]),
        (["--config", "nowhere"], ["nowhere", "config"]),
        (["--verbose", "3"], ["verbose", "3", "0, 1, 2"]),
        (["--device", "abacus"], ["device", "'abacus'", "cpu"]),
        (["--env-params", "gravty=1"], ["env_params", "gravty", "gravity"]),
        (["--env-params", "gravity"], ["env_params", "gravity", "name=1"]),
        (["--optimizer", "adamv"], ["optimizer", "'adamv'", "adam"]),
        (["--learning-rate", "linaer"], ["learning_rate", "'linaer'", "linear_3e-4"]),
        (["--use-sde"], ["use_sde", "continuous"]),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, *words)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------ refused in Python


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(policy="gru", sub_traj_len=7), "sub_traj_len: 7 .* n_steps = 128.* 4 and 8"),
        (
            dict(policy="gru", sub_traj_len=16, batch_size=40),
            "batch_size: 40 .* windows of sub_traj_len = 16.* 32 and 64",
        ),
        (dict(learning_rate="linar"), "learning_rate: 'linar' .* linear_3e-4"),
        (dict(learning_rate="linear_1_2_3"), "learning_rate: 'linear_1_2_3' .* linear_3e-4"),
        (dict(learning_rate="linear_1e-3_-0.5"), "learning_rate: .* 0 or above"),
        (dict(learning_rate=lambda left: left - 0.5), "learning_rate: .* 0 or above"),
        (dict(learning_rate=optax.linear_schedule(1, 0, 12)), "learning_rate: .* optax's count"),
        (dict(learning_rate=optax.constant_schedule(1)), "learning_rate: .* optax's count"),
        (dict(learning_rate=None), "learning_rate: None"),
        (dict(learning_rate=True), "learning_rate: True"),
        (dict(learning_rate=[]), "learning_rate: .*"),
        (dict(learning_rate=[1e-3, -1e-3]), "learning_rate: .* 0 or above"),
        (dict(learning_rate=[1e-3, "linear"]), "learning_rate: .* one shape"),
        (dict(gamma=np.array([0.5, 1.5])), "gamma: .* from 0 to 1"),
        (dict(clip_range_vf="linear"), "clip_range_vf: 'linear'"),
        (dict(clip_range=(0.1, 0.2, 0.3)), "clip_range: .* a pair"),
        (dict(clip_range=(0.1, -0.2)), "clip_range: .* above 0"),
        (dict(vf_loss="l1"), "vf_loss: 'l1' .* mse, huber"),
        (dict(optimizer="adm"), "optimizer: .*'adm'.* adam"),
        (dict(optimizer=3), "optimizer: 3"),
        (dict(optimizer_kwargs=["lr"]), "optimizer_kwargs: 'lr' .* name=1"),
        (dict(optimizer_kwargs=3), "optimizer_kwargs: .*3"),
        (dict(use_sde=True, sde_sample_freq=0), "sde_sample_freq: 0 .* -1 or"),
        (dict(use_sde=True, sde_sample_freq=129), "sde_sample_freq: 129 .* n_steps = 128"),
        (dict(frame_skip=0), "frame_skip: 0 .* from 1"),
        (dict(policy="grru"), "policy: 'grru' .* gru"),
        (dict(loss_function="mine"), "loss_function: 'mine' .* function"),
        (dict(normalize_obs="yes"), "normalize_obs: 'yes' .* True or False"),
        (dict(normalize_obs=1), "normalize_obs: 1 .* True or False"),
        (dict(n_envs=True), "n_envs: True .* whole number"),
        (dict(n_envs=8.5), "n_envs: 8.5 .* whole number"),
        (dict(n_envs=None), "n_envs: None .* whole number"),
        (dict(n_envs=2**20, n_steps=2**12), "n_envs: 1048576 .*n_steps"),
        (dict(net_arch=[64, "wide"]), "net_arch: .* whole number"),
        (dict(net_arch={"pi": [8], "qf": [8]}), "net_arch: .* pi and vf"),
        (dict(net_arch={"pi": [8]}), "net_arch: .* pi and vf"),
        (dict(batch_size=1), "batch_size: 1 .* 2, or normalize_advantage False"),
        (dict(batch_size=8191), r"batch_size: 8191 .* n_envs \* n_steps = 8192.* 4096 and 8192"),
        (dict(lr=1e-3), "lr: no such setting; did you mean learning_rate"),
        (dict(num_minibatches=4), "num_minibatches: no such setting; did you mean batch_size"),
        (dict(anneal_lr=True), "anneal_lr: no such setting; did you mean learning_rate"),
        (dict(num_envs=4), "num_envs: no such setting; did you mean n_envs"),
        (dict(ent_coeff=4), "ent_coeff: no such setting; did you mean ent_coef"),
        (dict(seed=4), "seed: no such setting"),
    ],
)
def test_a_mistake_is_named(changes, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        PPOConfig(**dict(n_envs=64, n_steps=128) | changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(use_sde=True), "use_sde: True needs continuous actions"),
        (dict(squash_output=True), "squash_output: True needs continuous actions"),
        (dict(policy="nature_cnn"), "policy: 'nature_cnn' needs images .* 36 by 36"),
        (dict(optimizer_kwargs={"no_such": 1}), "optimizer_kwargs: .*no_such"),
    ],
)
def test_a_mistake_that_only_the_environment_shows_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        train(PPOConfig(**changes), jax.random.key(0))


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(seed=2**32), "seed: 4294967296 .* 4294967295"),
        (dict(seeds=3), "seeds: no such setting; did you mean n_seeds"),
        (dict(verbose="loud"), "verbose: 'loud' .* 0, 1, 2"),
        (dict(run_dir=3), "run_dir: 3 .*, or None"),
        (dict(n_episodes=0), "n_episodes: 0 .* from 1"),
    ],
)
def test_a_mistake_in_the_options_of_a_run_is_named(given, words):
    with pytest.raises(ConfigError, match=words):
        RunOptions(**given)


def test_the_largest_seed_is_one_of_its_own():
    options = RunOptions(seed=2**32 - 1)
    keys = [jax.random.key_data(jax.random.key(seed)) for seed in (options.seed, 0, 2**31 - 1)]
    assert len({tuple(key.tolist()) for key in keys}) == 3


# ------------------------------------------------------------------------------------ what is read


def test_numbers_may_be_texts():
    words = dict(n_envs="8", n_steps="1.6e1", total_timesteps="3e9", gamma="0.9", net_arch=["8", 4])
    words |= dict(batch_size="none", target_kl="None", normalize_obs="true", learning_rate="2e-3")
    config = PPOConfig(**words)
    numbers = dict(n_envs=8, n_steps=16, total_timesteps=3_000_000_000, gamma=0.9, net_arch=(8, 4))
    numbers |= dict(batch_size=None, target_kl=None, normalize_obs=True, learning_rate=2e-3)
    assert config == PPOConfig(**numbers)
    for name in ("n_envs", "n_steps", "total_timesteps"):
        assert type(getattr(config, name)) is int
    assert PPOConfig(net_arch=64).net_arch == (64,) and PPOConfig(n_envs=8.0).n_envs == 8
    assert PPOConfig(n_envs=np.int64(8)).n_envs == 8 and PPOConfig(gamma=1).gamma == 1.0


def test_a_list_has_a_number_for_each_agent_and_a_tuple_one_for_each_side():
    sweep = PPOConfig(clip_range=[0.1, 0.3], learning_rate=["linear_1e-3", "linear_1e-2"])
    assert np.shape(sweep.clip_range) == (2,)
    np.testing.assert_allclose(sweep.learning_rate(0.5), [5e-4, 5e-3])
    assert PPOConfig(clip_range=(0.1, 0.3)).clip_range == (0.1, 0.3)
    assert PPOConfig(clip_range="0.1,0.3").clip_range == (0.1, 0.3)
    mixed = PPOConfig(clip_range=([0.1, 0.2], 0.3)).clip_range
    assert np.shape(mixed[0]) == (2,) and mixed[1] == 0.3


def test_widths_of_both_networks_in_one_dictionary():
    config = PPOConfig(net_arch={"pi": [8], "vf": [4, 2]})
    assert config == PPOConfig(net_arch=(8,), net_arch_vf=(4, 2))
    assert PPOConfig(net_arch=(), net_arch_vf=None).net_arch == ()


def test_minibatches_may_be_of_one_sample_or_of_all():
    sizes = dict(n_envs=2, n_steps=4)
    one = PPOConfig(batch_size=1, normalize_advantage=False, **sizes)
    assert (one.minibatch_size, one.n_minibatches) == (1, 8)
    larger = PPOConfig(batch_size=1000, **sizes)  # than the rollout
    assert (larger.minibatch_size, larger.n_minibatches) == (8, 1)
    assert PPOConfig(batch_size=None, **sizes).n_minibatches == 4


def test_a_home_folder_may_be_meant_by_a_tilde(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("n_envs: 8\nrun_dir: ~/there\n")
    config, options = parse_one(["--config", "~/mine.yaml"])
    assert config.n_envs == 8
    assert claim_run(options, config).samefile(tmp_path / "there")
    agent = ppo_jax.init_agent(CONFIG, jax.random.key(0))
    ppo_jax.save_agents("~/saved", CONFIG, agent)
    assert ppo_jax.load_agents("~/saved")[0] == CONFIG
    assert main(["--eval", "~/saved", "--n-episodes", "1", UNCACHED]) == 0
    assert "seed 0" in capsys.readouterr().out
    config, _ = parse_one(["--resume", "~/saved", "--n-seeds", "1"])
    assert config == CONFIG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "saved", "there"]


def test_flags_take_schedules_and_named_values():
    argv = ["--env", "MemoryChain-bsuite", "--learning-rate", "linear_1e-3"]
    argv += ["--clip-range", "0.1,0.3", "--policy", "gru", "--env-params", "memory_length=20"]
    argv += ["--optimizer-kwargs", "b1=0.8", "eps=1e-6", "--net-arch", "--log-std-init", "-1.5"]
    argv += ["--ent-coef", "cosine_1e-2_0.1", "--no-normalize-advantage", "--ortho-init"]
    config, _ = parse_one(argv)
    assert config == PPOConfig(
        "MemoryChain-bsuite",
        learning_rate="linear_1e-3",
        clip_range=(0.1, 0.3),
        policy="gru",
        env_params={"memory_length": 20},
        optimizer_kwargs={"b1": 0.8, "eps": 1e-6},
        net_arch=(),
        log_std_init=-1.5,
        ent_coef=Schedule(1e-2, 0.1, "cosine"),
        normalize_advantage=False,
    )


# ------------------------------------------------------------------------------------------- files

YAML = """
env: Pendulum-v1
n_envs: 8
total_timesteps: 1e5
learning_rate: 1e-3
n_seeds: 2
net_arch: [8, 4]
normalize_obs: yes
clip_range: 0.1,0.3
target_kl: null
optimizer_kwargs: {b1: 0.8}
"""


def test_a_file_of_settings_and_flags_that_beat_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    config, options = parse_one(["--config", str(file), "--n-envs", "16"])
    changes = dict(n_envs=16, total_timesteps=100_000, learning_rate=1e-3, net_arch=(8, 4))
    changes |= dict(normalize_obs=True, clip_range=(0.1, 0.3), optimizer_kwargs={"b1": 0.8})
    assert config == PPOConfig("Pendulum-v1", **changes) and options.n_seeds == 2
    other, _ = parse_one(["--config", str(file), "--env", "CartPole-v1"])
    assert other.env == "CartPole-v1" and other.n_envs == 8
    assert other.n_steps == PPOConfig("CartPole-v1").n_steps != config.n_steps


def test_a_list_in_a_file_sweeps(tmp_path):
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"learning_rate": [1e-3, 1e-2], "n_seeds": 2}))
    settings, options, _ = parse_arguments(["--config", str(file)])
    assert settings == [(dict(learning_rate=x), PPOConfig(learning_rate=x)) for x in (1e-3, 1e-2)]
    assert options.n_seeds == 2
    config, _ = parse_one(["--config", str(file), "--learning-rate", "0.5"])  # flags beat it
    assert config == PPOConfig(learning_rate=0.5)


@pytest.mark.parametrize("ending", ["yaml", "json"])
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"n_env": 8}, ["n_env", "no setting", "n_envs"]),
        ({"lr": 1e-3}, ["lr", "no setting", "learning_rate"]),
        ({"num_minibatches": 4}, ["num_minibatches", "no setting", "batch_size"]),
        ({"n_envs": "many"}, ["n_envs", "'many'", "whole number"]),
        ({"n_envs": None}, ["n_envs", "None", "whole number"]),
        ({"n_envs": [8, "many"]}, ["n_envs", "'many'", "whole number"]),
        ({"n_envs": [[8]]}, ["n_envs", "[8]", "whole number"]),
        ({"n_envs": []}, ["n_envs", "[]", "value"]),
        ({"n_seeds": [8]}, ["n_seeds", "[8]", "whole number"]),
        ({"gamma": 2}, ["gamma", "2", "from 0 to 1"]),
        ({"learning_rate": [1e-3, -1]}, ["learning_rate", "0 or above"]),
        ({"seed": 2**32}, ["seed", "4294967296"]),
        ({"env": 5}, ["env", "5"]),
        ({"env_params": 5}, ["env_params", "5"]),
        ({"net_arch": {"a": 1}}, ["net_arch", "pi and vf"]),
        ([8], ["config", "names with values"]),
        ("a: [", ["config", "can't be read"]),
        (b"\xff\xfe", ["config", "can't be read"]),
        (None, ["config", "can't be read"]),
    ],
    ids=str,
)
def test_a_mistake_in_a_file_of_settings_gets_one_line(settings, words, ending, tmp_path, capsys):
    """settings: to be written as JSON, which is YAML too; a text or bytes as they are; no file."""
    file = tmp_path / f"run.{ending}"
    if isinstance(settings, str | bytes):
        file.write_bytes(settings.encode() if isinstance(settings, str) else settings)
    elif settings is not None:
        file.write_text(json.dumps(settings))
    assert main(["--config", str(file), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, *words)


SCHEDULE = Schedule(np.array([1e-3, 1e-2]), np.array([0.0, 0.5]), "cosine")


def write_settings(folder, config):
    """Write config.json with a config's settings; returns its path."""
    ppo_jax.write_config(folder, ppo_jax.plain_settings(config))
    return folder / "config.json"


@pytest.mark.parametrize(
    "changes",
    [
        dict(clip_range=(0.1, 0.3), clip_range_vf="cosine_0.2_0.5", ent_coef="linear_0.1"),
        dict(optimizer="adamw", optimizer_kwargs={"weight_decay": 1e-4, "nesterov": True}),
        dict(env_params={"max_speed": 5.0, "max_steps_in_episode": 50}, target_kl=0.01),
        dict(net_arch_vf=(), squash_output=True, activation="relu", batch_size=16, gamma=1),
        dict(clip_range=("linear_0.1_0.5", "cosine_0.3_0.1"), total_timesteps=2**35),
    ],
    ids=lambda changes: ",".join(changes),
)
def test_every_kind_of_setting_survives_its_file(changes, tmp_path):
    config = PPOConfig(**FULL | changes)
    file = write_settings(tmp_path, config)
    assert_same_configs(PPOConfig(**json.loads(file.read_text())), config)
    read, options = parse_one(["--config", str(file)])
    assert_same_configs(read, config)
    assert options == RunOptions(config=str(file))


@pytest.mark.parametrize(
    "changes",
    [
        dict(learning_rate=[1e-3, 1e-2], gamma=np.array([0.9, 0.99], np.float32)),
        dict(learning_rate=SCHEDULE, ent_coef=["linear_0.1", "linear_0.2"]),
        dict(clip_range=([0.1, 0.2], 0.3)),
    ],
    ids=lambda changes: ",".join(changes),
)
def test_a_populations_numbers_survive_their_file(changes, tmp_path):
    """Python reads them as they were, the command line as values to combine."""
    config = PPOConfig(**FULL | changes)
    file = write_settings(tmp_path, config)
    assert_same_configs(PPOConfig(**json.loads(file.read_text())), config)
    settings, *_ = parse_arguments(["--config", str(file)])
    assert len(settings) == 2 ** len(changes)
    corners = (settings[0], settings[-1])
    for row, (chosen, read) in enumerate(corners):
        assert chosen.keys() == changes.keys()
        single = [np.broadcast_to(leaf, 2)[row] for leaf in jax.tree.leaves(config)]
        assert_same_configs(read, jax.tree.unflatten(jax.tree.structure(config), single))


def test_what_a_sweep_leaves_in_its_file_is_the_sweep(tmp_path):
    argv = ["--learning-rate", "linear_1e-3", "1e-2", "--clip-range", "0.1,0.3", "0.2"]
    argv += ["--net-arch", "8,4", "--net-arch-vf", "8,4", "16", "--seed", "7"]
    argv += ["--target-kl", "none", "0.01"]
    argv += ["--env-params", "gravity=9", "gravity=10", "--normalize-obs", "true", "false"]
    settings, options, described = parse_arguments(argv)
    assert len(settings) == 2**6 and settings[0][1].net_arch == (8, 4)
    ppo_jax.write_config(tmp_path, described)
    again, read, same = parse_arguments(["--config", str(tmp_path / "config.json")])
    assert [config for _, config in again] == [config for _, config in settings]
    given = vars(read) | {"config": None}
    assert given == vars(options) and same == described


def test_none_may_be_one_of_several_layouts(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"net_arch_vf": [[8, 4], null]}')
    for argv in (["--net-arch-vf", "8,4", "none"], ["--config", str(file)]):
        settings, *_ = parse_arguments(argv)
        assert [config.net_arch_vf for _, config in settings] == [(8, 4), None]


def test_a_run_is_told_by_flags_as_by_python():
    config, options = parse_one([*flags(FULL), "--n-seeds", "2", "--no-progress-bar"])
    assert config == PPOConfig(**FULL)
    assert options == RunOptions(n_seeds=2, progress_bar=False)
    underscored = [word.replace("-", "_") if word[:2] == "--" else word for word in flags(FULL)]
    underscored = [word.replace("__", "--", 1) for word in underscored]
    assert parse_one(underscored)[0] == config


def test_what_no_file_can_hold_is_asked_for(tmp_path, capsys):
    write_settings(tmp_path, PPOConfig(env=Bare()))
    for flag in ("--config", "--resume"):
        where = tmp_path / "config.json" if flag == "--config" else tmp_path
        assert main([flag, str(where), UNCACHED]) == 2
        assert_one_line(capsys.readouterr().err, "env: ", "Bare", "no file can hold")


# -------------------------------------------------------------------------------------------- help


def test_help_explains_every_setting_with_the_environments_default(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--env", "Pendulum-v1", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    names = []
    for owner in (PPOConfig, RunOptions):
        for field in dataclasses.fields(owner):
            if field.metadata["kind"] == "function":  # which only Python can give
                assert f"--{field.name.replace('_', '-')}" not in text
                continue
            names.append(field.name)
            assert f"--{field.name.replace('_', '-')}" in text
            assert field.metadata["help"] in text
    assert len(names) == len(set(names)) > 40
    config = PPOConfig(env="Pendulum-v1")
    assert f"(default: {config.gamma})" in text and "(default: linear_0.001_0.0)" in text
    assert "(default: 64 64)" in text and "(default: Pendulum-v1)" in text
    assert max(map(len, shown.splitlines())) < 200

    found = [text.index(f"{group} options") for group in GROUPS]
    assert found == sorted(found)
    for flag, group in (("seed", 0), ("env", 1), ("batch-size", 2), ("gamma", 3), ("policy", 4)):
        end = [*found, len(text)][group + 1]
        place = re.search(rf"--{flag} (X|\[X \.\.\.\])", text).start()
        assert found[group] < place < end, flag


GROUPS = ("run", "environment", "optimisation", "objective", "network")


def test_help_shows_what_the_other_flags_and_a_file_say(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("gamma: 0.123\n")
    for arguments in (["-h", "--n-seeds", "77"], ["--n-seeds", "77", "--help"]):
        with pytest.raises(SystemExit):
            main([*arguments, "--config", str(tmp_path / "run.yaml")])
        text = " ".join(capsys.readouterr().out.split())
        assert "(default: 0.123)" in text and "(default: 77)" in text
