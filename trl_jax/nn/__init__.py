"""Layers. One alphabet of axes serves names, einsums and comments everywhere below:

    E  examples of a batch             X  texts                       N  reads; queries of all rows end to end
    R  rows of a batch                 T  tokens of a row             S  keys a query may see
    D  width of the residual stream    H  query heads                 K  key/value heads (H = K x G)
    G  query heads per key head        C  channels of one head        F  width of the MLP
    V  vocabulary                      L  layers (stacked, scanned)   B  keys of a block

A name may end in the axes of its array: `k_RTKC`. `v_T` is transposed, `d_scores` a gradient.

Weights lie as on disk, (out, in). Parameters are float32; a layer computes in the dtype of its input. Each parameter
has the metadata `axes`, what its axes count, for `mesh.sharding` to divide: embed (D), heads (H x C), kv (K
x C), mlp (F), vocab (V), experts, layers (L), norm, flat (the numbers of a matrix, end to end), or "" for anything
else.
"""
