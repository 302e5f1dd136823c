"""Jobs for SLURM."""
