"""What becomes of runs that are killed, interrupted, started again, or short of rights."""

import random
import shlex
import shutil
import signal
import time

import pytest
from runs import (
    PROGRAM,
    SMALL,
    UNCACHED,
    assert_one_line,
    assert_same_agents,
    finish,
    flags,
    read_rows,
    start,
)

from ppo_jax import load_agents, main

N_KILLS = 3
# Two programs, what is carried from update to update at its largest, about five seconds of each.
SWEEP = dict(env="Pendulum-v1", policy="lstm", rnn_hidden_size=(4, 8), sub_traj_len=4)
SWEEP |= dict(normalize_obs=True, normalize_reward=True, learning_rate="linear_1e-3")
SWEEP |= dict(n_envs=4, n_steps=8, n_epochs=1, net_arch=(8,), n_seeds=2, seed=5)
SWEEP |= dict(total_timesteps=32 * 2000 * max(4, N_KILLS), checkpoint_seconds=0.3)
LONG = [*SMALL[:-1], "--total-timesteps", "1e9", "--log-interval", "1"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What lets the processes of these tests share what they compile."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The folder of a sweep that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, error = finish(start(*flags(SWEEP), "--run-dir", "run", folder=folder, **cache))
    assert code == 0, error
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three seeds and three updates, which is finished."""
    run_dir = tmp_path_factory.mktemp("run") / "three"
    assert main([*SMALL, "--run-dir", str(run_dir)]) == 0
    return run_dir


def assert_same_results(ours, theirs):
    """Assert that two sweeps of two programs left the same agents and tables, to the last bit."""
    for program in ("program-0", "program-1"):
        assert_same_agents(load_agents(ours / program)[1], load_agents(theirs / program)[1])
    for name in ("metrics.csv", "agents.csv"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def stamp(path):
    """Return what tells whether a file was written, or there at all."""
    return path.stat().st_mtime_ns if path.exists() else None


def wait_for(process, there, seconds=200):
    """Wait until something is there, or the process or the time is over; returns whether it is."""
    deadline = time.monotonic() + seconds
    while not there() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return there()


def begin(*arguments, folder, cache):
    """Start a run in the folder `run` of a folder and wait until it has gone on; returns it."""
    table = folder / "run" / "metrics.csv"
    before = stamp(table)
    process = start(*arguments, "--run-dir", "run", folder=folder, **cache)
    wait_for(process, lambda: stamp(table) != before)
    return process


def end(process, number=signal.SIGKILL):
    """Send a signal to a process; returns its exit code and what it printed on both streams."""
    process.send_signal(number)
    return finish(process, timeout=100)


# ------------------------------------------------------------------------------------------- kills


def test_a_run_killed_at_any_moment_and_started_again_ends_like_one_never_killed(
    whole, tmp_path, cache
):
    """The moments: while it begins, reads its checkpoint, trains, and saves every 0.3 seconds."""
    draw = random.Random(0)
    n_hit = 0
    for count in range(N_KILLS):
        if count % 4 == 3:  # also while Python and JAX start
            process = start(*flags(SWEEP), "--run-dir", "run", folder=tmp_path, **cache)
            time.sleep(draw.uniform(0, 3))
        else:
            process = begin(*flags(SWEEP), folder=tmp_path, cache=cache)
            time.sleep(draw.uniform(0, 2.5))
        code, _, error = end(process)
        assert code in (0, -signal.SIGKILL), error
        n_hit += code == -signal.SIGKILL
    code, _, error = finish(start(*flags(SWEEP), "--run-dir", "run", folder=tmp_path, **cache))
    assert code == 0, error
    print(f"{n_hit} of {N_KILLS} kills hit")
    assert n_hit > N_KILLS / 2, "the run was over before most of the kills"
    assert_same_results(tmp_path / "run", whole)


def test_a_run_killed_while_it_writes_its_first_checkpoint_begins_again(run, tmp_path, capsys):
    """Orbax leaves a folder without a checkpoint in it, but for what it calls temporary."""
    again = tmp_path / "again"
    half = again / "checkpoint" / "1.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    shutil.copy(run / "config.json", again)
    shutil.copy(run / "metrics.csv", again)
    assert main([*SMALL, "--run-dir", str(again)]) == 0, capsys.readouterr().err
    assert_same_agents(load_agents(again)[1], load_agents(run)[1])
    assert (again / "metrics.csv").read_bytes() == (run / "metrics.csv").read_bytes()


def test_a_first_checkpoint_is_there_after_ten_seconds_of_training(tmp_path, cache):
    process = begin(*LONG, folder=tmp_path, cache=cache)
    trained = time.monotonic()
    is_saved = wait_for(process, (tmp_path / "run" / "checkpoint" / "1").exists, seconds=20)
    seconds = time.monotonic() - trained
    end(process)
    assert is_saved and seconds < 10
    assert load_agents(tmp_path / "run")[1].n_updates[0] > 0


# ----------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("program", [0, 1])
def test_sigterm_saves_at_once_and_the_printed_command_goes_on(program, whole, tmp_path, cache):
    """In a sweep, while it trains the first program or the second."""
    process = begin(*flags(SWEEP), folder=tmp_path, cache=cache)
    checkpoint = tmp_path / "run" / f"program-{program}" / "checkpoint"
    assert wait_for(process, lambda: checkpoint.exists() and any(checkpoint.iterdir()))
    sent = time.monotonic()
    code, out, error = end(process, signal.SIGTERM)
    assert code == 143 and time.monotonic() - sent < 10, error
    assert "Traceback" not in error and "interrupted at" in out
    n_rows = len(read_rows(tmp_path / "run"))
    assert 2 * 1000 < n_rows < len(read_rows(whole))
    [command] = [
        line for line in out.splitlines() if line.startswith("python ") and "--eval" not in line
    ]
    command = shlex.split(command)
    assert command[:2] == ["python", PROGRAM.name]
    code, out, error = finish(start(*command[2:], folder=tmp_path, **cache))
    assert code == 0 and "interrupted" not in out, error
    assert_same_results(tmp_path / "run", whole)


# ----------------------------------------------------------------------------------------- refusals


def contents(folder):
    """Return what is in a folder, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_says_so_and_stays_as_it_is(run, capsys):
    before = contents(run)
    assert main([*SMALL, "--run-dir", str(run)]) == 0
    out, error = capsys.readouterr()
    assert "finished already" in out and "seed 2" in out
    assert "error" not in error
    after = contents(run)
    assert before.keys() == after.keys()
    for path in before:
        assert before[path] == after[path] or path.suffix == ".png", path


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--gamma", "0.9", "--n-epochs", "2"], ["n_epochs: 2", "must be 1", "run_dir"]),
        (["--net-arch", "8", "--seed", "6"], ["seed: 6", "must be 5", "run_dir"]),
        (["--n-envs", "4", "8"], ["n_envs: [4, 8]", "must be 4", "run_dir"]),
        (["--n-seeds", "2"], ["n_seeds: 2", "must be 3", "run_dir"]),
    ],
)
def test_the_folder_of_a_run_with_other_settings_is_refused_with_the_first(
    arguments, words, run, capsys
):
    before = contents(run)
    assert main([*SMALL, *arguments, "--run-dir", str(run)]) == 2
    assert_one_line(capsys.readouterr().err, str(run), *words)
    assert contents(run) == before


@pytest.mark.parametrize(
    "arguments, words",
    [(["--n-steps", "16"], ["n_steps", "16", "8"]), (["--n-envs", "8"], ["n_envs", "8", "4"])],
)
def test_agents_whose_steps_were_counted_otherwise_cannot_go_on(
    arguments, words, run, tmp_path, capsys
):
    more = ["--resume", str(run), "--total-timesteps", "9600", *arguments]
    assert main([*more, "--run-dir", str(tmp_path / "more"), UNCACHED]) == 2
    assert_one_line(capsys.readouterr().err, *words)
    assert not (tmp_path / "more").exists()


def test_a_second_process_in_the_folder_is_refused_while_the_first_trains(tmp_path, cache):
    folder = tmp_path / "run"
    process = begin(*LONG, folder=tmp_path, cache=cache)
    described = (folder / "config.json").read_bytes()
    try:
        second = start(*LONG, "--run-dir", "run", folder=tmp_path, **cache)
        wait_for(second, lambda: False, seconds=30)
        code, _, error = end(second)
        assert code == 2, error
        assert_one_line(error, "run_dir", "run", "process")
        size = (folder / "metrics.csv").stat().st_size
        assert wait_for(process, lambda: (folder / "metrics.csv").stat().st_size > size)
    finally:
        code, _, error = end(process, signal.SIGTERM)
    assert code == 143, error
    assert (folder / "config.json").read_bytes() == described
    n_updates = load_agents(folder)[1].n_updates
    assert [int(row["timesteps"]) for row in read_rows(folder)][-1] == 32 * n_updates[0]
    process = begin(*LONG, folder=tmp_path, cache=cache)  # now it is free
    assert end(process, signal.SIGTERM)[0] == 143
    assert load_agents(folder)[1].n_updates[0] >= n_updates[0]


# ------------------------------------------------------------------------------ short of everything

CONFINED = """
import ctypes, os, pwd, struct, sys
if os.geteuid() == 0:  # who may write everywhere, but for this
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    assert ctypes.CDLL(None).capset(header, none) == 0
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
try:
    open("probe", "w")
except PermissionError:
    import ppo_jax
    sys.exit(ppo_jax.main(sys.argv[1:]))
sys.exit("the folder can be written")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has other rights")
@pytest.mark.parametrize("home", [None, "."])
def test_a_run_needs_no_home_and_no_folder_to_write_but_its_own(home, tmp_path):
    """The home: none at all, as in a container, or one that is read-only too."""
    folder = tmp_path / "work"
    (folder / "run").mkdir(parents=True)
    folder.chmod(0o555)
    try:
        nowhere = {"HOME": home and str(folder), "XDG_CACHE_HOME": None, "MPLCONFIGDIR": None}
        arguments = [*SMALL[:-1], "--run-dir", "run"]
        process = start(*arguments, folder=folder, code=CONFINED, **nowhere)
        code, out, error = finish(process)
    finally:
        folder.chmod(0o755)
    assert code == 0, error
    assert "Traceback" not in error and "--eval run" in out
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert load_agents(folder / "run")[1].n_updates.tolist() == [3, 3, 3]
    assert len(read_rows(folder / "run")) == 9
    assert (folder / "run" / "learning_curve.png").exists()
