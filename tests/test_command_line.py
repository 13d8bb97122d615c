"""The command line: whole runs, exit codes, signals, pipes and odd surroundings."""

import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from faulty_environments import Bare, is_whole, spoiling
from helpers import jit
from runs import (
    CONFIG,
    KEYS,
    PROGRAM,
    SIZES,
    SMALL,
    UNCACHED,
    alone,
    assert_one_line,
    assert_same_agents,
    finish,
    read_rows,
    start,
)

from ppo_jax import ConfigError, PPOConfig, RunOptions, load_agents, main, run_training, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three seeds and three updates."""
    run_dir = tmp_path_factory.mktemp("run") / "three"
    assert main([*SMALL, "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What lets the processes of these tests share what they compile."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


# ------------------------------------------------------------------------------------- a whole run


def test_a_run_leaves_its_config_metrics_curve_and_agents(run):
    settings = json.loads((run / "config.json").read_text())
    assert settings["seed"] == 5 and settings["n_seeds"] == 3
    agents, metrics = jit(jax.vmap(train, (None, 0)))(CONFIG, KEYS)
    rows = read_rows(run)
    first, others = ["timesteps", "return", "length"], sorted(metrics)
    columns = first + [name for name in others if name not in first]
    assert list(rows[0]) == ["setting", "seed", *columns]
    assert {row["setting"] for row in rows} == {"0"} and len(rows) == 9
    for seed in range(3):
        curve = [row for row in rows if row["seed"] == str(seed)]
        assert [int(row["timesteps"]) for row in curve] == [32, 64, 96]
        for name in metrics:
            found = [float(row[name]) for row in curve]
            np.testing.assert_allclose(found, metrics[name][seed], rtol=1e-4, atol=1e-6)
    results = read_rows(run, "agents.csv")
    assert [row["agent"] for row in results] == [row["seed"] for row in results] == list("012")
    returns = [float(row["return"]) for row in results]
    np.testing.assert_allclose(returns, metrics["return"][:, -1], rtol=1e-5)
    config, loaded = load_agents(run)
    assert config == CONFIG
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        (loaded.params, loaded.env_states),
        (agents.params, agents.env_states),
    )
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in run.iterdir()) == [
        "agents.csv",
        "checkpoint",
        "config.json",
        "learning_curve.png",
        "metrics.csv",
    ]


def test_eval_prints_each_seeds_return(run, capsys):
    assert main(["--eval", str(run), "--n-episodes", "3", UNCACHED]) == 0
    printed = capsys.readouterr().out
    for words in ("seed 0", "seed 2", "interquartile mean", "95 % interval", "3 episodes"):
        assert words in printed
    assert "did not end" not in printed


def test_eval_says_which_episodes_did_not_end(run, capsys):
    assert main(["--eval", str(run), "--n-episodes", "3", "--max-steps", "2", UNCACHED]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no episode ended") == 3 and "diverged" not in printed
    assert "9 episodes did not end within 2 steps" in printed


@pytest.mark.parametrize(
    "more, words",
    [
        (["--seed", "6"], ["seed", "6", "5", "run_dir"]),
        (["--n-steps", "16", "--total-timesteps", "192"], ["total_timesteps", "192", "96"]),
    ],
)
def test_the_folder_of_another_run_is_refused_and_left_alone(more, words, run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main([*SMALL, "--run-dir", str(run), *more]) == 2
    assert_one_line(capsys.readouterr().err, str(run), *words)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("found", ["notes.txt", "config.json"])
def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(found, tmp_path, capsys):
    """Also where it is another program's config, or that of agents saved from Python."""
    (tmp_path / found).write_text('{"env": "CartPole-v1"}')
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
    assert main([*SMALL, "--run-dir", str(tmp_path)]) == 2
    assert_one_line(capsys.readouterr().err, "run_dir", str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before


def test_the_folder_that_another_run_goes_on_from_is_not_written_over(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    more = ["--resume", str(run), "--total-timesteps", "192"]
    assert main([*more, "--run-dir", str(run), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, "run_dir", str(run))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_the_written_config_starts_the_same_run_again(run, tmp_path):
    again = tmp_path / "again"
    assert main(["--config", str(run / "config.json"), "--run-dir", str(again), UNCACHED]) == 0
    assert_same_agents(load_agents(run)[1], load_agents(again)[1])
    assert (run / "metrics.csv").read_text() == (again / "metrics.csv").read_text()


def test_another_number_of_agents_cannot_go_on(run, tmp_path, capsys):
    arguments = ["--resume", str(run), "--total-timesteps", "192", "--n-seeds", "2"]
    assert main([*arguments, "--run-dir", str(tmp_path / "more"), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, "n_seeds", "2", "3")
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["total_timesteps", "96"]),
        (["--total-timesteps", "192", "--net-arch", "16"], ["agents", "params"]),
        (["--total-timesteps", "192", "--n-steps", "16"], ["n_steps", "16", "8"]),
        (["--total-timesteps", "960", "--n-steps", "16"], ["n_steps", "16", "8"]),
        (["--reset-num-timesteps", "--net-arch", "16"], ["agents", "params"]),
    ],
)
def test_what_cannot_go_on_gets_one_line_and_no_folder(arguments, words, run, tmp_path, capsys):
    arguments = ["--resume", str(run), *arguments, "--run-dir", str(tmp_path / "more"), UNCACHED]
    assert main(arguments) == 2
    assert_one_line(capsys.readouterr().err, *words)
    assert not (tmp_path / "more").exists()


def test_verbose_0_prints_nothing_and_a_device_can_be_chosen(tmp_path, capfd):
    quiet = ["--verbose", "0", "--device", "cpu"]
    try:
        assert main([*SMALL, "--run-dir", str(tmp_path / "run"), *quiet]) == 0
    finally:
        jax.config.update("jax_default_device", None)
    assert capfd.readouterr() == ("", "")
    if jax.default_backend() == "cpu":
        assert main([*SMALL, "--device", "tpu"]) == 2
        assert_one_line(capfd.readouterr().err, "device: 'tpu'", "cpu")


def test_verbose_1_shows_progress_unless_told_not_to(tmp_path, capsys):
    """As in a log file, also where a notebook's packages were imported by something else."""
    pytest.importorskip("ipykernel")
    pytest.importorskip("IPython")
    for name, flag in (("with", "--progress-bar"), ("without", "--no-progress-bar")):
        assert main([*SMALL, "--run-dir", str(tmp_path / name), flag]) == 0
        out, error = capsys.readouterr()
        assert "mean of 3" in out and f"--eval {tmp_path / name}" in out
        assert ("of 288" in out + error) == (name == "with")


# ------------------------------------------------------------------------------ what is not finite

DIVERGED = re.compile(r"seed (\d+) +diverged")


SPOILT = PPOConfig(**SIZES | dict(env=Bare(step=spoiling(11), max_steps=12), normalize_obs=True))


def test_agents_that_all_diverged_end_in_exit_code_3(tmp_path, capsys):
    """A reward that is NaN once an episode, in the second update, in every environment."""
    run_dir = tmp_path / "run"
    assert run_training(alone(SPOILT), RunOptions(n_seeds=2, run_dir=str(run_dir))) == 3
    out, error = capsys.readouterr()
    assert "all agents diverged" in error and "Traceback" not in error
    for agent in (0, 1):
        said = f"agent {agent} (setting 0) diverged at step 64: reward not finite"
        assert error.count(said) == 1, error
    assert len(DIVERGED.findall(out)) == 2 and "no episode ended" not in out
    assert [float(row["length"]) for row in read_rows(run_dir)][2:] == [12.0] * 4
    for row in read_rows(run_dir, "agents.csv"):
        assert float(row["diverged_at"]) == 64 and row["diverged_in"] == "reward"
    _, agents = load_agents(run_dir, SPOILT)
    assert is_whole(agents.params) and agents.n_updates.tolist() == [3, 3]


def test_a_good_checkpoint_stays_when_all_agents_diverge(tmp_path):
    """The first of them is written after the second chunk at the earliest; they diverge later."""
    config = SPOILT.replace(env=Bare(step=spoiling(35), max_steps=36), total_timesteps=160)
    options = dict(n_seeds=2, run_dir=str(tmp_path / "run"), verbose=0)
    assert run_training(alone(config), RunOptions(**options, checkpoint_seconds=1e-9)) == 3
    _, agents = load_agents(tmp_path / "run", config)
    assert agents.n_updates.tolist() in ([2, 2], [3, 3], [4, 4])
    assert not agents.failing_since.any() and is_whole(agents.params)


def test_one_agent_that_diverged_spoils_nothing_of_the_others(tmp_path, capsys):
    """They are of one setting, as those of a population that evolves are."""
    settings = []
    for rate in (1e-3, 1e38, 1e-3):
        settings.append(({"learning_rate": rate}, CONFIG.replace(learning_rate=rate)))
    evolve = dict(evolve=("learning_rate",), evolve_every=100)  # which is never, then
    options = RunOptions(n_seeds=1, run_dir=str(tmp_path / "run"), **evolve)
    assert run_training(settings, options) == 0
    out, error = capsys.readouterr()
    assert DIVERGED.findall(out) == ["1"] and "mean of 2" in out
    assert error.count("diverged") == 1 and "agent 1 (setting 0) diverged at step" in error
    others = [row for row in read_rows(tmp_path / "run") if row["seed"] != "1"]
    assert len(others) == 6 and all(np.isfinite(float(row["value_loss"])) for row in others)
    assert is_whole(load_agents(tmp_path / "run")[1].params)
    assert main(["--eval", str(tmp_path / "run"), "--n-episodes", "2", UNCACHED]) == 0
    out = capsys.readouterr().out
    assert DIVERGED.findall(out) == ["1"] and "mean of 2" in out


# ------------------------------------------------------------------------------------------ signals


def wait_for(process, there, seconds=200):
    """Wait until something is there, or the process or the time is over; returns whether it is."""
    deadline = time.monotonic() + seconds
    while not there() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return there()


LONG = [*SMALL[:-1], "--total-timesteps", "1e9", "--log-interval", "1"]


def assert_saved_at_its_last_row(run_dir):
    """Assert that a run left its agents as they were at the last row of its metrics."""
    config, agents = load_agents(run_dir)
    assert config == CONFIG.replace(total_timesteps=10**9)
    n_updates = int(agents.n_updates[0])
    table = [(int(row["timesteps"]), int(row["seed"])) for row in read_rows(run_dir)]
    assert table == [(32 * n, seed) for n in range(1, n_updates + 1) for seed in range(3)]


def test_ctrl_c_saves_what_was_learnt(tmp_path, cache):
    process = start(*LONG, "--run-dir", "run", folder=tmp_path, **cache)
    assert wait_for(process, (tmp_path / "run" / "metrics.csv").exists)
    process.send_signal(signal.SIGINT)
    code, out, error = finish(process, timeout=100)
    assert code == 130, error
    assert "Traceback" not in error and "--eval run" in out
    assert_saved_at_its_last_row(tmp_path / "run")
    assert (tmp_path / "run" / "learning_curve.png").exists()
    assert list((pathlib.Path(cache["XDG_CACHE_HOME"]) / "ppo_jax").iterdir())


def test_ctrl_c_before_the_first_row_of_metrics_saves_what_was_learnt(tmp_path, cache):
    """A run this long has one in a thousand updates."""
    process = start(*LONG[:-2], "--run-dir", "run", folder=tmp_path, **cache)
    assert wait_for(process, (tmp_path / "run" / "metrics.csv").exists)
    process.send_signal(signal.SIGINT)
    code, out, error = finish(process, timeout=100)
    assert code == 130, error
    assert "Traceback" not in error and "to go on" in out
    n_updates = load_agents(tmp_path / "run")[1].n_updates
    assert n_updates.tolist() == [n_updates[0]] * 3 and n_updates[0] > 0


def test_a_second_ctrl_c_ends_at_once(tmp_path, cache):
    """Signals that arrive while the first waits are one to the system, so there are many here."""
    process = start(*LONG, "--run-dir", "run", folder=tmp_path, **cache)
    assert wait_for(process, (tmp_path / "run" / "metrics.csv").exists)
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() < begin + 60:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    code, _, error = finish(process)
    assert code == -signal.SIGINT, error
    assert "Traceback" not in error
    if (tmp_path / "run" / "checkpoint").exists():  # it ended just before it would have anyway
        load_agents(tmp_path / "run")
    else:
        with pytest.raises(ConfigError, match=r"checkpoint: .*config.json"):
            load_agents(tmp_path / "run")


def test_sigterm_saves_too_and_a_log_file_gets_lines_meanwhile(tmp_path, cache):
    """As a batch job: the output goes to a file and nobody asks for it to be unbuffered."""
    log, path = tmp_path / "log", os.environ | cache
    command = [sys.executable, PROGRAM, *LONG, "--run-dir", tmp_path / "run"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=path, stdout=file, stderr=file, cwd=tmp_path)
    try:
        told = wait_for(process, lambda: "return" in log.read_text(errors="replace"), 60)
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 143
    text = log.read_text()
    assert told and "Traceback" not in text
    lines = [line for line in text.splitlines() if " of " in line and "return" in line]
    assert lines and "\r" not in text, text
    assert_saved_at_its_last_row(tmp_path / "run")


@pytest.mark.parametrize("shown", [True, False])
def test_an_interrupted_run_says_at_which_step_it_is(shown, tmp_path):
    code = f"""
import os, signal, sys, ppo_jax, runs
options = ppo_jax.RunOptions(n_seeds=3, run_dir="run", progress_bar={shown})
stop = lambda *now: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(ppo_jax.run_training(runs.alone(runs.CONFIG), options, stop))
"""
    code, out, error = finish(start(folder=tmp_path, code=code), timeout=100)
    assert code == 143, error
    assert "interrupted at 96 of 288 steps; to go on:" in out  # 32 steps of each of three agents


def test_ctrl_c_before_the_first_update_leaves_no_folder_or_a_whole_one(tmp_path):
    process = start(*SMALL, "--run-dir", "run", folder=tmp_path)
    assert wait_for(process, (tmp_path / "run" / "config.json").exists)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, _, error = finish(process, timeout=100)
    assert code == 130
    assert "Traceback" not in error
    if (tmp_path / "run").exists():
        load_agents(tmp_path / "run")
    else:
        assert error.endswith("ppo_jax: interrupted\n")


# ----------------------------------------------------------------------------- pipes and terminals


def run_in_bash(arguments, ending, folder, cache):
    """Run the program with an ending to its command; returns the lines on the other streams."""
    words = " ".join(map(str, [sys.executable, PROGRAM, *arguments, ending]))
    command = ["bash", "-c", words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | cache, capture_output=True, text=True, timeout=200
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("ending", ["| true", "2>&1 | true", ">&-", "2>&-"])
def test_a_closed_pipe_loses_nothing(ending, tmp_path, cache):
    """Nor does a stream that is closed from the start."""
    printed = run_in_bash([*SMALL[:-1], "--run-dir", "run"], ending, tmp_path, cache)
    assert "Traceback" not in printed and "Error" not in printed
    assert load_agents(tmp_path / "run")[1].n_updates.tolist() == [3, 3, 3]
    assert len(read_rows(tmp_path / "run")) == 9
    assert (tmp_path / "run" / "learning_curve.png").exists()


def test_help_into_a_closed_pipe_is_silent(tmp_path, cache):
    assert run_in_bash(["--help"], "| true", tmp_path, cache) == ""


def test_a_terminal_that_knows_ascii_alone_gets_it(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    streams = {}
    for name in ("stdout", "stderr"):
        streams[name] = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
        monkeypatch.setattr(sys, name, streams[name])
    assert main([*SMALL, "--run-name", "übung"]) == 0
    assert main(["--eval", "ü", UNCACHED]) == 2
    with pytest.raises(SystemExit):
        main(["--help"])
    out, error = (stream.buffer.getvalue().decode("ascii") for stream in streams.values())
    assert "runs/?bung" in out and "seed 2" in out and "--n-seeds" in out
    assert "checkpoint" in error
    assert load_agents("runs/übung")[0] == CONFIG


def test_a_process_without_a_home_runs(tmp_path):
    """Neither HOME nor an entry in the table of users, as in a container; and ASCII alone."""
    code = """
import pwd, sys
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
import ppo_jax
sys.exit(ppo_jax.main(sys.argv[1:]))
"""
    nowhere = {"HOME": None, "XDG_CACHE_HOME": None, "MPLCONFIGDIR": str(tmp_path / "mpl")}
    arguments = [*SMALL[:-1], "--run-name", "ü"]
    process = start(*arguments, folder=tmp_path, code=code, PYTHONIOENCODING="ascii", **nowhere)
    code, out, error = finish(process)
    assert code == 0, error
    assert "runs/?" in out and load_agents(tmp_path / "runs" / "ü")[0] == CONFIG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpl", "runs"]


def test_a_run_in_a_thread_ends_well(tmp_path):
    """As servers and tuners do, where no signal arrives."""
    codes = []

    def work():
        options = RunOptions(n_seeds=3, seed=5, run_dir=str(tmp_path / "run"), verbose=0)
        codes.append(run_training(alone(CONFIG), options))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]
    assert load_agents(tmp_path / "run")[1].n_updates.tolist() == [3] * 3


def test_the_handlers_of_signals_come_back(tmp_path):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    seen = []

    def look(steps, metrics, agents):
        seen.append(signal.getsignal(signal.SIGTERM))

    try:
        options = RunOptions(n_seeds=3, run_dir=str(tmp_path / "run"), verbose=0)
        assert run_training(alone(CONFIG), options, look) == 0
        assert seen and mine not in seen and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---------------------------------------------------------------------------------- a plain import

IMPORT = """
import json, sys
import jax
from jax._src import xla_bridge

HEAVY = ("tyro", "orbax", "tqdm", "matplotlib", "seaborn", "scipy", "gymnax", "pandas")
for name in HEAVY:
    sys.modules[name] = None  # so that importing it fails
known = dict(jax.config.values)
import ppo_jax

report = {"changed": [name for name in known if known[name] != jax.config.values[name]]}
report["started"] = xla_bridge.backends_are_initialized()
report["imported"] = [name for name in HEAVY if sys.modules[name] is not None]
report["added"] = [name for name in sys.modules if name.startswith(HEAVY) and "." in name]
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
report["processes"] = jax.process_count()

for name in ("matplotlib", "seaborn", "scipy", "gymnax", "pandas"):
    del sys.modules[name]  # which gymnax and jax import
for name in ("wandb", "tensorboardX"):
    sys.modules[name] = None
config = ppo_jax.PPOConfig(n_envs=2, n_steps=4, total_timesteps=8, n_epochs=1, net_arch=())
_, metrics = jax.jit(ppo_jax.train)(config, jax.random.key(0))
report["timesteps"] = metrics["timesteps"].tolist()
report["drawing"] = [name for name in ("pandas", "IPython") if name in sys.modules]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What a process found that imported the file and then trained."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start(port, folder=tmp_path_factory.mktemp("import"), code=IMPORT)
    code, out, error = finish(process)
    assert code == 0, error
    return json.loads(out.splitlines()[-1])


def test_importing_the_file_does_nothing(imported):
    """No backend starts and no setting of JAX's changes; nothing heavy is even looked for."""
    assert imported["changed"] == [] and not imported["started"]
    assert imported["imported"] == [] and imported["added"] == []


def test_several_hosts_can_be_joined_after_the_import(imported):
    assert imported["processes"] == 1


def test_training_works_without_what_the_command_line_needs(imported):
    """jax, flax, optax, gymnax, chex and what they need are enough to import and to train."""
    assert imported["timesteps"] == [8]
    assert imported["drawing"] == []
