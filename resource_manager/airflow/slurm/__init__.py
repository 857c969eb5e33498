"""Tasks whose jobs Slurm places: submitted by a worker, watched by the triggerer, one poll for all."""
