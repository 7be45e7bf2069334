"""Any method inside a decoder that is not kvjax's: the cache of one layer, and attention that reads and fills it.

    from kvjax import custom_decoder

    rope = custom_decoder.Rope(head_dim, theta=10_000.0)
    specs = custom_decoder.specs_of(num_layers, heads, kv_heads, head_dim, rope=rope)
    cache = custom_decoder.attach("snapkv:budget=256", specs, capacity=4096)  # {0: LayerCache, 1: LayerCache, ..}

    out, cache[i] = custom_decoder.attend(cache[i], q, k, v, positions)  # in layer i, in place of its attention
    cache = custom_decoder.finish(cache)  # after the prompt; a few methods need it

`docs/your_model.md` leads through it.
"""

from kvjax.core.rope import Rope, RopeScaling
from kvjax.custom_decoder.after_prompt import finish
from kvjax.custom_decoder.layer_attention import attend
from kvjax.custom_decoder.layer_cache import LayerCache, attach
from kvjax.custom_decoder.layer_specs import specs_of
from kvjax.custom_decoder.rope_check import check_rope

__all__ = ["LayerCache", "Rope", "RopeScaling", "attach", "attend", "check_rope", "finish", "specs_of"]
