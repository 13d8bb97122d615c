"""Sweeps: grids and random search, their tables, turns within a memory limit, evolution."""

import functools
import json
import math
import shutil

import jax
import numpy as np
import pandas
import pytest
from runs import (
    CONFIG,
    SIZES,
    SMALL,
    UNCACHED,
    assert_one_line,
    assert_same_agents,
    parse_one,
    read_rows,
)
from scipy import stats

import ppo_jax
from ppo_jax import (
    ConfigError,
    PPOConfig,
    Schedule,
    evaluate,
    grid,
    load_agents,
    main,
    parse_arguments,
    setting_results,
    sweep_table,
    train_population,
)

RATES, COEFS = ["1e-4", "1e-3", "1e-2"], ["0", "0.01"]
TWO = [*SMALL, "--n-seeds", "2"]  # the last of a flag given twice counts
GRID = ["--learning-rate", *RATES, "--ent-coef", *COEFS]
ON_CPU = jax.default_backend() == "cpu"


def assert_equal(ours, theirs):
    """Assert that floats are equal; but for rounding where agents run side by side.

    On a CPU, an agent's program is the body of a loop over agents, whatever their number. On other
    devices XLA orders sums by the number of agents.
    """
    if ON_CPU:
        np.testing.assert_array_equal(ours, theirs)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The folder of a sweep of two numbers from the command line."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    assert main([*TWO, *GRID, "--run-dir", str(folder), "--threshold", "15"]) == 0
    return folder


def curves(run_dir, setting):
    """Return the rows of metrics.csv of a setting, without its number."""
    rows = [row for row in read_rows(run_dir) if row.pop("setting") == str(setting)]
    assert rows
    return rows


# ---------------------------------------------------------------------------- from the command line


def test_a_sweep_leaves_tables_and_pictures(sweep):
    names = ["agents.csv", "checkpoint", "config.json", "learning_curve.png", "metrics.csv"]
    assert sorted(path.name for path in sweep.iterdir()) == [*names, "sweep.png"]
    for name in ("learning_curve.png", "sweep.png"):
        assert (sweep / name).read_bytes().startswith(b"\x89PNG")
    agents = read_rows(sweep, "agents.csv")
    assert [row["agent"] for row in agents] == [str(number) for number in range(12)]
    assert [(row["setting"], row["seed"]) for row in agents] == [
        (str(setting), str(seed)) for setting in range(6) for seed in range(2)
    ]
    for number, row in enumerate(agents):
        assert float(row["learning_rate"]) == float(RATES[number // 4])
        assert float(row["ent_coef"]) == float(COEFS[number // 2 % 2])
        assert row["program"] == "0" and row["diverged_at"] == ""
        curve = [x for x in curves(sweep, row["setting"]) if x["seed"] == row["seed"]]
        assert [x["timesteps"] for x in curve] == ["32", "64", "96"]
        assert row["return"] == curve[-1]["return"]
        returns = np.array([float(x["return"]) for x in curve])
        np.testing.assert_allclose(float(row["area"]), np.nanmean(returns))
        reached = [float(x["timesteps"]) for x in curve if float(x["return"]) >= 15]
        assert float(row["steps_to_threshold"] or "nan") == min(reached, default=math.nan) or (
            not reached and not row["steps_to_threshold"]
        )
    settings = json.loads((sweep / "config.json").read_text())
    assert settings["learning_rate"] == [1e-4, 1e-3, 1e-2] and settings["ent_coef"] == [0, 0.01]
    assert settings["n_envs"] == 4 and settings["n_seeds"] == 2


def test_the_table_has_a_row_for_each_setting_the_best_first(sweep, capsys):
    assert main([*TWO, *GRID, "--run-dir", str(sweep), "--threshold", "15"]) == 0  # once more
    out = capsys.readouterr().out
    assert "finished already" in out
    title, header, *rows = out.splitlines()[:8]
    assert title == "PPO on CartPole-v1, last 100 episodes of training"
    assert [name for name in header.split() if name[0] not in "9%i"][:4] == [
        "setting",
        "learning_rate",
        "ent_coef",
        "return",
    ]
    cells = [row.split() for row in rows]
    assert sorted(row[0] for row in cells) == list("012345")
    returns = [float(row[3]) for row in cells]
    assert returns == sorted(returns, reverse=True) and rows[0].rstrip().endswith("*")
    agents = pandas.read_csv(sweep / "agents.csv")
    for row in cells:
        mean = agents["return"][agents["setting"] == int(row[0])].mean()  # of two seeds
        assert row[3] == f"{mean:.4g}"


@pytest.mark.parametrize("setting", [0, 3])
def test_a_sweeps_agents_are_those_of_a_command_of_their_own(setting, sweep, tmp_path):
    """To the last digit of metrics.csv."""
    flags = ["--learning-rate", RATES[setting // 2], "--ent-coef", COEFS[setting % 2]]
    assert main([*TWO, *flags, "--run-dir", str(tmp_path / "own"), "--verbose", "0"]) == 0
    own = curves(tmp_path / "own", 0)
    if ON_CPU:
        assert own == curves(sweep, setting)
    for ours, theirs in zip(own, curves(sweep, setting), strict=True):
        for name, value in ours.items():
            assert_equal(float(value), float(theirs[name]))


def test_a_sweeps_agents_are_those_of_python(sweep):
    """All settings have the same keys."""
    config = CONFIG.replace(learning_rate=1e-2, ent_coef=0.01)
    agents, metrics = train_population(config, jax.random.split(jax.random.key(5), 2))
    table = pandas.DataFrame(curves(sweep, 5)).astype(float)
    for seed in range(2):
        for name, values in metrics.items():
            found = table[name][table["seed"] == seed].to_numpy(values.dtype)
            assert_equal(found, values[seed])
    _, saved = load_agents(sweep)
    for ours, theirs in zip(jax.tree.leaves(agents.params), jax.tree.leaves(saved.params)):
        assert_equal(ours, theirs[10:])


@pytest.mark.parametrize("best", [0, 4])
def test_eval_plays_the_best_setting_or_one_agent(best, sweep, tmp_path, capsys):
    """Of the sweep's folder with other returns in its table."""
    sweep = shutil.copytree(sweep, tmp_path / "copy")
    agents = pandas.read_csv(sweep / "agents.csv")
    agents["return"] = np.where(agents["setting"] == best, 30.0, 20.0)
    agents.to_csv(sweep / "agents.csv", index=False)
    config, saved = load_agents(sweep)
    row = jax.tree.map(lambda x: np.ravel(x)[0], config)
    for arguments, numbers, title in (
        ([], [2 * best, 2 * best + 1], f"setting {best}"),
        (["--agent", "0"], [0], "agent 0"),
        (["--agent", "11"], [11], "agent 11"),
    ):
        assert main(["--eval", str(sweep), "--n-episodes", "3", *arguments, UNCACHED]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert title in lines[0]
        label = "agent" if arguments else "seed"
        shown = [line.split()[-1] for line in lines if line.startswith(f"  {label} ")]
        expected = []
        for number in numbers:
            agent = jax.tree.map(lambda x: x[number], saved)  # noqa: B023
            returns = evaluate(row, agent, jax.random.key(0), 3)
            expected.append(f"{np.mean(returns):.2f}")
        assert shown == expected
    for number in ("12", "99"):
        assert main(["--eval", str(sweep), "--agent", number, UNCACHED]) == 2
        assert_one_line(capsys.readouterr().err, "agent", number, "below 12", str(sweep))


PROGRAMS = [*TWO, "--n-steps", "8", "16", "--gamma", "0.9", "0.99"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of a sweep that two programs train."""
    folder = tmp_path_factory.mktemp("programs") / "run"
    assert main([*PROGRAMS, "--run-dir", str(folder), "--verbose", "0"]) == 0
    return folder


def test_each_program_has_its_checkpoints_and_agents_are_told_by_number(programs, capsys):
    for number, n_steps in enumerate((8, 16)):
        config, agents = load_agents(programs / f"program-{number}")
        assert config.n_steps == n_steps and len(agents.n_updates) == 4
        np.testing.assert_allclose(config.gamma, [0.9, 0.9, 0.99, 0.99])
    rows = read_rows(programs, "agents.csv")
    assert [row["program"] for row in rows] == list("00001111")
    assert [row["n_steps"] for row in rows] == ["8"] * 4 + ["16"] * 4
    assert main(["--eval", str(programs), "--agent", "6", "--n-episodes", "3", UNCACHED]) == 0
    out = capsys.readouterr().out
    one = jax.tree.map(lambda x: x[2], agents)
    returns = evaluate(config.replace(gamma=0.99), one, jax.random.key(0), 3)
    assert f"{np.mean(returns):.2f}" in out and "agent 6" in out


@pytest.mark.parametrize("stop", [1, 3])
def test_a_sweep_of_two_programs_goes_on_where_it_stopped(stop, programs, tmp_path):
    """In the first of them, or in the second."""
    run_dir, chunks = tmp_path / "run", []
    arguments = [*PROGRAMS, "--run-dir", str(run_dir), "--verbose", "0"]
    settings, options, described = parse_arguments(arguments)

    def count(timesteps, metrics, agents):
        chunks.append(len(metrics["return"]))
        has_second = (run_dir / "program-0").exists()
        return has_second if stop == 3 else True

    assert ppo_jax.run_training(settings, options, count, described) == 0
    assert (run_dir / "program-1").exists() == (stop == 3)
    assert main(arguments) == 0
    for name in ("metrics.csv", "agents.csv"):
        ours, theirs = read_rows(run_dir, name), read_rows(programs, name)
        assert len(ours) == len(theirs) and ours == theirs


# -------------------------------------------------------------------------------------------- grids


def test_a_grid_has_a_population_for_each_program():
    config = CONFIG.replace(sub_traj_len=4)
    populations = grid(
        config, 2, 7, n_steps=[8, 16], gamma=[0.9, 0.99], policy=["mlp", "gru"], vf_coef=[0.7]
    )
    seen = []
    for config, keys, rows in populations:
        assert len(keys) == len(rows) == 4
        np.testing.assert_allclose(config.gamma, [0.9, 0.9, 0.99, 0.99])
        assert config.vf_coef == 0.7  # which is the same for all
        own = [*jax.random.split(jax.random.key(7), 2)] * 2
        assert [jax.random.key_data(key).tolist() for key in keys] == [
            jax.random.key_data(key).tolist() for key in own
        ]
        for row, gamma in zip(rows, (0.9, 0.9, 0.99, 0.99)):
            assert (row["n_steps"], row["policy"]) == (config.n_steps, config.policy)
            assert row["gamma"] == gamma and row["vf_coef"] == 0.7
            seen.append((row["setting"], row["seed"]))
        assert [row["seed"] for row in rows] == [0, 1, 0, 1]
    assert len(populations) == 4 and len({(c.n_steps, c.policy) for c, *_ in populations}) == 4
    assert sorted(seen) == [(setting, seed) for setting in range(8) for seed in range(2)]


def test_a_setting_that_is_given_twice_is_trained_once():
    [(config, _, rows)] = grid(CONFIG, 3, learning_rate=[1e-3, 1e-2, 1e-3, "0.01"])
    np.testing.assert_allclose(config.learning_rate, [1e-3] * 3 + [1e-2] * 3)
    assert [row["setting"] for row in rows] == [0] * 3 + [1] * 3


def test_a_populations_rows_are_those_of_its_agents():
    rates = [1e-3, 1e-2, 1e-4]
    [(config, keys, rows)] = grid(CONFIG, 2, 5, learning_rate=rates, gamma=[0.9, 0.99])
    agents, metrics = train_population(config, keys)
    own, own_metrics = train_population(CONFIG.replace(learning_rate=1e-2, gamma=0.99), keys)
    for row, chosen in enumerate(rows):
        is_own = (chosen["learning_rate"], chosen["gamma"]) == (1e-2, 0.99)
        assert is_own == (row in (6, 7))
        for name, values in own_metrics.items():
            if is_own:
                assert_equal(metrics[name][row], values[row])
        same = jax.tree.map(lambda x, y: np.array_equal(x[row], y[row]), agents.params, own.params)  # noqa: B023
        assert all(jax.tree.leaves(same)) == is_own or not ON_CPU


def test_swept_environments_keep_their_presets():
    settings, _, described = parse_arguments(["--env", "CartPole-v1", "Pendulum-v1", "--seed", "3"])
    assert [config for _, config in settings] == [
        PPOConfig("CartPole-v1"),
        PPOConfig("Pendulum-v1"),
    ]
    for name in ("n_envs", "gamma", "batch_size"):  # these follow from the environment
        assert name not in described
    settings, *_ = parse_arguments(["--env", "CartPole-v1", "Pendulum-v1", "--gamma", "0.5"])
    for _, config in settings:
        assert config == PPOConfig(config.env, gamma=0.5)
    populations = ppo_jax.make_populations(settings, 2, 0)
    assert [config.env for config, *_ in populations] == ["CartPole-v1", "Pendulum-v1"]


def test_numbers_and_schedules_make_a_population_each():
    values = [1e-3, "linear_1e-3", "linear_1e-2", "cosine_1e-2", 1e-2]
    populations = grid(CONFIG, 2, learning_rate=values)
    number, linear, cosine = (population.config.learning_rate for population in populations)
    np.testing.assert_allclose(number, [1e-3, 1e-3, 1e-2, 1e-2])
    assert isinstance(linear, Schedule) and linear.shape == "linear" and cosine.shape == "cosine"
    np.testing.assert_allclose(linear(0.5), [5e-4, 5e-4, 5e-3, 5e-3])
    settings = [[row["setting"] for row in rows] for _, _, rows in populations]
    assert settings == [[0, 0, 4, 4], [1, 1, 2, 2], [3, 3]]
    shown = populations[1].rows[0]["learning_rate"]
    assert PPOConfig(learning_rate=shown).learning_rate == Schedule(1e-3, 0.0, "linear")


def test_schedules_sweep_in_one_population():
    [(config, keys, _)] = grid(CONFIG, 1, 5, learning_rate=["linear_1e-3", "linear_1e-2_0.5"])
    _, metrics = train_population(config, keys)
    _, own = train_population(CONFIG.replace(learning_rate="linear_1e-2_0.5"), keys[::-1])
    for name, values in own.items():
        assert_equal(metrics[name][1], values[0])


# -------------------------------------------------------------------------- what several values are


@pytest.mark.parametrize(
    "words, text, values",
    [
        ("--clip-range 0.1,0.3", "clip_range: 0.1,0.3", [(0.1, 0.3)]),
        ("--clip-range 0.1,0.3", 'clip_range: "0.1,0.3"', [(0.1, 0.3)]),
        ("--clip-range 0.1,0.3 0.2", 'clip_range: ["0.1,0.3", 0.2]', [(0.1, 0.3), 0.2]),
        ("--clip-range 0.1 0.3", "clip_range: [0.1, 0.3]", [0.1, 0.3]),
        ("--net-arch 64 32", "net_arch: [64, 32]", [(64, 32)]),
        ("--net-arch 64,32", 'net_arch: ["64,32"]', [(64, 32)]),
        ("--net-arch 64,64 256", 'net_arch: ["64,64", 256]', [(64, 64), (256,)]),
        ("--net-arch 64,64 256", "net_arch: [[64, 64], [256]]", [(64, 64), (256,)]),
        ("--net-arch", "net_arch: []", [()]),
        ("--net-arch , 8", "net_arch: [[], [8]]", [(), (8,)]),
        (
            "--env-params gravity=9 gravity=10",
            "env_params: [gravity=9, gravity=10]",
            [(("gravity", 9),), (("gravity", 10),)],
        ),
        (
            "--env-params gravity=9 masscart=2",
            "env_params: {gravity: 9, masscart: 2}",
            [(("gravity", 9), ("masscart", 2))],
        ),
        (
            "--env-params gravity=9,masscart=2 gravity=10",
            "env_params: [{gravity: 9, masscart: 2}, {gravity: 10}]",
            [(("gravity", 9), ("masscart", 2)), (("gravity", 10),)],
        ),
        (
            "--optimizer-kwargs b1=0.8 b1=0.7",
            "optimizer_kwargs: [{b1: 0.8}, {b1: 0.7}]",
            [(("b1", 0.8),), (("b1", 0.7),)],
        ),
        ("--target-kl none 0.1", "target_kl: [null, 0.1]", [None, 0.1]),
        ("--normalize-obs true false", "normalize_obs: [true, false]", [True, False]),
        ("--policy mlp gru", "policy: [mlp, gru]", ["mlp", "gru"]),
    ],
)
def test_several_values_are_told_from_one(words, text, values, tmp_path):
    """In flags, YAML and JSON alike."""
    import yaml

    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "run.json").write_text(json.dumps(yaml.safe_load(text)))
    name = words.split()[0].strip("-").replace("-", "_")
    for argv in (words.split(), *(["--config", str(path)] for path in tmp_path.iterdir())):
        settings, *_ = parse_arguments(argv)
        assert [getattr(config, name) for _, config in settings] == values
        assert all(list(chosen) == [name] * (len(values) > 1) for chosen, _ in settings)


# ------------------------------------------------------------------------------------ random search

SEARCH = ["--learning-rate", "log_uniform_1e-5_1e-2", "--gamma", "uniform_0.9_0.999", "0.5"]
SEARCH += ["--n-steps", "8", "16", "--n-samples", "40"]


def test_a_random_search_draws_by_its_seed():
    first, again, other = (
        [chosen for chosen, _ in parse_arguments([*SEARCH, "--seed", seed])[0]]
        for seed in ("3", "3", "4")
    )
    assert first == again != other and len(first) == 40
    values = dict(n_steps=[8, 16], learning_rate=["log_uniform_1e-5_1e-2"])  # in PPOConfig's order
    values |= dict(gamma=["uniform_0.9_0.999", 0.5])
    python = grid(PPOConfig(), seed=3, n_samples=40, **values)
    drawn = sorted(row["learning_rate"] for _, _, rows in python for row in rows)
    np.testing.assert_allclose(drawn, sorted(chosen["learning_rate"] for chosen in first))


def test_drawn_numbers_are_in_range_with_four_digits():
    settings, _, described = parse_arguments([*SEARCH, "--n-samples", "400"])
    rates = np.array([config.learning_rate for _, config in settings])
    gammas = np.array([config.gamma for _, config in settings])
    assert rates.min() >= 1e-5 and rates.max() <= 1e-2 and len(set(rates)) > 380
    exponents = np.log10(rates)
    assert stats.kstest(exponents, stats.uniform(-5, 3).cdf).pvalue > 0.01
    drawn = gammas[gammas != 0.5]
    assert 150 < len(drawn) < 250 and drawn.min() >= 0.9 and drawn.max() <= 0.999
    assert stats.kstest(drawn, stats.uniform(0.9, 0.099).cdf).pvalue > 0.01
    for number in (*rates, *drawn):
        assert float(f"{number:.4g}") == number
    assert {config.n_steps for _, config in settings} == {8, 16}
    assert described["learning_rate"] == ["log_uniform_1e-5_1e-2"]  # what is drawn from


def test_a_random_search_runs_and_is_the_same_from_its_file(tmp_path):
    argv = ["--learning-rate", "log_uniform_1e-4_1e-2", "--n-samples", "6", "--verbose", "0"]
    assert main([*TWO, *argv, "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run", "agents.csv")
    assert len(rows) == 12 and len({row["learning_rate"] for row in rows}) == 6
    settings, *_ = parse_arguments(["--config", str(tmp_path / "run" / "config.json")])
    assert [config.learning_rate for _, config in settings] == [
        float(row["learning_rate"]) for row in rows[::2]
    ]
    assert (tmp_path / "run" / "sweep.png").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ("--gamma uniform_0.9_0.99", ["gamma", "uniform_0.9_0.99", "n_samples"]),
        ("--gamma 0.5 uniform_0.9_0.99", ["gamma", "uniform_0.9_0.99", "n_samples"]),
        ("--n-samples 3", ["n_samples", "3", "several values"]),
        ("--gamma 0.9 --n-samples 3", ["n_samples", "3", "several values"]),
        ("--n-samples 0 --gamma 0.9 0.8", ["n_samples", "0", "from 1"]),
        ("--n-envs uniform_4_8 --n-samples 3", ["n_envs", "uniform_4_8", "number"]),
        ("--policy uniform_0_1 --n-samples 3", ["policy", "uniform_0_1", "number"]),
        ("--gamma uniform_0.9_0.9 --n-samples 3", ["gamma", "uniform_0.9_0.9"]),
        ("--gamma uniform_0.99_0.9 --n-samples 3", ["gamma", "uniform_0.99_0.9"]),
        ("--gamma uniform_a_b --n-samples 3", ["gamma", "uniform_a_b", "uniform_0.9_0.999"]),
        ("--ent-coef log_uniform_0_1 --n-samples 3", ["ent_coef", "log_uniform_0_1"]),
        ("--ent-coef log_uniform_-1_1 --n-samples 3", ["ent_coef", "log_uniform_-1_1"]),
        ("--gamma uniform_2_3 --n-samples 3", ["gamma", "from 0 to 1"]),
    ],
)
def test_a_mistake_in_a_search_gets_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, *said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(gama=[0.9]), "gama: no such setting; did you mean gamma"),
        (dict(gamma=[]), r"gamma: \[\] won't do"),
        (dict(gamma=0.9), "gamma: 0.9 won't do; .* list"),
        (dict(gamma=[0.9, 1.5]), "gamma: 1.5 .* from 0 to 1"),
        (dict(gamma=["uniform_0_1"]), "gamma: .* n_samples"),
        (dict(n_steps=[8, 12], sub_traj_len=[8], policy=["gru"]), "sub_traj_len: 8 .* n_steps"),
    ],
)
def test_a_mistake_in_a_grid_is_named(values, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        grid(CONFIG, **values)
    assert "\n" not in str(refusal.value)


# ------------------------------------------------------------------------------------------- tables


def make_agents(returns, rates, **columns):
    """Return the table of agents.csv for settings of some seeds' returns."""
    rows = []
    for setting, (values, rate) in enumerate(zip(returns, rates)):
        for seed, value in enumerate(values):
            row = {"agent": len(rows), "program": 0, "setting": setting, "seed": seed}
            row |= {"learning_rate": rate, "return": value, "area": value / 2}
            rows.append(row | {"diverged_at": np.nan, "diverged_in": np.nan})
    return pandas.DataFrame(rows).assign(**columns)


def test_settings_have_interquartile_means_and_intervals():
    returns = [[1.0, 2.0, 3.0, 100.0], [10.0, 20.0, 30.0, 40.0], [5.0, 5.0, 6.0, 6.0]]
    table = setting_results(make_agents(returns, [1, 2, 3]), ["learning_rate"])
    assert table["setting"].tolist() == [1, 2, 0] and table["learning_rate"].tolist() == [2, 3, 1]
    np.testing.assert_allclose(table["return"], [25.0, 5.5, 2.5])  # means of the two in the middle
    np.testing.assert_allclose(table["area"], [12.5, 2.75, 106 / 8])
    for number, low, high in zip(table["setting"], table["low"], table["high"]):
        draws = np.random.default_rng(1).choice(returns[number], (20_000, 4))
        means = stats.trim_mean(draws, 0.25, axis=1)
        bounds = np.quantile(means, [0.025, 0.975])
        np.testing.assert_allclose([low, high], bounds, atol=0.05 * np.ptp(returns[number]))
    assert table["diverged"].tolist() == [0, 0, 0]


def test_best_marks_what_cannot_be_told_from_the_best():
    returns = [[10.0] * 3, [9.0, 9.5, 12.0], [9.0, 9.5, 9.9], [20.0, 9.6, 9.8], [np.nan] * 3]
    table = setting_results(make_agents(returns, range(5)), ["learning_rate"]).set_index("setting")
    best = table.index[0]
    assert best == 3 and table["low"][best] == 9.6
    assert table["best"].to_dict() == {3: True, 1: True, 0: True, 2: True, 4: False}
    table = setting_results(make_agents([[20.0] * 3, *returns[:3]], range(4)), ())
    assert table["setting"][0] == 0 and table["best"].tolist() == [True, False, False, False]


def test_a_seed_that_diverged_or_ended_no_episode_spoils_no_mean():
    returns = [[1.0, np.nan, 3.0, 1e9], [np.nan] * 4, [7.0, np.nan, np.nan, 1.0]]
    agents = make_agents(returns, [1, 2, 3])
    agents.loc[agents["agent"].isin([3, 4, 5, 6, 7, 11]), "diverged_at"] = 64
    table = setting_results(agents, ["learning_rate"]).set_index("setting")
    np.testing.assert_allclose(table["return"][[0, 1, 2]], [2.0, np.nan, 7.0])
    np.testing.assert_allclose(table["area"][[0, 1, 2]], [1.0, np.nan, 3.5])
    assert table["diverged"][[0, 1, 2]].tolist() == [1, 4, 1]
    assert table.index.tolist() == [2, 0, 1] and not table["best"][1]
    assert table["best"][2] and table[["low", "high"]].loc[2].isna().all()  # of one seed
    text = sweep_table("Mine", table.reset_index())
    assert len(text.splitlines()) == 6 and "nan" in text


def test_steps_to_a_threshold_are_told_of_the_seeds_that_reached_it():
    steps = [32.0, 64.0, np.nan, np.nan, np.nan, np.nan]
    agents = make_agents([[5.0] * 3, [1.0] * 3], [1, 2], steps_to_threshold=steps)
    table = setting_results(agents, ["learning_rate"])
    np.testing.assert_allclose(table["steps to threshold"], [48.0, np.nan])
    assert table["reached"].tolist() == ["2/3", "0/3"]
    text = sweep_table("Mine", table)
    assert "reached" in text and "2/3" in text and "48" in text


def test_a_table_of_many_settings_is_cut():
    returns = np.arange(90.0).reshape((30, 3))
    results = setting_results(make_agents(returns, range(30)), ["learning_rate"])
    title, _, *lines = sweep_table("Mine", results).splitlines()
    assert title == "Mine" and len(results) == 30
    assert [int(line.split()[0]) for line in lines[:20]] == list(range(29, 9, -1))
    assert len(lines) == 22 and lines[21] == "10 more settings are in agents.csv"
    assert "more settings" not in sweep_table("Mine", results[:20])


# ---------------------------------------------------------------------------------- turns of agents


def test_agents_that_take_turns_get_the_same_numbers():
    """64 of them, in at least four turns, to the last bit; with a sweep and callbacks."""
    keys = jax.random.split(jax.random.key(1), 64)
    config = CONFIG.replace(learning_rate=np.logspace(-4, -2, 64))
    whole, metrics = train_population(config, keys)
    program = ppo_jax.training_program(config, (), 64)
    limit = ppo_jax.memory_of(program, config, 16)
    turns = ppo_jax.plan_turns(program, config, 64, limit)
    assert len(turns) >= 4 and set(np.ravel(turns)) == set(range(64))
    seen = []

    def look(timesteps, metrics, agents):
        seen.append((timesteps, len(agents.n_updates), metrics["return"].shape))

    parts, part_metrics = train_population(config, keys, look, 0.0, memory_limit=limit)
    assert seen == [(steps, 64, (64, 1)) for steps in (32, 64, 96)]
    jax.tree.map(assert_equal, metrics, part_metrics)
    if ON_CPU:
        assert_same_agents(jax.device_get(whole), jax.device_get(parts))


def test_a_limit_too_small_for_one_agent_gets_one_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"memory_limit: 1000 .* at least \d+, the bytes"):
        train_population(CONFIG, jax.random.split(jax.random.key(1), 1), memory_limit=1000)
    run_dir = tmp_path / "run"
    argv = ["--memory-limit", "1000", "--run-dir", str(run_dir), "--verbose", "0"]
    assert main([*SMALL, *argv]) == 2
    assert_one_line(capsys.readouterr().err, "memory_limit", "1000", "one agent")
    assert not run_dir.exists()


def test_a_run_in_turns_leaves_the_same_table(tmp_path):
    program = ppo_jax.training_program(CONFIG, (), 3)
    limit = ppo_jax.memory_of(program, CONFIG, 1)
    for name, more in (("whole", []), ("turns", ["--memory-limit", str(limit)])):
        assert main([*SMALL, "--run-dir", str(tmp_path / name), "--verbose", "0", *more]) == 0
    whole, turns = (read_rows(tmp_path / name) for name in ("whole", "turns"))
    assert not ON_CPU or whole == turns


# ---------------------------------------------------------------------------------------- evolution

NAMES = ("learning_rate", "gamma")
EVOLVING = PPOConfig(**SIZES | dict(total_timesteps=256, gamma=0.9, learning_rate="linear_1e-2"))


@pytest.fixture(scope="module")
def evolved():
    """Ten agents of three updates a generation, their metrics, and what they were in between."""
    seen = []

    def look(timesteps, metrics, agents):
        seen.append(jax.device_get(agents.params))

    keys = jax.random.split(jax.random.key(2), 10)
    options = dict(evolve=NAMES, evolve_every=3)
    agents, metrics = train_population(EVOLVING, keys, look, 0.0, **options)
    assert len(seen) == 8
    return keys, jax.device_get(agents), metrics, seen


def test_numbers_change_between_generations_alone(evolved):
    _, _, metrics, _ = evolved
    for name, first in zip(NAMES, (1e-2, 0.9)):
        values = metrics[name]
        np.testing.assert_allclose(values[:, :3], first, rtol=1e-6)
        changes = np.flatnonzero((np.diff(values, axis=1) != 0).any(axis=0))
        assert changes.tolist() == [2, 5], name  # after updates 3 and 6
    assert ((metrics["gamma"] >= 0) & (metrics["gamma"] < 1)).all()


def test_the_worst_fifth_copies_the_best_and_changes_its_numbers(evolved):
    _, _, metrics, _ = evolved
    for last in (2, 5):
        returns = np.where(np.isnan(metrics["return"]), -np.inf, metrics["return"])[:, last]
        order = np.argsort(returns, kind="stable")
        worst, best = order[:2], order[-2:]
        assert (returns[worst] < returns[best].min()).all()
        others = np.setdiff1d(np.arange(10), worst)
        for name in NAMES:
            before, after = metrics[name][:, last], metrics[name][:, last + 1]
            np.testing.assert_array_equal(after[others], before[others])
            for agent in worst:
                if name == "gamma":
                    ratios = (1 - after[agent]) / (1 - before[best])
                else:
                    ratios = after[agent] / before[best]
                near = np.minimum(np.abs(ratios - 0.8), np.abs(ratios - 1.2))
                assert near.min() < 1e-4, (name, ratios)


def test_a_copy_has_the_weights_of_one_of_the_best(evolved):
    _, agents, metrics, _ = evolved
    numbers = {name: np.float32(metrics[name][:, -1]) for name in NAMES}
    config = EVOLVING.replace(**numbers)
    config = jax.tree.map(lambda x: np.broadcast_to(np.float32(x), 10), config)
    exchange = jax.jit(functools.partial(ppo_jax.exchange, NAMES, 10))
    _, moved = exchange(config, agents)
    episode_return = np.asarray(jax.vmap(ppo_jax.mean_episode)(agents))[:, 0]
    order = np.argsort(np.where(np.isnan(episode_return), -np.inf, episode_return), kind="stable")
    worst, best = order[:2], order[-2:]
    for before, after in zip(jax.tree.leaves(agents.params), jax.tree.leaves(moved.params)):
        for agent in range(10):
            sources = best if agent in worst else [agent]
            assert any(np.array_equal(after[agent], before[source]) for source in sources)
    first = jax.tree.leaves(moved.params)[1].reshape((10, -1))
    assert len(np.unique(first, axis=0)) == 8


def test_evolution_depends_on_no_chunks(evolved):
    keys, agents, metrics, _ = evolved
    others, same = train_population(EVOLVING, keys, evolve=NAMES, evolve_every=3)
    jax.tree.map(np.testing.assert_array_equal, metrics, same)
    assert_same_agents(agents, jax.device_get(others))


@pytest.mark.parametrize("value", [0.0, 0.5, 0.9, 0.9999])
def test_a_fraction_stays_below_1(value):
    for name in ("gamma", "gae_lambda"):
        for factor, expected in ((0.8, 1 - 0.8 * (1 - value)), (1.2, max(0, 1.2 * value - 0.2))):
            changed = ppo_jax.change_number(name, np.float32(value), np.float32(factor))
            assert 0 <= changed < 1
            np.testing.assert_allclose(changed, expected, atol=1e-6)
    np.testing.assert_allclose(ppo_jax.change_number("ent_coef", np.float32(2.0), 1.2), 2.4)
    schedule = ppo_jax.change_number("learning_rate", Schedule(2.0, 0.5, "linear"), 0.8)
    assert schedule == Schedule(1.6, 0.5, "linear")


@pytest.mark.parametrize("name", ["no_such", "n_envs", "clip_range_vf", "env", "clip_range"])
def test_what_cannot_evolve_is_refused(name, tmp_path, capsys):
    """A setting that is no number, is not set, or is a pair."""
    more = ["--clip-range", "0.1,0.2", "--run-dir", str(tmp_path / "run")]
    assert main([*SMALL, "--evolve", "gamma", name, *more]) == 2
    assert_one_line(capsys.readouterr().err, "evolve", f"'{name}'", "learning_rate", "gamma")
    assert not (tmp_path / "run").exists()


def test_a_run_that_evolves_tells_the_schedule_of_its_numbers(tmp_path, capsys):
    """From several values, which are where the agents of the one setting begin."""
    argv = ["--learning-rate", "1e-3", "1e-2", "--evolve", "learning_rate", "--evolve-every", "1"]
    assert main([*SMALL, *argv, "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run", "agents.csv")
    assert [(row["setting"], row["seed"]) for row in rows] == [("0", str(n)) for n in range(6)]
    metrics = pandas.read_csv(tmp_path / "run" / "metrics.csv")
    n_changed = 0
    for number, row in enumerate(rows):
        curve = metrics[metrics["seed"] == number]
        told = dict(pair.split(":") for pair in row["learning_rate"].split())
        assert float(told["32"]) == (1e-3 if number < 3 else 1e-2)
        n_changed += len(told) > 1
        value = None
        for steps, rate in zip(curve["timesteps"], curve["learning_rate"]):
            value = float(told.get(str(steps), value))
            np.testing.assert_allclose(value, rate, rtol=1e-3)
    assert n_changed
    assert "mean of 6" in capsys.readouterr().out


def test_options_of_evolution_are_part_of_what_config_json_says(tmp_path):
    argv = ["--evolve", "gamma", "ent_coef", "--evolve-every", "2", "--gamma", "0.9", "0.8"]
    settings, options, described = parse_arguments(argv)
    assert options.evolve == ("gamma", "ent_coef") and options.evolve_every == 2
    assert described["evolve"] == ["gamma", "ent_coef"] and described["gamma"] == [0.9, 0.8]
    populations = ppo_jax.make_populations(settings, 2, 0, options.evolve)
    assert len(populations) == 1 and len(populations[0].keys) == 4
    assert parse_one([])[1].evolve == ()
