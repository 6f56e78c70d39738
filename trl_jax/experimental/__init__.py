"""Trainers under the names of TRL's modules `trl.experimental.*`; `trl_jax` itself has them, too."""
