"""The engine: how tokens run through the decoder under a KV-cache method. Pure functions of arrays and pytrees.

One driver serves every pass. `run_layer` is jitted with the bound layer as a static argument. Called eagerly, a pass is
one compiled program for each *distinct* layer, so a deep model compiles as fast as a shallow one. Called under the
caller's own `jax.jit`, `scan`, `vmap` or `grad`, the same code is one program for the whole model.

    mode             attention in a layer reads                              the layer holds after the pass
    FullPrefill      the prompt itself, exactly                              its cache state
    ChunkedPrefill   all chunks so far, exactly, or the cache state          its exact prompt, or its cache state
    PromptReplay     the prompt and a copy of one of its chunks              the prompt with scores (KVzip, KVgrad)
    Decode           the cache state and the new tokens                      the cache state with the new tokens

A layer without keys and values of its own reads what a layer below it holds after the same pass, or the prompt's exact
keys and values of that layer (`LayerInputs.source`, `kvjax.cache.reading_layer`). A layer with a recurrence holds its
state in every mode; a copy under `PromptReplay` begins with it and leaves it as it is (`kvjax.cache.recurrent_layer`).

Modes that serve one feature are defined in its file: prompts after a shared prefix (Hydragen), several prompts in one
sequence (Prepacking), prompts that are run only in part (CacheBlend).

The life of a prompt: `prefill` embeds it and calls `run_layers`; in each layer the decoder makes q, k and v and calls
`FullPrefill.attend`, which computes exact causal attention and has `BoundLayer.prefill` turn k and v into the layer's
cache state; the last token's hidden vector becomes logits. `extend` does the same under `Decode`.
"""
