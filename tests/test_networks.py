"""Networks: their weights, how observations enter and actions leave, and modules of the user's."""

import math
from collections.abc import Sequence

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Match, display, echo
from flax import nnx
from gymnax.environments import spaces
from helpers import SMALL, VARIANTS, jit, rollout_and_batch
from scipy import special, stats

import ppo_jax
from ppo_jax import (
    Categorical,
    ConfigError,
    Convolution,
    DiagonalGaussian,
    Encoder,
    PPOConfig,
    init_agent,
    make_network,
    train,
)

LECUN = nn.initializers.lecun_normal()


def shapes(config):
    """Return the shapes of a config's parameters by path."""
    params = jax.eval_shape(init_agent, config, jax.random.key(0)).params["params"]
    return {name: leaf.shape for name, leaf in ppo_jax.named_leaves(params).items()}


# ------------------------------------------------------------------------------- initial weights


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 3, 2, 5)])
@pytest.mark.parametrize("scale", [0.01, math.sqrt(2)])
def test_orthogonal_is_orthonormal_times_scale(shape, scale):
    """As a matrix whose columns are the outputs: the shorter of its two sides is orthonormal."""
    weights = ppo_jax.orthogonal(scale)(jax.random.key(3), shape)
    weights = np.asarray(weights, np.float64).reshape(-1, shape[-1])
    is_tall = weights.shape[0] >= weights.shape[1]
    gram = weights.T @ weights if is_tall else weights @ weights.T
    np.testing.assert_allclose(gram / scale**2, np.eye(len(gram)), atol=1e-5)


def test_orthogonal_under_vmap_is_orthogonal_alone():
    draw, keys = ppo_jax.orthogonal(math.sqrt(2)), jax.random.split(jax.random.key(4), 3)
    together = jax.jit(jax.vmap(lambda key: draw(key, (6, 4))))(keys)
    for key, weights in zip(keys, together):
        np.testing.assert_allclose(weights, draw(key, (6, 4)), atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 0.1


@pytest.mark.parametrize(("env", "log_std_init"), [("CartPole-v1", 0.0), ("Pendulum-v1", -0.7)])
def test_initial_weights_are_those_of_the_reference(env, log_std_init):
    """Stable-Baselines3: gain sqrt(2) in hidden layers, 0.01 for the policy's last and 1 for the
    value's, biases 0.
    """
    config = PPOConfig(env, n_envs=2, log_std_init=log_std_init)
    network = make_network(config)
    obs = jnp.zeros(network.obs_spaces[""].shape)
    params = jit(network.init)(jax.random.key(5), obs)["params"]
    if env == "Pendulum-v1":
        np.testing.assert_allclose(params.pop("log_std"), [log_std_init])
    hidden = {f"{head}_{i}": math.sqrt(2) for head in ("policy", "value") for i in (0, 1)}
    gains = hidden | {"policy_out": 0.01, "value_out": 1.0}
    assert set(params) == set(gains)
    for name, gain in gains.items():
        singular = np.linalg.svd(np.asarray(params[name]["kernel"]), compute_uv=False)
        expected = np.full_like(singular, gain)
        np.testing.assert_allclose(singular, expected, rtol=1e-4, err_msg=name)
        assert not np.any(params[name]["bias"]), name


def test_without_ortho_init_weights_are_flaxs():
    """Normal ones of variance 1 / inputs, which are cut at two deviations."""
    config = PPOConfig("CartPole-v1", ortho_init=False, net_arch=(256, 256))
    network = make_network(config)
    kernel = network.init(jax.random.key(0), jnp.zeros(4))["params"]["policy_1"]["kernel"]
    np.testing.assert_allclose(np.std(kernel) * 16, 1, rtol=0.02)
    assert np.abs(kernel).max() * 16 < 2.3


# ----------------------------------------------------------------------------------- observations


def test_the_convolution_is_flaxs():
    images = jax.random.normal(jax.random.key(0), (5, 10, 9, 4))
    for stride in (1, 2):
        ours = Convolution(7, 3, stride, LECUN)
        params = ours.init(jax.random.key(1), images)
        flaxs = nn.Conv(7, (3, 3), strides=stride, padding="VALID").apply(params, images)
        np.testing.assert_allclose(ours.apply(params, images), flaxs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, layer", [("Breakout-MinAtar", "conv_0"), ("Pong-misc", "conv_1"), ("Catch-bsuite", None)]
)
def test_images_get_a_cnn_and_all_else_an_mlp(name, layer):
    found = shapes(PPOConfig(env=name, n_envs=1))
    if layer:
        assert f"shared_encoder/{layer}/kernel" in found
    else:
        assert not any("conv" in path for path in found)


def test_an_image_can_go_through_the_mlp():
    found = shapes(PPOConfig(env="Breakout-MinAtar", policy="mlp", net_arch=(8,)))
    assert found["policy_0/kernel"] == (400, 8)


def test_integer_observations_are_one_hot():
    config = PPOConfig(env="FrozenLake-misc", n_envs=3, net_arch=())
    agent = jit(init_agent)(config, jax.random.key(0))
    kernel = jax.random.normal(jax.random.key(1), (16, 4))
    params = agent.params["params"] | {"policy_out": {"kernel": kernel, "bias": jnp.zeros(4)}}
    output = make_network(config).apply({"params": params}, jnp.array([0, 5, 15]))
    expected = kernel[jnp.array([0, 5, 15])]
    np.testing.assert_allclose(output.distribution.logits, expected, rtol=1e-6)


DISCRETE = gymnasium.spaces.Discrete(3, start=5)
MULTI = gymnasium.spaces.MultiDiscrete([2, 3], start=[-1, 4])
GRID = gymnasium.spaces.MultiDiscrete([[2, 2], [3, 2]], start=[[0, 7], [-1, 0]])
TUPLE = gymnasium.spaces.Tuple([DISCRETE, MULTI])


@pytest.mark.parametrize(
    "space, obs, ones",
    [
        (DISCRETE, [5, 7], [[0], [2]]),
        (MULTI, [[-1, 4], [0, 6]], [[0, 2], [1, 4]]),
        (GRID, [[[0, 7], [-1, 0]], [[1, 8], [1, 1]]], [[0, 2, 4, 7], [1, 3, 6, 8]]),
        (TUPLE, ([5, 7], [[-1, 4], [0, 6]]), [[0, 3, 5], [2, 4, 7]]),
    ],
    ids=["discrete", "multi-discrete", "grid", "tuple"],
)
def test_one_hot_vectors_begin_at_a_spaces_start(space, obs, ones):
    obs = jax.tree.map(jnp.asarray, obs, is_leaf=lambda x: isinstance(x, list))
    hot = np.asarray(Encoder(ppo_jax.read_obs_space(space), "mlp", LECUN).apply({}, obs))
    expected = np.zeros_like(hot)
    for row, places in enumerate(ones):
        expected[row, places] = 1
    np.testing.assert_array_equal(hot, expected)


@pytest.mark.parametrize("space", [DISCRETE, MULTI, TUPLE], ids=["discrete", "multi", "tuple"])
def test_observations_that_begin_at_a_start_train(space):
    first = jax.tree.map(jnp.asarray, space.sample(), is_leaf=lambda x: isinstance(x, np.ndarray))
    env = display(space, spaces.Discrete(2), lambda key, time: first)
    agent, _ = jit(train)(PPOConfig(**SMALL | dict(env=env)), jax.random.key(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.params))


@pytest.mark.parametrize(
    "space, largest",
    [
        (spaces.Box(0, 10, (7, 7, 3), jnp.uint8), 10),
        (spaces.Box(0, 255, (7, 7, 3), jnp.uint8), 1),
        (spaces.Box(0, 255, (20,), jnp.uint8), 255),
        (spaces.Box(0, 255, (7, 7, 3), jnp.float32), 255),
    ],
)
def test_only_images_of_bytes_are_divided_by_255(space, largest):
    obs = jnp.full((2, *space.shape), space.high, space.dtype)
    features = Encoder(ppo_jax.read_obs_space(space), "mlp", LECUN).apply({}, obs)
    assert features.shape == (2, math.prod(space.shape))
    np.testing.assert_allclose(features, largest, rtol=1e-6)


@pytest.mark.parametrize("policy", ["nature_cnn", "cnn"])
def test_large_images_go_through_a_cnn(policy):
    space = spaces.Box(0, 255, (84, 84, 4), jnp.uint8)
    encoder = Encoder(ppo_jax.read_obs_space(space), policy, LECUN)
    images = jnp.zeros((2, 3, 84, 84, 4), jnp.uint8)
    params = jax.eval_shape(encoder.init, jax.random.key(0), images)
    features = jax.eval_shape(encoder.apply, params, images)
    assert features.shape == (2, 3, 512 if policy == "nature_cnn" else 128)
    if policy == "nature_cnn":  # the shapes of Stable-Baselines3's NatureCNN
        found = {name: leaf["kernel"].shape for name, leaf in params["params"].items()}
        assert found == {
            "conv_0": (8, 8, 4, 32),
            "conv_1": (4, 4, 32, 64),
            "conv_2": (3, 3, 64, 64),
            "features": (3136, 512),
        }


def test_a_cnn_without_images_is_refused():
    with pytest.raises(ConfigError, match=r"policy: 'nature_cnn' needs images .* 36 by 36"):
        train(PPOConfig(policy="nature_cnn"), jax.random.key(0))


def test_the_encoder_can_be_shared_or_not():
    base = dict(env="Breakout-MinAtar", n_envs=1, net_arch=(8,), net_arch_vf=(4,))
    shared, apart = (shapes(PPOConfig(share_features_extractor=x, **base)) for x in (True, False))
    convolution = "conv_0/kernel"
    assert f"shared_encoder/{convolution}" in shared
    assert shared.keys().isdisjoint({f"{head}_encoder/{convolution}" for head in LEGS})
    assert apart.keys() >= {f"{head}_encoder/{convolution}" for head in LEGS}
    assert shared["policy_0/kernel"] == (128, 8) and shared["value_0/kernel"] == (128, 4)


LEGS = ("policy", "value")


# ------------------------------------------------------------------------------ actions and masks


def test_masked_actions_have_no_probability_anywhere():
    config = PPOConfig(**SMALL | VARIANTS["masked"])

    def run(config, key):
        agent, rollout, batch, _ = rollout_and_batch(config, key)
        distribution = make_network(config).apply(agent.params, batch.obs).distribution
        return rollout, batch.obs["action_mask"], distribution, distribution.entropy()

    rollout, mask, distribution, entropy = jit(run)(config, jax.random.key(0))
    assert rollout.reward.min() >= 0
    probability = special.softmax(np.asarray(distribution.logits), axis=-1)
    assert 0 < np.mean(mask) < 1 and not probability[~np.asarray(mask)].any()
    np.testing.assert_allclose(entropy, stats.entropy(probability, axis=-1), rtol=1e-4)


MASKED = {  # actions, the mask's shape, a mask of two rows
    "discrete": (spaces.Discrete(4), (4,), [[1, 0, 1, 0], [0, 1, 1, 1]]),
    "multi-discrete": (
        gymnasium.spaces.MultiDiscrete([3, 2]),
        (5,),
        [[1, 0, 1, 0, 1], [0, 1, 0, 1, 1]],
    ),
    "multi-binary": (
        gymnasium.spaces.MultiBinary(2),
        (2, 2),
        [[[1, 0], [0, 1]], [[1, 1], [1, 0]]],
    ),
}


@pytest.mark.parametrize("kind", [jnp.float32, jnp.int32, jnp.bool_])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_counts_wherever_it_stands(name, is_nested, kind):
    action_space, shape, mask = MASKED[name]
    seen, mask_space = spaces.Box(-9, 9, (3,)), spaces.Box(0, 1, shape, kind)
    if is_nested:
        inner = spaces.Dict({"action_mask": mask_space, "seen": seen})
        space = spaces.Dict({"a": seen, "b": spaces.Dict({"c": inner})})
    else:
        space = spaces.Dict({"seen": seen, "action_mask": mask_space})

    def show(rows):
        part = jax.random.normal(jax.random.key(0), (*rows.shape[: -len(shape)], 3))
        inner = {"seen": part, "action_mask": rows}
        return {"a": part, "b": {"c": inner}} if is_nested else inner

    rows = jnp.array(mask, kind)
    env = display(space, action_space, lambda key, time: show(rows[0]))
    network = make_network(PPOConfig(env, net_arch=(8,)))
    params = network.init(jax.random.key(0), show(rows))
    distribution = network.apply(params, show(rows)).distribution
    drawn = distribution.sample(distribution.noise(jax.random.key(1), 1000))
    sizes = ppo_jax.Space(action_space).sizes
    allowed = np.split(np.reshape(mask, (2, -1)), np.cumsum(sizes)[:-1], axis=1)
    for part, choices in enumerate(allowed):
        for row in range(2):
            taken = np.asarray(drawn).reshape(1000, 2, -1)[:, row, part]
            assert set(taken.tolist()) == set(np.flatnonzero(choices[row]).tolist())
    count = [np.prod([choices[row].sum() for choices in allowed]) for row in range(2)]
    # The first weights are so small that all that may be chosen is about as likely.
    np.testing.assert_allclose(distribution.entropy(), np.log(count), atol=0.01)


def test_a_mask_is_not_among_the_features():
    space = Match(spaces.Discrete(6), "mask").observation_space(None)
    obs = {"shown": jnp.ones((2, 7)), "action_mask": jnp.ones((2, 6), bool)}
    assert Encoder(ppo_jax.read_obs_space(space), "mlp", LECUN).apply({}, obs).shape == (2, 7)


def test_bits_have_one_logit_each_without_a_mask():
    """As in Stable-Baselines3: the logit is that of a 1."""
    space = gymnasium.spaces.MultiBinary(4)
    config = PPOConfig(echo(space), net_arch=())
    assert shapes(config)["policy_out/kernel"] == (4, 4)
    kernel = jax.random.normal(jax.random.key(0), (4, 4))
    out = {"kernel": kernel, "bias": jnp.zeros(4)}
    value_out = {"kernel": jnp.zeros((4, 1)), "bias": jnp.zeros(1)}
    params = {"params": {"policy_out": out, "value_out": value_out}}
    obs = jax.random.normal(jax.random.key(1), (5, 4))
    distribution = make_network(config).apply(params, obs).distribution
    p = special.expit(np.asarray(obs @ kernel, np.float64))
    for bits in ([0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]):
        log_prob = distribution.log_prob(jnp.tile(jnp.array(bits), (5, 1)))
        expected = np.log(np.where(bits, p, 1 - p)).sum(-1)
        np.testing.assert_allclose(log_prob, expected, rtol=1e-4)
    np.testing.assert_array_equal(distribution.mode(), p > 0.5)
    entropy = stats.entropy(np.stack([p, 1 - p], axis=-1), axis=-1).sum(-1)
    np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-4)


# ------------------------------------------------------------------------- modules of the user's


class Own(nn.Module):
    """Ends in what `outputs` makes of a layer of 2 and a layer of 1."""

    outputs: object

    @nn.compact
    def __call__(self, obs):
        return self.outputs(nn.Dense(2)(obs), nn.Dense(1)(obs))


class OwnMemory(nn.Module):
    outputs: object

    @nn.compact
    def __call__(self, obs, memory):
        return self.outputs(nn.Dense(2)(obs), nn.Dense(1)(obs), memory)

    def initial_memory(self, n):
        return jnp.zeros((n, 3))


class Layers(nn.Module):
    widths: Sequence[int]

    @nn.compact
    def __call__(self, obs):
        for width in self.widths:
            obs = nn.tanh(nn.Dense(width)(obs))
        return Categorical(nn.Dense(2)(obs)), nn.Dense(1)(obs)[..., 0]


class OfNnx(nnx.Module):
    def __call__(self, obs):
        return Categorical(obs[..., :2]), obs[..., 0]


class Actor(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return Categorical(nn.Dense(2)(obs))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(1)(obs)[..., 0]


def fits(x, value):
    return Categorical(x), value[..., 0]


@pytest.mark.parametrize(
    "policy",
    [
        Own(fits),
        (Actor(), Critic()),
        OwnMemory(lambda x, value, memory: (*fits(x, value), memory + 1)),
        Layers((16, 16)),
    ],
    ids=["feed-forward", "pair", "memory", "layers"],
)
def test_a_module_of_ones_own_trains(policy):
    config = PPOConfig(**SMALL | dict(policy=policy))
    assert config.is_recurrent == isinstance(policy, OwnMemory)
    agent, metrics = jit(train)(config, jax.random.key(0))
    assert np.isfinite(metrics["value_loss"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(agent.params))


def three(x, value):
    return Categorical(jnp.concatenate([x, value], axis=-1)), value[..., 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "policy, words",
    [
        (
            Own(lambda x, value: (Categorical(x), value)),
            r"returns values of shape \(.*1\); .* \(8,\)",
        ),
        (Own(lambda x, value: (x, value[..., 0])), "is no distribution; return Categorical"),
        (Own(three), "among 3; it must serve Discrete"),
        (Own(lambda x, value: (DiagonalGaussian(x, x), value[..., 0])), "it must serve Discrete"),
        (Own(lambda x, value: Categorical(x)), "must return a distribution and values"),
        (Own(lambda x, value: (*fits(x, value), None)), "must return a distribution and values"),
        (OwnMemory(lambda x, value, memory: fits(x, value)), "the memory after the step"),
        ((Actor(), nn.Dense(1)), r"values of shape \(8, 1\)"),
        ((Actor(), Actor()), "returns values of shape"),
    ],
    ids=["values", "logits", "three", "gaussian", "no value", "extra", "memory", "pair", "actors"],
)
def test_a_module_that_returns_what_cannot_be_used_is_refused(policy, words):
    config = PPOConfig("CartPole-v1", n_envs=8, n_steps=16, policy=policy)
    with pytest.raises(ConfigError, match=f"(?s)policy: .*{words}"):
        train(config, jax.random.key(0))


@pytest.mark.parametrize(
    "policy, words",
    [
        (Layers([16, 16]), "hashable: a tuple in place of each list"),
        (OfNnx(), "a Flax Linen module"),
        (Actor, r"a Flax Linen module as in Net\(\)"),
        (None, "a Flax Linen module"),
        (42, "a Flax Linen module"),
        (lambda obs: obs, "a Flax Linen module"),
        ((Actor(), 42), "a Flax Linen module"),
        ((Actor(),), "two of these"),
        ("grru", "gru"),
    ],
    ids=["list", "nnx", "class", "none", "number", "function", "half", "one", "word"],
)
def test_what_is_no_policy_is_refused(policy, words):
    with pytest.raises(ConfigError, match=f"policy: .*{words}"):
        PPOConfig(policy=policy)
