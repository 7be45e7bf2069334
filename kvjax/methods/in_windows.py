"""The word in a method's string that has the other methods work in layers with a sliding window too."""

from __future__ import annotations

from kvjax import method_api as kv


@kv.register_method(family="exact")
def in_windows() -> kv.Method:
    """Has the other methods of a string, as in 'h2o + in_windows', work in layers with a sliding window too.

    Without it such a layer holds the tokens of its window, which its queries can see, under the codecs of the method
    alone, and a budget of the whole model is divided among the layers without a window. With it, `full` keeps all
    tokens in every layer.

    Formula:
      a layer with a window W holds what the method leaves of all tokens, where it else holds those after t - W; its
      queries see the tokens after t - W either way

    Differs:
      There is no paper.

    Reference:
      kvjax's own; the rings that it does without: Mistral 7B, Jiang et al. 2023, arXiv 2310.06825, section 2
    """
    return kv.Method(windowed="method")
