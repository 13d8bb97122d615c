"""Reporting: rows of metrics, tables, learning curves and loggers."""

import csv
import sys

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from runs import CONFIG, SMALL, alone, assert_one_line, read_rows
from scipy import stats

import ppo_jax
from ppo_jax import (
    RunOptions,
    RunReport,
    grid,
    main,
    pick,
    plot_learning_curves,
    plot_sweep,
    summary_table,
)


def some_metrics(n_agents, n_updates=5, seed=0):
    """Return metrics of agents as `train_population` returns them."""
    rng = np.random.default_rng(seed)
    timesteps = np.broadcast_to(32 * np.arange(1, n_updates + 1), (n_agents, n_updates))
    names = ("return", "length", "value_loss")
    return {"timesteps": timesteps} | {name: rng.normal(size=timesteps.shape) for name in names}


def make_report(folder, populations, loggers=(), **options):
    """Return the report of a run that shows nothing, at its first population."""
    options = RunOptions(verbose=0, **options)
    report = RunReport(folder, options, populations, loggers)
    report.begin(populations[0], folder, 0)
    return report


def some_settings(n_settings=1, n_seeds=3, **changes):
    """Return the populations of some learning rates."""
    rates = [0.1**number for number in range(n_settings)]
    return grid(CONFIG.replace(total_timesteps=160, **changes), n_seeds, learning_rate=rates)


# -------------------------------------------------------------------------------------------- rows


def test_the_table_of_metrics_has_a_row_for_each_agent_and_update(tmp_path):
    report, metrics = make_report(tmp_path, some_settings(2)), some_metrics(6)
    metrics["return"][4, :3] = np.nan
    report.add_rows({name: values[:, :2] for name, values in metrics.items()})
    report.write_rows()
    report.add_rows({name: values[:, 2:] for name, values in metrics.items()})
    report.write_rows()
    table = pandas.read_csv(tmp_path / "metrics.csv", float_precision="round_trip")
    assert list(table) == ["setting", "seed", *metrics] and len(table) == 6 * 5
    for agent in range(6):
        curve = table[(table["setting"] == agent // 3) & (table["seed"] == agent % 3)]
        assert curve["timesteps"].dtype == np.int64
        for name, values in metrics.items():
            np.testing.assert_array_equal(curve[name], values[agent])


@pytest.mark.parametrize("interval, rows", [(2, [64, 128, 160]), (5, [160]), (7, [160])])
def test_rows_may_be_left_out_in_between_but_never_the_last(interval, rows, tmp_path):
    report = make_report(tmp_path, some_settings(n_seeds=2), log_interval=interval)
    report.add_rows(some_metrics(2))
    report.write_rows()
    table = read_rows(tmp_path)
    assert [int(row["timesteps"]) for row in table if row["seed"] == "0"] == rows
    assert [row["seed"] for row in table] == ["0", "1"] * len(rows)


@pytest.mark.parametrize("n_settings, n_seeds, n_updates", [(1, 4, 25_001), (5, 64, 10_000)])
def test_a_long_run_has_no_more_than_about_a_hundred_thousand_rows(
    n_settings, n_seeds, n_updates, tmp_path
):
    rates = [0.1**number for number in range(n_settings)]
    config = CONFIG.replace(total_timesteps=32 * n_updates)
    populations = grid(config, n_seeds, learning_rate=rates)
    interval = make_report(tmp_path, populations).interval
    assert 50_000 < n_settings * n_seeds * (n_updates / interval) <= 100_000
    populations = grid(config.replace(total_timesteps=32 * 312), 64, learning_rate=rates)
    assert make_report(tmp_path, populations).interval == 1
    assert make_report(tmp_path, populations, log_interval=3).interval == 3


def logged(folder, populations, metrics):
    """Return what a logger gets of metrics: pairs of timesteps and scalars."""
    seen = []
    report = make_report(folder, populations, [lambda *what: seen.append(what)])
    report.add_rows(metrics)
    return seen


def test_loggers_get_means_over_seeds_and_each_return(tmp_path):
    metrics = some_metrics(3)
    seen = logged(tmp_path, some_settings(), metrics)
    assert [steps for steps, _ in seen] == [32, 64, 96, 128, 160]
    for place, (_, scalars) in enumerate(seen):
        for name in ("return", "length", "value_loss"):
            np.testing.assert_allclose(scalars.pop(name), metrics[name][:, place].mean())
        returns = [scalars.pop(f"return_seed_{seed}") for seed in range(3)]
        np.testing.assert_array_equal(returns, metrics["return"][:, place])
        assert scalars == {}


def test_loggers_get_each_setting_by_its_number(tmp_path):
    metrics = some_metrics(6)
    seen = logged(tmp_path, some_settings(2), metrics)
    assert [steps for steps, _ in seen[::2]] == [32, 64, 96, 128, 160]
    for number in range(2):
        _, scalars = seen[number]
        assert {name.split("/")[0] for name in scalars} == {f"setting_{number}"}
        expected = metrics["value_loss"][3 * number : 3 * number + 3, 0].mean()
        np.testing.assert_allclose(scalars[f"setting_{number}/value_loss"], expected)


def test_what_one_agent_lacks_spoils_no_mean(tmp_path):
    metrics = some_metrics(3)
    metrics["return"][1, :2] = np.nan  # of the agent whose first episode ends late
    metrics["return"][:, 0] = np.nan
    metrics["value_loss"][2] = np.nan
    seen = logged(tmp_path, some_settings(), metrics)
    assert not any("return" in name for name in seen[0][1])
    np.testing.assert_allclose(seen[1][1]["return"], metrics["return"][[0, 2], 1].mean())
    assert "return_seed_1" not in seen[1][1] and "return_seed_2" in seen[1][1]
    for place, (_, scalars) in enumerate(seen):
        np.testing.assert_allclose(scalars["value_loss"], metrics["value_loss"][:2, place].mean())


@pytest.mark.parametrize("n_agents", [1, 16, 17, 300])
def test_loggers_get_no_more_returns_than_of_sixteen_agents(n_agents, tmp_path):
    _, scalars = logged(tmp_path, some_settings(n_seeds=n_agents), some_metrics(n_agents))[0]
    n_shown = n_agents if 1 < n_agents <= 16 else 0
    assert {name for name in scalars if "seed" in name} == {
        f"return_seed_{seed}" for seed in range(n_shown)
    }


# ------------------------------------------------------------------------------------------- tables


def lines_of(table):
    """Return the title of a table, and its lines by their name."""
    title, *lines = table.split("\n")
    cells = [line.rsplit("  ", 1) for line in lines]
    return title, {name.strip(): text.strip() for name, text in cells}


def test_a_table_has_each_seeds_return_and_statistics():
    returns = np.array([1.0, 2.0, 3.0, 4.0, 100.0, 6.0, 7.0, 8.0])
    title, lines = lines_of(summary_table("Mine", returns, np.zeros(8, bool)))
    assert title == "Mine"
    assert [lines[f"seed {i}"] for i in range(8)] == [f"{x:.2f}" for x in returns]
    assert lines["mean of 8"] == "16.38"
    assert lines["interquartile mean"] == "5.00"  # of 3, 4, 6 and 7
    low, high = map(float, lines["95 % interval"].split(" to "))
    draws = np.random.default_rng(1).choice(returns, (20_000, 8))
    means = np.sort(draws, axis=1)[:, 2:6].mean(axis=1)
    np.testing.assert_allclose([low, high], np.quantile(means, [0.025, 0.975]), atol=1.0)


def test_a_table_tells_diverged_from_endless():
    returns = np.array([5.0, 7.0, np.nan, np.nan])
    has_diverged = np.array([False, True, True, False])
    _, lines = lines_of(summary_table("Mine", returns, has_diverged))
    assert lines["seed 1"] == lines["seed 2"] == "diverged"
    assert lines["seed 3"] == "no episode ended" and lines["mean of 1"] == "5.00"
    assert "95 % interval" not in lines
    _, lines = lines_of(summary_table("Mine", returns[2:3], has_diverged[2:3]))
    assert lines == {"seed 0": "diverged"}


def test_a_table_of_many_agents_stays_short():
    _, lines = lines_of(summary_table("Mine", np.arange(40.0), np.zeros(40, bool)))
    assert len(lines) == 16 + 1 + 3 and "24 more" in lines and lines["mean of 40"] == "19.50"
    assert lines["interquartile mean"] == f"{stats.trim_mean(np.arange(40.0), 0.25):.2f}"


# ------------------------------------------------------------------------------------------- curves


class Odd_Name:
    """An environment to be named only."""

    reset = step = default_params = observation_space = action_space = None


Odd_Name.__name__ = "Odd$_{Name}^[b]/%"


def make_tables(populations, metrics, names):
    """Return the tables of metrics.csv and of settings' results, and names, for pictures."""
    report_rows = [row for population in populations for row in population.rows]
    tables = []
    for number, row in enumerate(report_rows):
        table = {name: values[number] for name, values in metrics.items()}
        tables.append(pandas.DataFrame(pick(row, ("setting", "seed")) | table))
    table = pandas.concat(tables)
    agents = []
    for number, row in enumerate(report_rows):
        agents.append({"agent": number, **row, "return": metrics["return"][number, -1]})
    agents = ppo_jax.agent_results(agents, table, RunOptions())
    return table, ppo_jax.setting_results(agents, names), names


@pytest.mark.parametrize(
    "n_settings, n_seeds, n_updates", [(1, 1, 1), (1, 3, 5), (1, 20, 2000), (3, 1, 5), (12, 3, 5)]
)
def test_a_learning_curve_is_drawn_of_whatever_there_is(n_settings, n_seeds, n_updates, tmp_path):
    """Also of settings of which nothing is known, and with odd characters in the title."""
    populations = some_settings(n_settings, n_seeds)
    metrics = some_metrics(n_settings * n_seeds, n_updates)
    metrics["return"][:, :2] = np.nan
    metrics["return"][:n_seeds] = np.nan
    tables = make_tables(populations, metrics, ["learning_rate"] if n_settings > 1 else [])
    title = f"PPO on {ppo_jax.env_name(CONFIG.replace(env=Odd_Name()))}, $_{{1}}^[b]/%"
    plot_learning_curves(tmp_path / "curve.png", title, *tables)
    if n_settings > 1:
        plot_sweep(tmp_path / "sweep.png", title, *tables[1:])
    for path in tmp_path.iterdir():
        drawn = path.read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000
    assert len(list(tmp_path.iterdir())) == 1 + (n_settings > 1)


@pytest.mark.parametrize(
    "values",
    [
        dict(learning_rate=[1e-4, "linear_1e-3"]),
        dict(gamma=[0.9, 0.99], net_arch=[(8,), (4, 4), ()]),
        dict(gamma=[0.9, 0.99], ent_coef=[0.0, 0.1], vf_coef=[0.1]),
        dict(env=["CartPole-v1", "Pendulum-v1"], target_kl=[None, 0.1]),
        dict(normalize_advantage=[True, False]),
        dict(clip_range=[(0.1, 0.3), 0.2]),
    ],
    ids=",".join,
)
def test_a_sweep_is_drawn_of_whatever_is_swept(values, tmp_path):
    populations = grid(CONFIG, 2, **values)
    n_agents = sum(len(population.keys) for population in populations)
    tables = make_tables(populations, some_metrics(n_agents), list(values))
    plot_sweep(tmp_path / "sweep.png", "Mine", *tables[1:])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------ loggers

ODD = 'half, "of [bold]it[/bold]"'


def halved(params, config, network, minibatch):
    """A loss of the user's, with two numbers more to report, one of them unknown."""
    loss, report = ppo_jax.ppo_loss(params, config, network, minibatch)
    return loss / 2, report | {ODD: loss / 2, "unknown": loss * jnp.nan}


class Wandb:
    """Stands for Weights & Biases."""

    def __init__(self):
        self.logged, self.finished = [], 0

    def init(self, **given):
        self.given = given
        return self

    def define_metric(self, name, step_metric):
        self.axis = (name, step_metric)

    def log(self, scalars):
        self.logged.append((scalars["timesteps"], scalars))

    def finish(self):
        self.finished += 1


def test_loggers_get_every_row(tmp_path, monkeypatch, capsys):
    """Every second update here, with what a loss of the user's reports, but for NaN."""
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = CONFIG.replace(total_timesteps=128, loss_function=halved, gamma=0.5)
    options = RunOptions(
        n_seeds=3,
        tensorboard_log=str(tmp_path / "tb"),
        wandb_project="mine",
        run_name="this",
        run_dir=str(tmp_path / "run"),
        log_interval=2,
        verbose=2,
    )
    assert ppo_jax.run_training(alone(config), options) == 0
    table = pandas.read_csv(tmp_path / "run" / "metrics.csv").drop(columns=["setting", "seed"])
    assert table["timesteps"].tolist() == [64] * 3 + [128] * 3
    assert [step for step, _ in wandb.logged] == [64, 128] and wandb.finished == 1
    assert wandb.given["project"] == "mine" and wandb.given["config"]["n_envs"] == 4
    assert wandb.given["name"] == "this" and wandb.axis == ("*", "timesteps")
    for steps, scalars in wandb.logged:
        rows = table[table["timesteps"] == steps]
        for seed, value in enumerate(rows["return"]):
            np.testing.assert_allclose(scalars.pop(f"return_seed_{seed}"), value, rtol=1e-6)
        known = rows.mean().dropna()
        assert scalars.keys() == set(known.index) and ODD in scalars
        assert rows["unknown"].isna().all() and "unknown" not in scalars
        for name, value in scalars.items():
            np.testing.assert_allclose(value, known[name], rtol=1e-6)
    (events,) = (tmp_path / "tb" / "this").iterdir()
    assert b"ppo/explained_variance" in events.read_bytes() and b"ppo/half" in events.read_bytes()
    printed = capsys.readouterr().out
    assert "policy_loss" in printed and ODD in printed


@pytest.mark.parametrize(
    "package, flag", [("tensorboardX", "--tensorboard-log"), ("wandb", "--wandb-project")]
)
def test_a_missing_logger_gets_one_line(package, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([*SMALL, flag, "x", "--run-dir", str(tmp_path / "run")]) == 2
    assert_one_line(capsys.readouterr().err, f"pip install {package}", flag[2:].replace("-", "_"))
    assert not (tmp_path / "run").exists()


def test_a_logger_out_of_reach_gets_one_line(tmp_path, monkeypatch, capsys):
    class Unreachable(Wandb):
        def init(self, **given):
            raise RuntimeError("no\nkey")

    monkeypatch.setitem(sys.modules, "wandb", Unreachable())
    assert main([*SMALL, "--wandb-project", "mine", "--run-dir", str(tmp_path / "run")]) == 2
    assert_one_line(capsys.readouterr().err, "wandb_project", "mine", "no key", "offline")
    assert not (tmp_path / "run").exists()


def test_a_logger_that_cannot_write_gets_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    arguments = ["--tensorboard-log", str(tmp_path / "file"), "--run-dir", str(tmp_path / "run")]
    assert main([*SMALL, *arguments]) == 2
    assert_one_line(capsys.readouterr().err, "tensorboard_log", "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["[red]a b[/red]", "ü_$x^2$ {0} %s", ":smile:\\n"])
def test_odd_characters_in_a_name_are_printed_as_they_are(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--run-name", name]) == 0
    assert f"runs/{name}" in capsys.readouterr().out
    with open(tmp_path / "runs" / name / "metrics.csv", newline="") as file:
        assert len(list(csv.reader(file))) == 1 + 9
