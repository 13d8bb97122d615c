"""The algorithm's parts against their definitions, written out in plain NumPy and Python."""

import functools
import types

import flax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import CartPole
from gymnax.environments.classic_control.cartpole import EnvState as CartPoleState
from gymnax.environments.environment import Environment
from scipy import special, stats

import ppo_jax
from ppo_jax import Batch, Categorical, DiagonalGaussian, PPOConfig, Rollout

# What these tests cost is compiling, not running.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class OwnStepCartPole(CartPole):
    """An environment with a step of its own, as wrappers have."""

    def step(self, key, state, action, params=None):
        return super().step(key, state, action, params)


@flax.struct.dataclass
class LoopState:
    time: jax.Array
    terminates: jax.Array


class Loop(Environment):
    """Reward 1 at every step for ever: cut after 5 steps or, with the flag that it shows, ended by them."""

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        terminated = state.terminates & (state.time >= 5)
        return self.show(state), state, jnp.float32(1.0), terminated, {}

    def reset_env(self, key, params):
        state = LoopState(jnp.int32(0), jax.random.bernoulli(key))
        return self.show(state), state

    def show(self, state):
        return jax.nn.one_hot(state.terminates.astype(int), 2)

    def is_truncated(self, state, params):
        return state.time >= 5

    def action_space(self, params):
        return spaces.Discrete(2)

    def observation_space(self, params):
        return spaces.Box(0.0, 1.0, (2,), jnp.float32)


def gae_by_definition(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """A_t as the sum over k >= t of (gamma * lambda)^(k - t) * delta_k, up to the end of the episode."""
    reward, value, next_value = (np.asarray(x, np.float64) for x in (reward, value, next_value))
    terminated, done = np.asarray(terminated), np.asarray(terminated) | np.asarray(truncated)
    delta = reward + gamma * (1.0 - terminated) * next_value - value
    advantage = np.zeros_like(delta)
    for place in np.ndindex(delta.shape[1:]):
        for t in range(len(delta)):
            for k in range(t, len(delta)):
                advantage[t, *place] += (gamma * gae_lambda) ** (k - t) * delta[k, *place]
                if done[k, *place]:
                    break
    return advantage


@pytest.mark.parametrize("shape", [(1, 1), (17, 3), (6, 2, 2)])
def test_gae_is_the_sum_of_its_definition(shape):
    compute = jit(ppo_jax.compute_gae)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        reward, value, next_value = rng.normal(size=(3, *shape)).astype(np.float32)
        terminated, truncated = rng.random((2, *shape)) < rng.choice([0.0, 0.1, 0.5, 1.0], size=(2, *[1] * len(shape)))
        gamma, gae_lambda = rng.choice([0.0, 0.5, 0.97, 1.0], size=2)
        given = reward, value, next_value, terminated, truncated, gamma, gae_lambda
        advantage, target = compute(*given)
        np.testing.assert_allclose(advantage, gae_by_definition(*given), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(target, gae_by_definition(*given) + value, rtol=1e-5, atol=1e-5)


def test_batch_bootstraps_every_time_limit_also_in_the_last_row():
    """What a row leads to is the next row's observation, the final one at a time limit, the agent's after the last."""
    config = PPOConfig("CartPole-v1", n_envs=3, n_steps=5, gamma=0.9, gae_lambda=0.8)
    rng, network = np.random.default_rng(0), ppo_jax.make_network(config)
    obs, final_obs = rng.normal(size=(2, 5, 3, 4)).astype(np.float32)
    last_obs, reward = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    action = rng.integers(2, size=(5, 3))
    truncated, terminated = np.zeros((2, 5, 3), bool)
    truncated[[1, 4], [0, 1]] = terminated[[2, 4], [1, 2]] = True

    def run(config, rollout, last_obs):
        params = ppo_jax.init_agent(config, jax.random.key(0)).params
        agent = jax.eval_shape(ppo_jax.init_agent, config, jax.random.key(0)).replace(params=params, obs=last_obs)
        distribution, value = network.apply(params, jnp.concatenate([rollout.obs, last_obs[None]]))
        final_value = network.apply(params, rollout.final_obs)[1]
        return ppo_jax.make_batch(config, agent, rollout), distribution.logits, value, final_value

    rollout = Rollout(obs, action, reward, terminated, truncated, final_obs)
    batch, logits, value, final_value = jit(run)(config, jax.tree.map(jnp.asarray, rollout), last_obs)
    next_value = np.where(truncated, final_value, value[1:])
    advantage = gae_by_definition(reward, value[:-1], next_value, terminated, truncated, 0.9, 0.8)
    log_prob = np.take_along_axis(special.log_softmax(logits[:-1], axis=-1), action[..., None], -1)[..., 0]
    expected = Batch(obs, action, log_prob, value[:-1], advantage, advantage + value[:-1])
    for name, ours, theirs in zip(Batch._fields[:6], batch, expected):
        np.testing.assert_allclose(ours, np.reshape(theirs, ours.shape), rtol=1e-5, atol=1e-5, err_msg=name)


def test_rollout_pairs_what_was_seen_with_what_was_done_and_came_of_it():
    """A policy so sharp that it always takes its mode, in an environment without chance, has to repeat each row."""
    config = PPOConfig("CartPole-v1", n_envs=8, n_steps=48)
    env, env_params = gymnax.make("CartPole-v1")

    def again(obs, action):
        state = CartPoleState(time=0, x=obs[0], x_dot=obs[1], theta=obs[2], theta_dot=obs[3])
        return env.step_env(jax.random.key(0), state, action, env_params)

    def run(config, key):
        agent = ppo_jax.init_agent(config, key)
        params = flax.traverse_util.flatten_dict(agent.params)
        params["params", "policy_out", "kernel"] *= 1e7
        agent = agent.replace(params=flax.traverse_util.unflatten_dict(params))
        moved, rollout = ppo_jax.collect_rollout(config, agent, key)
        mode = ppo_jax.make_network(config).apply(agent.params, rollout.obs)[0].mode()
        return agent.obs, moved, rollout, mode, jax.vmap(jax.vmap(again))(rollout.obs, rollout.action)

    first_obs, moved, rollout, mode, (led_to, _, reward, terminated, _) = jit(run)(config, jax.random.key(3))
    assert 0.2 < np.mean(mode) < 0.8 and 0 < np.mean(terminated) < 0.2
    np.testing.assert_array_equal(rollout.action, mode)
    np.testing.assert_allclose(rollout.final_obs, led_to, atol=1e-6)
    np.testing.assert_array_equal(rollout.reward, reward)
    np.testing.assert_array_equal(rollout.terminated, terminated)
    assert not np.any(rollout.truncated)
    np.testing.assert_array_equal(rollout.obs[0], first_obs)
    shown = np.concatenate([rollout.obs[1:], moved.obs[None]])
    np.testing.assert_array_equal(shown[~terminated], rollout.final_obs[~terminated])
    assert np.abs(shown[terminated]).max() <= 0.05
    np.testing.assert_array_equal(moved.obs[:, 0], moved.env_states.x)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "FrozenLake-misc"])
def test_ratio_is_one_in_the_first_minibatch(env):
    """Matrix products with other row counts may differ in the last bits of float32: 1e-7 has been seen."""
    config = PPOConfig(env, n_envs=8, n_steps=16, batch_size=32, log_std_init=1.0)

    def run(config, key):
        agent_key, rollout_key, shuffle_key = jax.random.split(key, 3)
        agent, rollout = ppo_jax.collect_rollout(config, ppo_jax.init_agent(config, agent_key), rollout_key)
        batch = ppo_jax.make_batch(config, agent, rollout)
        minibatch = jax.tree.map(lambda x: x[ppo_jax.shuffle(shuffle_key, jnp.arange(32), 128)], batch)
        network = ppo_jax.make_network(config)
        ratio = jnp.exp(network.apply(agent.params, minibatch.obs)[0].log_prob(minibatch.action) - minibatch.log_prob)
        report = ppo_jax.ppo_loss(agent.params, config, network, minibatch)[1]
        return ratio, report, rollout.action

    ratio, report, action = jit(run)(config, jax.random.key(0))
    np.testing.assert_allclose(ratio, np.ones(32), atol=1e-6)
    assert abs(report["approx_kl"]) < 1e-6 and report["clip_fraction"] == 0
    # A Gaussian's actions are kept as drawn, beyond Pendulum's bounds of 2; only its environment sees them clipped.
    assert env != "Pendulum-v1" or np.abs(action).max() > 3


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("clip_range_vf", [None, 0.3])
def test_loss_by_hand(kind, normalize, clip_range_vf):
    rng = np.random.default_rng(1)
    obs, weights = rng.normal(size=(12, 3)), rng.normal(size=(3, 4))
    output, value = obs @ weights, obs @ np.array([0.5, -1.0, 2.0])
    if kind == "categorical":
        action, log_p = rng.integers(4, size=12), special.log_softmax(output, axis=-1)
        log_prob, entropy = log_p[np.arange(12), action], stats.entropy(np.exp(log_p), axis=-1).mean()
        policy = Categorical
    else:
        log_std = np.array([0.1, -0.2, 0.3, 0.0])
        action = output + rng.normal(size=output.shape)
        log_prob = stats.norm.logpdf(action, output, np.exp(log_std)).sum(-1)
        entropy = stats.norm.entropy(0, np.exp(log_std)).sum()
        policy = lambda mean: DiagonalGaussian(mean, jnp.asarray(log_std, jnp.float32))  # noqa: E731
    old_log_prob, old_value = log_prob + rng.normal(scale=0.4, size=12), value + rng.normal(scale=0.5, size=12)
    advantage, target = rng.normal(1.0, 2.0, size=12), rng.normal(size=12)

    ratio, used = np.exp(log_prob - old_log_prob), advantage
    if normalize:
        used = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    policy_loss = -np.minimum(ratio * used, np.clip(ratio, 0.8, 1.2) * used).mean()
    clipped = value if clip_range_vf is None else np.clip(value, old_value - 0.3, old_value + 0.3)
    expected = {
        "policy_loss": policy_loss,
        "value_loss": np.square(target - clipped).mean(),
        "entropy": entropy,
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "clip_fraction": (np.abs(ratio - 1) > 0.2).mean(),
    }
    assert 0 < expected["clip_fraction"] < 1
    total = policy_loss + 0.7 * expected["value_loss"] - 0.05 * entropy

    apply = lambda params, obs: (policy(obs @ params["policy"]), obs @ params["value"])  # noqa: E731
    params = {"policy": jnp.asarray(weights, jnp.float32), "value": jnp.array([0.5, -1.0, 2.0])}
    batch = Batch(
        *(
            jnp.asarray(x, jnp.int32 if x.dtype == int else jnp.float32)
            for x in (obs, action, old_log_prob, old_value, advantage, target)
        )
    )
    config = PPOConfig(vf_coef=0.7, ent_coef=0.05, normalize_advantage=normalize, clip_range_vf=clip_range_vf)
    loss, report = ppo_jax.ppo_loss(params, config, types.SimpleNamespace(apply=apply), batch)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert set(report) == set(expected)
    for name in expected:
        np.testing.assert_allclose(report[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_kl_stop_ends_each_agents_update_by_itself(monkeypatch):
    """Vmapped over limits, each agent has the weights of a plain loop up to the first minibatch beyond its limit."""
    monkeypatch.setattr(ppo_jax, "shuffle", lambda key, positions, size: positions)
    config = PPOConfig(n_envs=4, n_steps=16, batch_size=16, n_epochs=4)
    limits = jnp.array([1e-8, 0.0005, 0.002, 0.006, 1e3])
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    network, optimizer = ppo_jax.make_network(config), ppo_jax.make_optimizer(config.replace(learning_rate=0.002))
    rng = np.random.default_rng(2)
    obs, action = jnp.asarray(rng.normal(size=(64, 4)), jnp.float32), jnp.asarray(rng.integers(2, size=64))
    advantage, target = jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)

    @jit
    def act(params):
        distribution, value = network.apply(params, obs)
        return Batch(obs, action, distribution.log_prob(action), value, advantage, target)

    @jit
    def step(params, opt_state, minibatch):
        gradients, report = jax.grad(ppo_jax.ppo_loss, has_aux=True)(params, config, network, minibatch)
        changes, opt_state = optimizer.update(gradients, opt_state)
        return jax.tree.map(jnp.add, params, changes), opt_state, report["approx_kl"]

    batch, params, opt_state = act(agent.params), agent.params, agent.opt_state
    weights, divergence = [params], []
    for start in [0, 16, 32, 48] * 4:
        minibatch = jax.tree.map(lambda x: np.asarray(x)[start : start + 16], batch)  # noqa: B023
        params, opt_state, kl = step(params, opt_state, minibatch)
        weights.append(params)
        divergence.append(float(kl))

    def run(limit):
        return ppo_jax.optimise(config.replace(target_kl=limit, learning_rate=0.002), agent, batch, jax.random.key(0))

    agents, metrics = jit(jax.vmap(run))(limits)
    for row, limit in enumerate(limits):
        steps = next((step for step, kl in enumerate(divergence) if kl > 1.5 * limit), 16)
        assert metrics["optimizer_steps"][row] == steps
        ours = jax.tree.map(lambda x: x[row], agents.params)  # noqa: B023
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ours, weights[steps])
        # Of the last epoch, the minibatch that ended it included.
        seen = divergence[: steps + 1]
        last_epoch = seen[(len(seen) - 1) // 4 * 4 :]
        np.testing.assert_allclose(metrics["approx_kl"][row], np.mean(last_epoch), rtol=1e-3, atol=1e-6)
    steps = metrics["optimizer_steps"].tolist()
    assert len(set(steps)) == len(limits) and steps[0] == 1 and steps[-1] == 16, (steps, divergence)


@pytest.fixture(scope="module")
def loop_run():
    """A run whose total_timesteps is no multiple of its rollouts of 320."""
    changes = dict(net_arch=(16,), gamma=0.9, learning_rate="linear_0.01")
    config = PPOConfig(Loop(), total_timesteps=95_900, n_envs=16, n_steps=20, batch_size=80, n_epochs=3, **changes)
    return config, *jit(ppo_jax.train)(config, jax.random.key(0))


def test_time_limits_are_no_terminations(loop_run):
    """Cut after 5 steps but bootstrapped, the value of reward 1 for ever is 1 / (1 - gamma) = 10; ended, below 5.

    The next episode may be of the other kind, so bootstrapping from its first observation is wrong too.
    """
    config, agent, _ = loop_run
    goes_on, ends = ppo_jax.make_network(config).apply(agent.params, jnp.eye(2))[1]
    np.testing.assert_allclose(goes_on, 10.0, rtol=0.02)
    assert 1 < ends < 5


def test_metrics_of_a_run(loop_run):
    """A number for each update; the last rollout is completed; every minibatch of every epoch takes a step."""
    config, agent, metrics = loop_run
    assert config.n_updates == agent.n_updates == 300
    assert set(metrics) == set(ppo_jax.METRICS)
    assert all(values.shape == (300,) and np.all(np.isfinite(values)) for values in metrics.values())
    np.testing.assert_array_equal(metrics["timesteps"], 320 * np.arange(1, 301))
    np.testing.assert_array_equal(metrics["optimizer_steps"], np.full(300, 12))
    np.testing.assert_array_equal(metrics["return"], np.full(300, 5.0))
    np.testing.assert_array_equal(metrics["length"], np.full(300, 5.0))
    # The policy starts near uniform; a sum in place of a mean would show.
    np.testing.assert_allclose(metrics["entropy"][:5], np.full(5, np.log(2)), rtol=0.1)


@pytest.mark.parametrize("own_step", [False, True])
def test_steps_are_those_of_gymnax(own_step):
    """What gymnax's step_env gives, and where an episode ends a new one: its time 0, its observation a reset's."""
    env, env_params = OwnStepCartPole() if own_step else CartPole(), CartPole().default_params
    env_params = env_params.replace(max_steps_in_episode=12)
    n_envs, n_steps = 64, 40

    def step(carry, key):
        _, states = carry
        key, action_key, start_key = jax.random.split(key, 3)
        keys, start_keys = jax.random.split(key, n_envs), jax.random.split(start_key, n_envs)
        starts = ppo_jax.reset_envs(env, env_params, start_keys)
        action = jax.random.randint(action_key, (n_envs,), 0, 2)
        gymnaxs = jax.vmap(CartPole().step_env, (0, 0, 0, None))(keys, states, action, env_params)
        new = ppo_jax.step_envs(env, env_params, keys, states, action, starts)
        return (new.obs, new.states), (states.time, new, gymnaxs)

    def run(key):
        start = ppo_jax.reset_envs(env, env_params, jax.random.split(key, n_envs))
        return jax.lax.scan(step, start, jax.random.split(key, n_steps))[1]

    time, new, (obs, states, reward, terminated, _) = jit(run)(jax.random.key(0))
    np.testing.assert_array_equal(new.terminated, terminated)
    np.testing.assert_array_equal(new.truncated, (states.time >= 12) & ~terminated)
    done = new.terminated | new.truncated
    assert new.terminated.sum() > 20 and new.truncated.sum() > 20
    assert np.any(terminated & (states.time >= 12)), "no step ended by both"
    np.testing.assert_array_equal(new.reward, reward)
    np.testing.assert_allclose(new.final_obs, obs, atol=1e-6)
    np.testing.assert_array_equal(new.obs[~done], new.final_obs[~done])
    np.testing.assert_array_equal(new.states.time, np.where(done, 0, time + 1))
    shown = np.stack([new.states.x, new.states.x_dot, new.states.theta, new.states.theta_dot], axis=-1)
    np.testing.assert_array_equal(new.obs, shown)
    starts = np.asarray(new.obs[done])
    assert stats.kstest(starts.ravel(), stats.uniform(-0.05, 0.1).cdf).pvalue > 1e-4
    assert len(np.unique(starts[:, 0])) == len(starts), "two episodes began alike"


class Mirror(Loop):
    """The reward is the action, whose bounds nothing here looks at."""

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, action[0], terminated, info

    def action_space(self, params):
        return spaces.Box(-2.0, 1.0, (1,), jnp.float32)


def test_actions_reach_the_environment_within_its_bounds():
    env, keys = Mirror(), jax.random.split(jax.random.key(0), 4)
    starts = ppo_jax.reset_envs(env, env.default_params, keys)
    action = jnp.array([[-50.0], [-1.5], [0.5], [50.0]])
    new = ppo_jax.step_envs(env, env.default_params, keys, starts[1], action, starts)
    np.testing.assert_array_equal(new.reward, [-2.0, -1.5, 0.5, 1.0])


@pytest.mark.parametrize("chance", [0.02, 0.5])
def test_episode_statistics_are_those_of_a_plain_loop(chance):
    """Over several rollouts, with both fewer and more finished episodes than the window."""
    config = PPOConfig(n_envs=3, n_steps=10, stats_window_size=6)
    rng, agent = np.random.default_rng(3), jit(ppo_jax.init_agent)(config, jax.random.key(0))
    running, finished = [[0.0, 0] for _ in range(3)], []
    for _ in range(8):
        reward, ends = rng.normal(size=(10, 3)).astype(np.float32), rng.random((2, 10, 3)) < chance / 2
        agent = STATISTICS(config, agent, Rollout(None, None, reward, *ends, None))
        for t, place in np.ndindex(10, 3):
            running[place][0] += reward[t, place]
            running[place][1] += 1
            if ends[:, t, place].any():
                finished.append(running[place])
                running[place] = [0.0, 0]
        window = np.full((6, 2), np.nan)
        newest = finished[::-1][:6]
        window[: len(newest)] = np.reshape(newest, (-1, 2))
        np.testing.assert_allclose(agent.recent_returns, window[:, 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(agent.recent_lengths, window[:, 1])
        np.testing.assert_allclose(agent.episode_return, [total for total, _ in running], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(agent.episode_length, [length for _, length in running])
    assert (len(finished) < 6) == (chance < 0.1)


STATISTICS = jit(ppo_jax.episode_statistics)
