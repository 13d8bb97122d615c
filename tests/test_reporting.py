"""Reporting: rows of metrics, tables, learning curves and loggers."""

import csv
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from runs import CONFIG, SMALL, assert_one_line, read_rows
from scipy import stats

import ppo_jax
from ppo_jax import RunOptions, main, metric_rows, plot_learning_curve, summary_table


def some_metrics(n_agents, n_updates=5, seed=0):
    """Return metrics of agents as `train_population` returns them."""
    rng = np.random.default_rng(seed)
    timesteps = np.broadcast_to(32 * np.arange(1, n_updates + 1), (n_agents, n_updates))
    names = ("return", "length", "value_loss")
    return {"timesteps": timesteps} | {name: rng.normal(size=timesteps.shape) for name in names}


# -------------------------------------------------------------------------------------------- rows


def test_rows_have_the_means_and_each_agents_return():
    metrics = some_metrics(3)
    header, rows = metric_rows(metrics)
    assert header == [*metrics, "return_seed_0", "return_seed_1", "return_seed_2"]
    table = np.array(rows)
    assert table.shape == (5, 7)
    np.testing.assert_array_equal(table[:, 0], 32 * np.arange(1, 6))
    for place, name in enumerate(metrics):
        np.testing.assert_allclose(table[:, place], metrics[name].mean(axis=0))
    np.testing.assert_allclose(table[:, 4:], metrics["return"].T)
    assert all(type(row[0]) is int for row in rows)


def test_what_one_agent_lacks_spoils_no_mean():
    metrics = some_metrics(3)
    metrics["return"][1, :2] = np.nan  # of the agent whose first episode ends late
    metrics["return"][:, 0] = np.nan
    metrics["value_loss"][2] = np.nan  # of the agent that diverged
    header, rows = metric_rows(metrics)
    row = dict(zip(header, rows[0]))
    assert np.isnan(row["return"]) and np.isnan(row["return_seed_1"])
    row = dict(zip(header, rows[1]))
    np.testing.assert_allclose(row["return"], metrics["return"][[0, 2], 1].mean())
    assert np.isnan(row["return_seed_1"]) and np.isfinite(row["return_seed_2"])
    for place, row in enumerate(rows):
        expected = metrics["value_loss"][:2, place].mean()
        np.testing.assert_allclose(dict(zip(header, row))["value_loss"], expected)


@pytest.mark.parametrize("n_agents", [1, 16, 17, 300])
def test_many_agents_have_no_more_columns_than_sixteen(n_agents):
    metrics = some_metrics(n_agents)
    metrics["return"][0, 1:] = np.nan
    header, rows = metric_rows(metrics)
    if n_agents <= 16:
        assert header[4:] == [f"return_seed_{i}" for i in range(n_agents)]
        return
    assert header == [*metrics, "return_min", "return_max"]
    for place, row in enumerate(rows):
        known = metrics["return"][:, place]
        np.testing.assert_allclose(row[4:], [np.nanmin(known), np.nanmax(known)])


def test_rows_of_a_run_in_which_no_episode_ends():
    for n_agents in (2, 20):
        metrics = some_metrics(n_agents)
        metrics["return"][:] = np.nan
        header, rows = metric_rows(metrics)
        for row in rows:
            returns = [x for name, x in zip(header, row) if "return" in name]
            assert len(returns) == 3 and np.isnan(returns).all()


def test_rows_may_be_left_out_in_between():
    assert [row[0] for row in metric_rows(some_metrics(2), 64)[1]] == [64, 128]
    assert metric_rows(some_metrics(2), 512)[1] == []


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


@pytest.mark.parametrize("n_agents, n_updates", [(1, 1), (3, 5), (20, 2000)])
def test_a_learning_curve_is_drawn_of_whatever_there_is(n_agents, n_updates, tmp_path):
    metrics = some_metrics(n_agents, n_updates)
    metrics["return"][:, :2] = np.nan
    config = CONFIG.replace(env=Odd_Name(), frame_skip=4)
    plot_learning_curve(tmp_path / "curve.png", config, metrics)
    drawn = (tmp_path / "curve.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000


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

    def log(self, scalars, step):
        self.logged.append((step, scalars))

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
    assert ppo_jax.run_training(config, options) == 0
    rows = read_rows(tmp_path / "run")
    assert [int(row["timesteps"]) for row in rows] == [64, 128]
    assert [step for step, _ in wandb.logged] == [64, 128] and wandb.finished == 1
    assert wandb.given["project"] == "mine" and wandb.given["config"]["n_envs"] == 4
    assert wandb.given["name"] == "this"
    for row, (_, scalars) in zip(rows, wandb.logged):
        known = {name: float(x) for name, x in row.items() if np.isfinite(float(x))}
        assert scalars.keys() == known.keys() - {"timesteps"} and ODD in scalars
        assert row["unknown"] == "nan" and "unknown" not in scalars
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
        assert len(list(csv.reader(file))) == 4
