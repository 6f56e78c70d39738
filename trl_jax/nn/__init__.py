"""Layers. One alphabet of axes serves names, einsums and comments everywhere below:

    R  rows of a layout (streams)      T  tokens of a row             S  keys a query may see
    D  width of the residual stream    H  query heads                 K  key/value heads (H = K x G)
    G  query heads per key head        C  channels of one head        F  width of the MLP
    V  vocabulary                      L  layers (stacked, scanned)   P  preference pairs

Weights lie as on disk, (out, in). Parameters are float32; a layer computes in the dtype of what it is given.
"""
