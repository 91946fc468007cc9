"""A Transformer that writes text character by character: Python's documentation, or your own file.

python -m haikutrain.main --config=experiments/char_lm.py
python -m haikutrain.main --config=experiments/char_lm.py:bfloat16 --config.text_file=FILE

3 minutes of processor time on 2 CPU cores; 2.17 bits per character on the last tenth of CPython
3.11's topics, of which it saw no character in training (a model of pairs of characters: 3.45).

The network is GPT-2's in small (norms before, learned positions, normal(0.02) weights; Radford et
al., 2019); AdamW that decays matrices alone, clipping at 1 and warm-up with half a cosine are
GPT-3's (Brown et al., 2020), with a higher rate and b2 for a net this small. The figure above is
float32's. That `:bfloat16` and `:float16` (with a dynamic loss scale, which is in the checkpoint)
follow float32's losses was checked for a few steps; their speed on accelerators was not.
"""

import functools
import math
import pathlib
import pydoc_data.topics

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import haikutrain


def get_config(variant=""):
    config = haikutrain.base_config()
    config.experiment = ":CharLM"
    config.text_file = ""  # A text in UTF-8; if empty, the topics of CPython's `help()`.
    config.num_steps = 800
    config.batch_size = 32
    config.accumulate_steps = 1
    config.grad_clip_norm = 1.0
    config.log_every = 50
    config.eval_every = 200
    config.checkpoint_every = 200
    config.best_metric = "bits_per_character"
    config.best_mode = "min"
    config.context = 64  # Characters that the network sees.
    config.width = 128
    config.layers = 2
    config.heads = 4
    config.dropout = 0.1
    config.sample_length = 256  # Characters written at each evaluation.
    config.optimizer = haikutrain.optimizer_config()  # Adam; warm-up, then half a cosine.
    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_steps = 50
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.optimizer.decay_exclude = ("b", "offset", "scale", "embeddings", "positions")
    if variant:  # "bfloat16" or "float16".
        config.precision = f"params=float32,compute={variant},output=float32"
    return config


class Transformer(hk.Module):
    """Characters `[B, T]` to the logits of the character after each, `[B, T, alphabet]`."""

    def __init__(self, config, alphabet):
        super().__init__()
        self.config, self.alphabet = config, alphabet

    def __call__(self, codes, is_training):
        c, length = self.config, codes.shape[1]
        init = hk.initializers.RandomNormal(0.02)

        def norm(x):
            return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

        def dropout(x):
            return hk.dropout(hk.next_rng_key(), c.dropout, x) if is_training else x

        positions = hk.get_parameter("positions", [c.context, c.width], init=init)
        x = dropout(hk.Embed(self.alphabet, c.width, w_init=init)(codes) + positions[:length])
        causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
        for _ in range(c.layers):
            h = norm(x)
            attention = hk.MultiHeadAttention(c.heads, c.width // c.heads, w_init=init)
            x += dropout(attention(h, h, h, causal))
            h = jax.nn.gelu(hk.Linear(4 * c.width, w_init=init)(norm(x)))
            x += dropout(hk.Linear(c.width, w_init=init)(h))
        return hk.Linear(self.alphabet, w_init=init)(norm(x))


class CharLM(haikutrain.Experiment):
    def __init__(self, config):
        super().__init__(config)
        text = read(config.text_file)
        split = len(text) * 9 // 10
        if len(text) - split < config.context:
            raise haikutrain.UsageError(
                f"the text has {len(text)} characters; its last tenth is held out and must have "
                f"at least config.context={config.context}: give a longer text"
            )
        self.alphabet = "".join(sorted(set(text)))
        # The last character for training is what the first held-out one is guessed from.
        self.training, self.held_out = text[:split], text[split - 1 :]

    def codes(self, text):
        """The characters' numbers in the alphabet, int32 `[N]`."""
        return np.array([self.alphabet.index(character) for character in text], np.int32)

    def loss(self, batch, is_training):
        logits = Transformer(self.config, len(self.alphabet))(batch["input"], is_training)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
        losses = (losses * batch["weight"]).mean(-1)
        return losses, {"bits_per_character": losses / math.log(2)}

    def optimizer(self):
        return haikutrain.make_optimizer(self.config.optimizer, self.config.num_steps)

    def train_data(self):
        c = self.config
        return RandomWindows(self.codes(self.training), c.context, c.batch_size, c.seed)

    def eval_data(self):
        c, text = self.config, self.codes(self.held_out)
        first = np.arange(0, len(text) - 1, c.context)
        # The last window begins early, so as to be full, and counts only what is new in it.
        starts = np.minimum(first, len(text) - 1 - c.context)
        new = starts[:, None] + np.arange(c.context) >= first[:, None]
        weight = (new / new.mean()).astype(np.float32)
        arrays = windows(text, starts, c.context) | {"weight": weight}
        return haikutrain.ArrayDataset(arrays, c.batch_size)

    def report(self, state, split, rows):
        """What the network writes after the beginning of the held-out text."""
        params = jax.device_get(haikutrain.averaged(state).params)
        key = jax.random.fold_in(jax.random.key(self.config.seed), int(state.step))
        codes = self.write(params, self.codes(self.held_out[: self.config.context]), key)
        return {"sample": "".join(self.alphabet[code] for code in codes)}

    @functools.cached_property
    def write(self):
        """Of params, a window of text `[T]` and a key: the characters that follow, `[N]`."""
        network = hk.transform(lambda x: Transformer(self.config, len(self.alphabet))(x, False))

        def add(params, window, key):
            logits = network.apply(params, None, window[None])[0, -1]
            code = jax.random.categorical(key, logits)
            return jnp.append(window[1:], code), code

        def write(params, window, key):
            keys = jax.random.split(key, self.config.sample_length)
            return lax.scan(functools.partial(add, params), window, keys)[1]

        return jax.jit(write)


class RandomWindows:
    """Windows of a text from anywhere in it: batch number s depends on the seed and s alone."""

    def __init__(self, text, context, batch_size, seed):
        self.text, self.context, self.batch_size, self.seed = text, context, batch_size, seed
        self.num_examples = len(text) - context

    def batch(self, step, rows=slice(None)):
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(self.num_examples, size=self.batch_size)
        return windows(self.text, starts[rows], self.context)


def windows(text, starts, context):
    """`context` characters from each of `starts` on, and the characters after each of them."""
    index = starts[:, None] + np.arange(context)
    weight = np.ones(index.shape, np.float32)
    return {"input": text[index], "target": text[index + 1], "weight": weight}


def read(path):
    """The text of a file; without one, each paragraph of CPython's topics once."""
    if not path:
        topics = pydoc_data.topics.topics
        paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
        return "\n\n".join(dict.fromkeys(paragraphs))
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise haikutrain.UsageError(f"config.text_file={path!r} cannot be read: {error}") from error
