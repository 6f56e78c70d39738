"""Layers. Axis letters, used in names, einsums and comments:

    E  examples of a batch             X  texts                       N  reads; queries of all rows, concatenated
    R  rows of a batch                 T  tokens of a row             S  keys that a query may attend to
    D  width of the residual stream    H  query heads                 K  key/value heads (H = K x G)
    G  query heads per key head        C  channels of one head        F  width of the MLP
    V  vocabulary                      L  layers (stacked, scanned)   B  keys of a block

A name may end in the axes of its array: `k_RTKC`. `v_T` is transposed, `d_scores` is a gradient.

Weights are stored as on disk, (out, in). Parameters are float32; a layer computes in the dtype of its input. Each
parameter has a metadata entry `axes` with its logical axes, from which `mesh.mesh` derives its sharding: embed (D),
heads (H x C), kv (K x C), mlp (F), vocab (V), experts, layers (L), norm, flat (a flattened matrix), or "" for others.
"""
