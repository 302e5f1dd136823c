"""What checks an installation: the script that `accelerate test` runs, and its parts."""
