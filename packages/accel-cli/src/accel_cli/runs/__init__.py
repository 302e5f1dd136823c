"""The command `accelerate runs`: what was logged with `log_with="local"`, in the terminal or as a file."""
