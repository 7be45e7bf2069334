"""Adapters: other packages' models, and their own samplers, under any method.

`kvjax.adapters.tunix` is for google-tunix, `kvjax.adapters.gemma` for gemma (google-deepmind). Each is imported by its
name, since each needs its package. They do for a package's attention layer what `docs/your_model.md` does for a decoder
of your own: queries, keys and values go to `kvjax.custom_decoder.attend` in place of the package's cache.
"""
