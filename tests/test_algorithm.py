"""The algorithm's parts against their definitions, written out in plain NumPy and Python."""

import types

import flax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Loop, display
from gymnax.environments import spaces
from gymnax.environments.classic_control.cartpole import EnvState as CartPoleState
from helpers import SMALL, VARIANTS, assert_same, jit, rollout_and_batch
from scipy import special, stats

import ppo_jax
from ppo_jax import Batch, Categorical, DiagonalGaussian, Output, PPOConfig, Rollout


def gae_by_definition(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """A_t as the sum over k >= t of (gamma * lambda)^(k - t) * delta_k, up to the episode's end."""
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
        chance = rng.choice([0.0, 0.1, 0.5, 1.0], size=(2, *[1] * len(shape)))
        terminated, truncated = rng.random((2, *shape)) < chance
        gamma, gae_lambda = rng.choice([0.0, 0.5, 0.97, 1.0], size=2)
        given = reward, value, next_value, terminated, truncated, gamma, gae_lambda
        advantage, target = compute(*given)
        expected = gae_by_definition(*given)
        np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(target, expected + value, rtol=1e-5, atol=1e-5)


def test_batch_bootstraps_every_time_limit_also_in_the_last_row():
    """What a row leads to is the next row's observation; at a time limit the final one; after the
    last row what the agent sees.
    """
    config = PPOConfig("CartPole-v1", n_envs=3, n_steps=5, gamma=0.9, gae_lambda=0.8)
    network = ppo_jax.make_network(config)
    rng = np.random.default_rng(0)
    obs, final_obs = rng.normal(size=(2, 5, 3, 4)).astype(np.float32)
    last_obs = rng.normal(size=(3, 4)).astype(np.float32)
    reward = rng.normal(size=(5, 3)).astype(np.float32)
    action = rng.integers(2, size=(5, 3))
    truncated, terminated = np.zeros((2, 5, 3), bool)
    truncated[[1, 4], [0, 1]] = terminated[[2, 4], [1, 2]] = True

    def run(config, rollout, last_obs):
        key = jax.random.key(0)
        params = ppo_jax.init_agent(config, key).params
        agent = jax.eval_shape(ppo_jax.init_agent, config, key)
        agent = agent.replace(params=params, obs=last_obs)
        shown = jnp.concatenate([rollout.obs, last_obs[None]])
        output = network.apply(params, shown)
        final_value = network.apply(params, rollout.final_obs).value
        batch = ppo_jax.make_batch(config, agent, rollout)
        return batch, output.distribution.logits, output.value, final_value

    rollout = Rollout(obs, action, reward, terminated, truncated, final_obs)
    given = jax.tree.map(jnp.asarray, rollout)
    batch, logits, value, final_value = jit(run)(config, given, last_obs)
    next_value = np.where(truncated, final_value, value[1:])
    advantage = gae_by_definition(reward, value[:-1], next_value, terminated, truncated, 0.9, 0.8)
    log_p = special.log_softmax(logits[:-1], axis=-1)
    log_prob = np.take_along_axis(log_p, action[..., None], -1)[..., 0]
    expected = Batch(obs, action, log_prob, value[:-1], advantage, advantage + value[:-1])
    for name, ours, theirs in zip(Batch._fields[:6], batch, expected):
        theirs = np.reshape(theirs, ours.shape)  # time first: t * N + n
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)


def test_rollout_pairs_what_was_seen_with_what_was_done_and_came_of_it():
    """A policy so sharp that it always takes its mode, in an environment without chance, has to
    repeat each row.
    """
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
        output = ppo_jax.make_network(config).apply(agent.params, rollout.obs)
        repeated = jax.vmap(jax.vmap(again))(rollout.obs, rollout.action)
        return agent.obs, moved, rollout, output.distribution.mode(), repeated

    first_obs, moved, rollout, mode, repeated = jit(run)(config, jax.random.key(3))
    led_to, _, reward, terminated, _ = repeated
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


NAMES = ("CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "FrozenLake-misc")
ENVIRONMENTS = {name: dict(env=name, log_std_init=1.0, net_arch=(64, 64)) for name in NAMES}


@pytest.mark.parametrize("name", ENVIRONMENTS | VARIANTS)
def test_ratio_is_one_in_the_first_minibatch(name):
    """And before it, between the policy that acted and the batch.

    Matrix products with other row counts may differ in the last bits of float32: 1e-7 has been
    seen. Densities of continuous actions have logarithms of some tens, held to a millionth.
    """
    config = PPOConfig(**SMALL | (ENVIRONMENTS | VARIANTS)[name])

    def run(config, key):
        agent, rollout, batch, _ = rollout_and_batch(config, key)
        taken = ppo_jax.draw_minibatches(config, key)[0, 0]
        minibatch = ppo_jax.take_sequences(batch, taken, config.sequence_length)
        network = ppo_jax.make_network(config)
        given = minibatch.obs, minibatch.memory, minibatch.is_first
        output = network.apply(agent.params, *given)
        log_ratio = output.distribution.log_prob(minibatch.action) - minibatch.log_prob
        report = ppo_jax.ppo_loss(agent.params, config, network, minibatch)[1]
        value_error = output.value - minibatch.value

        def acted_with(obs, memory, action):
            return ppo_jax.act(network, agent, obs, memory).distribution.log_prob(action)

        acted = jax.vmap(acted_with)(rollout.obs, rollout.memory, rollout.action)
        acted = ppo_jax.to_samples(acted, config.sequence_length)
        ratios = jnp.exp(log_ratio), jnp.exp(batch.log_prob - acted)
        return ratios, value_error, jnp.std(minibatch.value), report, rollout.action

    ratios, value_error, spread, report, action = jit(run)(config, jax.random.key(1))
    assert ratios[0].size == 32 and ratios[1].size == 128
    tolerance = 1e-6 if name in ENVIRONMENTS else 2e-6
    tolerance = 1e-5 if config.squash_output else tolerance
    np.testing.assert_allclose(np.concatenate([x.ravel() for x in ratios]), 1, atol=tolerance)
    np.testing.assert_allclose(value_error, 0, atol=1e-5)
    assert spread > 0
    assert abs(report["approx_kl"]) < 1e-6 and report["clip_fraction"] == 0
    # A Gaussian's actions are kept as drawn, beyond Pendulum's bounds of 2; only its environment
    # sees them clipped.
    assert name != "Pendulum-v1" or np.abs(action).max() > 3


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_plays(name):
    config = PPOConfig(**SMALL | VARIANTS[name])
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    for deterministic in (True, False):
        returns = ppo_jax.evaluate(config, agent, jax.random.key(1), 2, deterministic)
        assert np.isfinite(returns).all()


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("clip_range_vf", [None, 0.3])
def test_loss_by_hand(kind, normalize, clip_range_vf):
    rng = np.random.default_rng(1)
    obs, weights = rng.normal(size=(12, 3)), rng.normal(size=(3, 4))
    output, value = obs @ weights, obs @ np.array([0.5, -1.0, 2.0])
    if kind == "categorical":
        action, log_p = rng.integers(4, size=12), special.log_softmax(output, axis=-1)
        log_prob = log_p[np.arange(12), action]
        entropy = stats.entropy(np.exp(log_p), axis=-1).mean()
        policy = Categorical
    else:
        log_std = np.array([0.1, -0.2, 0.3, 0.0])
        action = output + rng.normal(size=output.shape)
        log_prob = stats.norm.logpdf(action, output, np.exp(log_std)).sum(-1)
        entropy = stats.norm.entropy(0, np.exp(log_std)).sum()

        def policy(mean):
            return DiagonalGaussian(mean, jnp.asarray(log_std, jnp.float32))

    old_log_prob = log_prob + rng.normal(scale=0.4, size=12)
    old_value = value + rng.normal(scale=0.5, size=12)
    advantage, target = rng.normal(1.0, 2.0, size=12), rng.normal(size=12)

    ratio, used = np.exp(log_prob - old_log_prob), advantage
    if normalize:
        used = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    policy_loss = -np.minimum(ratio * used, np.clip(ratio, 0.8, 1.2) * used).mean()
    clipped = value
    if clip_range_vf is not None:
        clipped = np.clip(value, old_value - 0.3, old_value + 0.3)
    expected = {
        "policy_loss": policy_loss,
        "value_loss": np.square(target - clipped).mean(),
        "entropy": entropy,
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "clip_fraction": (np.abs(ratio - 1) > 0.2).mean(),
    }
    assert 0 < expected["clip_fraction"] < 1
    total = policy_loss + 0.7 * expected["value_loss"] - 0.05 * entropy

    def apply(params, obs, memory, is_first):
        return Output(policy(obs @ params["policy"]), obs @ params["value"])

    def as_jax(x):
        return jnp.asarray(x, jnp.int32 if x.dtype == int else jnp.float32)

    params = {"policy": jnp.asarray(weights, jnp.float32), "value": jnp.array([0.5, -1.0, 2.0])}
    arrays = (obs, action, old_log_prob, old_value, advantage, target)
    batch = Batch(*map(as_jax, arrays))
    changes = dict(normalize_advantage=normalize, clip_range_vf=clip_range_vf)
    config = PPOConfig(vf_coef=0.7, ent_coef=0.05, **changes)
    network = types.SimpleNamespace(apply=apply)
    loss, report = ppo_jax.ppo_loss(params, config, network, batch)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert set(report) == set(expected)
    for name in expected:
        found = report[name]
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_asymmetric_clip_range_and_the_huber_loss():
    """By hand: ratios 0.5 and 2, advantages of both signs; errors within 1 and beyond."""
    ratio, advantage = np.array([0.5, 0.5, 2.0, 2.0]), np.array([1.0, -1.0, 2.0, -1.0])
    error = np.array([0.5, -0.5, 3.0, 1.0])

    def apply(params, obs, memory, is_first):
        return Output(Categorical(jnp.log(jnp.full((4, 2), 0.5))), jnp.zeros(4))

    changes = dict(clip_range=(0.1, 0.3), normalize_advantage=False)
    config = PPOConfig(vf_loss="huber", vf_coef=1.0, **changes)
    arrays = (np.zeros(4), np.zeros(4, int), np.log(0.5 / ratio), np.zeros(4), advantage, error)
    batch = Batch(*map(jnp.asarray, arrays))
    _, report = ppo_jax.ppo_loss({}, config, types.SimpleNamespace(apply=apply), batch)
    surrogate = np.minimum(advantage * ratio, advantage * np.clip(ratio, 0.9, 1.3))
    np.testing.assert_allclose(report["policy_loss"], -surrogate.mean(), rtol=1e-5)
    expected = np.mean([0.125, 0.125, 2.5, 0.5])
    np.testing.assert_allclose(report["value_loss"], expected, rtol=1e-5)
    assert report["clip_fraction"] == 1


def test_kl_stop_ends_each_agents_update_by_itself():
    """Vmapped over limits, each agent has the weights of a plain loop up to the first minibatch
    beyond its limit.
    """
    config = PPOConfig(n_envs=4, n_steps=16, batch_size=16, n_epochs=4)
    limits = jnp.array([1e-8, 0.0005, 0.002, 0.006, 1e3])
    agent = jit(ppo_jax.init_agent)(config, jax.random.key(0))
    network = ppo_jax.make_network(config)
    optimizer = ppo_jax.make_optimizer(config.replace(learning_rate=0.002))
    rng = np.random.default_rng(2)
    obs = jnp.asarray(rng.normal(size=(64, 4)), jnp.float32)
    action = jnp.asarray(rng.integers(2, size=64))
    advantage, target = jnp.asarray(rng.normal(size=(2, 64)), jnp.float32)

    @jit
    def act(params):
        distribution, value, _ = network.apply(params, obs)
        return Batch(obs, action, distribution.log_prob(action), value, advantage, target)

    @jit
    def step(params, opt_state, minibatch):
        gradient = jax.grad(ppo_jax.ppo_loss, has_aux=True)
        gradients, report = gradient(params, config, network, minibatch)
        changes, opt_state = optimizer.update(gradients, opt_state)
        return jax.tree.map(jnp.add, params, changes), opt_state, report["approx_kl"]

    batch, params, opt_state = act(agent.params), agent.params, agent.opt_state
    weights, divergence = [params], []
    in_order = np.broadcast_to(np.arange(64).reshape(4, 16), (4, 4, 16))
    for taken in in_order.reshape(16, 16):
        minibatch = jax.tree.map(lambda x: x[taken], batch)  # noqa: B023
        params, opt_state, kl = step(params, opt_state, minibatch)
        weights.append(params)
        divergence.append(float(kl))

    def run(limit):
        limited = config.replace(target_kl=limit, learning_rate=0.002)
        return ppo_jax.optimise(limited, agent, batch, jnp.asarray(in_order))

    agents, metrics = jit(jax.vmap(run))(limits)
    for row, limit in enumerate(limits):
        steps = next((step for step, kl in enumerate(divergence) if kl > 1.5 * limit), 16)
        assert metrics["optimizer_steps"][row] == steps
        ours = jax.tree.map(lambda x: x[row], agents.params)  # noqa: B023
        assert_same(ours, weights[steps], atol=1e-5)
        # Of the last epoch, the minibatch that ended it included.
        seen = divergence[: steps + 1]
        last_epoch = seen[(len(seen) - 1) // 4 * 4 :]
        found = metrics["approx_kl"][row]
        np.testing.assert_allclose(found, np.mean(last_epoch), rtol=1e-3, atol=1e-6)
    steps = metrics["optimizer_steps"].tolist()
    assert len(set(steps)) == len(limits) and steps[0] == 1 and steps[-1] == 16, (steps, divergence)


@pytest.fixture(scope="module")
def loop_run():
    """A run whose total_timesteps is no multiple of its rollouts of 320."""
    sizes = dict(total_timesteps=95_900, n_envs=16, n_steps=20, batch_size=80, n_epochs=3)
    changes = dict(net_arch=(16,), gamma=0.9, learning_rate="linear_0.01")
    config = PPOConfig(Loop(), **sizes, **changes)
    return config, *jit(ppo_jax.train)(config, jax.random.key(0))


def test_time_limits_are_no_terminations(loop_run):
    """Cut after 5 steps but bootstrapped, the value of reward 1 for ever is 1 / (1 - gamma) = 10;
    ended, below 5.

    The next episode may be of the other kind, so bootstrapping from its first observation is wrong
    too.
    """
    config, agent, _ = loop_run
    goes_on, ends = ppo_jax.make_network(config).apply(agent.params, jnp.eye(2)).value
    np.testing.assert_allclose(goes_on, 10.0, rtol=0.02)
    assert 1 < ends < 5


def test_metrics_of_a_run(loop_run):
    """A number for each update; the last rollout is completed; every minibatch of every epoch takes
    a step.
    """
    config, agent, metrics = loop_run
    assert config.n_updates == agent.n_updates == 300
    of_run = {"timesteps", "return", "length", "explained_variance"}
    of_run |= {"optimizer_steps", "skipped_steps"}
    of_loss = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
    assert set(metrics) == of_run | of_loss
    for name, values in metrics.items():
        assert values.shape == (300,) and np.all(np.isfinite(values)), name
    np.testing.assert_array_equal(metrics["timesteps"], 320 * np.arange(1, 301))
    np.testing.assert_array_equal(metrics["optimizer_steps"], np.full(300, 12))
    np.testing.assert_array_equal(metrics["return"], np.full(300, 5.0))
    np.testing.assert_array_equal(metrics["length"], np.full(300, 5.0))
    # The policy starts near uniform; a sum in place of a mean would show.
    np.testing.assert_allclose(metrics["entropy"][:3], np.full(3, np.log(2)), rtol=0.1)


def test_what_is_off_leaves_nothing_behind():
    config = PPOConfig()
    agent = jax.eval_shape(ppo_jax.init_agent, config, jax.random.key(0))
    assert agent.memory is agent.obs_statistics is None
    assert agent.discounted_return is agent.return_statistics is None
    _, rollout = jax.eval_shape(ppo_jax.collect_rollout, config, agent, jax.random.key(0))
    batch = jax.eval_shape(ppo_jax.make_batch, config, agent, rollout)
    assert rollout.task_id is rollout.memory is None
    assert batch.task_id is batch.is_first is batch.memory is None


def test_an_update_of_images_fits_into_three_times_a_gradients_memory():
    """The gradient of a minibatch of 1,024 images of 84 x 84 x 4 takes 877 MiB."""
    space = spaces.Box(0, 255, (84, 84, 4), jnp.uint8)

    def show(key, time):
        return jnp.ones((84, 84, 4), jnp.uint8)

    env = display(space, spaces.Discrete(4), show)
    sizes = dict(n_envs=64, n_steps=128, batch_size=1024, n_epochs=1, total_timesteps=8192)
    config = PPOConfig(env, policy="nature_cnn", net_arch=(), **sizes)
    agent = jax.eval_shape(ppo_jax.init_agent, config, jax.random.key(0))
    compiled = jit(ppo_jax.update).lower(config, agent).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * 877 * 2**20
